"""A MiniLM encoder of the package's own operations: ``python -m benchmarks.gpu.minilm (rates | faults) ...``.

``rates`` compares it with `BertModel` of `transformers`, which has the same random weights, in turns on the
same device: the embeddings, and the batches a second. PyTorch's loop launches the module's kernels again and
again. Its graph is what a PyTorch program gets that records the module for one shape. ``faults`` has clients
ask for embeddings while the context is poisoned every five seconds, and counts what is lost.

It needs a GPU and, for ``rates``, PyTorch and `transformers`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

__all__ = ["main"]

_ROOT = Path(__file__).parents[2]
_BATCHES = (8, 64), (32, 128)
_DTYPES = ("float32", "float16")
_ASKERS = 4
_SECONDS = 0.3
"""Of a side in a turn."""
_CLIENTS = 32

Tokens = npt.NDArray[np.int64]


def _shape() -> Any:
    minilm: Any = import_module("minilm")
    return minilm.Shape(
        layers=6, heads=12, width=384, inner=1536, words=30522, places=512, types=2, epsilon=1e-12
    )


def _sentences(count: int, longest: int, words: int) -> list[Tokens]:
    """Make sentences of half to all of a length; the first is the longest."""
    random = np.random.default_rng(0)
    lengths = [longest, *random.integers(longest // 2 + 1, longest + 1, count - 1)]
    return [random.integers(0, words, length) for length in lengths]


class _Module:
    """The module of `transformers`, with the mean of the tokens behind it.

    Args:
        shape: What the encoder is like.
    """

    def __init__(self, shape: Any) -> None:
        self.torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.torch.manual_seed(0)
        config = transformers.BertConfig(
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            intermediate_size=shape.inner,
            vocab_size=shape.words,
            layer_norm_eps=shape.epsilon,
            attn_implementation="sdpa",
        )
        self._model: Any = transformers.BertModel(config, add_pooling_layer=False).eval()
        with self.torch.no_grad():
            # New ones have biases of 0 and factors of 1, and would hide what is left out.
            for weight in self._model.parameters():
                if weight.ndim == 1:
                    weight.add_(self.torch.randn_like(weight), alpha=0.02)
        self.weights: dict[str, Any] = {
            name: weight.numpy()
            for name, weight in self._model.state_dict().items()
            if weight.is_floating_point()
        }
        self._model = self._model.cuda()

    def convert(self, dtype: str) -> None:
        """Convert its weights."""
        self._model = self._model.to(getattr(self.torch, dtype))

    def place(self, sentences: Sequence[Tokens]) -> tuple[Any, Any]:
        """Give the tokens and the mask of sentences, on the device."""
        ids = np.zeros((len(sentences), max(map(len, sentences))), np.int64)
        mask = np.zeros_like(ids)
        for row, shown, sentence in zip(ids, mask, sentences, strict=True):
            row[: len(sentence)] = sentence
            shown[: len(sentence)] = 1
        return self.torch.from_numpy(ids).cuda(), self.torch.from_numpy(mask).cuda()

    def embed(self, ids: Any, mask: Any) -> Any:
        """Enqueue the embeddings."""
        with self.torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            return self.torch.nn.functional.normalize(mean, dim=1)

    def graph(self, ids: Any, mask: Any) -> Callable[[], Any]:
        """Record it for one batch; returns what replays it."""
        torch = self.torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.embed(ids, mask)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.embed(ids, mask)
        replay: Callable[[], Any] = graph.replay
        return replay

    def rate(self, call: Callable[[], Any]) -> float:
        """Return the calls a second, back to back."""
        for _ in range(3):
            call()
        self.torch.cuda.synchronize()
        calls, began = 0, time.perf_counter()
        while time.perf_counter() < began + _SECONDS:
            for _ in range(10):
                call()
            self.torch.cuda.synchronize()
            calls += 10
        return calls / (time.perf_counter() - began)


async def _rate(call: Callable[[], Any], askers: int) -> float:
    """Return the calls a second of so many tasks."""
    calls = 0
    for _ in range(12):  # until what repeats is launched as one
        await call()
    began = time.perf_counter()

    async def ask() -> None:
        nonlocal calls
        while time.perf_counter() < began + _SECONDS:
            await call()
            calls += 1

    async with trio.open_nursery() as nursery:
        for _ in range(askers):
            nursery.start_soon(ask)
    return calls / (time.perf_counter() - began)


async def rates(turns: int) -> None:
    """Print the embeddings' differences, and the batches a second of each side."""
    shape, encoders = _shape(), import_module("minilm_operations")
    module = await trio.to_thread.run_sync(_Module, shape)
    _say(f"{module.torch.cuda.get_device_name()}, PyTorch {module.torch.__version__}")
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with ta.open_system("minilm") as system, system.open_device("cuda", options=options) as device:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            await ta.weights.save(path, {name: await device.put(one) for name, one in module.weights.items()})
            for dtype in _DTYPES:
                module.convert(dtype)
                for batch, length in _BATCHES:
                    load = partial(encoders.load_encoder, device, path, shape, dtype=dtype, batch=batch)
                    for attention in (encoders.attention, encoders.fused_attention):
                        encoder = await load(attention=attention)
                        name = f"{batch} x {length} {dtype} {attention.__name__}"
                        try:
                            await _compare(
                                module, encoder, _sentences(batch, length, shape.words), name, turns
                            )
                        except ta.NotSupportedError as error:
                            _say(f"{name}: {error}")


