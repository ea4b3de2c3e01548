"""Frequencies of transforms, their order, and fast lengths."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ..backends.base import DType, DTypeLike, Ints
from ..devices import AccelRef, Device, bounded_integer, bounded_integers, check_device, composed
from ..expressions import Elementwise, Out, check_ref
from ._functions import axis_of

__all__ = ["fftfreq", "fftshift", "ifftshift", "next_fast_len", "rfftfreq"]

# SciPy's limit, which leaves room for one more factor of 11 in 64 bits.
_MAX_TARGET = ((1 << 64) - 1) // 11


@composed
async def fftfreq(device: Device, n: int, d: float = 1.0, *, dtype: DTypeLike = "float64") -> AccelRef:
    """Make the frequencies for the elements of `fft`, as `numpy.fft.fftfreq`.

    Args:
        device: The device.
        n: Length of the transform.
        d: Time from one sample to the next.
        dtype: float32 or float64.

    Returns:
        `n` frequencies, in cycles for each unit of `d`: 0 and the positive ones, then the negative ones.

    Raises:
        ValueError: A length below 1, or `d` is 0.
        TypeError: `device` is none, or another dtype.
    """
    return await _frequencies("fftfreq", device, n, d, dtype)


@composed
async def rfftfreq(device: Device, n: int, d: float = 1.0, *, dtype: DTypeLike = "float64") -> AccelRef:
    """Make the frequencies for the elements of `rfft`, as `numpy.fft.rfftfreq`.

    See `fftfreq` for arguments and errors.

    Returns:
        ``n // 2 + 1`` frequencies, none of them negative.
    """
    return await _frequencies("rfftfreq", device, n, d, dtype)


@composed
async def fftshift(x: AccelRef, axes: int | Sequence[int] | None = None, *, out: Out = None) -> AccelRef:
    """Move frequency 0 to the middle of axes, as `numpy.fft.fftshift`; one launch.

    Args:
        x: The array, of any dtype that expressions have.
        axes: The axes; None for all.
        out: Array to write to; it may not share memory with `x`.

    Returns:
        A new array with the shape and dtype of `x`.

    Raises:
        TypeError: `x` is not an array on a device.
        ValueError: An axis out of range, or a wrong `out`.
    """
    return await _shifted("fftshift", x, axes, 0, out)


@composed
async def ifftshift(x: AccelRef, axes: int | Sequence[int] | None = None, *, out: Out = None) -> AccelRef:
    """Invert `fftshift`, as `numpy.fft.ifftshift`; see `fftshift` for arguments and errors."""
    return await _shifted("ifftshift", x, axes, 1, out)


def next_fast_len(target: int, real: bool = False) -> int:
    """Find a length of at least `target` with fast transforms, as `scipy.fft.next_fast_len`.

    cuFFT prefers the lengths with the prime factors 2, 3, 5 and 7. SciPy's have 11 too, without `real`, and
    neither 7 nor 11 with it.

    Args:
        target: The least length.
        real: Whether the transform is one of real numbers.

    Returns:
        The length.

    Raises:
        TypeError: `target` is not an integer.
        ValueError: It is negative, or larger than 2**64 / 11.

    >>> next_fast_len(1021, real=True)
    1024
    """
    length = bounded_integer("fft.next_fast_len", "target", target)
    if not 0 <= length <= _MAX_TARGET:
        raise ValueError(f"fft.next_fast_len: target must be from 0 to {_MAX_TARGET}, got {length}")
    return _smooth(length, (3, 5) if real else (3, 5, 7, 11)) if length else 0


@functools.lru_cache(maxsize=1024)
def _smooth(target: int, primes: Ints) -> int:
    """Return the smallest number of at least `target` with no other prime factors than 2 and `primes`.

    SciPy's function is not used, because its import takes longer than that of the package.
    """
    if not primes:
        return 1 << (target - 1).bit_length()
    smallest, factor = _smooth(target, primes[:-1]), primes[-1]
    while factor < smallest:
        smallest = min(smallest, factor * _smooth(-(-target // factor), primes[:-1]))
        factor *= primes[-1]
    return smallest


async def _frequencies(name: str, device: Device, n: int, d: float, dtype: DTypeLike) -> AccelRef:
    check_device(f"fft.{name}", device)
    n = bounded_integer(name, "n", n)
    if n < 1 or math.fabs(d) == 0:
        raise ValueError(f"{name}: n must be at least 1, and d not 0, got n {n} and d {d}")
    chosen = DType.of(dtype)
    if chosen not in (DType.float32, DType.float64):
        raise TypeError(f"{name}: dtype must be float32 or float64, got {chosen}")
    return await device.ask(
        _frequency(name, chosen.value).compute(
            n=n, count=n * d, shape=n // 2 + 1 if name == "rfftfreq" else n
        )
    )


@functools.cache
def _frequency(name: str, dtype: str) -> Elementwise[AccelRef]:
    last_positive = "(n - 1) // 2" if name == "fftfreq" else "n"
    text = f"j = i(0); y = (j if j <= {last_positive} else j - n) / float64(count)"
    return Elementwise(text, dtypes=dtype, operation=f"fft.{name}")


async def _shifted(
    name: str, x: AccelRef, axes: int | Sequence[int] | None, offset: int, out: Out
) -> AccelRef:
    check_ref(name, "x", x)
    requested_axes = range(x.ndim) if axes is None else bounded_integers(name, "axes", axes)
    chosen = {axis_of(name, "axes:", axis, x) for axis in requested_axes}
    shifts = {
        f"s{axis}": (extent + offset) // 2 if axis in chosen else 0 for axis, extent in enumerate(x.shape)
    }
    return await _moved(name, x.ndim)(x=x, **shifts, shape=x.shape, out=out)


@functools.cache
def _moved(name: str, ndim: int) -> Elementwise[AccelRef]:
    # A negative index counts from the end.
    indices = ", ".join(f"i({axis}) - s{axis}" for axis in range(ndim))
    return Elementwise(f"x[{indices}]" if ndim else "x", operation=f"fft.{name}")
