"""Arrays made of numbers: the creation functions of the array API standard, on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..backends.base import DType, DTypeLike, Ints, check_conversion, element, host_array
from ..devices import AccelRef, Device, Operand, check_device, composed
from ..expressions import Elementwise, Out
from ._checks import bounded_integer, bounded_integers, check_number, check_ref, clamped, flag, placed

__all__ = [
    "arange",
    "asarray",
    "diag",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "geomspace",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "tri",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]


@composed
async def asarray(
    device: Device, obj: npt.ArrayLike | AccelRef, *, dtype: DTypeLike | None = None, copy: bool | None = None
) -> AccelRef:
    """Bring an array, nested lists or a number to a device.

    Args:
        device: The device.
        obj: An argument for `numpy.asarray`, or an array of this device or another.
        dtype: Its dtype; None to keep it.
        copy: True for a copy in any case. False to refuse copies, which requires an array of this device and
            dtype.

    Returns:
        `obj` itself, if it is on the device and no copy is requested; otherwise a new array.

    Raises:
        TypeError: Devices lack the dtype, or complex numbers would become real.
        ValueError: A copy is needed although `copy` is False. Or an integer is outside of `dtype`; then the
            error is also an `OverflowError`, as NumPy's is.
    """
    check_device("arrays.asarray", device)
    requested = None if dtype is None else DType.of(dtype)
    copy = None if copy is None else flag("arrays.asarray", "copy", copy)
    if isinstance(obj, AccelRef):
        is_here = obj.device is device and requested in (None, obj.dtype)
        if is_here and not copy:
            return obj
    if copy is False:
        raise ValueError("arrays.asarray: copy=False, and only a copy is on the device and of this dtype")
    if isinstance(obj, AccelRef):
        converted = obj if requested in (None, obj.dtype) else await obj.cast(requested)
        return (
            await converted.copy_to(device)
            if converted.device is not device or converted is obj
            else converted
        )
    host = host_array("arrays.asarray: obj", obj)
    host_dtype = DType.of(host.dtype)
    if requested is not None:
        check_conversion("arrays.asarray", "obj", host_dtype, requested)
        # NumPy refuses Python numbers that the dtype cannot hold, but converts the numbers of arrays.
        host = (
            host.astype(requested.dtype) if isinstance(obj, np.ndarray) else np.asarray(obj, requested.dtype)
        )
    return await device.put(host)


async def _full(
    name: str, fill_value: complex, device: Device, shape: int | Sequence[int], dtype: DTypeLike | None
) -> AccelRef:
    operation = f"arrays.{name}"
    check_device(operation, device)
    extents = bounded_integers(operation, "shape", shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"{operation}: shape must be integers of at least 0, got {shape!r}")
    check_number(operation, "fill_value", fill_value)
    kind = DType.of(np.asarray(fill_value).dtype if dtype is None else dtype)
    return await device.full(extents, element(operation, "fill_value", fill_value, kind), kind)


@composed
async def empty(device: Device, shape: int | Sequence[int], *, dtype: DTypeLike = "float64") -> AccelRef:
    """Make an array to be written; its elements are 0, so that no other program's data shows."""
    return await _full("empty", 0, device, shape, dtype)


@arguments_of(empty, _full, "zeros", 0)
def zeros() -> None:
    """Make an array of zeros."""


@arguments_of(empty, _full, "ones", 1)
def ones() -> None:
    """Make an array of ones."""


@composed
async def full(
    device: Device, shape: int | Sequence[int], fill_value: complex, *, dtype: DTypeLike | None = None
) -> AccelRef:
    """Make an array with every element set to one value.

    Args:
        device: The device.
        shape: Its shape.
        fill_value: The value.
        dtype: Its dtype; by default the number's: `bool`, `int64`, `float64` or `complex128`.

    Raises:
        TypeError, ValueError: No shape, or a value that the dtype cannot hold.
    """
    return await _full("full", fill_value, device, shape, dtype)


async def _like(name: str, fill_value: complex, x: AccelRef, dtype: DTypeLike | None) -> AccelRef:
    check_ref(f"arrays.{name}", "x", x)
    return await _full(name, fill_value, x.device, x.shape, x.dtype if dtype is None else dtype)


@composed
async def empty_like(x: AccelRef, *, dtype: DTypeLike | None = None) -> AccelRef:
    """Make an array to be written, of the shape, device and, without `dtype`, the dtype of `x`."""
    return await _like("empty_like", 0, x, dtype)


