"""Whether operations of a task are recorded for a graph, and not launched."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from ...backends.base import NotSupportedError
from ..arrays._pending import Pending
from ._operation import Operation, PlannedFor

__all__ = ["RECORDING", "Recording", "recording_now", "refuse_recording"]

ReplyT = TypeVar("ReplyT")


class Recording(Protocol):
    """Takes the operations that a task asks."""

    @property
    def is_over(self) -> bool:
        """Whether it takes no more: those of tasks that outlive it are launched."""
        ...

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Record an operation; see `Device.ask`.

        Raises:
            NotSupportedError: A graph cannot have it.
        """
        ...

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Record an operation; see `Device.submit`."""
        ...


RECORDING: ContextVar[Recording | None] = ContextVar("trio_accel.recording", default=None)
"""What records the operations of a task, or has recorded them."""


def recording_now() -> Recording | None:
    """What records the operations of this task; None if they are launched."""
    recording = RECORDING.get()
    return None if recording is None or recording.is_over else recording


def refuse_recording(verb: str, instead: str) -> None:
    """Refuse what a step of a graph cannot do.

    Raises:
        NotSupportedError: The operations of this task are recorded.
    """
    if recording_now() is not None:
        raise NotSupportedError(f"{verb}: a graph cannot record it; {instead}", operation=verb)
