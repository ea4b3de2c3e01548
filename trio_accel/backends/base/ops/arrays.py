"""Specifications of functions of arrays that are no expression alone."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ._array import ArraySpec, exact, packed, reads, updates
from ._spec import OperationSpec, specification

__all__ = ["Reduce", "ScatterSpec"]

Reduce: TypeAlias = Literal["set", "add", "multiply", "min", "max"]
"""How a value is combined with the element at its place: it takes its place, or is added to it, and so on."""


@specification
class ScatterSpec(OperationSpec):
    """Values of an expression, each combined with an element of an array at a place that is computed, too.

    Values for one place come in any order. An index that is outside fails the operation.

    Attributes:
        expression: The expression and its types, as `SpecializedExpression.encode` writes them. Its indices
            are checked. It has two results: a load from `out`, whose indices are the place, and the value, of
            the dtype of `out`.
        reduce: How values are combined with elements.
        arrays: Arrays that are read element by element, at least one, broadcast by strides of zero.
        out: The array.
        scalars: Numbers, 16 bytes for each.
    """

    expression: str = exact()
    reduce: Reduce = exact()
    arrays: tuple[ArraySpec, ...] = reads(many=True)
    out: ArraySpec = updates()
    scalars: bytes = packed()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.arrays[0].shape

    @property
    def results(self) -> tuple[ArraySpec, ...]:
        """Arrays that are written element by element: none."""
        return ()

    @property
    def loaded(self) -> tuple[ArraySpec, ...]:
        """Arrays that the indices of loads are for."""
        return (self.out,)
