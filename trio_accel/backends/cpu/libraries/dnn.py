"""Convolutions, pooling and attention by NumPy: windows of strides, and the BLAS.

Convolutions copy windows to the columns of a matrix, which is multiplied by the weights. Pooling processes
one axis after the other, because a maximum of maxima is the maximum, and a sum of sums is the sum. All
operations work in pieces, so that temporary arrays have some megabytes, and one thread adds in one order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...base import DType, HostArray, HostCall, Ints, kernel, no_element, no_length, ops
from ..runtime._memory import convert, widened
from ..runtime.blas_threads import matrix_product

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
# Elements of the columns made at a time.
_COLUMNS = 1 << 20


def batched(array: HostArray, axes: int) -> HostArray:
    """Return a view with this number of axes; the first axis may be missing from the array."""
    return array if array.ndim == axes else array[None]


def _cut(count: int, step: int) -> Iterator[slice]:
    """Cut a range of `count` items into slices of `step`, or of 1 if it is less."""
    for first in range(0, count, max(1, step)):
        yield slice(first, min(first + max(1, step), count))


class _Strided:
    """The windows of a convolution over images.

    Attributes:
        window: Extents of the windows, and of the weights.
    """

    def __init__(
        self,
        spec: ops.ConvolutionSpec | ops.ConvolutionInputGradSpec | ops.ConvolutionWeightGradSpec,
        images: HostArray,
        weight: HostArray,
        windows: HostArray,
    ) -> None:
        spatial, self.window, self._counts = images.shape[2:], weight.shape[2:], windows.shape[2:]
        self._stride, self._dilation = spec.stride, spec.dilation
        inner = [
            slice(padding, padding + extent) for padding, extent in zip(spec.padding, spatial, strict=True)
        ]
        self._inner = (slice(None), slice(None), *inner)
        axes = zip(self._counts, spec.stride, self.window, spec.dilation, strict=True)
        ends = [(count - 1) * stride + (width - 1) * dilation + 1 for count, stride, width, dilation in axes]
        # The extents of the images, with the zeros of their windows.
        self._extents = tuple(map(max, ends, map(operator.add, spec.padding, spatial)))
        self._count = len(images)
        # Elements in the columns of windows that differ only along the first axis.
        self._line = max(1, images.shape[1] * math.prod(self.window) * math.prod(self._counts[1:]))
        self._most = max(1, weight.size)

    def images(self) -> Iterator[slice]:
        """Cut the images into pieces."""
        return _cut(self._count, _COLUMNS // max(self._line * self._counts[0], self._most))

    def lines(self) -> Iterator[slice]:
        """Cut the windows along the first axis into pieces: one, where there may be several images."""
        return _cut(self._counts[0], _COLUMNS // self._line)

    def padded(self, images: HostArray) -> HostArray:
        """Copy images into zeros, which hold all windows."""
        buffer = self.zeros(len(images), images.shape[1], images.dtype)
        np.copyto(self.inner(buffer), images)
        return buffer

    def zeros(self, count: int, channels: int, dtype: np.dtype[Any]) -> HostArray:
        """Make zeros for `count` images."""
        return np.zeros((count, channels, *self._extents), dtype)

    def inner(self, buffer: HostArray) -> HostArray:
        """Return the view of the images within their zeros."""
        return buffer[self._inner]

    def of(self, buffer: HostArray, lines: slice) -> HostArray:
        """Return the view of windows: image, channel, tap in the window, window."""
        steps = buffer.strides[2:]
        taps, starts = (map(operator.mul, steps, factors) for factors in (self._dilation, self._stride))
        strides = (*buffer.strides[:2], *taps, *starts)
        view = as_strided(buffer, (*buffer.shape[:2], *self.window, *self._counts), strides)
        return view[(*(slice(None),) * (2 + len(steps)), lines)]


@kernel(ops.ConvolutionSpec, backend="cpu", dtypes={"x": FLOATS})
def convolution(spec: ops.ConvolutionSpec, call: HostCall) -> None:
    """Multiply weights by columns of windows, of each group by itself."""
    axes, groups = len(spec.stride) + 2, spec.groups
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    weight = widened(call.array(spec.weight))
    windows = _Strided(spec, x, weight, out)
    factors, bias = _by_groups(weight, groups), _bias(spec, call)
    for images in windows.images():
        buffer = windows.padded(widened(x[images]))
        for lines in windows.lines():
            target = out[images, :, lines]
            product = matrix_product(
                factors, _matrices(windows.of(buffer, lines), groups, factors.shape[-1], axes - 2)
            )
            product = product.reshape(target.shape)
            convert(product if bias is None else np.add(product, bias, out=product), target)


@kernel(ops.ConvolutionInputGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def convolution_input_grad(spec: ops.ConvolutionInputGradSpec, call: HostCall) -> None:
    """Multiply transposed weights by windows, and add the columns up where they were taken."""
    axes, groups = len(spec.stride) + 2, spec.groups
    grad, out = batched(call.array(spec.grad), axes), batched(call.array(spec.out), axes)
    weight = widened(call.array(spec.weight))
    windows = _Strided(spec, out, weight, grad)
    factors, bias = _by_groups(weight, groups).swapaxes(-1, -2), _bias(spec, call)
    for images in windows.images():
        buffer = windows.zeros(len(out[images]), out.shape[1], weight.dtype)
        for lines in windows.lines():
            grads = _matrices(widened(grad[images, :, lines]), groups, factors.shape[-1], axes - 2)
            view = windows.of(buffer, lines)
            columns = matrix_product(factors, grads).reshape(view.shape)
            for tap in np.ndindex(windows.window):
                # The windows of one tap share no element.
                view[(slice(None), slice(None), *tap)] += columns[(slice(None), slice(None), *tap)]
        result = windows.inner(buffer)
        convert(result if bias is None else result + bias, out[images])


@kernel(ops.ConvolutionWeightGradSpec, backend="cpu", dtypes={"x": FLOATS})
def convolution_weight_grad(spec: ops.ConvolutionWeightGradSpec, call: HostCall) -> None:
    """Multiply gradients by transposed columns of windows, and add up the images."""
    axes, groups = len(spec.stride) + 2, spec.groups
    x, grad = batched(call.array(spec.x), axes), batched(call.array(spec.grad), axes)
    out = call.array(spec.out)
    windows = _Strided(spec, x, out, grad)
    rows, columns = len(out) // groups, math.prod(out.shape[1:])
    total: HostArray = np.zeros((groups, rows, columns), widened(out[:0]).dtype)
    for images in windows.images():
        buffer = windows.padded(widened(x[images]))
        for lines in windows.lines():
            grads = _matrices(widened(grad[images, :, lines]), groups, rows, axes - 2)
            taken = _matrices(windows.of(buffer, lines), groups, columns, axes - 2)
            total += matrix_product(grads, taken.swapaxes(-1, -2)).sum(0)
    convert(total.reshape(out.shape), out)


def _by_groups(weight: HostArray, groups: int) -> HostArray:
    """Return the weights as a matrix for each group."""
    return np.ascontiguousarray(weight).reshape(groups, len(weight) // groups, math.prod(weight.shape[1:]))


def _matrices(array: HostArray, groups: int, rows: int, axes: int) -> HostArray:
    """Return matrices of images, with the last axes as their columns; a copy if needed."""
    return array.reshape(len(array), groups, rows, math.prod(array.shape[array.ndim - axes :]))


def _bias(spec: ops.ConvolutionSpec | ops.ConvolutionInputGradSpec, call: HostCall) -> HostArray | None:
    """Return the bias as it is added to images."""
    return None if spec.bias is None else widened(call.array(spec.bias)).reshape(-1, *(1,) * len(spec.stride))


# Elements of the images pooled at a time.
_POOLED = 1 << 19


@attrs.frozen
class _Windows:
    """The windows along an axis.

    Attributes:
        extent: Elements of the axis.
        starts: The begin of each window, which may be before the first element.
        stride: Steps from one window to the next. 0 if they differ, as the lengths may; then no window
            reaches outside.
        width: Elements of a window, or of the longest.
        dilation: Steps between them.
        stops: The index after the last element of each window.
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
        """Divide an axis into `count` windows."""
        numbers: HostArray = np.arange(count, dtype=np.int64)
        starts, stops = numbers * extent // count, -(-(numbers + 1) * extent // count)
        return cls(extent, starts, 0, 0, 1, stops)

    @property
    def padding_before(self) -> int:
        """Elements that windows have before the first one."""
        return -int(self.starts[0])

    @property
    def padded(self) -> int:
        """The elements of the axis, with the elements before and after it that windows reach."""
        return self.padding_before + max(self.extent, int(self.stops[-1]))

    def taps(self, array: HostArray, axis: int) -> Iterator[HostArray]:
        """Yield a view of all windows' first elements, then of their second, and so on; `array` is padded."""
        for number in range(self.width):
            first = number * self.dilation
            yield array[
                _along(axis, slice(first, first + (len(self.starts) - 1) * self.stride + 1, self.stride))
            ]

    def pad(self, array: HostArray, axis: int, value: float) -> HostArray:
        """Copy an array into one with additional values before and after."""
        padded: HostArray = np.full(_with_extent(array, axis, self.padded), value, array.dtype)
        padded[self.inner(axis)] = array
        return padded

    def inner(self, axis: int) -> tuple[int | slice, ...]:
        """Return the index of the array within a padded one."""
        return _along(axis, slice(self.padding_before, self.padding_before + self.extent))

    def maxima(
        self, values: HostArray, positions: HostArray | None, axis: int
    ) -> tuple[HostArray, HostArray | None]:
        """Return the greatest elements of the windows, of equal ones the first, and their positions."""
        if not self.stride:
            return self._most_of_each(values, positions, axis)
        firsts = self.starts + -(np.minimum(self.starts, 0) // self.dilation) * self.dilation
        best: HostArray = np.take(values, firsts, axis)
        best_positions = None if positions is None else np.take(positions, firsts, axis)
        values = self.pad(values, axis, -np.inf)
        positions = None if positions is None else self.pad(positions, axis, 0)
        tap_positions = [None] * self.width if positions is None else self.taps(positions, axis)
        for tap, position in zip(self.taps(values, axis), tap_positions, strict=True):
            is_better = (tap > best) | (np.isnan(tap) & ~np.isnan(best))
            np.copyto(best, tap, where=is_better)
            if best_positions is not None and position is not None:
                np.copyto(best_positions, position, where=is_better)
        return best, best_positions

    def _most_of_each(
        self, values: HostArray, positions: HostArray | None, axis: int
    ) -> tuple[HostArray, HostArray | None]:
        shape = _with_extent(values, axis, len(self.starts))
        best: HostArray = np.empty(shape, values.dtype)
        best_positions = None if positions is None else np.empty(shape, np.int64)
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            part, index = values[_along(axis, slice(start, stop))], _along(axis, slice(number, number + 1))
            which = np.expand_dims(part.argmax(axis), axis)
            best[index] = np.take_along_axis(part, which, axis)
            if best_positions is not None and positions is not None:
                best_positions[index] = np.take_along_axis(
                    positions[_along(axis, slice(start, stop))], which, axis
                )
        return best, best_positions

    def sum(self, values: HostArray, axis: int) -> HostArray:
        """Add up the elements of each window along the axis."""
        total: HostArray = np.zeros(_with_extent(values, axis, len(self.starts)), values.dtype)
        if self.stride:
            for tap in self.taps(self.pad(values, axis, 0), axis):
                total += tap
            return total
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            total[_along(axis, number)] = values[_along(axis, slice(start, stop))].sum(axis)
        return total

    def spread(self, values: HostArray, axis: int) -> HostArray:
        """Add the value of each window to all of its elements along the axis."""
        total: HostArray = np.zeros(_with_extent(values, axis, self.padded), values.dtype)
        if self.stride:
            for tap in self.taps(total, axis):
                tap += values  # noqa: PLW2901  # a view: the windows of one tap share no element
        else:
            for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
                total[_along(axis, slice(start, stop))] += values[_along(axis, slice(number, number + 1))]
        return total[self.inner(axis)]

    def counts(self, padding_after: int | None) -> HostArray:
        """Count each window's elements, with all zeros before and `padding_after` after; None for none."""
        if padding_after is None:
            return np.minimum(self.stops, self.extent) - np.maximum(self.starts, 0)
        return np.minimum(self.stops, self.extent + padding_after) - self.starts


def _with_extent(array: HostArray, axis: int, extent: int) -> Ints:
    return (*array.shape[:axis], extent, *array.shape[axis + 1 :])


def _along(axis: int, index: int | slice) -> tuple[int | slice, ...]:
    return (*(slice(None),) * axis, index)


def _images(images: HostArray) -> Iterator[slice]:
    """Cut images into pieces."""
    return _cut(len(images), _POOLED // max(1, images[:1].size))


@kernel(ops.MaxPoolSpec, backend="cpu", dtypes={"x": FLOATS})
def max_pool(spec: ops.MaxPoolSpec, call: HostCall) -> None:
    """Take maxima along the last axis, of these along the one before it, and so on."""
    axes = len(spec.window) + 2
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    indices = None if spec.indices is None else batched(call.array(spec.indices), axes)
    windows = _windows(spec, x, out, spec.dilation)
    for images in _images(x):
        values = widened(x[images])
        positions = None
        if indices is not None:
            size = math.prod(values.shape[2:])
            positions = np.broadcast_to(np.arange(size).reshape(values.shape[2:]), values.shape)
        for axis in reversed(range(2, axes)):
            values, positions = windows[axis - 2].maxima(values, positions, axis)
        convert(values, out[images])
        if indices is not None and positions is not None:
            np.copyto(indices[images], positions)


def _windows(
    spec: ops.MaxPoolSpec | ops.AvgPoolSpec | ops.AvgPoolGradSpec,
    x: HostArray,
    out: HostArray,
    dilation: Ints,
) -> list[_Windows]:
    """Return the windows along each axis."""
    extents = zip(x.shape[2:], out.shape[2:], strict=True)
    if not spec.window[0]:
        return [_Windows.adaptive(*pair) for pair in extents]
    numbers = zip(spec.window, spec.stride, spec.padding, dilation, strict=True)
    return [_Windows.regular(*pair, *those) for pair, those in zip(extents, numbers, strict=True)]


@kernel(ops.MaxPoolGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def max_pool_grad(spec: ops.MaxPoolGradSpec, call: HostCall) -> None:
    """Add each value to its element, in the order of the windows."""
    grad, indices, out = call.array(spec.grad), call.array(spec.indices), call.array(spec.out)
    size = math.prod(out.shape[2:])
    is_outside = (indices < 0) | (indices >= size)
    if is_outside.any():
        raise no_element(int(indices[is_outside][0]), size)
    for images in _images(out):
        target, values = out[images], widened(grad[images])
        total: HostArray = np.zeros((target.shape[0] * target.shape[1], size), values.dtype)
        rows = np.arange(len(total))[:, None]
        positions = indices[images].reshape(len(total), math.prod(values.shape[2:]))
        np.add.at(total.reshape(-1), (positions + rows * size).ravel(), values.ravel())
        convert(total.reshape(target.shape), target)


def _windows_of_means(
    spec: ops.AvgPoolSpec | ops.AvgPoolGradSpec, x: HostArray, out: HostArray
) -> tuple[list[_Windows], Any]:
    """Return the windows along each axis, and the divisor of the sums."""
    windows = _windows(spec, x, out, (1,) * len(spec.window))
    if spec.divisor:
        return windows, spec.divisor
    paddings_after = spec.padding_after if spec.count_include_pad else (None,) * len(windows)
    divisor = np.ones((1,) * len(windows), np.int64)
    for axis, (window, padding_after) in enumerate(zip(windows, paddings_after, strict=True)):
        divisor = divisor * window.counts(padding_after).reshape(-1, *(1,) * (len(windows) - axis - 1))
    return windows, divisor.astype(widened(x[:0]).dtype)


@kernel(ops.AvgPoolSpec, backend="cpu", dtypes={"x": FLOATS})
def avg_pool(spec: ops.AvgPoolSpec, call: HostCall) -> None:
    """Add up along the last axis, these sums along the one before it, and so on; divide."""
    axes = len(spec.window) + 2
    x, out = batched(call.array(spec.x), axes), batched(call.array(spec.out), axes)
    windows, divisor = _windows_of_means(spec, x, out)
    for images in _images(x):
        values = widened(x[images])
        for axis in reversed(range(2, axes)):
            values = windows[axis - 2].sum(values, axis)
        convert(values / divisor, out[images])


@kernel(ops.AvgPoolGradSpec, backend="cpu", dtypes={"grad": FLOATS})
def avg_pool_grad(spec: ops.AvgPoolGradSpec, call: HostCall) -> None:
    """Divide, and add to all elements of a window, one axis after the other."""
    grad, out = call.array(spec.grad), call.array(spec.out)
    windows, divisor = _windows_of_means(spec, out, grad)
    for images in _images(out):
        values = widened(grad[images]) / divisor
        for axis in range(2, out.ndim):
            values = windows[axis - 2].spread(values, axis)
        convert(values, out[images])


# Scores made at a time.
_CHUNK_SCORES = 1 << 20


@attrs.frozen
class _AttentionBlock:
    """Some queries, and the keys that they may see.

    Attributes:
        head_index: Index of the leading axes: of one head of the keys, or slices of several.
        rows: Queries.
        columns: Keys, without those that no query sees.
        hidden: Which scores do not count, of shape (rows, columns); None if all count.
        bias: Numbers to add to the scores, of shape (..., heads, rows, columns); None for none.
    """

    head_index: tuple[int | slice, ...]
    rows: slice
    columns: slice
    hidden: HostArray | None
    bias: HostArray | None

    def queries(self, array: HostArray) -> HostArray:
        """Return the rows of an array, in the type that they are computed in."""
        return widened(array[self.head_index][..., self.rows, :])

    def scores(self, query: HostArray, key: HostArray, scale: float) -> HostArray:
        """Compute scores, of shape (..., heads, rows, columns): minus infinity where none counts."""
        scores: HostArray = matrix_product(_merged(query), key.swapaxes(-1, -2))
        scores = scores.reshape(*query.shape[:-1], key.shape[-2])
        scores *= scale
        if self.bias is not None:
            if self.bias.dtype == np.bool_:
                np.copyto(scores, -np.inf, where=~self.bias)
            else:
                scores += self.bias
                if np.isnan(scores.max(initial=-np.inf)):
                    # A hidden key may be infinite or NaN: its score is none, whatever the product was.
                    np.copyto(scores, -np.inf, where=self.bias == -np.inf)
        if self.hidden is not None:
            np.copyto(scores, -np.inf, where=self.hidden)
        return scores


class _Attention:
    """The arrays of an attention with all their axes, and its checked lengths.

    Attributes:
        query: ``(..., kv_heads, heads, rows, e)``, with the heads that one head of the keys serves.
        key: ``(..., kv_heads, columns, e)``, or blocks.
        value: ``(..., kv_heads, columns, f)``, or blocks.
    """

    def __init__(self, spec: ops.AttentionSpec | ops.AttentionGradSpec, call: HostCall) -> None:
        self._spec = spec
        self.key, self.value = (headed(call.array(array)) for array in (spec.key, spec.value))
        self.query = self.shared(call.array(spec.query))
        rows = self.query.shape[-2]
        table = spec.block_table if isinstance(spec, ops.AttentionSpec) else None
        self._table = None if table is None else call.array(table)
        block = self.key.shape[-2]
        self._columns = block if self._table is None else block * self._table.shape[-1]
        stack = self.query.shape[:-4]
        self._query_lengths = _lengths(call, "query_lengths", spec.query_lengths, rows, stack)
        self._key_lengths = _lengths(call, "key_lengths", spec.key_lengths, self._columns, stack)
        self._is_whole = table is None and spec.query_lengths is None and spec.key_lengths is None
        if self._table is not None:
            self._check_blocks(self._table, block)
        self._mask = None
        if spec.mask is not None:
            shape = (*stack, math.prod(self.query.shape[-4:-2]), rows, self._columns)
            self._mask = self.shared(np.broadcast_to(call.array(spec.mask), shape))

    def shared(self, array: HostArray, axes: int = 2) -> HostArray:
        """Split the heads of an array by the heads of the keys that serve them; `axes` axes follow."""
        array = array if array.ndim > axes else array[None]
        count, first = self.key.shape[-3], array.ndim - axes - 1
        served = array.shape[first] // max(1, count)
        return array.reshape(*array.shape[:first], count, served, *array.shape[first + 1 :])

    def _check_blocks(self, table: HostArray, block: int) -> None:
        """Refuse blocks that there are not, before one is read."""
        count = len(self.key)
        firsts: HostArray = np.arange(int(table.shape[1])) * block
        is_used: HostArray = firsts < self._key_lengths[:, None]
        is_outside = is_used & ((table < 0) | (table >= count))
        if is_outside.any():
            raise no_length("block_table", int(table[is_outside][0]), count)

    def head_indices(self) -> Iterator[tuple[int | slice, ...]]:
        """Yield the index of each key head, or of several heads if their scores are few."""
        lead, served = self.query.shape[:-3], math.prod(self.query.shape[-3:-1])
        step = _CHUNK_SCORES // max(1, math.prod(lead[1:]) * served * self._columns) if self._is_whole else 0
        if step:
            for first in range(0, lead[0], step):
                yield (slice(first, first + step),)
        else:
            yield from np.ndindex(*lead)

    def parts(self, head_index: tuple[int | slice, ...]) -> Iterator[_AttentionBlock]:
        """Cut the queries of a head into pieces; leave out queries after their length."""
        if isinstance(head_index[0], slice):
            rows, columns = self.query.shape[-2], self._columns
            step = max(1, rows)
        else:
            rows, columns = (
                int(lengths[head_index[:-1]]) for lengths in (self._query_lengths, self._key_lengths)
            )
            step = max(1, _CHUNK_SCORES // max(1, columns * self.query.shape[-3]))
        for first in range(0, rows, step):
            yield self._part(head_index, slice(first, min(first + step, rows)), rows, columns)

    def _part(
        self, head_index: tuple[int | slice, ...], rows: slice, row_count: int, columns: int
    ) -> _AttentionBlock:
        spec = self._spec
        # The key of the first query on the diagonal.
        offset = columns - row_count if spec.alignment == "lower_right" else 0
        first = 0 if spec.window_left < 0 else max(0, rows.start + offset - spec.window_left)
        stop = columns if spec.window_right < 0 else min(columns, rows.stop + offset + spec.window_right)
        visible = slice(min(first, columns), max(min(first, columns), stop))
        hidden = None
        if spec.window_left >= 0 or spec.window_right >= 0:
            diagonal: HostArray = np.arange(int(rows.start), int(rows.stop)) + offset
            keys: HostArray = np.arange(int(visible.start), int(visible.stop))
            distances: HostArray = keys - diagonal[:, None]
            hidden = np.zeros(distances.shape, np.bool_)
            hidden |= distances < -spec.window_left if spec.window_left >= 0 else False
            hidden |= distances > spec.window_right if spec.window_right >= 0 else False
        bias = None
        if self._mask is not None:
            bias = self._mask[head_index][..., rows, visible]
            bias = bias if bias.dtype == np.bool_ else widened(bias)
        return _AttentionBlock(head_index, rows, visible, hidden, bias)

    def of(self, part: _AttentionBlock, array: HostArray) -> HostArray:
        """Return the keys or the values of a part, in the type that they are computed in."""
        if self._table is None:
            return widened(array[part.head_index][..., part.columns, :])
        block, columns = array.shape[-2], part.columns
        first, stop = columns.start // block, -(-columns.stop // block)
        taken = array[self._table[part.head_index[:-1]][first:stop], part.head_index[-1]]
        taken = taken.reshape(len(taken) * block, array.shape[-1])
        return widened(taken[columns.start - first * block : columns.stop - first * block])


def headed(array: HostArray) -> HostArray:
    """Return a view with an axis for the heads."""
    return array if array.ndim > 2 else array[None]


def _merged(array: HostArray) -> HostArray:
    """Return an array (..., heads, rows, n) with the rows of all heads in one axis."""
    *lead, heads, rows, count = array.shape
    return array.reshape(*lead, heads * rows, count)


def _lengths(
    call: HostCall, argument: str, lengths: ops.ArraySpec | None, limit: int, stack: Ints
) -> HostArray:
    """Return lengths of an axis, of which none is larger than the axis."""
    if lengths is None:
        return np.full(stack, limit)
    values = call.array(lengths)
    is_outside = (values < 0) | (values > limit)
    if is_outside.any():
        raise no_length(argument, int(values[is_outside][0]), limit)
    return values


@kernel(ops.AttentionSpec, backend="cpu", dtypes={"query": FLOATS})
def attention(spec: ops.AttentionSpec, call: HostCall) -> None:
    """Compute exponentials for some rows of scores at a time, and their products with the values."""
    of = _Attention(spec, call)
    out = of.shared(call.array(spec.out))
    lse = None if spec.lse is None else of.shared(call.array(spec.lse), 1)
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
    for part in (part for head_index in of.head_indices() for part in of.parts(head_index)):
        scores = part.scores(part.queries(of.query), of.of(part, of.key), spec.scale)
        if not scores.size:
            continue
        rows = scores.reshape(-1, scores.shape[-1])
        # NumPy takes up to 13 times as long for maxima of short rows as for maxima of columns.
        maxima = (rows.copy("F") if rows.shape[1] <= 64 else rows).max(-1).reshape(*scores.shape[:-1], 1)
        # A row without a score that counts is left with nothing: its exponentials are zeros.
        maxima[np.isneginf(maxima)] = 0
        np.exp(np.subtract(scores, maxima, out=scores), out=scores)
        total = scores.sum(-1, keepdims=True)
        value = of.of(part, of.value)
        products = _weighed(_merged(scores), value).reshape(*scores.shape[:-1], value.shape[-1])
        if lse is not None:
            lse[part.head_index][..., part.rows] = (maxima + np.log(total))[..., 0]
        total[total == 0] = 1
        convert(products / total, out[part.head_index][..., part.rows, :])


@kernel(ops.AttentionGradSpec, backend="cpu", dtypes={"query": FLOATS})
def attention_grad(spec: ops.AttentionGradSpec, call: HostCall) -> None:
    """Compute the scores of some rows at a time again, and add up the gradients of keys and values."""
    of = _Attention(spec, call)
    grad, out, grad_query = (of.shared(call.array(array)) for array in (spec.grad, spec.out, spec.grad_query))
    lse = of.shared(call.array(spec.lse), 1)
    grad_key, grad_value = (headed(call.array(array)) for array in (spec.grad_key, spec.grad_value))
    grad_query[...] = 0
    for head_index in of.head_indices():
        keys, values = (np.zeros(heads[head_index].shape, lse.dtype) for heads in (of.key, of.value))
        for part in of.parts(head_index):
            if part.columns.start == part.columns.stop:
                continue
            query, key, value = part.queries(of.query), of.of(part, of.key), of.of(part, of.value)
            logs = lse[head_index][..., part.rows, None]
            weights = part.scores(query, key, spec.scale)
            is_hidden = np.isneginf(weights)
            np.exp(np.subtract(weights, np.where(logs == -np.inf, 0, logs), out=weights), out=weights)
            weights[is_hidden] = 0
            slope = part.queries(grad)
            mean = (slope * part.queries(out)).sum(-1, keepdims=True)
            weights, slope, is_hidden = map(_merged, (weights, slope, is_hidden))
            turned = weights.swapaxes(-1, -2)
            values[..., part.columns, :] += _weighed(turned, slope)
            weights *= (matrix_product(slope, value.swapaxes(-1, -2)) - _merged(mean)) * spec.scale
            weights[is_hidden] = 0
            keys[..., part.columns, :] += _weighed(turned, _merged(query))
            convert(_weighed(weights, key).reshape(query.shape), grad_query[head_index][..., part.rows, :])
        convert(keys, grad_key[head_index])
        convert(values, grad_value[head_index])


def _weighed(weights: HostArray, values: HostArray) -> HostArray:
    """Multiply matrices, where a weight of zero takes nothing: not of infinity or NaN, either."""
    product: HostArray = matrix_product(weights, values)
    if not np.isnan(product).any():
        return product
    if product.ndim > 2:
        return np.stack([_weighed(*pair) for pair in zip(weights, values, strict=True)])
    is_finite = np.isfinite(values).all(-1)
    product = matrix_product(weights[:, is_finite], values[is_finite])
    for number in np.flatnonzero(~is_finite):
        taking = weights[:, number] != 0
        product[taking] += weights[taking, number, None] * values[number]
    return product
