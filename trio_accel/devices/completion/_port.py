"""How the engine learns that work on a stream is done, and the two simplest ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ...backends.base import AccelEvent, AccelStream
from ..base._bridge import LoopNotifier

__all__ = ["LONGEST_LOOK", "CompletionPort", "CompletionStrategy", "HostCallbackPort", "SyncPort"]

LONGEST_LOOK = 0.05
"""Seconds for which a task may look for what it waits for: Trio tells of Ctrl-C only where one is parked."""


class CompletionPort(Protocol):
    """The completions of one engine; a base of classes that are one.

    Attributes:
        polls: Whether the end of an operation may be polled for: else `poll` and `spin` are not called.
        is_quick: Whether the next operation, if it is alone, is to be polled before it is watched.
    """

    polls: bool = False
    is_quick: bool = False

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

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


@attrs.frozen
class HostCallbackPort(CompletionPort):
    """Has the stream notify of each event."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.notify(event, self._notifier)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._notifier.close()


@attrs.frozen
class SyncPort(CompletionPort):
    """Waits for each event at once, and the loop with it."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._notifier.notify()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._notifier.close()
