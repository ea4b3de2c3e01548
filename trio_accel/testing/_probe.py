"""Tools for tests of actors: an actor with given replies, fixed back-offs, and waiting for quiet."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import attrs
import trio

from ..actors import Actor, ActorSystem, Message, Ref, Request, handles, message_target

__all__ = ["FixedRandom", "Probe", "open_probe", "wait_until_idle"]

MessageType: TypeAlias = "type[Request[Any, Any] | Message[Any]]"


@attrs.define(eq=False)
class Probe:
    """The test's end of a probe actor. Made by `open_probe`.

    Attributes:
        ref: Address of the actor: hand it to the code under test.
        messages: Everything it was sent, in order.
        replies: Its answers, by message class: a value, an exception to raise, or a function
            of the message that returns or raises one. May be changed at any time.
    """

    ref: Ref[Any] = attrs.field(init=False)
    messages: list[object] = attrs.field(factory=list[object], init=False)
    replies: dict[type[Any], object]
    _send: trio.MemorySendChannel[object] = attrs.field(repr=False)
    _receive: trio.MemoryReceiveChannel[object] = attrs.field(repr=False)

    async def receive(self) -> object:
        """Wait for the next message that no earlier call has returned."""
        return await self._receive.receive()

    def receive_nowait(self) -> object:
        """Return the next message that no earlier call has returned.

        Raises:
            trio.WouldBlock: There is none.
        """
        return self._receive.receive_nowait()

    def answer(self, message: object) -> object:
        """Record a message and find its reply; called by the actor."""
        self.messages.append(message)
        self._send.send_nowait(message)
        reply = self.replies.get(type(message))
        if callable(reply):
            reply = cast("Callable[[object], object]", reply)(message)
        if isinstance(reply, BaseException):
            raise reply
        return reply


async def open_probe(
    system: ActorSystem,
    *messages: MessageType,
    replies: Mapping[type[Any], object] | None = None,
    name: str = "probe",
) -> Probe:
    """Start an actor that replaces another in a test.

    Args:
        system: Its system; it ends with it.
        *messages: The message classes that it accepts, all declared for one actor class.
        replies: Its replies, by message class; a request without an entry gets None.
        name: Its name.

    Raises:
        ValueError: No message classes, or classes for different actors.
    """
    targets = {message_target(message) for message in messages}
    if len(targets) != 1:
        names = ", ".join(sorted(map(str, targets))) or "none"
        raise ValueError(f"open_probe: give message classes that are declared for one actor, got {names}")
    send, receive = trio.open_memory_channel[object](math.inf)
    probe = Probe(dict(replies or {}), send, receive)
    probe.ref = await system.spawn(_probe_class(targets.pop() or "Probe", messages), probe, name=name)
    return probe


class _ProbeActor(Actor):
    def __init__(self, probe: Probe) -> None:
        self.probe = probe


def _probe_class(target: str, messages: tuple[MessageType, ...]) -> type[_ProbeActor]:
    # The messages of a probe are not known to type checkers.
    declare = cast("Callable[[object], Callable[[object], object]]", handles)

    def handler(message: MessageType) -> object:
        async def answer(self: _ProbeActor, request: object) -> object:
            return self.probe.answer(request)

        return declare(message)(answer)

    # It has the name of the actor that it replaces, because the messages are declared for that name.
    methods = {f"answer_{number}": handler(message) for number, message in enumerate(messages)}
    return type(target, (_ProbeActor,), methods)


class FixedRandom(random.Random):
    """A source of jitter that always draws the same: for ``SystemOptions(random=FixedRandom())``.

    Args:
        fraction: Result of `random`, from 0 to 1; 0.5 draws the middle of every range, so that
            delays have no jitter.
    """

    def __init__(self, fraction: float = 0.5) -> None:
        super().__init__(0)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"FixedRandom: fraction must be from 0 to 1, got {fraction!r}")
        self._fraction = fraction

    def random(self) -> float:
        """Return the fixed fraction."""
        return self._fraction


async def wait_until_idle(system: ActorSystem) -> None:
    """Wait until no actor has a message queued, running or unanswered, and every task is blocked.

    A task that waits for time or for another thread counts as quiet only if no message depends on it: this
    function waits for requests on which a handler or a device is working.
    """
    # This loads pytest if it is installed, so do not import it with `trio_accel`.
    import trio.testing

    while True:
        await trio.testing.wait_all_tasks_blocked()
        if not any(
            node.mailbox_depth or node.mailbox_waiting or node.deferred or node.running
            for node in system.tree().walk()
        ):
            return
        # Somebody works outside the loop, or sleeps: let time pass.
        await trio.sleep(0.001)
