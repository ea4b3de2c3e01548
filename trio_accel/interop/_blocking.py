"""Calls of other threads in a Trio run: the thread waits, and its Ctrl-C cancels the task.

A thread submits an async function to the run, which starts a task for it, and waits for its end. The future
of the task is pending until then, because only a pending future can be cancelled. `Future.cancel` cancels the
task; the task then confirms its end to `concurrent.futures.wait` and `as_completed`.

Any error that a handler of a signal raises interrupts the thread, as `KeyboardInterrupt` by Ctrl-C does. The
thread cancels the task and waits until it no longer uses its arguments. A second error also ends this wait.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

import trio

from ..actors import leaves
from ..backends.base import DeviceLostError
from ..devices import IS_DERIVED, Device

ResultT = TypeVar("ResultT")
_SIGNAL_SECONDS = 1.0
"""How long a wait lasts before it starts again, because CPython runs handlers of signals between waits.

A signal only interrupts a wait of the main thread that has begun. If it arrives just before that, or in
another thread, then it is noticed at the end of the wait.
"""
_Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], object]


def is_done(future: Future[Any], limit: float = math.inf) -> bool:
    """Wait for a future, at most the limit's number of seconds, and return whether it is done.

    An error from a handler of a signal ends the wait, and is raised as it is: `Future.result` would confuse a
    `TimeoutError` with its own, and may replace an error because it fails to release a lock.
    """
    ended = _Latch()
    try:
        future.add_done_callback(ended.open)
        return ended.wait(limit)
    finally:
        _unlock(future)


def result_of(future: Future[ResultT]) -> ResultT:
    """Wait for a future, and return its result. An error from a handler of a signal ends the wait.

    Raises:
        BaseException: The error of the future, or of the handler.
    """
    is_done(future)
    try:
        return future.result()
    finally:
        _unlock(future)


class _Latch:
    """An event for a thread whose wait ends by any error from a handler of a signal.

    `threading.Event` waits by a condition in Python, where an error of a handler may leave a lock in the
    wrong state. A plain lock has no such states.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self, _: object = None) -> None:
        """End the wait."""
        with suppress(RuntimeError):  # it is open
            self._lock.release()

    def wait(self, limit: float = math.inf) -> bool:
        """Wait at most the limit's number of seconds, and return whether it was opened."""
        end = time.monotonic() + limit
        while not self._lock.acquire(timeout=max(0.0, min(end - time.monotonic(), _SIGNAL_SECONDS))):
            if time.monotonic() >= end:
                return False
        return True


def _unlock(future: Future[Any]) -> None:
    """Release the lock of a future that a handler of a signal has left locked.

    The error of the handler may arrive before the body of a `with`.
    """
    lock: Any = future._condition  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while lock._is_owned():  # noqa: SLF001
        lock.release()


class _Task(Generic[ResultT]):
    """The task of a call, from its request until its end.

    Attributes:
        future: Its result; pending until the task has ended, because only a pending future can be cancelled.
        scope: Its cancellation cancels the task.
        has_begun: Whether the run has visited the request.
        is_settled: Whether the future has its result, or the confirmation that it is cancelled.
        ended: Opened when nothing of the task runs any longer.
    """

    def __init__(self) -> None:
        self.future: Future[ResultT] = Future()
        self.scope = trio.CancelScope()
        self.has_begun = False
        self.is_settled = False
        self.ended = _Latch()

    async def run(self, function: Callable[[], Awaitable[ResultT]]) -> None:
        """Call a function for the future."""
        result: Any = None
        try:
            with self.scope:
                result = await function()
        except BaseException as error:  # noqa: ASYNC103  # the thread that waits gets it
            if is_cancellation(error):
                self.future.cancel()
                self.settle()
                raise
            self.settle(partial(self.future.set_exception, error))
        else:
            # Not in the `try`, because a callback of the future may raise `SystemExit`.
            self.settle(None if self.scope.cancelled_caught else partial(self.future.set_result, result))

    def settle(self, setting: Callable[[], object] | None = None) -> None:
        """Set the result of the future, or confirm that it is cancelled."""
        if self.is_settled:
            return
        self.is_settled = True
        try:
            # From here on, it cannot be cancelled any longer.
            if self.future.set_running_or_notify_cancel() and setting is not None:
                setting()
        finally:
            self.ended.open()

    def withdraw(self) -> None:
        """Cancel the task, or confirm the cancellation of a future whose task will never begin."""
        if self.has_begun:
            self.scope.cancel()
        else:
            self.settle()


