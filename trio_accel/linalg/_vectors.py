"""Vector operations: the first level of the BLAS."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import AxpySpec, DotSpec, Nrm2Spec, ScalSpec, real_of
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import BlasActor
from ._checks import same_dtype, same_length, vector

__all__ = ["Axpy", "Dot", "Nrm2", "Scal", "axpy", "dot", "nrm2", "scal"]

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

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the shape, and name the result."""
        x = planner.read("x", self.x)
        vector(planner.name, "x", x)
        if not x.dtype.is_inexact:
            raise TypeError(
                f"{planner.name}: x must have a floating or complex dtype, got {x.dtype}; use cast()"
            )
        out = planner.output((), real_of(x.dtype), self.out)
        planner.distinct("out", out.spec, x=x)
        return Planned(Nrm2Spec(x, out.spec), out)


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
