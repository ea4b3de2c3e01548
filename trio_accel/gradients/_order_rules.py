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
from ..expressions import Elementwise
from ._backward import RULES, bound, pulled, refuse
from ._elementwise import Rule, summed_to
from ._rules import (
    axis_of,
    composition,
    conjugate,
    part,
    products_before,
    total_of,
)
from ._scatter import added_along

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


def _sort_at(call: Any, g: Any) -> Iterator[Rule]:
    """Only places in order are read, so all may be in order."""
    x = call.args[0]

    def slope() -> Any:
        return arrays.take_along_axis(g, arrays.argsort(arrays.argsort(x, stable=True)))

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


def _clip(x: Any, min: Any, max: Any) -> Any:  # noqa: A002  # the names of the arguments
    low = x if min is None else arrays.maximum(x, min)
    return low if max is None else arrays.minimum(low, max)


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
        combine: Any = Elementwise(args["text"], inputs=("a", "b"), operation="gradients.combined")
        pairs = [part(call, axis, slice(0, -1)), part(x, axis, slice(1, None))]
        of_result, of_element = pulled(combine, pairs, arrays.ones_like(pairs[0]))
        first = part(arrays.ones_like(g), axis, slice(0, 1))
        of_results = _from_the_end(arrays.concat([first, of_result], axis=axis), g, axis)
        return of_results * arrays.concat([first, of_element], axis=axis)

    yield x, slope


RULES.update({
    "arrays.clip": composition(_clip),
    "arrays.cumulative_logsumexp": _cumulative_logsumexp, "arrays.cumulative_max": _cumulative_extreme,
    "arrays.cumulative_min": _cumulative_extreme, "arrays.cumulative_prod": _cumulative_prod,
    "arrays.cumulative_sum": _cumulative_sum,
    "arrays.linear_recurrence": _linear_recurrence,
    "arrays.scan": _scan,
    "arrays.segmented_reduce": _segments, "arrays.sort": _sort, "arrays.sort_at": _sort_at,
    "arrays.top_k": _top_k, "arrays.take": _take,
})  # fmt: skip
