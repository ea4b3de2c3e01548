"""Tables of devices for notebooks, which show known facts and do not ask the devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_table"]


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table in HTML with text cells.

    Args:
        head: The first row.
        rows: The others.
    """
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(kind: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(str(cell))}</{kind}>' for cell in cells)}</tr>"
