"""The Llama of `llama.py` in PyTorch: its weights and its cache are tensors over the device's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from threading import Lock
from typing import Any

from llama import LIKELIEST, Llama, multipliers, packed, rounded
from model import Batch, Run

import trio_accel as ta
from trio_accel.programs import Array

__all__ = ["TorchLlama"]

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency
functional: Any = import_module("torch.nn.functional")
_capturing = Lock()
"""Held during a capture, because programs run in threads of one process, and share PyTorch's generator."""


class _Step:
    """A step of fixed size as a CUDA graph, which reads copies of its arguments."""

    def __init__(self, model: TorchLlama, sequences: int, pages: int, device: Any) -> None:
        self._rows = torch.zeros((4, sequences), dtype=torch.int64, device=device)
        self._tables = torch.zeros((sequences, pages), dtype=torch.int64, device=device)
        self._model = model
        self._graph: Any = None
        self._made: Any = None

    def __call__(self, rows: Any, tables: Any) -> tuple[Any, Any]:
        """Run the step. The next run overwrites the results."""
        count, pages = tables.shape
        if len(rows) == 3:
            self._rows[3] = -1
        mine, rows = self._rows[: len(rows)], rows[:4]
        mine[:, :count], mine[:, count:] = rows, rows[:, -1:]
        self._tables[:, :pages], self._tables[:, pages:] = tables[-1:], 0
        self._tables[:count, :pages] = tables
        if self._graph is not None:
            self._graph.replay()
            return self._made  # type: ignore[no-any-return]
        # The first run loads kernels, which is impossible in a capture. The second run is only captured.
        made = self._run()
        graph, current, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        # `torch.cuda.graph` would wait for the device first. Then a fault of another operation would show up
        # only after 8 to 11 s, because the driver holds a lock meanwhile.
        with _capturing, torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._made = self._run()
            finally:
                graph.capture_end()
        # Only now, because a capture that failed, such as for memory, cannot be replayed.
        self._graph = graph
        current.wait_stream(stream)
        return made

    def _run(self) -> tuple[Any, Any]:
        tokens = self._model.taken(self._rows)
        rows = [tokens, *self._rows[1:3]]
        return self._model.layers(rows, self._tables, None, ()).float(), tokens


