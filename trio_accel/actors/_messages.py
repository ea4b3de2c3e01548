"""Messages: base classes, envelopes, the slot for an outcome, and where tasks wait.

A program may drive an await by hand: `waiting = call.__await__()`, `waiting.send(None)`, and then close it,
throw into it, drop it, or keep it and await something else. Trio does not notice, because it sees only the
task's own traps. Trio's lots and events keep such a task, and the next wake-up raises `AssertionError` in the
task that wakes, which may be the reader of a device. Two rules prevent this:

* A wait ends its registration however its frame ends, with or without an outcome.
* Each wait marks the task (`Task.custom_sleep_data`, which Trio clears at each wake-up), and a task is woken
  only while it has the mark of this wait. A later wait replaces the mark of a wait that the task has kept.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, final

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._system_state import SystemState

__all__ = [
    "WAKE_VALUE",
    "ItemRequest",
    "Message",
    "ParkingLot",
    "Request",
    "Serves",
    "TaskEvent",
    "TaskLock",
    "Waiter",
    "actor_path_of",
]

ActorT_contra = TypeVar("ActorT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)
ItemT_co = TypeVar("ItemT_co", covariant=True)
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
MessageT_co = TypeVar("MessageT_co", covariant=True)
# From the class object's point of view, the actor is an output: hence covariant.
TargetT_co = TypeVar("TargetT_co", covariant=True)


class _MessageName:
    __slots__ = ()

    @property
    def operation(self) -> str:
        """Name of the message in snapshots and statistics."""
        return type(self).__name__

    @property
    def shown_name(self) -> str:
        """Name of the message in errors: what the program calls to send it."""
        return self.operation


class Request(_MessageName, Generic[ActorT_contra, ReplyT_co]):
    """Base class of requests: a frozen attrs class for one actor class and one reply type. Use it with `ask`.

    >>> import attrs
    >>> @attrs.frozen
    ... class Add(Request["Counter", int]):
    ...     n: int = 1
    """

    __slots__ = ()

    @classmethod
    def __types__(cls) -> tuple[ActorT_contra, ReplyT_co]:
        """Carry the type parameters for type checkers."""
        raise TypeError("a message class carries only the types of its messages")


class Serves(Generic[ItemT_contra, ReplyT_co]):
    """Base class of generic actors: the actor's own types determine the reply type of an `ItemRequest`."""

    def __serves__(self, item: ItemT_contra, /) -> ReplyT_co:
        """Carry the type parameters for type checkers."""
        raise TypeError("an actor carries only the types of its items")


class ItemRequest(Generic[ItemT_co]):
    """Second base class, next to `Request`, for messages that carry one item to an actor that `Serves` it."""

    __slots__ = ()

    def __item__(self) -> ItemT_co:
        """Carry the type parameter for type checkers."""
        raise TypeError("a message carries only the type of its item")


class Message(_MessageName, Generic[ActorT_contra]):
    """Base class of one-way messages: a frozen attrs class for one actor class. Use it with `tell`."""

    __slots__ = ()

    @classmethod
    def __actor__(cls) -> ActorT_contra:  # type: ignore[misc]  # never called: only carries the type
        """Carry the type parameter for type checkers."""
        raise TypeError("a message class carries only the types of its messages")


AnyMessage = Request[Any, Any] | Message[Any]


class RequestClass(Protocol[MessageT_co, TargetT_co, ReplyT_co]):
    """The class object of a request, as seen by type checkers."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __types__(self) -> tuple[TargetT_co, ReplyT_co]: ...


class MessageClass(Protocol[MessageT_co, TargetT_co]):
    """The class object of a one-way message, as seen by type checkers."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __actor__(self) -> TargetT_co: ...


_logger = logging.getLogger("trio_accel.actors")

EXPIRED: Final = object()
"""The outcome of a request dropped because its deadline had passed."""

_NEVER = float("inf")
_ASKER_CANCELLED = "the asker was cancelled"


class EnvelopeState(enum.IntEnum):
    """The progress of an envelope: it only moves down this list, or back to QUEUED."""

    QUEUED = 0
    RUNNING = 1
    STASHING = 2
    """Still running, and will be stashed when its handler returns."""
    DEFERRED = 3
    DONE = 4


class _Queue(Protocol):
    def withdraw(self, envelope: Envelope) -> None: ...


