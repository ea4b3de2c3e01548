"""One-dimensional Fourier transforms, batched over the other axes."""

from __future__ import annotations

import operator
from typing import ClassVar, Literal, SupportsIndex

import attrs

from ..backends.base import DType
from ..backends.base.ops import ArraySpec, FftNorm, FftSpec
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import FftActor

__all__ = ["Fft", "Ifft", "Irfft", "Rfft", "fft", "ifft", "irfft", "rfft"]

_PATH = "trio_accel.fft:FftActor"
_COMPLEX = {
    DType.float32: DType.complex64,
    DType.float64: DType.complex128,
    DType.complex64: DType.complex64,
    DType.complex128: DType.complex128,
}
_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}


@attrs.frozen(eq=False)
class Fft(Operation[FftActor, AccelRef]):
    """Complex transform; see `fft`."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the spectrum."""
        return _plan(planner, self, "c2c", "forward")


@attrs.frozen(eq=False)
class Ifft(Operation[FftActor, AccelRef]):
    """Inverse complex transform; see `ifft`."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the signal."""
        return _plan(planner, self, "c2c", "inverse")


@attrs.frozen(eq=False)
class Rfft(Operation[FftActor, AccelRef]):
    """Transform of a real signal; see `rfft`."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the half spectrum."""
        return _plan(planner, self, "r2c", "forward")


@attrs.frozen(eq=False)
class Irfft(Operation[FftActor, AccelRef]):
    """Inverse transform to a real signal; see `irfft`."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = _PATH

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the real signal."""
        return _plan(planner, self, "c2r", "inverse")


async def fft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Discrete Fourier transform along one axis, as `numpy.fft.fft` (cuFFT ``C2C``, ``Z2Z``).

    Args:
        a: Array of float32, float64, complex64 or complex128; real input is taken as complex.
        n: Length of the transform; the axis is cut or padded with zeros to it. By default its length.
        axis: Axis to transform; the others are a batch.
        norm: ``"backward"`` (default), ``"ortho"`` or ``"forward"``, as in NumPy.
        out: Array of the result's shape and dtype to write to; by default a new one.

    Returns:
        The spectrum: the shape of `a` with `n` elements along `axis`, in the complex dtype of
        the same precision.

    Raises:
        ValueError: A length below 1, an axis that is not there, an unknown norm, a wrong `out`.
        TypeError: Not on a device, or a dtype without a transform.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("fft", a, out).ask(Fft(a, n, axis, norm, out))


async def ifft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse discrete Fourier transform along one axis, as `numpy.fft.ifft`.

    Arguments, result and errors are those of `fft`.
    """
    return await device_of("ifft", a, out).ask(Ifft(a, n, axis, norm, out))


async def rfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Fourier transform of a real array along one axis, as `numpy.fft.rfft` (cuFFT ``R2C``, ``D2Z``).

    Arguments and errors are those of `fft`; `a` is float32 or float64.

    Returns:
        The non-negative frequencies: ``n // 2 + 1`` elements along `axis`.
    """
    return await device_of("rfft", a, out).ask(Rfft(a, n, axis, norm, out))


async def irfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse of `rfft`, as `numpy.fft.irfft` (cuFFT ``C2R``, ``Z2D``).

    Arguments and errors are those of `fft`; `a` holds the non-negative frequencies, and `n` is the
    length of the real result: by default ``2 * (m - 1)`` for m frequencies.

    Returns:
        A real array with `n` elements along `axis`.
    """
    return await device_of("irfft", a, out).ask(Irfft(a, n, axis, norm, out))


def _plan(
    planner: Planner,
    operation: Fft | Ifft | Rfft | Irfft,
    kind: Literal["c2c", "r2c", "c2r"],
    direction: Literal["forward", "inverse"],
) -> Planned[AccelRef]:
    name = planner.name
    source = planner.read("a", operation.a)
    axis = _axis(name, operation.axis, source)
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of a has no elements (shape {source.shape})")
    if kind == "c2r" and extent == 1 and operation.n is None:
        raise ValueError(f"{name}: n: 1 frequency says nothing of the length of the result; give n")
    n = _length(name, operation.n, 2 * (extent - 1) if kind == "c2r" else extent)
    norm = "backward" if operation.norm is None else operation.norm
    if norm not in ("backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    shape = list(source.shape)
    shape[axis] = n // 2 + 1 if kind == "r2c" else n
    out = planner.output(tuple(shape), _result_dtype(name, kind, source.dtype), operation.out)
    planner.distinct("out", out.spec, a=source)
    if kind != "r2c" and source.dtype.kind == "float":
        # Libraries have these transforms for complex input alone.
        source = planner.convert(source, _COMPLEX[source.dtype])
    return Planned(FftSpec(kind, direction, n, axis, norm, source, out.spec), out)


def _result_dtype(name: str, kind: str, dtype: DType) -> DType:
    if kind == "r2c" and dtype.kind == "complex":
        raise TypeError(f"{name}: a must be real, got {dtype}; use fft")
    complex_dtype = _COMPLEX.get(dtype)
    if complex_dtype is None:
        allowed = "float32 or float64" if kind == "r2c" else "float32, float64, complex64 or complex128"
        raise TypeError(f"{name}: a must be {allowed}, got {dtype}; use cast()")
    return _REAL[complex_dtype] if kind == "c2r" else complex_dtype


def _axis(name: str, axis: int, array: ArraySpec) -> int:
    index = _whole(name, "axis", axis, "a whole number")
    if not -array.ndim <= index < array.ndim:
        raise ValueError(f"{name}: axis {axis} is not there in an array of shape {array.shape}")
    return index % array.ndim


def _length(name: str, n: int | None, default: int) -> int:
    length = default if n is None else _whole(name, "n", n, "a whole number or None")
    if length < 1:
        raise ValueError(f"{name}: n must be at least 1, got {length}")
    return length


def _whole(name: str, argument: str, value: object, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {value!r}")
    return operator.index(value)
