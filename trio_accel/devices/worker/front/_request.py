"""Requests of the application that a worker serves."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import NoReturn

import outcome
import trio

from ....actors import WOKEN
from ....backends.base.ops import ArraySpec, CopyToHostSpec
from ...base._order import Turn
from ...operations._operation import Launch
from ..transport._codec import Message
from ..transport._frames import Address
from ._host_arrays import HostArrays
from ._launches import TemplateTable, encode_launch

__all__ = ["LeaseRequest", "OperationRequest", "RemoteRequest"]


class RemoteRequest:
    """One request, from the moment it is handed over until its outcome; it may see several workers.

    Attributes:
        number: Its place in the order of the device's requests.
        library: Import path of the library that it goes to; "" for a lease.
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        losses: How often the context was lost while it was in flight.
        turn: Its place behind those that it must follow, while it waits in the application.
        copies: What uses its host arrays now: copies that run, and a lost worker that is not dead yet.
        failure: Why one of these failed.
        is_cancelled: Whether the asker wants out.
        is_left: Whether the asker waits no longer than for copies of its arrays; the worker may go on.
        is_over: Whether it has its outcome.
    """

    __slots__ = (
        "_end",
        "_on_done",
        "_raise_cancel",
        "_result",
        "_task",
        "copies",
        "failure",
        "is_cancelled",
        "is_left",
        "is_over",
        "library",
        "losses",
        "number",
        "reads",
        "turn",
        "writes",
    )

    def __init__(self, number: int, library: str, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.number: int = number
        self.library: str = library
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.losses: int = 0
        self.turn: Turn | None = None
        self.copies: int = 0
        self.failure: Exception | None = None
        self.is_cancelled: bool = False
        self.is_left: bool = False
        self.is_over: bool = False
        # How it ends when no copy runs any more.
        self._end: Callable[[], bool] | None = None
        self._result: outcome.Outcome[None] | None = None
        self._task: trio.lowlevel.Task | None = None
        self._raise_cancel: Callable[[], NoReturn] | None = None
        self._on_done: Callable[[BaseException | None], None] | None = None

    def message(self, word: int, released: tuple[int, ...], templates: TemplateTable) -> Message:
        """What is sent to the worker that has these templates."""
        raise NotImplementedError

    @property
    def has_room(self) -> bool:
        """Whether there is host memory for the staged transfers of its host arrays."""
        return True

    def call_back(self, on_done: Callable[[BaseException | None], None]) -> None:
        """Hand the outcome to a function."""
        self._on_done = on_done

    @property
    def context(self) -> Context:
        """Context variables of the task that waits."""
        assert self._task is not None
        return self._task.context

    async def wait(self, on_cancel: Callable[[RemoteRequest], bool]) -> None:
        """Wait for the outcome.

        Args:
            on_cancel: Called when the waiting task is cancelled; returns whether the request is withdrawn
                at once. Otherwise its end is waited for.
        """
        if self._result is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            self.take_result().unwrap()
            return
        self._task = trio.lowlevel.current_task()

        def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            if on_cancel(self):
                self._task = None
                self.is_over = True
                self._let_go()
                return trio.lowlevel.Abort.SUCCEEDED
            self._raise_cancel = raise_cancel
            self.is_cancelled = True
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def take_result(self) -> outcome.Outcome[None]:
        """The outcome of a request that is over, and that nobody has waited for; to be unwrapped at once.

        An error has a traceback, and that what the asker had: whoever kept both would keep them until garbage
        is collected.
        """
        result, self._result = self._result, None
        return WOKEN if result is None else result

    def finish(self, error: BaseException | None) -> bool:
        """Give the outcome; a second one does nothing and returns False."""
        if self.is_left:
            return self.unwind()
        return self._settle(None if error is None else outcome.Error(error), error)

    def finish_after_copies(self, error: BaseException | None) -> None:
        """Give the outcome when nothing uses the program's arrays any more; a copy may fail until then."""
        if self.copies:
            self._after_copies(lambda: self.finish(error or self.failure))
            return
        if error is None:
            error = self.failure
        self._settle(None if error is None else outcome.Error(error), error)

    def unwind_after_copies(self) -> None:
        """Let a cancelled asker go when nothing uses the program's arrays any more, whatever the outcome."""
        self._end = None
        self._after_copies(self.unwind)

    def copy_over(self) -> None:
        """One of those that used its arrays does so no more."""
        self.copies -= 1
        end, self._end = self._end, None
        if end is not None:
            self._after_copies(end)
        elif self.is_left:
            self.leave()

    def leave(self) -> None:
        """Let a cancelled asker go when no copy uses the program's arrays any more, whatever the worker does.

        What the request holds is kept until its end at the worker, when it is finished or unwound as well.
        """
        self.is_left = True
        if not self.copies and not self.is_over:
            assert self._raise_cancel is not None
            self._deliver(outcome.capture(self._raise_cancel), None)

    def retire(self) -> None:
        """Nothing works on it any more: give back what it holds."""
        self._let_go()

    def _let_go(self) -> None:
        """Give back what it has taken for itself."""

    def _after_copies(self, end: Callable[[], bool]) -> None:
        if not self.copies:
            end()
        elif self._end is None:
            self._end = end

    def unwind(self) -> bool:
        """Give a cancelled asker its cancellation."""
        assert self._raise_cancel is not None
        is_news = self._settle(outcome.capture(self._raise_cancel), None)
        if self.is_left:
            # Its asker leaves that to the end of the request.
            self.retire()
        return is_news

    def _settle(self, result: outcome.Outcome[None] | None, error: BaseException | None) -> bool:
        """Give the outcome; None if it is done and there is nothing to say."""
        if self.is_over:
            if self.is_left:
                self.retire()
            return False
        self._let_go()
        self._deliver(result, error)
        return True

    def _deliver(self, result: outcome.Outcome[None] | None, error: BaseException | None) -> None:
        self.is_over = True
        task, on_done = self._task, self._on_done
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task, WOKEN if result is None else result)
        elif on_done is not None:
            self._on_done = None
            on_done(error)
        else:
            self._result = WOKEN if result is None else result