class Party(Protocol):
    """An actor as messages see it: their receiver and maybe their sender."""

    path: str
    system: SystemState

    @property
    def actor_class(self) -> type:
        """The class of the actor."""
        ...

    @property
    def mailbox(self) -> _Queue:
        """The queue of waiting messages."""
        ...

    @property
    def awaited(self) -> Envelope | AwaitedStart | None:
        """The current task's work for this actor, if another actor may wait for it."""
        ...

    def check_run(self, verb: str) -> None:
        """Raise `RuntimeError` in another thread or Trio run."""
        ...

    def acting_for(self, caller: trio.lowlevel.Task) -> AbstractContextManager[None]:
        """Let the current task work for the actor, on the message of another of its tasks."""
        ...


@attrs.frozen(eq=False)
class AwaitedStart:
    """An actor's wait for another actor to start: a link in the chain of callers, as a request is.

    Attributes:
        sender: The waiting actor.
        caller: The waiting actor's own work.
    """

    sender: Party
    caller: Envelope | AwaitedStart | None


@attrs.define(eq=False, repr=False)
class Waiter:
    """The slot for the one outcome of a request: either a task waits for it, or a function receives it.

    It serves envelopes, direct replies and the requests to a worker.

    Invariant: `task` is parked exactly while it is not None. Code that reschedules the task, or releases it
    in the abort function, clears `task` in the same step. So a stale wake-up cannot reach a later wait of the
    task, and a wait that ends with a `task` was closed half-way.

    Attributes:
        task: The waiting task, while it is parked.
        on_done: Receives the outcome instead of a task.
        result: The outcome, if it arrived before a task waited for it.
        raise_cancel: Raises the task's cancellation; set once the task is cancelled but continues to wait.
    """

    task: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    on_done: Callable[[outcome.Outcome[Any]], None] | None = attrs.field(default=None, init=False)
    result: outcome.Outcome[Any] | None = attrs.field(default=None, init=False)
    raise_cancel: Callable[[], NoReturn] | None = attrs.field(default=None, init=False)

    @property
    def is_cancelled(self) -> bool:
        """Whether the waiting task was cancelled but continues to wait."""
        return self.raise_cancel is not None

    async def park(self) -> Any:
        """Park the current task until the outcome arrives, and return the outcome."""
        self.task = trio.lowlevel.current_task()
        self.task.custom_sleep_data = self
        try:
            return await trio.lowlevel.wait_task_rescheduled(self.abort)
        finally:
            # `settle` clears it, unless the wait was left half-way.
            if self.task is not None:  # pyright: ignore[reportUnnecessaryComparison]
                self.desert()

    def desert(self) -> None:
        """Withdraw the request as if the task were cancelled, because the task has left its wait half-way.

        A program has driven the await by hand, and closed it. No task waits for the outcome then.
        """
        task = self.task
        if task is not None and task.custom_sleep_data is self:
            # The actor may deliver the cancellation at once, and the task must not get it.
            task.custom_sleep_data = None
        # The collector closes an await that was dropped, perhaps after the run or in another thread.
        if trio.lowlevel.in_trio_run():
            self.abort(raise_closed)
        self.task = None

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Record that the parked task is cancelled: Trio's abort function.

        By default the task continues to wait until it gets an outcome, such as its own `cancellation`.
        """
        self.raise_cancel = raise_cancel
        return trio.lowlevel.Abort.FAILED

    def settle(self, result: outcome.Outcome[Any]) -> None:
        """Deliver the outcome to the task or the function, or keep it for a later task."""
        # Clear both first: the frames of a surviving error refer to the waiter, which must not keep a task
        # alive.
        task, self.task = self.task, None
        on_done, self.on_done = self.on_done, None
        if task is not None:
            # A task may have kept its wait half-way, and wait for something else by now.
            if task.custom_sleep_data is self:
                trio.lowlevel.reschedule(task, result)
        elif on_done is not None:
            on_done(result)
        else:
            self.result = result

    def take(self) -> Any:
        """Return the kept outcome, or raise it.

        After this, no variable here refers to an error, not even in this frame, because the traceback keeps
        the frame.
        """
        return self._taken().unwrap()

    def _taken(self) -> outcome.Outcome[Any]:
        result, self.result = self.result, None
        assert result is not None  # it was settled, and is taken once
        return result

    def cancellation(self) -> outcome.Outcome[Any]:
        """Return the outcome of a cancelled task: its own cancellation."""
        assert self.raise_cancel is not None  # it was cancelled
        return outcome.capture(self.raise_cancel)


@attrs.define(eq=False, repr=False)
class Envelope(Waiter):
    """A message with its metadata, and the slot for its one outcome.

    Invariants: as for `Waiter`. In addition, `resolve` acts once; later calls do nothing.
    """

    # The receiving actor.
    cell: Party
    message: AnyMessage
    context: Context
    sender: Party | None = None
    # The sender's own work. These links form the chain of callers, which reveals cycles.
    caller: Envelope | AwaitedStart | None = None
    is_told: bool = attrs.field(default=False, kw_only=True)
    # Whether a cancelled caller returns at once, even while the request runs.
    is_abandonable: bool = attrs.field(default=False, kw_only=True)
    deadline: float = _NEVER
    state: EnvelopeState = EnvelopeState.QUEUED
    scope: trio.CancelScope | None = None
    on_cancel: Callable[[], None] | None = None
    on_failed_hook: Callable[[Exception], None] | None = None
    # The caller calls it before its task parks. `no_poll` does nothing; None means that the caller will not
    # call it.
    last_poll: Callable[[], None] | None = None
    # Set while observers are installed; the number is set at the start.
    number: int = attrs.field(init=False)
    queued_at: float | None = None
    started_at: float | None = None

    @property
    def ends_at(self) -> float:
        """The time when the handler gives up: infinity if the request outlives its caller."""
        return _NEVER if self.is_abandonable else self.deadline

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Cancel the parked task, or let it continue to wait: Trio's abort function."""
        if self.state == EnvelopeState.QUEUED:
            # The message has not started, so its caller can return at once.
            self.cell.mailbox.withdraw(self)
            return trio.lowlevel.Abort.SUCCEEDED
        if self.is_abandonable:
            # The task waits neither for a reply nor as a link in the chain of callers from now on.
            self.task = self.sender = self.caller = None
            return trio.lowlevel.Abort.SUCCEEDED
        # The caller continues to wait until the request has unwound.
        waits_on = super().abort(raise_cancel)
        if self.scope is not None:
            self.scope.cancel(reason=_ASKER_CANCELLED)
        self.call_hook()
        return waits_on

    def call_hook(self) -> None:
        """Notify the actor that the caller of its deferred reply is cancelled."""
        if self.on_cancel is None:
            return
        try:
            self.on_cancel()
        except Exception as error:
            # Trio calls this while it delivers the cancellation, so an exception would end the entire run.
            path, operation = self.cell.path, self.message.operation
            extra = {"path": path, "message_type": operation}
            _logger.exception("actor %s: the on_cancel hook of %s failed", path, operation, extra=extra)
            if self.on_failed_hook is not None:
                self.on_failed_hook(error)

    def run_in(self, scope: trio.CancelScope) -> None:
        """Let the caller's cancellation cancel a scope, at once if the caller is already cancelled."""
        self.scope = scope
        if self.raise_cancel is not None:
            scope.cancel(reason=_ASKER_CANCELLED)

    def resolve(self, result: outcome.Outcome[object]) -> bool:
        """Deliver the outcome, unless there already was one; return whether this one was delivered."""
        if self.state == EnvelopeState.DONE:
            return False
        self.state = EnvelopeState.DONE
        self.scope = self.on_cancel = self.on_failed_hook = None
        # Without either, nobody needs the outcome: the message was one-way, or its caller has returned.
        if self.task is not None or self.on_done is not None:
            self.settle(result)
        return True

    def fail(self, error: BaseException) -> bool:
        """Deliver an error, unless there already was an outcome."""
        return self.resolve(outcome.Error(error))

    def unwind(self) -> bool:
        """Deliver the caller's own cancellation, because the request has unwound."""
        if self.raise_cancel is None:
            raise RuntimeError("the caller is not cancelled")
        return self.resolve(self.cancellation())


