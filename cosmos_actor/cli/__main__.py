"""`python -m cosmos_actor.cli` is `cosmos-actor`, for where no script is on the path."""

import sys

from cosmos_actor.cli import main

sys.exit(main())
