"""Small helpers for what people read on a terminal. rich is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def plain(text: object) -> Text:
    """Text whose brackets mean nothing."""
    from rich.text import Text
    return Text(str(text))


def table(*columns: str) -> Table:
    """An empty table whose cells fold instead of being cut."""
    from rich import box
    from rich.table import Table
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column == columns[0])
    return made
