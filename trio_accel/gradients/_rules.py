"""Gradients of functions of arrays that are no expressions of each element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ..backends.base import NotSupportedError
from ._backward import RULES, Make, bound, is_operand, pulled, refuse
from ._elementwise import ADVICE, Rule, summed_to
from ._scatter import added_along, added_at

__all__ = ["axes_of", "composition", "conjugate", "spread"]

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays


def axes_of(at: dict[str, Any], x: Any) -> tuple[int, ...]:
    """Return the axes that a reduction takes away."""
    axis, count = at["axis"], len(x.shape)
    return tuple(range(count)) if axis is None else tuple(int(one) % count for one in np.atleast_1d(axis))


def spread(g: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return the gradient of a reduction in the shape of its argument."""
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))
    return arrays.broadcast_to(arrays.reshape(g, kept), x.shape)


def conjugate(x: Any) -> Any:
    """Return the conjugate of complex numbers, and others as they are."""
    return arrays.conj(x) if x.dtype.kind in ("complex", "c") else x


def composition(f: Callable[..., Any]) -> Make:
    """Make a rule of a composition of calls that computes the same as a function, by its arguments."""

    def rule(call: Any, g: Any) -> Iterator[Rule]:
        at = bound(call)
        names = [name for name, one in at.items() if is_operand(one)]
        operands = [at[name] for name in names]
        slopes = cache(
            lambda: pulled(lambda *leaves: f(**at | dict(zip(names, leaves, strict=True))), operands, g)
        )
        for place, one in enumerate(operands):
            yield one, lambda place=place: slopes()[place]

    return rule


# Reductions.


