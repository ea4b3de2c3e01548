"""Sequences of a model in one batch: the step of a `ContinuousBatcher`, over `Pages`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
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


class _Shown(ta.Actor):
    """Shows the figures of pages in the metrics."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        context.show_readings(self._pages.readings)
        yield


@attrs.frozen(eq=False)
class _Steps:
    """The step that the batcher calls, over a model and its pages."""

    loaded: Loaded
    model: Model
    pages: Pages

    async def step(self, batch: list[_Sequence]) -> list[StepResult[int]]:
        """Have the model make one step of each sequence. A step that failed is made again: see `Run`."""
        made = [await _run(one, self.pages) for one in batch]
        runs = {number: run for number, run in enumerate(made) if run is not None}
        tokens = dict(zip(runs, await self.model.step(list(runs.values())) if runs else [], strict=True))
        for number, run in runs.items():
            batch[number].state.wrote(run.tokens)
        return [self.result(one, tokens.get(number, 0)) for number, one in enumerate(batch)]

    def result(self, sequence: _Sequence, token: int) -> StepResult[int]:
        """Return the tokens that a sequence gets: none inside of its prompt, and not the one that ends it."""
        if not sequence.gives_part:
            return []
        if token in self.loaded.text.ends:
            return Last()
        return Last([token]) if len(sequence.parts) + 1 == sequence.item.most else [token]

    def length(self, prompt: Prompt) -> int:
        """Positions of a prompt."""
        return len(prompt.tokens)

    def cost(self, prompt: Prompt) -> int:
        """Pages that a sequence may need in the end, so that no step finds none."""
        return -(-(len(prompt.tokens) + prompt.most) // self.model.caches[0].shape[1])

    def tenant(self, prompt: Prompt) -> str:
        """Whose share a prompt counts for."""
        return prompt.tenant

    def leave(self, sequence: _Sequence) -> None:
        """Give pages back."""
        if sequence.state is not None:
            sequence.state.close()


@attrs.frozen(eq=False)
class Generation:
    """A model that goes on with many prompts at once.

    Attributes:
        loaded: The model's text, name and shape.
        model: What computes.
        pages: Its cache.
        batcher: What is asked: `ta.patterns.open_parts` of it has the tokens of a `Prompt`.
    """

    loaded: Loaded
    model: Model
    pages: Pages
    batcher: ta.Ref[_Batcher]

    @property
    def most(self) -> int:
        """Tokens that a sequence can have: those of its prompt, and those that are made."""
        return min(self.loaded.config.context, self.pages.count * self.model.caches[0].shape[1])


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
    pages = Pages(model.caches, size=model.caches[0].shape[1])
    steps = _Steps(loaded, model, pages)
    batcher = await system.spawn(
        _Batcher,
        steps.step,
        length=steps.length,
        cost=steps.cost,
        max_cost=pages.count,
        tenant=steps.tenant,
        weights=weights,
        max_sequences=sequences,
        max_positions=positions,
        leave=steps.leave,
        name="batcher",
    )
    await system.spawn(_Shown, pages, name="pages")
    yield Generation(loaded, model, pages, batcher)


async def _run(sequence: _Sequence, pages: Pages) -> Run | None:
    """Return the part that a sequence computes now; None where another one has computed it already."""
    prompt = sequence.item
    if sequence.state is None:
        sequence.state = pages.open(prompt.tokens)
    table: PageTable = sequence.state
    end = sequence.done + sequence.chunk
    if end <= table.length:
        return None
    if table.room < end:
        await table.reserve(end)
    # An equal beginning, such as the message of the system, is in the pages already, and is left out.
    tokens = [*prompt.tokens, *sequence.parts][table.length : end]
    return Run(tokens=tokens, start=table.length, pages=table.pages, sampling=prompt.sampling)
