"""A sequence of a `ContinuousBatcher`: as a step sees it, as a request, and in figures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs
import outcome

from ..actors import must_be_count
from ._fair_queue import Queued
from ._parts import PartStream
from ._submit import ItemT
from ._waiting import WaitingRequest, WaitingStatistics

__all__ = ["ContinuousStatistics", "Last", "Room", "RunningSequence", "StepResult"]

PartT = TypeVar("PartT")
PartT_co = TypeVar("PartT_co", covariant=True)


@attrs.define(eq=False)
class RunningSequence(Generic[ItemT, PartT]):
    """A sequence as a step sees it: the same object in all steps of a request.

    Attributes:
        item: What the asker has sent.
        length: Positions that go through before its next part: those of its prompt, at least 1; after
            `begin_again`, those of its parts, too.
        done: Positions that steps have been through. Each step of a sequence whose prompt is done adds 1.
        chunk: Positions that this step is to go through: some of the prompt, or 1 when that is done.
        steps_ahead: Earlier steps of this sequence whose parts are not in `parts` yet, each of one position:
            this step is at the position ``done + steps_ahead``. It is 0 unless the batcher calls steps ahead.
        parts: What it has given so far.
        state: The model's own, such as its pages.
        needs_parts: Whether a step of this sequence needs all its parts, so that none is called ahead. A step
            may set it.
    """

    item: ItemT
    length: int
    done: int = 0
    chunk: int = 0
    steps_ahead: int = 0
    parts: list[PartT] = attrs.field(factory=list[Any])
    state: Any = None
    needs_parts: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of its prompt has been through no step."""
        return self.done < self.length

    @property
    def gives_part(self) -> bool:
        """Whether this step is to give a part: it comes to the end of the prompt, or goes on behind it."""
        return self.done + self.chunk >= self.length

    def begin_again(self, length: int) -> None:
        """Have all positions go through again, in chunks, because nothing of them is left.

        `Room.set_aside` calls it if it keeps nothing. The parts stay, and no part is given again.

        Args:
            length: Positions of the prompt and of all parts so far.
        """
        self.done, self.length = 0, must_be_count("begin_again: length", length)


@attrs.frozen
class Last(Generic[PartT_co]):
    """The result of a step for a sequence that ends with it.

    Attributes:
        parts: Its last parts, a list or a tuple. There may be none.
    """

    parts: Sequence[PartT_co] = ()


class Room(Protocol[ItemT, PartT]):
    """What sequences share and take while they grow, such as the pages of a cache: see `ContinuousBatcher`.

    Amounts are of any one unit. Those of a sequence are looked at only where sequences wait for room.
    """

    @property
    def total(self) -> float:
        """All that there is."""
        ...

    @property
    def free(self) -> float:
        """What no sequence has."""
        ...

    @property
    def spare(self) -> float:
        """What stays free when a sequence comes back, or a large one begins.

        So those that run can grow, and small ones begin at once. It may depend on how many run.
        """
        ...

    def held(self, sequence: RunningSequence[ItemT, PartT]) -> float:
        """Return what becomes free if a sequence is set aside."""
        ...

    def wanted(self, sequence: RunningSequence[ItemT, PartT]) -> float:
        """Return what a sequence takes from `free` until its next part.

        It may be new, be in the middle of its prompt, or have been set aside.
        """
        ...

    async def set_aside(self, sequence: RunningSequence[ItemT, PartT]) -> None:
        """Give back what a sequence holds, and keep a copy elsewhere, or call `RunningSequence.begin_again`.

        No step has it meanwhile, and it may have been in none yet. If the call fails, nothing may have
        changed. It is called again after a loss. With `NoRoomError` the sequence stays where it is.
        """
        ...

    async def bring_back(self, sequence: RunningSequence[ItemT, PartT]) -> None:
        """Undo `set_aside`, before a step has the sequence; with `NoRoomError` it stays set aside."""
        ...


StepResult: TypeAlias = Sequence[PartT] | Last[PartT] | outcome.Error
"""The result of a step for one sequence: a list or a tuple of parts, `Last`, or an error of it alone."""


@attrs.define(eq=False, kw_only=True)
class SequenceEntry(WaitingRequest[ItemT, tuple[PartT, ...]]):
    """A request.

    Attributes:
        sequence: Its sequence.
        stream: Takes its parts as they come; None if nobody wants them before the end.
        queued: Its place in the queue; None from its turn on.
        steps: How many calls of the step have it, or have results for it which it was not given yet; and 1
            while it is set aside or brought back.
        is_over: Whether it has its outcome, or its asker has gone.
        tenant: Its tenant, with the weight at its arrival.
        rank: Its place in the order of arrival and priority: who has less is set aside later.
        is_moving: Whether it is being set aside, or brought back, and so is in no step.
        is_aside: Whether it was set aside, and is not back yet.
        since: The number of the step at which it was set aside.
        stays_until: The number of the step until which it makes no way for others of its tenant, as it has
            just come back.
        is_stuck: Whether it could not be set aside, and no sequence has ended since.
    """

    sequence: RunningSequence[ItemT, PartT]
    stream: PartStream[PartT] | None
    queued: Queued[SequenceEntry[ItemT, PartT]] | None = None
    steps: int = 0
    is_over: bool = False
    tenant: Hashable = None
    weight: float = 1.0
    rank: int = 0
    is_moving: bool = False
    is_aside: bool = False
    since: int = 0
    stays_until: int = 0
    is_stuck: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it waits for its reader, and not for steps that run."""
        return self.stream is not None and self.stream.is_held and bool(self.stream.unread)


@attrs.frozen(kw_only=True)
class ContinuousStatistics(WaitingStatistics):
    """Counts of a `ContinuousBatcher` since its incarnation began: the reply of `GetStatistics`.

    Attributes:
        steps: Calls of the step.
        repeated: Those of them that repeated one that was lost.
        parts: Parts of all sequences.
        cost: Cost of the sequences that steps go through; with `Room`, what is not free of it.
        aside: Sequences that are set aside now.
        set_aside: How often one was set aside.
    """

    steps: int = 0
    repeated: int = 0
    parts: int = 0
    cost: float = 0.0
    aside: int = 0
    set_aside: int = 0
