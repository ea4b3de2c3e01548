"""Sequences of a `ContinuousBatcher`: the view of a step, the request, and the figures."""

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
        item: The item of the request.
        length: The positions to process before the next part: the prompt, at least 1; after `begin_again`,
            also the parts.
        done: The positions that steps have processed. After the prompt, each step of the sequence adds 1.
        chunk: The positions for this step: some of the prompt, or 1 after the prompt.
        steps_ahead: The number of earlier steps, each with one position, that have not added to `parts` yet:
            this step is at the position ``done + steps_ahead``. It is 0 unless the batcher calls steps in
            advance.
        parts: The parts given so far.
        state: The model's own data, such as its pages.
        needs_parts: Whether a step of this sequence needs all its parts, so that none is called in advance. A
            step may set it.
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
        """Whether no step has processed some of its prompt yet."""
        return self.done < self.length

    @property
    def gives_part(self) -> bool:
        """Whether this step is to give a part, because it reaches the end of the prompt or is after it."""
        return self.done + self.chunk >= self.length

    def begin_again(self, length: int) -> None:
        """Have all positions processed again, in chunks, because their data is lost.

        `Room.set_aside` calls it if it keeps nothing. The parts stay, and no part is given again.

        Args:
            length: The number of positions in the prompt and in all parts so far.
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
    """A resource that growing sequences share, such as the pages of a cache: see `ContinuousBatcher`.

    All amounts use the same unit. The amounts of a sequence are only read while sequences wait for room.
    """

    @property
    def total(self) -> float:
        """The total amount."""
        ...

    @property
    def free(self) -> float:
        """The amount that no sequence holds."""
        ...

    @property
    def spare(self) -> float:
        """The amount to keep free when a sequence comes back, or a large one begins.

        So running sequences can grow, and small ones begin at once. It may depend on the number of running
        ones.
        """
        ...

    def held(self, sequence: RunningSequence[ItemT, PartT]) -> float:
        """Return the amount released by setting a sequence aside."""
        ...

    def demand(self, sequence: RunningSequence[ItemT, PartT]) -> float:
        """Return the amount that a sequence takes from `free` until its next part.

        It may be new, be in the middle of its prompt, or have been set aside.
        """
        ...

    async def set_aside(self, sequence: RunningSequence[ItemT, PartT]) -> None:
        """Release a sequence's resources, and keep a copy elsewhere or call `RunningSequence.begin_again`.

        No step uses it meanwhile, and possibly no step has used it yet. A failed call must not change
        anything. It is called again after a loss. With `NoRoomError` the sequence stays where it is.
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
        sequence: The sequence.
        stream: Receives its parts as they are made; None if nobody reads them before the end.
        queued: Its entry in the queue; None after its turn.
        steps: The number of step calls that use it, or whose results it has not got yet; and 1 while it is
            set aside or brought back.
        is_over: Whether it has its outcome, or its caller has left.
        tenant: Its tenant, with the weight at its arrival.
        rank: Its position by arrival and priority: a lower rank is set aside later.
        is_moving: Whether it is being set aside, or brought back, and so is in no step.
        is_aside: Whether it was set aside, and is not back yet.
        since: The number of the step at which it was set aside.
        stays_until: The number of the step until which it does not make way for others of its tenant, because
            it has just come back.
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
        """Whether it waits for its reader, and not for running steps."""
        return self.stream is not None and self.stream.is_held and bool(self.stream.unread)


@attrs.frozen(kw_only=True)
class ContinuousStatistics(WaitingStatistics):
    """Counts of a `ContinuousBatcher` since its incarnation began: the reply of `GetStatistics`.

    Attributes:
        steps: The number of step calls.
        repeated: The number of calls that repeated a lost one.
        parts: The total number of parts.
        cost: The total cost of running sequences; with `Room`, the amount in use.
        aside: The number of sequences set aside now.
        set_aside: The number of times that a sequence was set aside.
    """

    steps: int = 0
    repeated: int = 0
    parts: int = 0
    cost: float = 0.0
    aside: int = 0
    set_aside: int = 0
