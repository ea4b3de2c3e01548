"""Exact search by Euclidean distance: candidates by products, and a proof that no vector was missed.

The product ``q · v - |v|² / 2`` orders vectors by distance, but it cancels: far from the origin, it has fewer
digits than the differences. So a search takes more candidates than it needs, computes their distances from
differences in float64, and bounds the error of the products. If another vector could be as near as the last
result, the query takes more candidates, and finally all vectors.

Products are of differences to a centre, if the vectors are farther from the origin than from each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import arrays
from ..backends.base import DType
from ..devices import AccelRef, Call, gather

__all__: list[str] = []

Floats: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int64]

# Candidates in addition to the wanted number: for few equal distances, and for many.
_EXTRA_CANDIDATES = (16, 1024)
# The float64 elements in a request: 64 MiB.
_MAX_ELEMENTS = 1 << 23


class Part(NamedTuple):
    """A segment in a search.

    Attributes:
        ids: The ids of the vectors, in ascending order.
        vectors: Of shape (ids, width) on the device.
        centre: Subtracted from vectors before the product, of shape (width,); None for the origin.
        penalties: Half of each squared distance to the centre; infinite for vectors that do not count.
        on_device: The penalties on the device; None if all are 0.
        chosen: The number of vectors that count.
    """

    ids: Ids
    vectors: AccelRef
    centre: Floats | None
    penalties: Floats
    on_device: AccelRef | None
    chosen: int


def wide_dtype(dtype: DType) -> str:
    """Return the dtype of products."""
    return "float64" if dtype is DType.float64 else "float32"


def centred(vectors: AccelRef, centre: Floats | None) -> Any:
    """Return the operand of products: vectors in the wide dtype, minus the centre."""
    wide = wide_dtype(vectors.dtype)
    operand: Any = vectors if vectors.dtype == wide else vectors.cast(wide)
    return operand if centre is None else operand - centre


async def centre_of(vectors: AccelRef) -> tuple[Floats | None, Floats]:
    """Return a centre, None for the origin, and half of each squared distance to it.

    A squared distance beyond the wide dtype is infinite.
    """
    wide = wide_dtype(vectors.dtype)
    operand = centred(vectors, None)
    mean, halves = await gather(arrays.mean(operand, axis=0), _halves(operand)).to_host()
    with np.errstate(over="ignore"):
        length = float(np.square(mean.astype(np.float64)).sum())
    if not np.isfinite(halves).all() or not length > float(halves.astype(np.float64).mean()):
        return None, halves
    # The vectors have this dtype, so that their differences to the centre are rounded once.
    centre: Floats = mean.astype(vectors.dtype.dtype).astype(wide)
    return centre, await _halves(centred(vectors, centre)).to_host()


def _halves(operand: Any) -> Any:
    return arrays.sum(operand * operand, axis=1) * 0.5


async def nearest(rows: Floats, k: int, parts: Sequence[Part]) -> tuple[Ids, Floats]:
    """Return ids and distances of the k nearest vectors of each query, the lowest id first if they are equal.

    Args:
        rows: The queries, of shape (queries, width) and the dtype of the vectors.
        k: The number of vectors, at most all that count.
        parts: The segments.

    Raises:
        ValueError: Products exceed the wide dtype.
    """
    queries = rows.astype(np.float64)
    k = min(k, sum(part.chosen for part in parts))
    ids, squares = np.empty((len(rows), k), np.int64), np.empty((len(rows), k))
    waiting = np.arange(len(rows))
    for extra in _EXTRA_CANDIDATES:
        counts = [min(k + extra, part.chosen) for part in parts]
        step, unproven = max(1, _MAX_ELEMENTS // (sum(counts) * rows.shape[1])), list[Ids]()
        for start in range(0, len(waiting), step):
            chosen = waiting[start : start + step]
            ids[chosen], squares[chosen], is_proven = await _by_products(queries[chosen], k, parts, counts)
            unproven.append(chosen[~is_proven])
        waiting = np.concatenate([waiting[:0], *unproven])
    for row in waiting:
        ids[row], squares[row] = await _by_differences(queries[row], k, parts)
    return ids, np.sqrt(squares)


async def _by_products(
    queries: Floats, k: int, parts: Sequence[Part], counts: Sequence[int]
) -> tuple[Ids, Floats, npt.NDArray[np.bool_]]:
    """Return ids and squared distances of the nearest candidates, and whether no other vector is as near."""
    from .. import linalg

    calls: list[Call[Any]] = []
    width = queries.shape[1]
    for part, count in zip(parts, counts, strict=True):
        wide = np.dtype(wide_dtype(part.vectors.dtype))
        moved = (queries if part.centre is None else queries - part.centre).astype(wide)
        products: Any = linalg.matmul(moved, centred(part.vectors, part.centre).T)
        best: Any = arrays.top_k(products if part.on_device is None else products - part.on_device, count)
        taken: Any = arrays.take(part.vectors, best[1].reshape((len(queries) * count,)), axis=0)
        shape = len(queries), count, width
        differences = taken.cast("float64").reshape(shape) - queries[:, None, :]
        calls += [best[0], best[1], arrays.sum(differences * differences, axis=2)]
    results: Any = await gather(*calls).to_host()
    scores, indices, squares = results[::3], results[1::3], results[2::3]
    if not all(np.isfinite(array).all() for array in scores):
        raise ValueError(
            f"search: the products exceed {scores[0].dtype}; use a wider dtype or shorter vectors"
        )
    ids, nearest_squares = _sorted(
        np.concatenate([part.ids[index] for part, index in zip(parts, indices, strict=True)], axis=1),
        np.concatenate(squares, axis=1),
        k,
    )
    is_proven = np.ones(len(queries), bool)
    for part, count, score in zip(parts, counts, scores, strict=True):
        if count < part.chosen:
            is_proven &= _is_proven(queries, part, score[:, -1], nearest_squares[:, -1])
    return ids, nearest_squares, is_proven


def _is_proven(queries: Floats, part: Part, scores: Floats, squares: Floats) -> npt.NDArray[np.bool_]:
    """Return for which queries all vectors with lower scores are farther than a squared distance.

    Args:
        queries: In float64.
        part: The segment.
        scores: The lowest score of a candidate, for each query.
        squares: The squared distance of the last result, for each query.
    """
    width, limits = queries.shape[1], np.finfo(scores.dtype)
    lengths = np.linalg.norm(queries if part.centre is None else queries - part.centre, axis=1)
    longest = math.sqrt(2 * float(part.penalties[part.penalties < math.inf].max(initial=0.0)))
    # A vector with a greater length is farther than the last result, whatever its direction is.
    bounds = np.minimum(1.001 * longest, lengths + np.sqrt(squares)) * 1.001
    rounding = 2.0 * (width + 8) * float(limits.eps)
    errors = rounding * (lengths + bounds) * bounds + 8.0 * width * float(limits.smallest_normal)
    # The rest of the formula is in float64.
    remainder = 4.0 * (width + 8) * float(np.finfo(np.float64).eps) * (lengths + bounds) ** 2
    proven: npt.NDArray[np.bool_] = squares + remainder < lengths**2 - 2 * (
        scores.astype(np.float64) + errors
    )
    return proven


async def _by_differences(query: Floats, k: int, parts: Sequence[Part]) -> tuple[Ids, Floats]:
    """Return ids and squared distances of the nearest vectors, from the differences to all of them."""
    ids, squares = list[Ids](), list[Floats]()
    step = max(1, _MAX_ELEMENTS // len(query))
    for part in parts:
        for start in range(0, len(part.ids), step):
            wide: Any = part.vectors[start : start + step].cast("float64")
            difference = wide - query
            of_all = await arrays.sum(difference * difference, axis=1).to_host()
            counts = part.penalties[start : start + step] < math.inf
            ids.append(part.ids[start : start + step][counts])
            squares.append(of_all[counts])
    nearest_ids, nearest_squares = _sorted(np.concatenate(ids)[None], np.concatenate(squares)[None], k)
    return nearest_ids[0], nearest_squares[0]


def _sorted(ids: Ids, squares: Floats, k: int) -> tuple[Ids, Floats]:
    """Return the k nearest of each row, the lowest id first if they are equally near."""
    order = np.lexsort((ids, squares), axis=-1)[:, :k]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(squares, order, 1)
