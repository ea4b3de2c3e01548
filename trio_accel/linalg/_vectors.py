"""Vector operations: the first level of the BLAS."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base import DType
from ..backends.base.ops import (
    ArraySpec,
    AsumSpec,
    AxpySpec,
    DotSpec,
    IamaxSpec,
    Nrm2Spec,
    RotSpec,
    ScalSpec,
    SwapSpec,
    real_of,
)
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import BlasActor
from ._checks import same_dtype, same_length, vector

__all__ = [
    "Asum",
    "Axpy",
    "Dot",
    "Iamax",
    "Nrm2",
    "Rot",
    "Scal",
    "Swap",
    "asum",
    "axpy",
    "dot",
    "iamax",
    "nrm2",
    "rot",
    "scal",
    "swap",
]

_PATH = "trio_accel.linalg:BlasActor"


@attrs.define(eq=False, on_setattr=None)
class Axpy(Operation[BlasActor, AccelRef]):
    """``y = alpha * x + y`` in place; see `axpy`."""

    alpha: complex
    x: Operand
    y: AccelRef
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes, dtypes and that x and y are apart."""
        x = planner.read("x", self.x)
        y = planner.update("y", self.y)
        alpha = planner.factor("alpha", self.alpha, same_dtype(planner.name, x=x, y=y))
        same_length(planner.name, x, y)
        planner.distinct("y", y, x=x)
        return Planned(AxpySpec(alpha, x, y), self.y)


