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
        is_quick: Whether the next operation, if it is alone, is to be polled before it is watched.
        flushes: Whether it flushes the streams that it watches, in every turn of the loop.
    """

    is_quick: bool = False
    flushes: bool = False

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def notify_early(self, event: AccelEvent, notify: Callable[[], None]) -> None:
        """Call `notify` as soon as an event is seen to be done that is watched alone, unless it has failed.

        This early completion is reported for the event that was named last only, and perhaps not even for
        that.
        """
        return

    def poll(self, event: AccelEvent) -> bool:
        """Poll for the end of a very short operation, here and now; returns whether it is done."""
        return event.is_done

    def may_spin(self, stream: AccelStream) -> bool:
        """Whether the asker of the next operation of a stream, if it is alone, may `spin`."""
        return False

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Spin-wait for an operation in its asker's own task, while `goes_on` says so and it is worth it.

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
