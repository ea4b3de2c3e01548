"""Convolutions, pooling and attention. Attention over blocks of keys is not PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trio_accel.backends.base import ArraySpec, DType, kernel, no_element, no_length, ops

from .._device import refuse
from .._views import carrier, read, write
from ..manifest import BACKEND

T = torch.Tensor
FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)


def _wide(call: Any, array: ArraySpec, axes: int | None = None) -> T:
    """Read an array in the type that it is computed in, with so many axes; the first may be missing."""
    value = read(call, array)
    value = value.float() if array.dtype.is_half else value
    return value if axes is None or value.dim() == axes else value[None]


def _put(call: Any, out: ArraySpec, value: T) -> None:
    write(call, out, value.to(carrier(out.dtype)).reshape(out.shape))


def _reach(spec: Any, window: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return how many elements along each axis all windows reach over."""
    each = zip(counts, spec.stride, window, spec.dilation, strict=True)
    return [(count - 1) * stride + (width - 1) * dilation + 1 for count, stride, width, dilation in each]


def _padded(x: T, spec: Any, reach: Sequence[int]) -> T:
    """Pad images with zeros, or cut them, so that they have what the windows reach over and nothing else."""
    pads: list[int] = []
    for extent, before, whole in zip(x.shape[2:], spec.padding, reach, strict=True):
        pads = [before, whole - before - extent, *pads]
    return torch.nn.functional.pad(x, pads)


def _convolve(x: T, weight: T, spec: Any, *, is_transposed: bool = False) -> T:
    axes = len(spec.stride)
    if axes > 3:
        refuse(f"convolution along {axes} axes")
    none = [0] * axes
    found: T = torch.convolution(
        x, weight, None, spec.stride, none, spec.dilation, is_transposed, none, spec.groups
    )
    return found


def _biased(call: Any, made: T, spec: Any) -> T:
    if spec.bias is None:
        return made
    return made + _wide(call, spec.bias).reshape(-1, *[1] * len(spec.stride))


@kernel(ops.ConvolutionSpec, backend=BACKEND, dtypes={"x": FLOATS})
def convolution(spec: ops.ConvolutionSpec, call: Any) -> None:
    """Add up products of windows and weights."""
    axes = len(spec.stride) + 2
    if 0 in spec.out.shape:
        return
    x, weight = _wide(call, spec.x, axes), _wide(call, spec.weight)
    counts = spec.out.shape[-(axes - 2) :]
    if not x.numel() or not weight.numel():
        made = torch.zeros((len(x), len(weight), *counts), dtype=x.dtype, device=x.device)
    else:
        made = _convolve(_padded(x, spec, _reach(spec, weight.shape[2:], counts)), weight, spec)
    _put(call, spec.out, _biased(call, made, spec))


@kernel(ops.ConvolutionInputGradSpec, backend=BACKEND, dtypes={"grad": FLOATS})
def convolution_input_grad(spec: ops.ConvolutionInputGradSpec, call: Any) -> None:
    """Add products up where the windows were taken."""
    axes = len(spec.stride) + 2
    if 0 in spec.out.shape:
        return
    grad, weight = _wide(call, spec.grad, axes), _wide(call, spec.weight)
    extents = spec.out.shape[-(axes - 2) :]
    count, channels = len(grad), spec.out.shape[-(axes - 1)]
    made = torch.zeros((count, channels, *extents), dtype=grad.dtype, device=grad.device)
    if grad.numel() and weight.numel():
        whole = _convolve(grad, weight, spec, is_transposed=True)
        inner = [slice(before, before + extent) for before, extent in zip(spec.padding, extents, strict=True)]
        taken = whole[(slice(None), slice(None), *inner)]
        made[tuple([slice(extent) for extent in taken.shape])] = taken
    _put(call, spec.out, _biased(call, made, spec))


