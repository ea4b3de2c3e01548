"""Logarithmic charts of a residual history in characters."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["ResidualChart"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 9
_WIDTH = 64


@attrs.frozen(kw_only=True)
class ResidualChart:
    """Relative residual over the iteration number, one column per iteration or more.

    Attributes:
        history: Positive numbers or zero, the starting residual first.
        height: Rows of text, at most.
    """

    history: Sequence[float]
    height: int = 8

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = _bins(self.history, max(8, min(_WIDTH, options.max_width - _LABEL_WIDTH - 2)))
        low = math.floor(min(columns))
        high = max(math.ceil(max(columns)), low + 1)
        # Whole decades per row, so that the labels are powers of ten.
        decades = math.ceil((high - low) / self.height)
        rows = math.ceil((high - low) / decades)
        low = high - rows * decades
        steps = [round((value - low) / decades * 8) for value in columns]
        style = Style(color="cyan")
        for row in range(rows - 1, -1, -1):
            cells = [max(0, min(8, step - row * 8)) for step in steps]
            text = "".join(
                _BLOCKS[cell] if not options.ascii_only else (" " if cell < 4 else "#") for cell in cells
            )
            # The label belongs to the upper edge of its row.
            label = f"1e{low + (row + 1) * decades:+03d}"
            yield Segment(f"{label:>{_LABEL_WIDTH}} ")
            yield Segment(text, style)
            yield Segment.line()
        last = f"{len(self.history) - 1}"
        room = max(1, len(columns) - 1 - len(last))
        axis = f"0{'iteration' if room > len('iteration') else '':^{room}}{last}"
        yield Segment(f"{'':>{_LABEL_WIDTH}} {axis}")
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LABEL_WIDTH + 10, min(options.max_width, _LABEL_WIDTH + 2 + _WIDTH))


def _bins(history: Sequence[float], width: int) -> list[float]:
    """Decimal logarithms, the largest of each bin; a residual of zero counts as the smallest other one."""
    positive = min((value for value in history if value > 0.0), default=1.0)
    logs = [math.log10(max(value, positive)) for value in history]
    if len(logs) <= width:
        return logs
    edges = [index * len(logs) // width for index in range(width + 1)]
    return [max(logs[first:last]) for first, last in pairwise(edges)]
