"""Attention: scores of some rows at a time, whole rows of which fit into a few megabytes."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from ...base.contract.errors import OutOfRangeError
from ...base.contract.ops import ArraySpec, AttentionGradSpec, AttentionSpec
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray, convert
from ._convolutions import FLOATS, widened

__all__ = ["attention", "attention_grad"]

# Scores that are made at a time.
_PIECE = 1 << 20


@attrs.frozen
class _Part:
    """Some queries of the heads that one head of the keys serves, and the keys that they may see.

    Attributes:
        stack: Index of the leading axes.
        heads: Heads of the queries.
        head: Head of the keys.
        rows: Queries.
        columns: Keys: none that no query sees.
        hidden: Which scores do not count, of shape (rows, columns); None where all do.
        bias: What is added to the scores, of shape (heads, rows, columns); None for nothing.
    """

    stack: tuple[int, ...]
    heads: slice
    head: int
    rows: slice
    columns: slice
    hidden: HostArray | None
    bias: HostArray | None

    def scores(self, query: HostArray, key: HostArray, scale: float) -> HostArray:
        """Compute scores, of shape (heads, rows, columns): minus infinity where none counts."""
        given = query.reshape(-1, query.shape[-1])
        scores: HostArray = np.matmul(given, key.T).reshape(*query.shape[:2], len(key))
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
    """The arrays of an attention, with all their axes, and lengths that are checked.

    Attributes:
        query: ``(..., heads, rows, e)``.
        key: ``(..., kv_heads, columns, e)``, or blocks.
        value: ``(..., kv_heads, columns, f)``, or blocks.
    """

    def __init__(self, spec: AttentionSpec | AttentionGradSpec, call: HostCall) -> None:
        self._spec = spec
        self.query, self.key, self.value = (
            headed(call.array(one)) for one in (spec.query, spec.key, spec.value)
        )
        rows = self.query.shape[-2]
        table = spec.block_table if isinstance(spec, AttentionSpec) else None
        self._table = None if table is None else call.array(table)
        block = self.key.shape[-2]
        columns = block if self._table is None else block * self._table.shape[-1]
        stack = self.query.shape[:-3]
        self._query_lengths = _lengths(call, "query_lengths", spec.query_lengths, rows, stack)
        self._key_lengths = _lengths(call, "key_lengths", spec.key_lengths, columns, stack)
        if self._table is not None:
            self._check_blocks(self._table, block)
        self._mask = None
        if spec.mask is not None:
            shape = (*self.query.shape[:-1], columns)
            self._mask = np.broadcast_to(call.array(spec.mask), shape)

    def _check_blocks(self, table: HostArray, block: int) -> None:
        """Refuse blocks that there are not, before one is read."""
        count = len(self.key)
        firsts: HostArray = np.arange(int(table.shape[1])) * block
        is_used: HostArray = firsts < self._key_lengths[:, None]
        is_outside = is_used & ((table < 0) | (table >= count))
        if is_outside.any():
            index = int(table[is_outside][0])
            raise _outside("block_table", f"there is no block {index} of {count}", index, count)

    def heads(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the leading index and the head of all heads of keys."""
        for stack in np.ndindex(*self.query.shape[:-3]):
            for head in range(self.key.shape[-3]):
                yield stack, head

    def parts(self, stack: tuple[int, ...], head: int) -> Iterator[_Part]:
        """Cut the queries that a head of keys serves into pieces; those beyond their length are left out."""
        shared = self.query.shape[-3] // self.key.shape[-3]
        rows, columns = int(self._query_lengths[stack]), int(self._key_lengths[stack])
        step = max(1, _PIECE // max(1, columns * shared))
        for first in range(0, rows, step):
            yield self._part(stack, head, shared, slice(first, min(first + step, rows)), rows, columns)

    def _part(
        self, stack: tuple[int, ...], head: int, shared: int, rows: slice, most: int, columns: int
    ) -> _Part:
        spec = self._spec
        # The key of the first query, of those that stand on the diagonal.
        offset = columns - most if spec.alignment == "lower_right" else 0
        first = 0 if spec.left < 0 else max(0, rows.start + offset - spec.left)
        stop = columns if spec.right < 0 else min(columns, rows.stop + offset + spec.right)
        seen = slice(min(first, columns), max(min(first, columns), stop))
        hidden = None
        if spec.left >= 0 or spec.right >= 0:
            own: HostArray = np.arange(int(rows.start), int(rows.stop)) + offset
            keys: HostArray = np.arange(int(seen.start), int(seen.stop))
            places: HostArray = keys - own[:, None]
            hidden = np.zeros(places.shape, np.bool_)
            hidden |= places < -spec.left if spec.left >= 0 else False
            hidden |= places > spec.right if spec.right >= 0 else False
        heads = slice(head * shared, (head + 1) * shared)
        bias = None
        if self._mask is not None:
            bias = self._mask[stack][heads, rows, seen]
            bias = bias if bias.dtype == np.bool_ else widened(bias)
        return _Part(stack, heads, head, rows, seen, hidden, bias)

    def of(self, part: _Part, array: HostArray) -> HostArray:
        """Return the keys or the values of a part, in the type that they are computed in."""
        if self._table is None:
            return widened(array[part.stack][part.head, part.columns])
        block, columns = array.shape[-2], part.columns
        first, stop = columns.start // block, -(-columns.stop // block)
        taken = array[self._table[part.stack][first:stop], part.head]
        taken = taken.reshape(len(taken) * block, array.shape[-1])
        return widened(taken[columns.start - first * block : columns.stop - first * block])


def headed(array: HostArray) -> HostArray:
    """Return a view with an axis for the heads."""
    return array if array.ndim > 2 else array[None]


def _lengths(
    call: HostCall, argument: str, lengths: ArraySpec | None, most: int, stack: tuple[int, ...]
) -> HostArray:
    """Return lengths of an axis, of which none is larger than the axis."""
    if lengths is None:
        return np.full(stack, most)
    given = call.array(lengths)
    is_outside = (given < 0) | (given > most)
    if is_outside.any():
        index = int(given[is_outside][0])
        raise _outside(argument, f"{index} is no length of an axis of {most}", index, most)
    return given


def _outside(argument: str, text: str, index: int, length: int) -> OutOfRangeError:
    return OutOfRangeError(f"{argument}: {text}", library="dnn", index=index, axis=0, length=length)


@kernel(AttentionSpec, backend="cpu", dtypes={"query": FLOATS})
def attention(spec: AttentionSpec, call: HostCall) -> None:
    """Compute exponentials of some rows of scores, and their products with the values."""
    of, out = _Attention(spec, call), headed(call.array(spec.out))
    lse = None if spec.lse is None else _rows(call.array(spec.lse))
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
    for part in (part for place in of.heads() for part in of.parts(*place)):
        query = widened(of.query[part.stack][part.heads, part.rows])
        scores = part.scores(query, of.of(part, of.key), spec.scale)
        if not scores.size:
            continue
        most = scores.max(-1, keepdims=True)
        # Of a row without a score that counts, nothing is left: its exponentials are zeros.
        most[np.isneginf(most)] = 0
        np.exp(np.subtract(scores, most, out=scores), out=scores)
        total = scores.sum(-1, keepdims=True)
        value = of.of(part, of.value)
        made = _weighed(scores.reshape(-1, len(value)), value).reshape(*query.shape[:2], value.shape[-1])
        if lse is not None:
            lse[part.stack][part.heads, part.rows] = (most + np.log(total))[..., 0]
        total[total == 0] = 1
        convert(made / total, out[part.stack][part.heads, part.rows])


@kernel(AttentionGradSpec, backend="cpu", dtypes={"query": FLOATS})
def attention_grad(spec: AttentionGradSpec, call: HostCall) -> None:
    """Compute the scores of some rows anew, and add up the gradients of keys and values."""
    of = _Attention(spec, call)
    grad, out, lse = headed(call.array(spec.grad)), headed(call.array(spec.out)), _rows(call.array(spec.lse))
    grad_query, grad_key, grad_value = (
        headed(call.array(one)) for one in (spec.grad_query, spec.grad_key, spec.grad_value)
    )
    grad_query[...] = 0
    for stack, head in of.heads():
        keys, values = (np.zeros(one[stack][head].shape, lse.dtype) for one in (of.key, of.value))
        for part in of.parts(stack, head):
            if part.columns.start == part.columns.stop:
                continue
            query = widened(of.query[stack][part.heads, part.rows])
            key, value = of.of(part, of.key), of.of(part, of.value)
            logs = lse[stack][part.heads, part.rows][..., None]
            weights = part.scores(query, key, spec.scale)
            is_hidden = np.isneginf(weights).reshape(-1, len(key))
            np.exp(np.subtract(weights, np.where(logs == -np.inf, 0, logs), out=weights), out=weights)
            weights = weights.reshape(-1, len(key))
            weights[is_hidden] = 0
            slope = widened(grad[stack][part.heads, part.rows])
            mean = (slope * widened(out[stack][part.heads, part.rows])).sum(-1).reshape(-1, 1)
            slope = slope.reshape(len(weights), value.shape[-1])
            values[part.columns] += _weighed(weights.T, slope)
            weights *= (np.matmul(slope, value.T) - mean) * spec.scale
            weights[is_hidden] = 0
            keys[part.columns] += _weighed(weights.T, query.reshape(-1, query.shape[-1]))
            made = _weighed(weights, key).reshape(query.shape)
            convert(made, grad_query[stack][part.heads, part.rows])
        convert(keys, grad_key[stack][head])
        convert(values, grad_value[stack][head])


def _weighed(weights: HostArray, values: HostArray) -> HostArray:
    """Multiply matrices, where a weight of zero takes nothing: not of infinity or NaN, either."""
    made: HostArray = np.matmul(weights, values)
    if np.isnan(made).any():
        is_finite = np.isfinite(values).all(-1)
        made = np.matmul(weights[:, is_finite], values[is_finite])
        for number in np.flatnonzero(~is_finite):
            taking = weights[:, number] != 0
            made[taking] += weights[taking, number, None] * values[number]
    return made


def _rows(array: HostArray) -> HostArray:
    """Return a view with an axis for the heads, of an array of rows."""
    return array if array.ndim > 1 else array[None]
