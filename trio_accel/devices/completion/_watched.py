"""Completions that a task of the port looks for."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ...backends.base import AccelEvent, AccelStream
from ..base._task_notifier import TaskNotifier
from ._port import CompletionPort

__all__ = ["PolledPort", "WatchedPort"]


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
        if changed.task is not None:
            changed.notify()

    def close(self) -> None:
        """Look at nothing any more."""
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
        for stream, events in tuple(self._events.items()):
            if events[0].is_done:
                count = _count_done(events)
                del events[:count]
                if not events:
                    del self._events[stream]
                self._seen(stream, count)
                found = True
        if found:
            self._reap()
        return found

    def _begin(self, stream: AccelStream) -> None:
        """There is something to look at of a stream of which there was nothing."""

    def _seen(self, stream: AccelStream, count: int) -> None:
        """So many of a stream are seen to be done."""


def _count_done(events: list[AccelEvent]) -> int:
    """How many of a stream's events are done, of which the first is.

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
            await trio.sleep(self._interval)
            self.look()