@attrs.define(eq=False, on_setattr=None)
class Scal(Operation[BlasActor, AccelRef]):
    """``x = alpha * x`` in place; see `scal`."""

    alpha: complex
    x: AccelRef
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the dtype."""
        x = planner.update("x", self.x)
        return Planned(ScalSpec(planner.factor("alpha", self.alpha, x.dtype), x), self.x)


@attrs.define(eq=False, on_setattr=None)
class Swap(Operation[BlasActor, tuple[AccelRef, AccelRef]]):
    """Exchanges two arrays; see `swap`."""

    x: AccelRef
    y: AccelRef
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[tuple[AccelRef, AccelRef]]:
        """Check shapes, dtypes and that x and y are apart."""
        return Planned(SwapSpec(*_pair(planner, self.x, self.y)), (self.x, self.y))


@attrs.define(eq=False, on_setattr=None)
class Rot(Operation[BlasActor, tuple[AccelRef, AccelRef]]):
    """A rotation of points in a plane; see `rot`."""

    x: AccelRef
    y: AccelRef
    c: float
    s: complex
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[tuple[AccelRef, AccelRef]]:
        """Check shapes, dtypes and that x and y are apart."""
        x, y = _pair(planner, self.x, self.y)
        c = planner.factor("c", self.c, real_of(x.dtype))
        return Planned(RotSpec(c.real, planner.factor("s", self.s, x.dtype), x, y), (self.x, self.y))


@attrs.define(eq=False, on_setattr=None)
class Dot(Operation[BlasActor, AccelRef]):
    """The sum of the products of two vectors; see `dot`."""

    x: Operand
    y: Operand
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shapes and dtypes, and name the result."""
        x = planner.read("x", self.x)
        y = planner.read("y", self.y)
        vector(planner.name, "x", x)
        same_length(planner.name, x, y)
        out = planner.output((), same_dtype(planner.name, x=x, y=y), self.out)
        planner.distinct("out", out.spec, x=x, y=y)
        return Planned(DotSpec(x, y, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Nrm2(Operation[BlasActor, AccelRef]):
    """The Euclidean norm of a vector; see `nrm2`."""

    x: Operand
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH
    spec: ClassVar[type[Nrm2Spec | AsumSpec | IamaxSpec]] = Nrm2Spec

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the shape, and name the result."""
        x = planner.read("x", self.x)
        vector(planner.name, "x", x)
        if not x.dtype.is_inexact:
            raise TypeError(
                f"{planner.name}: x must have a floating or complex dtype, got {x.dtype}; use cast()"
            )
        out = planner.output((), DType.int64 if self.spec is IamaxSpec else real_of(x.dtype), self.out)
        planner.distinct("out", out.spec, x=x)
        return Planned(self.spec(x, out.spec), out)


@attrs.define(eq=False, on_setattr=None)
class Asum(Nrm2):
    """The sum of the sizes of a vector's elements; see `asum`."""

    spec: ClassVar[type[Nrm2Spec | AsumSpec | IamaxSpec]] = AsumSpec


@attrs.define(eq=False, on_setattr=None)
class Iamax(Nrm2):
    """The index of a vector's largest element; see `iamax`."""

    spec: ClassVar[type[Nrm2Spec | AsumSpec | IamaxSpec]] = IamaxSpec


def _pair(planner: Planner, x: AccelRef, y: AccelRef) -> tuple[ArraySpec, ArraySpec]:
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

    Raises:
        ValueError: Shapes that differ, or shared memory.
        TypeError: Dtypes that differ, or a factor that they cannot hold.

    See `Device.ask` for cancellation and the errors that any operation can end with. If the
    operation fails on the device, `y` is damaged and its use refused.
    """
    return await device_of("axpy", y, x).ask(Axpy(alpha, x, y))


async def scal(alpha: complex, x: AccelRef) -> AccelRef:
    """Multiply an array by a number in place: ``x = alpha * x`` (BLAS ``scal``).

    Args:
        alpha: Factor; real unless the array is complex.
        x: Array of any shape and a floating or complex dtype, which is changed.

    Returns:
        The reference `x`.

    Raises:
        TypeError: A factor that the dtype cannot hold.

    See `Device.ask` for cancellation and the errors that any operation can end with. If the
    operation fails on the device, `x` is damaged and its use refused.
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

    Raises:
        ValueError: Shapes that differ or are no vectors.
        TypeError: Neither is on a device, or dtypes that differ.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("dot", x, y, out).ask(Dot(x, y, out))


async def nrm2(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Euclidean norm of a vector, without needless overflow or underflow (BLAS ``nrm2``).

    Args:
        x: Vector of shape (n,) and a floating or complex dtype.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.

    Raises:
        ValueError: Not a vector.
        TypeError: It is not on a device, or of a whole-number dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("nrm2", x, out).ask(Nrm2(x, out))


async def asum(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum of ``abs(x.real) + abs(x.imag)`` over a vector (BLAS ``asum``).

    Args:
        x: Vector of shape (n,), of float32, float64, complex64 or complex128.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.

    Raises:
        ValueError: Not a vector.
        TypeError: It is not on a device, or of a whole-number dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("asum", x, out).ask(Asum(x, out))


async def iamax(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Index of the first element with the largest ``abs(x.real) + abs(x.imag)`` (BLAS ``iamax``).

    Args:
        x: Vector of shape (n,), of float32, float64, complex64 or complex128, which is not empty. Where it
            holds a NaN, the index is that of any element.
        out: Array without axes, of int64, to write to; by default a new one.

    Returns:
        An int64 array of shape () on the device, which counts from 0; ``await result.item()`` is the number.

    Raises:
        ValueError: Not a vector, or an empty one.
        TypeError: It is not on a device, or of a whole-number dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("iamax", x, out).ask(Iamax(x, out))


async def swap(x: AccelRef, y: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Exchange the elements of two arrays (BLAS ``swap``).

    Args:
        x: Array of any shape and dtype, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The references `x` and `y`.

    Raises:
        ValueError: Shapes that differ, or shared memory.
        TypeError: Dtypes that differ.

    See `Device.ask` for cancellation and the errors that any operation can end with. If the
    operation fails on the device, both are damaged and their use refused.
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

    Raises:
        ValueError: Shapes that differ, or shared memory.
        TypeError: Dtypes that differ, or a factor that they cannot hold.

    See `Device.ask` for cancellation and the errors that any operation can end with. If the
    operation fails on the device, both are damaged and their use refused.
    """
    return await device_of("rot", x, y).ask(Rot(x, y, c, s))
