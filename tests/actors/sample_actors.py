"""Actors that act by their messages, so that a test reads from top to bottom."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import attrs
import pytest
import trio
import trio.testing

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorFailedError,
    Backoff,
    DeferredReply,
    Event,
    Message,
    Policy,
    Ref,
    Request,
    handles,
)

AT_ONCE = Policy(backoff=Backoff(base=0.0, jitter=0.0))
"""A policy without waiting before a restart."""

Act: TypeAlias = "Callable[[Puppet], Awaitable[object]]"


class BoomError(Exception):
    """The error of crashing test actors."""


@attrs.frozen
class Do(Request["Puppet", Any]):
    """Run an async function of the actor in its handler, and reply with its result."""

    act: Act


@attrs.frozen
class DoGrouped(Request["Puppet", Any]):
    """The same, with others: at most two at once."""

    act: Act


@attrs.frozen
class Run(Message["Puppet"]):
    """Run an async function of the actor in its handler."""

    act: Act


@attrs.frozen
class RunGrouped(Message["Puppet"]):
    """The same, with others: at most two at once, including those of `DoGrouped`."""

    act: Act


@attrs.frozen
class Note(Message["Puppet"]):
    """Append to the actor's notes."""

    text: str


@attrs.frozen
class Echo(Request["Puppet", str]):
    """Append to the actor's notes and reply with the same."""

    text: str


@attrs.frozen
class Crash(Request["Puppet", None]):
    """Raise."""

    error: BaseException = attrs.field(factory=lambda: BoomError("boom"))


@attrs.frozen
class Count(Request["Puppet", int]):
    """Reply with how many messages this incarnation has counted, this one included."""


@attrs.frozen
class Number(Request["Puppet", int]):
    """Reply with the number of the incarnation."""


class Puppet(Actor):
    """Follows its orders.

    Args:
        log: Receives the begin and end of each incarnation; may be None.
        start: Called at the start of each incarnation, with the actor.
        end: The same at the end.
    """

    def __init__(
        self, log: list[str] | None = None, start: Act | None = None, end: Act | None = None
    ) -> None:
        self.log = log if log is not None else []
        self.notes: list[str] = []
        self.count = 0
        self._start = start
        self._end = end

    @property
    def tag(self) -> str:
        return f"{self.context.path.rpartition('/')[2]}{self.context.restart.number}"

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        if self._start is not None:
            await self._start(self)
        self.log.append(f"+{self.tag}")
        try:
            yield
        finally:
            self.log.append(f"-{self.tag}")
            if self._end is not None:
                await self._end(self)  # noqa: ASYNC102  # the test is about it

    @handles(Do)
    async def do(self, message: Do) -> Any:
        return await message.act(self)

    @handles(DoGrouped, group="io", limit=2)
    async def do_grouped(self, message: DoGrouped) -> Any:
        return await message.act(self)

    @handles(Run)
    async def run(self, message: Run) -> None:
        await message.act(self)

    @handles(RunGrouped, group="io", limit=2)
    async def run_grouped(self, message: RunGrouped) -> None:
        await message.act(self)

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.notes.append(message.text)

    @handles(Echo)
    async def echo(self, message: Echo) -> str:
        self.notes.append(message.text)
        return message.text

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise message.error

    @handles(Count)
    async def count_up(self, message: Count) -> int:
        self.count += 1
        return self.count

    @handles(Number)
    async def number(self, message: Number) -> int:
        return self.context.restart.number


async def crash(ref: Ref[Puppet], error: BaseException | None = None) -> BaseException:
    """Crash an actor; returns the cause that its caller saw."""
    with pytest.raises(ActorFailedError) as caught:
        await ref.ask(Crash() if error is None else Crash(error))
    cause = caught.value.__cause__
    assert cause is not None
    return cause


@attrs.define
class Gate:
    """A handler that waits in the middle, so that a test can do things meanwhile.

    Attributes:
        entered: Set when the handler runs.
        open: Set it to let the handler continue.
        ended: How the handler ended: "returned" or the name of an exception's class.
    """

    entered: trio.Event = attrs.field(factory=trio.Event)
    open: trio.Event = attrs.field(factory=trio.Event)
    ended: str | None = None

    async def __call__(self, actor: Puppet) -> str:
        self.entered.set()
        try:
            await self.open.wait()
        except BaseException as error:
            self.ended = type(error).__name__
            raise
        self.ended = "returned"
        return "through the gate"


async def shielded(actor: Puppet, gate: Gate) -> None:
    with trio.CancelScope(shield=True):
        await gate(actor)


@attrs.define
class Asker:
    """An ask in a task of its own, with its outcome.

    Attributes:
        outcomes: Its outcomes, in repetition: a reply, or an exception.
        scope: Cancels the caller.
    """

    outcomes: list[object] = attrs.field(factory=list)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def outcome(self) -> object:
        assert len(self.outcomes) == 1, self.outcomes
        return self.outcomes[0]

    @property
    def is_waiting(self) -> bool:
        return not self.outcomes

    async def _run(self, ref: Ref[Puppet], message: Any, abandon: bool) -> None:
        with self.scope:
            try:
                if isinstance(message, Request):
                    self.outcomes.append(await ref.ask(message, abandon_on_cancel=abandon))
                else:
                    await ref.tell(message)
                    self.outcomes.append("told")
            except trio.Cancelled as cancelled:
                self.outcomes.append(cancelled)
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
                self.outcomes.append(error)


def start_ask(nursery: trio.Nursery, ref: Ref[Any], message: Any, *, abandon: bool = False) -> Asker:
    """Ask (or tell, if the message is told) in a task of its own."""
    asker = Asker()
    nursery.start_soon(asker._run, ref, message, abandon)
    return asker


async def started(nursery: trio.Nursery, ref: Ref[Any], message: Any, *, abandon: bool = False) -> Asker:
    """Ask in a task of its own, and wait until nothing moves."""
    asker = start_ask(nursery, ref, message, abandon=abandon)
    await trio.testing.wait_all_tasks_blocked()
    return asker


class Events(list[Event]):
    """The reports to an observer."""

    def of(self, *classes: type) -> list[Any]:
        return [event for event in self if isinstance(event, classes)]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self]


def deferring(replies: list[DeferredReply[Any]], on_cancel: Callable[[], None] | None = None) -> Do:
    """A request with a reply in a list, to be given later."""

    async def act(actor: Puppet) -> object:
        replies.append(actor.context.defer(on_cancel=on_cancel))
        return replies[-1]

    return Do(act)


@contextmanager
def raises_group() -> Iterator[pytest.ExceptionInfo[ExceptionGroup[Exception]]]:
    """Expect an exception group from a block of any length: a whole life of a system or a supervisor."""
    with pytest.raises(ExceptionGroup) as caught:  # noqa: ASYNC401  # any group will do
        yield caught
