"""Messages: their bases, one on its way, the slot in which its outcome arrives, and the tasks of actors."""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, final

import attrs
import outcome
import trio

from ._system_state import SystemState

__all__ = ["WAKE_VALUE", "ItemRequest", "Message", "Request", "Serves", "Waiter", "actor_path_of"]

ActorT_contra = TypeVar("ActorT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)
ItemT_co = TypeVar("ItemT_co", covariant=True)
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
MessageT_co = TypeVar("MessageT_co", covariant=True)
# Seen from the class object, the actor is something that comes out.
TargetT_co = TypeVar("TargetT_co", covariant=True)


class _MessageName:
    __slots__ = ()

    @property
    def operation(self) -> str:
        """Name of the message in snapshots and errors."""
        return type(self).__name__


class Request(_MessageName, Generic[ActorT_contra, ReplyT_co]):
    """Base of messages that are asked: a frozen attrs class for one actor class and one reply type.

    >>> import attrs
    >>> @attrs.frozen
    ... class Add(Request["Counter", int]):
    ...     n: int = 1
    """

    __slots__ = ()

    @classmethod
    def __types__(cls) -> tuple[ActorT_contra, ReplyT_co]:
        """Carries the type parameters to type checkers."""
        raise TypeError("a message class carries only the types of its messages")


class Serves(Generic[ItemT_contra, ReplyT_co]):
    """Base of generic actors: what an `ItemRequest` is answered with follows from the actor's own types."""

    def __serves__(self, item: ItemT_contra, /) -> ReplyT_co:
        """Carries the type parameters to type checkers."""
        raise TypeError("an actor carries only the types of its items")


class ItemRequest(Generic[ItemT_co]):
    """Beside `Request`, the base of messages that bring one item to an actor that `Serves` such items."""

    __slots__ = ()

    def __item__(self) -> ItemT_co:
        """Carries the type parameter to type checkers."""
        raise TypeError("a message carries only the type of its item")


class Message(_MessageName, Generic[ActorT_contra]):
    """Base of messages that are told: a frozen attrs class for one actor class, without a reply."""

    __slots__ = ()

    @classmethod
    def __actor__(cls) -> ActorT_contra:  # type: ignore[misc]  # never called: only carries the type
        """Carries the type parameter to type checkers."""
        raise TypeError("a message class carries only the types of its messages")


AnyMessage = Request[Any, Any] | Message[Any]


class RequestClass(Protocol[MessageT_co, TargetT_co, ReplyT_co]):
    """The class object of a request, as type checkers see it."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __types__(self) -> tuple[TargetT_co, ReplyT_co]: ...


class MessageClass(Protocol[MessageT_co, TargetT_co]):
    """The class object of a told message, as type checkers see it."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __actor__(self) -> TargetT_co: ...


_logger = logging.getLogger("trio_accel.actors")

EXPIRED: Final = object()
"""Outcome of a request that was dropped because its deadline had passed."""

_NEVER = float("inf")
_ASKER_CANCELLED = "the asker was cancelled"


class EnvelopeState(enum.IntEnum):
    """The place of an envelope on its way; it only moves down this list, or back to QUEUED."""

    QUEUED = 0
    RUNNING = 1
    STASHING = 2
    """Still running, to be set aside when its handler returns."""
    DEFERRED = 3
    DONE = 4


class _Queue(Protocol):
    def withdraw(self, envelope: Envelope) -> None: ...


class Party(Protocol):
    """An actor as messages see it: they go to one, and may come from one."""

    path: str
    system: SystemState

    @property
    def actor_class(self) -> type:
        """The class of the actor."""
        ...

    @property
    def mailbox(self) -> _Queue:
        """The queue in which its messages wait."""
        ...

    @property
    def awaited(self) -> Envelope | AwaitedStart | None:
        """The work of the running task that another actor may wait for."""
        ...

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run."""
        ...


@attrs.frozen(eq=False)
class AwaitedStart:
    """The start of an actor that another waits for: a link of the chain of callers, as a request is.

    Attributes:
        sender: The actor that waits.
        caller: The work of that actor meanwhile.
    """

    sender: Party
    caller: Envelope | AwaitedStart | None


@attrs.define(eq=False, repr=False)
class Waiter:
    """The slot for the one outcome of a request: a task that waits for it, or a function that takes it.

    Envelopes, direct replies, and the requests to a worker are all waited for in this way.

    Invariant: `task` is parked exactly while it is not None. The code that reschedules it, or lets it go in
    the abort function, forgets it in the same step. So no stale wake-up reaches a later wait of that task.

    Attributes:
        task: The task that waits, while it is parked.
        on_done: Called with the outcome in place of a task.
        result: The outcome, if it came before a task waited for it.
        raise_cancel: Raises the cancellation of the task, once it is cancelled and waits on all the same.
    """

    task: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    on_done: Callable[[outcome.Outcome[Any]], None] | None = attrs.field(default=None, init=False)
    result: outcome.Outcome[Any] | None = attrs.field(default=None, init=False)
    raise_cancel: Callable[[], NoReturn] | None = attrs.field(default=None, init=False)

    @property
    def is_cancelled(self) -> bool:
        """Whether the waiting task was cancelled, and waits on."""
        return self.raise_cancel is not None

    def park(self) -> Awaitable[Any]:
        """Park the current task until the outcome is there, which the await returns; await it at once."""
        self.task = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(self.abort)  # noqa: ASYNC105  # by the caller

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Take note that the parked task is cancelled: Trio's abort function.

        By default the task waits on, and `end_wait` or the outcome lets it go.
        """
        self.raise_cancel = raise_cancel
        return trio.lowlevel.Abort.FAILED

    def settle(self, result: outcome.Outcome[Any]) -> None:
        """Give the outcome to the task or the function, or keep it for the task to come."""
        # Both are taken out first: frames of an error that lives on refer to the waiter, which must keep no
        # task alive.
        task, self.task = self.task, None
        on_done, self.on_done = self.on_done, None
        if task is not None:
            trio.lowlevel.reschedule(task, result)
        elif on_done is not None:
            on_done(result)
        else:
            self.result = result

    def take(self) -> Any:
        """Return the outcome that was kept, or raise it.

        Nothing here holds an error then, not even a variable of this frame: the frame is in its traceback.
        """
        return self._taken().unwrap()

    def _taken(self) -> outcome.Outcome[Any]:
        result, self.result = self.result, None
        assert result is not None  # it was settled, and is taken once
        return result

    def cancellation(self) -> outcome.Outcome[Any]:
        """Make the outcome of a cancelled task: its own cancellation."""
        assert self.raise_cancel is not None  # it was cancelled
        return outcome.capture(self.raise_cancel)


@attrs.define(eq=False, repr=False)
class Envelope(Waiter):
    """A message with what travels beside it, and the slot for its one outcome.

    Invariants: those of `Waiter`. `resolve` acts once; later calls are no-ops.
    """

    # The actor that it goes to.
    cell: Party
    message: AnyMessage
    context: Context
    sender: Party | None = None
    # The sender's own work: these links are the chain of callers, in which a cycle is found.
    caller: Envelope | AwaitedStart | None = None
    is_told: bool = attrs.field(default=False, kw_only=True)
    # Whether its asker goes at once when cancelled, also if it runs.
    is_abandonable: bool = attrs.field(default=False, kw_only=True)
    deadline: float = _NEVER
    state: EnvelopeState = EnvelopeState.QUEUED
    scope: trio.CancelScope | None = None
    on_cancel: Callable[[], None] | None = None
    on_failed_hook: Callable[[Exception], None] | None = None
    # Called by its asker before it parks; `no_poll` for nothing, None where no asker will call it.
    last_poll: Callable[[], None] | None = None
    # Set while messages are observed; the number is set with the start.
    number: int = attrs.field(init=False)
    queued_at: float | None = None
    started_at: float | None = None

    @property
    def ends_at(self) -> float:
        """The time when its handler gives up: never, if the asker leaves it to itself."""
        return _NEVER if self.is_abandonable else self.deadline

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Cancel the task that is parked for it, or let it wait on: Trio's abort function."""
        if self.state == EnvelopeState.QUEUED:
            # The message has not begun, so its asker can go at once.
            self.cell.mailbox.withdraw(self)
            return trio.lowlevel.Abort.SUCCEEDED
        if self.is_abandonable:
            # The task waits no more: not for a reply, and not as a link of the chain of callers.
            self.task = self.sender = self.caller = None
            return trio.lowlevel.Abort.SUCCEEDED
        # The asker goes on waiting until the request has unwound.
        waits_on = super().abort(raise_cancel)
        if self.scope is not None:
            self.scope.cancel(reason=_ASKER_CANCELLED)
        self.call_hook()
        return waits_on

    def call_hook(self) -> None:
        """Tell the actor that has deferred the reply that its asker is cancelled."""
        if self.on_cancel is None:
            return
        try:
            self.on_cancel()
        except Exception as error:
            # It is called while Trio delivers the cancellation: an exception there ends the whole run.
            path, operation = self.cell.path, self.message.operation
            extra = {"path": path, "message_type": operation}
            _logger.exception("actor %s: the on_cancel hook of %s failed", path, operation, extra=extra)
            if self.on_failed_hook is not None:
                self.on_failed_hook(error)

    def run_in(self, scope: trio.CancelScope) -> None:
        """Let the asker's cancellation cancel a scope, at once if it has come already."""
        self.scope = scope
        if self.raise_cancel is not None:
            scope.cancel(reason=_ASKER_CANCELLED)

    def resolve(self, result: outcome.Outcome[object]) -> bool:
        """Deliver the outcome, unless there was one already."""
        if self.state == EnvelopeState.DONE:
            return False
        self.state = EnvelopeState.DONE
        self.scope = self.on_cancel = self.on_failed_hook = None
        # An envelope without either was told, or its asker has left it: its outcome is not kept.
        if self.task is not None or self.on_done is not None:
            self.settle(result)
        return True

    def fail(self, error: BaseException) -> bool:
        """Deliver an error, unless there was an outcome already."""
        return self.resolve(outcome.Error(error))

    def unwind(self) -> bool:
        """Deliver the asker's own cancellation: the request has unwound."""
        if self.raise_cancel is None:
            raise RuntimeError("the caller is not cancelled")
        return self.resolve(self.cancellation())


def no_poll() -> None:
    """Do nothing: the `last_poll` of an asker that would call one."""


cells: dict[trio.lowlevel.Task, Party] = {}
"""The actors that tasks are running for, of all systems: an actor of one may ask an actor of another.

Each task takes its own entry away.
"""


@final
class _Woken(outcome.Outcome[None]):
    """None, for any number of tasks. Trio makes a `Value` each time: three tenths of a wake-up."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Tell nothing."""

    def send(self, gen: Generator[Any, None, Any]) -> Any:
        """Go on with a generator."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Any]) -> Any:
        """Go on with an async generator."""
        return await agen.asend(None)


WAKE_VALUE: Final[outcome.Outcome[None]] = _Woken()
"""The outcome None for `trio.lowlevel.reschedule`, shared by all tasks that are told nothing."""


@contextmanager
def running(cell: Party) -> Generator[trio.lowlevel.Task, None, None]:
    """Run the current task for an actor."""
    task = trio.lowlevel.current_task()
    cells[task] = cell
    try:
        yield task
    finally:
        del cells[task]


def lend(task: trio.lowlevel.Task, cell: Party | None) -> Party | None:
    """Let a task run for an actor, or for none; returns for which it did before."""
    before = cells.pop(task, None)
    if cell is not None:
        cells[task] = cell
    return before


def cell_of_task() -> Party | None:
    """Find the actor that the current task is running for; None for a task that a handler has started."""
    return cells.get(trio.lowlevel.current_task())


def running_cells() -> list[Party]:
    """List all actors that have tasks."""
    return list(dict.fromkeys(cells.values()))


def actor_path_of(task: trio.lowlevel.Task) -> str | None:
    """Find the path of the actor whose task this is; None if it is no actor's."""
    cell = cells.get(task)
    return None if cell is None else cell.path
