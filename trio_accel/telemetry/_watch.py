"""Seeing the messages of a system, and the operations of all its devices."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import attrs
from trio.lowlevel import enable_ki_protection

from ..actors import ActorStarted, ActorTerminated, Event, MessageEvent
from ..actors import System as ActorSystem
from ..devices import Ask, Launch, OpenDevice, Operation, Phase, System, opened

__all__ = ["OperationWatch", "Seen", "watch_system"]

WhereT = TypeVar("WhereT")


@attrs.define(eq=False)
class Seen(Generic[WhereT]):
    """An operation that was validated.

    Attributes:
        where: Where its asker is.
        begun: When it was launched, by the watch's clock in nanoseconds.
        completed: When it was complete.
    """

    where: WhereT
    begun: int = 0
    completed: int = 0


class OperationWatch(abc.ABC, Generic[WhereT]):
    """Sees the operations of devices, from the ask to the reply."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Launch, Seen[WhereT]] = WeakKeyDictionary()

    @abc.abstractmethod
    def _observe(self, event: Event) -> None:
        """Take an event of an actor, or of a message that is no operation's."""

    @abc.abstractmethod
    def _now(self) -> int:
        """The moment, in nanoseconds."""

    @abc.abstractmethod
    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """Pass an operation on, and return its reply."""

    @abc.abstractmethod
    def _validated(self, launch: Launch) -> WhereT:
        """Say where the asker of an operation is, in whose task this is called."""

    @abc.abstractmethod
    def _ended(self, device: OpenDevice, launch: Launch, seen: Seen[WhereT]) -> None:
        """Take an operation that is over."""

    def watch(self, system: ActorSystem) -> AbstractContextManager[None]:
        """See a system, too, inside the ``with``."""
        return watch_system(system, self._observe, self._enter)

    def _enter(self, device: OpenDevice) -> AbstractContextManager[None]:
        """See the operations of a device."""

        def see(phase: Phase, launch: Launch) -> None:
            if phase is Phase.VALIDATE:
                self._seen[launch] = Seen(self._validated(launch))
            elif phase is Phase.REPLY:
                seen = self._seen.pop(launch, None)
                if seen is not None:
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


@contextmanager
def watch_system(
    system: ActorSystem,
    observe: Callable[[Event], None],
    enter: Callable[[OpenDevice], AbstractContextManager[None]],
) -> Generator[None, None, None]:
    """See a system inside the ``with``.

    Operations of devices stay as fast as they are, as far as that depends on observers.

    Args:
        system: The system.
        observe: Called with the events of its actors, and with those of messages, except for operations that
            a library actor serves.
        enter: Makes what is to be entered for each open device, now or when it is opened; it is left when the
            device ends.
    """
    watch = _Watch(system, observe, enter)
    with system.subscribe(watch.observe, every=False):
        try:
            watch.enter_devices()
            yield
        finally:
            watch.close()


class _Watch:
    """The devices that are seen."""

    def __init__(
        self,
        system: ActorSystem,
        observe: Callable[[Event], None],
        enter: Callable[[OpenDevice], AbstractContextManager[None]],
    ) -> None:
        self._system = system
        self._observe = observe
        self._enter = enter
        self._entered: dict[str, ExitStack] = {}
        # What the paths of actors below a device begin with.
        self._below: tuple[str, ...] = ()

    def observe(self, event: Event) -> None:
        """Pass an event on, if it is not one of an operation."""
        if isinstance(event, MessageEvent):
            if event.path.startswith(self._below):
                return
        elif isinstance(event, ActorStarted):
            if not event.incarnation:
                self.enter_devices()
        elif isinstance(event, ActorTerminated):
            entered = self._entered.pop(event.path, None)
            if entered is not None:
                self._note()
                entered.close()
        self._observe(event)

    def enter_devices(self) -> None:
        """Enter all that are open and not entered yet."""
        if not isinstance(self._system, System):
            return
        for device in self._system.devices:
            if device.path not in self._entered:
                self._entered[device.path] = entered = ExitStack()
                entered.enter_context(self._enter(opened(device)))
                self._note()

    def close(self) -> None:
        """Leave all."""
        with ExitStack() as at_end:
            for entered in self._entered.values():
                at_end.push(entered)
        self._entered.clear()

    def _note(self) -> None:
        self._below = tuple(f"{path}/" for path in self._entered)
