"""Vector operations: the first level of the BLAS."""

from __future__ import annotations

from typing import Final

from ..backends.base.checks import INEXACT
from ..devices import AccelRef, Operand, operation
from ._actor import BlasActor

__all__ = [
    "Asum", "Axpy", "Dot", "Iamax", "Nrm2", "Rot", "Scal", "Swap", "asum", "axpy", "dot", "iamax",
    "nrm2", "rot", "scal", "swap",
]  # fmt: skip


@operation("x(*), y(*) -> y", actor=BlasActor)
async def axpy(alpha: complex, x: Operand, y: AccelRef) -> AccelRef:
    """Add a multiple of one array to another in place: ``y = alpha * x + y`` (BLAS ``axpy``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Array of any shape and a floating or complex dtype.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The reference `y`.
    """
    ...


@operation("x(*) -> x", actor=BlasActor)
async def scal(alpha: complex, x: AccelRef) -> AccelRef:
    """Multiply an array by a number in place: ``x = alpha * x`` (BLAS ``scal``).

    Args:
        alpha: Factor; real unless the array is complex.
        x: Array of any shape and a floating or complex dtype, which is changed.

    Returns:
        The reference `x`.
    """
    ...


@operation("x(n), y(n) -> out()", actor=BlasActor)
async def dot(x: Operand, y: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of the products of two vectors, without conjugation (BLAS ``dot``, ``dotu``).

    Args:
        x: Vector of shape (n,).
        y: Vector of the same shape and dtype.
        out: Array without axes to write to; by default a new one.

    Returns:
        An array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation("x(n) -> out: real()", actor=BlasActor, dtypes=INEXACT)
async def nrm2(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Euclidean norm of a vector, without needless overflow or underflow (BLAS ``nrm2``).

    Args:
        x: Vector of shape (n,) and a floating or complex dtype.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation("x(n) -> out: real()", actor=BlasActor, dtypes=INEXACT)
async def asum(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of ``abs(x.real) + abs(x.imag)`` over a vector (BLAS ``asum``).

    Arguments and result are those of `nrm2`; `x` is of float32, float64, complex64 or complex128.
    """
    ...


@operation("x(n>0) -> out: int64()", actor=BlasActor, dtypes=INEXACT)
async def iamax(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Index of the first element with the largest ``abs(x.real) + abs(x.imag)``, from 0 (BLAS ``iamax``).

    Arguments and result are those of `asum`, but `x` must not be empty, and the result is of int64. Where `x`
    holds a NaN, it is any index.
    """
    ...


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def swap(x: AccelRef, y: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Exchange the elements of two arrays (BLAS ``swap``).

    Args:
        x: Array of any shape and dtype, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The references `x` and `y`.
    """
    ...


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def rot(x: AccelRef, y: AccelRef, c: float, s: complex) -> tuple[AccelRef, AccelRef]:
    """Rotate points in a plane: ``x, y = c * x + s * y, c * y - conj(s) * x`` in place (BLAS ``rot``).

    Args:
        x: Array of any shape, of float32, float64, complex64 or complex128, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.
        c: Cosine of the angle, or any real number.
        s: Sine of the angle, or any number; real unless the arrays are complex.

    Returns:
        The references `x` and `y`.
    """
    ...


Axpy: Final = axpy.message
Scal: Final = scal.message
Dot: Final = dot.message
Nrm2: Final = nrm2.message
Asum: Final = asum.message
Iamax: Final = iamax.message
Swap: Final = swap.message
Rot: Final = rot.message
