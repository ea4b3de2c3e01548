"""Vector operations: the first level of the BLAS."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base import DType, ops
from ..devices import AccelRef, Operand, Planned, Planner, device_of
from ._actor import BlasOperation
from ._checks import same_dtype, same_length, vector

__all__ = [
    "Asum", "Axpy", "Dot", "Iamax", "Nrm2", "Rot", "Scal", "Swap", "asum", "axpy", "dot", "iamax", "nrm2",
    "rot", "scal", "swap",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class Axpy(BlasOperation[AccelRef]):
    """``y = alpha * x + y`` in place; see `axpy`."""

    alpha: complex
    x: Operand
    y: AccelRef

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes and that x and y are apart."""
        x = planner.read("x", self.x)
        y = planner.update("y", self.y)
        alpha = planner.factor("alpha", self.alpha, same_dtype(planner.name, x=x, y=y))
        same_length(planner.name, x, y)
        planner.distinct("y", y, x=x)
        return Planned(ops.AxpySpec(alpha, x, y), self.y)


@attrs.define(eq=False, on_setattr=None)
class Scal(BlasOperation[AccelRef]):
    """``x = alpha * x`` in place; see `scal`."""

    alpha: complex
    x: AccelRef

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the dtype."""
        x = planner.update("x", self.x)
        return Planned(ops.ScalSpec(planner.factor("alpha", self.alpha, x.dtype), x), self.x)


@attrs.define(eq=False, on_setattr=None)
class Swap(BlasOperation[tuple[AccelRef, AccelRef]]):
    """Exchanges two arrays; see `swap`."""

    x: AccelRef
    y: AccelRef

    def plan(self, planner: Planner) -> Planned[tuple[AccelRef, AccelRef]]:
        """Check shapes, dtypes and that x and y are apart."""
        return Planned(ops.SwapSpec(*_pair(planner, self.x, self.y)), (self.x, self.y))


@attrs.define(eq=False, on_setattr=None)
class Rot(BlasOperation[tuple[AccelRef, AccelRef]]):
    """A rotation of points in a plane; see `rot`."""

    x: AccelRef
    y: AccelRef
    c: float
    s: complex

    def plan(self, planner: Planner) -> Planned[tuple[AccelRef, AccelRef]]:
        """Check shapes, dtypes and that x and y are apart."""
        x, y = _pair(planner, self.x, self.y)
        c = planner.factor("c", self.c, ops.real_of(x.dtype))
        return Planned(ops.RotSpec(c.real, planner.factor("s", self.s, x.dtype), x, y), (self.x, self.y))


@attrs.define(eq=False, on_setattr=None)
class Dot(BlasOperation[AccelRef]):
    """The sum of the products of two vectors; see `dot`."""

    x: Operand
    y: Operand
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the result."""
        x = planner.read("x", self.x)
        y = planner.read("y", self.y)
        vector(planner.name, "x", x)
        same_length(planner.name, x, y)
        out = planner.output((), same_dtype(planner.name, x=x, y=y), self.out)
        planner.distinct("out", out.spec, x=x, y=y)
        return Planned(ops.DotSpec(x, y, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Nrm2(BlasOperation[AccelRef]):
    """The Euclidean norm of a vector; see `nrm2`."""

    x: Operand
    out: AccelRef | None = None
    spec: ClassVar[type[ops.Nrm2Spec | ops.AsumSpec | ops.IamaxSpec]] = ops.Nrm2Spec

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the shape, and name the result."""
        x = planner.read("x", self.x)
        vector(planner.name, "x", x)
        if not x.dtype.is_inexact:
            raise TypeError(
                f"{planner.name}: x must have a floating or complex dtype, got {x.dtype}; use cast()"
            )
        dtype = DType.int64 if self.spec is ops.IamaxSpec else ops.real_of(x.dtype)
        out = planner.output((), dtype, self.out)
        planner.distinct("out", out.spec, x=x)
        return Planned(self.spec(x, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Asum(Nrm2):
    """The sum of the sizes of a vector's elements; see `asum`."""

    spec: ClassVar[type[ops.Nrm2Spec | ops.AsumSpec | ops.IamaxSpec]] = ops.AsumSpec


@attrs.define(eq=False, on_setattr=None)
class Iamax(Nrm2):
    """The index of a vector's largest element; see `iamax`."""

    spec: ClassVar[type[ops.Nrm2Spec | ops.AsumSpec | ops.IamaxSpec]] = ops.IamaxSpec


def _pair(planner: Planner, x: AccelRef, y: AccelRef) -> tuple[ops.ArraySpec, ops.ArraySpec]:
    """Take two arrays of one shape and dtype that are changed."""
    first, second = planner.update("x", x), planner.update("y", y)
    same_dtype(planner.name, x=first, y=second)
    same_length(planner.name, first, second)
    planner.distinct("y", second, x=first)
    return first, second


async def axpy(alpha: complex, x: Operand, y: AccelRef) -> AccelRef:
    """Add a multiple of one array to another in place: ``y = alpha * x + y`` (BLAS ``axpy``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Array of any shape and a floating or complex dtype.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The reference `y`.
    """
    return await device_of("axpy", y, x).ask(Axpy(alpha, x, y))


async def scal(alpha: complex, x: AccelRef) -> AccelRef:
    """Multiply an array by a number in place: ``x = alpha * x`` (BLAS ``scal``).

    Args:
        alpha: Factor; real unless the array is complex.
        x: Array of any shape and a floating or complex dtype, which is changed.

    Returns:
        The reference `x`.
    """
    return await device_of("scal", x).ask(Scal(alpha, x))


async def dot(x: Operand, y: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of the products of two vectors, without conjugation (BLAS ``dot``, ``dotu``).

    Args:
        x: Vector of shape (n,).
        y: Vector of the same shape and dtype.
        out: Array without axes to write to; by default a new one.

    Returns:
        An array of shape () on the device; ``await result.item()`` is the number.
    """
    return await device_of("dot", x, y, out).ask(Dot(x, y, out))


async def nrm2(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Euclidean norm of a vector, without needless overflow or underflow (BLAS ``nrm2``).

    Args:
        x: Vector of shape (n,) and a floating or complex dtype.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.
    """
    return await device_of("nrm2", x, out).ask(Nrm2(x, out))


async def asum(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of ``abs(x.real) + abs(x.imag)`` over a vector (BLAS ``asum``).

    Arguments and result are those of `nrm2`; `x` is of float32, float64, complex64 or complex128.
    """
    return await device_of("asum", x, out).ask(Asum(x, out))


async def iamax(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Index of the first element with the largest ``abs(x.real) + abs(x.imag)``, from 0 (BLAS ``iamax``).

    Arguments and result are those of `asum`, but `x` must not be empty, and the result is of int64. Where `x`
    holds a NaN, it is any index.
    """
    return await device_of("iamax", x, out).ask(Iamax(x, out))


async def swap(x: AccelRef, y: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Exchange the elements of two arrays (BLAS ``swap``).

    Args:
        x: Array of any shape and dtype, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The references `x` and `y`.
    """
    return await device_of("swap", x, y).ask(Swap(x, y))


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
    return await device_of("rot", x, y).ask(Rot(x, y, c, s))
