"""Order, groups, selections, counts and scans of arrays, by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np

from ...base.contract.ops import (
    IDENTITIES,
    CountSpec,
    GroupSpec,
    ScanSpec,
    SearchSpec,
    SegmentSpec,
    SelectSpec,
    SortSpec,
    accumulator_of,
    identity_of,
)
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray

__all__ = ["combine_segments", "count", "group", "scan", "search", "select", "sort"]

_UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "logaddexp": np.logaddexp,
}


def _comparable(x: HostArray) -> HostArray:
    """Return the same in a type that NumPy orders itself; those of `ml_dtypes` it cannot sort with NaN."""
    return x.astype(np.float32) if x.dtype.isbuiltin != 1 else x


@kernel(SortSpec, backend="cpu")
def sort(spec: SortSpec, call: HostCall) -> None:
    """Sort along an axis."""
    x, axis = call.array(spec.x), spec.axis
    key = _comparable(x)
    if spec.values is not None and spec.indices is None and not spec.descending and key is x:
        np.copyto(call.array(spec.values), _first(np.sort(x, axis, kind="stable"), spec.values.shape))
        return
    if spec.descending:
        # Backwards twice: equal elements keep their order.
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(key, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(key, axis, kind="stable")
    if spec.values is not None:
        order = _first(order, spec.values.shape)
        np.copyto(call.array(spec.values), np.take_along_axis(x, order, axis))
    if spec.indices is not None:
        np.copyto(call.array(spec.indices), _first(order, spec.indices.shape))


def _first(array: HostArray, shape: tuple[int, ...]) -> HostArray:
    return array[tuple(map(slice, shape))]


@kernel(GroupSpec, backend="cpu")
def group(spec: GroupSpec, call: HostCall) -> None:
    """Find groups of equal elements."""
    call.status(spec.count)
    x = call.array(spec.x)
    order = np.argsort(_comparable(x), kind="stable") if spec.is_sorted else np.arange(len(x))
    ordered = x[order]
    begins = np.ones(len(x), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(begins)
    call.array(spec.values)[: len(starts)] = ordered[starts]
    if spec.counts is not None:
        call.array(spec.counts)[: len(starts)] = np.diff(starts, append=len(x))
    if spec.indices is not None:
        call.array(spec.indices)[: len(starts)] = order[starts]
    if spec.inverse is not None:
        call.array(spec.inverse)[order] = np.cumsum(begins) - 1
    spec.count.view(np.int64)[0] = len(starts)


@kernel(SelectSpec, backend="cpu")
def select(spec: SelectSpec, call: HostCall) -> None:
    """Select items, or find where they are."""
    call.status(spec.count)
    flags = call.array(spec.flags) != 0
    out = [call.array(one) for one in spec.out]
    if spec.x is None:
        for one, indices in zip(out, np.nonzero(flags), strict=True):
            one[: len(indices)] = indices
    else:
        x = call.array(spec.x)
        selected = x[flags]
        out[0][: len(selected)] = selected
        if spec.is_whole:
            out[0][len(selected) :] = x[~flags]
    spec.count.view(np.int64)[0] = np.count_nonzero(flags)


@kernel(SearchSpec, backend="cpu")
def search(spec: SearchSpec, call: HostCall) -> None:
    """Find where values are to be inserted."""
    call.status(spec.fault)
    edges, x = _comparable(call.array(spec.edges)), _comparable(call.array(spec.x))
    if spec.sorter is not None:
        sorter = call.array(spec.sorter)
        if sorter.size and not 0 <= sorter.min() <= sorter.max() < len(edges):
            spec.fault[0] = 1
            return
        edges = edges[sorter]
    np.copyto(call.array(spec.out), _places(edges, x, spec.side))


def _places(edges: HostArray, x: HostArray, side: Literal["left", "right"]) -> HostArray:
    """Search; whole numbers with and without signs NumPy would compare as float64, which has fewer digits."""
    if {edges.dtype.kind, x.dtype.kind} != {"i", "u"}:
        return np.searchsorted(edges, x, side)
    limits = np.iinfo(edges.dtype)
    below, above = x < limits.min, x > limits.max
    found = np.searchsorted(edges, np.where(below | above, 0, x).astype(edges.dtype), side)
    return np.where(below, 0, np.where(above, len(edges), found))


@kernel(CountSpec, backend="cpu")
def count(spec: CountSpec, call: HostCall) -> None:
    """Count the elements of bins."""
    call.status(spec.fault)
    x, out = call.array(spec.x).reshape(-1), call.array(spec.out)
    weights = None if spec.weights is None else call.array(spec.weights).reshape(-1)
    if spec.edges is not None:
        edges, x = call.array(spec.edges), _comparable(x)
        # The last bin has its upper edge; of NaN nothing is at an edge.
        bins = np.where(x == edges[-1], len(out) - 1, _places(edges, x, "right") - 1)
        inside = (bins >= 0) & (bins < len(out))
        x, weights = bins[inside], None if weights is None else weights[inside]
    elif x.size and not 0 <= x.min() <= x.max() < len(out):
        spec.fault[0] = 1
        return
    out[...] = np.bincount(x.astype(np.intp), weights, len(out))


@kernel(SegmentSpec, backend="cpu")
def combine_segments(spec: SegmentSpec, call: HostCall) -> None:
    """Combine segments."""
    call.status(spec.fault)
    x, offsets, out = call.array(spec.x), call.array(spec.offsets).astype(np.int64), call.array(spec.out)
    empty = offsets[1:] == offsets[:-1]
    if np.any(offsets[1:] < offsets[:-1]) or offsets[0] < 0 or offsets[-1] > len(x):
        spec.fault[0] = 1
    elif spec.combine not in IDENTITIES and empty.any():
        spec.fault[0] = 2
    elif len(out):
        values = x.astype(out.dtype).astype(accumulator_of(spec.out.dtype).dtype)
        values = np.append(values, np.zeros(1, values.dtype))
        # Of each pair of places the elements from the first one on, and what is from the second one on.
        pairs = np.stack([offsets[:-1], offsets[1:]], axis=1).reshape(-1)
        found = _UFUNCS[spec.combine].reduceat(values, pairs, dtype=values.dtype)[::2]
        with np.errstate(all="ignore"):
            out[...] = np.where(empty, IDENTITIES.get(spec.combine, 0), found)


@kernel(ScanSpec, backend="cpu")
def scan(spec: ScanSpec, call: HostCall) -> None:
    """Combine the elements up to each one."""
    x, out = call.array(spec.x), call.array(spec.out)
    wide, ufunc = accumulator_of(spec.out.dtype).dtype, _UFUNCS[spec.combine]
    out = np.moveaxis(out, spec.axis, 0)
    if spec.has_initial:
        out[0] = identity_of(spec.combine, spec.out.dtype)
        out = out[1:]
    accumulate = cast("Callable[..., Any]", ufunc.accumulate)
    with np.errstate(all="ignore"):
        values = np.moveaxis(x, spec.axis, 0).astype(out.dtype)
        np.copyto(out, accumulate(values, 0, wide), casting="unsafe")