@arguments_of(empty_like, _like, "zeros_like", 0)
def zeros_like() -> None:
    """Make an array of zeros, of the shape, device and, without `dtype`, the dtype of `x`."""


@arguments_of(empty_like, _like, "ones_like", 1)
def ones_like() -> None:
    """Make an array of ones, of the shape, device and, without `dtype`, the dtype of `x`."""


@composed
async def full_like(x: AccelRef, fill_value: complex, *, dtype: DTypeLike | None = None) -> AccelRef:
    """Make an array of one value, of the shape, device and, without `dtype`, the dtype of `x`."""
    return await _like("full_like", fill_value, x, dtype)


@composed
async def arange(
    device: Device,
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DTypeLike | None = None,
) -> AccelRef:
    """Make the numbers from `start` to below `stop`, in steps.

    Args:
        device: The device.
        start: The first number; without `stop`, 0 is the first number, and this one is `stop`.
        stop: The end, which is excluded.
        step: The step, which may be negative.
        dtype: Their dtype; by default `int64` for integers, else `float64`. They are computed in one of
            these, and rounded once.

    Raises:
        ValueError: The step is 0, numbers are not finite or not held by an integer `dtype`, or there are more
            numbers than an array can have.
    """
    name = "arrays.arange"
    arguments = {"start": start, "step": step} | ({} if stop is None else {"stop": stop})
    numbers = [check_number(name, argument, number, is_real=True) for argument, number in arguments.items()]
    first, by, end = numbers if len(numbers) == 3 else (0, numbers[1], numbers[0])
    is_whole = all(isinstance(number, int) for number in numbers)
    if not is_whole:
        first, by, end = (_inexact(name, "a number", number).real for number in (first, by, end))
    range_text = f"start {first}, stop {end}, step {by}"
    if not by or not (is_whole or all(map(math.isfinite, (first, by, end)))):
        raise ValueError(f"{name}: numbers must be finite, and the step not 0, got {range_text}")
    kind = DType.of(("int64" if is_whole else "float64") if dtype is None else dtype)
    count = max(_count(first, end, by, is_whole=is_whole), 0)
    if count >= 1 << 63:
        raise ValueError(f"{name}: these are more numbers than an array has, got {range_text}")
    if is_whole and count:
        first, by = int(first), int(by)
        ends = first, first + (count - 1) * by
        if kind.kind in ("int", "uint") and not all(map(partial(_is_held, kind), ends)):
            raise ValueError(f"{name}: {kind} does not hold the numbers from {ends[0]} to {ends[1]}")
        if not all(map(partial(_is_held, DType.int64), (first, by))):
            # Sums of int64 wrap around to the same bits as sums of uint64.
            first, by = map(float if kind.is_inexact else _wrapped, (first, by))
    if is_whole:
        return await _computed(device, "arange", "start + step * i(0)", count, kind, start=first, step=by)
    scale = _scale(first, end)
    parameters = {"start": first / scale, "step": by / scale, "scale": scale}
    return await _computed(device, "arange", "scale * (start + step * i(0))", count, kind, **parameters)