class RunCalls:
    """Async functions that other threads have a Trio run call.

    Args:
        run: The run.
        owner: The object that the program calls, for errors: a backend, a namespace.
        instead: What to do in Trio's thread, with ``{}`` for the name of the function.
        belongs: The beginning of the error in a forked process.
        spawn: Starts a task in the run; raises `RuntimeError` when it takes no more tasks.
        composed: What to do in a function that gets gradients, like `instead`.

    Attributes:
        run: The run.
        failure: The error that has ended the run, if any.
    """

    def __init__(
        self,
        run: trio.lowlevel.TrioToken,
        *,
        owner: str,
        instead: str,
        belongs: str,
        spawn: _Spawn,
        composed: str = "leave it out",
    ) -> None:
        self.run = run
        self._owner = owner
        self._instead = instead
        self._composed = composed
        self._belongs = belongs
        self._spawn = spawn
        self._process = os.getpid()
        self.failure: BaseException | None = None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork, where the run's loop would never answer."""
        return os.getpid() != self._process

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Have the run call a function soon; returns False if the run has ended, or in a forked process.

        It does not block, so that a finalizer may call it in any thread.
        """
        if self.is_forked:  # which may have copied a held lock of the run
            return False
        try:
            self.run.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def submit(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> Future[ResultT]:
        """Have the run call a function, and return at once.

        Args:
            name: The function that the program calls, for errors.
            function: The function. It has the context variables of this thread.

        Raises:
            RuntimeError: In a forked process, or the run has ended.
        """
        self._check_process(name)
        task = _Task[ResultT]()

        def leave(future: Future[ResultT]) -> None:
            if future.cancelled():
                self.call_soon(task.scope.cancel)

        task.future.add_done_callback(leave)
        self._begin(name, task, function)
        return task.future

    def wait(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Have the run call a function, and return its result.

        Args:
            name: The function that the program calls, for errors.
            function: The function. It has the context variables of this thread.

        Raises:
            RuntimeError: In Trio's thread, in a forked process, or the run has ended.
            BaseException: The error of the function; or of a handler of a signal, such as `KeyboardInterrupt`
                by Ctrl-C, which has cancelled the function; it has ended.
        """
        self.check_place(name)
        task = _Task[ResultT]()
        try:
            self._begin(name, task, function)
            task.ended.wait()
            return task.future.result()
        except BaseException as error:
            _unlock(task.future)
            if isinstance(error, CancelledError) and task.future.cancelled():
                raise self._ended(name) from self.failure  # noqa: ASYNC104  # the cancellation was this future's, whose run has ended
            try:
                is_cancelled = task.future.cancel()
            finally:
                self._withdraw(task)
            if is_cancelled:
                task.ended.wait()
            raise
        finally:
            _unlock(task.future)

    def check_place(self, name: str) -> None:
        """Refuse threads that must not wait.

        Raises:
            RuntimeError: In Trio's thread, or in a forked process.
        """
        self._check_process(name)
        if trio.lowlevel.in_trio_run():
            if IS_DERIVED.get():
                raise RuntimeError(
                    f"{name}: a function that gets gradients composes calls, and waits for none; "
                    + self._composed.format(name.rpartition(".")[2])
                )
            raise RuntimeError(
                f"{name}: this {self._owner} waits for its device, which would block the Trio loop; "
                + self._instead.format(name.rpartition(".")[2])
            )

    def is_waited_for(self) -> bool:
        """Return whether a task of the run waits for this thread (`trio.to_thread.run_sync`)."""
        try:
            return _this_run("close") is self.run
        except RuntimeError:
            return False

    def _check_process(self, name: str) -> None:
        if self.is_forked:
            raise RuntimeError(
                f"{name}: {self._belongs} belongs to the process that this one was forked from; open a "
                "device here"
            )

    def _ended(self, name: str) -> RuntimeError:
        return RuntimeError(f"{name}: this {self._owner} is closed, or its Trio run has ended; make another")

    def _begin(self, name: str, task: _Task[ResultT], function: Callable[[], Awaitable[ResultT]]) -> None:
        context = copy_context()

        def spawn() -> None:
            task.has_begun = True
            try:
                context.run(self._spawn, partial(task.run, function))
            except RuntimeError:
                task.settle(partial(task.future.set_exception, self._ended(name)))

        if not self.call_soon(spawn):
            raise self._ended(name) from self.failure

    def _withdraw(self, task: _Task[Any]) -> None:
        """Have the run withdraw a task that may not have begun, because later requests also run later."""
        try:
            is_running = self.call_soon(task.withdraw)
        except BaseException:  # of a handler of a signal, maybe before the request
            self.call_soon(task.withdraw)
            raise
        if not is_running:
            task.withdraw()


