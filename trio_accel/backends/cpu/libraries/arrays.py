"""Functions of arrays on the CPU: expressions, in pieces that fit into the caches; order, groups, scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import numpy as np

from ...base import HostArray, HostCall, Ints, by_way_of_int64, kernel, ops
from ...base.expressions import Argument, EncodedProgram, decode_program, evaluate, unpack_scalars
from ...base.expressions.compiled import is_reduction
from ..compiled import _plans as compiled
from ..runtime._memory import pieces
from ._order import comparable, first_of, order_of, sort_to

# Elements of the rows computed at a time.
_CHUNK_ELEMENTS = 1 << 18
# Elements of a histogram whose bins are searched at a time.
_GUESSED = 1 << 14
# Integers checked and counted at a time.
_COUNT_CHUNK = 1 << 17
# Elements converted and accumulated at a time.
_ACCUMULATED = 1 << 14


@kernel(ops.ExpressionSpec, backend="cpu", bind=compiled.bind)
def loop(spec: ops.ExpressionSpec, call: HostCall) -> None:
    """Compute a program by compiled code, or pieces one after another."""
    if compiled.compute(spec, call):
        return
    decoded = decode_program(spec.program)
    results = [call.array(result) for result in spec.results]
    (_reduce if decoded.program.reductions else _elements)(spec, call, decoded, results)


def _elements(
    spec: ops.ExpressionSpec, call: HostCall, decoded: EncodedProgram, results: list[HostArray]
) -> None:
    """Compute pieces of the elements."""
    if 0 in spec.shape:
        return
    program, scalars = decoded.program, _scalars(decoded.arguments, spec.scalars)
    arrays = [call.array(array) for array in spec.arrays]
    indexed = [call.array(array) for array in (*spec.loaded, *spec.stored)]
    sources = dict(zip([number for number, _ in program.loads], indexed, strict=True))
    indices = [_indices(axis, spec.shape) for axis in program.axes]
    first = len(results) + len(arrays)
    for piece in pieces(*results, *arrays, *indices):
        arguments = list(
            _arguments(decoded.arguments, program.elements, piece[len(results) : first], scalars)
        )
        axis_indices = dict(zip(program.axes, map(_narrow, piece[first:]), strict=True))
        out = piece[0] if len(results) == 1 else None
        values = evaluate(program, arguments, axis_indices, sources, out, shape=piece[0].shape)
        if len(values) > 1:
            # A result may be an unchanged argument, and share memory with another result.
            values = [value if value.flags.owndata else value.copy() for value in values]
        for into, value in zip(piece, values, strict=False):
            if value is not into:
                np.copyto(into, value)


def _reduce(
    spec: ops.ExpressionSpec, call: HostCall, decoded: EncodedProgram, results: list[HostArray]
) -> None:
    """Compute a number of rows at a time, so that their temporary arrays fit into the caches.

    Each part is computed as usual, and in the longer way only if a step over- or underflows. A single
    reduction makes its own pieces.
    """
    program, usual, scalars = decoded.program, decoded.usual, _scalars(decoded.arguments, spec.scalars)
    arrays = [call.array(array) for array in spec.arrays]
    if results[0].shape != spec.shape:
        kept_shape = [1 if axis in spec.axes else extent for axis, extent in enumerate(spec.shape)]
        results = [out.reshape(kept_shape) for out in results]
    full = [(slice(None),) * len(spec.shape)]
    parts = full if is_reduction(spec, decoded) else _row_pieces(spec.shape, spec.axes)
    for part in parts if results[0].size else ():
        operands = [array[part] for array in arrays]
        arguments = list(_arguments(decoded.arguments, program.elements, operands, scalars))
        values: Sequence[HostArray] = ()
        if usual is not None:
            with suppress(FloatingPointError):
                values = evaluate(usual, arguments, overflow="raise", shape=operands[0].shape, axes=spec.axes)
        values = values or evaluate(program, arguments, shape=operands[0].shape, axes=spec.axes)
        for out, value in zip(results, values, strict=True):
            out[part] = value


def _row_pieces(shape: Ints, axes: Ints) -> Iterator[tuple[slice, ...]]:
    """Cut whole rows into pieces of at most 2**18 elements, as far as cuts along one axis make these."""
    outer_axes = [axis for axis in range(len(shape)) if axis not in axes]
    longest = max(outer_axes, key=shape.__getitem__, default=None)
    if longest is None:
        yield (slice(None),) * len(shape)
        return
    extent = shape[longest]
    step = max(1, _CHUNK_ELEMENTS * extent // max(math.prod(shape), 1))
    for start in range(0, extent, step):
        yield (*(slice(None),) * longest, slice(start, start + step))


def _scalars(arguments: Sequence[Argument], data: bytes) -> list[Any]:
    return unpack_scalars(data, [argument.dtype for argument in arguments if not argument.is_array])


def _indices(axis: int, shape: Ints) -> HostArray:
    """Return the index of each element along an axis: an array of this shape, in the memory of one axis."""
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along), shape)


def _narrow(indices: HostArray) -> HostArray:
    """Return the same with one element along axes where all are equal, so that less is computed of it."""
    return indices[tuple([slice(None) if step else slice(1) for step in indices.strides])]


def _arguments(
    arguments: Sequence[Argument],
    elements: Sequence[int],
    arrays: Sequence[HostArray],
    scalars: Sequence[Any],
) -> Iterator[Any]:
    """Yield arrays and scalars in the order of the expression's inputs; None for arguments of loads only."""
    next_array, next_scalar = iter(arrays), iter(scalars)
    for number, argument in enumerate(arguments):
        if not argument.is_array:
            yield next(next_scalar)
        else:
            yield next(next_array) if number in elements else None


_UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "logaddexp": np.logaddexp,
}


@kernel(ops.SortSpec, backend="cpu")
def sort(spec: ops.SortSpec, call: HostCall) -> None:
    """Sort along an axis, or only as far as is wanted."""
    x = np.moveaxis(call.array(spec.x), spec.axis, -1)
    values, indices = (
        None if array is None else np.moveaxis(call.array(array), spec.axis, -1)
        for array in (spec.values, spec.indices)
    )
    if values is not None and indices is None and values.shape == x.shape:
        sort_to(values, x, descending=spec.descending, kth=spec.kth)
        return
    length = next(array.shape[-1] for array in (values, indices) if array is not None)
    order = first_of(x, length, descending=spec.descending)
    if values is not None:
        np.copyto(values, np.take_along_axis(x, order, -1))
    if indices is not None:
        np.copyto(indices, order)


@kernel(ops.GroupSpec, backend="cpu")
def group(spec: ops.GroupSpec, call: HostCall) -> None:
    """Find groups of equal elements."""
    call.status(spec.count)
    x, order = call.array(spec.x), None
    ordered = x
    if spec.is_sorted and (spec.indices is not None or spec.inverse is not None):
        order = order_of(x)
        ordered = x[order]
    elif spec.is_sorted:
        ordered = np.empty_like(x)
        sort_to(ordered, x)
    begins = np.ones(len(x), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(begins)
    call.array(spec.values)[: len(starts)] = ordered[starts]
    if spec.counts is not None:
        call.array(spec.counts)[: len(starts)] = np.diff(starts, append=len(x))
    if spec.indices is not None:
        call.array(spec.indices)[: len(starts)] = starts if order is None else order[starts]
    if spec.inverse is not None:
        call.array(spec.inverse)[slice(None) if order is None else order] = np.cumsum(begins) - 1
    spec.count.view(np.int64)[0] = len(starts)


@kernel(ops.SelectSpec, backend="cpu")
def select(spec: ops.SelectSpec, call: HostCall) -> None:
    """Select items, or find where they are."""
    call.status(spec.count)
    flags = call.array(spec.flags) != 0
    out = [call.array(array) for array in spec.out]
    if spec.x is None:
        for target, indices in zip(out, np.nonzero(flags), strict=True):
            target[: len(indices)] = indices
    else:
        x = call.array(spec.x)
        selected = x[flags]
        out[0][: len(selected)] = selected
        if spec.is_whole:
            out[0][len(selected) :] = x[~flags]
    spec.count.view(np.int64)[0] = np.count_nonzero(flags)


@kernel(ops.SearchSpec, backend="cpu")
def search(spec: ops.SearchSpec, call: HostCall) -> None:
    """Find where values are to be inserted."""
    call.status(spec.fault)
    edges, x = comparable(call.array(spec.edges)), comparable(call.array(spec.x))
    if spec.sorter is not None:
        sorter = call.array(spec.sorter)
        if sorter.size and not 0 <= sorter.min() <= sorter.max() < len(edges):
            spec.fault[0] = 1
            return
        edges = edges[sorter]
    np.copyto(call.array(spec.out), _insertion_points(edges, x, spec.side))


def _insertion_points(edges: HostArray, x: HostArray, side: Literal["left", "right"]) -> HostArray:
    """Search; integers that NumPy would compare as float64, which has fewer digits, are compared exactly."""
    if not _is_rounded(edges, x):
        return np.searchsorted(edges, x, side)
    # An edge is at most an integer if the next integer is, and below it if the integer before is.
    if edges.dtype.kind == "f":
        limits, edges = np.iinfo(x.dtype), edges.astype(np.float64)
        first, stop = np.searchsorted(edges, [float(limits.min), float(limits.max + 1)])
        inside = (np.floor if side == "left" else np.ceil)(edges[first:stop])
        return cast("HostArray", first + np.searchsorted(inside.astype(x.dtype), x, side))
    if x.dtype.kind == "f":
        x = (np.ceil if side == "left" else np.floor)(x.astype(np.float64))
    limits = np.iinfo(edges.dtype)
    below, above = x < limits.min, ~(x < limits.max + 1)
    points = np.searchsorted(edges, np.where(below | above, 0, x).astype(edges.dtype), side)
    return np.where(below, 0, np.where(above, len(edges), points))


def _is_rounded(edges: HostArray, x: HostArray) -> bool:
    """Return whether NumPy compares integers of 64 bits as floating-point numbers."""
    kinds = {edges.dtype.kind, x.dtype.kind}
    is_wide = any(array.dtype.kind in "iu" and array.itemsize == 8 for array in (edges, x))
    return kinds == {"i", "u"} or ("f" in kinds and is_wide)


@kernel(ops.CountSpec, backend="cpu")
def count(spec: ops.CountSpec, call: HostCall) -> None:
    """Count the elements of bins."""
    call.status(spec.fault)
    x, out = call.array(spec.x).reshape(-1), call.array(spec.out)
    weights = None if spec.weights is None else call.array(spec.weights).reshape(-1)
    if spec.edges is not None:
        total: HostArray = np.zeros(len(out) + 2, out.dtype)
        with np.errstate(all="ignore"):
            for part, numbers in _bins(comparable(call.array(spec.edges)), comparable(x)):
                bins = numbers
                if spec.bounds:
                    low, high = spec.bounds
                    bins = np.clip(numbers, 1, len(out)) * ((x[part] >= low) & (x[part] <= high))
                total += np.bincount(bins, None if weights is None else weights[part], len(total))
        out[...] = total[1:-1]
    else:
        spec.fault[0] = not _count_numbers(x, weights, out)


def _count_numbers(x: HostArray, weights: HostArray | None, out: HostArray) -> bool:
    """Count integers that are the numbers of bins; return whether all of them are."""
    # Pieces stay in a cache from the check to the count. Sums of weights keep their order.
    is_whole = weights is not None or len(out) > _COUNT_CHUNK // 4
    totals = [] if is_whole else [np.zeros(len(out), np.int64)]
    for first in range(0, len(x), len(x) if is_whole else _COUNT_CHUNK):
        piece = x if is_whole else x[first : first + _COUNT_CHUNK]
        # Without a sign, negative integers are larger than all others.
        if piece.view(f"u{piece.itemsize}").max() >= len(out):
            return False
        counts: HostArray = np.bincount(piece.astype(np.intp, copy=False), weights, len(out))
        totals = [np.add(totals[0], counts, out=totals[0])] if totals else [counts]
    out[...] = totals[0] if totals else 0
    return True


# With more bins than this, numbers of float32 are too coarse to guess a bin.
_MOST_BINS = 1 << 16


def _bins(edges: HostArray, x: HostArray) -> Iterator[tuple[slice, HostArray]]:
    """Find the bins of elements, from 1 on; for NaN and elements outside of all bins, 0 or one too many."""
    count, wide, factor = len(edges) - 1, np.result_type(edges, x), np.float64(np.inf)
    # Signed and unsigned integers lack a common dtype, and a bin can only be guessed in a floating one.
    is_guessed = "f" in (edges.dtype.kind, x.dtype.kind) and wide.name in ("float32", "float64")
    # Integers are rounded to edges as large as the first integer without a float64 of its own.
    is_guessed &= not _is_rounded(edges, x) or max(abs(edges[0]), abs(edges[-1])) < 2**53
    if is_guessed and count <= _MOST_BINS:
        # Integer edges would make an integer of the factor.
        edges = edges.astype(wide, copy=False)
        width = (float(edges[-1]) - float(edges[0])) / count
        off: HostArray = np.abs(edges - (float(edges[0]) + width * np.arange(count + 1)))
        factor = wide.type(1 / width if width > 0 else np.inf)
        is_guessed = bool(np.isfinite(factor) and off.max() < width / 8)
    if not is_guessed or count > _MOST_BINS:
        numbers = _insertion_points(edges, x, "right")
        # The last bin has its upper edge; of NaN nothing is at an edge.
        is_last = (numbers > count) & (_insertion_points(edges[-1:], x, "left") == 0) & ~np.isnan(x)
        yield slice(None), np.where(is_last, count, numbers)
        return
    below = np.append(edges[:-1], np.inf)
    for first in range(0, len(x), _GUESSED):
        part = slice(first, first + _GUESSED)
        piece = x[part]
        # Edges are nearly even, so the bin is the one that even edges give, or its neighbour.
        guess = np.fmin(np.fmax((piece - edges[0]) * factor, 0), count - 1).astype(np.intp)
        guess -= piece < edges.take(guess)
        guess += 1
        guess += piece >= below.take(guess)
        guess *= (piece >= edges[0]) & (piece <= edges[-1])
        yield part, guess


@kernel(ops.SegmentSpec, backend="cpu")
def combine_segments(spec: ops.SegmentSpec, call: HostCall) -> None:
    """Combine segments."""
    call.status(spec.fault)
    x, offsets, out = call.array(spec.x), call.array(spec.offsets).astype(np.int64), call.array(spec.out)
    empty = offsets[1:] == offsets[:-1]
    if np.any(offsets[1:] < offsets[:-1]) or offsets[0] < 0 or offsets[-1] > len(x):
        spec.fault[0] = 1
    elif spec.combine not in ops.IDENTITIES and empty.any():
        spec.fault[0] = 2
    elif len(out):
        values = (
            by_way_of_int64(x, out.dtype).astype(out.dtype).astype(ops.accumulator_of(spec.out.dtype).dtype)
        )
        values = np.append(values, np.zeros(1, values.dtype))
        # NumPy's `reduceat` takes pairs of places: the elements from the first one on, and the rest from the
        # second one on.
        pairs = np.stack([offsets[:-1], offsets[1:]], axis=1).reshape(-1)
        combined = _UFUNCS[spec.combine].reduceat(values, pairs, dtype=values.dtype)[::2]
        with np.errstate(all="ignore"):
            out[...] = np.where(empty, ops.IDENTITIES.get(spec.combine, 0), combined)


@kernel(ops.ScanSpec, backend="cpu")
def scan(spec: ops.ScanSpec, call: HostCall) -> None:
    """Combine the elements up to each one."""
    x, out = call.array(spec.x), call.array(spec.out)
    wide, ufunc = ops.accumulator_of(spec.out.dtype).dtype, _UFUNCS[spec.combine]
    x, out = np.moveaxis(x, spec.axis, 0), np.moveaxis(out, spec.axis, 0)
    if spec.has_initial:
        out[0] = ops.identity_of(spec.combine, spec.out.dtype)
        out = out[1:]
    accumulate = cast("Callable[..., Any]", ufunc.accumulate)
    with np.errstate(all="ignore"):
        if x.dtype == out.dtype == wide:
            accumulate(x, 0, wide, out)
            return
        # A piece of the axis continues the sums of the piece before, and stays in a cache.
        step, carry = max(1, _ACCUMULATED * len(x) // max(x.size, 1)), None
        for first in range(0, len(x), step):
            piece = slice(first, first + step)
            values = by_way_of_int64(x[piece], out.dtype).astype(out.dtype, copy=False).astype(wide)
            if carry is not None:
                ufunc(carry, values[0], out=values[0, ...])
            accumulate(values, 0, out=values)
            carry = values[-1].copy()
            np.copyto(out[piece], values, casting="unsafe")
