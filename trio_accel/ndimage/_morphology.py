"""Binary images: erosion and dilation, connected parts, and distances, by `scipy.ndimage`'s names."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import arrays
from ..actors import arguments_of
from ..backends.base import DType
from ..devices import AccelRef, Operand, composed
from ..expressions import Scatter, check_ref
from . import windows as w
from .windows import Floats, Numbers, Output

__all__ = ["LabelResult", "binary_dilation", "binary_erosion", "distance_transform_edt", "label"]

_INFINITE_DISTANCE = 1 << 40
_NEAREST = w.several(
    "edt",
    "j = i(0); at = where(j - a <= b - j, a, b); d = (at - j) * size;"
    "y = where(0 <= at and at < n, d * d, inf); place = clip(at, 0, n - 1)",
    ("a", "b", "n", "size"),
    ("y", "place"),
)
# How often a label follows its label before edges are checked again.
_JUMPS = 3
_HOOKED = Scatter("labels[places]", "min", inputs=("labels", "places"), operation="ndimage.label")
_GATHER_LABELS = w.compute("label", "x[k]", ("x", "k"))
_TOUCHING = w.several("label", "one = x[k]; other = x[k + step]", ("x", "k", "step"), ("one", "other"))
_ENDS = w.several(
    "label",
    "p = x[k]; q = x[m]; least = minimum(p, q); largest = maximum(p, q)",
    ("x", "k", "m"),
    ("least", "largest"),
)


def _structure(structure: object, ndim: int) -> npt.NDArray[np.bool_]:
    """Take a structure of the host; by default an element and its neighbours along the axes."""
    if structure is not None:
        return w.numbers("structure", structure, "bool")
    cross: npt.NDArray[np.bool_] = abs(np.indices((3,) * ndim) - 1).sum(0) <= 1
    return cross


async def _differ(x: AccelRef, y: AccelRef) -> bool:
    """Look whether two arrays differ."""
    return bool(await arrays.any(await w.compute("differ", "x != y", ("x", "y"))(x, y)).item())


async def _eroded(
    is_dilated: bool,
    input: Any,
    structure: Any,
    iterations: object,
    mask: Any,
    output: Output,
    border_value: Any,
    origin: Any,
    brute_force: object,
    axes: object,
) -> AccelRef:
    """Erode, or dilate: then an element is looked for on the structure's opposite side."""
    x: Any = input
    # A truth value is a number here, as in SciPy.
    along, border = w.axes_of(x, axes), w.integer("border_value", border_value + 0) != 0
    # After this number of times nothing changes, unless the image alternates in a cycle.
    requested_count = w.integer("iterations", iterations)
    count = min(requested_count, x.size + 1) if requested_count > 0 else x.size + 1
    window = _structure(structure, len(along))
    requirement = f"{len(along)} axes and an element that is true, got {window.tolist()}"
    w.require(window.ndim == len(along) and window.any(), f"structure must have {requirement}")
    if mask is not None:
        check_ref("ndimage.function", "mask", mask)
        w.require(mask.shape == x.shape, f"mask must have shape {x.shape}, got {mask.shape}")
    origins = w.origins_of(origin, window.shape, is_turned=is_dilated)
    along, origins = w.in_order(along, origins)
    dtype = w.dtype_of(x, DType.bool if output is None else output, x.shape)
    window, operator = (np.flip(window), " or ") if is_dilated else (window, " and ")
    image = await w.compute("binary_erosion", "x != 0", ("x",))(x)
    for _ in range(count):
        views = await w.windows(image, along, window, origins, ["constant"] * len(along), border)
        new = list[AccelRef]()
        for start in range(0, len(views), w.MAX_WINDOW_ELEMENTS):
            new += views[start : start + w.MAX_WINDOW_ELEMENTS]
            names = tuple([f"x{n}" for n in range(len(new))])
            new = [await w.compute("binary_erosion", "y = " + operator.join(names), names)(*new)]
        if mask is not None:
            text, names = "y = where(mask != 0, x, old)", ("mask", "x", "old")
            new = [await w.compute("binary_erosion", text, names)(mask, *new, image)]
        if requested_count < 1 and not await _differ(image, *new):
            break
        image = new[0]
    return await w.delivered(await w.converted(image, dtype), output)


