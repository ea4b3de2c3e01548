"""Functions that ask for transforms: of each a name and a docstring, a signature, and a transform."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NoReturn, ParamSpec

import attrs

from ..backends.base import NATIVE, DType, Ints, ops
from ..backends.base.contract.ops import ArraySpec, FftDirection, FftKind, FftNorm
from ..devices import (
    AccelRef,
    Declared,
    LibraryActor,
    Operand,
    Planned,
    Planner,
    bounded_integer,
    bounded_integers,
    operation,
)
from ..expressions import Out, check_array, check_ref, like

__all__ = [
    "Fft",
    "FftActor",
    "Fftn",
    "Ifft",
    "Irfft",
    "Rfft",
    "Rfftn",
    "fft",
    "fft2",
    "fftn",
    "hfft",
    "hfft2",
    "hfftn",
    "ifft",
    "ifft2",
    "ifftn",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]


_NUMBERS = "an integer, several, or None"


class FftActor(LibraryActor):
    """Serves Fourier transforms, on a stream of its own.

    CPU backend: SciPy's pocketfft. CUDA: cuFFT.
    """

    library = "fft"


@attrs.frozen
class FftTransform:
    """A transform, as both libraries call it; see `FftSpec`.

    Attributes:
        name: Name of the function.
        kind: See `FftSpec`.
        direction: See `FftSpec`.
        default_axes: Axes where the caller names none; None for all, and a number for a transform along one.
    """

    name: str
    kind: FftKind
    direction: FftDirection
    default_axes: int | Ints | None

    def plan(self, message: Any, planner: Planner) -> Planned[AccelRef]:
        """Check a message, and name the result."""
        name, out = planner.name, message.out
        source = planner.read("a", message.a)
        axes, lengths, shape = self.fit(name, message, source)
        # Libraries have the other kinds only for complex input.
        taken = self.dtype_of(source.dtype)
        dtype = ops.FFT_DTYPES[self.kind].get(taken)
        if dtype is None:
            self._refuse(name, message.a, source.dtype)
        result = planner.output(shape, dtype, out)
        if out is not None:
            planner.distinct("out", result.spec, a=source)
        if taken is not source.dtype:
            source = planner.convert(source, taken)
        norm: FftNorm = message.norm or "backward"
        spec = ops.FftSpec(self.kind, self.direction, lengths, axes, norm, source, result.spec)
        return Planned(spec, result, is_checked=True)

    def dtype_of(self, dtype: DType) -> DType:
        """Return the dtype that an array is transformed in."""
        return dtype if self.kind == "r2c" else ops.complex_of(dtype)

    def fit(self, name: str, message: Any, source: ArraySpec) -> tuple[Ints, Ints, Ints]:
        """Check the axes, the lengths and the norm of a message, and find the shape of the result.

        Args:
            name: Name of the operation, for the error.
            message: Has `norm`, and for a transform along one axis `n` and `axis`, else `s` and `axes`.
            source: The array to transform.

        Returns:
            Axes counted from the first, lengths, and the shape.
        """
        axes: Ints
        chosen: Ints | None
        if isinstance(self.default_axes, int):
            argument = "n"
            axis = message.axis if type(message.axis) is int else bounded_integer(name, "axis", message.axis)
            axes = (axis_of(name, "axis", axis, source),)
            chosen = (
                None if message.n is None else (bounded_integer(name, "n", message.n, "an integer or None"),)
            )
        else:
            argument, requested_lengths = "s", all_whole(name, "s", message.s)
            axes = axes_of(name, source, all_whole(name, "axes", message.axes), requested_lengths)
            chosen = requested_lengths and tuple(
                [
                    extent_of(name, axis, source) if n == -1 else n
                    for axis, n in zip(axes, requested_lengths, strict=True)
                ]
            )
        lengths = tuple(chosen or self._default_lengths(name, argument, source, axes))
        if min(lengths) < 1:
            raise ValueError(f"{name}: {argument} must be at least 1, got {getattr(message, argument)}")
        check_norm(name, message.norm)
        return axes, lengths, ops.transformed_shape(source.shape, axes, lengths, is_halved=self.kind == "r2c")

    def _default_lengths(self, name: str, argument: str, source: ArraySpec, axes: Ints) -> list[int]:
        """Lengths where the caller gave none; the last axis may hold half of the frequencies."""
        lengths = [extent_of(name, axis, source) for axis in axes]
        if self.kind == "c2r":
            lengths[-1] = 2 * (lengths[-1] - 1)
            if not lengths[-1]:
                raise ValueError(
                    f"{name}: {argument}: 1 frequency says nothing of the length of the result; "
                    f"give {argument}"
                )
        return lengths

    def _refuse(self, name: str, source: Operand, dtype: DType) -> NoReturn:
        if self.kind == "r2c" and dtype.kind == "complex":
            instead = "fft" if self.direction == "forward" else "ifft"
            raise TypeError(f"{name}: a must be real, got {dtype}; use {instead}")
        refuse_dtype(name, "a", source, is_real=self.kind == "r2c")


def check_norm(name: str, norm: object) -> None:
    """Refuse an unknown norm."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")


