"""A sequence of a `ContinuousBatcher`: as a step sees it, as a request, and in figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import attrs
import outcome

from ._fair_queue import Queued
from ._parts import PartStream
from ._servants import ItemT
from ._waiting import Waiting, WaitingStatistics

__all__ = ["ContinuousStatistics", "Last", "RunningSequence", "StepResult"]

PartT = TypeVar("PartT")
PartT_co = TypeVar("PartT_co", covariant=True)


@attrs.define(eq=False)
class RunningSequence(Generic[ItemT, PartT]):
    """A sequence as a step sees it: the same object in all steps of a request.

    Attributes:
        item: What the asker has sent.
        length: Positions of its prompt, at least 1.
        done: Positions that steps have been through. Each step of a sequence whose prompt is done adds 1.
        chunk: Positions that this step is to go through: some of the prompt, or 1 when that is done.
        ahead: Earlier steps of this sequence whose parts are not in `parts` yet, each of one position: this
            step is at the position ``done + ahead``. It is 0 unless the batcher calls steps ahead.
        parts: What it has given so far.
        state: The model's own, such as its pages.
        needs_parts: Whether a step of it must have all its parts. A step sets it: then no step of it is
            called ahead.
    """

    item: ItemT
    length: int
    done: int = 0
    chunk: int = 0
    ahead: int = 0
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


@attrs.frozen
class Last(Generic[PartT_co]):
    """The result of a step for a sequence that ends with it.

    Attributes:
        parts: Its last parts, a list or a tuple. There may be none.
    """

    parts: Sequence[PartT_co] = ()


StepResult: TypeAlias = Sequence[PartT] | Last[PartT] | outcome.Error
"""The result of a step for one sequence: a list or a tuple of parts, `Last`, or an error of it alone."""


@attrs.define(eq=False, kw_only=True)
class SequenceEntry(Waiting[ItemT, tuple[PartT, ...]]):
    """A request.

    Attributes:
        sequence: Its sequence.
        stream: Takes its parts as they come; None if nobody wants them before the end.
        queued: Its place in the queue; None from its turn on.
        steps: How many calls of the step have it, or have results for it which it was not given yet.
        is_over: Whether it has its outcome, or its asker has gone.
    """

    sequence: RunningSequence[ItemT, PartT]
    stream: PartStream[PartT] | None
    queued: Queued[SequenceEntry[ItemT, PartT]] | None = None
    steps: int = 0
    is_over: bool = False


@attrs.frozen(kw_only=True)
class ContinuousStatistics(WaitingStatistics):
    """Counts of a `ContinuousBatcher` since its incarnation began: the reply of `GetStatistics`.

    Attributes:
        steps: Calls of the step.
        repeated: Those of them that repeated one that was lost.
        parts: Parts of all sequences.
        cost: Cost of the sequences that steps go through.
    """

    steps: int = 0
    repeated: int = 0
    parts: int = 0
    cost: float = 0.0
