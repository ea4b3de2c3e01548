"""The product of arrays, and letters of the BLAS."""

from __future__ import annotations

from typing import Literal

from ._array import ArraySpec
from ._roles import reads, writes
from ._shapes import check_one_dtype, product_shape, refuse_shapes
from ._spec import OperationSpec, specification

__all__ = ["MatmulSpec", "Side", "Transpose"]

Transpose = Literal["N", "T", "C"]
"""As it is, transposed, or transposed and conjugated: the BLAS's letters."""

Side = Literal["L", "R"]
"""Whether a matrix is the left or the right factor."""


@specification
class MatmulSpec(OperationSpec):
    """``out = a @ b`` with the shape rules of `numpy.matmul` for operands of one or more axes.

    All three have one dtype. ``out`` is C-contiguous and overlaps neither operand.
    """

    a: ArraySpec = reads()
    b: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        a, b, out = self.a, self.b, self.out
        shape = product_shape(name, a.shape, b.shape)
        if out.shape != shape:
            refuse_shapes(name, self, f"out must have the shape {shape} of the product", a=a, b=b, out=out)
        if a.dtype is not b.dtype or a.dtype is not out.dtype:
            check_one_dtype(name, self, a=a, b=b, out=out)