def check_out(name: str, out: AccelRef | None, shape: Sequence[int], dtype: DType) -> None:
    """Refuse an array to write to that does not match the result, before the first of several launches."""
    if out is None:
        return
    check_ref(name, "out", out)
    if (out.shape, out.dtype) != (tuple(shape), dtype):
        raise ValueError(
            f"{name}: out must have shape {tuple(shape)} and dtype {dtype}, got shape {out.shape} and dtype "
            f"{out.dtype}"
        )


def refuse_dtype(name: str, argument: str, array: Operand, *, is_real: bool) -> NoReturn:
    """Raise with the dtypes that a function supports, and how to convert an array to the nearest one."""
    allowed = "float32 or float64" if is_real else "float32, float64, complex64 or complex128"
    dtype = DType.of(array.dtype)
    nearest = "float64" if dtype.kind in ("bool", "int", "uint") else "float32"
    call = f"await {argument}.cast" if isinstance(array, AccelRef) else f"{argument}.astype"
    raise TypeError(
        f"{name}: {argument} must be {allowed}, got {dtype}; convert it first: {call}('{nearest}')"
    )


def check_floating(name: str, argument: str, a: Operand, *, is_real: bool = False) -> None:
    """Refuse values other than arrays, and dtypes without transforms.

    Raises:
        TypeError: In these cases.
    """
    check_array(name, **{argument: a})
    if DType.of(a.dtype) not in NATIVE[: 2 if is_real else 4]:
        refuse_dtype(name, argument, a, is_real=is_real)


def axes_of(name: str, source: ArraySpec | Operand, axes: Ints | None, lengths: Ints | None) -> Ints:
    """Find the axes of lengths that the caller gave, counted from the first; by default all."""
    if axes is None:
        if lengths is not None and len(lengths) > source.ndim:
            raise ValueError(f"{name}: s must have a length for each axis, got {lengths} for {source.shape}")
        axes = tuple(range(-source.ndim if lengths is None else -len(lengths), 0))
    elif lengths is not None and len(lengths) != len(axes):
        raise ValueError(f"{name}: s must have a length for each of axes, got s {lengths} and axes {axes}")
    if not axes:
        raise ValueError(f"{name}: axes must name at least one axis, got none for a of shape {source.shape}")
    checked = tuple(axis_of(name, "axes:", axis, source) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name}: axes must be distinct, got {axes} for a of shape {source.shape}")
    return checked


def axis_of(name: str, argument: str, axis: int, source: ArraySpec | Operand) -> int:
    """Take an axis counted from either end to one counted from the first."""
    ndim = len(source.shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: {argument} {axis} is not there in an array of shape {source.shape}")
    return axis % ndim


def extent_of(name: str, axis: int, source: ArraySpec | Operand, argument: str = "a") -> int:
    """Length of an axis along which the caller gave none."""
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of {argument} is empty (shape {source.shape})")
    return extent


def all_whole(name: str, argument: str, values: object) -> Ints | None:
    """Take an integer, several, or None."""
    return None if values is None else bounded_integers(name, argument, values, _NUMBERS)


ParametersP = ParamSpec("ParametersP")


def _transform(
    kind: FftKind, direction: FftDirection
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], Declared[ParametersP, AccelRef]]:
    """Declare a transform by the signature and the docstring of a function; see `FftSpec`."""

    def declare(function: Any) -> Any:
        parameters = inspect.signature(function).parameters
        axes = parameters["axis" if "axis" in parameters else "axes"].default
        transform = FftTransform(function.__name__, kind, direction, axes)

        def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
            """Plan by hand, because no line of shapes expresses lengths along axes that are arguments."""
            return transform.plan(message, planner)

        declared = operation(actor=FftActor, plan=plan)(function)
        vars(declared).update(transform=transform, again=_transform)
        return declared

    return declare


