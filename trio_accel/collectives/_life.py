"""The life of a world's communicator: its stages, their transitions, and the clock of its waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, TypeAlias, get_args

import attrs
import trio

from ..actors import TaskEvent
from ..backends.base.contract.errors import NoEdgeError

# Seconds between two checks for lost ranks with a finished part, or without a begun one.
_LOOKED = 0.05

Stage: TypeAlias = Literal["none", "opening", "open", "connecting", "calling", "doubted", "leaving", "closed"]
"""The stage of a communicator.

"none": not open. "opening": ranks open it. "open": it waits for a collective. "connecting": ranks meet in a
kind of call for the first time. "calling": ranks meet again. "doubted": a rank has failed, perhaps because
another one was lost. "leaving": ranks give it up. "closed": the world has ended.
"""

Step: TypeAlias = Literal[
    "open", "opened", "meet", "call", "done", "lose", "stale", "late", "drop", "fail", "told", "left", "close"
]
"""What happens to it."""

_AT_WORK: tuple[Stage, ...] = ("opening", "connecting", "calling")


@attrs.define(eq=False)
class CommunicatorLife:
    """The stage of a communicator, and how long it may stay there.

    Threads that wait in the vendor's library do not have a clock: they wait until the communicator is given
    up.

    Attributes:
        stage: The current stage.
        edges: The next stage, for each stage and each step that may happen in it.
        bounds: The maximum seconds of a stage; stages without an entry may take any time.
        until: The end of the stage's time, by Trio's clock.
    """

    edges: ClassVar[Mapping[tuple[Stage, Step], Stage]] = {
        ("none", "open"): "opening",
        ("opening", "opened"): "open",
        ("open", "meet"): "connecting",
        ("open", "call"): "calling",
        ("connecting", "done"): "open",
        ("calling", "done"): "open",
        # A rank had a new worker between two collectives.
        ("open", "lose"): "leaving",
        # Ranks report the loss of another rank, were given up, or are late; or the caller is cancelled.
        **{(stage, step): "leaving" for stage in _AT_WORK for step in ("lose", "stale", "late", "drop")},
        **{(stage, "fail"): "doubted" for stage in _AT_WORK},
        ("doubted", "told"): "leaving",
        ("leaving", "left"): "none",
        # A world may be closed while another task runs a collective, which ends the collective.
        **{(stage, "close"): "closed" for stage in (*_AT_WORK, "none", "open", "doubted", "leaving")},
        **{("closed", step): "closed" for step in get_args(Step) if step != "open"},
    }
    bounds: ClassVar[Mapping[Stage, float]] = {
        "opening": 60.0,
        # The first collective of a kind connects. A later one waits for a late rank, which is watched.
        "connecting": 60.0,
        "doubted": 0.6,
        # Ranks that do not answer are not waited for before another communicator is opened.
        "leaving": 5.0,
        "closed": 5.0,
    }
    stage: Stage = "none"
    until: float = math.inf

    def move(self, step: Step) -> None:
        """Go to the next stage.

        Raises:
            NoEdgeError: There is none.
        """
        stage = self.edges.get((self.stage, step))
        if stage is None:
            raise NoEdgeError(f"the communicator is {self.stage}: {step!r} has no edge there")
        if stage != self.stage:
            self.stage = stage
            bound = self.bounds.get(stage)
            self.until = math.inf if bound is None else trio.current_time() + bound

    @property
    def is_held(self) -> bool:
        """Whether ranks hold it, and were not asked to give it up."""
        return self.stage == "open" or self.stage in _AT_WORK

    async def wait(self, event: TaskEvent, is_lost: Callable[[], object] = bool) -> None:
        """Wait for an event, for the loss of a rank, or until the time of the stage is over.

        Only ranks at work are waited for by a caller who may go.
        """
        while not (event.is_set() or is_lost() or trio.current_time() >= self.until):
            looked = min(trio.current_time() + _LOOKED, self.until)
            with trio.CancelScope(deadline=looked, shield=self.stage not in _AT_WORK):
                await event.wait()
