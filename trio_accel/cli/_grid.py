"""The one table that all demos print their figures in."""

from __future__ import annotations

from rich import box
from rich.table import Table

__all__ = ["grid"]


def grid(*headings: str) -> Table:
    """Make a table with a line below its head; ``>`` in front of a heading puts its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table
