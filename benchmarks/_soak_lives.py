"""Long-lived parts of the soak: streamed texts, accounts of a cluster, and a training."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel import cluster, train
from trio_accel.patterns import ContinuousBatcher, Last, RunningSequence, StepResult, open_parts
from trio_accel.programs import Array, Program

from ._soak_account import Account, Add, Additions

__all__ = ["Bank", "Prompt", "Texts", "Training", "Writer", "losses_of", "text_of", "weights_of_writer"]

_Numbers = npt.NDArray[np.float64]
_TOKENS, _CONTEXT, _HIDDEN = 32, 4, 48
_ACCOUNTS = 16
# Errors over which an addition is sent again, with its id.
_AGAIN = (ta.ActorError, ta.AccelError, cluster.NodeLostError, cluster.StoreError)
# Steps of a training, from one checkpoint to the next, and after which a trainer is closed and opened again.
_STEPS, _EVERY, _REOPENED = 60, 10, 25


def weights_of_writer() -> tuple[_Numbers, _Numbers]:
    """Return the weights of `Writer`: whole numbers, with which sums are exact in any order."""
    rng = np.random.default_rng(3)
    first = rng.integers(-8, 9, (_CONTEXT * _TOKENS, _HIDDEN))
    return first.astype(np.float64), rng.integers(-8, 9, (_HIDDEN, _TOKENS)).astype(np.float64)


def _next_tokens(contexts: Array, first: Array, second: Array) -> Array:
    """Return the next token of each row of the last tokens: that with the highest score."""
    places = contexts + _TOKENS * np.arange(_CONTEXT)
    hidden = np.maximum(first[places].sum(axis=1), 0.0)
    return (hidden @ second).argmax(axis=1).astype(np.float64)


def _context(tokens: Sequence[int]) -> list[int]:
    return [*[0] * _CONTEXT, *tokens][-_CONTEXT:]


def text_of(prompt: Prompt) -> list[int]:
    """Write the text of a prompt with NumPy alone, undisturbed."""
    first, second = weights_of_writer()
    made: list[int] = []
    for _ in range(prompt.most):
        context = np.array([_context([*prompt.tokens, *made])])
        made.append(int(_next_tokens(context, first, second)[0]))
    return made


class Writer:
    """A program that goes on with texts: a network with a hidden layer, over the last tokens."""

    def __init__(self, first: Array, second: Array) -> None:
        self.first, self.second = first, second

    @ta.programs.method(out=lambda contexts: (contexts.shape[:1], "float64"))
    def write(self, contexts: Array) -> Array:
        """Return the next token of each row."""
        return _next_tokens(contexts, self.first, self.second)


@attrs.frozen
class Prompt:
    """The beginning of a text.

    Attributes:
        tokens: How it begins.
        most: Tokens that are made.
    """

    tokens: tuple[int, ...]
    most: int


class Texts:
    """A program that writes texts through a continuous batcher.

    Args:
        program: The program.
    """

    def __init__(self, program: Program[Writer]) -> None:
        self._program = program
        self._batcher: ta.Ref[ContinuousBatcher[Prompt, int]]

    async def open_in(self, system: ta.System) -> None:
        """Start the batcher."""
        self._batcher = await system.spawn(
            ContinuousBatcher[Prompt, int], self._step, max_sequences=8, name="texts"
        )

    async def read(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Read a text; returns it, and as it is without disturbance."""
        tokens = tuple(map(int, rng.integers(0, _TOKENS, 3)))
        prompt = Prompt(tokens, int(rng.integers(5, 25)))
        async with open_parts(self._batcher, prompt) as stream:
            made = [token async for token in stream]
        return made, text_of(prompt)

    async def _step(self, batch: list[RunningSequence[Prompt, int]]) -> list[StepResult[int]]:
        contexts = np.array([_context([*one.item.tokens, *one.parts]) for one in batch])
        made: ta.AccelRef = await self._program.ask(Writer.write, contexts)
        tokens = [int(token) for token in await made.to_host()]
        return [
            Last([token]) if len(one.parts) + 1 == one.item.most else [token]
            for one, token in zip(batch, tokens, strict=True)
        ]


