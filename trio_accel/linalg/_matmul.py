"""Matrix products."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import MatmulSpec, product_shape
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import BlasActor
from ._checks import same_dtype

__all__ = ["Matmul", "matmul"]


@attrs.define(eq=False, on_setattr=None)
class Matmul(Operation[BlasActor, AccelRef]):
    """The product of two arrays by the rules of `numpy.matmul`; see `matmul`."""

    a: Operand
    b: Operand
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the product."""
        a = planner.read("a", self.a)
        b = planner.read("b", self.b)
        dtype = a.dtype if a.dtype is b.dtype else same_dtype(planner.name, a=a, b=b)
        out = planner.output(product_shape(planner.name, a.shape, b.shape), dtype, self.out)
        if self.out is not None:
            planner.distinct("out", out.spec, a=a, b=b)
        return Planned(MatmulSpec(a, b, out.spec), out)


async def matmul(a: Operand, b: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Matrix product of two arrays on a device, as `numpy.matmul` (cuBLAS ``gemm``).

    Operands of more than two axes are stacks of matrices and broadcast against each other; one
    with a single axis is a row (`a`) or column (`b`), whose axis is dropped from the result.

    Args:
        a: Array of shape (..., m, k) or (k,).
        b: Array of shape (..., k, n) or (k,), of the same dtype.
        out: Array of the result's shape and dtype to write to; by default a new one.

    Returns:
        The product, of shape (..., m, n) and the dtype of the operands.

    Raises:
        ValueError: Shapes that do not fit, or an `out` of another shape or sharing memory.
        TypeError: Neither operand is on a device, or their dtypes differ.
        NotSupportedError: The backend has no product of this dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("matmul", a, b, out).ask(Matmul(a, b, out))
