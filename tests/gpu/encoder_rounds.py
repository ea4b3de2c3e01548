"""A sentence encoder in a program under load: the costs of lost contexts, and the cost of the program.

The model has the shape of all-MiniLM-L6-v2 and random weights. It is PyTorch's on CUDA, and NumPy's on the
CPU backend.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
import trio.testing

import trio_accel as ta

# The program of the example, by the names that its modules have there.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "encode"))

from encode_faults import EncodeLoad, changed_since, hashes_of, strike
from minilm import Encoder, Shape, weights_of
from minilm_files import Batch

MINILM = Shape(layers=6, heads=12, width=384, inner=1536, words=30522, places=512, types=2, epsilon=1e-12)
SMALL = attrs.evolve(MINILM, layers=2, width=48, inner=64, words=100)
CLIENTS = 32
# Sentences and tokens of a request under load.
REQUEST = 4, 32
# Equal requests would hide a request with the answer of another.
REQUESTS = 16

_PLAIN_LOOP = Path(__file__).with_name("plain_loop.py")

Strike = Callable[[EncodeLoad], Awaitable[None]]


@attrs.define
class Report:
    """The results of one fault's rounds.

    Attributes:
        name: The fault.
        rounds: The number of faults.
        requests: Requests meanwhile.
        lost: Requests without an answer, or with two, or with an error.
        unlike: Embeddings that differ from those before the faults.
        changed: Lost or changed arrays of weights.
        from_strike: Seconds from the fault to the first right answer of the next context.
        from_seen: Seconds from the moment when the program knows of the loss.
    """

    name: str
    rounds: int
    requests: int = 0
    lost: int = 0
    unlike: int = 0
    changed: int = 0
    from_strike: list[float] = attrs.field(factory=list)
    from_seen: list[float] = attrs.field(factory=list)

    def __str__(self) -> str:
        struck, seen = self.from_strike, self.from_seen
        return (
            f"{self.name:24} {self.rounds:3} rounds {self.requests:6} requests, lost {self.lost}, "
            f"unlike {self.unlike}, weights changed {self.changed}; back after the fault "
            f"{statistics.median(struck) * 1e3:.0f} ms (at most {max(struck) * 1e3:.0f}), "
            f"after the loss is seen {statistics.median(seen) * 1e3:.0f} ms (at most {max(seen) * 1e3:.0f})"
        )


@attrs.frozen
class Stand:
    """A device with the encoder.

    Attributes:
        device: The device.
        weights: Its weights.
        program: The encoder.
        cls: The encoder's class.
        shape: The shape of the encoder.
    """

    device: ta.Device
    weights: ta.weights.LoadedArrays
    program: Any
    cls: type[Encoder]
    shape: Shape


def encoder_class(backend: str) -> type[Encoder]:
    """The class that a backend has."""
    if backend == "cpu":
        return Encoder
    cls: type[Encoder] = import_module("minilm_torch").TorchEncoder
    return cls


def random_weights(shape: Shape) -> dict[str, Any]:
    """The same in each run."""
    random = np.random.default_rng(26)
    return {
        name: random.standard_normal(sizes, np.float32) * np.float32(0.05)
        for name, sizes in weights_of(shape).items()
    }


async def write_weights(device: ta.Device, shape: Shape, path: Path) -> None:
    """Write the weights as a file."""
    arrays = {name: await device.put(array) for name, array in random_weights(shape).items()}
    await ta.weights.save(path, arrays)
    for array in arrays.values():
        array.release()


@asynccontextmanager
async def open_stand(
    system: ta.System, backend: str, shape: Shape, path: Path, *, spares: int
) -> AsyncGenerator[Stand, None]:
    """A device in a worker, with the encoder."""
    options = ta.DeviceOptions(
        isolation="process",
        retry=1,
        retry_suspects=True,
        spares=spares,
        preload=() if backend == "cpu" else ("torch",),
        intensity=ta.Intensity(1000, 60.0),
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    )
    cls = encoder_class(backend)
    async with system.open_device(backend, options=options) as device:
        if not await trio.Path(path).exists():
            await write_weights(device, shape, path)
        weights = await ta.weights.load(device, path, packed=True)
        async with ta.programs.open_program(
            device, cls, dict(weights), layers=shape.layers, heads=shape.heads, epsilon=shape.epsilon
        ) as program:
            yield Stand(device, weights, program, cls, shape)
        weights.release()


def batch(shape: Shape, sentences: int, tokens: int, seed: int) -> Batch:
    """Sentences of random tokens; each is shorter than the one before, down to half."""
    random = np.random.default_rng(seed)
    lengths = np.linspace(tokens, tokens // 2, sentences).astype(int)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.float32)
    ids = random.integers(0, shape.words, (sentences, tokens))
    return Batch(ids * (mask > 0), mask)


def batches_of(shape: Shape, tokens: int) -> list[Batch]:
    """Batches with a measured rate."""
    return [batch(shape, 32, tokens, seed) for seed in range(4)]


async def bad_index(load: EncodeLoad) -> None:
    """On CUDA a look-up out of range; on the CPU backend an injected poison."""
    await strike(load)


async def kill(load: EncodeLoad) -> None:
    pid = (await load.device.statistics()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def play(stand: Stand, name: str, strike: Strike, rounds: int, *, spares: int = 0) -> Report:
    """Strike under load, round after round.

    Args:
        stand: The encoder and device to strike.
        name: The fault.
        strike: Makes it happen.
        rounds: How often.
        spares: Spare workers required before each.
    """
    report = Report(name, rounds)
    batches = [batch(stand.shape, *REQUEST, seed) for seed in range(REQUESTS)]
    load = EncodeLoad(stand.device, stand.program, stand.cls, batches, stand.shape.width)
    await load.expect()
    before = await hashes_of(stand.weights)
    async with trio.open_nursery() as nursery:
        load.start(nursery, CLIENTS)
        for _ in range(rounds):
            # A fault that hit once is over, and everybody has asked again.
            await load.wait_settled(0.0)
            await _wait_spares(stand.device, spares)
            await _strike(load, strike, report)
        await load.wait_settled(0.0)
        load.stop()
    names = {(record.client, record.request) for record in load.records}
    failed = [record.outcome for record in load.records if record.is_same is None]
    report.requests = load.asked
    report.lost = abs(load.asked - len(names)) + len(load.records) - len(names) + len(failed)
    report.unlike = sum(record.is_same is False for record in load.records)
    report.changed = await changed_since(stand.weights, before)
    return report


async def _strike(load: EncodeLoad, strike: Strike, report: Report) -> None:
    generation, known, start = load.device.generation, len(load.records), time.perf_counter()
    seen: list[float] = []

    async def watch() -> None:
        await wait_loss(load.device)
        seen.append(time.perf_counter())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked(0.0)
        start = time.perf_counter()
        nursery.start_soon(strike, load)
        with trio.fail_after(60):
            while not any(
                record.ended > generation and record.is_same is not None for record in load.records[known:]
            ):
                await load.wait_change()
        back = time.perf_counter()
    report.from_strike.append(back - start)
    report.from_seen.append(back - seen[0])


async def wait_loss(device: Any) -> None:
    """Wait until the program knows that the context is lost."""
    availability = device.state.availability
    while availability.is_ready:
        await availability.wait_changed()


async def _wait_spares(device: Any, spares: int) -> None:
    with trio.fail_after(60):
        while device.dispatch.spares < spares:  # noqa: ASYNC110  # nobody tells
            await trio.sleep(0.005)


@attrs.frozen
class Throughput:
    """How fast the encoder is as a program, and called in a plain loop by a program of its own.

    Attributes:
        tokens: Tokens of each of a batch's 32 sentences.
        ours: Batches per second as a program, the median.
        plain: And in the loop.
    """

    tokens: int
    ours: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.ours / self.plain

    def __str__(self) -> str:
        return (
            f"batches of 32 × {self.tokens} tokens: {self.ours:.0f} per second as a program, "
            f"{self.plain:.0f} in a plain loop, ratio {self.ratio:.3f}"
        )


async def measure_throughput(
    stand: Stand, backend: str, *, tokens: int, batches: int, pairs: int, askers: int = 8
) -> Throughput:
    """Take turns with the plain loop, which has the same class and batches in a process of its own.

    Args:
        stand: The encoder and device to ask.
        backend: The backend's name.
        tokens: Of each sentence.
        batches: In each turn.
        pairs: Turns of each.
        askers: Requests under way at a time.
    """
    sentences = batches_of(stand.shape, tokens)
    arrays = [(await stand.device.put(one.ids), await stand.device.put(one.mask)) for one in sentences]

    async def ask(numbers: Any) -> None:
        for number in numbers:
            ids, mask = arrays[number % len(arrays)]
            found = await stand.program.ask(stand.cls.encode, ids, mask, stand.shape.width)
            found.release()

    async def ours(count: int) -> float:
        start, numbers = time.perf_counter(), iter(range(count))
        async with trio.open_nursery() as nursery:
            for _ in range(askers):
                nursery.start_soon(ask, numbers)
        return count / (time.perf_counter() - start)

    plain = await trio.to_thread.run_sync(_Plain, backend, stand.shape, tokens)
    try:
        await ours(2 * askers)
        await trio.to_thread.run_sync(plain.run, 4)
        turns = [
            (await ours(batches), await trio.to_thread.run_sync(plain.run, batches)) for _ in range(pairs)
        ]
    finally:
        plain.close()
    for ids, mask in arrays:
        ids.release()
        mask.release()
    return Throughput(
        tokens, statistics.median(ours for ours, _ in turns), statistics.median(other for _, other in turns)
    )


class _Plain:
    """The encoder on its own, in a process: memory that PyTorch keeps on the GPU ends with it.

    Args:
        backend: Which backend's class.
        shape: Of the encoder.
        tokens: Tokens of each of a batch's 32 sentences.
    """

    def __init__(self, backend: str, shape: Shape, tokens: int) -> None:
        described = json.dumps(attrs.asdict(shape))
        self._process = subprocess.Popen(
            [sys.executable, str(_PLAIN_LOOP), backend, described, str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def run(self, count: int) -> float:
        """Run this many batches; returns batches per second."""
        print(count, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it: it does when its input does."""
        self._process.communicate()
