"""Functions of arrays on the CPU: expressions by NumPy, in pieces that fit into the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...base.contract.dtypes import DType
from ...base.contract.ops import ElementwiseSpec, ReductionSpec, RowsSpec, ScatterSpec
from ...base.expressions import (
    Argument,
    Places,
    SpecializedExpression,
    SpecializedReduction,
    SpecializedRows,
    check_places,
    evaluate,
    evaluate_reduction,
    evaluate_rows,
    places_of,
    unpack_scalars,
)
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray, pieces
from ._primitives import combine_segments, count, group, scan, search, select, sort

__all__ = [
    "combine_segments", "count", "elementwise", "group", "reduce", "rows", "scan", "scatter", "search",
    "select", "sort",
]  # fmt: skip


# Elements of the rows that are made at a time.
_PIECE = 1 << 18
# By `reduce`; "set" is none.
_COMBINED: dict[str, Any] = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}


@kernel(ElementwiseSpec, backend="cpu")
def elementwise(spec: ElementwiseSpec, call: HostCall) -> None:
    """Compute pieces one after another."""
    results = [call.array(result) for result in spec.results]
    loaded = [call.array(array) for array in spec.loaded]
    expression = SpecializedExpression.decode(spec.expression).typed
    sources = dict(zip([number for number, _ in expression.loads], loaded, strict=True))
    for piece, given, here in _pieces(spec, call, results):
        made = evaluate(expression, given, here, sources, piece[0] if len(results) == 1 else None)
        if len(made) > 1:
            # A result that is an argument unchanged may be in memory where another result is written.
            made = [value if value.flags.owndata else value.copy() for value in made]
        for out, value in zip(piece, made, strict=False):
            if value is not out:
                np.copyto(out, value)


@kernel(ScatterSpec, backend="cpu")
def scatter(spec: ScatterSpec, call: HostCall) -> None:
    """Combine pieces one after another."""
    out, combine = call.array(spec.out), _COMBINED.get(spec.reduce)
    expression = SpecializedExpression.decode(spec.expression).typed
    places = places_of(expression)
    steps = [places.steps[number] for number in places.outputs[:-1]]
    for _, given, here in _pieces(spec, call, []):
        *indices, values = evaluate(places, given, here)
        check_places(expression, expression.outputs[0], indices, out.shape)
        found = Places.of(out, indices, steps)
        if combine is None:
            found.array[found.index] = found.aligned(values)
        else:
            combine.at(found.array, found.index, found.aligned(values))


def _pieces(
    spec: ElementwiseSpec | ScatterSpec, call: HostCall, results: list[HostArray]
) -> Iterator[tuple[Sequence[HostArray], list[Any], dict[int, HostArray]]]:
    """Cut the elements of an expression into pieces: results, arguments, and indices by axes."""
    if 0 in spec.shape:
        return
    specialized = SpecializedExpression.decode(spec.expression)
    expression, scalars = specialized.typed, _scalars(specialized.arguments, spec.scalars)
    arrays = [call.array(array) for array in spec.arrays]
    indices = [_indices(axis, spec.shape) for axis in expression.axes]
    first = len(results) + len(arrays)
    for piece in pieces(*results, *arrays, *indices):
        given = _arguments(specialized.arguments, expression.elements, piece[len(results) : first], scalars)
        yield piece, list(given), dict(zip(expression.axes, map(_narrow, piece[first:]), strict=True))


@kernel(ReductionSpec, backend="cpu")
def reduce(spec: ReductionSpec, call: HostCall) -> None:
    """Reduce an array; the mapped values are one temporary array."""
    arrays, out = [call.array(array) for array in spec.arrays], call.array(spec.out)
    specialized = SpecializedReduction.decode(spec.reduction)
    typed, scalars = specialized.typed, _scalars(specialized.arguments, spec.scalars)
    given = _arguments(specialized.arguments, typed.map.elements, arrays, scalars)
    made = evaluate_reduction(typed, list(given), spec.arrays[0].shape, spec.axes)
    np.copyto(out, made.reshape(out.shape))


@kernel(RowsSpec, backend="cpu")
def rows(spec: RowsSpec, call: HostCall) -> None:
    """Compute so many rows at a time that their temporary arrays fit into the caches."""
    arrays, out = [call.array(array) for array in spec.arrays], call.array(spec.out)
    specialized, shape = SpecializedRows.decode(spec.rows), spec.arrays[0].shape
    *scalars, _ = unpack_scalars(spec.scalars, [*_scalar_dtypes(specialized.arguments), DType.int64])
    if not specialized.is_whole:
        out = out.reshape([1 if axis in spec.axes else extent for axis, extent in enumerate(shape)])
    if not out.size:
        return
    for piece in _row_pieces(shape, spec.axes):
        here = [array[piece] for array in arrays]
        given = _arguments(specialized.arguments, range(len(specialized.arguments)), here, scalars)
        out[piece] = _evaluated(specialized, list(given), here[0].shape, spec.axes)


def _evaluated(
    specialized: SpecializedRows, given: Sequence[Any], shape: tuple[int, ...], axes: tuple[int, ...]
) -> HostArray:
    """Compute rows as usual, and in the way that takes longer only where a step over- or underflows."""
    if specialized.typed_usual is not None:
        with suppress(FloatingPointError):
            return evaluate_rows(specialized.typed_usual, given, shape, axes, "raise")
    return evaluate_rows(specialized.typed, given, shape, axes)


def _row_pieces(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cut whole rows into pieces of at most 2**18 elements, as far as cuts along one axis make these."""
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    longest = max(kept, key=shape.__getitem__, default=None)
    if longest is None:
        yield (slice(None),) * len(shape)
        return
    extent = shape[longest]
    step = max(1, _PIECE * extent // max(math.prod(shape), 1))
    for start in range(0, extent, step):
        yield (*(slice(None),) * longest, slice(start, start + step))


def _scalar_dtypes(arguments: Sequence[Argument]) -> list[DType]:
    return [argument.dtype for argument in arguments if not argument.is_array]


def _scalars(arguments: Sequence[Argument], data: bytes) -> list[Any]:
    return unpack_scalars(data, _scalar_dtypes(arguments))


def _indices(axis: int, shape: tuple[int, ...]) -> HostArray:
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
    """Arrays and scalars in the order of the expression's inputs; None for what is only loaded from."""
    next_array, next_scalar = iter(arrays), iter(scalars)
    for number, argument in enumerate(arguments):
        if not argument.is_array:
            yield next(next_scalar)
        else:
            yield next(next_array) if number in elements else None
