"""Products of matrices."""

from __future__ import annotations

from typing import Any, Final

from ..backends.base.ops import MatmulSpec, Transpose, product_shape
from ..devices import AccelRef, Operand, Planned, Planner, operation
from ._actor import BlasActor

__all__ = [
    "Gemm", "Matmul", "gemm", "matmul",
]  # fmt: skip


def _plan_matmul(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by the rules of `numpy.matmul`, which drops axes; and it is what is asked most."""
    a = planner.read("a", message.a)
    b = planner.read("b", message.b)
    if a.dtype is not b.dtype:
        raise TypeError(
            f"{planner.name}: operands must have one dtype, got a {a.dtype}, b {b.dtype}; use cast()"
        )
    out = planner.output(product_shape(planner.name, a.shape, b.shape), a.dtype, message.out)
    if message.out is not None:
        planner.distinct("out", out.spec, a=a, b=b)
    return Planned(MatmulSpec(a, b, out.spec), out, is_checked=True)


@operation(actor=BlasActor, plan=_plan_matmul)
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
    """
    ...


@operation("a^trans_a(m, k), b^trans_b(k, n) -> c(m, n)", actor=BlasActor)
async def gemm(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex = 0.0,
    c: AccelRef | None = None,
    trans_a: Transpose = "N",
    trans_b: Transpose = "N",
) -> AccelRef:
    """Matrix product with factors: ``alpha * op(a) @ op(b) + beta * c`` (BLAS and cuBLAS ``gemm``).

    The order of the arguments is that of `scipy.linalg.blas.dgemm`.

    Args:
        alpha: Factor of the product; real unless the matrices are complex.
        a: Matrix with op(a) of shape (m, k), of a floating or complex dtype.
        b: Matrix with op(b) of shape (k, n), of the same dtype.
        beta: Factor of `c`; where it is 0, `c` is only written, whatever it holds.
        c: Matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        trans_a: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.
        trans_b: The same for `b`.

    Returns:
        The reference `c`, or a new one.
    """
    ...


Matmul: Final = matmul.message
Gemm: Final = gemm.message