def _sum(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: spread(g, at["x"], axes_of(at, at["x"]))


def _count(x: Any, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _mean(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    axes = axes_of(at, at["x"])
    yield at["x"], lambda: spread(g, at["x"], axes) * (1 / _count(at["x"], axes))


def _extreme(call: Any, g: Any) -> Iterator[Rule]:
    """Equal elements share the gradient."""
    at = bound(call)
    x, axes = at["x"], axes_of(at, at["x"])

    def slope() -> Any:
        same = arrays.where(x == spread(call, x, axes), 1.0, 0.0)
        many = arrays.sum(same, axis=axes)
        return arrays.where(same > 0, spread(arrays.reshape(g, many.shape) / many, x, axes), 0)

    yield x, slope


def _prod(call: Any, g: Any) -> Iterator[Rule]:
    """The derivative of a product with one factor of 0 is the product of the others."""
    at = bound(call)
    x, axes = at["x"], axes_of(at, at["x"])

    def slope() -> Any:
        is_zero = x == 0
        zeros = spread(arrays.sum(arrays.where(is_zero, 1.0, 0.0), axis=axes), x, axes)
        others = spread(arrays.prod(arrays.where(is_zero, 1, x), axis=axes), x, axes)
        of_zero = arrays.where(zeros == 1, others, 0)
        of_other = arrays.where(zeros == 0, others / arrays.where(is_zero, 1, x), 0)
        return spread(g, x, axes) * arrays.where(is_zero, of_zero, of_other)

    yield x, slope


def _var(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, axes = at["x"], axes_of(at, at["x"])

    def slope() -> Any:
        off = x - arrays.mean(x, axis=axes, keepdims=True)
        return spread(g, x, axes) * off * (2 / (_count(x, axes) - at["correction"]))

    yield x, slope


def _std(call: Any, g: Any) -> Iterator[Rule]:
    yield from _var(call, 0.5 * g / call)


def _logsumexp(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    axes = axes_of(at, at["x"])
    yield at["x"], lambda: spread(g, at["x"], axes) * arrays.softmax(at["x"], axis=axes)


def _without_nan(name: str) -> Make:
    """Make a rule of a reduction that leaves NaN out, by one that does not."""

    def compose(x: Any, axis: Any, keepdims: bool = False, **more: Any) -> Any:
        is_nan = arrays.isnan(x)
        kept = arrays.where(is_nan, 0.0, 1.0)
        how = {"axis": axis, "keepdims": keepdims}
        if name == "prod":
            return arrays.prod(arrays.where(is_nan, 1, x), **how)
        values = arrays.where(is_nan, 0, x)
        if name == "sum":
            return arrays.sum(values, **how)
        many = arrays.sum(kept, axis=axis, keepdims=True)
        mean = arrays.sum(values, axis=axis, keepdims=True) / many
        if name == "mean":
            return arrays.sum(values, **how) / arrays.sum(kept, **how)
        off = arrays.where(is_nan, 0, x - mean)
        square = arrays.sum(off * off, **how) / (arrays.sum(kept, **how) - more["correction"])
        return square if name == "var" else arrays.sqrt(square)

    return composition(compose)


def _ptp(x: Any, axis: Any, keepdims: bool) -> Any:
    how = {"axis": axis, "keepdims": keepdims}
    return arrays.max(x, **how) - arrays.min(x, **how)


def _zscore(x: Any, axis: Any, correction: float) -> Any:
    return (x - arrays.mean(x, axis=axis, keepdims=True)) / arrays.std(
        x, axis=axis, correction=correction, keepdims=True
    )


def _moment(power: int) -> Make:
    def compose(x: Any, axis: Any, keepdims: bool) -> Any:
        off = x - arrays.mean(x, axis=axis, keepdims=True)
        square = arrays.mean(off * off, axis=axis, keepdims=keepdims)
        high = arrays.mean(off**power, axis=axis, keepdims=keepdims)
        return high / square ** (power / 2) - (3.0 if power == 4 else 0.0)

    return composition(compose)


def _cosine(x1: Any, x2: Any, axis: Any, eps: float, keepdims: bool) -> Any:
    how = {"axis": axis, "keepdims": keepdims}
    norms = [arrays.maximum(arrays.sqrt(arrays.sum(one * one, **how)), eps) for one in (x1, x2)]
    return arrays.sum(x1 * x2, **how) / (norms[0] * norms[1])


def _normed(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a layer norm, or of an RMS norm, which takes no mean away and has no bias."""
    is_centred, at = call.function.name == "arrays.layer_norm", bound(call)
    x, weight, bias = at["x"], at["weight"], at.get("bias")
    mean = partial(arrays.mean, axis=at["axis"], keepdims=True)
    off = cache(lambda: x - mean(x) if is_centred else x)
    root = cache(lambda: arrays.rsqrt(mean(off() * off()) + at["eps"]))
    normal, scaled = cache(lambda: off() * root()), cache(lambda: g * weight)
    less = cache(lambda: scaled() - normal() * mean(scaled() * normal()))
    yield x, lambda: root() * (less() - mean(scaled()) if is_centred else less())
    yield weight, lambda: summed_to(g * normal(), np.shape(weight))
    yield bias, lambda: summed_to(g, np.shape(bias))


# Other shapes, and parts.


def _reshaped(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: arrays.reshape(g, call.args[0].shape)


def _turned(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of what turns axes about: where each of them has gone, NumPy tells."""
    x, name = call.args[0], call.function.name.rpartition(".")[2]
    tags = np.empty(tuple(range(2, 2 + len(x.shape))), np.int8)
    if name in ("T", "mT"):
        turned = getattr(tags, name)
    elif name == "transpose":
        turned = tags.transpose(*call.args[1:])
    else:
        turned = getattr(np, name)(tags, *call.args[1:], **dict(call.named or {}))
    yield x, lambda: arrays.permute_dims(g, tuple(turned.shape.index(extent) for extent in tags.shape))


def _taken(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a part by numbers and slices: zeros around, and between."""
    x, key = call.args
    keys: list[Any] = [one for one in np.index_exp[key] if one is not None]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = [slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [slice(None)] * (len(x.shape) - len(keys))
    spans: list[range] = []
    for one, extent in zip(keys, x.shape, strict=False):
        if not isinstance(one, (int, slice)):
            raise NotSupportedError(f"only parts by numbers and slices have gradients; {ADVICE}")
        spans.append(range(extent)[one if isinstance(one, slice) else slice(one % extent, one % extent + 1)])
    yield x, lambda: _placed(arrays.reshape(g, tuple(map(len, spans))), x.shape, spans)


def _placed(g: Any, shape: Sequence[int], spans: Sequence[range]) -> Any:
    """Return zeros of a shape, with values at the indices of spans."""
    backwards = [axis for axis, span in enumerate(spans) if span.step < 0]
    if backwards:
        g = arrays.flip(g, axis=tuple(backwards))
        spans = [span[::-1] if span.step < 0 else span for span in spans]
    for axis, span in enumerate(spans):
        if span.step > 1 and len(span) > 1:
            # Zeros follow each element, but the last.
            more = [(0, 0)] * (axis + 1) + [(0, span.step - 1)] + [(0, 0)] * (len(shape) - axis - 1)
            apart = (*g.shape[: axis + 1], 1, *g.shape[axis + 1 :])
            wide = arrays.pad(arrays.reshape(g, apart), more)
            whole = (*g.shape[:axis], len(span) * span.step, *g.shape[axis + 1 :])
            last = (len(span) - 1) * span.step + 1
            g = arrays.reshape(wide, whole)[(slice(None),) * axis + (slice(0, last),)]
    # An empty part has its zeros anywhere.
    starts = [span.start if len(span) else 0 for span in spans]
    ends = [span[-1] + 1 if len(span) else 0 for span in spans]
    return arrays.pad(
        g, [(start, extent - end) for start, end, extent in zip(starts, ends, shape, strict=True)]
    )


def _broadcast(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: summed_to(g, call.args[0].shape)


def _part(g: Any, axis: int, key: object) -> Any:
    return g[(slice(None),) * axis + (key,)]


def _concat(call: Any, g: Any) -> Iterator[Rule]:
    at, first = bound(call), 0
    axis = 0 if at["axis"] is None else at["axis"] % len(g.shape)
    for one in at["arrays"]:
        stop = first + (math.prod(one.shape) if at["axis"] is None else one.shape[axis])
        part = partial(_part, g, axis, slice(first, stop))
        yield one, part if at["axis"] is not None else partial(_as_shape, part, one.shape)
        first = stop


def _as_shape(make: Callable[[], Any], shape: Sequence[int]) -> Any:
    return arrays.reshape(make(), tuple(shape))


def _stack(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    for number, one in enumerate(at["arrays"]):
        yield one, partial(_part, g, at["axis"] % len(g.shape), number)


def _cast(call: Any, g: Any) -> Iterator[Rule]:
    x = call.args[0]
    yield x, lambda: g if x.dtype == g.dtype else (arrays.real(g) if _narrows(g, x) else g).cast(x.dtype)


def _narrows(g: Any, x: Any) -> bool:
    return g.dtype.kind == "complex" and x.dtype.kind != "complex"


def _same(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: g


def _flip(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: arrays.flip(g, axis=at["axis"])


def _roll(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    shift = at["shift"]
    back = tuple(-one for one in shift) if isinstance(shift, (tuple, list)) else -shift
    yield at["x"], lambda: arrays.roll(g, back, axis=at["axis"])


def _rot90(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: arrays.rot90(g, -at["k"], axes=at["axes"])


def _tile(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, many = at["x"], [int(one) for one in np.atleast_1d(at["repetitions"])]
    count = max(len(many), len(x.shape))
    many = [1] * (count - len(many)) + many
    shape = (1,) * (count - len(x.shape)) + tuple(x.shape)
    apart = tuple(extent for pair in zip(many, shape, strict=True) for extent in pair)
    each = tuple(range(0, 2 * count, 2))
    yield x, lambda: arrays.reshape(arrays.sum(arrays.reshape(g, apart), axis=each), x.shape)


def _repeat(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, many, axis = at["x"], at["repeats"], at["axis"]
    if not isinstance(many, int):
        raise refuse(call.function.name, "an array of repeats decides the length of the result")
    shape = (math.prod(x.shape),) if axis is None else tuple(x.shape)
    place = 0 if axis is None else axis % len(shape)
    apart = (*shape[: place + 1], many, *shape[place + 1 :])
    yield x, lambda: arrays.reshape(arrays.sum(arrays.reshape(g, apart), axis=place + 1), x.shape)


def _diagonal(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, offset = at["x"], at["offset"]
    rows, columns = x.shape[-2:]

    def slope() -> Any:
        first = np.arange(rows)[:, None] + offset == np.arange(columns)
        wide = (*x.shape[:-2], rows if offset >= 0 else columns)
        kept = g.shape[-1]
        # The element of row i is that of the diagonal, from its beginning.
        if offset >= 0:
            aligned = arrays.pad(g, [(0, 0)] * (len(wide) - 1) + [(0, rows - kept)])
            return arrays.where(first, arrays.expand_dims(aligned, axis=-1), 0)
        aligned = arrays.pad(g, [(0, 0)] * (len(wide) - 1) + [(0, columns - kept)])
        return arrays.where(first, arrays.expand_dims(aligned, axis=-2), 0)

    yield x, slope


def _diag(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: arrays.diagonal(g, offset=at["k"])


def _windows(call: Any, g: Any) -> Iterator[Rule]:
    """Each element of a window gives its gradient to the element that it shows."""
    at = bound(call)
    x, axis, window = at["x"], at["axis"], at["window_shape"]
    sizes = [int(one) for one in np.atleast_1d(window)]
    count = len(x.shape)
    axes = list(range(count)) if axis is None else [int(one) % count for one in np.atleast_1d(axis)]

    def slope() -> Any:
        total: Any = None
        for offsets in np.ndindex(*sizes):
            widths = [(0, 0)] * count
            for place, offset, size in zip(axes, offsets, sizes, strict=True):
                before, after = widths[place]
                widths[place] = before + offset, after + size - 1 - offset
            one = arrays.pad(g[(..., *offsets)], widths)
            total = one if total is None else total + one
        return total

    yield x, slope


def _pad(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, mode = at["x"], at["mode"]
    pairs = np.broadcast_to(np.asarray(at["pad_width"]), (len(x.shape), 2)).tolist()
    inside = [slice(before, before + extent) for (before, _), extent in zip(pairs, x.shape, strict=True)]
    if mode == "constant":
        yield x, lambda: g[tuple(inside)]
    else:
        yield x, lambda: unpadded(g, x.shape, pairs, mode)


def unpadded(g: Any, shape: Sequence[int], pairs: Sequence[Sequence[int]], mode: str) -> Any:
    """Return the gradient of an array by that of the padded one: each element gets it from where it was repeated.

    Args:
        g: The gradient of the padded array.
        shape: Shape of the array.
        pairs: How many elements were added before and after, for each axis.
        mode: A mode of `numpy.pad` that repeats elements.
    """
    for axis, ((before, after), extent) in enumerate(zip(pairs, shape, strict=True)):
        if not before and not after:
            continue
        places = np.pad(np.arange(extent), (before, after), mode=mode)
        # The blocks of neighbours that were repeated in order, or in reverse order.
        total: Any = None
        for start, stop in _runs(places):
            first, last = int(places[start]), int(places[stop - 1])
            block = _part(g, axis, slice(start, stop))
            if last < first:
                block, first, last = arrays.flip(block, axis=axis), last, first
            elif last == first and stop - start > 1:
                block = arrays.sum(block, axis=axis, keepdims=True)
            widths = [(0, 0)] * len(shape)
            widths[axis] = first, extent - last - 1
            one = arrays.pad(block, widths)
            total = one if total is None else total + one
        g = total
    return g


def _runs(places: Any) -> Iterator[tuple[int, int]]:
    """Yield parts of indices that rise by one, fall by one, or stay."""
    start = 0
    for stop in range(1, len(places) + 1):
        steps = np.diff(places[start:stop])
        if stop == len(places) or (len(steps) and np.any(np.diff(places[start : stop + 1]) != steps[0])):
            yield start, stop
            start = stop
        elif stop - start == 1 and abs(int(places[stop]) - int(places[start])) > 1:
            yield start, stop
            start = stop


def _triangle(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: getattr(arrays, call.function.name.partition(".")[2])(g, k=at["k"])


# Scans and orders.


def _cumulative_sum(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    axis = 0 if at["axis"] is None else at["axis"] % len(g.shape)

    def slope() -> Any:
        of_sums = _part(g, axis, slice(1, None)) if at["include_initial"] else g
        return arrays.flip(arrays.cumulative_sum(arrays.flip(of_sums, axis=axis), axis=axis), axis=axis)

    yield at["x"], slope


def _cumulative_prod(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x = at["x"]
    axis = 0 if at["axis"] is None else at["axis"] % len(g.shape)
    if at["include_initial"]:
        raise refuse(call.function.name, "include_initial adds a product of nothing; concat a one")

    def slope() -> Any:
        # The first zero along the axis takes the product of the others, and those behind it have none.
        is_zero = x == 0
        seen = arrays.cumulative_sum(arrays.where(is_zero, 1, 0), axis=axis)
        patched = arrays.where(arrays.logical_and(is_zero, seen == 1), 1, x)
        without = arrays.cumulative_prod(patched, axis=axis)
        back = lambda one: arrays.flip(  # noqa: E731
            arrays.cumulative_sum(arrays.flip(one, axis=axis), axis=axis), axis=axis
        )
        of_zero = back(g * arrays.where(seen == 1, without, 0))
        of_other = back(g * call) / arrays.where(is_zero, 1, x)
        return arrays.where(is_zero, arrays.where(seen == 1, of_zero, 0), of_other)

    yield x, slope


def _cumulative_extreme(call: Any, g: Any) -> Iterator[Rule]:
    """The element that became the extremum gets the gradients of all results up to the next one."""
    at = bound(call)
    x = at["x"]
    count = len(g.shape)
    axis = 0 if at["axis"] is None else at["axis"] % count

    def slope() -> Any:
        length = g.shape[axis]
        places = np.arange(length).reshape([-1 if one == axis else 1 for one in range(count)])
        at_first = arrays.where(x == call, places, 0)
        source = arrays.cumulative_max(at_first, axis=axis)
        return added_along(arrays.zeros_like(x), source, g, axis)

    yield x, slope


def _cumulative_logsumexp(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x = at["x"]
    axis = 0 if at["axis"] is None else at["axis"] % len(g.shape)

    def slope() -> Any:
        # Results rise along the axis, so that no exponential overflows: exp(x - result) is at most 1.
        total: Any = None
        length = g.shape[axis]
        for offset in range(length):
            widths = [(0, 0)] * len(g.shape)
            widths[axis] = 0, offset
            later = _part(g, axis, slice(offset, None)) * arrays.exp(
                _part(x, axis, slice(0, length - offset)) - _part(call, axis, slice(offset, None))
            )
            one = arrays.pad(later, widths)
            total = one if total is None else total + one
        return total

    yield x, slope


def _sort(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, axis = at["x"], at["axis"]

    def slope() -> Any:
        order = arrays.argsort(x, axis=axis, descending=at["descending"], stable=True)
        return arrays.take_along_axis(g, arrays.argsort(order, axis=axis), axis=axis)

    yield x, slope


def _take(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, indices = at["x"], at["indices"]
    axis = 0 if at["axis"] is None else at["axis"] % len(x.shape)
    many = math.prod(np.shape(indices))
    flat = (*x.shape[:axis], many, *x.shape[axis + 1 :])
    line = tuple(many if one == axis else 1 for one in range(len(x.shape)))

    def slope() -> Any:
        places = _wide(indices.reshape(line), flat)
        return added_along(arrays.zeros_like(x), places, arrays.reshape(g, flat), axis)

    yield x, slope


def _wide(indices: Any, shape: Sequence[int]) -> Any:
    """Broadcast indices, which may be an array of the host."""
    is_host = isinstance(indices, np.ndarray)
    return np.broadcast_to(indices, shape).copy() if is_host else arrays.broadcast_to(indices, shape)


def _take_along_axis(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, indices, axis = at["x"], at["indices"], at["axis"] % len(at["x"].shape)
    wide = (*g.shape[:axis], x.shape[axis], *g.shape[axis + 1 :])

    def slope() -> Any:
        zeros = arrays.broadcast_to(arrays.zeros_like(x), wide).copy()
        places = _wide(indices, g.shape)
        return summed_to(added_along(zeros, places, g, axis), x.shape)

    yield x, slope


def _gather_nd(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    yield at["x"], lambda: added_at(arrays.zeros_like(at["x"]), at["indices"], g)


def _compressed(call: Any, g: Any) -> Iterator[Rule]:
    raise refuse(call.function.name, "elements decide the length of the result")
    yield


def _segments(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, offsets = at["x"], at["offsets"]
    if at["op"] != "sum":
        raise refuse(call.function.name, f"op={at['op']!r} has no rule; op='sum' has one")

    def slope() -> Any:
        places = np.arange(x.shape[0])
        find = np.searchsorted if isinstance(offsets, np.ndarray) else arrays.searchsorted
        segment = find(offsets, places, side="right") - 1
        return arrays.take(g, segment, axis=0)

    yield x, slope


# Compositions.


def _diff(x: Any, axis: int, n: int, prepend: Any, append: Any) -> Any:
    axis %= len(x.shape)
    parts = [one for one in (prepend, x, append) if one is not None]
    whole = arrays.concat(parts, axis=axis) if len(parts) > 1 else x
    for _ in range(n):
        whole = _part(whole, axis, slice(1, None)) - _part(whole, axis, slice(0, -1))
    return whole


def _trapezoid(y: Any, x: Any, dx: float, axis: int, keepdims: bool) -> Any:
    count = len(y.shape)
    axis %= count
    pairs = _part(y, axis, slice(1, None)) + _part(y, axis, slice(0, -1))
    if x is None:
        return arrays.sum(pairs, axis=axis, keepdims=keepdims) * (0.5 * dx)
    along = axis if len(x.shape) == count else 0
    steps = _part(x, along, slice(1, None)) - _part(x, along, slice(0, -1))
    if len(x.shape) != count:
        steps = arrays.reshape(steps, tuple(-1 if one == axis else 1 for one in range(count)))
    return arrays.sum(pairs * steps, axis=axis, keepdims=keepdims) * 0.5


def _average(x: Any, axis: Any, weights: Any, keepdims: bool) -> Any:
    if weights is None:
        return arrays.mean(x, axis=axis, keepdims=keepdims)
    if len(weights.shape) != len(x.shape):
        line = tuple(-1 if one == axis % len(x.shape) else 1 for one in range(len(x.shape)))
        weights = arrays.reshape(weights, line)
    whole = arrays.broadcast_to(weights, x.shape)
    total = arrays.sum(x * weights, axis=axis, keepdims=keepdims)
    return total / arrays.sum(whole, axis=axis, keepdims=keepdims)


def _cov(x: Any, correction: int) -> Any:
    rows = x if len(x.shape) == 2 else arrays.reshape(x, (1, -1))
    off = rows - arrays.mean(rows, axis=1, keepdims=True)
    made = (off @ off.mT) * (1 / (rows.shape[1] - correction))
    return made if len(x.shape) == 2 else arrays.reshape(made, ())


def _corrcoef(x: Any) -> Any:
    made = _cov(x, 1)
    if not made.shape:
        return made / made
    roots = arrays.sqrt(arrays.diagonal(made))
    return made / (arrays.expand_dims(roots, axis=1) * arrays.expand_dims(roots, axis=0))


def _nan_to_num(x: Any, **named: Any) -> Any:
    return arrays.where(arrays.isfinite(x), x, 0)


def _polyval(p: Any, x: Any) -> Any:
    total: Any = p[0] + 0 * x
    for number in range(1, p.shape[0]):
        total = total * x + p[number]
    return total


def _vander(x: Any, n: int | None, increasing: bool) -> Any:
    count = x.shape[0] if n is None else n
    powers = range(count) if increasing else range(count - 1, -1, -1)
    return arrays.stack([x**power if power else arrays.ones_like(x) + 0 * x for power in powers], axis=-1)


def _select(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    taken: Any = None
    for condition, choice in zip(at["conditions"], at["choices"], strict=True):
        # Conditions may be arrays of the host.
        here = condition if taken is None else condition & ~taken
        yield choice, partial(_chosen, here, g, np.shape(choice))
        taken = condition if taken is None else taken | condition
    yield at["default"], lambda: summed_to(arrays.where(taken, 0, g), np.shape(at["default"]))


def _chosen(condition: Any, g: Any, shape: Sequence[int]) -> Any:
    return summed_to(arrays.where(condition, g, 0), shape)


def _clip(x: Any, min: Any, max: Any) -> Any:  # noqa: A002  # the names of the arguments
    low = x if min is None else arrays.maximum(x, min)
    return low if max is None else arrays.minimum(low, max)


def _quantile(x: Any, q: Any, axis: Any, method: str, keepdims: bool, scale: float = 1.0) -> Any:
    if method != "linear":
        raise refuse("arrays.quantile", f"method={method!r} has no rule; method='linear' has one")
    count = len(x.shape)
    axes = list(range(count)) if axis is None else [int(one) % count for one in np.atleast_1d(axis)]
    others = [one for one in range(count) if one not in axes]
    kept = tuple(x.shape[one] for one in others)
    flat = arrays.reshape(arrays.permute_dims(x, (*others, *axes)), (*kept, -1))
    ordered = arrays.sort(flat, axis=-1)
    made: list[Any] = []
    for one in np.atleast_1d(np.asarray(q, float) * scale):
        place = float(one) * (flat.shape[-1] - 1)
        low = int(np.floor(place))
        high, part = min(low + 1, flat.shape[-1] - 1), place - low
        made.append(ordered[..., low] * (1 - part) + ordered[..., high] * part)
    if keepdims:
        made = [
            arrays.reshape(one, tuple(1 if k in axes else n for k, n in enumerate(x.shape))) for one in made
        ]
    return arrays.stack(made, axis=0) if np.ndim(q) else made[0]


def _median(x: Any, axis: Any, keepdims: bool) -> Any:
    return _quantile(x, 0.5, axis, "linear", keepdims)


def _percentile(**at: Any) -> Any:
    return _quantile(**at, scale=0.01)


_TURNED = (
    "AccelRef.T", "AccelRef.mT", "AccelRef.transpose", "arrays.matrix_transpose", "linalg.matrix_transpose",
    "arrays.permute_dims", "arrays.moveaxis", "arrays.swapaxes",
)  # fmt: skip
_EXTREMA = ("max", "min", "nanmax", "nanmin")
RULES.update({
    "AccelRef.__getitem__": _taken, "AccelRef.copy": _cast, "AccelRef.reshape": _reshaped,
    "arrays.average": composition(_average),
    "arrays.broadcast_to": _broadcast, "arrays.clip": composition(_clip), "arrays.concat": _concat,
    "arrays.corrcoef": composition(_corrcoef), "arrays.cosine_similarity": composition(_cosine),
    "arrays.cov": composition(_cov), "arrays.cumulative_logsumexp": _cumulative_logsumexp,
    "arrays.cumulative_max": _cumulative_extreme, "arrays.cumulative_min": _cumulative_extreme,
    "arrays.cumulative_prod": _cumulative_prod, "arrays.cumulative_sum": _cumulative_sum,
    "arrays.diag": _diag, "arrays.diagonal": _diagonal, "linalg.diagonal": _diagonal,
    "arrays.diff": composition(_diff), "arrays.expand_dims": _reshaped, "arrays.flip": _flip,
    "arrays.gather_nd": _gather_nd, "arrays.kurtosis": _moment(4), "arrays.layer_norm": _normed,
    "arrays.logsumexp": _logsumexp, "arrays.mean": _mean, "arrays.median": composition(_median),
    "arrays.nan_to_num": composition(_nan_to_num), "arrays.pad": _pad,
    "arrays.percentile": composition(_percentile), "arrays.polyval": composition(_polyval),
    "arrays.prod": _prod, "arrays.ptp": composition(_ptp), "arrays.quantile": composition(_quantile),
    "arrays.repeat": _repeat, "arrays.reshape": _reshaped, "arrays.rms_norm": _normed, "arrays.roll": _roll,
    "arrays.rot90": _rot90, "arrays.segmented_reduce": _segments, "arrays.select": _select,
    "arrays.skew": _moment(3), "arrays.sliding_window_view": _windows, "arrays.sort": _sort,
    "arrays.squeeze": _reshaped, "arrays.stack": _stack, "arrays.std": _std, "arrays.sum": _sum,
    "arrays.take": _take, "arrays.take_along_axis": _take_along_axis, "arrays.tile": _tile,
    "arrays.trapezoid": composition(_trapezoid), "arrays.tril": _triangle, "arrays.triu": _triangle,
    "arrays.unwrap": _same, "arrays.vander": composition(_vander), "arrays.var": _var,
    "arrays.zscore": composition(_zscore),
    **dict.fromkeys(_TURNED, _turned),
    **{f"arrays.{name}": _extreme for name in _EXTREMA},
    **{f"arrays.nan{name}": _without_nan(name) for name in ("sum", "mean", "prod", "var", "std")},
})  # fmt: skip
