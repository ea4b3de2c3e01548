"""Sequences of a model in one batch: the step of a `ContinuousBatcher`, over `Pages`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import TypeAlias

import attrs
from model import Model, Run, Sampling
from text import Loaded

import trio_accel as ta
from trio_accel.patterns import ContinuousBatcher, Last, Pages, PageTable, RunningSequence, StepResult

__all__ = ["Generation", "Prompt", "open_generation"]

_Sequence: TypeAlias = RunningSequence["Prompt", int]
_Batcher: TypeAlias = ContinuousBatcher["Prompt", int]


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """A text that the model is to continue.

    Attributes:
        tokens: The prompt, at least one token.
        most: The most tokens that are made.
        sampling: How they are chosen.
        tenant: Whose share it counts for.
    """

    tokens: list[int]
    most: int
    sampling: Sampling
    tenant: str = ""

    def length(self) -> int:
        """Count its tokens."""
        return len(self.tokens)


class _Shown(ta.Actor):
    """Shows the figures of pages in the metrics."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        context.show_readings(self._pages.readings)
        yield


@attrs.define(eq=False)
class Generation:
    """A model that goes on with many prompts at once.

    Attributes:
        loaded: The model's text, name and shape.
        model: What computes.
        pages: Its cache.
        size: Tokens of a page.
        batcher: What is asked: `ta.patterns.open_parts` of it has the tokens of a `Prompt`.
    """

    loaded: Loaded
    model: Model
    pages: Pages
    size: int
    batcher: ta.Ref[_Batcher] = attrs.field(init=False)

    @property
    def most(self) -> int:
        """Tokens that a sequence can have: those of its prompt, and those that are made."""
        return min(self.loaded.config.context, self.pages.count * self.size)

    async def step(self, batch: list[_Sequence]) -> list[StepResult[int]]:
        """Have the model make one step of each sequence. A step that failed is made again: see `Run`."""
        runs = {one: run for one in batch if (run := await self._run(one))}
        tokens = dict(zip(runs, await self.model.step(list(runs.values())) if runs else [], strict=True))
        for one, run in runs.items():
            one.state.wrote(run.tokens)
        return [self._result(one, tokens.get(one, 0)) for one in batch]

    def cost(self, prompt: Prompt) -> int:
        """Pages that a sequence may need in the end, so that no step finds none."""
        return -(-(prompt.length() + prompt.most) // self.size)

    async def _run(self, sequence: _Sequence) -> Run | None:
        """Return the part that a sequence computes now; None where another one has computed it already."""
        prompt = sequence.item
        if sequence.state is None:
            sequence.state = self.pages.open(prompt.tokens)
        table: PageTable = sequence.state
        end = sequence.done + sequence.chunk
        if end <= table.length:
            return None
        if table.room < end:
            await table.reserve(end)
        # An equal beginning, such as the message of the system, is in the pages already, and is left out.
        made = [place - prompt.length() for place in (table.length, end)]
        tokens = [*prompt.tokens[table.length : end], *sequence.parts[max(made[0], 0) : max(made[1], 0)]]
        return Run(tokens=tokens, start=table.length, pages=table.pages, sampling=prompt.sampling)

    def _result(self, sequence: _Sequence, token: int) -> StepResult[int]:
        """Return the tokens that a sequence gets: none inside of its prompt, and not the one that ends it."""
        if not sequence.gives_part:
            return []
        if token in self.loaded.text.ends:
            return Last()
        return Last([token]) if len(sequence.parts) + 1 == sequence.item.most else [token]

    def leave(self, sequence: _Sequence) -> None:
        """Give pages back."""
        if sequence.state is not None:
            sequence.state.close()


@asynccontextmanager
async def open_generation(
    system: ta.System,
    model: Model,
    loaded: Loaded,
    *,
    weights: Mapping[str, float] | None = None,
    sequences: int = 64,
    positions: int = 512,
) -> AsyncGenerator[Generation, None]:
    """Open the batcher of a model.

    Args:
        system: Where it runs.
        model: The model.
        loaded: Its text, name and shape.
        weights: Shares of the tenants; None for any tenant, with equal shares.
        sequences: The most sequences in a step.
        positions: The most tokens in a step.
    """
    size = model.caches[0].shape[1]
    made = Generation(loaded, model, Pages(model.caches, size=size), size)
    made.batcher = await system.spawn(
        _Batcher,
        made.step,
        length=Prompt.length,
        cost=made.cost,
        max_cost=made.pages.count,
        tenant=attrgetter("tenant"),
        weights=weights,
        max_sequences=sequences,
        max_positions=positions,
        leave=made.leave,
        name="batcher",
    )
    await system.spawn(_Shown, made.pages, name="pages")
    yield made
