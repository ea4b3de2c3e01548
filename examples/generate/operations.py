"""The Llama of `llama.py` in the package's operations: the same code on all backends, and no other library.

The model records its step as a graph for each number of tokens, sequences and pages, rounded up. So a step is
a single request. Each token, from a prompt or generated, is a separate query, which sees the keys up to its
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llama import Config, allowed_of, likely_of, rotations, rounded
from model import Batch, Chosen

import trio_accel as ta
from trio_accel import arrays, jit, nn

__all__ = ["Operations"]

# Rotate pairs of adjacent numbers. Values stay the same, with a cosine of 1 and a sine of 0.
_turn = jit.elementwise(
    "c = where(i(1) < turning, cosines[p, i(2)], 1.0); s = where(i(1) < turning, sines[p, i(2)], 0.0); "
    "y = x * c + x[i(0), i(1), i(2) ^ 1] * s",
    inputs=("x", "p", "cosines", "sines", "turning"),
    name="turn",
)
_gate = jit.elementwise("g / (1 + exp(-g)) * u", name="gate")
_Graph: TypeAlias = ta.graphs.Graph[tuple[ta.AccelRef, ta.AccelRef]]
_MOST = 64
"""The maximum number of cached graphs."""


class Operations:
    """A model that computes next tokens; see `Llama`.

    Args:
        weights: Arrays of a device by the names of `weights_of`.
        caches: For each layer an array of the shape `Config.cache_shape`.
        config: The configuration of the model.
    """

    def __init__(
        self, weights: Mapping[str, ta.AccelRef], caches: Sequence[ta.AccelRef], config: Config
    ) -> None:
        self.config, self.weights, self.caches = config, dict(weights), list(caches)
        self._turns: list[ta.AccelRef] = []
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    async def __call__(self, batch: Batch) -> Chosen:
        """Put tokens into the cache, and choose the next ones: see `Forward`."""
        given = self._filled(batch)
        graph = await self._graph(*given)
        logits, chosen = await graph(*given)
        asked = None if batch.asked is None else (await logits.to_host())[batch.asked]
        if batch.masks is not None:
            allowed = np.ones(logits.shape, np.bool_)
            allowed[batch.masks[:, 0]] = allowed_of(batch.masks, logits.shape[1])
            logits = await arrays.where(allowed, logits, -np.inf)
            chosen = await arrays.argmax(logits, axis=1)
        if batch.sampling is not None:
            sampling = np.zeros((3, len(chosen)), np.float32)
            sampling[:, : len(batch.tables)] = batch.sampling
            chosen = await _choose(logits, chosen, sampling)
        tokens = (await chosen.to_host())[: len(batch.tables)]
        likely = None if asked is None else likely_of(asked, tokens[batch.asked])
        return Chosen(tokens.astype(np.int32), likely=likely)

    def close(self) -> None:
        """Release the graphs, and their references to weights."""
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _filled(self, batch: Batch) -> list[npt.NDArray[np.int64]]:
        """Pad a batch to rounded sizes, so that few graphs suffice.

        The padding repeats the last token and the last sequence, which writes the same values again.
        """
        tokens, (sequences, pages) = batch.rows.shape[1], batch.tables.shape
        pages = np.minimum(np.arange(rounded(pages)), pages - 1)
        row = np.minimum(np.arange(rounded(tokens)), tokens - 1)
        ends: npt.NDArray[np.int64] = np.arange(tokens, dtype=np.int64) if batch.ends is None else batch.ends
        owner = np.searchsorted(ends, row)
        ends = ends[np.minimum(np.arange(rounded(sequences)), sequences - 1)]
        return [np.ascontiguousarray(batch.rows[:, row]), batch.tables[owner][:, pages], ends]

    async def _graph(self, *given: npt.NDArray[np.int64]) -> _Graph:
        rows, tables, ends = given
        key = (rows.shape[1], tables.shape[1], len(ends))
        graph = self._graphs.pop(key, None)
        if graph is None:
            device = self.caches[0].device
            if not self._turns:
                self._turns = [await device.put(array) for array in rotations(self.config)]
            like = [await device.put(one) for one in given]
            graph = await ta.graphs.capture(device, self.forward, *like, idempotent=True)
            while len(self._graphs) >= _MOST:
                self._graphs.pop(next(iter(self._graphs))).close()
        self._graphs[key] = graph  # in the order of their last use
        return graph

    async def forward(
        self, rows: ta.AccelRef, tables: ta.AccelRef, ends: ta.AccelRef
    ) -> tuple[ta.AccelRef, ta.AccelRef]:
        """Compute a step, one operation after the other.

        Args:
            rows: See `Llama.step`.
            tables: Array of shape (n, most), int64: the pages of each token's sequence.
            ends: See `Llama.step`.

        Returns:
            Logits of shape (sequences, words), and the likeliest tokens, of shape (sequences,).
        """
        config, weights, count = self.config, self.weights, rows.shape[1]
        tokens, positions, places = rows[0], rows[1], rows[2]
        lengths = await (positions + 1)
        turning, eps = config.heads + config.groups, config.epsilon
        x = await nn.embedding(tokens, weights["words"])
        for layer, cache in enumerate(self.caches):
            normed = arrays.rms_norm(x, weights[f"{layer}.attention_norm"], eps=eps)
            made = nn.linear(normed, weights[f"{layer}.query_key_value"]).reshape((count, -1, config.width))
            turned = await _turn(made, positions[:, None, None], *self._turns, turning)
            flat = cache.reshape((-1, *cache.shape[2:]))
            await arrays.scatter_nd(flat, (places,), turned[:, config.heads :])
            query, kept = turned[:, : config.heads, None], cache.transpose(0, 2, 1, 3)
            keys, values = kept[:, : config.groups], kept[:, config.groups :]
            mixed = nn.paged_attention(query, keys, values, tables, lengths).reshape((count, -1))
            x = await ta.linalg.fused_matmul(mixed, weights[f"{layer}.attention_output"].mT, x)
            normed = arrays.rms_norm(x, weights[f"{layer}.feed_norm"], eps=eps)
            both = await nn.linear(normed, weights[f"{layer}.gate_up"])
            inner = _gate(both[:, : config.inner], both[:, config.inner :])
            x = await ta.linalg.fused_matmul(inner, weights[f"{layer}.down"].mT, x)
        last = arrays.rms_norm(arrays.take(x, ends, axis=0), weights["norm"], eps=eps)
        logits = await nn.linear(last, weights["words"])
        return logits, await arrays.argmax(logits, axis=1)


async def _choose(
    logits: ta.AccelRef, likeliest: ta.AccelRef, sampling: npt.NDArray[np.float32]
) -> ta.AccelRef:
    """Draw a token in each row with a temperature, as `Llama` does; choose the likeliest in other rows."""
    temperature, top_p, draw = sampling[:, :, None].astype(np.float64)
    shares = await arrays.softmax(logits.cast("float64") / np.maximum(temperature, 1e-6), axis=1)
    order = await arrays.argsort(shares, axis=1, descending=True)
    ordered = await arrays.take_along_axis(shares, order, axis=1)
    sums = await arrays.cumulative_sum(ordered, axis=1)
    kept = await arrays.count_nonzero(sums - ordered < top_p, axis=1, keepdims=True)
    total = await arrays.take_along_axis(sums, kept - 1, axis=1)
    place = arrays.count_nonzero(sums <= total * draw, axis=1, keepdims=True)
    drawn = arrays.take_along_axis(order, arrays.minimum(place, kept - 1), axis=1)
    return await arrays.where(temperature[:, 0] > 0, drawn[:, 0], likeliest)
