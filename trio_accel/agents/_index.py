"""Exact search for the nearest vectors, in immutable segments.

A segment is a matrix on the device with ids in ascending order. It never changes after its creation, so the
loss of a worker cannot damage it, and changes of the index do not disturb a running search. A change makes
other segments, and replaces the tuple of segments when all of them exist. So a failed change has no effect.

A penalty for each vector is subtracted from the product before `top_k`. It is infinite for removed vectors
and for vectors excluded by a filter. For the metric "l2" it is half of a squared length; see `_euclidean`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .. import arrays, weights
from ..actors import TaskLock, must_be_count, must_be_one_of, run_in_thread
from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Call, Device, check_device, gather
from ._euclidean import Part, centre_of, nearest

__all__ = ["Metric", "SearchResult", "VectorIndex"]

Metric: TypeAlias = Literal["cosine", "dot", "l2"]
"""The measure of nearness: the cosine of the angle, the inner product, or the Euclidean distance."""

_Ids: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]
_Floats: TypeAlias = npt.NDArray[Any]
_Filter: TypeAlias = npt.ArrayLike | Callable[[_Ids], npt.ArrayLike] | None

_DTYPES = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
# Vectors are checked in pieces, because they are converted to float64 for that.
_PIECE_ROWS = 256
# Fewer elements are checked in less time than a thread takes to begin.
_ELEMENTS_IN_PLACE = 1 << 15
# Scores of one request: 256 MiB of float32.
_MAX_SCORES = 1 << 26


class SearchResult(NamedTuple):
    """The nearest vectors, the nearest first; of equally near ones, the lowest id is first.

    Attributes:
        ids: Their ids, int64: shape (k,) for one query, and (queries, k) for several.
        scores: Of the same shape, in float64: the cosine, the inner product, or for "l2" the distance.
    """

    ids: _Ids
    scores: npt.NDArray[np.float64]


@attrs.frozen(eq=False)
class _Segment:
    """A part of the index.

    Attributes:
        ids: In ascending order, removed ones included.
        vectors: Of shape (ids, width) on the device.
        penalties: What to subtract from products; infinite for removed vectors.
        on_device: The penalties on the device; None if all are 0.
        centre: For "l2", subtracted from vectors before the product; None for the origin.
    """

    ids: _Ids
    vectors: AccelRef
    penalties: _Floats
    on_device: AccelRef | None
    centre: _Floats | None = None

    def positions(self, ids: _Ids) -> tuple[_Ids, _Mask]:
        """Return positions for ids, and whether each id is at its position, removed ones not."""
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return positions, (self.ids[positions] == ids) & self.is_there[positions]

    @property
    def is_there(self) -> _Mask:
        """False for removed vectors."""
        return self.penalties < math.inf


class VectorIndex:
    """An exact index of vectors on a device: each search compares with all of them.

    Vectors are rounded to the dtype of the index; for the metric "cosine" they are divided by their lengths
    before. A search is one request, a product and a `trio_accel.arrays.top_k`. For "cosine" and "dot" it is
    in this dtype, so nearness that differs by less than the rounding of the dtype is in no order.

    For "l2", the rounded vectors are ordered by their distances in float64, wherever they are. A query with
    very many vectors at almost the same distance, or far from all vectors, takes further requests.

    Each change takes effect as a whole when its call returns, or not at all. Changes wait for each other. A
    search waits for none of them, and sees the index as it was when the queries were checked.

    Vectors are stored only on the device. In a worker process they survive its death. If a device in your
    process loses its context, they are lost, and searches raise `StaleRefError`: `load` the index again.

    Args:
        device: The device.
        width: Elements of a vector.
        metric: "cosine", "dot" or "l2".
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        TypeError: An argument of another type.
        ValueError: `width` is below 1, or `metric` or `dtype` is another.
    """

    def __init__(
        self, device: Device, width: int, *, metric: Metric = "cosine", dtype: DTypeLike = "float32"
    ) -> None:
        check_device("VectorIndex", device)
        self._device = device
        self._width = must_be_count("VectorIndex: width", width)
        must_be_one_of("VectorIndex: metric", metric, get_args(Metric))
        self._metric: Metric = metric
        self._dtype = DType.of(dtype)
        must_be_one_of("VectorIndex: dtype", self._dtype, _DTYPES)
        self._turn = TaskLock()
        self._segments: tuple[_Segment, ...] = ()
        self._ids: _Ids | None = None

    def __repr__(self) -> str:
        return f"<VectorIndex: {len(self)} vectors of {self._width} {self._dtype}, {self._metric}>"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> _Ids:
        """The ids of all vectors in ascending order, int64 and read-only."""
        if self._ids is None:
            self._ids = np.sort(np.concatenate([_NO_IDS, *(s.ids[s.is_there] for s in self._segments)]))
            self._ids.flags.writeable = False
        return self._ids

    async def add(self, ids: npt.ArrayLike, vectors: npt.ArrayLike | AccelRef | Call[AccelRef]) -> None:
        """Add vectors.

        Small segments are merged, so that a search has few. Large calls cost less for each vector.

        Args:
            ids: Integers of int64, one for each vector.
            vectors: Of shape (ids, width): a host array, an array of a device, or a call that makes one.

        Raises:
            ValueError: An id exists already or is duplicate; the vectors have another shape, NaN or infinity,
                possibly from rounding to the dtype; or, for "cosine", a length of 0.
            TypeError: The ids are not integers, or the vectors not real numbers.
        """
        numbers = _check_ids("add", ids)
        rows = await self._rows("add", vectors)
        if rows.shape != (len(numbers), self._width):
            raise ValueError(
                f"add: vectors must have the shape ({len(numbers)}, {self._width}), got {rows.shape}"
            )
        order = np.argsort(numbers)
        numbers = numbers[order]
        async with self._turn:
            for segment in self._segments:
                _refuse_id("add", numbers, segment.positions(numbers)[1], "is there already")
            if not len(numbers):
                return
            new = await self._new_segment(numbers, await self._device.put(rows[order]))
            # Each segment is larger than the next one after it, so there are few.
            count, size = len(self._segments), len(numbers)
            while count and len(self._segments[count - 1].ids) <= size:
                count -= 1
                size += len(self._segments[count].ids)
            self._set((*self._segments[:count], *await self._merged((*self._segments[count:], new))))

    async def remove(self, ids: npt.ArrayLike) -> None:
        """Remove vectors. A segment is made again without them when more than half of it was removed.

        Raises:
            KeyError: An id is not there; nothing was removed.
            ValueError: An id is twice.
            TypeError: The ids are not integers.
        """
        numbers = np.sort(_check_ids("remove", ids))
        async with self._turn:
            lookups = [segment.positions(numbers) for segment in self._segments]
            is_known = np.logical_or.reduce(
                [np.zeros(len(numbers), bool), *(present for _, present in lookups)]
            )
            _refuse_id("remove", numbers, ~is_known, "is not there", KeyError)
            remaining: list[_Segment] = []
            for segment, (positions, present) in zip(self._segments, lookups, strict=True):
                if not present.any():
                    remaining.append(segment)
                    continue
                penalties = segment.penalties.copy()
                penalties[positions[present]] = math.inf
                changed = attrs.evolve(segment, penalties=penalties)
                if 2 * changed.is_there.sum() < len(penalties):
                    remaining += await self._merged([changed])
                else:
                    remaining.append(
                        await self._segment(segment.ids, segment.vectors, penalties, segment.centre)
                    )
            self._set(tuple(remaining))

    async def search(
        self, queries: npt.ArrayLike | AccelRef | Call[AccelRef], k: int, *, where: _Filter = None
    ) -> SearchResult:
        """Find the nearest vectors of each query.

        Args:
            queries: One of shape (width,) or several of shape (queries, width), as for `add`.
            k: The number of vectors. If there are fewer, all are found.
            where: Which vectors count, as truth values for all `ids` in their order; or a function that makes
                them of the ids. Use the function while others change the index, because only it gets the ids
                of this search.

        Returns:
            Ids and scores, on the host.

        Raises:
            ValueError: `k` is below 1; the queries have another shape, NaN, infinity or, for "cosine", a
                length of 0; `where` has another length; or the scores exceed the dtype, for "l2" at least
                float32.
            TypeError: `k` is not an integer, the queries are not real numbers, or `where` is not boolean.
            StaleRefError, ContextLostError, DeviceLostError: The vectors were lost, or the device was.
        """
        k = must_be_count("search: k", k)
        rows = await self._rows("search", queries)
        several = np.atleast_2d(rows)
        # Changes make other segments, so the segments of this search stay as they are.
        segments, penalties = self._segments, self._filtered(where)
        parts = list[Part]()
        for segment, chosen in zip(segments, penalties, strict=True):
            if count := int((chosen < math.inf).sum()):
                is_filtered = chosen is not segment.penalties
                penalty = await self._device.put(chosen) if is_filtered else segment.on_device
                parts.append(Part(segment.ids, segment.vectors, segment.centre, chosen, penalty, count))
        if not parts:
            await trio.lowlevel.checkpoint()
            shape = (*rows.shape[:-1], 0)
            return SearchResult(np.empty(shape, np.int64), np.empty(shape))
        step = max(1, _MAX_SCORES // sum(len(part.ids) for part in parts))
        starts = range(0, max(1, len(several)), step)
        pieces = [await self._nearest(several[start : start + step], k, parts) for start in starts]
        merged = [np.concatenate(piece) for piece in zip(*pieces, strict=True)]
        return SearchResult(*(array[0] if rows.ndim == 1 else array for array in merged))

    async def compact(self) -> None:
        """Make one segment of all, without removed vectors, which gives their memory back."""
        async with self._turn:
            self._set(tuple(await self._merged(self._segments)))

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Compact the index, and write it to a safetensors file with the arrays "vectors" and "ids".

        For the metric "cosine" the vectors have the length 1. For errors, and for replacing a file, see
        `trio_accel.weights.save`.
        """
        async with self._turn:
            merged = await self._merged(self._segments)
            self._set(tuple(merged))
        vectors = merged[0].vectors if merged else await self._device.zeros((0, self._width), self._dtype)
        ids = await self._device.put(merged[0].ids if merged else _NO_IDS)
        await weights.save(path, {"vectors": vectors, "ids": ids}, metadata={"metric": self._metric})

    @classmethod
    async def load(cls, device: Device, path: str | os.PathLike[str]) -> VectorIndex:
        """Read an index that `save` has written.

        Raises:
            WeightsError: The file is damaged, or is not an index.
            Exception: The other errors of `trio_accel.weights.load`.
        """
        loaded = await weights.load(device, path)
        metric: Any = loaded.metadata.get("metric")
        if not {"vectors", "ids"} <= loaded.keys() or metric not in get_args(Metric):
            raise weights.WeightsError(f"{path} is not an index: it needs vectors, ids and a metric")
        vectors, ids = loaded["vectors"], await loaded["ids"].to_host()
        is_right = vectors.ndim == 2 and vectors.shape[1] > 0 and vectors.dtype in _DTYPES
        if (
            not is_right
            or ids.dtype != np.int64
            or ids.shape != vectors.shape[:1]
            or (np.diff(ids) < 1).any()
        ):
            raise weights.WeightsError(f"{path} is not an index: its vectors and ids do not fit")
        index = cls(device, vectors.shape[1], metric=metric, dtype=vectors.dtype)
        if len(ids):
            lengths = np.sqrt(2 * await index._halves(vectors))
            are_wrong = ~(abs(lengths - 1) < 0.01 if metric == "cosine" else np.isfinite(lengths))
            if are_wrong.any():
                bad = int(are_wrong.argmax())
                raise weights.WeightsError(f"{path}: the vector {ids[bad]} has the length {lengths[bad]:g}")
            index._set((await index._new_segment(ids, vectors),))
        return index

    def _set(self, segments: tuple[_Segment, ...]) -> None:
        self._segments, self._ids = segments, None

    async def _rows(self, label: str, vectors: object) -> npt.NDArray[Any]:
        """Check vectors, and bring them to the dtype of the index, in a thread if they are many."""
        host: Any = await vectors.to_host() if isinstance(vectors, AccelRef | Call) else np.asarray(vectors)
        if np.result_type(np.float64, host.dtype).kind != "f":
            raise TypeError(f"{label}: vectors must be real numbers, got {host.dtype}")
        if host.ndim not in (1, 2) or host.shape[-1] != self._width:
            raise ValueError(f"{label}: vectors must have {self._width} elements, got the shape {host.shape}")
        if host.size > _ELEMENTS_IN_PLACE:
            return await run_in_thread(self._rounded, label, host)
        return self._rounded(label, host)

    def _rounded(self, label: str, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rounded = np.empty(host.shape, self._dtype.dtype)
        flat, rows = rounded.reshape(-1, self._width), host.reshape(-1, self._width)
        for start in range(0, len(rows), _PIECE_ROWS):
            piece = rows[start : start + _PIECE_ROWS].astype(np.float64)
            part = flat[start : start + _PIECE_ROWS]
            # Overflow and NaN are found in the result.
            with np.errstate(all="ignore"):
                if self._metric == "cosine":
                    largest = abs(piece).max(axis=1, keepdims=True)
                    _refuse(f"{label}: vector", start, largest == 0, "has the length 0, and no direction")
                    # The square of a large or small element is out of range.
                    piece /= largest
                    piece /= np.sqrt(np.einsum("ij,ij->i", piece, piece))[:, None]
                part[...] = piece
            _refuse(f"{label}: vector", start, ~np.isfinite(part), f"has NaN or infinity as {self._dtype}")
        return rounded

    async def _new_segment(self, ids: _Ids, vectors: AccelRef) -> _Segment:
        """Make a segment from vectors on the device, none of them removed."""
        centre, penalties = None, np.zeros(len(ids), np.float32)
        if self._metric == "l2":
            centre, penalties = await centre_of(vectors)
            _refuse(
                "add: vector",
                0,
                ~np.isfinite(penalties),
                f"has a length whose square exceeds {penalties.dtype}",
            )
        return await self._segment(ids, vectors, penalties, centre)

    async def _segment(
        self, ids: _Ids, vectors: AccelRef, penalties: _Floats, centre: _Floats | None
    ) -> _Segment:
        on_device = await self._device.put(penalties) if penalties.any() else None
        return _Segment(ids, vectors, penalties, on_device, centre)

    async def _halves(self, vectors: AccelRef) -> _Floats:
        """Return half of each vector's squared length, at least in float32."""
        wide: Any = vectors if self._dtype is DType.float64 else vectors.cast("float32")
        return await (arrays.sum(wide * wide, axis=1) * 0.5).to_host()

    async def _merged(self, segments: Sequence[_Segment]) -> list[_Segment]:
        """Make one segment of several, without removed vectors; none if all were removed."""
        is_there = np.concatenate([np.empty(0, bool), *(segment.is_there for segment in segments)])
        order = np.flatnonzero(is_there)
        if not len(order) or (len(segments) == 1 and is_there.all()):
            return [*segments] if len(order) else []
        ids = np.concatenate([segment.ids for segment in segments])
        order = order[np.argsort(ids[order])]
        vectors = arrays.concat([segment.vectors for segment in segments], axis=0)
        taken = await arrays.take(vectors, order, axis=0)
        return [await self._new_segment(ids[order], taken)]

    def _filtered(self, id_filter: _Filter) -> list[_Floats]:
        """Return the penalties of each segment, including the filter's."""
        if id_filter is None:
            return [segment.penalties for segment in self._segments]
        ids = self.ids
        mask = np.asarray(id_filter(ids) if callable(id_filter) else id_filter)
        if mask.shape != ids.shape:
            raise ValueError(f"search: where must have the shape {ids.shape} of ids, got {mask.shape}")
        if mask.size and mask.dtype != np.bool_:
            raise TypeError(f"search: where must be truth values, got {mask.dtype}")
        chosen = ids[mask.astype(bool)]
        return [
            np.where(np.isin(segment.ids, chosen, assume_unique=True), segment.penalties, math.inf)
            for segment in self._segments
        ]

    async def _nearest(self, rows: npt.NDArray[Any], k: int, parts: Sequence[Part]) -> SearchResult:
        """Search all segments by one request, and select the nearest vectors of the results."""
        if self._metric == "l2":
            return SearchResult(*await nearest(rows, k, parts))
        from .. import linalg

        calls: list[Call[Any]] = []
        for part in parts:
            products: Any = linalg.matmul(rows, part.vectors.T)
            penalised = products if part.on_device is None else products - part.on_device
            calls.append(arrays.top_k(penalised, min(k, part.chosen)))
        best: Any = await gather(*calls).to_host()
        scores = np.concatenate([top.values for top in best], axis=1).astype(np.float64)
        ids = np.concatenate([part.ids[top.indices] for part, top in zip(parts, best, strict=True)], axis=1)
        if not np.isfinite(scores).all():
            raise ValueError(f"search: the scores exceed {self._dtype}; use a wider dtype or shorter vectors")
        order = np.lexsort((ids, -scores), axis=-1)[:, :k]
        return SearchResult(np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1))


_NO_IDS: Final = np.empty(0, np.int64)


def _refuse(label: str, first: int, are_wrong: npt.NDArray[np.bool_], problem: str) -> None:
    """Refuse the first wrong row."""
    rows = are_wrong.reshape(len(are_wrong), -1).any(axis=1) if are_wrong.size else are_wrong
    if rows.any():
        raise ValueError(f"{label} {first + int(rows.argmax())} {problem}")


def _check_ids(label: str, raw_ids: npt.ArrayLike) -> _Ids:
    """Return ids as int64, each once."""
    ids = np.asarray(raw_ids)
    if ids.size and (ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64)):
        raise TypeError(f"{label}: ids must be integers of int64, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{label}: ids must be a vector, got the shape {ids.shape}")
    ids = ids.astype(np.int64)
    ordered = np.sort(ids)
    _refuse_id(label, ordered[1:], ordered[1:] == ordered[:-1], "is given twice")
    return ids


def _refuse_id(
    label: str, ids: _Ids, are_wrong: _Mask, problem: str, error: type[Exception] = ValueError
) -> None:
    if are_wrong.any():
        raise error(f"{label}: the id {ids[are_wrong][0]} {problem}")
