"""The Llama of `llama.py` in PyTorch: its weights and its cache are tensors over the device's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from typing import Any

from llama import Llama, rounded
from model import Batch, Run

import trio_accel as ta
from trio_accel.programs import Array

__all__ = ["TorchLlama"]

torch: Any = import_module("torch")  # without types, as PyTorch is no dependency
functional: Any = import_module("torch.nn.functional")


class _Step:
    """A step of fixed size as a CUDA graph, over tensors that its arguments are copied to."""

    def __init__(self, model: TorchLlama, sequences: int, pages: int, device: Any) -> None:
        self._rows = torch.zeros((3, sequences), dtype=torch.int64, device=device)
        self._tables = torch.zeros((sequences, pages), dtype=torch.int64, device=device)
        self._model = model
        self._graph: Any = None
        self._logits: Any = None
        self._ends = torch.arange(sequences, device=device)

    def __call__(self, rows: Any, tables: Any) -> Any:
        """Run it; the result is overwritten by the next run."""
        count, pages = tables.shape
        self._rows[:, :count], self._rows[:, count:] = rows, rows[:, -1:]
        self._tables[:, :pages], self._tables[:, pages:] = tables[-1:], 0
        self._tables[:count, :pages] = tables
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        # The first run loads kernels, which cannot be captured; the second one is captured, and not run.
        logits = self._run()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._run()
        return logits

    def _run(self) -> Any:
        return self._model.forward(self._rows, self._tables, self._ends, ()).float()


class TorchLlama(Llama):
    """As `Llama`, in PyTorch. Weights and caches may be float32, bfloat16 or float16; logits are float32."""

    def __init__(
        self, weights: Mapping[str, Array], caches: Sequence[Array], *, config: Mapping[str, Any]
    ) -> None:
        tensors = {name: torch.from_dlpack(array) for name, array in weights.items()}
        super().__init__(tensors, [torch.from_dlpack(cache) for cache in caches], config=config)
        self._steps: dict[tuple[int, int], _Step] = {}
        on = tensors["words"].device
        self._cosines, self._sines, self._neighbours = (
            torch.from_numpy(array).to(on) for array in (self._cosines, self._sines, self._neighbours)
        )

    def warm_up(self) -> None:
        """Load kernels before a request waits; a worker that stands ready must not write to the cache."""
        size, other, on = self.caches[0].shape[1], copy(self), self._neighbours.device
        other.caches = [torch.zeros_like(cache[:1]) for cache in self.caches]
        with torch.inference_mode():
            # A prompt, and steps of few and of many sequences, whose products are other kernels.
            for sequences, tokens in ((1, size), (1, 1), (64, 1)):
                runs = [Run(tokens=[0] * tokens, start=0, pages=[0])] * sequences
                batch = Batch.of(runs, self.config, 1, size)
                given = (torch.from_numpy(one).to(on) for one in (batch.rows, batch.tables, batch.ends))
                rows, tables, ends = given
                logits = other.forward(rows, tables, ends, batch.counts)
                logits.argmax(dim=1).tolist()

    @ta.programs.method(updates=["self.caches"], idempotent=True)
    def step(
        self,
        rows: Array,
        tables: Array,
        ends: Array,
        sampling: Array | None,
        counts: Sequence[Sequence[int]],
    ) -> list[int]:
        """See `Llama.step`."""
        with torch.inference_mode():
            given = None if sampling is None else torch.from_dlpack(sampling)
            tokens: list[int] = self._choose(self._logits(rows, tables, ends, counts), given).tolist()
            return tokens

    @ta.programs.method(updates=["self.caches"], idempotent=True)
    def logits(self, rows: Array, tables: Array, ends: Array, counts: Sequence[Sequence[int]]) -> Array:
        """See `Llama.logits`."""
        with torch.inference_mode():
            return self._logits(rows, tables, ends, counts)

    def _logits(self, rows: Any, tables: Any, ends: Any, counts: Sequence[Sequence[int]]) -> Any:
        rows, tables, ends = map(torch.from_dlpack, (rows, tables, ends))
        if rows.is_cuda and not counts:
            return self._replayed(rows, tables)
        return self.forward(rows, tables, ends, counts).float()

    def _replayed(self, rows: Any, tables: Any) -> Any:
        """A step in which each sequence has one token, as a CUDA graph: a launch in place of a thousand.

        Sizes are rounded up, so that a few graphs do for all. What is added repeats the last sequence, and
        writes what is written anyway.
        """
        sequences, pages = tables.shape
        key = rounded(sequences), rounded(pages)
        if key not in self._steps:
            self._steps[key] = _Step(self, *key, rows.device)
        return self._steps[key](rows, tables)[:sequences]

    def _choose(self, logits: Any, sampling: Any) -> Any:
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

    def _empty_like(self, x: Any) -> Any:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def _norm(self, name: str, x: Any) -> Any:
        weight = self.weights[name]
        return functional.rms_norm(x, weight.shape, weight, self.config.epsilon)

    def _dense(self, name: str, x: Any) -> Any:
        return functional.linear(x, self.weights[name])

    def _silu(self, x: Any) -> Any:
        return functional.silu(x)

    def _attend(self, query: Any, keys: Any, values: Any, mask: Any) -> Any:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
