"""Why can I not connect: what `cosmos-actor doctor` and `check --live` look at, and what follows from it."""
