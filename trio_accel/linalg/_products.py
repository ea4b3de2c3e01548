"""Products of matrices."""

from __future__ import annotations

import attrs

from ..backends.base.ops import ArraySpec, GemmSpec, MatmulSpec, Transpose, product_shape
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import BlasOperation
from ._checks import accumulated, factors, same_dtype

__all__ = ["Gemm", "Matmul", "gemm", "matmul"]


@attrs.define(eq=False, on_setattr=None)
class Matmul(BlasOperation[AccelRef]):
    """The product of two arrays by the rules of `numpy.matmul`; see `matmul`."""

    a: Operand
    b: Operand
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the product."""
        a = planner.read("a", self.a)
        b = planner.read("b", self.b)
        dtype = a.dtype if a.dtype is b.dtype else same_dtype(planner.name, a=a, b=b)
        out = planner.output(product_shape(planner.name, a.shape, b.shape), dtype, self.out)
        if self.out is not None:
            planner.distinct("out", out.spec, a=a, b=b)
        return Planned(MatmulSpec(a, b, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Gemm(BlasOperation[AccelRef]):
    """``alpha * op(a) @ op(b) + beta * c``; see `gemm`."""

    alpha: complex
    a: Operand
    b: Operand
    beta: complex = 0.0
    c: AccelRef | None = None
    trans_a: Transpose = "N"
    trans_b: Transpose = "N"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes and letters, and name the result."""
        name = planner.name
        a = planner.read("a", self.a)
        b = planner.read("b", self.b)
        rows, inner_a = _shape(name, "a", a, self.trans_a)
        inner_b, columns = _shape(name, "b", b, self.trans_b)
        if inner_a != inner_b:
            raise ValueError(
                f"{name}: op(a) must have as many columns as op(b) rows, got {inner_a} and {inner_b} "
                f"(a of shape {a.shape} {self.trans_a}, b of shape {b.shape} {self.trans_b})"
            )
        ref, c = accumulated(planner, "c", self.c, self.beta, (rows, columns), a=a, b=b)
        alpha, beta = factors(planner, self.alpha, self.beta, c.dtype)
        return Planned(GemmSpec(alpha, beta, self.trans_a, self.trans_b, a, b, c), ref)


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
    return await device_of("matmul", a, b, out).ask(Matmul(a, b, out))


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
    return await device_of("gemm", a, b, c).ask(Gemm(alpha, a, b, beta, c, trans_a, trans_b))


def _shape(name: str, argument: str, matrix: ArraySpec, transpose: object) -> tuple[int, int]:
    if matrix.ndim != 2:
        raise ValueError(
            f"{name}: {argument} must have two axes, got shape {matrix.shape}; use matmul for stacks"
        )
    if transpose not in ("N", "T", "C"):
        raise ValueError(f"{name}: trans_{argument} must be 'N', 'T' or 'C', got {transpose!r}")
    rows, columns = matrix.shape
    return (rows, columns) if transpose == "N" else (columns, rows)
