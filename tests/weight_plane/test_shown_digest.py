"""A digest is shown alike wherever it is."""

from __future__ import annotations

import re

from cosmos_actor.weight_plane.shown_digest import DIGITS, shown
from tests.project.source import ROOT


def test_the_first_digits_or_a_word_for_none():
    assert shown("0123456789abcdef") == "0123456789ab" and shown("") == "unknown" and shown("", "–") == "–"


def test_nobody_who_shows_a_digest_of_weights_has_a_number_of_digits_of_its_own():
    for name in ("job/weights.py", "cli/weights.py", "cli/status.py"):
        text = (ROOT / "cosmos_actor" / name).read_text()
        assert "shown(" in text and not re.search(rf"\[:{DIGITS}\]|\[:DIGITS\]", text), name
