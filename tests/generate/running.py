"""Sequences that run together, without the package's batcher: as the tests want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from llama import Config
from model import GREEDY, Model, Run, Sampling

TINY = Config(
    layers=2, heads=6, groups=2, width=8, inner=40, words=300, context=128, base=1000.0, epsilon=1e-5
)
FORWARDS = ("numpy", "torch", "operations")


@attrs.define
class Sequenced:
    """A sequence: its prompt and then what was made, and how much of it is in the cache."""

    tokens: list[int]
    pages: list[int]
    prompt: int
    sampling: Sampling = GREEDY
    done: int = 0

    @property
    def made(self) -> list[int]:
        return self.tokens[self.prompt :]


async def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    most: int,
    *,
    chunk: int = 10_000,
    end: int = -1,
    seed: int = 0,
    samplings: Sequence[Sampling] | None = None,
    late: int = 0,
) -> list[list[int]]:
    """Run sequences together, pages in any order, and each `late` steps after the one before."""
    pages, size = model.caches[0].shape[:2]
    free = np.random.default_rng(seed).permutation(pages).tolist()
    running: list[Sequenced] = []
    for number, prompt in enumerate(prompts):
        own = [free.pop() for _ in range(-(-(len(prompt) + most) // size))]
        how = GREEDY if samplings is None else samplings[number]
        running.append(Sequenced(list(prompt), own, len(prompt), how))
    steps = 0
    while True:
        live = [one for one in running if len(one.made) < most and one.made[-1:] != [end]]
        if not live:
            return [one.made for one in running]
        now: list[Any] = [one for one in live if steps >= late * running.index(one)]
        runs = [
            Run(
                tokens=one.tokens[one.done : one.done + chunk],
                start=one.done,
                pages=one.pages,
                sampling=one.sampling,
            )
            for one in now
        ]
        steps += 1
        for one, run, token in zip(now, runs, await model.step(runs), strict=True):
            one.done += len(run.tokens)
            if one.done == len(one.tokens):
                one.tokens.append(token)
