"""Sequences of a model in one batch: the step of a `ContinuousBatcher`, over `Pages`."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import outcome
import trio
from constraints import Constraint, ConstraintError, Grammar
from llama import SLOTS, checksum
from model import Model, Run, Sampling, joined_masks
from text import Loaded

import trio_accel as ta
from trio_accel.patterns import (
    ContinuousBatcher,
    Last,
    Pages,
    PagesFullError,
    PageTable,
    RunningSequence,
    StepResult,
)

__all__ = ["Generation", "Prompt", "open_generation"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Sequence: TypeAlias = RunningSequence["Prompt", int]
_Batcher: TypeAlias = ContinuousBatcher["Prompt", int]
_Mask: TypeAlias = npt.NDArray[np.int32]
_Errors: TypeAlias = dict[_Sequence, outcome.Error]
_NOTHING_WRONG: Mapping[_Sequence, outcome.Error] = {}


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """A text to continue by the model.

    Attributes:
        tokens: The prompt, at least one token.
        most: The maximum number of tokens to make.
        sampling: How they are chosen.
        tenant: The tenant, for fair shares and for sharing pages.
        grammar: The required form of the text; None for any.
        is_asked: Whether its tokens are instances of `Token`.
    """

    tokens: list[int]
    most: int
    sampling: Sampling
    tenant: str = ""
    grammar: Grammar | None = None
    is_asked: bool = False

    def length(self) -> int:
        """Count its tokens."""
        return len(self.tokens)


class _Shown(ta.Actor):
    """An actor that shows the figures of pages in the metrics."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        context.show_readings(self._pages.readings)
        yield


def _has_grammar(sequences: Iterable[_Sequence]) -> bool:
    return any(one.item.grammar is not None and one.gives_part for one in sequences)


# The number of pages to reserve in advance if many are free, and of random numbers to draw at a time.
_MORE_PAGES, _MORE_DRAWS = 4, 64
# One in this many pages stays free for short new prompts.
_SPARE = 64


class WrongTokensError(ta.NotExecutedError):
    """A step took tokens that the previous step has not chosen, so it must run again."""


