"""Helpers of all image functions: arguments, values outside of the edges, and windows as views.

An array is padded once (D190), by index arithmetic in an expression. Each element of a window is a view of
that then. An expression over views has neither indices nor edges, and runs as fast as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from ..backends.base import DType, DTypeLike, HostArray
from ..devices import AccelRef, bounded_integer
from ..expressions import Elementwise, check_ref

__all__ = ["Mode", "Output"]

Mode: TypeAlias = Literal[
    "reflect", "constant", "nearest", "mirror", "wrap", "grid-constant", "grid-mirror", "grid-wrap"
]
"""What is beyond an edge, as in `scipy.ndimage`: ``(d c b a | a b c d | d c b a)``, a number, the last
element, ``(d c b | a b c d | c b a)``, or the array again. The ``grid-`` ones are the same in filters."""

Output: TypeAlias = DTypeLike | AccelRef | None
"""The dtype of a result, or an array to write to; None for the dtype of the input."""

Numbers: TypeAlias = "int | Sequence[int]"
Floats: TypeAlias = "float | Sequence[float]"
Modes: TypeAlias = "Mode | Sequence[Mode]"

MAX_WINDOW_ELEMENTS: Final = 24
"""Elements of windows that one expression takes: a GPU's kernel has room for as many views, and weights."""

# The place inside of an axis with n elements for the place j; p is the period of a mirror.
_INSIDE = {
    "reflect": "minimum({j} % (2 * {n}), 2 * {n} - 1 - {j} % (2 * {n}))",
    "mirror": "minimum({j} % {p}, {p} - {j} % {p})",
    "nearest": "clip({j}, 0, {n} - 1)",
    "wrap": "{j} % {n}",
    "constant": "{j}",
}
_MODE_ALIASES = {"grid-constant": "constant", "grid-mirror": "reflect", "grid-wrap": "wrap"}


def require(is_right: object, message: str) -> None:
    """Raise a `ValueError` unless a condition holds. `named` adds the function's name."""
    if not is_right:
        raise ValueError(message)


def integer(argument: str, value: Any) -> int:
    """Take an integer. Raises `TypeError`."""
    # `named` writes the function's name in place of this one.
    return bounded_integer("ndimage.function", argument, value)


def real(argument: str, value: Any) -> float:
    """Take a finite number. Raises `TypeError`, `ValueError`."""
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    require(np.isfinite(number), f"{argument} must be finite, got {number}")
    return number


def per_axis(argument: str, value: Any, count: int) -> list[Any]:
    """Take a value for each axis: one for all, or as many. Raises `ValueError` for another number of them."""
    values = [value] * count if isinstance(value, str) or not np.iterable(value) else list(value)
    require(len(values) == count, f"{argument} must be one, or one for each of {count} axes, got {value!r}")
    return values


def modes_of(mode: object, count: int) -> list[str]:
    """Take a mode for each axis; the ``grid-`` ones have other names. Raises `ValueError` for others."""
    modes = per_axis("mode", mode, count)
    names = [_MODE_ALIASES.get(str(requested), str(requested)) for requested in modes]
    for requested_mode, name in zip(modes, names, strict=True):
        require(
            name in _INSIDE,
            f"mode must be one of {', '.join((*_INSIDE, *_MODE_ALIASES))}, got {requested_mode!r}",
        )
    return names


def axes_of(x: Any, axes: object) -> list[int]:
    """Take the array of a device, and axes of it in their order. Raises `TypeError`, `ValueError`."""
    check_ref("ndimage.function", "input", x)
    several: Any = range(x.ndim) if axes is None else axes
    candidates, argument = (several, "axes") if np.iterable(several) else ((several,), "axis")
    indices = [integer(argument, axis) for axis in candidates]
    is_right = all(-x.ndim <= axis < x.ndim for axis in indices)
    is_right = is_right and len({axis % x.ndim for axis in indices}) == len(indices)
    require(is_right, f"{argument} must be different ones of {x.ndim}, got {axes!r}")
    return [axis % x.ndim for axis in indices]


def numbers(argument: str, value: object, dtype: str = "") -> HostArray:
    """Take numbers of the host, on which it depends what is launched. Raises `TypeError` for others."""
    array = np.empty(0, object) if isinstance(value, AccelRef) else np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{argument} must be numbers on the host, got {value!r}")
    return array.astype(dtype or ("complex128" if array.dtype.kind == "c" else "float64"))


def dtype_of(x: Any, output: Output, shape: Sequence[int], is_complex: bool = False) -> DType:
    """Find the dtype of a result. Raises `TypeError` for a real one of complex sums; `ValueError`."""
    is_complex = is_complex or x.dtype.kind == "complex"
    natural = np.result_type(x.dtype.dtype, np.complex64) if is_complex else x.dtype.dtype
    dtype = output.dtype if isinstance(output, AccelRef) else DType.of(natural if output is None else output)
    if isinstance(output, AccelRef):
        require(output.shape == tuple(shape), f"output must have shape {tuple(shape)}, got {output.shape}")
    if is_complex and dtype.kind != "complex":
        raise TypeError(f"output must be of a complex dtype, got {dtype}")
    return dtype


def reach(size: int, origin: int) -> tuple[int, int]:
    """Count the elements of a window before its place, and after it. Raises `ValueError`."""
    padding_before, min_origin = size // 2 + origin, -(size // 2)
    message = (
        f"size must be at least 1, and origin from {min_origin} to {(size - 1) // 2} for {size}, got {origin}"
    )
    require(0 <= padding_before < size, message)
    return padding_before, size - 1 - padding_before


