"""Work that a task may leave half-way, by closing its await; see `_messages`.

* `Leavable` awaits a primitive of Trio's.
* `run_apart` and `run_all` run async functions in tasks of their own, which are cancelled when the caller
  leaves. Nurseries, and awaits in `finally`, need this, because a closed coroutine cannot wait for anything.
  The tasks are system tasks, because no nursery is sure to outlive the await.
* `run_in_thread` runs a function in a thread by such a task. The thread ends on its own if the caller leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, TypeVarTuple, cast, final

import attrs
import outcome
import trio
from trio.lowlevel import disable_ki_protection, enable_ki_protection

from ._messages import Party, Waiter, cells, raise_closed

__all__ = ["Leavable", "apart", "run_all", "run_apart", "run_in_thread"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")
P = ParamSpec("P")


class Leavable(Generic[T_co]):
    """An await of Trio's that a task may leave half-way. Its abort function runs then, as if cancelled."""

    __slots__ = ("_awaitable",)

    def __init__(self, awaitable: Awaitable[T_co]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, T_co]:
        waiting = self._awaitable.__await__()
        answer = None
        while True:
            try:
                trap = waiting.send(answer)
            except StopIteration as end:
                return cast("T_co", end.value)
            is_left = True
            try:
                answer = yield trap
                is_left = False
            finally:
                if is_left and trio.lowlevel.in_trio_run():
                    abort = getattr(trap, "abort_func", None)
                    if abort is not None:
                        abort(raise_closed)


@disable_ki_protection
async def _unprotected(function: Callable[[], Awaitable[T]]) -> T:
    return await function()


@final
@attrs.define(eq=False, repr=False)
class _Tasks(Waiter):
    """Tasks of an await, outside of nurseries, because a closed coroutine cannot wait for children.

    Attributes:
        cell: The actor for which the tasks work; None without any.
    """

    cell: Party | None = None
    _running: dict[int, trio.CancelScope] = attrs.field(factory=dict[int, trio.CancelScope], init=False)
    _results: dict[int, Any] = attrs.field(factory=dict[int, Any], init=False)
    _errors: list[BaseException] = attrs.field(factory=list[BaseException], init=False)
    _has_unwound: bool = attrs.field(default=False, init=False)

    async def run(self, functions: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run functions; return their results, or raise the first error."""
        deadline = trio.current_effective_deadline()
        caller = None if self.cell is None else trio.lowlevel.current_task()
        for number, function in enumerate(functions):
            scope = self._running[number] = trio.CancelScope(deadline=deadline)
            trio.lowlevel.spawn_system_task(
                self._work, number, function, scope, caller, name=function, context=copy_context()
            )
        try:
            if self._running:
                await self.park()
            else:
                await trio.lowlevel.checkpoint()
            self._raise()
            return [self._results[number] for number in sorted(self._results)]
        finally:
            # Errors, results and arguments refer to frames, which must not live as long as this object.
            self._errors.clear()
            self._results.clear()

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        self._cancel()
        return Waiter.abort(self, raise_cancel)

    def _cancel(self) -> None:
        for scope in self._running.values():
            scope.cancel()

    def _raise(self) -> None:
        if self.raise_cancel is not None:
            cancellation = outcome.capture(self.raise_cancel)
            assert isinstance(cancellation, outcome.Error)  # it raises
            # All tasks may have finished nevertheless. Only Ctrl-C is raised in that case.
            if self._has_unwound or not isinstance(cancellation.error, trio.Cancelled):
                cancellation.unwrap()
        if self._errors:
            error = self._errors[0]
            try:
                raise error
            finally:
                # The error refers to this frame, so this frame must not refer to the error.
                del error
        if self._has_unwound:
            raise trio.TooSlowError("the work ended at its deadline, which was moved while it ran")

    async def _work(
        self,
        number: int,
        function: Callable[[], Awaitable[Any]],
        scope: trio.CancelScope,
        caller: trio.lowlevel.Task | None,
    ) -> None:
        acts = nullcontext() if self.cell is None or caller is None else self.cell.acting_for(caller)
        try:
            with acts, scope:
                # A function that was withdrawn before its start never runs.
                await trio.lowlevel.checkpoint_if_cancelled()
                self._results[number] = await _unprotected(function)
        except BaseException as error:  # noqa: ASYNC103, BLE001  # raised in the task that waits
            self._errors.append(error)
            self._cancel()
        self._has_unwound |= scope.cancelled_caught
        del self._running[number]
        if not self._running:
            self.settle(outcome.Value(None))


@enable_ki_protection
async def run_all(functions: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run async functions concurrently in tasks of their own, and return their results in order.

    The first error cancels the other tasks, and is raised without a group. If the caller is cancelled, or its
    await is closed, they are cancelled. They have the caller's deadline; if it is moved later, they keep it.
    """
    return await _Tasks().run(functions)


@enable_ki_protection
async def run_apart(function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run an async function in a task of its own, which works for the caller's actor; see `run_all`."""
    [result] = await _Tasks(cell=cells.get(trio.lowlevel.current_task())).run([partial(function, *args)])
    return result


async def run_in_thread(
    function: Callable[[*Ts], T],
    *args: *Ts,
    limiter: trio.CapacityLimiter | None = None,
    is_abandonable: bool = False,
) -> T:
    """Run a function in a thread, as `trio.to_thread.run_sync` does, for a task that may leave half-way.

    A thread cannot be ended, so it continues after its task has left, and nobody gets its outcome.

    Args:
        function: The function.
        args: Its arguments.
        limiter: Limits the number of threads; by default Trio's limiter.
        is_abandonable: Whether a cancelled caller returns at once, although the function still runs.
    """
    run = partial(trio.to_thread.run_sync, function, *args)
    return await run_apart(partial(run, abandon_on_cancel=is_abandonable, limiter=limiter))


def apart(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let an async function run by `run_apart`."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_apart(partial(function, *args, **kwargs))

    return run