def _count(first: Any, end: Any, step: Any, *, is_whole: bool) -> int:
    """Count the numbers from one to below another in steps; 1 << 63 means more than an array can have."""
    if is_whole:
        return int(-((first - end) // step))
    distance: float = (end - first) / step
    # Quotients may fit where the distance does not.
    parts: float = distance if math.isfinite(distance) else end / step - first / step
    return math.ceil(parts) if math.isfinite(parts) else (1 << 63) * (parts > 0)


def _is_held(dtype: DType, number: int) -> bool:
    limits = np.iinfo(dtype.dtype)
    return bool(limits.min <= number <= limits.max)


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@composed
async def linspace(
    device: Device,
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: DTypeLike | None = None,
    endpoint: bool = True,
) -> AccelRef:
    """Make numbers of one distance from `start` to `stop`.

    Args:
        device: The device.
        start: The first number.
        stop: The last one, or with ``endpoint=False`` that after the last one.
        num: How many.
        dtype: A floating or complex dtype; by default `float64`, or `complex128` for complex numbers. They
            are computed in one of these, and rounded once.
        endpoint: Whether `stop` is part of them.

    Raises:
        TypeError: A dtype of integers, or a real one for complex numbers.
        ValueError: `num` is below 0, or float64 does not hold a number.
    """
    ends = [_inexact("arrays.linspace", *pair) for pair in (("start", start), ("stop", stop))]
    return await _spaced("linspace", device, ends, num, dtype, endpoint=endpoint)


async def _spaced(
    function: str,
    device: Device,
    ends: Sequence[complex],
    num: int,
    dtype: DTypeLike | None,
    *,
    endpoint: bool,
) -> AccelRef:
    """Make numbers of one distance from one to another, for a function of this name."""
    name = f"arrays.{function}"
    count, is_complex = bounded_integer(name, "num", num), np.iscomplexobj(ends)
    kind = DType.of(("complex128" if is_complex else "float64") if dtype is None else dtype)
    _check_inexact(name, kind, is_complex=is_complex)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{name}: num must be at least 0, and no more than an array has, got {num}")
    parts = count - 1 if flag(name, "endpoint", endpoint) else count
    scale = _scale(*ends)
    first, scaled_end = (end / scale for end in ends)
    step = (scaled_end - first) / parts if parts > 0 else 0.0
    # The last number is `stop` itself, and not rounded to it. A single one is `start`.
    numbers = {"stop": ends[1], "last": parts if endpoint and parts > 0 else -1, "start": first, "step": step}
    text = "stop if i(0) == last else scale * (start + step * i(0))"
    return await _computed(device, function, text, count, kind, **numbers, scale=scale)


def _scale(*numbers: complex) -> float:
    """Choose a power of two that numbers are divided by, so that steps do not overflow or vanish."""
    largest = max(abs(part) for number in numbers for part in (number.real, number.imag))
    return 4.0 if largest > 1e300 else 2.0**-200 if largest < 1e-200 else 1.0


def _inexact(name: str, argument: str, number: complex, *, is_real: bool = False) -> complex:
    """Take a number as a floating or complex one of Python's."""
    value = check_number(name, argument, number, is_real=is_real)
    try:
        return complex(value) if isinstance(value, complex) else float(value)
    except OverflowError:
        raise ValueError(f"{name}: {argument} is larger than float64 holds, got {number!r}") from None


def _check_inexact(name: str, dtype: DType, *, is_complex: bool = False) -> None:
    if not dtype.is_inexact or (is_complex and dtype.kind != "complex"):
        expected = "complex" if is_complex else "floating or complex"
        advice = "" if is_complex else "; round what it makes, and cast that for integers"
        raise TypeError(f"{name}: dtype must be {expected}, got {dtype}{advice}")


async def _diagonal(
    name: str, text: str, device: Device, n_rows: int, n_cols: int | None, k: int, dtype: DTypeLike
) -> AccelRef:
    """Compute an expression of indices and a diagonal."""
    full_name = f"arrays.{name}"
    rows = bounded_integer(full_name, "n_rows", n_rows)
    shape = (rows, rows if n_cols is None else bounded_integer(full_name, "n_cols", n_cols))
    # No diagonal is further away, whatever integer is given.
    nearest = max(-shape[0], min(clamped(full_name, "k", k), shape[1]))
    return await _computed(device, name, text, shape, dtype, k=nearest)


@composed
async def eye(
    device: Device, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: DTypeLike = "float64"
) -> AccelRef:
    """Make a matrix with ones on a diagonal, and zeros elsewhere.

    Args:
        device: The device.
        n_rows: Its rows.
        n_cols: Its columns; None for as many.
        k: Which diagonal: above the main one for positive numbers, below it for negative ones.
        dtype: Its dtype.

    Raises:
        ValueError: A negative size.
    """
    return await _diagonal("eye", "i(1) == i(0) + k", device, n_rows, n_cols, k, dtype)


@arguments_of(eye, _diagonal, "tri", "i(1) <= i(0) + k")
def tri() -> None:
    """Make a matrix with ones on a diagonal and below it, and zeros above; see `eye` for arguments."""


@composed
async def diag(x: Operand, *, k: int = 0) -> AccelRef:
    """Make matrices with vectors on a diagonal, and zeros elsewhere, as `torch.diag_embed` does.

    `diagonal` is the inverse.

    Args:
        x: Array of shape (..., n).
        k: Which diagonal: above the main one for positive numbers, below it for negative ones.

    Returns:
        Matrices of n + abs(k) rows and columns.

    Raises:
        TypeError: `x` is not an array, or `k` is not an integer.
        ValueError: `x` has no axis.
    """
    [x] = await placed("arrays.diag", x=x)
    if not x.ndim:
        raise ValueError("arrays.diag: x must have an axis, got shape ()")
    k = bounded_integer("arrays.diag", "k", k)
    size = x.shape[-1] + abs(k)
    leading = [f"i({axis})" for axis in range(x.ndim - 1)]
    if not x.shape[-1]:
        return await _full("diag", 0, x.device, (*x.shape[:-1], size, size), x.dtype)
    text = f"x[{', '.join([*leading, 'i(-2) + minimum(k, 0)'])}] if i(-1) == i(-2) + k else bool(0)"
    expression = Elementwise[AccelRef](text, inputs=("x", "k"), operation="arrays.diag")
    return await expression(x, k, shape=(*x.shape[:-1], size, size))


@composed
async def logspace(
    device: Device,
    start: float,
    stop: float,
    /,
    num: int,
    *,
    base: float = 10.0,
    dtype: DTypeLike = "float64",
    endpoint: bool = True,
) -> AccelRef:
    """Make powers of one base with exponents at equal distances; see `linspace` for arguments.

    Raises:
        TypeError: See `linspace`; or a complex number.
        ValueError: See `linspace`.
    """
    name, kind = "arrays.logspace", DType.of(dtype)
    _check_inexact(name, kind)
    ends = [_inexact(name, *pair, is_real=True) for pair in (("start", start), ("stop", stop))]
    number = _inexact(name, "base", base, is_real=True)
    exponents = await _spaced("logspace", device, ends, num, None, endpoint=endpoint)
    return await _expression("logspace", "base ** x", kind)(number, exponents)


@composed
async def geomspace(
    device: Device,
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: DTypeLike = "float64",
    endpoint: bool = True,
) -> AccelRef:
    """Make numbers of one ratio from `start` to `stop`, of one sign; see `linspace` for arguments.

    The first number is `start` itself, and with `endpoint` the last one is `stop`.

    Raises:
        TypeError: See `linspace`; or a complex number.
        ValueError: See `linspace`; or a number is 0 or not finite, or the signs differ.
    """
    name, kind = "arrays.geomspace", DType.of(dtype)
    _check_inexact(name, kind)
    ends = [_inexact(name, *pair, is_real=True).real for pair in (("start", start), ("stop", stop))]
    if not all(end and math.isfinite(end) for end in ends) or (ends[0] > 0) is not (ends[1] > 0):
        received = f"got {start!r} and {stop!r}"
        raise ValueError(f"{name}: start and stop must be finite, not 0 and of one sign, {received}")
    powers = [math.log10(abs(end)) for end in ends]
    exponents = await _spaced("geomspace", device, powers, num, None, endpoint=endpoint)
    text = "stop if i(0) == last else start if i(0) == 0 else side * 10.0 ** x"
    last_index = num - 1 if endpoint and num > 1 else -1
    return await _expression("geomspace", text, kind)(
        stop=ends[1], last=last_index, start=ends[0], side=math.copysign(1.0, ends[0]), x=exponents
    )


@composed
async def tril(x: Operand, /, *, k: int = 0, out: Out = None) -> AccelRef:
    """Copy matrices, with zeros in place of the elements above a diagonal.

    Args:
        x: Array of shape (..., m, n).
        k: Which diagonal: above the main one for positive numbers, below it for negative ones.
        out: Array to write to, of any strides; it may be `x`.

    Raises:
        ValueError: There are fewer than two axes, or `out` has another shape.
    """
    return await _LOWER(x=x, k=clamped("arrays.tril", "k", k), out=out)


@composed
async def triu(x: Operand, /, *, k: int = 0, out: Out = None) -> AccelRef:
    """Copy matrices, with zeros in place of the elements below a diagonal; see `tril`."""
    return await _UPPER(x=x, k=clamped("arrays.triu", "k", k), out=out)


_LOWER, _UPPER = (
    Elementwise[AccelRef](f"x if i(-1) - i(-2) {sign} k else bool(0)", operation=f"arrays.{name}")
    for name, sign in (("tril", "<="), ("triu", ">="))
)


async def _computed(
    device: Device, name: str, text: str, shape: int | Ints, dtype: DTypeLike, **numbers: Any
) -> AccelRef:
    """Compute an expression of numbers and indices."""
    check_device(f"arrays.{name}", device)
    expression = _expression(name, text, DType.of(dtype))
    return await device.ask(expression.compute(shape=shape, **numbers))


@functools.cache
def _expression(name: str, text: str, dtype: DType) -> Elementwise[AccelRef]:
    return Elementwise(text, dtypes=dtype, operation=f"arrays.{name}")
