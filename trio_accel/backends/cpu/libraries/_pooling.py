"""Pooling, one axis after the other: maxima of maxima, and sums of sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from ...base.contract.errors import OutOfRangeError
from ...base.contract.ops import AvgPoolGradSpec, AvgPoolSpec, MaxPoolGradSpec, MaxPoolSpec
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray, convert
from ._convolutions import FLOATS, batched, widened

__all__ = ["avg_pool", "avg_pool_grad", "max_pool", "max_pool_grad"]

# Elements of the images that are pooled at a time.
_PIECE = 1 << 19


@attrs.frozen
class _Windows:
    """The windows along an axis.

    Attributes:
        extent: Elements of the axis.
        starts: Where each window begins, perhaps before the first element.
        stride: Steps from one to the next; 0 where these differ, as the lengths may, and nothing is outside.
        width: Elements of a window; the most of all.
        dilation: Steps between them.
        stops: Behind the last element of each.
    """

    extent: int
    starts: HostArray
    stride: int
    width: int
    dilation: int
    stops: HostArray

    @classmethod
    def regular(
        cls, extent: int, count: int, width: int, stride: int, padding: int, dilation: int
    ) -> _Windows:
        """Make windows of one width."""
        starts: HostArray = np.arange(count, dtype=np.int64) * stride - padding
        return cls(extent, starts, stride, width, dilation, starts + (dilation * (width - 1) + 1))

    @classmethod
    def adaptive(cls, extent: int, count: int) -> _Windows:
        """Share an axis out among so many windows."""
        numbers: HostArray = np.arange(count, dtype=np.int64)
        starts, stops = numbers * extent // count, -(-(numbers + 1) * extent // count)
        return cls(extent, starts, 0, 0, 1, stops)

    @property
    def before(self) -> int:
        """Elements that windows have before the first one."""
        return -int(self.starts[0])

    @property
    def padded(self) -> int:
        """Elements of the axis with those before and behind it that windows have."""
        return self.before + max(self.extent, int(self.stops[-1]))

    def taps(self, array: HostArray, axis: int) -> Iterator[HostArray]:
        """Yield views of the first element of all windows, of the second, and so on; `array` is padded."""
        for number in range(self.width):
            first = number * self.dilation
            yield array[
                _along(axis, slice(first, first + (len(self.starts) - 1) * self.stride + 1, self.stride))
            ]

    def pad(self, array: HostArray, axis: int, value: float) -> HostArray:
        """Copy an array into one with values before and behind."""
        shape = list(array.shape)
        shape[axis] = self.padded
        padded: HostArray = np.full(shape, value, array.dtype)
        padded[self.inner(axis)] = array
        return padded

    def inner(self, axis: int) -> tuple[int | slice, ...]:
        """Return the index of the array within a padded one."""
        return _along(axis, slice(self.before, self.before + self.extent))

    def most(
        self, values: HostArray, places: HostArray | None, axis: int
    ) -> tuple[HostArray, HostArray | None]:
        """Take the greatest elements along the axis, the first of several, with what belongs to them."""
        if not self.stride:
            return self._most_of_each(values, places, axis)
        firsts = self.starts + -(np.minimum(self.starts, 0) // self.dilation) * self.dilation
        best: HostArray = np.take(values, firsts, axis)
        found = None if places is None else np.take(places, firsts, axis)
        values = self.pad(values, axis, -np.inf)
        places = None if places is None else self.pad(places, axis, 0)
        others = [None] * self.width if places is None else self.taps(places, axis)
        for one, place in zip(self.taps(values, axis), others, strict=True):
            is_better = (one > best) | (np.isnan(one) & ~np.isnan(best))
            np.copyto(best, one, where=is_better)
            if found is not None and place is not None:
                np.copyto(found, place, where=is_better)
        return best, found

    def _most_of_each(
        self, values: HostArray, places: HostArray | None, axis: int
    ) -> tuple[HostArray, HostArray | None]:
        shape = list(values.shape)
        shape[axis] = len(self.starts)
        best: HostArray = np.empty(shape, values.dtype)
        found = None if places is None else np.empty(shape, np.int64)
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            part, here = values[_along(axis, slice(start, stop))], _along(axis, slice(number, number + 1))
            which = np.expand_dims(part.argmax(axis), axis)
            best[here] = np.take_along_axis(part, which, axis)
            if found is not None and places is not None:
                found[here] = np.take_along_axis(places[_along(axis, slice(start, stop))], which, axis)
        return best, found

    def sum(self, values: HostArray, axis: int) -> HostArray:
        """Add up the elements of each window along the axis."""
        shape = list(values.shape)
        shape[axis] = len(self.starts)
        total: HostArray = np.zeros(shape, values.dtype)
        if self.stride:
            for one in self.taps(self.pad(values, axis, 0), axis):
                total += one
            return total
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            total[_along(axis, number)] = values[_along(axis, slice(start, stop))].sum(axis)
        return total

    def spread(self, values: HostArray, axis: int) -> HostArray:
        """Add the value of each window to all of its elements along the axis."""
        shape = list(values.shape)
        shape[axis] = self.padded
        total: HostArray = np.zeros(shape, values.dtype)
        if self.stride:
            for one in self.taps(total, axis):
                one += values  # noqa: PLW2901  # a view: the windows of one tap share no element
        else:
            for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
                total[_along(axis, slice(start, stop))] += values[_along(axis, slice(number, number + 1))]
        return total[self.inner(axis)]

    def counts(self, behind: int | None) -> HostArray:
        """Count the elements of each window: with so many zeros behind and all before; None for none."""
        if behind is None:
            return np.minimum(self.stops, self.extent) - np.maximum(self.starts, 0)
        return np.minimum(self.stops, self.extent + behind) - self.starts


def _along(axis: int, index: int | slice) -> tuple[int | slice, ...]:
    return (*(slice(None),) * axis, index)


def _images(images: HostArray) -> Iterator[slice]:
    """Cut images into pieces."""
    step = max(1, _PIECE // max(1, images[:1].size))
    for first in range(0, len(images), step):
        yield slice(first, first + step)


@kernel(MaxPoolSpec, backend="cpu", dtypes={"x": FLOATS})
def max_pool(spec: MaxPoolSpec, call: HostCall) -> None:
    """Take maxima along the last axis, of these along the one before it, and so on."""
    axes = len(spec.window) + 2
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    indices = None if spec.indices is None else batched(call.array(spec.indices), axes)
    windows = _windows(spec, x, out, spec.dilation)
    for images in _images(x):
        values = widened(x[images])
        places = None
        if indices is not None:
            size = math.prod(values.shape[2:])
            places = np.broadcast_to(np.arange(size).reshape(values.shape[2:]), values.shape)
        for axis in reversed(range(2, axes)):
            values, places = windows[axis - 2].most(values, places, axis)
        convert(values, out[images])
        if indices is not None and places is not None:
            np.copyto(indices[images], places)


def _windows(
    spec: MaxPoolSpec | AvgPoolSpec | AvgPoolGradSpec, x: HostArray, out: HostArray, dilation: tuple[int, ...]
) -> list[_Windows]:
    """Return the windows along each axis."""
    extents = zip(x.shape[2:], out.shape[2:], strict=True)
    if not spec.window[0]:
        return [_Windows.adaptive(*each) for each in extents]
    numbers = zip(spec.window, spec.stride, spec.padding, dilation, strict=True)
    return [_Windows.regular(*each, *those) for each, those in zip(extents, numbers, strict=True)]


@kernel(MaxPoolGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def max_pool_grad(spec: MaxPoolGradSpec, call: HostCall) -> None:
    """Add each value to its element, in the order of the windows."""
    grad, indices, out = call.array(spec.grad), call.array(spec.indices), call.array(spec.out)
    size = math.prod(out.shape[2:])
    is_outside = (indices < 0) | (indices >= size)
    if is_outside.any():
        index = int(indices[is_outside][0])
        raise OutOfRangeError(
            f"indices: {index} is outside of the input, which has {size} elements in each channel",
            library="dnn",
            index=index,
            axis=2,
            length=size,
        )
    for images in _images(out):
        here, values = out[images], widened(grad[images])
        total: HostArray = np.zeros((here.shape[0] * here.shape[1], size), values.dtype)
        rows = np.arange(len(total))[:, None]
        places = indices[images].reshape(len(total), math.prod(values.shape[2:]))
        np.add.at(total.reshape(-1), (places + rows * size).ravel(), values.ravel())
        convert(total.reshape(here.shape), here)


def _windows_of_means(
    spec: AvgPoolSpec | AvgPoolGradSpec, x: HostArray, out: HostArray
) -> tuple[list[_Windows], Any]:
    """Return the windows along each axis, and what the sums are divided by."""
    windows = _windows(spec, x, out, (1,) * len(spec.window))
    if spec.divisor:
        return windows, spec.divisor
    behind = spec.behind if spec.count_include_pad else (None,) * len(windows)
    divisor = np.ones((1,) * len(windows), np.int64)
    for axis, (one, more) in enumerate(zip(windows, behind, strict=True)):
        divisor = divisor * one.counts(more).reshape(-1, *(1,) * (len(windows) - axis - 1))
    return windows, divisor.astype(widened(x[:0]).dtype)


@kernel(AvgPoolSpec, backend="cpu", dtypes={"x": FLOATS})
def avg_pool(spec: AvgPoolSpec, call: HostCall) -> None:
    """Add up along the last axis, these sums along the one before it, and so on; divide."""
    axes = len(spec.window) + 2
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    windows, divisor = _windows_of_means(spec, x, out)
    for images in _images(x):
        values = widened(x[images])
        for axis in reversed(range(2, axes)):
            values = windows[axis - 2].sum(values, axis)
        convert(values / divisor, out[images])


@kernel(AvgPoolGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def avg_pool_grad(spec: AvgPoolGradSpec, call: HostCall) -> None:
    """Divide, and add to all elements of a window, one axis after the other."""
    grad, out = call.array(spec.grad), call.array(spec.out)
    windows, divisor = _windows_of_means(spec, out, grad)
    for images in _images(out):
        values = widened(grad[images]) / divisor
        for axis in range(2, out.ndim):
            values = windows[axis - 2].spread(values, axis)
        convert(values, out[images])