@kernel(ops.ConvolutionWeightGradSpec, backend=BACKEND, dtypes={"x": FLOATS})
def convolution_weight_grad(spec: ops.ConvolutionWeightGradSpec, call: Any) -> None:
    """Add up products of windows and gradients."""
    axes = len(spec.stride) + 2
    if 0 in spec.out.shape:
        return
    x, grad = _wide(call, spec.x, axes), _wide(call, spec.grad, axes)
    made = torch.zeros(spec.out.shape, dtype=x.dtype, device=x.device)
    if x.numel() and grad.numel():
        if axes > 5:
            refuse(f"convolution along {axes - 2} axes")
        x = _padded(x, spec, _reach(spec, spec.out.shape[2:], grad.shape[2:]))
        none, wanted = [0] * (axes - 2), [False, True, False]
        options = (None, spec.stride, none, spec.dilation, False, none, spec.groups, wanted)
        made = torch.ops.aten.convolution_backward(grad, x, made, *options)[1]
    _put(call, spec.out, made)


class _Windows:
    """The windows of a pooling: for each axis the elements of every window, and which of these there are."""

    def __init__(
        self, spec: Any, extents: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        self._extents = tuple(extents)
        self._counts = tuple(counts)
        self.places: list[T] = []
        self.held: list[T] = []
        dilation = getattr(spec, "dilation", (1,) * len(extents))
        for axis, (extent, count) in enumerate(zip(extents, counts, strict=True)):
            numbers = torch.arange(count, device=device)
            if not spec.window[axis]:
                first, stop = numbers * extent // count, -(-(numbers + 1) * extent // count)
                width = int((stop - first).max())
                at = first[:, None] + torch.arange(width, device=device)
                held = at < stop[:, None]
            else:
                steps = torch.arange(spec.window[axis], device=device) * dilation[axis]
                at = (numbers * spec.stride[axis] - spec.padding[axis])[:, None] + steps
                held = (at >= 0) & (at < extent)
            self.places.append(at)
            self.held.append(held)

    def _joined(self, parts: Sequence[T], *, is_sum: bool) -> T:
        """Join what is along each axis into one table: windows, and their elements."""
        axes = len(parts)
        total: T | None = None
        for axis, each in enumerate(parts):
            shape = [1] * (2 * axes)
            shape[axis], shape[axes + axis] = each.shape
            here = each.reshape(shape)
            total = here if total is None else total + here if is_sum else total & here
        assert total is not None
        return total.reshape(math.prod(self._counts), -1)

    def tables(self) -> tuple[T, T]:
        """Return the places of all elements of each window, in C order, and which of them there are."""
        flat: list[T] = []
        for axis, at in enumerate(self.places):
            step = math.prod(self._extents[axis + 1 :])
            flat.append(at.clamp(0, self._extents[axis] - 1) * step)
        return self._joined(flat, is_sum=True), self._joined(self.held, is_sum=False)


def _flat(value: T, axes: int) -> T:
    return value.reshape(*value.shape[: value.dim() - axes], -1)


@kernel(ops.MaxPoolSpec, backend=BACKEND, dtypes={"x": FLOATS})
def max_pool(spec: ops.MaxPoolSpec, call: Any) -> None:
    """Take the first of the greatest elements of each window."""
    if 0 in spec.out.shape:
        return
    axes = len(spec.window)
    x = read(call, spec.x)
    windows = _Windows(spec, x.shape[-axes:], spec.out.shape[-axes:], x.device)
    places, held = windows.tables()
    taken = _flat(x, axes)[..., places]
    is_nan = torch.isnan(taken) & held
    best = (
        torch.where(held, taken, -torch.inf)
        .nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        .amax(-1)
    )
    is_best = ((taken == best[..., None]) & held) | is_nan
    is_best = torch.where(is_nan.any(-1, keepdim=True), is_nan, is_best)
    numbers = torch.arange(places.shape[-1], device=x.device)
    first = torch.where(is_best, numbers, places.shape[-1]).amin(-1)
    found = places.expand(*first.shape, -1).gather(-1, first[..., None])[..., 0]
    _put(call, spec.out, _flat(x, axes).gather(-1, found))
    if spec.indices is not None:
        _put(call, spec.indices, found)


@kernel(ops.MaxPoolGradSpec, backend=BACKEND, dtypes={"grad": FLOATS})
def max_pool_grad(spec: ops.MaxPoolGradSpec, call: Any) -> None:
    """Add each value to the element that was the greatest."""
    if 0 in spec.out.shape:
        return
    lead, spatial = spec.out.shape[:2], spec.out.shape[2:]
    size = math.prod(spatial)
    grad, at = _wide(call, spec.grad).reshape(*lead, -1), read(call, spec.indices).reshape(*lead, -1).long()
    is_outside = (at < 0) | (at >= size)
    if bool(is_outside.any()):
        raise no_element(int(at[is_outside][0]), size)
    made = torch.zeros((*lead, size), dtype=grad.dtype, device=grad.device).scatter_add_(-1, at, grad)
    _put(call, spec.out, made)


def _divisors(spec: Any, windows: _Windows, extents: Sequence[int]) -> T | int:
    """Return what sums are divided by: a number, or one for each window."""
    if spec.divisor:
        return int(spec.divisor)
    total: T | None = None
    for axis, at in enumerate(windows.places):
        held = windows.held[axis]
        if spec.count_include_pad and spec.window[axis]:
            held = at < extents[axis] + spec.padding_after[axis]
        counts = held.sum(-1)
        total = counts if total is None else (total[..., None] * counts).reshape(*total.shape, -1)
    assert total is not None
    return total.reshape(-1)


@kernel(ops.AvgPoolSpec, backend=BACKEND, dtypes={"x": FLOATS})
def avg_pool(spec: ops.AvgPoolSpec, call: Any) -> None:
    """Take the means of windows."""
    if 0 in spec.out.shape:
        return
    axes, x = len(spec.window), _wide(call, spec.x)
    windows = _Windows(spec, x.shape[-axes:], spec.out.shape[-axes:], x.device)
    places, held = windows.tables()
    taken = _flat(x, axes)[..., places]
    total = torch.where(held, taken, torch.zeros_like(taken)).sum(-1)
    _put(call, spec.out, total / _divisors(spec, windows, x.shape[-axes:]))


@kernel(ops.AvgPoolGradSpec, backend=BACKEND, dtypes={"grad": FLOATS})
def avg_pool_grad(spec: ops.AvgPoolGradSpec, call: Any) -> None:
    """Share each value out among the elements of its window."""
    if 0 in spec.out.shape:
        return
    axes, grad = len(spec.window), _wide(call, spec.grad)
    extents = spec.out.shape[-axes:]
    windows = _Windows(spec, extents, grad.shape[-axes:], grad.device)
    places, held = windows.tables()
    values = (_flat(grad, axes) / _divisors(spec, windows, extents))[..., None] * held
    lead = spec.out.shape[:-axes]
    made = torch.zeros((*lead, math.prod(extents)), dtype=grad.dtype, device=grad.device)
    made.index_add_(made.dim() - 1, places.reshape(-1), values.reshape(*lead, -1))
    _put(call, spec.out, made)


class _Attention:
    """Queries, keys and values with an axis for heads each, and the scores that count."""

    def __init__(self, spec: Any, call: Any) -> None:
        if getattr(spec, "block_table", None) is not None:
            refuse("attention over blocks of keys")
        self.scale = spec.scale
        self.query, self.key, self.value = (
            _headed(_wide(call, one)) for one in (spec.query, spec.key, spec.value)
        )
        heads, shared = self.query.shape[-3], self.key.shape[-3]
        self.times = max(heads // max(shared, 1), 1)
        self._spec = spec
        self._rows, self._columns = self.query.shape[-2], self.key.shape[-2]
        self.lengths = [
            _lengths(call, name, getattr(spec, name), most)
            for name, most in (("query_lengths", self._rows), ("key_lengths", self._columns))
        ]
        self._mask = None if spec.mask is None else read(call, spec.mask)

    def each_head(self, array: T) -> T:
        """Repeat keys or values for the heads that share them."""
        return array.repeat_interleave(self.times, -3) if self.times != 1 else array

    def summed(self, array: T) -> T:
        """Add up the gradients of the heads that share keys or values."""
        if self.times == 1:
            return array
        *lead, heads, rows, width = array.shape
        return array.reshape(*lead, heads // self.times, self.times, rows, width).sum(-3)

    def scores(self) -> T:
        """Return the scores; those that do not count are minus infinity."""
        made: T = torch.matmul(self.query, self.each_head(self.key).mT) * self.scale
        if self._mask is not None:
            mask = self._mask
            # A key that is hidden may hold anything, NaN too.
            is_hidden = ~mask if mask.dtype is torch.bool else torch.isneginf(mask)
            made = torch.where(is_hidden, -torch.inf, made if mask.dtype is torch.bool else made + mask)
        return made.masked_fill(self.hidden(made.device), -torch.inf)

    def hidden(self, device: torch.device) -> T:
        """Return which scores the band and the lengths hide."""
        rows, columns = torch.arange(self._rows, device=device), torch.arange(self._columns, device=device)
        queries, keys = (
            torch.tensor(most, device=device) if one is None else one[..., None, None, None]
            for one, most in zip(self.lengths, (self._rows, self._columns), strict=True)
        )
        spec = self._spec
        own = rows[:, None] + (keys - queries if spec.alignment == "lower_right" else 0)
        hidden = (rows[:, None] >= queries) | (columns >= keys)
        if spec.window_left >= 0:
            hidden = hidden | (columns - own < -spec.window_left)
        if spec.window_right >= 0:
            hidden = hidden | (columns - own > spec.window_right)
        return hidden


def _headed(array: T) -> T:
    return array if array.dim() > 2 else array[None]


def _lengths(call: Any, argument: str, lengths: ArraySpec | None, most: int) -> T | None:
    """Return lengths of an axis, of which none is larger than the axis."""
    if lengths is None:
        return None
    given = read(call, lengths).long()
    is_outside = (given < 0) | (given > most)
    if bool(is_outside.any()):
        raise no_length(argument, int(given[is_outside][0]), most)
    return given


def _weighed(weights: T, values: T) -> T:
    """Multiply matrices, where a weight of zero takes nothing: not of infinity or NaN, either."""
    made = torch.matmul(weights, values)
    if not bool(torch.isnan(made).any()):
        return made
    values = values.expand(*weights.shape[:-2], *values.shape[-2:])
    products = weights[..., None] * values[..., None, :, :]
    return torch.where(weights[..., None] == 0, torch.zeros_like(products), products).sum(-2)


@kernel(ops.AttentionSpec, backend=BACKEND, dtypes={"query": FLOATS})
def attention(spec: ops.AttentionSpec, call: Any) -> None:
    """Weigh values by the exponentials of scores."""
    of = _Attention(spec, call)
    if 0 in spec.out.shape:
        return
    scores = of.scores()
    if not scores.shape[-1]:
        scores = torch.full((*scores.shape[:-1], 1), -torch.inf, dtype=scores.dtype, device=scores.device)
        weights, total = scores.exp(), scores.exp().sum(-1, keepdim=True)
        made = torch.zeros(spec.out.shape, dtype=scores.dtype, device=scores.device)
        lse = total.log()
    else:
        most = scores.amax(-1, keepdim=True)
        most = torch.where(torch.isneginf(most), torch.zeros_like(most), most)
        weights = torch.exp(scores - most)
        total = weights.sum(-1, keepdim=True)
        lse = most + torch.log(total)
        made = _weighed(weights, of.each_head(of.value)) / torch.where(
            total == 0, torch.ones_like(total), total
        )
    _put(call, spec.out, made)
    if spec.lse is not None:
        _put(call, spec.lse, lse)


@kernel(ops.AttentionGradSpec, backend=BACKEND, dtypes={"query": FLOATS})
def attention_grad(spec: ops.AttentionGradSpec, call: Any) -> None:
    """Compute the scores again, and the gradients of queries, keys and values."""
    of = _Attention(spec, call)
    grad, out = (_headed(_wide(call, one)) for one in (spec.grad, spec.out))
    lse = _wide(call, spec.lse).reshape(*of.query.shape[:-1], 1)
    scores = of.scores()
    is_hidden = torch.isneginf(scores)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse))
    weights = weights.masked_fill(is_hidden, 0)
    mean = (grad * out).sum(-1, keepdim=True)
    slope = weights * (torch.matmul(grad, of.each_head(of.value).mT) - mean) * of.scale
    slope = slope.masked_fill(is_hidden, 0)
    values = of.summed(_weighed(weights.mT, grad))
    keys = of.summed(_weighed(slope.mT, of.query))
    queries = _weighed(slope, of.each_head(of.key))
    for array, value in ((spec.grad_query, queries), (spec.grad_key, keys), (spec.grad_value, values)):
        if 0 not in array.shape:
            _put(call, array, value)