class _Company:
    """Sequences with one token each in a step.

    Most steps have the same sequences as the previous step. So their data is in arrays, and changes only when
    a sequence gets a page.

    Attributes:
        sequences: The sequences.
        tables: The pages of each.
        rooms: The number of positions in the pages of each.
        lasts: The position of the last input token of each.
        asked: The lines of the sequences with `Prompt.is_asked`; None if there are none.
        is_constrained: Whether some have a grammar.
    """

    def __init__(self, sequences: list[_Sequence], size: int) -> None:
        self.sequences, self._size = sequences, size
        self.lines: _Ints = np.arange(len(sequences))
        lasts = [one.item.length() + one.item.most - 2 for one in sequences]
        self.lasts: _Ints = np.array(lasts, np.int64)
        self.tables: _Ints = np.zeros((len(sequences), max(lasts) // size + 1), np.int64)
        self.rooms: _Ints = np.zeros(len(sequences), np.int64)
        for line in range(len(sequences)):
            self._look_at(line)
        hows = [one.item.sampling for one in sequences]
        asked: _Ints = np.flatnonzero([one.item.is_asked for one in sequences])
        self.asked = asked if len(asked) else None
        self.is_constrained = any(one.item.grammar is not None for one in sequences)
        self._hows: list[Sampling] | None = hows if any(how.temperature > 0 for how in hows) else None
        self._draws = np.zeros((len(sequences), _MORE_DRAWS), np.float32)
        # The position of each sequence's first draw; initially, there are no draws.
        self._drawn: _Ints = np.full(len(sequences), -_MORE_DRAWS)

    def _look_at(self, line: int) -> None:
        table: PageTable = self.sequences[line].state
        pages = table.pages[: self.tables.shape[1]]
        self.tables[line, : len(pages)] = pages
        self.rooms[line] = table.room

    async def reserve(self, starts: _Ints, pages: Pages, spare: int) -> None:
        """Reserve pages for these positions, and leave some free unless a sequence is the only one.

        Raises:
            PagesFullError: There are not enough pages.
        """
        lines = np.flatnonzero(starts >= self.rooms).tolist()
        free = pages.free - spare * (len(self.sequences) > 1)
        if len(lines) > free:
            raise PagesFullError("on the device", free=max(free, 0), requested=len(lines))
        more = _MORE_PAGES if free > 2 * _MORE_PAGES * len(lines) else 0
        for line in lines:
            most = min(int(starts[line]) + more * self._size, int(self.lasts[line]))
            await self.sequences[line].state.reserve(most + 1)
            self._look_at(line)

    def places(self, starts: _Ints) -> _Ints:
        """Return the slots of these positions in the cache."""
        pages = self.tables[self.lines, starts // self._size]
        return pages * self._size + starts % self._size

    def sampling(self, starts: _Ints) -> npt.NDArray[np.float32] | None:
        """Return the sampling of the token after each position; see `Llama.step`."""
        if self._hows is None:
            return None
        places = starts + 1 - self._drawn
        # A repeated step may precede the first step of this company.
        for line in np.flatnonzero((places < 0) | (places >= _MORE_DRAWS)).tolist():
            self._drawn[line] = starts[line] + 1
            self._draws[line] = self._hows[line].draws(int(starts[line]) + 1, _MORE_DRAWS)
        draws = self._draws[self.lines, starts + 1 - self._drawn]
        rows = [[how.temperature for how in self._hows], [how.top_p for how in self._hows], draws]
        return np.array(rows, np.float32)


@attrs.define(eq=False)
class _Made:
    """The tokens of a step.

    Attributes:
        sequences: Its sequences.
        place: The device's slot for the first sequence's token.
        tokens: The tokens, once they are known.
        ended: Set when the step has ended.
    """

    sequences: list[_Sequence]
    place: int
    tokens: npt.NDArray[np.int32] | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

    def places(self, sequences: list[_Sequence]) -> _Ints:
        """Return the device's slots for the tokens of these sequences; -1 for other sequences."""
        if sequences == self.sequences:
            return self.place + np.arange(len(sequences))
        found = {one: self.place + line for line, one in enumerate(self.sequences)}
        return np.array([found.get(one, -1) for one in sequences])


@attrs.define(eq=False)
class _Lane:
    """The sequences of one model, which has separate steps.

    Attributes:
        model: The model.
        count: The number of sequences.
        company: The sequences of its previous step, if each had one token.
        steps: The tokens of its last steps, as long as the device keeps them during the next step.
    """

    model: Model
    count: int = 0
    company: _Company | None = None
    steps: deque[_Made] = attrs.field(factory=lambda: deque([_Made([], 0)], SLOTS - 1))

    def sources(self, sequences: list[_Sequence], is_ahead: npt.NDArray[np.bool_]) -> tuple[_Made, _Ints]:
        """Return the step that chooses the tokens of the sequences in advance, and the device's slots.

        It is not always the newest one. With several models, two steps of a model may run, each with other
        sequences. If the other models' sequences end then, the next step has the sequences of both.

        Raises:
            WrongTokensError: No step has all of the sequences in advance.
        """
        if not is_ahead.any():
            return self.steps[-1], np.full(len(sequences), -1)
        for made in reversed(self.steps):
            places = made.places(sequences)
            if (places[is_ahead] >= 0).all():
                return made, np.where(is_ahead, places, -1)
        raise WrongTokensError("a step was called before the step that chooses its tokens; it runs again")


@attrs.define(eq=False)
class Generation:
    """A model that continues many prompts at once.

    A sequence stays with the model of its first step, even if it is set aside or the context is lost.

    Attributes:
        loaded: The model's text, name and shape.
        model: The model for sequences that begin from now on. `use` replaces it.
        pages: Its cache.
        size: The number of tokens in a page.
        recompute: Whether a set-aside sequence is computed again if the host lacks room for a copy. Its
            tokens may differ then, unless the model is exact.
        shares: Whether tenants share pages of common prefixes: see `Pages.open` for the information that this
            reveals.
        open: The number of running and waiting texts, by tenant. Callers of the batcher count and bound them.
        batcher: The batcher. `ta.patterns.open_parts` streams the tokens of a `Prompt` from it.
    """

    loaded: Loaded
    model: Model
    pages: Pages
    size: int
    recompute: bool = True
    shares: bool = False
    open: Counter[str] = attrs.field(factory=Counter[str], init=False)
    batcher: ta.Ref[_Batcher] = attrs.field(init=False)
    _running: int = attrs.field(default=0, init=False)
    _lanes: dict[Model, _Lane] = attrs.field(factory=dict[Model, _Lane], init=False)
    _bound: dict[_Sequence, _Lane] = attrs.field(factory=dict[Any, _Lane], init=False)
    _ended: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _reserving: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _constraints: dict[_Sequence, Constraint] = attrs.field(factory=dict[Any, Constraint], init=False)

    @property
    def most(self) -> int:
        """The maximum number of a sequence's tokens: its prompt, and its answer."""
        return min(self.loaded.config.context, self.pages.count * self.size)

    async def step(self, batch: list[_Sequence]) -> list[StepResult[int]]:
        """Compute one step of each sequence. The batcher repeats a failed step: see `Llama.step`."""
        try:
            return await self._step(batch)
        except ta.StaleRefError as error:
            stale = error
        # A lost copy damaged pages outside of all sequences, so the array as a whole cannot be read.
        await self.pages.heal()
        raise ta.NotExecutedError("pages were damaged by a lost copy; the step runs again") from stale

    async def _step(self, batch: list[_Sequence]) -> list[StepResult[int]]:
        self._running = len(batch)
        lanes = list(self._lanes.values())
        if len(lanes) == 1:
            return await self._step_of(lanes[0], batch)
        if any(one.is_prefilling for one in batch):
            return await self._prefill(batch)
        results = dict[_Sequence, StepResult[int]]()
        for lane in lanes:
            if part := [one for one in batch if self._bound[one] is lane]:
                results |= zip(part, await self._step_of(lane, part), strict=True)
        return [results[one] for one in batch]

    async def _step_of(self, lane: _Lane, batch: list[_Sequence]) -> list[StepResult[int]]:
        company = lane.company
        if company is None or company.sequences != batch:
            if any(one.is_prefilling for one in batch):
                return await self._prefill(batch)
            company = lane.company = _Company(batch, self.size)
        starts = np.array([one.done + one.steps_ahead for one in batch])
        going = starts <= company.lasts
        if going.all():
            return await self._decode(lane, company, starts)
        # A step called in advance cannot know yet that these sequences have their last tokens.
        rest = [one for one, is_going in zip(batch, going, strict=True) if is_going]
        results = dict(zip(rest, await self._step_of(lane, rest) if rest else [], strict=True))
        return [results.get(one, []) for one in batch]

    async def _decode(self, lane: _Lane, company: _Company, starts: _Ints) -> list[StepResult[int]]:
        """Run the model on one token of each sequence."""
        batch, width = company.sequences, lane.model.width
        # While the previous step is running, its tokens are only on the device.
        tokens = np.array([0 if one.steps_ahead else one.parts[-1] for one in batch])
        is_ahead = np.array([one.steps_ahead > 0 for one in batch])
        masks, wrong = None, _NOTHING_WRONG
        if self._reserving.locked() or company.is_constrained or (starts >= company.rooms).any():
            async with self._reserving:
                await company.reserve(starts, self.pages, self._kept)
                if company.is_constrained:
                    found, wrong = await trio.to_thread.run_sync(self._masks, batch)
                    masks = joined_masks([found.get(one) for one in batch])
        # Do not wait for anything before the request is sent, so that steps are sent in order.
        before, sources = lane.sources(batch, is_ahead)
        made = _Made(batch, (lane.steps[-1].place + width) % (SLOTS * width) if width else 0)
        lane.steps.append(made)
        rows = [tokens, starts, company.places(starts)]
        # The slots for tokens on the device limit the sequences of a step called in advance.
        if len(batch) <= width:
            rows += [sources, made.place + company.lines]
        tables = company.tables[:, : int(starts.max()) // self.size + 1]
        try:
            chosen = await lane.model.decode(
                np.array(rows), tables, company.sampling(starts), masks, company.asked
            )
            if is_ahead.any():
                await before.ended.wait()
                self._check(before, tokens, sources, chosen.sum)
            made.tokens = chosen.tokens
        finally:
            made.ended.set()
        listed, lasts = chosen.listed(company.asked), starts == company.lasts
        if self.loaded.text.ends.isdisjoint(listed) and not lasts.any() and not wrong:
            return [[token] for token in listed]
        return [
            wrong.get(one) or self._result(token, is_last)
            for one, token, is_last in zip(batch, listed, lasts.tolist(), strict=True)
        ]

    def _check(self, before: _Made, tokens: _Ints, sources: _Ints, found: int) -> None:
        """Raise an error if a step ran without the previous step's tokens, which failed or was late."""
        if before.tokens is not None:
            taken = np.where(sources < 0, tokens, before.tokens[np.maximum(sources - before.place, 0)])
            if checksum(taken) == found:
                return
        raise WrongTokensError("a step ran without the tokens of the previous step; it runs again")

    async def _prefill(self, batch: list[_Sequence]) -> list[StepResult[int]]:
        """Run the model on parts of prompts, and on one token of each other sequence."""
        # Equal pages may replace others, so the tables become outdated.
        self._forget_companies()
        runs = {one: run for one in batch if (run := await self._run(one))}
        masks, wrong = await trio.to_thread.run_sync(self._masks, runs) if _has_grammar(runs) else ({}, {})
        for one, mask in masks.items():
            runs[one] = attrs.evolve(runs[one], mask=mask)
        tokens = dict[_Sequence, int]()
        for lane in list(self._lanes.values()):
            if part := {one: run for one, run in runs.items() if self._bound[one] is lane}:
                tokens |= zip(part, await lane.model.step(list(part.values())), strict=True)
        # Record no tokens before all requests have returned, because a failed step is repeated as a whole.
        for one, run in runs.items():
            one.state.wrote(run.tokens)
        return [
            wrong.get(one) or self._result(tokens.get(one, 0), len(one.parts) + 1 == one.item.most)
            if one.gives_part
            else []
            for one in batch
        ]

    def _masks(self, sequences: Iterable[_Sequence]) -> tuple[dict[_Sequence, _Mask], _Errors]:
        """Return masks of the allowed next tokens, and errors of grammars that cannot continue. Blocking.

        Both depend only on the parts of a sequence, so a repeated step has the same masks.
        """
        masks, wrong = dict[_Sequence, _Mask](), _Errors()
        for one in sequences:
            grammar: Grammar | None = one.item.grammar
            if grammar is None or not one.gives_part:
                continue
            if one not in self._constraints:
                self._constraints[one] = grammar.begin()
            try:
                masks[one] = self._constraints[one].mask(one.parts)
            except ConstraintError as error:
                wrong[one] = outcome.Error(error)
        return masks, wrong

    async def _run(self, sequence: _Sequence) -> Run | None:
        """Return the part of a sequence to compute now; None if another sequence has already computed it."""
        prompt = sequence.item
        if sequence not in self._bound:
            self._bind(sequence)
        if sequence.state is None:
            sequence.state = self.pages.open(self._tokens(sequence), tenant=self._tenant(sequence))
        table: PageTable = sequence.state
        self._tell(sequence)
        end = sequence.done + sequence.chunk
        if end <= table.length:
            return None
        if table.room < end:
            await table.reserve(end)
        # Skip a common prefix, such as a system message, because the pages already contain it.
        return Run(
            tokens=self._tokens(sequence, table.length, end),
            start=table.length,
            pages=table.pages,
            sampling=prompt.sampling,
            is_asked=prompt.is_asked and sequence.gives_part,
        )

    def _result(self, token: int, is_last: bool) -> StepResult[int]:
        """Return the tokens for a sequence, without the end token."""
        if token in self.loaded.text.ends:
            return Last()
        return Last([token]) if is_last else [token]

    def _tell(self, sequence: _Sequence) -> None:
        """Record the tokens of a sequence in its pages.

        Equal pages may replace these pages, so no step with them may be running. Otherwise, a page of a
        repeated step could belong to another sequence by then.
        """
        table = sequence.state
        if table.length < sequence.done:
            table.wrote(self._tokens(sequence, table.length, sequence.done))

    def _tokens(self, sequence: _Sequence, begin: int = 0, end: int = sys.maxsize) -> list[int]:
        prompt, length = sequence.item.tokens, sequence.item.length()
        return [*prompt[begin:end], *sequence.parts[max(begin - length, 0) : max(end - length, 0)]]

    def _tenant(self, sequence: _Sequence) -> Hashable:
        """Return the key by which sequences share pages; models with other weights never share."""
        lane = self._bound.get(sequence)
        number = (self.model if lane is None else lane.model).number
        tenant = None if self.shares else sequence.item.tenant
        return (number, tenant) if number else tenant

    # Several models, which have different weights.

    def use(self, model: Model) -> None:
        """Use another model, with the same cache, for the sequences that begin from now on."""
        self.model = model
        self._ended.unpark_all()

    def count(self, model: Model) -> int:
        """Return the number of a model's running sequences."""
        return self._lanes[model].count if model in self._lanes else 0

    async def wait_unused(self, model: Model) -> None:
        """Wait until neither a running sequence nor a new one uses a model."""
        while self.model is model or model in self._lanes:
            await self._ended.park()

    def _bind(self, sequence: _Sequence) -> None:
        lane = self._lanes.setdefault(self.model, _Lane(self.model))
        lane.count += 1
        self._bound[sequence] = lane
        self._look_for_parts()

    def _unbind(self, sequence: _Sequence) -> None:
        lane = self._bound.pop(sequence, None)
        if lane is None:
            return
        lane.count -= 1
        if not lane.count:
            del self._lanes[lane.model]
            self._look_for_parts()
            self._ended.unpark_all()

    def _look_for_parts(self) -> None:
        # A mask depends on all earlier tokens. With several models, no step is called in advance (D232).
        for one in self._bound:
            one.needs_parts = one.item.grammar is not None or len(self._lanes) > 1

    def _forget_companies(self) -> None:
        for lane in self._lanes.values():
            lane.company = None

    # The methods of a `ta.patterns.Room`, by which the batcher distributes the pages.

    @property
    def total(self) -> int:
        """The number of pages."""
        return self.pages.count

    @property
    def free(self) -> int:
        """The number of free pages."""
        return self.pages.free

    @property
    def spare(self) -> int:
        """The number of pages to keep free: one for each running sequence, and some for short prompts."""
        return self._kept + self._running

    @property
    def _kept(self) -> int:
        return -(-self.pages.count // _SPARE)

    def held(self, sequence: _Sequence) -> int:
        """Return the number of pages that only this sequence uses."""
        return 0 if sequence.state is None else sequence.state.exclusive_pages

    def demand(self, sequence: _Sequence) -> int:
        """Return the number of pages that a sequence takes until its next token."""
        table: PageTable | None = sequence.state
        most = max(sequence.length, sequence.done) // self.size + 1
        if table is not None and not table.is_spilled:
            return max(most - len(table.pages), 0)
        if most <= self.pages.free or most > self.pages.count:
            return most
        # Look for pages that other sequences already have, which takes longer.
        return self.pages.demand(self._tokens(sequence), tenant=self._tenant(sequence))

    async def set_aside(self, sequence: _Sequence) -> None:
        """Copy the pages of a sequence to the host, or compute it again later."""
        table: PageTable | None = sequence.state
        # The tables of these sequences are outdated after this.
        self._forget_companies()
        if table is None:
            return
        self._tell(sequence)
        try:
            await table.spill()
        except (PagesFullError, ta.OutOfMemoryError):
            if not self.recompute:
                raise
            table.close()
            sequence.state = None
            sequence.begin_again(len(self._tokens(sequence)))

    async def bring_back(self, sequence: _Sequence) -> None:
        """Copy the pages of a sequence back to the device, if there are any."""
        self._forget_companies()
        if sequence.state is not None:
            await sequence.state.restore()

    def leave(self, sequence: _Sequence) -> None:
        """Release the pages of a sequence."""
        self._constraints.pop(sequence, None)
        self._unbind(sequence)
        if sequence.state is not None:
            self._tell(sequence)
            sequence.state.close()


@asynccontextmanager
async def open_generation(
    system: ta.System,
    model: Model,
    loaded: Loaded,
    *,
    weights: Mapping[str, float] | None = None,
    sequences: int = 64,
    positions: int | None = None,
    ahead: bool | None = None,
    host: int = 0,
    recompute: bool = True,
    shares: bool = False,
) -> AsyncGenerator[Generation, None]:
    """Open the batcher of a model.

    Args:
        system: The system that it runs in.
        model: The model.
        loaded: Its text, name and shape.
        weights: Shares of the tenants; None for any tenant, with equal shares.
        sequences: The maximum number of sequences in a step.
        positions: The maximum number of tokens in a step; None for 512, or one for each sequence if these are
            more.
        ahead: Whether a step is called while the previous one runs; None for True on GPUs. On a CPU, this
            would take cores from the model.
        host: The maximum number of pages in host memory, for sequences set aside while the cache is full.
        recompute: See `Generation.recompute`. Without it, give `host` many pages, because the last sequence
            ends with an error if the cache and the host's pages are full.
        shares: See `Generation.shares`.
    """
    size = model.caches[0].shape[1]
    if ahead is None:
        ahead = model.caches[0].device.info.backend != "cpu" and sequences <= model.width
    elif ahead and sequences > model.width:
        raise ValueError(f"sequences must be at most {model.width} for steps in advance, got {sequences}")
    pages = Pages(model.caches, size=size, host=host)
    made = Generation(loaded, model, pages, size, recompute, shares)
    made.batcher = await system.spawn(
        _Batcher,
        made.step,
        length=Prompt.length,
        room=made,
        tenant=attrgetter("tenant"),
        weights=weights,
        max_sequences=sequences,
        max_positions=max(512, sequences) if positions is None else positions,
        steps_ahead=int(ahead),
        # Callers bound the texts of each tenant instead: see `Generation.open`.
        capacity=None,
        leave=made.leave,
        name="batcher",
    )
    await system.spawn(_Shown, made.pages, name="pages")
    yield made
