"""Small language models whose texts have probabilities that are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import trio
from numpy.typing import NDArray

from trio_accel.patterns import Score

Rows = NDArray[np.float64]


class Chain:
    """A Markov chain: a token depends on the one before it alone."""

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
    """Each distribution depends on all tokens before; `alike` says how near it is to that of another seed."""

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