class OperationRequest(RemoteRequest):
    """A launch in a worker.

    Attributes:
        launch: What is launched.
        invalidates: Whether its outputs are invalid also if it was never launched.
        hosts: Its host arrays.
        may_collect: Whether garbage is to be collected, once, before it fails for want of memory. Not if
            others may have been refused because of it by then.
    """

    __slots__ = ("hosts", "invalidates", "launch", "may_collect")

    def __init__(self, number: int, launch: Launch, hosts: HostArrays, *, invalidates: bool) -> None:
        super().__init__(number, launch.library, launch.reads, launch.writes)
        self.launch: Launch = launch
        self.invalidates: bool = invalidates
        self.hosts: HostArrays = hosts
        self.may_collect: bool = not invalidates

    @property
    def makes_all_it_writes(self) -> bool:
        """Whether it changes no array that was there before."""
        return self.writes <= {block for block, _ in self.launch.allocations}

    @property
    def has_room(self) -> bool:
        """Whether there is host memory for the staged transfers of its host arrays."""
        staging = self.hosts.staging
        return staging is None or not staging.taken or self.hosts.fit(self.launch)

    def message(self, word: int, released: tuple[int, ...], templates: TemplateTable) -> Message:
        """What is sent to the worker that has these templates.

        Raises:
            InputFailedError, StaleRefError: An array of it must not be used any more.
            OutOfMemoryError: There is no host memory for a staged transfer.
            TypeError: The specification holds what cannot cross.
        """
        self.launch.check_inputs()
        hosts, launch = self.hosts, self.launch
        found = None if hosts.is_used else templates.find(launch, hosts.address)
        if found is not None:
            if type(launch.spec) is CopyToHostSpec:
                hosts.is_written = True
            template, blocks, packed = found
            return "replay", self.number, word, self.invalidates, template, blocks, released, packed
        if hosts.is_used:
            hosts.begin()
        return "request", self.number, word, self.invalidates, encode_launch(launch, hosts), released

    def retire(self) -> None:
        """Nothing works on it any more: give back what it holds."""
        self._let_go()
        self.launch.forget()

    def _let_go(self) -> None:
        if self.hosts.is_used:
            self.hosts.clear()


class LeaseRequest(RemoteRequest):
    """Memory that the program holds; it survives the worker, and holds the same in the next."""

    __slots__ = ("address", "array", "block", "granted", "is_given_back")

    def __init__(self, number: int, array: ArraySpec, *, write: bool) -> None:
        block = frozenset([array.block])
        super().__init__(number, "", frozenset() if write else block, block if write else frozenset())
        self.array: ArraySpec = array
        self.granted: trio.Event = trio.Event()
        # Where it lies, once it is granted.
        self.address: Address | None = None
        self.is_given_back: bool = False

    def message(self, word: int, released: tuple[int, ...], templates: TemplateTable) -> Message:
        """What is sent to the worker."""
        return "lease", self.number, self.array.block, bool(self.writes), released