class Bank:
    """Durable accounts on the nodes of a cluster.

    Args:
        nodes: Its nodes.
        members: The cluster.

    Attributes:
        acknowledged: The numbers whose addition was answered, by account.
        errors: Errors over which an addition was sent again, by their classes.
        lost: Numbers that were acknowledged and are not there, in all.
        twice: Numbers that are there more than once, or that nobody has added.
    """

    def __init__(self, nodes: cluster.LocalNodes, members: cluster.Cluster) -> None:
        self._nodes, self._cluster = nodes, members
        self._numbers = itertools.count()
        self._open: defaultdict[str, set[int]] = defaultdict(set)
        self.acknowledged: defaultdict[str, list[int]] = defaultdict(list)
        self.errors: Counter[str] = Counter()
        self.lost = 0
        self.twice = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of its nodes are there."""
        return len(self._cluster.members) == 2

    def agents(self) -> list[int]:
        """Return the processes of the running agents."""
        return [self._nodes.pid(member.name) for member in self._cluster.members]

    async def add(self, rng: np.random.Generator) -> None:
        """Add a new number to an account, once."""
        name, number = f"account-{rng.integers(_ACCOUNTS)}", next(self._numbers)
        self._open[name].add(number)
        await self._send(name, number)
        if rng.random() < 0.1:
            # Whoever has missed the answer sends the same again.
            await self._ask(name, number)

    async def _send(self, name: str, number: int) -> None:
        while True:
            try:
                await self._ask(name, number)
            except _AGAIN as error:
                self.errors[type(error).__name__] += 1
                await trio.sleep(0.05)
            else:
                break
        self._open[name].discard(number)
        self.acknowledged[name].append(number)

    async def _ask(self, name: str, number: int) -> None:
        await self._cluster.entity(Account, name).ask(Add(number), id=f"add-{number}")

    async def check(self) -> list[str]:
        """Send what has no answer yet again, and compare all accounts; returns what is wrong, in words."""
        for name, unanswered in self._open.items():
            for number in sorted(unanswered):
                await self._send(name, number)
        found: list[str] = []
        self.lost = self.twice = 0
        for name, numbers in self.acknowledged.items():
            wanted, there = (
                Counter(numbers),
                Counter(await self._cluster.entity(Account, name).ask(Additions())),
            )
            lost, twice = (wanted - there).total(), (there - wanted).total()
            self.lost += lost
            self.twice += twice
            if lost or twice:
                found.append(f"{name}: {lost} additions lost, {twice} counted twice or not asked for")
        return found


class _Net(train.CallModule):
    """A network with a hidden layer, so wide that a kill often finds a step on the devices."""

    def initial(self, rng: np.random.Generator) -> dict[str, _Numbers]:
        shapes: dict[str, tuple[int, ...]] = {"w1": (128, 2048), "b1": (2048,), "w2": (2048, 4), "b2": (4,)}
        return {name: rng.normal(0, 0.03, shape) for name, shape in shapes.items()}

    def loss(self, parameters: Any, batch: Any) -> Any:
        hidden = ta.nn.relu(batch["x"] @ parameters["w1"] + parameters["b1"])
        return ta.nn.cross_entropy(hidden @ parameters["w2"] + parameters["b2"], batch["y"])


def _batches(first: int) -> Iterator[dict[str, Any]]:
    for number in itertools.count(first):
        rng = np.random.default_rng(number)
        yield {"x": rng.normal(size=(256, 128)), "y": rng.integers(0, 4, 256)}


def _config(checkpoint: train.Checkpoint | None) -> train.Config:
    precision = train.Precision("float64", master="float64")
    return train.Config(
        optimizer=train.sgd(0.1, momentum=0.5), precision=precision, checkpoint=checkpoint, replays=100
    )


async def losses_of(system: ta.System, steps: int = _STEPS) -> list[float]:
    """Train on two devices that nothing disturbs; returns the loss of each step."""
    options = ta.DeviceOptions(isolation="inline")
    async with (
        system.open_device("cpu", options=options) as first,
        system.open_device("cpu", options=options) as second,
        train.open_trainer([first, second], _Net, _config(None)) as trainer,
    ):
        return [step.loss async for step in trainer.steps(_batches, until=steps)]


class Training:
    """A training on two devices, with checkpoints, that begins anew when it is over.

    Args:
        devices: Its ranks.
        folder: Where the checkpoints are written to.
        losses: The loss of each step without disturbance.

    Attributes:
        devices: Its ranks.
        steps: Steps that were committed.
        replays: How often a step was done again.
        errors: Number of errors that ended a trainer, by class.
        wrong: Descriptions of all faults.
        lost: Number of steps that were left out.
        twice: Number of steps that were committed twice.
    """

    def __init__(self, devices: Sequence[ta.Device], folder: Path, losses: Sequence[float]) -> None:
        self.devices, self._folder, self._losses = devices, folder, losses
        self._round = 0
        self._last = 0
        self.steps = self.replays = self.lost = self.twice = 0
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, patience: float, lost: tuple[type[Exception], ...]) -> None:
        """Train until it is cancelled.

        Args:
            patience: Seconds after which a step counts as one without an outcome.
            lost: Errors with which a trainer may end when workers are lost.
        """
        while True:
            folder = self._folder / f"training-{self._round}"
            checkpoint = train.Checkpoint(folder, every=_EVERY, keep=2)
            try:
                with trio.move_on_after(patience) as scope:
                    await self._go_on(checkpoint, scope, patience)
                if scope.cancelled_caught:
                    self.wrong.append(
                        f"step {self._last + 1} of the training: no outcome within {patience:g} s"
                    )
            except lost as error:
                self.errors[type(error).__name__] += 1
            if self._last == len(self._losses):
                await trio.to_thread.run_sync(shutil.rmtree, folder)
                self._round += 1
                self._last = 0
            await trio.lowlevel.checkpoint()

    async def _go_on(self, checkpoint: train.Checkpoint, scope: trio.CancelScope, patience: float) -> None:
        async with train.open_trainer(self.devices, _Net, _config(checkpoint)) as trainer:
            wanted = trainer.progress.step + 1
            # Steps after the last checkpoint are done again, and no step is left out.
            # The newest checkpoint may not have been complete.
            if not max(self._last - 2 * _EVERY, 0) < wanted <= self._last + 1:
                kind = "lost" if wanted > self._last + 1 else "twice"
                setattr(self, kind, getattr(self, kind) + 1)
                self.wrong.append(f"the training goes on with step {wanted} after step {self._last}")
            count = 0
            async for step in trainer.steps(_batches, until=len(self._losses)):
                scope.deadline = trio.current_time() + patience
                self._take(step, wanted)
                wanted = step.number + 1
                count += 1
                if count == _REOPENED:
                    break
            if count:
                await trainer.save()

    def _take(self, step: train.Step, wanted: int) -> None:
        self.lost += max(step.number - wanted, 0)
        self.twice += step.number < wanted
        self._last = step.number
        self.steps += 1
        self.replays += step.replays
        loss = self._losses[step.number - 1]
        if step.number != wanted or step.loss != loss:
            self.wrong.append(
                f"step {step.number} of the training: loss {step.loss!r}, not {loss!r} of {wanted}"
            )
