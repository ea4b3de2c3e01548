"""Seeing the messages of a system, and the operations of all its devices."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import attrs
from trio.lowlevel import enable_ki_protection

from ..actors import ActorStarted, ActorTerminated, Event, MessageEvent, MessageStarted
from ..actors import System as ActorSystem
from ..devices import Ask, Launch, OpenDevice, Operation, Phase, System, opened

__all__ = ["Seen", "Watch"]

ServedT = TypeVar("ServedT")
WhereT = TypeVar("WhereT")


@attrs.define(eq=False)
class Seen(Generic[WhereT]):
    """An operation that was validated.

    Attributes:
        where: Where its asker is.
        begun: When it was launched, by the watch's clock in nanoseconds.
        completed: When it was complete.
        process: The process that launched it.
    """

    where: WhereT
    begun: int = 0
    completed: int = 0
    process: int = attrs.field(factory=os.getpid)


class Watch(abc.ABC, Generic[ServedT, WhereT]):
    """Sees messages from the handler's start to the reply, and operations of devices in their five phases.

    A message that is served has a `ServedT`, and an operation a `WhereT`, from its beginning to its end.

    Args:
        epoch: Nanoseconds from which the clock counts, on the monotonic clock that all processes share.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        # By actor and number.
        self._served: dict[tuple[str, int], ServedT] = {}
        self._seen: WeakKeyDictionary[Launch, Seen[WhereT]] = WeakKeyDictionary()

    @abc.abstractmethod
    def _observe(self, event: Event) -> None:
        """Take an event of an actor other than those of messages."""

    @abc.abstractmethod
    def _began(self, event: MessageStarted, context: Context) -> ServedT:
        """Take the start of a handler, and the context in which it runs."""

    @abc.abstractmethod
    def _finished(self, event: MessageEvent, served: ServedT | None) -> None:
        """Take the end of a message; None if its start was not seen, or it had none."""

    @abc.abstractmethod
    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """Pass an operation on, and return its reply."""

    @abc.abstractmethod
    def _validated(self, launch: Launch) -> WhereT:
        """Say where the asker of an operation is, in whose task this is called."""

    @abc.abstractmethod
    def _ended(self, device: OpenDevice, launch: Launch, seen: Seen[WhereT]) -> None:
        """Take an operation that is over."""

    def _now(self) -> int:
        """Give the moment, in nanoseconds."""
        return time.monotonic_ns() + self._epoch

    @contextmanager
    def watch(self, system: ActorSystem) -> Generator[None, None, None]:
        """See a system, too, inside the ``with``, and all devices of it, from when they are opened.

        Operations of devices stay as fast as they are, as far as that depends on observers.
        """
        entered: dict[str, ExitStack] = {}
        # Prefixes of the paths of actors below a device: operations are seen by their phases.
        below: tuple[str, ...] = ()

        def enter_devices() -> None:
            nonlocal below
            for device in system.devices if isinstance(system, System) else ():
                if device.path not in entered:
                    entered[device.path] = ends = ExitStack()
                    ends.enter_context(self._enter(opened(device)))
            below = tuple(f"{path}/" for path in entered)

        def observe(event: Event) -> None:
            nonlocal below
            if isinstance(event, MessageEvent):
                if not event.path.startswith(below):
                    self._take(event)
                return
            if isinstance(event, ActorStarted) and not event.incarnation:
                enter_devices()
            elif isinstance(event, ActorTerminated) and event.path in entered:
                left = entered.pop(event.path)
                below = tuple(f"{path}/" for path in entered)
                left.close()
            self._observe(event)

        with system.subscribe(observe, every=False):
            try:
                enter_devices()
                yield
            finally:
                with ExitStack() as at_end:
                    for ends in entered.values():
                        at_end.push(ends)
                entered.clear()

    def _take(self, event: MessageEvent) -> None:
        key = event.path, event.number
        if not isinstance(event, MessageStarted):
            self._finished(event, self._served.pop(key, None))
        elif event.context is not None:
            self._served[key] = self._began(event, event.context)

    def _enter(self, device: OpenDevice) -> AbstractContextManager[None]:
        """See the operations of a device."""

        def see(phase: Phase, launch: Launch) -> None:
            if phase is Phase.VALIDATE:
                self._seen[launch] = Seen(self._validated(launch))
            elif phase is Phase.REPLY:
                seen = self._seen.pop(launch, None)
                if seen is not None and self._is_told(device, launch, seen):
                    self._ended(device, launch, seen)
            elif (seen := self._seen.get(launch)) is not None:
                if phase is Phase.ENQUEUE:
                    seen.begun = self._now()
                elif phase is Phase.COMPLETE:
                    seen.completed = self._now()

        def around(ask: Ask) -> Ask:
            @enable_ki_protection
            async def asked(operation: Operation[Any, Any]) -> Any:
                return await self._ask(device, ask, operation)

            return asked

        return device.observed(see, around)

    def _is_told(self, device: OpenDevice, launch: Launch, seen: Seen[WhereT]) -> bool:
        """Take the times of a worker, which launches there; false if it died before it could tell."""
        if device.isolation == "process":
            if launch.times is None:
                return False
            seen.process, begun, completed = attrs.astuple(launch.times)
            seen.begun, seen.completed = begun + self._epoch, completed + self._epoch
        return True
