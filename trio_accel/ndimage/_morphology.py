"""Erosion, dilation and distances of binary images, by `scipy.ndimage`'s names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..arrays import any as any_of
from ..arrays import cumulative_max, cumulative_min, flip, stack
from ..arrays import max as max_of
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, intermediates
from ._windows import (
    MOST,
    Output,
    axes_of,
    converted,
    delivered,
    dtype_of,
    each,
    numbers,
    padded,
    reach,
    spread,
    taken,
    view,
)

__all__ = ["binary_dilation", "binary_erosion", "distance_transform_edt"]

_TRUTHS = Elementwise[AccelRef]("x != 0", operation="ndimage.binary_erosion")
_MASKED = Elementwise[AccelRef](
    "where(mask != 0, x, y)", inputs=("mask", "x", "y"), operation="ndimage.binary_erosion"
)
_CHANGED = Elementwise[AccelRef]("x != y", operation="ndimage.binary_erosion")


def cross(ndim: int) -> npt.NDArray[np.bool_]:
    """Return the structure of neighbours along the axes."""
    return np.abs(np.indices((3,) * ndim) - 1).sum(0) <= 1 if ndim else np.ones((), bool)


@functools.cache
def _joined(operator: str, count: int) -> Elementwise[AccelRef]:
    names = [f"x{n}" for n in range(count)]
    return Elementwise("y = " + f" {operator} ".join(names), inputs=names, operation="ndimage.binary_erosion")


async def _eroded(
    name: str,
    input: AccelRef,
    structure: Any,
    iterations: object,
    mask: AccelRef | None,
    output: Output,
    border_value: object,
    origin: Any,
    brute_force: object,
    axes: object,
) -> AccelRef:
    """Erode, or dilate: then what is beyond the structure's opposite side is looked at, for any that is true."""
    is_dilated, name = "dilation" in name, f"ndimage.{name}"
    [x] = taken(name, input=input)
    if x.dtype.kind == "complex":
        raise TypeError(f"{name}: input must not be complex, got {x.dtype}")
    along, count = axes_of(name, x, axes), whole(name, "iterations", iterations)
    window = cross(len(along)) if structure is None else numbers(name, "structure", structure, "bool")
    if window.ndim != len(along) or not window.size:
        raise ValueError(
            f"{name}: structure must have {len(along)} axes and elements, got shape {window.shape}"
        )
    if mask is not None and taken(name, mask=mask)[0].shape != x.shape:
        raise ValueError(f"{name}: mask must have shape {x.shape}, got {mask.shape}")
    origins = [whole(name, "origin", one) for one in each(name, "origin", origin, len(along))]
    if is_dilated:
        window = np.flip(window)
        origins = [-one - (size % 2 == 0) for one, size in zip(origins, window.shape, strict=True)]
    pairs = [reach(name, size, one) for size, one in zip(window.shape, origins, strict=True)]
    dtype = dtype_of(name, x, DType.bool if output is None else output, x.shape)
    places = [spread(x, along, place, 0) for place in np.argwhere(window).tolist()]
    with intermediates() as made:
        result, done = made(await _TRUTHS(x)), 0
        while places and (done < count or count < 1):
            widths = spread(x, along, pairs, (0, 0))
            wider = await padded(result, widths, ["constant"] * x.ndim, bool(border_value))
            wider = wider if wider is result else made(wider)
            found: list[AccelRef] = []
            for start in range(0, len(places), MOST):
                parts = [*found, *[view(wider, x.shape, place) for place in places[start : start + MOST]]]
                found = [made(await _joined("or" if is_dilated else "and", len(parts))(*parts))]
            new = found[0] if mask is None else made(await _MASKED(mask, found[0], result))
            if count < 1 and not await any_of(_CHANGED(new, result)).item():
                break
            result, done = new, done + 1
        return await delivered(await converted(dtype)(result), output)


