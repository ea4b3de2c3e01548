"""Functions that create arrays on a device.

They are the creation functions of the array API standard, and `diag`, `geomspace`, `logspace` and `tri`.
`asarray` copies. All others compute the elements on the device, by a fill or by an element-wise expression
that reads indices.
"""

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
        dtype: The dtype of the result; None for the dtype of `obj`.
        copy: True to copy always, False to raise if a copy is needed, None to copy only if needed. Only an
            array of this device and dtype needs no copy.

    Returns:
        `obj` itself if it needs no copy and `copy` is not True; otherwise a new array.

    Raises:
        TypeError: Devices do not support the dtype, or complex numbers would become real.
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
        # As NumPy does: refuse a Python number that the dtype cannot hold, and cast the elements of an array.
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
    result_dtype = DType.of(np.asarray(fill_value).dtype if dtype is None else dtype)
    return await device.full(
        extents, element(operation, "fill_value", fill_value, result_dtype), result_dtype
    )


@composed
async def empty(device: Device, shape: int | Sequence[int], *, dtype: DTypeLike = "float64") -> AccelRef:
    """Make an array to be written; see `full` for arguments.

    The elements are 0, so that another program's data does not show.
    """
    return await _full("empty", 0, device, shape, dtype)


@arguments_of(empty, _full, "zeros", 0)
def zeros() -> None:
    """Make an array of zeros; see `full` for arguments."""


@arguments_of(empty, _full, "ones", 1)
def ones() -> None:
    """Make an array of ones; see `full` for arguments."""


@composed
async def full(
    device: Device, shape: int | Sequence[int], fill_value: complex, *, dtype: DTypeLike | None = None
) -> AccelRef:
    """Make an array with every element set to one value.

    Args:
        device: The device.
        shape: The shape; an integer for a single axis.
        fill_value: The value.
        dtype: The dtype; by default the number's: `bool`, `int64`, `float64` or `complex128`.

    Raises:
        TypeError: `shape` is not integers, `fill_value` is not a number, or a complex value has a real dtype.
        ValueError: An extent is negative, or the dtype cannot hold the value.
    """
    return await _full("full", fill_value, device, shape, dtype)


async def _like(name: str, fill_value: complex, x: AccelRef, dtype: DTypeLike | None) -> AccelRef:
    check_ref(f"arrays.{name}", "x", x)
    return await _full(name, fill_value, x.device, x.shape, x.dtype if dtype is None else dtype)


@composed
async def empty_like(x: AccelRef, *, dtype: DTypeLike | None = None) -> AccelRef:
    """Make an array to be written, with the shape and device of `x`, and by default its dtype.

    The elements are 0, as in `empty`.
    """
    return await _like("empty_like", 0, x, dtype)


@arguments_of(empty_like, _like, "zeros_like", 0)
def zeros_like() -> None:
    """Make an array of zeros, with the shape and device of `x`, and by default its dtype."""


@arguments_of(empty_like, _like, "ones_like", 1)
def ones_like() -> None:
    """Make an array of ones, with the shape and device of `x`, and by default its dtype."""


