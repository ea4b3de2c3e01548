"""How the engine learns that work on a stream is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ..backends.base import AccelEvent, AccelStream
from ._bridge import LoopWaker

__all__ = [
    "AdaptiveCompletion",
    "CompletionPort",
    "CompletionStrategy",
    "HostCallbackCompletion",
    "PolledCompletion",
    "SyncCompletion",
]


class CompletionPort(Protocol):
    """The completions of one engine."""

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

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


def _positive(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(
            f"{type(instance).__name__}: {attribute.name} must be seconds above 0, got {value!r}"
        )


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself rings, from its own thread or the driver's; Trio is woken by token.

    Nothing runs while an operation does. The default of the CPU backend.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _HostCallbackPort(LoopWaker(reap))


@attrs.frozen(kw_only=True)
class PolledCompletion:
    """The events are looked at in intervals while anything is in flight.

    Attributes:
        interval: Seconds between two looks; Trio itself adds about a millisecond.
    """

    interval: float = attrs.field(default=0.001, validator=_positive)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _PolledPort(reap, self.interval)


@attrs.frozen(kw_only=True)
class AdaptiveCompletion:
    """The events are looked at again and again for a short while, then the stream is asked to ring.

    Short operations are seen without the cost of a callback and a wake-up, at the price of up to
    `budget` of processor time each; where that keeps failing, less and less is spent.

    Attributes:
        budget: The most seconds to look before the stream is asked to ring.
    """

    budget: float = attrs.field(default=50e-6, validator=_positive)

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _AdaptivePort(reap, self.budget)


@attrs.frozen(kw_only=True)
class SyncCompletion:
    """The launch itself blocks until the operation is done, **and the whole Trio loop with it**.

    For measurements and for finding errors: one operation at a time, in order.
    """

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _SyncPort(LoopWaker(reap))


@attrs.frozen
class _HostCallbackPort:
    _waker: LoopWaker

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.notify(event, self._waker)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._waker.close()


@attrs.frozen
class _SyncPort:
    _waker: LoopWaker

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._waker.ring()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._waker.close()


class _Watched:
    """Events that a task of the port looks at."""

    __slots__ = ("_added", "_events", "_reap")

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._events: list[tuple[AccelStream, AccelEvent]] = []
        self._added = trio.Event()

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """Look at an event from now on."""
        self._events.append((stream, event))
        self._added.set()

    def close(self) -> None:
        """Look at nothing any more."""
        self._events.clear()

    async def wait(self) -> None:
        """Wait until there is something to look at."""
        while not self._events:
            self._added = trio.Event()
            await self._added.wait()

    def look(self) -> bool:
        """Let the engine reap if anything is done; returns whether it is."""
        left = [(stream, event) for stream, event in self._events if not event.is_done]
        if len(left) == len(self._events):
            return False
        self._events = left
        self._reap()
        return True


class _PolledPort(_Watched):
    def __init__(self, reap: Callable[[], None], interval: float) -> None:
        super().__init__(reap)
        self._interval = interval

    async def run(self) -> None:
        while True:
            await self.wait()
            await trio.sleep(self._interval)
            self.look()


class _AdaptivePort(_Watched):
    # Below this there is no time for a second look.
    _LEAST = 5e-6

    def __init__(self, reap: Callable[[], None], most: float) -> None:
        super().__init__(reap)
        self._most = most
        self._budget = most
        self._waker = LoopWaker(reap)

    def close(self) -> None:
        super().close()
        self._waker.close()

    async def run(self) -> None:
        while True:
            await self.wait()
            end = time.perf_counter() + self._budget
            found = False
            while self._events and time.perf_counter() < end:
                # The rest of the program goes on between two looks.
                await trio.lowlevel.checkpoint()
                found = self.look() or found
            self._budget = min(2 * self._budget, self._most) if found else max(self._budget / 2, self._LEAST)
            events, self._events = self._events, []
            for stream, event in events:
                stream.notify(event, self._waker)
