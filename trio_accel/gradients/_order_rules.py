"""Gradients of scans, orders, gathers, and of functions that are compositions of others."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ..devices import gather
from ..expressions import Elementwise
from ._backward import RULES, bound, pulled, refuse
from ._elementwise import Rule, summed_to
from ._rules import (
    adjoint,
    axes_of,
    axis_of,
    composition,
    conjugate,
    part,
    products_before,
    total_of,
)
from ._scatter import added_along, added_at

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays


def _cumulative_sum(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    axis = axis_of(args, g)

    def slope() -> Any:
        of_sums = part(g, axis, slice(1, None)) if args["include_initial"] else g
        return _sums_from_the_end(of_sums, axis)

    yield args["x"], slope


def _sums_from_the_end(x: Any, axis: int) -> Any:
    return arrays.flip(arrays.cumulative_sum(arrays.flip(x, axis=axis), axis=axis), axis=axis)


def _cumulative_prod(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x = args["x"]
    axis = axis_of(args, g)
    if args["include_initial"]:
        raise refuse(call.function.name, "include_initial adds a product of nothing; concat a one")

    def slope() -> Any:
        # The gradient of a factor is the product of the factors before it, times the sum of the gradients of
        # its result and all later ones, each times the factors between. Nothing is divided, because factors
        # may be 0.
        factors = conjugate(x)
        return products_before(factors, axis) * _from_the_end(factors, g, axis)

    yield x, slope


def _cumulative_extreme(call: Any, g: Any) -> Iterator[Rule]:
    """The element that became the extremum gets the gradients of all results up to the next one."""
    args = bound(call)
    x = args["x"]
    count = len(g.shape)
    axis = axis_of(args, g)

    def slope() -> Any:
        length = g.shape[axis]
        indices = np.arange(length).reshape([-1 if dim == axis else 1 for dim in range(count)])
        at_first = arrays.where(x == call, indices, 0)
        source = arrays.cumulative_max(at_first, axis=axis)
        return added_along(partial(arrays.zeros_like, x), x.shape, source, g, axis)

    yield x, slope


def _cumulative_logsumexp(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x = args["x"]
    axis = axis_of(args, g)

    def slope() -> Any:
        # Results rise along the axis, so that no exponential overflows: exp(x - result) is at most 1.
        terms = list[Any]()
        length = g.shape[axis]
        for offset in range(length):
            widths = [(0, 0)] * len(g.shape)
            widths[axis] = 0, offset
            later = part(g, axis, slice(offset, None)) * arrays.exp(
                part(x, axis, slice(0, length - offset)) - part(call, axis, slice(offset, None))
            )
            terms.append(arrays.pad(later, widths))
        return total_of(terms)

    yield x, slope


def _sort(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, axis = args["x"], args["axis"]

    def slope() -> Any:
        order = arrays.argsort(x, axis=axis, descending=args["descending"], stable=True)
        return arrays.take_along_axis(g, arrays.argsort(order, axis=axis), axis=axis)

    yield x, slope


def _top_k(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, axis = args["x"], args["axis"] % len(args["x"].shape)
    yield x, lambda: added_along(partial(arrays.zeros_like, x), x.shape, call[1], g[0], axis)


def _take(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, indices = args["x"], args["indices"]
    axis = axis_of(args, x)
    size = math.prod(np.shape(indices))
    flat = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    line = tuple(size if dim == axis else 1 for dim in range(len(x.shape)))

    def slope() -> Any:
        flat_indices = _wide(indices.reshape(line), flat)
        zeros = partial(arrays.zeros_like, x)
        return added_along(zeros, x.shape, flat_indices, arrays.reshape(g, flat), axis)

    yield x, slope


def _wide(indices: Any, shape: Sequence[int]) -> Any:
    """Broadcast indices, which may be an array of the host."""
    is_host = isinstance(indices, np.ndarray)
    return np.broadcast_to(indices, shape).copy() if is_host else arrays.broadcast_to(indices, shape)


def _take_along_axis(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, indices, axis = args["x"], args["indices"], args["axis"] % len(args["x"].shape)
    wide = (*g.shape[:axis], x.shape[axis], *g.shape[axis + 1 :])

    def slope() -> Any:
        def zeros() -> Any:
            return arrays.broadcast_to(arrays.zeros_like(x), wide).copy()

        wide_indices = _wide(indices, g.shape)
        return summed_to(added_along(zeros, wide, wide_indices, g, axis), x.shape)

    yield x, slope


def _gather_nd(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["x"], lambda: added_at(args["x"], args["indices"], g)


def _segments(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, offsets = args["x"], args["offsets"]
    if args["op"] != "sum":
        raise refuse(call.function.name, f"only op='sum' is supported, got op={args['op']!r}")

    def slope() -> Any:
        rows = np.arange(x.shape[0])
        find = np.searchsorted if isinstance(offsets, np.ndarray) else arrays.searchsorted
        segment = find(offsets, rows, side="right") - 1
        return arrays.take(g, segment, axis=0)

    yield x, slope


def _diff(x: Any, axis: int, n: int, prepend: Any, append: Any) -> Any:
    axis %= len(x.shape)
    parts = [array for array in (prepend, x, append) if array is not None]
    values = arrays.concat(parts, axis=axis) if len(parts) > 1 else x
    for _ in range(n):
        values = part(values, axis, slice(1, None)) - part(values, axis, slice(0, -1))
    return values


def _trapezoid(y: Any, x: Any, dx: float, axis: int, keepdims: bool) -> Any:
    count = len(y.shape)
    axis %= count
    pairs = part(y, axis, slice(1, None)) + part(y, axis, slice(0, -1))
    if x is None:
        return arrays.sum(pairs, axis=axis, keepdims=keepdims) * (0.5 * dx)
    along = axis if len(x.shape) == count else 0
    steps = part(x, along, slice(1, None)) - part(x, along, slice(0, -1))
    if len(x.shape) != count:
        steps = arrays.reshape(steps, tuple(-1 if dim == axis else 1 for dim in range(count)))
    return arrays.sum(pairs * steps, axis=axis, keepdims=keepdims) * 0.5


def _average(x: Any, axis: Any, weights: Any, keepdims: bool) -> Any:
    if weights is None:
        return arrays.mean(x, axis=axis, keepdims=keepdims)
    if len(weights.shape) != len(x.shape):
        line = tuple(-1 if dim == axis % len(x.shape) else 1 for dim in range(len(x.shape)))
        weights = arrays.reshape(weights, line)
    wide_weights = arrays.broadcast_to(weights, x.shape)
    total = arrays.sum(x * weights, axis=axis, keepdims=keepdims)
    return total / arrays.sum(wide_weights, axis=axis, keepdims=keepdims)


def _cov(x: Any, correction: int) -> Any:
    rows = x if len(x.shape) == 2 else arrays.reshape(x, (1, -1))
    off = rows - arrays.mean(rows, axis=1, keepdims=True)
    covariance = (off @ adjoint(off)) * (1 / (rows.shape[1] - correction))
    return covariance if len(x.shape) == 2 else arrays.reshape(covariance, ())


def _corrcoef(x: Any) -> Any:
    covariance = _cov(x, 1)
    if not covariance.shape:
        return covariance / covariance
    roots = arrays.sqrt(arrays.diagonal(covariance))
    return covariance / (arrays.expand_dims(roots, axis=1) * arrays.expand_dims(roots, axis=0))


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
    args = bound(call)
    taken: Any = None
    for condition, choice in zip(args["conditions"], args["choices"], strict=True):
        # Conditions may be arrays of the host.
        is_first = condition if taken is None else condition & ~taken
        yield choice, partial(_chosen, is_first, g, np.shape(choice))
        taken = condition if taken is None else taken | condition
    yield args["default"], lambda: summed_to(arrays.where(taken, 0, g), np.shape(args["default"]))


def _chosen(condition: Any, g: Any, shape: Sequence[int]) -> Any:
    return summed_to(arrays.where(condition, g, 0), shape)


def _clip(x: Any, min: Any, max: Any) -> Any:  # noqa: A002  # the names of the arguments
    low = x if min is None else arrays.maximum(x, min)
    return low if max is None else arrays.minimum(low, max)


def _quantile(
    x: Any, q: Any, axis: Any, method: str, keepdims: bool, scale: float = 1.0, *, skips_nan: bool = False
) -> Any:
    if method != "linear":
        raise refuse("arrays.quantile", f"only method='linear' is supported, got method={method!r}")
    count = len(x.shape)
    axes = axes_of(axis, x)
    batch_axes = [dim for dim in range(count) if dim not in axes]
    batch_shape = tuple(x.shape[dim] for dim in batch_axes)
    size = math.prod(x.shape[dim] for dim in axes)
    flat = arrays.reshape(arrays.permute_dims(x, (*batch_axes, *axes)), (*batch_shape, size))
    # The quantiles of nothing are NaN, as its mean is.
    ordered = arrays.sort(flat, axis=-1) if size else arrays.mean(flat, axis=-1, keepdims=True)
    interpolate = _interpolate_numbers if skips_nan else _interpolate
    quantiles = [interpolate(ordered, float(share)) for share in np.atleast_1d(np.asarray(q, float) * scale)]
    if keepdims:
        quantiles = [
            arrays.reshape(quantile, tuple(1 if k in axes else n for k, n in enumerate(x.shape)))
            for quantile in quantiles
        ]
    return arrays.stack(quantiles, axis=0) if np.ndim(q) else quantiles[0]


def _interpolate(ordered: Any, share: float) -> Any:
    """Interpolate at a share of the last axis."""
    position = share * (ordered.shape[-1] - 1)
    low = int(np.floor(position))
    high, part = min(low + 1, ordered.shape[-1] - 1), position - low
    return ordered[..., low] * (1 - part) + ordered[..., high] * part


def _interpolate_numbers(ordered: Any, share: float) -> Any:
    """Interpolate at a share of the numbers along the last axis, which NaNs follow."""
    numbers = arrays.sum(arrays.where(arrays.isnan(ordered), 0, 1), axis=-1, keepdims=True)
    # Without numbers this is the first NaN.
    last_index = arrays.maximum(numbers - 1, 0)
    position = last_index.cast("float64") * share
    low = arrays.floor(position)
    part = (position - low).cast(ordered.dtype)
    high = arrays.minimum(low.cast("int64") + 1, last_index)
    below, above = (arrays.take_along_axis(ordered, index, axis=-1) for index in (low.cast("int64"), high))
    return arrays.squeeze(below * (1 - part) + above * part, axis=-1)


def _interp(x: Any, xp: Any, fp: Any, left: Any, right: Any) -> Any:
    count = xp.shape[0]
    index = arrays.clip(arrays.searchsorted(xp, x, side="right") - 1, 0, max(count - 2, 0))
    x0, y0 = arrays.take(xp, index), arrays.take(fp, index)
    after = arrays.clip(index + 1, 0, count - 1)
    result = y0 + (x - x0) * ((arrays.take(fp, after) - y0) / (arrays.take(xp, after) - x0))
    result = arrays.where(x > xp[-1], fp[-1] if right is None else right, result)
    return arrays.where(x < xp[0], fp[0] if left is None else left, result)


def _gradient(x: Any, spacing: Any, axis: Any) -> Any:
    """Differences of both neighbours, weighted by the distances."""
    axes = range(len(x.shape)) if axis is None else np.atleast_1d(axis)
    if len(axes) != 1:
        return gather(*[_gradient(x, spacing, int(number)) for number in axes])
    dim = int(axes[0]) % len(x.shape)
    rises = part(x, dim, slice(1, None)) - part(x, dim, slice(0, -1))
    if len(np.shape(spacing)) == 1:
        widths = spacing[1:] - spacing[:-1]
        widths = widths.reshape([-1 if k == dim else 1 for k in range(len(x.shape))])
        widths_before, widths_after = part(widths, dim, slice(0, -1)), part(widths, dim, slice(1, None))
        share = widths_after / (widths_before + widths_after)
    else:
        widths, share = spacing, 0.5
    slopes = rises / widths
    middle = part(slopes, dim, slice(0, -1)) * share + part(slopes, dim, slice(1, None)) * (1 - share)
    ends = [part(slopes, dim, key) for key in (slice(0, 1), slice(-1, None))]
    return arrays.concat([ends[0], middle, ends[1]], axis=dim)


def _from_the_end(factors: Any, g: Any, axis: int) -> Any:
    """Return ``z[k] = g[k] + factors[k + 1] * z[k + 1]``; the first factor is not read."""
    turned = arrays.flip(arrays.roll(factors, -1, axis=axis), axis=axis)
    return arrays.flip(arrays.linear_recurrence(turned, arrays.flip(g, axis=axis), axis=axis), axis=axis)


def _linear_recurrence(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    a, b, initial = args["a"], args["b"], args["initial"]
    axis = axis_of(args, g)
    wide = cache(lambda: arrays.zeros_like(g) + conjugate(a))
    slope = cache(lambda: _from_the_end(wide(), g, axis))

    def of_factors() -> Any:
        start = part(arrays.zeros_like(g), axis, slice(0, 1)) + initial
        previous = arrays.concat([start, part(call, axis, slice(0, -1))], axis=axis)
        return summed_to(slope() * conjugate(previous), np.shape(a))

    yield b, lambda: summed_to(slope(), np.shape(b))
    yield a, of_factors
    yield initial, lambda: summed_to(part(wide() * slope(), axis, slice(0, 1)), np.shape(initial))


def _scan(call: Any, g: Any) -> Iterator[Rule]:
    """The gradients of results are a recurrence, with derivatives by the previous result as factors."""
    args = bound(call)
    x = args["x"]
    axis = axis_of(args, g)

    def slope() -> Any:
        combine: Any = Elementwise(args["text"], inputs=("a", "b"), operation="gradients.scan")
        pairs = [part(call, axis, slice(0, -1)), part(x, axis, slice(1, None))]
        of_result, of_element = pulled(combine, pairs, arrays.ones_like(pairs[0]))
        first = part(arrays.ones_like(g), axis, slice(0, 1))
        of_results = _from_the_end(arrays.concat([first, of_result], axis=axis), g, axis)
        return of_results * arrays.concat([first, of_element], axis=axis)

    yield x, slope


def _median(x: Any, axis: Any, keepdims: bool, *, skips_nan: bool = False) -> Any:
    return _quantile(x, 0.5, axis, "linear", keepdims, skips_nan=skips_nan)


RULES.update({
    "arrays.average": composition(_average), "arrays.clip": composition(_clip),
    "arrays.corrcoef": composition(_corrcoef), "arrays.cov": composition(_cov),
    "arrays.cumulative_logsumexp": _cumulative_logsumexp, "arrays.cumulative_max": _cumulative_extreme,
    "arrays.cumulative_min": _cumulative_extreme, "arrays.cumulative_prod": _cumulative_prod,
    "arrays.cumulative_sum": _cumulative_sum, "arrays.diff": composition(_diff),
    "arrays.gather_nd": _gather_nd, "arrays.gradient": composition(_gradient),
    "arrays.interp": composition(_interp), "arrays.linear_recurrence": _linear_recurrence,
    "arrays.scan": _scan, "arrays.median": composition(_median),
    "arrays.nan_to_num": composition(_nan_to_num),
    "arrays.nanmedian": composition(partial(_median, skips_nan=True)),
    "arrays.nanpercentile": composition(partial(_quantile, scale=0.01, skips_nan=True)),
    "arrays.nanquantile": composition(partial(_quantile, skips_nan=True)),
    "arrays.percentile": composition(partial(_quantile, scale=0.01)),
    "arrays.polyval": composition(_polyval), "arrays.quantile": composition(_quantile),
    "arrays.segmented_reduce": _segments, "arrays.select": _select, "arrays.sort": _sort,
    "arrays.top_k": _top_k, "arrays.take": _take, "arrays.take_along_axis": _take_along_axis,
    "arrays.trapezoid": composition(_trapezoid), "arrays.vander": composition(_vander),
})  # fmt: skip