@composed
async def full_like(x: AccelRef, fill_value: complex, *, dtype: DTypeLike | None = None) -> AccelRef:
    """Make an array of one value, with the shape and device of `x`, and by default its dtype."""
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
    """Make a vector of the numbers from `start` to `stop`, without `stop` itself.

    Args:
        device: The device.
        start: The first number. Without `stop`, this is the end, and the first number is 0.
        stop: The end, which is excluded.
        step: The difference between neighbours, which may be negative.
        dtype: The dtype; by default `int64` for integers, otherwise `float64`. The numbers are computed in
            the default dtype, and rounded once.

    Raises:
        TypeError: An argument is not a real number.
        ValueError: The step is 0, an argument is not finite, an integer `dtype` cannot hold a number, or
            there are more numbers than an array can have.
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
    result_dtype = DType.of(("int64" if is_whole else "float64") if dtype is None else dtype)
    count = max(_count(first, end, by, is_whole=is_whole), 0)
    if count >= 1 << 63:
        raise ValueError(f"{name}: these are more numbers than an array has, got {range_text}")
    if is_whole and count:
        first, by = int(first), int(by)
        ends = first, first + (count - 1) * by
        if result_dtype.kind in ("int", "uint") and not all(map(partial(_is_held, result_dtype), ends)):
            raise ValueError(f"{name}: {result_dtype} does not hold the numbers from {ends[0]} to {ends[1]}")
        if not all(map(partial(_is_held, DType.int64), (first, by))):
            # The expression takes int64, whose sums wrap around to the same bits as sums of uint64.
            first, by = map(float if result_dtype.is_inexact else _wrapped, (first, by))
    if is_whole:
        return await _computed(
            device, "arange", "start + step * i(0)", count, result_dtype, start=first, step=by
        )
    scale = _scale(first, end)
    parameters = {"start": first / scale, "step": by / scale, "scale": scale}
    return await _computed(
        device, "arange", "scale * (start + step * i(0))", count, result_dtype, **parameters
    )


def _count(first: Any, end: Any, step: Any, *, is_whole: bool) -> int:
    """Count the numbers of a range, at most 0 if it is empty; 1 << 63 is more than an array can have."""
    if is_whole:
        return int(-((first - end) // step))
    quotient: float = (end - first) / step
    # The difference may overflow although both quotients are finite.
    steps: float = quotient if math.isfinite(quotient) else end / step - first / step
    if math.isfinite(steps):
        return math.ceil(steps)
    # Both quotients may overflow, and infinity less infinity has no sign.
    return (1 << 63) * bool((end > first) == (step > 0))


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
    """Make a vector of evenly spaced numbers from `start` to `stop`.

    Args:
        device: The device.
        start: The first number.
        stop: The last number; with ``endpoint=False``, the number that would follow the last one.
        num: The number of elements.
        dtype: A floating or complex dtype; by default `float64`, or `complex128` for complex numbers. The
            elements are computed in the default dtype, and rounded once.
        endpoint: Whether `stop` is the last element.

    Raises:
        TypeError: The dtype is not floating or complex, or is real for complex numbers. Or an argument has
            another type.
        ValueError: `num` is below 0, or float64 cannot hold an argument.
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
    """Make the evenly spaced numbers between two ends, for the function with this name."""
    name = f"arrays.{function}"
    count, is_complex = bounded_integer(name, "num", num), np.iscomplexobj(ends)
    result_dtype = DType.of(("complex128" if is_complex else "float64") if dtype is None else dtype)
    _check_inexact(name, result_dtype, is_complex=is_complex)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{name}: num must be at least 0, and no more than an array has, got {num}")
    steps = count - 1 if flag(name, "endpoint", endpoint) else count
    scale = _scale(*ends)
    first, scaled_end = (end / scale for end in ends)
    step = (scaled_end - first) / steps if steps > 0 else 0.0
    # Take `stop` itself as the last number, because a sum of steps may differ. A single number is `start`.
    numbers = {"stop": ends[1], "last": steps if endpoint and steps > 0 else -1, "start": first, "step": step}
    text = "stop if i(0) == last else scale * (start + step * i(0))"
    return await _computed(device, function, text, count, result_dtype, **numbers, scale=scale)


def _scale(*numbers: complex) -> float:
    """Choose a power of two to divide numbers by, so that steps between them do not overflow or vanish."""
    largest = max(abs(part) for number in numbers for part in (number.real, number.imag))
    return 4.0 if largest > 1e300 else 2.0**-200 if largest < 1e-200 else 1.0


def _inexact(name: str, argument: str, number: complex, *, is_real: bool = False) -> complex:
    """Convert a number to a Python float, or to a complex number if it is complex.

    Raises:
        TypeError: It is not a number, or is complex although `is_real`.
        ValueError: It is an integer that float64 cannot hold.
    """
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
    """Compute a matrix by an expression of its indices ``i(0)``, ``i(1)`` and a diagonal ``k``."""
    full_name = f"arrays.{name}"
    rows = bounded_integer(full_name, "n_rows", n_rows)
    shape = (rows, rows if n_cols is None else bounded_integer(full_name, "n_cols", n_cols))
    # A diagonal further outside gives the same matrix, but the sum of `k` and an index might overflow.
    clamped_k = max(-shape[0], min(clamped(full_name, "k", k), shape[1]))
    return await _computed(device, name, text, shape, dtype, k=clamped_k)


@composed
async def eye(
    device: Device, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: DTypeLike = "float64"
) -> AccelRef:
    """Make a matrix with ones on a diagonal, and zeros elsewhere.

    Args:
        device: The device.
        n_rows: The number of rows.
        n_cols: The number of columns; None for `n_rows`.
        k: The diagonal: 0 is the main diagonal, positive numbers are above it, negative numbers below it.
        dtype: The dtype.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A size is negative.
    """
    return await _diagonal("eye", "i(1) == i(0) + k", device, n_rows, n_cols, k, dtype)


@arguments_of(eye, _diagonal, "tri", "i(1) <= i(0) + k")
def tri() -> None:
    """Make a matrix with ones on and below a diagonal, and zeros above; see `eye` for arguments."""