class _OtherRunError(Exception):
    """The worker thread belongs to another Trio run than the device, so it waits as any thread."""


class DeviceCalls(RunCalls):
    """Async functions that other threads have the Trio run of a device call.

    Args:
        device: An open device of the current Trio run, or of the worker thread's run.
        maker: Name of the function that makes the program's object, for errors.
        owner: The object that the program calls: a backend, a namespace.
        instead: The replacement in Trio's thread, with ``{}`` for the name of the function.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """

    def __init__(self, device: Device, *, maker: str, owner: str, instead: str) -> None:
        super().__init__(
            _this_run(maker),
            owner=owner,
            instead="call it in a worker thread (await trio.to_thread.run_sync(...)), or ask the device "
            f"itself ({instead})",
            belongs=f"the device {device.path}",
            spawn=_spawn_system_task,
            composed=f"write {instead.removeprefix('await ')}",
        )
        self._device = device

    def call(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call a function in the run, and return its result.

        Args:
            name: The function that the program calls, for errors.
            function: The function.

        Raises:
            RuntimeError: In Trio's thread, in a forked process, or without the device.
            trio.Cancelled: The task that waits for the worker thread is cancelled.
            KeyboardInterrupt: Ctrl-C, which has cancelled the function.
        """
        if _is_trios_thread():
            self.check_place(name)
            # It runs in the task that waits for this thread: its cancellation and context count.
            with suppress(_OtherRunError):
                return trio.from_thread.run(self._call, name, function)
        return self.wait(name, lambda: self._call(name, function))

    async def _call(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        if trio.lowlevel.current_trio_token() is not self.run:
            raise _OtherRunError
        try:
            return await function()
        except DeviceLostError as error:
            raise RuntimeError(
                f"{name}: this {self._owner} no longer has a device ({error}); make one of an open "
                "device, or use xp of ta.blocking(...)"
            ) from error


# Modules whose frames between a program's call and its async function tell the program nothing.
_INTERNAL_MODULES = frozenset(
    ("concurrent", "contextlib", "outcome", "threading", "trio", __name__.partition(".")[0])
)
_DEFECT_CLASSES = (AssertionError, AttributeError, KeyError, NameError)


def trim(error: BaseException) -> None:
    """Drop the frames of this package and of Trio from the traceback of an error, and of its causes.

    The frames of the program remain. An error that only a defect of this package can raise is left whole.
    """
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in visited:
            continue
        visited.add(id(cause))
        pending += [cause.__cause__, cause.__context__]
        frames: list[TracebackType] = []
        traceback = cause.__traceback__
        is_defect = False
        while traceback is not None:
            module: str = traceback.tb_frame.f_globals.get("__name__", "")
            is_between = module.partition(".")[0] in _INTERNAL_MODULES
            is_defect = is_between and isinstance(cause, _DEFECT_CLASSES)
            frames += [] if is_between else [traceback]
            traceback = traceback.tb_next
        if not is_defect:
            chain: TracebackType | None = None
            for frame in reversed(frames):
                chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
            cause.__traceback__ = chain


def is_cancellation(error: BaseException) -> bool:
    """Return whether an error is Trio's cancellation, of one or several tasks."""
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))


def _spawn_system_task(call: Callable[[], Awaitable[None]]) -> None:
    trio.lowlevel.spawn_system_task(call, context=copy_context())


def _this_run(maker: str) -> trio.lowlevel.TrioToken:
    if trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_trio_token()
    try:
        return trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
    except RuntimeError as error:
        raise RuntimeError(
            f"{maker} must be called in the Trio run of the device, or in a worker thread of it"
        ) from error


def _is_trios_thread() -> bool:
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return False
    return True
