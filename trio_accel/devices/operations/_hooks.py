"""Observers of every operation at every step: the one place where phases are told (D142)."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from ._blocks import Block
from ._operation import Launch, Operation
from ._pending import Pending

__all__ = ["Around", "Ask", "EngineHook", "Phase"]

_logger = logging.getLogger("trio_accel.devices")


Ask: TypeAlias = Callable[[Operation[Any, Any]], Coroutine[Any, Any, Any]]
"""Asks an operation of a device, as `Device.ask` does."""
Around: TypeAlias = Callable[[Ask], Ask]
"""Makes what is asked in place of another."""


class Phase(enum.Enum):
    """Steps of an operation, in their order.

    An operation that was enqueued, or failed in that, takes all later steps exactly once. One that
    was withdrawn, or never reached a library, ends with VALIDATE; one that outlives its context
    in a queue is validated again on the next.
    """

    VALIDATE = "validate"
    ENQUEUE = "enqueue"
    COMPLETE = "complete"
    REPLY = "reply"
    RELEASE = "release"


class LaunchRecorder(Protocol):
    """Writes down operations and their outcomes."""

    def validated(self, launch: Launch, /) -> None:
        """Note an operation that was validated. An error goes to the asker, and nothing is launched."""
        ...

    def around(self, ask: Ask, /) -> Ask:
        """Make what is asked in place of the dispatch, in the task of the asker."""
        ...

    def submitted(self, pending: Pending[Any], /) -> None:
        """Note the outcome to be of the operation that was submitted last."""
        ...

    def written(self, block: Block, /) -> None:
        """Note that the holder of a lease may have written a block."""
        ...


class EngineHook(Protocol):
    """Sees every operation of a device at every step; tracing and fault injection hook in here."""

    def __call__(self, phase: Phase, launch: Launch, /) -> None:
        """Called on the Trio thread.

        An error of it goes to the asker in phase VALIDATE and counts as the backend's failure in
        phase ENQUEUE. Later it is logged: the operation has happened.
        """


def enter(hooks: Sequence[EngineHook], launch: Launch) -> None:
    """Tell all of a launch, whatever one of them raises.

    Raises:
        Exception: The first that one raised.
    """
    failures: list[Exception] = []
    for hook in tuple(hooks):
        try:
            hook(Phase.ENQUEUE, launch)
        except Exception as error:  # noqa: BLE001  # raised below
            failures.append(error)
    if failures:
        raise failures[0]


def notify(hooks: Sequence[EngineHook], launch: Launch, *phases: Phase) -> None:
    """Tell all of later steps; what one of them raises is logged."""
    for phase in phases:
        for hook in tuple(hooks):
            try:
                hook(phase, launch)
            except Exception:
                # The reply must be given and the memory freed all the same.
                _logger.exception("a hook failed in phase %s of %s", phase.value, launch.name)