@composed
async def diag(x: Operand, *, k: int = 0) -> AccelRef:
    """Make square matrices with vectors on a diagonal, and zeros elsewhere, as `torch.diag_embed` does.

    `diagonal` is the inverse.

    Args:
        x: Array of shape (..., n).
        k: The diagonal; see `eye`.

    Returns:
        Array of shape (..., n + abs(k), n + abs(k)), with the dtype of `x`.

    Raises:
        TypeError: `x` is not an array, or `k` is not an integer.
        ValueError: `x` is 0-d.
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
    """Make powers of `base` with evenly spaced exponents, from `start` to `stop`.

    See `linspace` for the other arguments.

    Raises:
        TypeError: See `linspace`; or a number is complex.
        ValueError: See `linspace`.
    """
    name, result_dtype = "arrays.logspace", DType.of(dtype)
    _check_inexact(name, result_dtype)
    ends = [_inexact(name, *pair, is_real=True) for pair in (("start", start), ("stop", stop))]
    number = _inexact(name, "base", base, is_real=True)
    exponents = await _spaced("logspace", device, ends, num, None, endpoint=endpoint)
    return await _expression("logspace", "base ** x", result_dtype)(number, exponents)


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
    """Make numbers with a constant ratio, from `start` to `stop`; see `linspace` for arguments.

    The first number is `start` itself, and with `endpoint` the last number is `stop`. Both must have the same
    sign.

    Raises:
        TypeError: See `linspace`; or a number is complex.
        ValueError: See `linspace`; or a number is 0 or not finite, or the signs differ.
    """
    name, result_dtype = "arrays.geomspace", DType.of(dtype)
    _check_inexact(name, result_dtype)
    ends = [_inexact(name, *pair, is_real=True).real for pair in (("start", start), ("stop", stop))]
    if not all(end and math.isfinite(end) for end in ends) or (ends[0] > 0) is not (ends[1] > 0):
        received = f"got {start!r} and {stop!r}"
        raise ValueError(f"{name}: start and stop must be finite, not 0 and of one sign, {received}")
    powers = [math.log10(abs(end)) for end in ends]
    exponents = await _spaced("geomspace", device, powers, num, None, endpoint=endpoint)
    text = "stop if i(0) == last else start if i(0) == 0 else side * 10.0 ** x"
    last_index = num - 1 if endpoint and num > 1 else -1
    return await _expression("geomspace", text, result_dtype)(
        stop=ends[1], last=last_index, start=ends[0], side=math.copysign(1.0, ends[0]), x=exponents
    )


@composed
async def tril(x: Operand, /, *, k: int = 0, out: Out = None) -> AccelRef:
    """Copy matrices, with zeros in place of the elements above a diagonal.

    Args:
        x: Array of shape (..., m, n).
        k: The diagonal; see `eye`.
        out: Array to write to, of any strides; it may be `x`.

    Raises:
        TypeError: `x` is not an array, or `k` is not an integer.
        ValueError: There are fewer than two axes, or `out` has another shape.
    """
    _check_matrices("arrays.tril", x)
    return await _LOWER(x=x, k=clamped("arrays.tril", "k", k), out=out)


@composed
async def triu(x: Operand, /, *, k: int = 0, out: Out = None) -> AccelRef:
    """Copy matrices, with zeros in place of the elements below a diagonal; see `tril`."""
    _check_matrices("arrays.triu", x)
    return await _UPPER(x=x, k=clamped("arrays.triu", "k", k), out=out)


def _check_matrices(name: str, x: Any) -> None:
    # The expression refuses what is not an array.
    shape = () if isinstance(x, int | float | complex) else getattr(x, "shape", None)
    if shape is not None and len(shape) < 2:
        raise ValueError(f"{name}: x must have at least two axes, got shape {shape}")


_LOWER, _UPPER = (
    Elementwise[AccelRef](f"x if i(-1) - i(-2) {sign} k else bool(0)", operation=f"arrays.{name}")
    for name, sign in (("tril", "<="), ("triu", ">="))
)


async def _computed(
    device: Device, name: str, text: str, shape: int | Ints, dtype: DTypeLike, **numbers: Any
) -> AccelRef:
    """Compute an array by an expression that reads only indices and numbers."""
    check_device(f"arrays.{name}", device)
    expression = _expression(name, text, DType.of(dtype))
    return await device.ask(expression.compute(shape=shape, **numbers))


@functools.cache
def _expression(name: str, text: str, dtype: DType) -> Elementwise[AccelRef]:
    return Elementwise(text, dtypes=dtype, operation=f"arrays.{name}")
