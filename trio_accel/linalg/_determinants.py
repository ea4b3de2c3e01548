"""Determinants."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import DetSpec, real_of
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import SolverActor
from ._checks import matrices
from ._results import SlogdetResult

__all__ = ["Det", "Slogdet", "det", "slogdet"]

_PATH = "trio_accel.linalg:SolverActor"


@attrs.define(eq=False, on_setattr=None)
class Det(Operation[SolverActor, AccelRef]):
    """The determinant of matrices; see `det`."""

    a: Operand
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check shape and dtype, and name the determinant."""
        a = matrices(planner, "a", self.a, is_square=True)
        out = planner.output(a.shape[:-2], a.dtype)
        return Planned(DetSpec(a, out.spec, None, None), out)


@attrs.define(eq=False, on_setattr=None)
class Slogdet(Operation[SolverActor, SlogdetResult]):
    """The sign and the logarithm of the determinant of matrices; see `slogdet`."""

    a: Operand
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[SlogdetResult]:
        """Check shape and dtype, and name the results."""
        a = matrices(planner, "a", self.a, is_square=True)
        sign = planner.output(a.shape[:-2], a.dtype)
        logabsdet = planner.output(a.shape[:-2], real_of(a.dtype))
        return Planned(DetSpec(a, None, sign.spec, logabsdet.spec), SlogdetResult(sign, logabsdet))


async def det(a: Operand) -> AccelRef:
    """Determinant of matrices, as `numpy.linalg.det` (LAPACK ``getrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The determinants, of shape (...) and the dtype of `a`: 0 of singular matrices, 1 of empty ones.

    Raises:
        numpy.linalg.LinAlgError: Not a stack of square matrices.
        TypeError: It is not on a device, or of another dtype.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("det", a).ask(Det(a))


async def slogdet(a: Operand) -> SlogdetResult:
    """Sign and logarithm of the determinant, as `numpy.linalg.slogdet` (LAPACK ``getrf``).

    Of large matrices the determinant itself is often too large or too small for its dtype. Raises as `det`.

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The sign, of shape (...) and the dtype of `a`, and the logarithm of the absolute value, of the real
        dtype: the determinant is ``sign * exp(logabsdet)``. Of a singular matrix 0, and minus infinity.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("slogdet", a).ask(Slogdet(a))
