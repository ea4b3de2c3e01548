"""Serve a sentence encoder in the package's operations, while its context is poisoned every few seconds.

`python examples/encode/encode_operations.py --random 2` needs neither a model nor another package.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio
from encode import check_weights, in_thread, on_host, run_program
from encode_faults import Check
from minilm import Shape, weights_of
from minilm_files import InputError, find_model, read_sentences
from minilm_float64 import embed_one
from minilm_operations import OperationsEncoder, load_encoder

import trio_accel as ta
from trio_accel.patterns import Batcher, Submit

__all__ = ["OPTIONS", "Served", "serve", "write_random"]

Tokens: TypeAlias = npt.NDArray[np.int64]
Embeddings: TypeAlias = npt.NDArray[np.float32]

RANDOM = Shape(layers=1, heads=4, width=64, inner=256, words=1000, places=64, types=2, epsilon=1e-12)
OPTIONS = ta.DeviceOptions(
    isolation="process",
    # Batches do not cause the faults, so even a suspected batch may run again.
    retry=1,
    retry_suspects=True,
    # The faults are deliberate, so the supervisor must not wait.
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)
# Seconds to wait for an answer after a fault.
PATIENCE = 60.0
# The number of sentences also computed in float64, and the largest allowed difference.
COMPARED, TOLERANCE = 6, 1e-5
# The largest allowed change of an embedding. Batches of other sizes may round differently.
CHANGE = 1e-6


@attrs.frozen(kw_only=True)
class Served:
    """The results of a run under faults.

    Attributes:
        requests: The number of requests by all clients.
        answered: The number of requests with an embedding as answer.
        errors: The number of other requests, by the class of their error.
        change: The largest difference of an embedding from its value before the faults.
        same: The number of embeddings with the same bits as before the faults.
        seconds: The duration.
        losses: The number of lost contexts.
        recoveries: For each fault, the seconds to the next context's first answer.
    """

    requests: int
    answered: int
    errors: Mapping[str, int]
    change: float
    same: int
    seconds: float
    losses: int
    recoveries: Sequence[float]

    def checks(self) -> list[Check]:
        """Return the conditions that must hold."""
        return [
            Check(name="requests lost", value=self.requests - self.answered, limit=0),
            Check(name="faults not felt", value=len(self.recoveries) - self.losses, limit=0),
            Check(name="difference from the embeddings before the faults", value=self.change, limit=CHANGE),
        ]

    def __str__(self) -> str:
        again = f", again after {median(self.recoveries) * 1e3:.0f} ms" if self.recoveries else ""
        errors = "".join(f", {number} {name}" for name, number in self.errors.items())
        return (
            f"{self.losses} contexts lost, {self.answered} of {self.requests} requests answered{errors}"
            f"{again}; {self.same} embeddings with the same bits"
        )


@attrs.define(eq=False)
class _Clients:
    """Tasks that request the embeddings of sentences, one after another."""

    device: ta.Device
    batcher: ta.Ref[Batcher[Tokens, Embeddings]]
    sentences: Sequence[Tokens]
    before: Embeddings
    requests: int = 0
    same: int = 0
    changes: list[float] = attrs.field(factory=list[float])
    errors: Counter[str] = attrs.field(factory=Counter[str])
    recoveries: list[float] = attrs.field(factory=list[float])
    is_over: bool = False
    _answered: trio.Event = attrs.field(factory=trio.Event)

    async def ask(self, client: int) -> None:
        """Send requests until the run is over."""
        number = client
        while not self.is_over:
            number = (number + 1) % len(self.sentences)
            self.requests += 1
            try:
                found = await self.batcher.ask(Submit(self.sentences[number]))
            except ta.DeviceLostError:
                raise
            except (ta.AccelError, ta.ActorError) as error:
                self.errors[type(error).__name__] += 1
                continue
            self.same += np.array_equal(found, self.before[number])
            self.changes.append(float(np.abs(found - self.before[number]).max()))
            self._answered.set()
            self._answered = trio.Event()

    async def poison(self, every: float, faults: int) -> None:
        """Poison the context during a batch, and measure the time until the next context answers."""
        for _ in range(faults):
            await trio.sleep(every)
            start, generation = trio.current_time(), self.device.generation
            ta.testing.inject_fault(self.device, ta.graphs.Replay, poison=True)
            with trio.fail_after(PATIENCE):
                while self.device.generation == generation:
                    await self._answered.wait()
            self.recoveries.append(trio.current_time() - start)
        await trio.sleep(every)
        self.is_over = True


async def serve(
    system: ta.System,
    encoder: OperationsEncoder,
    sentences: Sequence[Tokens],
    *,
    clients: int,
    faults: int,
    every: float,
) -> tuple[Embeddings, Served]:
    """Run clients that request embeddings from a batcher while contexts are lost.

    Args:
        system: The system of the device.
        encoder: The encoder; its device computes in a worker process, with `OPTIONS`.
        sentences: The sentences, which each client requests in turn.
        clients: The number of concurrent clients.
        faults: The number of faults.
        every: The seconds between two faults.

    Returns:
        The embeddings before the faults, and the outcomes of the requests.
    """
    batcher = await system.spawn(
        Batcher, encoder.embed, max_size=encoder.batch, max_in_flight=1, bucket=encoder.check
    )
    before = np.stack([(await encoder.embed([sentence]))[0] for sentence in sentences])
    load = _Clients(encoder.device, batcher, sentences, before)
    start, losses = trio.current_time(), encoder.device.losses
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.poison, every, faults)
        for client in range(clients):
            nursery.start_soon(load.ask, client)
    await batcher.stop()
    return before, Served(
        requests=load.requests,
        answered=len(load.changes),
        errors=load.errors,
        change=max(load.changes, default=float("nan")),
        same=load.same,
        seconds=trio.current_time() - start,
        losses=encoder.device.losses - losses,
        recoveries=load.recoveries,
    )


def random_sentences(count: int, words: int) -> list[Tokens]:
    """Make sentences of 3 to 40 tokens."""
    random = np.random.default_rng(1)
    return [random.integers(0, words, length) for length in random.integers(3, 41, count)]


async def write_random(device: ta.Device, path: Path, shape: Shape) -> None:
    """Write random weights to a file, with the names and the distribution of a new model."""
    random = np.random.default_rng(0)
    arrays: dict[str, ta.AccelRef] = {}
    for name, sizes in weights_of(shape).items():
        numbers = random.standard_normal(sizes, np.float32) * np.float32(0.02)
        arrays[name] = await device.put(numbers + np.float32("LayerNorm.weight" in name))
    await ta.weights.save(path, arrays)


async def worst(
    device: ta.Device, path: Path, shape: Shape, sentences: Sequence[Tokens], found: Embeddings
) -> float:
    """Return the largest difference between some embeddings and float64 references."""
    weights = await on_host(await ta.weights.load(device, path, names=weights_of(shape)))
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    pairs = list(zip(sentences, found, strict=True))[:COMPARED]
    differences = [
        np.abs(embed_one(wide, shape, sentence) - embedding).max() for sentence, embedding in pairs
    ]
    return float(np.max(differences))


async def main(given: argparse.Namespace) -> int:
    """Return 0 if every check holds, else 1."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.random:
            path, shape = folder / "model.safetensors", attrs.evolve(RANDOM, layers=given.random)
            sentences = random_sentences(24, shape.words)
        else:
            model = await in_thread(find_model, given.model)
            await check_weights(model)
            path, shape = model.weights, model.shape
            _, text = await in_thread(read_sentences, given.text)
            sentences = [model.batch([sentence]).ids[0] for sentence in text]
        system = await stack.enter_async_context(ta.open_system("encode"))
        try:
            device = await system.open_device(given.backend, options=OPTIONS)
        except (ta.NotSupportedError, ValueError) as error:
            raise InputError(f"cannot open a device: {error}") from error
        if given.random:
            await write_random(device, path, shape)
        encoder = await load_encoder(device, path, shape)
        print(f"{len(sentences)} sentences on {device.name}: {shape.layers} layers, {shape.width} numbers")
        before, served = await serve(
            system, encoder, sentences, clients=given.clients, faults=given.faults, every=given.every
        )
        difference = await worst(device, path, shape, sentences, before)
    print(served)
    checks = [
        Check(name="difference from NumPy in float64", value=difference, limit=TOLERANCE),
        *served.checks(),
    ]
    for check in checks:
        mark = "right" if check.is_ok else "WRONG"
        print(f"{mark}: {check.name} {check.value:.3g}, allowed {check.limit:.3g}")
    return 0 if all(check.is_ok for check in checks) else 1


def run(given: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a BERT model, as for encode.py")
    parser.add_argument(
        "--random", type=int, default=0, help="layers of a random model instead of a real one"
    )
    parser.add_argument("--text", type=Path, help="text in UTF-8 (default: the beginning of a novel)")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients (default: 16)")
    parser.add_argument("--faults", type=int, default=3, help="number of faults (default: 3)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults (default: 2)")
    parser.add_argument("--backend", help="device, such as cpu or cuda:1 (default: the best one)")
    found = parser.parse_args(given)
    if not (found.random >= 0 and 1 <= found.clients <= 64 and 0 <= found.faults <= 64 and found.every > 0):
        parser.error("--random, --clients, --faults or --every is out of range")
    return run_program("encode_operations", main, found)


if __name__ == "__main__":
    raise SystemExit(run())
