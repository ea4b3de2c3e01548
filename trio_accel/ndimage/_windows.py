"""What all functions of images share: their arguments, what is beyond an edge, and windows as views.

An array is padded once, by index arithmetic in an expression. Each element of a window is a view of that then: an
expression over views has neither indices nor edges, and runs as fast as any on all backends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..backends.base import DType, DTypeLike, NotSupportedError
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..expressions import Elementwise, check_ref, intermediates

__all__ = ["Mode", "Output"]

Mode: TypeAlias = Literal[
    "reflect", "constant", "nearest", "mirror", "wrap", "grid-constant", "grid-mirror", "grid-wrap"
]
"""What is beyond an edge, as in `scipy.ndimage`: ``(d c b a | a b c d | d c b a)``, a number, the last element,
``(d c b | a b c d | c b a)``, or the array again. The ``grid-`` ones are the same in filters."""

Output: TypeAlias = "DTypeLike | AccelRef | None"
"""The dtype of a result, or an array to write to; None for the dtype of the input."""

MOST: Final = 24
"""Elements of a window that one expression takes: a GPU's kernel has room for so many views and weights."""

# The place inside of an axis of n elements for the place j, whichever that is.
_INSIDE = {
    "reflect": "minimum(({j}) % (2 * {n}), 2 * {n} - 1 - ({j}) % (2 * {n}))",
    "mirror": "minimum(({j}) % maximum(2 * {n} - 2, 1), maximum(2 * {n} - 2, 1) - ({j}) % maximum(2 * {n} - 2, 1))",
    "nearest": "clip({j}, 0, {n} - 1)",
    "wrap": "({j}) % {n}",
    "constant": "{j}",
}
_SAME = {"grid-constant": "constant", "grid-mirror": "reflect", "grid-wrap": "wrap"}


def taken(name: str, **arrays: object) -> list[AccelRef]:
    """Require arrays of a device, of dtypes that expressions compute with.

    Raises:
        TypeError: One is none.
        NotSupportedError: float8.
    """
    for argument, array in arrays.items():
        check_ref(name, argument, array)
        dtype = cast("AccelRef", array).dtype
        if dtype.value.startswith("float8"):
            raise NotSupportedError(f"{name}: {argument} is of {dtype}; convert it, as by cast('float32')")
    return cast("list[AccelRef]", list(arrays.values()))


def numbers(name: str, argument: str, value: object, dtype: str = "") -> npt.NDArray[Any]:
    """Take numbers of the host, on which it depends what is computed: float64 or complex128, or of a dtype.

    Raises:
        TypeError: They are none, or on a device.
    """
    found = None if isinstance(value, AccelRef) else np.asarray(value)
    if found is None or found.dtype.kind not in "biufc":
        told = (
            "an AccelRef, on whose elements it would depend what is launched"
            if found is None
            else repr(value)
        )
        raise TypeError(f"{name}: {argument} must be numbers on the host, got {told}")
    return found.astype(dtype or ("complex128" if found.dtype.kind == "c" else "float64"))


def mode_of(name: str, mode: object) -> str:
    """Take a mode; the ``grid-`` ones have other names.

    Raises:
        ValueError: There is no such mode.
    """
    found = _SAME.get(mode, mode) if isinstance(mode, str) else None
    if found not in _INSIDE:
        raise ValueError(f"{name}: mode must be one of {', '.join((*_INSIDE, *_SAME))}, got {mode!r}")
    return cast("str", found)


def each(name: str, argument: str, value: Any, count: int) -> list[Any]:
    """Take a value for each axis: one for all, or as many.

    Raises:
        ValueError: Another number of them.
    """
    if isinstance(value, str) or not np.iterable(value):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name}: {argument} must be one value, or one for each of {count} axes, got {value!r}"
        )
    return list(value)


def axes_of(name: str, x: AccelRef, axes: object) -> tuple[int, ...]:
    """Take the axes of an image, in their order.

    Raises:
        TypeError, ValueError: They are not there, or twice.
    """
    given: Any = range(x.ndim) if axes is None else axes if np.iterable(axes) else (axes,)
    found = tuple([whole(name, "axes", axis) for axis in given])
    if any(not -x.ndim <= axis < x.ndim for axis in found) or len({axis % x.ndim for axis in found}) < len(
        found
    ):
        raise ValueError(f"{name}: axes must be distinct ones of the {x.ndim}, got {axes!r}")
    return tuple([axis % x.ndim for axis in found])


