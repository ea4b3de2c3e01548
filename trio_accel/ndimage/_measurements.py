"""Connected parts of an image, by `scipy.ndimage`'s name."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import any as any_of
from ..arrays import cumulative_sum
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.operations._calls import composed
from ..expressions import Elementwise, Scatter, intermediates
from ._morphology import cross
from ._windows import Output, delivered, dtype_of, numbers, padded, taken, view

__all__ = ["LabelResult", "label"]

# How often a label follows the label of its place, before neighbours are looked at again.
_JUMPS = 3
_HOOKED = Scatter("labels[places]", "min", inputs=("labels", "places"), operation="ndimage.label")
_DIFFER, _JUMPED, _IS_FIRST, _NUMBERED = (
    Elementwise[AccelRef](text, inputs=inputs, operation="ndimage.label")
    for text, inputs in (
        ("x != y", ("x", "y")),
        ("labels[minimum(x, last)] if x <= last else x", ("x", "labels", "last")),
        ("int64(x == i(0))", ("x",)),
        ("ranks[minimum(x, last)] if x <= last else 0", ("x", "ranks", "last")),
    )
)


class LabelResult(NamedTuple):
    """The parts of an image; see `label`."""

    labels: AccelRef
    """The number of its part for each element, and 0 for the background."""
    num_features: int
    """How many parts there are."""


@composed
async def label(
    input: AccelRef, structure: npt.ArrayLike | None = None, output: Output = None
) -> LabelResult:
    """Number the connected parts of an image, as `scipy.ndimage.label` does, in the order of their first elements.

    Each element begins with its own place as its label. The place that is its label takes the least label of its
    neighbours, and labels follow the labels of their places, until nothing changes: some ten times, each with a look
    at a truth value on the host.

    Args:
        input: The image. What is not 0 belongs to a part.
        structure: Which of the ``3 ** axes`` neighbours belong together, on the host, the same on opposite sides;
            by default those along the axes.
        output: Dtype of the labels, or an array to write to; by default int32.

    Returns:
        The labels, and how many parts there are.

    Raises:
        TypeError: `input` is no array of a device, or complex.
        ValueError: A structure of another shape, or one that differs on opposite sides; or `output` of another shape,
            or too small a dtype.
        NotSupportedError: float8.
    """
    name = "ndimage.label"
    [x] = taken(name, input=input)
    if x.dtype.kind == "complex":
        raise TypeError(f"{name}: input must not be complex, got {x.dtype}")
    near = cross(x.ndim) if structure is None else numbers(name, "structure", structure, "bool")
    if near.shape != (3,) * x.ndim or not np.array_equal(near, np.flip(near)):
        told = f"shape {(3,) * x.ndim}, and be the same on opposite sides, got shape {near.shape}"
        raise ValueError(f"{name}: structure must have {told}")
    dtype = dtype_of(name, x, DType.int32 if output is None else output, x.shape)
    last = x.size - 1
    with intermediates() as made:
        if not x.size:
            return LabelResult(await delivered(await x.device.zeros(x.shape, dtype), output), 0)
        labels = made(await _first(x.ndim)(x, x.size, *x.shape[1:], shape=x.shape))
        offsets = [place for place in np.argwhere(near).tolist() if place != [1] * x.ndim]
        while offsets:
            wider = made(await padded(labels, [(1, 1)] * x.ndim, ["constant"] * x.ndim, x.size))
            views = [view(wider, x.shape, place) for place in offsets]
            least, places = await _least(x.ndim, len(views))(labels, last, *views, *x.shape[1:])
            flat = made(labels).reshape(x.size)
            made(least), made(places)
            if not await any_of(_DIFFER(least, labels)).item():
                break
            await _HOOKED(flat, places.reshape(x.size), least.reshape(x.size), shape=(x.size,))
            for _ in range(_JUMPS):
                flat = made(await _JUMPED(flat, flat, last))
            labels = flat.reshape(x.shape)
        flat = labels.reshape(x.size)
        ranks = made(await cumulative_sum(made(await _IS_FIRST(flat))))
        count = int(await ranks[-1].item())
        if dtype.kind in ("int", "uint") and count > np.iinfo(dtype.dtype).max:
            raise ValueError(f"{name}: output of {dtype} has no room for {count} labels")
        found = made(await _NUMBERED(flat, ranks, last))
        return LabelResult(await delivered(await found.reshape(x.shape).cast(dtype), output), count)


def _place(ndim: int) -> str:
    """Write the place of an element among all in C order, by Horner's rule."""
    return functools.reduce(lambda text, axis: f"({text}) * n{axis} + i({axis})", range(1, ndim), "i(0)")


@functools.cache
def _first(ndim: int) -> Elementwise[AccelRef]:
    sizes = [f"n{axis}" for axis in range(1, ndim)]
    text = f"{_place(ndim)} if x != 0 else size"
    return Elementwise(text, inputs=("x", "size", *sizes), dtypes="int64", operation="ndimage.label")


@functools.cache
def _least(ndim: int, count: int) -> Elementwise[tuple[AccelRef, ...]]:
    sizes = [f"n{axis}" for axis in range(1, ndim)]
    text = "m = x" + "".join(f"; m = minimum(m, y{n})" for n in range(count))
    text += f"; least = where(x <= last, m, x); place = where(x <= last, x, {_place(ndim)})"
    inputs = ("x", "last", *[f"y{n}" for n in range(count)], *sizes)
    return Elementwise(text, inputs=inputs, outputs=("least", "place"), operation="ndimage.label")
