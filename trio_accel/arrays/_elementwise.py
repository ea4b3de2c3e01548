"""Functions that are computed for each element, by the array API standard: one expression each."""

from __future__ import annotations

from functools import partial

from ..devices import AccelRef
from ..expressions import ExpressionArgument, expression
from ._actor import LIBRARY

__all__ = ["add", "sqrt"]

_expression = partial(expression, library=LIBRARY)


@_expression("x1 + x2")
async def add(x1: ExpressionArgument, x2: ExpressionArgument, *, out: AccelRef | None = None) -> AccelRef:
    """Add two arrays, element by element."""
    ...


@_expression("sqrt(x)")
async def sqrt(x: ExpressionArgument, *, out: AccelRef | None = None) -> AccelRef:
    """Compute the square root of each element: NaN for negative ones."""
    ...
