"""Observers of every step in every operation. All phases are reported here (D142)."""

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
"""Runs an operation on a device, as `Device.ask` does."""
Around: TypeAlias = Callable[[Ask], Ask]
"""Returns a replacement of an `Ask`."""


class Phase(enum.Enum):
    """The steps of an operation, in order.

    An operation that enters the queue, or fails to enter, passes through all later steps exactly once. An
    operation that fails to reach a library, perhaps because it was withdrawn, ends with VALIDATE. An
    operation that outlives its context in a queue is validated again on the next.
    """

    VALIDATE = "validate"
    ENQUEUE = "enqueue"
    COMPLETE = "complete"
    REPLY = "reply"
    RELEASE = "release"


class LaunchRecorder(Protocol):
    """Records operations and their outcomes."""

    def validated(self, launch: Launch, /) -> None:
        """Record a validated operation. The caller gets an error raised here, and nothing is launched."""
        ...

    def around(self, ask: Ask, /) -> Ask:
        """Return a replacement of the dispatch, for the caller's task."""
        ...

    def submitted(self, pending: Pending[Any], /) -> None:
        """Assign the outcome to the operation submitted last."""
        ...

    def written(self, block: Block, /) -> None:
        """Record that the holder of a lease may have written a block."""
        ...


class EngineHook(Protocol):
    """Observes every step in every operation of a device, for tracing and fault injection."""

    def __call__(self, phase: Phase, launch: Launch, /) -> None:
        """Called on the Trio thread.

        The caller gets an error in phase VALIDATE. An error in phase ENQUEUE counts as a failure of the
        backend. Later errors are only logged, because the operation has happened.
        """


def enter(hooks: Sequence[EngineHook], launch: Launch) -> None:
    """Call all hooks for a launch, even if some raise.

    Raises:
        Exception: The first error of a hook.
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
    """Call all hooks for later steps; their errors are logged."""
    for phase in phases:
        for hook in tuple(hooks):
            try:
                hook(phase, launch)
            except Exception:
                # The caller must get its reply, and the memory must be freed, nevertheless.
                _logger.exception("a hook failed in phase %s of %s", phase.value, launch.name)