class TorchLlama(Llama):
    """`Llama` in PyTorch. Weights and caches may be float32, bfloat16 or float16; logits are float32."""

    xp = torch

    def __init__(
        self,
        weights: Mapping[str, Array],
        caches: Sequence[Array],
        made: Array | None = None,
        *,
        config: Mapping[str, Any],
        exact: int = 0,
        block: int = 0,
    ) -> None:
        tensors = {name: torch.from_dlpack(array) for name, array in weights.items()}
        places = None if made is None else torch.from_dlpack(made)
        arrays = [torch.from_dlpack(cache) for cache in caches]
        super().__init__(tensors, arrays, places, config=config, exact=exact, block=block)
        self.graphs: dict[tuple[int, int], _Step] = {}
        self._multipliers: dict[int, Any] = {}
        on = tensors["words"].device
        self._cosines, self._sines, self._neighbours = (
            torch.from_numpy(array).to(on) for array in (self._cosines, self._sines, self._neighbours)
        )

    def warm_up(self) -> None:
        """Load kernels before the first request, on a copy, because a spare must not write to the cache."""
        size, other, on = self.caches[0].shape[1], copy(self), self._neighbours.device
        # Graphs write to the cache of their capture.
        other.graphs = {}
        other.caches = [torch.zeros_like(cache[:1]) for cache in self.caches]
        with torch.inference_mode():
            # Run a prompt, and steps of few and many sequences, because their products use other kernels.
            shapes = ((self.exact, 1),) if self.exact else ((1, size), (1, 1), (64, 1))
            for sequences, tokens in shapes:
                runs = [Run(tokens=[0] * tokens, start=0, pages=[0])] * sequences
                batch = Batch.of(runs, self.config, 1, size)
                given = (torch.from_numpy(one).to(on) for one in (batch.rows, batch.tables, batch.ends))
                rows, tables, ends = given
                logits = other.forward(rows, tables, ends, batch.counts)
                logits.argmax(dim=1).tolist()

    @ta.programs.method(updates=["self.caches", "self.made"], idempotent=True)
    def step(
        self,
        rows: Array,
        tables: Array,
        ends: Array | None,
        sampling: Array | None,
        counts: Sequence[Sequence[int]],
        masks: Array | None = None,
        asked: Array | None = None,
    ) -> Any:
        """See `Llama.step`. This only enqueues, so that the device has the next step before this one ends."""
        with torch.inference_mode():
            rows, logits, tokens = self._logits(rows, tables, ends, counts)
            allowed = self._masked(logits, None if masks is None else torch.from_dlpack(masks))
            chosen = self._choose(allowed, None if sampling is None else torch.from_dlpack(sampling))
            likely = None if asked is None else self._likely(logits, chosen, torch.from_dlpack(asked))
            if len(rows) == 3:
                return self._packed(torch.nn.functional.pad(chosen, (0, 1)), likely)
            self.made[rows[4]] = chosen
            count = len(chosen)
            if count not in self._multipliers:
                self._multipliers[count] = torch.from_numpy(multipliers(count)).to(rows.device)
            sums = (tokens[:count] * self._multipliers[count]).sum(dim=0, keepdim=True)
            return self._packed(torch.cat([chosen, sums]), likely)

    @ta.programs.method(updates=["self.caches"], idempotent=True)
    def logits(self, rows: Array, tables: Array, ends: Array, counts: Sequence[Sequence[int]]) -> Array:
        """See `Llama.logits`."""
        with torch.inference_mode():
            return self._logits(rows, tables, ends, counts)[1]

    def _packed(self, made: Any, likely: Any) -> Any:
        """Copy a step's result to the host. On a GPU, return a function that reads it after the step."""
        parts = [made] if likely is None else [made, likely]
        if made.is_cuda:
            hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for host, part in zip(hosts, parts, strict=True):
                host.copy_(part, non_blocking=True)
        else:
            hosts = parts

        def read() -> bytes:
            return packed(hosts[0].numpy()) + b"".join(host.numpy().tobytes() for host in hosts[1:])

        return read if made.is_cuda else read()

    def _masked(self, logits: Any, masks: Any) -> Any:
        if masks is None:
            return logits
        rows, bits = masks[:, 0].long(), torch.arange(32, device=masks.device)
        allowed = (masks[:, 1:, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        found = logits.clone()
        found[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
        return found

    def _likely(self, logits: Any, chosen: Any, asked: Any) -> Any:
        """See `likely_of`."""
        rows = logits[asked].double().log_softmax(dim=1)
        best = rows.topk(LIKELIEST, dim=1)
        return torch.cat([rows.gather(1, chosen[asked, None]), best.indices, best.values], dim=1)

    def _logits(
        self, rows: Any, tables: Any, ends: Any, counts: Sequence[Sequence[int]]
    ) -> tuple[Any, Any, Any]:
        """Return the rows as a tensor, the logits, and the input tokens, possibly with padding."""
        rows, tables = torch.from_dlpack(rows), torch.from_dlpack(tables)
        if rows.is_cuda and not counts and not self.exact:
            return rows, *self._replayed(rows, tables)
        ends = None if ends is None else torch.from_dlpack(ends)
        tokens = self.taken(rows)
        return rows, self.forward([tokens, *rows[1:3]], tables, ends, counts).float(), tokens

    def _replayed(self, rows: Any, tables: Any) -> tuple[Any, Any]:
        """Run a step with one token per sequence as a CUDA graph: one launch instead of a thousand.

        Sizes are rounded up, so that a few graphs suffice. The padding repeats the last sequence, and writes
        the same values again.
        """
        sequences, pages = tables.shape
        logits, tokens = self._graph_of(rounded(sequences), rounded(pages))(rows, tables)
        return logits[:sequences], tokens

    def _graph_of(self, sequences: int, pages: int) -> _Step:
        key = sequences, pages
        if key not in self.graphs:
            self.graphs[key] = _Step(self, *key, self._neighbours.device)
        return self.graphs[key]

    def _pass(self, rows: Any, tables: Any) -> Any:
        if not tables.is_cuda:
            return super()._pass(rows, tables)
        return self._graph_of(*tables.shape)(torch.stack(rows), tables)[0].clone()

    def taken(self, rows: Any) -> Any:
        """Return the input tokens."""
        if len(rows) == 3 or self.made is None:
            return rows[0]
        return torch.where(rows[3] < 0, rows[0], self.made[rows[3].clamp(min=0)])

    def _choose(self, logits: Any, sampling: Any) -> Any:
        if sampling is None or not self.exact:
            return self._choose_at_once(logits, sampling)
        # Sums over the vocabulary also need a fixed number of rows.
        count, found = len(logits), list[Any]()
        for first in range(0, count, self.exact):
            place = torch.arange(first, first + self.exact, device=logits.device).clamp(max=count - 1)
            found.append(self._choose_at_once(logits[place], sampling[:, place]))
        return torch.cat(found)[:count]

    def _choose_at_once(self, logits: Any, sampling: Any) -> Any:
        likeliest = logits.argmax(dim=1)
        if sampling is None:
            return likeliest
        temperature, top_p, draw = sampling.double()[:, :, None]
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        shares = ((ordered - ordered[:, :1]).double() / temperature.clamp(min=1e-6)).exp()
        sums = shares.cumsum(dim=1)
        kept = (sums - shares < top_p * sums[:, -1:]).sum(dim=1, keepdim=True).clamp(min=1)
        place = torch.searchsorted(sums, draw * sums.gather(1, kept - 1), right=True).minimum(kept - 1)
        return torch.where(temperature[:, 0] > 0, order.gather(1, place)[:, 0], likeliest)

    def _mask(self, keys: int, own: Any) -> Any:
        own = own.repeat_interleave(self.config.heads // self.config.groups, dim=1)[:, None, :, None]
        return torch.arange(keys, device=own.device) <= own

    def _array(self, numbers: Any) -> Any:
        return torch.from_numpy(numbers).to(self._neighbours.device)

    def _range(self, start: int, stop: int) -> Any:
        return torch.arange(start, stop, device=self._neighbours.device)

    def _wide(self, x: Any) -> Any:
        return x.float()

    def _like(self, x: Any, other: Any) -> Any:
        return x.to(other.dtype)

    def _empty_like(self, x: Any) -> Any:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def _norm(self, name: str, x: Any) -> Any:
        weight = self.weights[name]
        return functional.rms_norm(x, weight.shape, weight, self.config.epsilon)

    def _product(self, name: str, x: Any) -> Any:
        return functional.linear(x, self.weights[name])

    def _silu(self, x: Any) -> Any:
        return functional.silu(x)

    def _attend(self, query: Any, keys: Any, values: Any, mask: Any) -> Any:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