def origins_of(origin: object, shape: Sequence[int], *, is_turned: bool = False) -> list[int]:
    """Take where windows lie: on the other side, if they are turned. Raises `TypeError`, `ValueError`."""
    origins = [integer("origin", offset) for offset in per_axis("origin", origin, len(shape))]
    return (
        [-offset - (n % 2 == 0) for offset, n in zip(origins, shape, strict=True)] if is_turned else origins
    )


def in_order(along: Sequence[int], *rows: Sequence[Any]) -> list[list[Any]]:
    """Sort axes with their parameters, because windows have the image's order of axes, as SciPy's."""
    order = sorted(range(len(along)), key=along.__getitem__)
    return [[row[n] for n in order] for row in (along, *rows)]


def spread(x: AccelRef, axes: Sequence[int], values: Sequence[Any], default: Any) -> tuple[Any, ...]:
    """Return a value for each axis of an image: the given ones, and another value for the other axes."""
    by_axis = dict(zip(axes, values, strict=True))
    return tuple([by_axis.get(axis, default) for axis in range(x.ndim)])


def stored(value: str, dtype: DType) -> str:
    """Return what becomes an element: integers are cut off, and wrap around."""
    if dtype is DType.uint64:
        return f"where({value} < 9e18, uint64(int64({value})), uint64({value}))"
    return value if dtype.is_inexact else f"int64({value})"


def wide_of(x: AccelRef, is_complex: bool = False) -> str:
    """Return the dtype in which SciPy computes."""
    return "complex128" if is_complex or x.dtype.kind == "complex" else "float64"


@functools.cache
def compute(name: str, text: str, inputs: Any, dtype: DType | None = None) -> Elementwise[AccelRef]:
    """Make an expression with one result."""
    return Elementwise(text, inputs=inputs, dtypes=dtype, operation=f"ndimage.{name}")


@functools.cache
def several(name: str, text: str, inputs: Any, outputs: Any, dtype: DType | None = None) -> Elementwise[Any]:
    """Make an expression with named results."""
    return Elementwise(text, inputs=inputs, outputs=outputs, dtypes=dtype, operation=f"ndimage.{name}")


async def converted(x: Any, dtype: DType, out: AccelRef | None = None) -> AccelRef:
    """Copy an array, with the dtype of `stored`."""
    return await compute("copy", f"y = {stored('x', dtype)}", ("x",), dtype)(x, out=out)


async def delivered(result: AccelRef, output: Output) -> AccelRef:
    """Write a result to the array that the caller has for it, if any."""
    return await converted(result, output.dtype, output) if isinstance(output, AccelRef) else result


async def padded(x: AccelRef, widths: Sequence[Any], modes: Sequence[str], cval: complex = 0.0) -> AccelRef:
    """Put elements around an array.

    Args:
        x: The array.
        widths: The number of elements before and after each axis.
        modes: Their values, for each axis; see `mode_of`.
        cval: The number of ``"constant"``. If the dtype does not hold it, the result has a wider one.
    """
    require(x.dtype.kind == "complex" or np.isreal(cval), f"cval must be real as the image is, got {cval!r}")
    if not any(map(any, widths)):
        return x
    rows = list(enumerate(zip(x.shape, widths, modes, strict=True)))
    shape = [sum((n, *pair)) for _, (n, pair, _) in rows]
    with np.errstate(all="ignore"):
        value: Any = np.asarray(cval).astype(x.dtype.dtype)[()]
    if value != cval and not np.isnan(cval):
        value = np.asarray(cval, np.result_type(np.asarray(cval), np.float64))[()]
    if not x.size:
        return await x.device.full(shape, value if "constant" in modes else 0, DType.of(value.dtype))
    operands = [x, *[number for _, (n, pair, _) in rows if any(pair) for number in (pair[0], n)]]
    expression = _padding(x.ndim, tuple([(axis, mode) for axis, (_, pair, mode) in rows if any(pair)]))
    operands += [value] * ("value" in expression.inputs)
    return await expression(*operands, shape=shape)


@functools.cache
def _padding(ndim: int, along: Sequence[tuple[int, str]]) -> Elementwise[AccelRef]:
    """Write the expression, for modes by axes."""
    text = "".join(f"j{axis} = i({axis}) - b{axis};" for axis, _ in along)
    indices, inside = [f"i({axis})" for axis in range(ndim)], list[str]()
    for axis, mode in along:
        period = f"maximum(2 * n{axis} - 2, 1)"
        indices[axis] = _INSIDE[mode].format(j=f"j{axis}", n=f"n{axis}", p=period)
        inside += [f"0 <= j{axis} and j{axis} < n{axis}"] * (mode == "constant")
    element = f"x[{', '.join(indices)}]"
    text += f"y = where({' and '.join(inside)}, {element}, value)" if inside else f"y = {element}"
    sizes = [f"{key}{axis}" for axis, _ in along for key in "bn"]
    return compute("pad", text, ("x", *sizes, *["value"] * bool(inside)))


def view(x: AccelRef, shape: Sequence[int], offset: Sequence[int]) -> AccelRef:
    """View the part of a padded array that begins at an offset."""
    return x[tuple([slice(start, start + n) for start, n in zip(offset, shape, strict=True)])]


async def windows(
    x: AccelRef,
    axes: Sequence[int],
    window: HostArray,
    origins: Sequence[int],
    modes: Sequence[str],
    cval: complex,
) -> list[AccelRef]:
    """Pad an image, and view it once for each true element of a window, in C order."""
    widths = [reach(n, origin) for n, origin in zip(window.shape, origins, strict=True)]
    wider = await padded(x, spread(x, axes, widths, (0, 0)), spread(x, axes, modes, "nearest"), cval)
    return [view(wider, x.shape, spread(x, axes, index, 0)) for index in np.argwhere(window).tolist()]
