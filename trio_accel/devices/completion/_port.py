"""What the engine needs of whatever learns that work on a stream is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from ...backends.base import AccelEvent, AccelStream

__all__ = ["LONGEST_LOOK", "CompletionPort", "CompletionStrategy"]

LONGEST_LOOK = 0.05
"""Seconds for which a task may look for what it waits for: Trio tells of Ctrl-C only where one is parked."""


class CompletionPort(Protocol):
    """The completions of one engine; a base of classes that are one.

    Attributes:
        is_quick: Whether the next operation, if it is alone, is to be stared at before it is watched.
        flushes: Whether it flushes the streams that it watches, in every turn of the loop.
    """

    is_quick: bool = False
    flushes: bool = False

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def herald(self, event: AccelEvent, tell: Callable[[], None]) -> None:
        """Call this as soon as an event is seen to be done that is watched alone, unless that has failed.

        Only one is told of, the one that was named last, and perhaps not even that.
        """
        return

    def stare(self, event: AccelEvent) -> bool:
        """Wait for the end of a very short operation, here and now; returns whether it is done."""
        return event.is_done

    def is_awaited(self, stream: AccelStream) -> bool:
        """Whether the next operation of a stream, if it is alone, is to be attended by its asker."""
        return False

    async def attend(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Wait for an operation in its asker's own task, while `goes_on` says so and it is worth it.

        Returns:
            Whether it is done; if not, it is to be watched.
        """
        await trio.lowlevel.checkpoint()
        return event.is_done

    async def run(self) -> None:
        """What the strategy does beside the engine, until it is cancelled; may return at once."""

    def close(self) -> None:
        """Watch nothing any more."""


class CompletionStrategy(Protocol):
    """A way to learn of completions, given to `DeviceOptions`."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Args:
            reap: Looks at the engine's events; to be called on the Trio thread.
        """
        ...
