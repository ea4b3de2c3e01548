"""Small language models with texts of known probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import ContinuousBatcher, Generate, Score, SpeculativeStep, Submit

Rows = NDArray[np.float64]
Model = Callable[[Score], Awaitable[Any]]
Batcher = ta.Ref[ContinuousBatcher[Generate, int]]


class Chain:
    """A Markov chain: a token depends only on the one before it."""

    def __init__(self, table: Rows) -> None:
        self.table = table
        self.calls: list[Score] = []

    async def __call__(self, score: Score) -> Rows:
        await trio.lowlevel.checkpoint()
        self.calls.append(score)
        return self.table[list(score.tokens[-score.count :])]

    def chance(self, first: int, text: Iterable[int]) -> float:
        """The probability of a text after a token."""
        pairs = itertools.pairwise([first, *text])
        return float(np.prod([self.table[pair] for pair in pairs]))


def random_chain(seed: int, vocabulary: int, *, zeros: int = 0) -> Chain:
    """A chain with some impossible steps."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(vocabulary, 0.8), size=vocabulary)
    for row in table:
        row[rng.choice(vocabulary, zeros, replace=False)] = 0
    return Chain(table / table.sum(axis=1, keepdims=True))


class Remembering:
    """Each distribution depends on all tokens before; `alike` is its similarity to that of another seed."""

    def __init__(
        self, seed: int, vocabulary: int, *, near: Remembering | None = None, alike: float = 0.0
    ) -> None:
        self.seed, self.vocabulary, self.near, self.alike = seed, vocabulary, near, alike
        self.calls = 0

    def row(self, tokens: tuple[int, ...]) -> Rows:
        own = np.random.default_rng([self.seed, *tokens]).dirichlet(np.full(self.vocabulary, 0.5))
        return own if self.near is None else self.alike * self.near.row(tokens) + (1 - self.alike) * own

    async def __call__(self, score: Score) -> Rows:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        length = len(score.tokens)
        return np.array([self.row(score.tokens[: length - back]) for back in reversed(range(score.count))])


class Many:
    """A model of many texts at once, from a model of one; it may be lost at some of its calls."""

    def __init__(self, model: Model, losses: frozenset[int] = frozenset()) -> None:
        self.model, self.losses = model, losses
        self.sizes: list[int] = []

    async def __call__(self, scores: list[Score]) -> list[Any]:
        self.sizes.append(len(scores))
        rows = [await self.model(score) for score in scores]
        if len(self.sizes) in self.losses:
            raise ta.ContextLostError("killed", device="cpu:0")
        return rows


def step_of(draft: Model, verifier: Model, **options: Any) -> SpeculativeStep:
    return SpeculativeStep(Many(verifier), Many(draft), **options)


def length_of(request: Generate) -> int:
    return max(len(request.prompt), 1)


async def batcher_of(system: ta.System, step: SpeculativeStep, **options: Any) -> Batcher:
    batcher = await system.spawn(ContinuousBatcher[Generate, int], step, length=length_of, **options)
    # From here on it waits, so that requests which come in one turn of the loop begin in one step.
    await wait_all_tasks_blocked()
    return batcher


async def tokens_of(batcher: Batcher, requests: list[Generate]) -> list[tuple[int, ...]]:
    """The texts of simultaneous requests."""
    found: dict[int, tuple[int, ...]] = {}

    async def ask(number: int, request: Generate) -> None:
        found[number] = await batcher.ask(Submit(request))

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            nursery.start_soon(ask, number, request)
    return [found[number] for number in range(len(requests))]