def no_poll() -> None:
    """Do nothing: the `last_poll` of a caller that would call one."""


cells: dict[trio.lowlevel.Task, Party] = {}
"""The actors that run in each task, across all systems, because actors may ask actors of another system.

Each task removes its own entry.
"""


@final
class _Woken(outcome.Outcome[None]):
    """None, for any number of tasks. Trio makes a new `Value` each time, which is 30 % of a wake-up."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Return None."""

    def send(self, gen: Generator[Any, None, Any]) -> Any:
        """Resume a generator."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Any]) -> Any:
        """Resume an async generator."""
        return await agen.asend(None)


def raise_closed() -> NoReturn:
    """Raise the cancellation of a wait that its task has left half-way; nobody gets it."""
    raise GeneratorExit


WAKE_VALUE: Final[outcome.Outcome[None]] = _Woken()
"""The outcome None for `trio.lowlevel.reschedule`, shared by all tasks that need only to wake."""


@contextmanager
def running(cell: Party) -> Generator[trio.lowlevel.Task, None, None]:
    """Run the current task on behalf of an actor."""
    task = trio.lowlevel.current_task()
    cells[task] = cell
    try:
        yield task
    finally:
        del cells[task]


def lend(task: trio.lowlevel.Task, cell: Party | None) -> Party | None:
    """Let a task run on behalf of an actor, or of none; return the previous actor."""
    previous = cells.pop(task, None)
    if cell is not None:
        cells[task] = cell
    return previous


def cell_of_task() -> Party | None:
    """Return the actor of the current task, or None in a task that a handler has started."""
    return cells.get(trio.lowlevel.current_task())


def running_cells() -> list[Party]:
    """List all actors with tasks."""
    return list(dict.fromkeys(cells.values()))


def actor_path_of(task: trio.lowlevel.Task) -> str | None:
    """Return the path of a task's actor, or None if the task does not belong to an actor."""
    cell = cells.get(task)
    return None if cell is None else cell.path