@_transform("c2c", "forward")
async def fft(
    a: Operand, n: int | None = None, axis: int = -1, norm: FftNorm | None = None, *, out: Out = None
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
        ValueError: A length is below 1, an axis is out of range, the norm is unknown, or `out` does not fit.
        TypeError: The array is not on a device, or its dtype cannot be transformed.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    ...


@like(fft, "c2c", "inverse")
def ifft() -> None:
    """Inverse discrete Fourier transform along one axis, as `numpy.fft.ifft`.

    See `fft` for arguments, result and errors.
    """


@like(fft, "r2c", "forward")
def rfft() -> None:
    """Fourier transform of a real array along one axis, as `numpy.fft.rfft` (cuFFT ``R2C``, ``D2Z``).

    See `fft` for arguments and errors; `a` is float32 or float64.

    Returns:
        The non-negative frequencies: ``n // 2 + 1`` elements along `axis`.
    """


@like(fft, "c2r", "inverse")
def irfft() -> None:
    """Inverse of `rfft`, as `numpy.fft.irfft` (cuFFT ``C2R``, ``Z2D``).

    See `fft` for arguments and errors; `a` holds the non-negative frequencies, and `n` is the length of the
    real result: by default ``2 * (m - 1)`` for m frequencies.

    Returns:
        A real array with `n` elements along `axis`.
    """


@like(fft, "c2r", "forward")
def hfft() -> None:
    """Fourier transform of a signal with Hermitian symmetry, as `numpy.fft.hfft`: its spectrum is real.

    See `fft` for arguments and errors; `a` holds the half of the signal from time 0 on, and `n` is the length
    of the real result: by default ``2 * (m - 1)`` for m elements.

    Returns:
        A real array with `n` elements along `axis`.
    """


@like(fft, "r2c", "inverse")
def ihfft() -> None:
    """Inverse of `hfft`, as `numpy.fft.ihfft`.

    See `fft` for arguments and errors; `a` is float32 or float64.

    Returns:
        The half of the signal from time 0 on: ``n // 2 + 1`` complex elements along `axis`.
    """


@_transform("c2c", "forward")
async def fftn(
    a: Operand,
    s: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: Out = None,
) -> AccelRef:
    """Discrete Fourier transform along several axes, as `numpy.fft.fftn` (cuFFT ``C2C``, ``Z2Z``).

    Args:
        a: See `fft`.
        s: Length of the transform along each of `axes`, which are cut or padded with zeros to it; -1
            is the length that `a` has there, and an integer is the length along a single axis. By default the
            shape of `a`. Without `axes` it is for the last axes.
        axes: Axis to transform, or several distinct ones; the others are a batch. By default all, or the last
            ``len(s)``.
        norm: See `fft`; it scales by the product of the lengths.
        out: See `fft`.

    Returns:
        The spectrum: the shape of `a` with `s` along `axes`, in the complex dtype of the same precision.

    Raises:
        ValueError: See `fft`; or an axis is named twice, there is no axis, or not one length for each axis.
        TypeError: See `fft`.
    """
    ...


@_transform("c2c", "forward")
async def fft2(
    a: Operand,
    s: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: Out = None,
) -> AccelRef:
    """`fftn` along the last two axes, as `numpy.fft.fft2`."""
    ...


@like(fftn, "c2c", "inverse")
def ifftn() -> None:
    """Inverse discrete Fourier transform along several axes, as `numpy.fft.ifftn`.

    See `fftn` for arguments, result and errors.
    """


@like(fft2, "c2c", "inverse")
def ifft2() -> None:
    """`ifftn` along the last two axes, as `numpy.fft.ifft2`."""


@like(fftn, "r2c", "forward")
def rfftn() -> None:
    """Fourier transform of a real array along several axes, as `numpy.fft.rfftn` (cuFFT ``R2C``, ``D2Z``).

    See `fftn` for arguments and errors; `a` is float32 or float64.

    Returns:
        The nonnegative frequencies along the last of `axes`: n points have ``n // 2 + 1`` of them. All
        frequencies along the others.
    """


@like(fft2, "r2c", "forward")
def rfft2() -> None:
    """`rfftn` along the last two axes, as `numpy.fft.rfft2`."""


@like(fftn, "c2r", "inverse")
def irfftn() -> None:
    """Inverse of `rfftn`, as `numpy.fft.irfftn` (cuFFT ``C2R``, ``Z2D``).

    See `fftn` for arguments and errors; `s` is the shape of the real result along `axes`: by default the
    shape of `a`, but ``2 * (m - 1)`` along the last of them, if `a` has m frequencies.

    Returns:
        A real array.
    """


@like(fft2, "c2r", "inverse")
def irfft2() -> None:
    """`irfftn` along the last two axes, as `numpy.fft.irfft2`."""


@like(fftn, "c2r", "forward")
def hfftn() -> None:
    """Fourier transform of an array with Hermitian symmetry, as `scipy.fft.hfftn`: its spectrum is real.

    See `irfftn` for arguments and errors.

    Returns:
        A real array.
    """


@like(fft2, "c2r", "forward")
def hfft2() -> None:
    """`hfftn` along the last two axes, as `scipy.fft.hfft2`."""


@like(fftn, "r2c", "inverse")
def ihfftn() -> None:
    """Inverse of `hfftn`, as `scipy.fft.ihfftn`.

    See `rfftn` for arguments, result and errors.
    """


@like(fft2, "r2c", "inverse")
def ihfft2() -> None:
    """`ihfftn` along the last two axes, as `scipy.fft.ihfft2`."""


Fft: Final = fft.message
Fftn: Final = fftn.message
Ifft: Final = ifft.message
Irfft: Final = irfft.message
Rfft: Final = rfft.message
Rfftn: Final = rfftn.message
