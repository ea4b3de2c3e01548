"""How the engine learns that work on a stream is done: the port, and the simple ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ...backends.base import AccelEvent, AccelStream
from ._bridge import LoopNotifier
from ._waits import TaskNotifier

__all__ = [
    "LONGEST_LOOK",
    "CompletionPort",
    "CompletionStrategy",
    "HostCallbackPort",
    "PolledPort",
    "SyncPort",
    "WatchedPort",
]

LONGEST_LOOK = 0.05
"""Seconds for which a task may poll in a row: Trio delivers Ctrl-C only to a parked task."""


class CompletionPort(Protocol):
    """The completions of one engine; a base of classes that are one.

    Attributes:
        polls: Whether the end of an operation may be polled for: else `poll` and `spin` are not called.
        is_quick: Whether the next operation, if it is alone, is to be polled before it is watched.
        calls: How many calls threads make now, or are to make, for operations of this engine.
    """

    polls: bool = False
    is_quick: bool = False
    calls: int = 0

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def poll(self, event: AccelEvent) -> bool:
        """Poll for the end of a very short operation, here and now; returns whether it is done."""
        return event.is_done

    def may_spin(self, stream: AccelStream) -> bool:
        """Tell whether the asker of the next operation of a stream, if it is alone, may `spin`."""
        return False

    async def spin(self, stream: AccelStream, event: AccelEvent, goes_on: Callable[[], bool]) -> bool:
        """Spin-wait for an operation in its asker's own task, while `goes_on` says so and it is worth it.

        Returns:
            Whether it is done; if not, it is to be watched.
        """
        await trio.lowlevel.checkpoint()
        return event.is_done

    async def run(self) -> None:
        """Run the strategy's task beside the engine, until it is cancelled; may return at once."""

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


@attrs.define(eq=False)
class HostCallbackPort(CompletionPort):
    """Has the stream notify of each event."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # D9: after a fault of the device this may never be called: the watchdog looks, too.
        stream.notify(event, self._notifier)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._notifier.close()


class SyncPort(HostCallbackPort):
    """Waits for each event at once, and the loop with it."""

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # The loop stands still on purpose: nothing else of the program disturbs what is measured.
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._notifier.notify()


class WatchedPort(CompletionPort):
    """Events that a task of the port looks at, in the order of each stream."""

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._events: dict[AccelStream, list[AccelEvent]] = {}
        self._changed = TaskNotifier()

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """Look at an event from now on."""
        events, changed = self._events, self._changed
        if stream in events:
            of_stream = events[stream]
            if of_stream[-1] is not event:
                of_stream.append(event)
        else:
            self._begin(stream)
            events[stream] = [event]
        # Without a call where the port's task is awake: it looks at all events before it waits again.
        if changed.task is not None:
            changed.notify()

    def close(self) -> None:
        """Look at nothing any more."""
        # The engine has failed all operations by now, so these events end nothing.
        self._events.clear()

    async def wait_changed(self) -> None:
        """Wait until there is something new to look at."""
        await self._changed.wait()

    async def wait(self) -> None:
        """Wait until there is something to look at."""
        while not self._events:
            await self.wait_changed()

    def look(self) -> bool:
        """Let the engine reap if anything is done; returns whether it is."""
        found = False
        # A copy, as streams without events are taken out meanwhile.
        for stream, events in tuple(self._events.items()):
            # A stream runs in order: while its first event is not done, no other one is.
            if events[0].is_done:
                count = _count_done(events)
                del events[:count]
                if not events:
                    del self._events[stream]
                self._seen(stream, count)
                found = True
        # Once for all streams: the engine looks at each of its own anyway.
        if found:
            self._reap()
        return found

    def _begin(self, stream: AccelStream) -> None:
        """Note that there is something to look at of a stream of which there was nothing."""

    def _seen(self, stream: AccelStream, count: int) -> None:
        """Note that so many of a stream are seen to be done."""


def _count_done(events: list[AccelEvent]) -> int:
    """Tell how many of a stream's events are done, of which the first is.

    A stream runs in order: what is behind one that is not done is not done either. The engine looks at each
    of them; to look at all of them here, too, would take as long again.
    """
    done, end = 1, len(events)
    while done < end:
        middle = (done + end) // 2
        if events[middle].is_done:
            done = middle + 1
        else:
            end = middle
    return done


class PolledPort(WatchedPort):
    """Looks in intervals, of so many seconds, while there is anything to look at."""

    def __init__(self, reap: Callable[[], None], interval: float) -> None:
        super().__init__(reap)
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.wait()
            # The pause comes first: what has just been launched is not done yet.
            await trio.sleep(self._interval)
            self.look()