def _runs(task: trio.lowlevel.Task) -> bool:
    try:
        return task is trio.lowlevel.current_task()
    except RuntimeError:
        # No task runs while Trio cancels tasks or calls the functions of other threads.
        return False


class ParkingLot:
    """Parked tasks, as in `trio.lowlevel.ParkingLot`; a closed wait leaves the lot."""

    __slots__ = ("_parked",)

    def __init__(self) -> None:
        # The task of each wait. A task may have left several waits half-way.
        self._parked: dict[object, trio.lowlevel.Task] = {}

    def __len__(self) -> int:
        """Return the number of parked tasks."""
        return len(self._parked)

    @enable_ki_protection
    async def park(self) -> None:
        """Park the current task until it is woken; can be cancelled."""
        wait = object()
        parked = self._parked

        def abort(_: object) -> trio.lowlevel.Abort:
            # At once, because code that runs before this task may count the tasks or wake one.
            parked.pop(wait, None)
            return trio.lowlevel.Abort.SUCCEEDED

        task = parked[wait] = trio.lowlevel.current_task()
        task.custom_sleep_data = wait
        del task
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            parked.pop(wait, None)

    @enable_ki_protection
    def unpark(self) -> bool:
        """Wake the task that has waited longest; return whether there was one."""
        while self._parked:
            if self._wake(next(iter(self._parked))):
                return True
        return False

    @enable_ki_protection
    def unpark_all(self) -> None:
        """Wake all tasks."""
        for wait in tuple(self._parked):
            self._wake(wait)

    def _wake(self, wait: object) -> bool:
        task = self._parked.pop(wait)
        # A task that runs is not parked, whatever its mark.
        if task.custom_sleep_data is not wait or _runs(task):
            return False
        trio.lowlevel.reschedule(task, WAKE_VALUE)
        return True


class TaskEvent:
    """An event that tasks wait for, as in `trio.Event`; a closed wait is forgotten."""

    __slots__ = ("_is_set", "_lot")

    def __init__(self) -> None:
        self._is_set = False
        self._lot: Final = ParkingLot()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake the tasks that wait."""
        self._is_set = True
        self._lot.unpark_all()

    async def wait(self) -> None:
        """Wait until it is set; a checkpoint in any case."""
        if self._is_set:
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()


class TaskLock:
    """A fair lock for tasks, as `trio.Lock`; a closed wait does not get it."""

    __slots__ = ("_is_locked", "_lot")

    def __init__(self) -> None:
        self._is_locked = False
        self._lot: Final = ParkingLot()

    def locked(self) -> bool:
        """Return whether a task has it."""
        return self._is_locked

    @enable_ki_protection
    def acquire_nowait(self) -> None:
        """Take it.

        Raises:
            trio.WouldBlock: Another task has it.
        """
        if self._is_locked:
            raise trio.WouldBlock
        self._is_locked = True

    @enable_ki_protection
    async def acquire(self) -> None:
        """Take it, or wait until the previous task passes it on; a checkpoint in any case."""
        if self._is_locked:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()
        if self._is_locked:
            # The task that wakes this one keeps it locked.
            await self._lot.park()
        else:
            self._is_locked = True

    @enable_ki_protection
    def release(self) -> None:
        """Pass it to the task that has waited longest, or leave it open."""
        self._is_locked = self._lot.unpark()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:  # noqa: ASYNC910  # as `trio.Lock`
        self.release()