@composed
async def binary_erosion(
    input: Operand,
    structure: npt.ArrayLike | None = None,
    iterations: int = 1,
    mask: Operand | None = None,
    output: Output = None,
    border_value: int = 0,
    origin: Numbers = 0,
    brute_force: bool = False,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Erode a binary image, as `scipy.ndimage.binary_erosion` does.

    Args:
        input: The image. Nonzero elements are true.
        structure: The elements of a window that must be true, on the host; by default an element and its
            neighbours along the axes.
        iterations: The number of repetitions; below 1 until nothing changes, which the host checks, but at
            most one more than the number of elements.
        mask: Where elements may change.
        output: Dtype of the result, or an array to write to; by default bool.
        border_value: Whether the outside of the edges is true.
        origin: How far the window is shifted towards the begin: for all axes, or for each.
        brute_force: Ignored: all elements are computed each time.
        axes: Axes of the structure; None for all.

    Returns:
        A new image.

    Raises:
        TypeError: `input` is not an array of a device, or `structure` is on one.
        ValueError: The structure has another number of axes or no elements, an origin is outside of it, or an
            array has another shape.
        NotSupportedError: float8.
    """
    arguments = input, structure, iterations, mask, output, border_value, origin, brute_force, axes
    return await _eroded(False, *arguments)


@arguments_of(binary_erosion, _eroded, True)
def binary_dilation() -> None:
    """Dilate a binary image, as `scipy.ndimage.binary_dilation` does; see `binary_erosion`."""


class LabelResult(NamedTuple):
    """The parts of an image; see `label`."""

    labels: AccelRef
    """The number of its part for each element, and 0 for the background."""
    num_features: int
    """How many parts there are."""


@composed
async def label(input: Operand, structure: npt.ArrayLike | None = None, output: Output = None) -> LabelResult:
    """Number the connected parts of an image in the order of their first elements: `scipy.ndimage.label`.

    Elements side by side along the last axis are a run, and runs that touch are an edge. Each run begins with
    its own number as its label. Of both labels of an edge, the larger one takes the least label that an edge
    has for it, and labels follow their labels, until nothing changes: about ten times, each with a look at a
    truth value on the host.

    Source: Y. Zhang, A. Azad and Z. Hu, "FastSV", 2020.

    Args:
        input: The image. Nonzero elements belong to a part.
        structure: The connected ones of the ``3 ** axes`` neighbours, on the host, the same on opposite
            sides; by default the neighbours along the axes.
        output: Dtype of the labels, or an array to write to; by default int32.

    Returns:
        The labels, and how many parts there are.

    Raises:
        TypeError: `input` is not an array of a device, or `structure` is on one.
        ValueError: The structure has another shape, or differs on opposite sides; or `output` has another
            shape, or too small a dtype.
        NotSupportedError: float8.
    """
    x: Any = input
    ndim = len(w.axes_of(x, None))
    neighbourhood = _structure(structure, ndim)
    dtype = w.dtype_of(x, DType.int32 if output is None else output, x.shape)
    is_right = neighbourhood.shape == (3,) * ndim and np.array_equal(neighbourhood, np.flip(neighbourhood))
    requirement = f"structure must have shape {(3,) * ndim}, and be the same on opposite sides"
    w.require(is_right, f"{requirement}, got {neighbourhood.tolist()}")
    if not x.size:
        return LabelResult(await w.delivered(await x.device.zeros(x.shape, dtype), output), 0)
    foreground = await w.compute("label", "x != 0", ("x",))(x)
    runs, edges = await _runs(foreground, (np.argwhere(neighbourhood) - 1).tolist())
    labels = await x.device.put(np.arange(int(await runs[-1].item()) + 1))
    tails, heads = (
        [await arrays.concat(ends) for ends in zip(*edges, strict=True)] if edges else (labels, labels)
    )
    while edges:
        smallest, largest = await _ENDS(labels, tails, heads)
        if not await _differ(smallest, largest):
            break
        await _HOOKED(labels, largest, smallest, shape=smallest.shape)
        for _ in range(_JUMPS):
            labels = await _GATHER_LABELS(labels, labels)
    ranks = await arrays.cumulative_sum(await w.compute("label", "x == i(0) and x > 0", ("x",))(labels))
    count = int(await ranks[-1].item())
    is_right = dtype.kind not in ("int", "uint") or count <= np.iinfo(dtype.dtype).max
    w.require(is_right, f"output of {dtype} has no room for {count} labels")
    table = await w.converted(await _GATHER_LABELS(ranks, labels), dtype)
    result = await w.compute("label", "y[k] if x else y[0]", ("x", "y", "k"))(
        foreground.reshape(x.size), table, runs
    )
    return LabelResult(await w.delivered(result.reshape(x.shape), output), count)


async def _runs(x: AccelRef, neighbour_offsets: Sequence[list[int]]) -> tuple[AccelRef, list[Any]]:
    """Number the runs of truth values, and find which two runs touch: for the offsets of neighbours."""
    previous_offset = [*[0] * (x.ndim - 1), -1]
    # A short number is looked up in less time.
    dtype = "int32" if x.size < 1 << 31 else "int64"
    wider = await w.padded(x, [(2, 2)] * x.ndim, ["constant"] * x.ndim)

    def beside(*steps: list[int]) -> AccelRef:
        return w.view(wider, x.shape, [2 + sum(axis_steps) for axis_steps in zip(*steps, strict=True)])

    begun, has_runs = x, previous_offset in neighbour_offsets
    if has_runs:
        begun = await w.compute("label", "x and not y", ("x", "y"))(x, beside(previous_offset))
    runs, edges = await arrays.cumulative_sum(begun.reshape(x.size), dtype=dtype), list[Any]()
    # Of two opposite neighbours, take the first in C order.
    for offset in [
        candidate
        for candidate in neighbour_offsets
        if candidate < [0] * x.ndim and candidate != previous_offset
    ]:
        views, text = [x, beside(offset)], "x and y"
        if has_runs:
            # If the elements before both are connected also, the edge is known.
            views += [beside(previous_offset), beside(previous_offset, offset)]
            text += " and not (z and t)"
        touch = await w.compute("label", text, tuple("xyzt"[: len(views)]))(*views)
        [positions] = await arrays.nonzero(touch.reshape(x.size))
        step = sum(component * math.prod(x.shape[axis + 1 :]) for axis, component in enumerate(offset))
        edges.append(await _TOUCHING(runs, positions, step))
    return runs, edges


@composed
async def distance_transform_edt(
    input: Operand,
    sampling: Floats | None = None,
    return_distances: bool = True,
    return_indices: bool = False,
) -> AccelRef | tuple[AccelRef, ...]:
    """Find the nearest zero element of each element, exactly: `scipy.ndimage.distance_transform_edt`.

    Along the first axis two scans find it. Along each other axis, places at growing distances are checked,
    until they are farther away than the zeros found, everywhere. The host checks this. So the time grows with
    the longest distance.

    Args:
        input: The image. Nonzero elements have a distance.
        sampling: The distance of neighbours along all axes, or along each; by default 1.
        return_distances: Whether to return the distances.
        return_indices: Whether to return the places.

    Returns:
        Distances of float64; or places of int32, of shape ``(axes, ...)``; or both. Without a zero, distances
        are infinite, and places are anywhere in the image. Of several equally near zeros, another one than
        SciPy's may be found.

    Raises:
        TypeError: `input` is not an array of a device.
        ValueError: Nothing is wanted, or a `sampling` for another number of axes.
        NotSupportedError: float8.
    """
    x: Any = input
    x = x if w.axes_of(x, None) else x.reshape((1,))
    sizes = w.per_axis("sampling", 1.0 if sampling is None else sampling, x.ndim)
    sizes = [w.real("sampling", spacing) for spacing in sizes]
    w.require(all(spacing > 0 for spacing in sizes), f"sampling must be above 0, got {sizes}")
    w.require(return_distances or return_indices, "return_distances or return_indices must be True")
    marks = [
        await w.compute("edt", f"i(0) if x == 0 else {sentinel}", ("x",))(x)
        for sentinel in (-_INFINITE_DISTANCE, _INFINITE_DISTANCE)
    ]
    previous_zeros = await arrays.cumulative_max(marks[0], axis=0)
    next_zeros = arrays.flip(await arrays.cumulative_min(arrays.flip(marks[1], axis=0), axis=0), axis=0)
    squared_distances, *coordinates = await _NEAREST(previous_zeros, next_zeros, x.shape[0], sizes[0])
    for axis in range(1, x.ndim):
        squared_distances, steps = await _nearer(squared_distances, axis, sizes[axis])
        if return_indices:
            subscripts = ", ".join(
                f"i({dim}) + steps" if dim == axis else f"i({dim})" for dim in range(x.ndim)
            )
            coordinates = [
                await w.compute("edt", f"x[{subscripts}]", ("x", "steps"))(coordinate, steps)
                for coordinate in coordinates
            ]
            coordinates.append(await w.compute("edt", f"i({axis}) + steps", ("steps",))(steps))
    results = [await w.compute("edt", "sqrt(x)", ("x",))(squared_distances)] if return_distances else []
    results += [await (await arrays.stack(coordinates)).cast("int32")] if return_indices else []
    return results[0] if len(results) == 1 else tuple(results)


async def _nearer(squared_distances: AccelRef, axis: int, size: float) -> tuple[AccelRef, AccelRef]:
    """Find nearer zeros along an axis; return the squared distances, and the number of steps."""

    async def farthest() -> int:
        max_squared = float(await arrays.max(squared_distances).item()) if squared_distances.size else 0.0
        longest = squared_distances.shape[axis] - 1
        return min(longest, math.ceil(math.sqrt(max_squared) / size)) if max_squared < math.inf else longest

    reached, shape = await farthest(), squared_distances.shape
    widths = w.spread(squared_distances, (axis,), ((reached, reached),), (0, 0))
    wider = await w.padded(squared_distances, widths, ["constant"] * squared_distances.ndim, math.inf)
    steps, start = await squared_distances.device.zeros(shape, "int64"), 1
    while start <= (reached if start == 1 else min(reached, await farthest())):
        chunk = range(start, min(start + w.MAX_WINDOW_ELEMENTS // 2, reached + 1))
        sides = [
            w.view(wider, shape, w.spread(squared_distances, (axis,), (reached + k,), 0))
            for n in chunk
            for k in (-n, n)
        ]
        squared_distances, steps = await _looked(len(chunk))(squared_distances, steps, size, start, *sides)
        start += len(chunk)
    return squared_distances, steps


@functools.cache
def _looked(count: int) -> Any:
    text, sides = "y = near; step = steps", [(f"a{n}", f"b{n}") for n in range(count)]
    for n, names in enumerate(sides):
        text += f"; k = start + {n}; d = k * size; d = d * d"
        for side, name in zip(("-k", "k"), names, strict=True):
            text += f"; e = {name} + d; step = where(e < y, {side}, step); y = minimum(e, y)"
    inputs = ("near", "steps", "size", "start", *[name for names in sides for name in names])
    return w.several("edt", text, inputs, ("y", "step"))
