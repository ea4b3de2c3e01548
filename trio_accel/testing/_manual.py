"""Completions that are noticed when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import attrs
import trio

from ..backends.base import AccelEvent, AccelStream
from ..devices import CompletionPort
from ..devices.base._bridge import LoopNotifier
from ..devices.engine._completer import Completer

__all__ = ["ManualCompletion"]


class ManualCompletion:
    """A completion strategy that holds operations in flight until the test lets them go.

    For ``DeviceOptions(isolation="inline", completion=...)``: the device computes as always, but the
    program does not learn of it. So a test can look at its own cancellation, back-pressure and time
    limits while operations run for exactly as long as it wants. Held operations count as running: for
    `stuck_after`, for the window of `in_flight`, for a lease, for `Device.synchronize` and for the end
    of the device, which waits for `close_grace` seconds at most. A lost context ends held operations, as it
    ends everything in flight.

    One object may serve several devices; they are held together.

    Args:
        is_holding: Whether it holds from the start, also the copies of `Device.put`; else from `hold` on.
    """

    def __init__(self, *, is_holding: bool = True) -> None:
        self._is_holding = is_holding
        self._held: list[_HeldEvent] = []
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<ManualCompletion, {len(self._held)} held>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the test moves it by hand, in its own process")

    @property
    def held(self) -> int:
        """How many operations are held now."""
        return len(self._held)

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operations that are held, such as ``"linalg.Matmul"``, in the order of launch."""
        return tuple(event.operation for event in self._held)

    async def wait_held(self, count: int = 1) -> None:
        """Wait until at least so many operations are held.

        One that fails at its launch never is: where that may be, give the wait a time limit.
        """
        await trio.lowlevel.checkpoint()
        while len(self._held) < count:
            await self._changed.wait()

    def release(self, count: int = 1) -> None:
        """Let go of those that were launched first. Each is noticed soon, once the device is done with it.

        Raises:
            ValueError: So many are not held, or it is no count.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= len(self._held):
            raise ValueError(f"release: count must be from 0 to the {len(self._held)} held, got {count!r}")
        going, self._held = self._held[:count], self._held[count:]
        for event in going:
            event.let_go()

    def release_all(self) -> None:
        """Let go of all that are held now; later ones are held again."""
        self.release(len(self._held))

    def hold(self) -> None:
        """Hold what is launched from now on."""
        self._is_holding = True

    def pass_all(self) -> None:
        """Let go of all that are held, and hold no more until `hold`."""
        self._is_holding = False
        self.release_all()

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Raises:
            TypeError: `reap` is not that of an engine.
        """
        completer = getattr(reap, "__self__", None)
        if not isinstance(completer, Completer):
            raise TypeError(f"ManualCompletion: it holds the operations of an engine, not of {reap!r}")
        return _ManualPort(completer, LoopNotifier(reap), self._take, self._forget)

    def _take(self, event: _HeldEvent) -> None:
        if not self._is_holding:
            event.let_go()
            return
        self._held.append(event)
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def _forget(self, port: _ManualPort) -> None:
        """Hold nothing more for an engine that has ended."""
        self._held = [event for event in self._held if event.port is not port]


@attrs.define(eq=False)
class _ManualPort(CompletionPort):
    _completer: Completer
    notifier: LoopNotifier
    _take: Callable[[_HeldEvent], None]
    _forget: Callable[[_ManualPort], None]

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        # When the engine looks, it takes everything that is done: so the events that it looks at are
        # exchanged.
        for queue in self._completer.queues.all:
            for operation in queue.operations:
                if operation.event is event:
                    held = _HeldEvent(self, stream, event, operation.launch.name)
                    operation.event = held
                    self._take(held)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._forget(self)
        self.notifier.close()


@attrs.define(eq=False)
class _HeldEvent:
    """An event that is not done before it is let go, whatever the device says."""

    port: _ManualPort
    _stream: AccelStream
    _event: AccelEvent
    operation: str
    _is_held: bool = attrs.field(default=True, init=False)

    @property
    def is_done(self) -> bool:
        return not self._is_held and self._event.is_done

    @property
    def error(self) -> Exception | None:
        return self._event.error

    def let_go(self) -> None:
        self._is_held = False
        self._stream.notify(self._event, self.port.notifier)
