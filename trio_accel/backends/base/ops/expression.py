"""Expressions over arrays: element by element, and reduced along axes."""

from __future__ import annotations

from ._array import ArraySpec
from ._roles import exact, packed, reads, writes
from ._spec import OperationSpec, specification

__all__ = ["ElementwiseSpec", "ReductionSpec"]


@specification
class ElementwiseSpec(OperationSpec):
    """An expression of arrays and numbers, computed for each element.

    Attributes:
        expression: The expression and its types, as `SpecializedExpression.encode` of
            `trio_accel.backends.base.expressions` writes them.
        arrays: Arrays that are read element by element, broadcast to the shape of the results by strides of
            zero.
        loaded: Arrays that elements are loaded from, as they lie; an array may be in both.
        results: The results, in C order.
        scalars: Numbers, 16 bytes for each.
    """

    expression: str = exact()
    arrays: tuple[ArraySpec, ...] = reads(many=True)
    loaded: tuple[ArraySpec, ...] = reads(many=True)
    results: tuple[ArraySpec, ...] = writes(many=True)
    scalars: bytes = packed()


@specification
class ReductionSpec(OperationSpec):
    """An expression of arrays and numbers, reduced along axes.

    Attributes:
        reduction: The reduction and its types, as `SpecializedReduction.encode` writes them.
        axes: The axes of `arrays` that are reduced, in order.
        arrays: Arrays, broadcast to one shape by strides of zero.
        out: The result, in C order, with or without the reduced axes.
        scalars: Numbers, 16 bytes for each.
    """

    reduction: str = exact()
    axes: tuple[int, ...] = exact()
    arrays: tuple[ArraySpec, ...] = reads(many=True)
    out: ArraySpec = writes()
    scalars: bytes = packed()