def dtype_of(
    name: str, x: AccelRef, output: Output, shape: tuple[int, ...], *, is_complex: bool = False
) -> DType:
    """Find the dtype of a result.

    Raises:
        TypeError: There is no such dtype, or it is real and the result complex.
        ValueError: The output has another shape.
    """
    if isinstance(output, AccelRef):
        if output.shape != shape:
            raise ValueError(f"{name}: output must have shape {shape}, got {output.shape}")
        dtype = output.dtype
    elif output is not None:
        dtype = DType.of(output)
    else:
        is_wider = is_complex and x.dtype.kind != "complex"
        return DType.of(np.result_type(x.dtype.dtype, np.complex64)) if is_wider else x.dtype
    if is_complex and dtype.kind != "complex":
        raise TypeError(f"{name}: output must be of a complex dtype, got {dtype}")
    return dtype


@functools.cache
def converted(dtype: DType) -> Elementwise[AccelRef]:
    """Copy an array, to a dtype as `stored` says."""
    return Elementwise(f"y = {stored('x', dtype)}", dtypes=dtype, operation="ndimage.copy")


async def delivered(made: AccelRef, output: Output) -> AccelRef:
    """Write a result to the array that the caller has for it, if any."""
    if not isinstance(output, AccelRef):
        return made
    with intermediates() as old:
        return await converted(output.dtype)(old(made), out=output)


def reach(name: str, size: int, origin: object) -> tuple[int, int]:
    """Count the elements of a window ahead of its place, and behind it.

    Raises:
        ValueError: There is no window, or its origin is outside of it.
    """
    before = size // 2 + whole(name, "origin", origin)
    if size < 1:
        raise ValueError(f"{name}: size must be at least 1, got {size}")
    if not 0 <= before < size:
        least, most = -(size // 2), (size - 1) // 2
        raise ValueError(f"{name}: origin must be from {least} to {most} for {size} elements, got {origin}")
    return before, size - 1 - before


async def padded(
    x: AccelRef, widths: Sequence[tuple[int, int]], modes: Sequence[str], cval: complex = 0.0
) -> AccelRef:
    """Put elements around an array.

    Args:
        x: The array.
        widths: How many come ahead of those of each axis, and behind them.
        modes: What they are, for each axis; names of `mode_of`.
        cval: The number of ``"constant"``. Where the dtype does not hold it, the result has a wider one.
    """
    if not any(map(any, widths)) or not x.size:
        return x
    with np.errstate(all="ignore"):
        value = np.asarray(cval).astype(x.dtype.dtype)[()]
    if value != cval and cval == cval:
        value = np.asarray(cval, np.result_type(np.asarray(cval), np.float64))[()]
    along = tuple([mode if any(pair) else "" for mode, pair in zip(modes, widths, strict=True)])
    named: dict[str, Any] = {"x": x, "value": value}
    for axis, (before, _) in enumerate(widths):
        named |= {f"b{axis}": before, f"n{axis}": x.shape[axis]}
    expression = _padding(along)
    shape = tuple([n + before + behind for n, (before, behind) in zip(x.shape, widths, strict=True)])
    return await expression(*[named[key] for key in expression.inputs], shape=shape)


@functools.cache
def _padding(along: tuple[str, ...]) -> Elementwise[AccelRef]:
    places = [f"j{axis}" if mode else f"i({axis})" for axis, mode in enumerate(along)]
    text = "".join(f"j{axis} = i({axis}) - b{axis};" for axis, mode in enumerate(along) if mode)
    inside = [f"0 <= j{axis} and j{axis} < n{axis}" for axis, mode in enumerate(along) if mode == "constant"]
    found = [
        _INSIDE[mode or "constant"].format(j=j, n=f"n{axis}")
        for axis, (j, mode) in enumerate(zip(places, along, strict=True))
    ]
    element = f"x[{', '.join(found)}]"
    text += f"y = where({' and '.join(inside)}, {element}, value)" if inside else f"y = {element}"
    return Elementwise(text, operation="ndimage.pad")


def view(x: AccelRef, shape: Sequence[int], offset: Sequence[int]) -> AccelRef:
    """View the part of a padded array that begins at an offset."""
    return x[tuple([slice(start, start + n) for start, n in zip(offset, shape, strict=True)])]


def wide_of(*dtypes: DType) -> str:
    """Return the dtype in which SciPy computes."""
    return "complex128" if any(dtype.kind == "complex" for dtype in dtypes) else "float64"


def stored(value: str, dtype: DType) -> str:
    """Return what becomes an element: whole numbers are cut off, and wrap around."""
    if dtype is DType.uint64:
        return f"where({value} < 9e18, uint64(int64({value})), uint64({value}))"
    return value if dtype.is_inexact else f"int64({value})"


def spread(x: AccelRef, axes: Sequence[int], values: Sequence[Any], other: Any) -> tuple[Any, ...]:
    """Return a value for each axis of an image: those of some axes, and another one for the rest."""
    found = dict(zip(axes, values, strict=True))
    return tuple([found.get(axis, other) for axis in range(x.ndim)])