async def _compare(module: _Module, encoder: Any, sentences: list[Tokens], name: str, turns: int) -> None:
    ids, mask = module.place(sentences)
    expected = module.embed(ids, mask).cpu().numpy()
    found = await encoder.embed(sentences)
    nothing: int = import_module("minilm_operations").NOTHING
    tokens: Tokens = np.where(mask.cpu().numpy() > 0, ids.cpu().numpy(), nothing)
    given, graph = await encoder.device.put(tokens), await encoder.graph(tokens.shape[1])
    is_same = np.array_equal(await (await encoder.forward(given)).to_host(), found)
    began = time.perf_counter()
    for _ in range(3):
        await encoder.forward(given)
    apart = 3 / (time.perf_counter() - began)
    theirs: dict[str, Callable[[], Any]] = {
        "loop": partial(module.embed, ids, mask),
        "host to host": lambda: module.embed(*module.place(sentences)).cpu(),
    }
    try:
        theirs["graph"] = await trio.to_thread.run_sync(module.graph, ids, mask)
    except Exception as error:  # noqa: BLE001  # a module that cannot be recorded has no such row
        _say(f"{name}: PyTorch's graph: {str(error).splitlines()[0]:.90}")
    ours = {
        "one asker": (partial(graph, given), 1),
        f"{_ASKERS} askers": (partial(graph, given), _ASKERS),
        "host to host": (partial(encoder.embed, sentences), 1),
    }
    measured: dict[str, list[float]] = {}
    for _ in range(turns):
        for side, call in theirs.items():
            measured.setdefault(f"PyTorch {side}", []).append(
                await trio.to_thread.run_sync(module.rate, call)
            )
        for side, (ask, askers) in ours.items():
            measured.setdefault(side, []).append(await _rate(ask, askers))
    rate = {side: statistics.median(found) for side, found in measured.items()}
    _say(
        f"{name}: largest difference {np.abs(found - expected).max():.1e}, graph as one by one: {is_same}, "
        f"one by one {apart:.0f} /s, memory of the graph {graph.nbytes / 1e6:.0f} MB\n"
        f"  batches a second: {', '.join(f'{side} {found:.0f}' for side, found in rate.items())}\n"
        "  share of PyTorch's loop: "
        + ", ".join(f"{side} {rate[side] / rate['PyTorch loop']:.2f}" for side in list(ours)[:2])
        + f"; host to host {rate['host to host'] / rate['PyTorch host to host']:.2f}"
        + (
            f"; {_ASKERS} askers of PyTorch's graph {rate[f'{_ASKERS} askers'] / rate['PyTorch graph']:.2f}"
            if "PyTorch graph" in rate
            else ""
        )
    )


async def faults(seconds: float) -> None:
    """Print what becomes of requests while the context is poisoned every five seconds."""
    program, encoders, shape = (
        import_module("encode_operations"),
        import_module("minilm_operations"),
        _shape(),
    )
    sentences = [one for longest in (16, 32, 64) for one in _sentences(16, longest, shape.words)]
    async with (
        ta.open_system("minilm") as system,
        system.open_device("cuda", options=program.OPTIONS) as device,
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            await program.write_random(device, path, shape)
            encoder = await encoders.load_encoder(device, path, shape)
        count = max(1, round(seconds / 5) - 1)
        _, served = await program.serve(
            system, encoder, sentences, clients=_CLIENTS, faults=count, every=seconds / (count + 1)
        )
    _say(f"{_CLIENTS} clients for {served.seconds:.1f} s: {served}")
    _say(f"  {served.answered / served.seconds:.0f} embeddings a second; errors {dict(served.errors)}")
    _say(f"  again after (ms): {', '.join(f'{one * 1e3:.0f}' for one in served.recoveries)}")
    for check in served.checks():
        _say(f"  {'right' if check.is_ok else 'WRONG'}: {check.name} {check.value:.3g}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.minilm")
    parser.add_argument("what", choices=("rates", "faults"))
    parser.add_argument("--turns", type=int, default=4, help="of each side; default 4")
    parser.add_argument("--seconds", type=float, default=20.0, help="under faults; default 20")
    given = parser.parse_args(arguments)
    # Workers look for the encoder's modules there too.
    sys.path.insert(0, str(_ROOT / "examples" / "encode"))
    if given.what == "faults":
        trio.run(faults, given.seconds)
        return
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        sys.exit(f"minilm: rates needs {' and '.join(missing)}, which cannot be imported here")
    trio.run(rates, given.turns)


if __name__ == "__main__":
    main()