@composed
async def binary_erosion(
    input: AccelRef,
    structure: npt.ArrayLike | None = None,
    iterations: int = 1,
    mask: AccelRef | None = None,
    output: Output = None,
    border_value: int = 0,
    origin: int | Sequence[int] = 0,
    brute_force: bool = False,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Erode a binary image, as `scipy.ndimage.binary_erosion` does.

    Args:
        input: The image. What is not 0 is true.
        structure: Which elements of a window must be true, on the host; by default an element and its neighbours along
            the axes.
        iterations: How often; below 1 until nothing changes, which the host looks at.
        mask: Where elements may change.
        output: Dtype of the result, or an array to write to; by default bool.
        border_value: Whether what is beyond the edges is true.
        origin: How far the window lies behind its place; for all axes, or for each.
        brute_force: Not looked at: all elements are computed each time.
        axes: Axes of the structure; None for all.

    Returns:
        A new image.

    Raises:
        TypeError: `input` or `mask` is no array of a device, or complex.
        ValueError: A structure of another number of axes, an origin outside of it, or another shape of an array.
        NotSupportedError: float8.
    """
    return await _eroded(
        "binary_erosion", input, structure, iterations, mask, output, border_value, origin, brute_force, axes
    )


@arguments_of(binary_erosion, _eroded, "binary_dilation")
def binary_dilation() -> None:
    """Dilate a binary image, as `scipy.ndimage.binary_dilation` does; arguments are those of `binary_erosion`."""


# Steps to both sides that one launch looks at.
_STEPS = MOST // 2


@composed
async def distance_transform_edt(
    input: AccelRef,
    sampling: float | Sequence[float] | None = None,
    return_distances: bool = True,
    return_indices: bool = False,
) -> AccelRef | tuple[AccelRef, ...]:
    """Find the nearest element that is 0 of each one, exactly: `scipy.ndimage.distance_transform_edt`.

    Along the first axis two scans find it. Along each other one, more and more distant places are looked at, until they
    are farther away than what was found everywhere; the host looks at that. So it takes as long as the longest distance
    is.

    Args:
        input: The image. What is not 0 has a distance.
        sampling: The distance of neighbours along all axes, or along each; by default 1.
        return_distances: Whether the distances are wanted.
        return_indices: Whether the places are.

    Returns:
        Distances of float64; or places of int32, of shape ``(axes, ...)``; or both. Distances are infinite, and places
        are 0, where nothing is 0. Which one of several that are equally near is found may differ from SciPy.

    Raises:
        TypeError: `input` is no array of a device, or complex.
        ValueError: Nothing is wanted, or a `sampling` for another number of axes.
        NotSupportedError: float8.
    """
    name = "ndimage.distance_transform_edt"
    [x] = taken(name, input=input)
    if x.dtype.kind == "complex":
        raise TypeError(f"{name}: input must not be complex, got {x.dtype}")
    if not (return_distances or return_indices):
        raise ValueError(f"{name}: return_distances or return_indices must be True")
    x = x if x.ndim else x.reshape((1,))
    sizes = [float(one) for one in each(name, "sampling", 1.0 if sampling is None else sampling, x.ndim)]
    with intermediates() as made:
        before, behind = [made(await _MARKED[sign](x)) for sign in (-1, 1)]
        before = made(await cumulative_max(before, axis=0))
        behind = flip(made(await cumulative_min(flip(behind, axis=0), axis=0)), axis=0)
        near, place = map(made, await _NEAREST(before, behind, x.shape[0], sizes[0]))
        places = [place]
        for axis in range(1, x.ndim):
            near, steps = await _nearer(near, axis, sizes[axis], made)
            if return_indices:
                moved = [made(await _moved(x.ndim, axis)(one, steps)) for one in places]
                places = [*moved, made(await _placed(axis)(steps))]
        found = [made(await stack(places))] if return_indices else []
        distances = [await _ROOT(near)] if return_distances else []
        results = (*distances, *[await one.cast("int32") for one in found])
        return results if len(results) > 1 else results[0]


async def _nearer(
    near: AccelRef, axis: int, size: float, made: Callable[[AccelRef], AccelRef]
) -> tuple[AccelRef, AccelRef]:
    """Look along an axis for what is nearer; returns squares of distances, and how far away it is."""

    async def farthest() -> int:
        most = float(await max_of(near).item()) if near.size else 0.0
        return int(
            min(
                max(near.shape[axis] - 1, 0),
                math.ceil(math.sqrt(most) / size) if most < math.inf else 1 << 40,
            )
        )

    reached = await farthest()
    widths = spread(near, (axis,), ((reached, reached),), (0, 0))
    wider = made(await padded(near, widths, ["constant"] * near.ndim, math.inf))
    steps, shape = made(await near.device.zeros(near.shape, "int64")), near.shape
    for start in range(1, reached + 1, _STEPS):
        if start > await farthest():
            break
        here = range(start, min(start + _STEPS, reached + 1))
        sides = [
            view(wider, shape, spread(near, (axis,), (reached + one,), 0)) for n in here for one in (-n, n)
        ]
        near, steps = map(made, await _nearer_of(len(here))(near, steps, size, start, *sides))
    return near, steps


def _of_distances(text: str, inputs: Sequence[str], outputs: Sequence[str] | None = None) -> Elementwise[Any]:
    return Elementwise(text, inputs=inputs, outputs=outputs, operation="ndimage.distance_transform_edt")


_MARKED = {sign: _of_distances(f"i(0) if x == 0 else {sign * (1 << 40)}", ("x",)) for sign in (-1, 1)}
_NEAREST = _of_distances(
    "j = i(0); at = where(j - a <= b - j, a, b); d = (at - j) * size;"
    "near = where(0 <= at and at < n, d * d, inf); place = clip(at, 0, n - 1)",
    ("a", "b", "n", "size"),
    ("near", "place"),
)
_ROOT = _of_distances("sqrt(x)", ("x",))


@functools.cache
def _nearer_of(count: int) -> Elementwise[Any]:
    text = "y = near; step = steps"
    for n in range(count):
        text += f"; k = start + {n}; d = k * size; d = d * d"
        for side, name in (("-k", f"a{n}"), ("k", f"b{n}")):
            text += f"; e = {name} + d; step = where(e < y, {side}, step); y = minimum(e, y)"
    sides = [f"{side}{n}" for n in range(count) for side in "ab"]
    return _of_distances(text, ("near", "steps", "size", "start", *sides), ("y", "step"))


@functools.cache
def _moved(ndim: int, axis: int) -> Elementwise[Any]:
    places = [f"i({one}) + steps" if one == axis else f"i({one})" for one in range(ndim)]
    return _of_distances(f"x[{', '.join(places)}]", ("x", "steps"))


@functools.cache
def _placed(axis: int) -> Elementwise[Any]:
    return _of_distances(f"i({axis}) + steps", ("steps",))
