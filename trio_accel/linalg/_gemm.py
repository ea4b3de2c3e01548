"""Matrix products with factors and transposes."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import ArraySpec, GemmSpec, Transpose
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import BlasActor
from ._checks import accumulated, factors

__all__ = ["Gemm", "gemm"]


@attrs.define(eq=False, on_setattr=None)
class Gemm(Operation[BlasActor, AccelRef]):
    """``alpha * op(a) @ op(b) + beta * c``; see `gemm`."""

    alpha: complex
    a: Operand
    b: Operand
    beta: complex = 0.0
    c: AccelRef | None = None
    trans_a: Transpose = "N"
    trans_b: Transpose = "N"
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

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
        c: Matrix of shape (m, n) and the same dtype, which is changed; by default a new one.
        trans_a: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.
        trans_b: The same for `b`.

    Returns:
        The reference `c`, or a new one.

    Raises:
        ValueError: Shapes that do not fit, not two axes, an unknown letter, a beta without `c`, or a
            `c` that shares memory with an operand.
        TypeError: Dtypes that differ, or a factor that they cannot hold.

    See `Device.ask` for cancellation and the errors that any operation can end with. If the
    operation fails on the device, `c` is damaged and its use refused.
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
