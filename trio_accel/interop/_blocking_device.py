"""A device for code that blocks: notebooks, the interactive interpreter, scripts, threads of Flask.

A `BlockingDevice` has a thread with a Trio run, which has a system with one device. Other threads submit
async functions to a nursery of that run. Its end has a fixed order: the tasks of the nursery are cancelled,
then the device and the system are closed, then the thread ends.

The thread is a daemon, because the interpreter joins other threads before it calls the functions of `atexit`,
one of which closes the device. The thread does not refer to the `BlockingDevice`. So Python can collect the
device that a program has dropped: the namespace `xp` has a finalizer, which cancels the run. The tasks of the
run refer to the device, and the arrays of `xp` to the namespace, so that both stay usable.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import itertools
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any, Never, NoReturn, Self, TypeAlias, TypeVar, cast, overload

import attrs
import trio

from ..actors import not_copied, silence, single, warn_untold
from ..backends.base import DeviceLostError, HostArray
from ..devices import AccelRef, Call, Device, DeviceOptions, System, gather, open_system
from ._array_api import ArrayApi, array_api
from ._array_api_array import Array
from ._blocking import RunCalls, is_done, result_of, trim

ResultT = TypeVar("ResultT")
ReplyT = TypeVar("ReplyT")
_Asked: TypeAlias = Awaitable[ResultT] | Callable[..., Awaitable[ResultT]]
_NAMES = itertools.chain(["blocking"], map("blocking#{}".format, itertools.count(2)))
_EXIT_SECONDS = 10.0
"""How long the end of the process waits for tasks that do not end after their cancellation."""


class _RunThread(threading.Thread):
    """The thread with the Trio run of a blocking device.

    It does not refer to the `BlockingDevice`.

    Args:
        system: Name of the system.

    Attributes:
        begun: The system, when the run has begun.
        ended: Done when the run has ended.
        calls: The calls of other threads in the run.
        scope: Its cancellation ends the run.
        is_ending: Whether the run was told to end, maybe before the thread's first line.
    """

    calls: RunCalls

    def __init__(self, system: str) -> None:
        super().__init__(name=f"trio_accel.{system}", daemon=True)
        self.begun: Future[System] = Future()
        self.ended: Future[None] = Future()
        self.scope = trio.CancelScope()
        self.is_ending = False
        self._system = system

    def run(self) -> None:
        """Run Trio until the scope is cancelled."""
        try:
            if self.is_ending:
                raise RuntimeError("blocking: closed while it was opened")  # noqa: TRY301
            trio.run(self._serve)
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the thread that opens or closes raises it
            if self.begun.done():
                self.calls.failure = single(error)
            else:
                self.begun.set_exception(single(error))
        atexit.unregister(self.at_exit)
        self.ended.set_result(None)

    async def _serve(self) -> None:
        async with open_system(self._system) as system:
            with self.scope:
                async with trio.open_nursery() as tasks:
                    self.calls = RunCalls(
                        trio.lowlevel.current_trio_token(),
                        owner="blocking device",
                        instead="await the call itself, or call it in a thread",
                        belongs="this blocking device",
                        spawn=tasks.start_soon,
                    )
                    self.begun.set_result(system)
                    await trio.sleep_forever()

    def end(self, limit: float = math.inf) -> None:
        """End the run, and wait for the thread, at most the limit's number of seconds."""
        self.is_ending = True
        if self.ident is not None and is_done(self.begun) and self.begun.exception() is None:
            self.calls.call_soon(self.scope.cancel)
            # CPython before 3.13 takes a thread for dead whose `join` Ctrl-C has interrupted.
            if is_done(self.ended, limit):
                self.join()

    def at_exit(self) -> None:
        """Close the device at the end of the process that has opened it."""
        if not self.calls.is_forked:
            self.end(_EXIT_SECONDS)
            if not self.ended.done():
                text = "the blocking device %s did not close within %g seconds"
                warn_untold("trio_accel.interop", text, self._system, _EXIT_SECONDS)


class BlockingDevice:
    """A device in a Trio run of its own thread, for code that blocks; made by `blocking`.

    It is closed by `close`, at the end of a ``with``, when neither it nor `xp` nor an array of `xp` is
    referenced any longer, or at the end of the process. Its methods may be called in any thread at the same
    time, but not in a Trio task, because they would block its loop.

    Attributes:
        device: The device.
        system: The system of the device, such as for ``b.wait(b.system.open_device("cuda:1"))``.
        xp: The array namespace of the device; see `array_api`.
    """

    device: Device
    system: System
    xp: ArrayApi

    def __init__(self, name: str, opening: Callable[[System], Awaitable[Device]]) -> None:
        if trio.lowlevel.in_trio_run():
            raise RuntimeError(
                "blocking: this would block the Trio loop; open a device: await system.open_device(...)"
            )
        # Close the devices that the program has dropped, because their namespaces are reference cycles.
        gc.collect()
        self._thread = thread = _RunThread(name)
        try:
            thread.start()
            self.system = result_of(thread.begun)
            self._calls = thread.calls
            self.system.call = partial(_find, thread.calls)
            # The tasks of the device do not get the caller's context variables.
            Context().run(thread.calls.wait, "blocking", partial(self._open, opening))
            atexit.register(thread.at_exit)
            # A finalizer must not wait, because it runs in any thread, even in the device's own.
            weakref.finalize(self.xp, thread.calls.call_soon, thread.scope.cancel)
        except BaseException:
            # Also for Ctrl-C, so that nothing stays open that nobody can close.
            thread.end()
            raise

    async def _open(self, opening: Callable[[System], Awaitable[Device]]) -> None:
        self.device = await opening(self.system)
        self.xp = array_api(self.device)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a BlockingDevice", "open one where it is needed: ta.blocking(...)")

    def __repr__(self) -> str:
        is_closing = self._thread.is_ending and not self._thread.ended.done()
        return f"<BlockingDevice {self.device!r}{', closing' * is_closing}>"

    def _repr_html_(self) -> str:
        return self.device._repr_html_()  # pyright: ignore[reportPrivateUsage]  # the name is that of notebooks

    def __enter__(self) -> Self:
        self._calls.wait("with", trio.lowlevel.checkpoint)
        if self.device.is_ended:
            raise RuntimeError("with: the device of this blocking device is closed; make another")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, awaited: _Asked[ResultT], *args: Any) -> Future[ResultT]:
        """Have the run call an async function, or await a call such as ``x @ w``; does not wait.

        `Future.cancel` cancels the Trio task, and `asyncio.wrap_future` lets a coroutine of asyncio await it:
        a cancelled coroutine then cancels the task.

        Args:
            awaited: The call, or the function. It has the context variables of this thread.
            *args: Arguments of the function.

        Returns:
            The future of the result. It stays pending while the task runs, so that it can be cancelled. Its
            callbacks run in the thread of the run, where they must not block.

        Raises:
            RuntimeError: The device is closed, or belongs to the process that this one was forked from.
            TypeError: Neither an awaitable nor an async function.
        """
        return self._asked("submit", self._calls.submit, awaited, args, awaited)

    def wait(self, awaited: _Asked[ResultT], *args: Any) -> ResultT:
        """Wait for an async function, or for a call such as ``x @ w``.

        Ctrl-C, or the interrupt of a notebook's kernel, cancels the Trio task and waits for its end; a second
        Ctrl-C ends that wait.

        Args:
            awaited: The call, or the function. It has the context variables of this thread.
            *args: Arguments of the function.

        Returns:
            The result.

        Raises:
            RuntimeError: In a Trio task; the device is or was closed; or it belongs to the process that this
                one was forked from.
            TypeError: Neither an awaitable nor an async function.
            Exception: The error of the function.
        """
        try:
            return self._asked("wait", self._calls.wait, awaited, args, awaited)
        except BaseException as error:
            trim(error)
            raise

    @overload
    def get(self, array: AccelRef | Array | Awaitable[AccelRef | HostArray]) -> HostArray: ...
    @overload
    def get(self, array: Awaitable[tuple[AccelRef, ...]]) -> tuple[HostArray, ...]: ...
    @overload
    def get(self, array: list[AccelRef] | list[Array] | list[Call[AccelRef]]) -> list[HostArray]: ...
    @overload
    def get(
        self, array: tuple[AccelRef | Array | Awaitable[AccelRef | HostArray], ...]
    ) -> tuple[HostArray, ...]: ...
    @overload
    def get(self, array: Awaitable[ResultT]) -> ResultT: ...
    @overload
    def get(self, array: Any) -> Any: ...
    def get(self, array: Any) -> Any:
        """Wait for an array or a call, and copy the result to the host.

        A call runs once. Its result stays on the device while your program refers to the call, so that a cell
        ``b.get(y)`` can run again.

        Args:
            array: An `AccelRef`, an array of `xp`, a call such as ``x @ w``, a coroutine such as ``step(x)``;
                or a list, tuple, dict or iterator of these.

        Returns:
            The NumPy array; a tuple of them for a call with several results; a list, tuple or dict for a
            list, tuple or dict, and a list for an iterator. A result of a coroutine that is not an array is
            returned as it is.

        Raises:
            RuntimeError, Exception: As for `wait`.
            TypeError: Neither an array of a device nor an awaitable.
        """
        try:
            if not inspect.isawaitable(array) and isinstance(array, Iterator):
                items: list[Any] = [*array]
                array = items
            return self._asked("get", self._calls.wait, partial(_to_host, array), (), array)
        except BaseException as error:
            trim(error)
            raise

    def close(self) -> None:
        """Cancel the tasks of the run, close the device, and wait for the end of the thread.

        A closed device stays closed. In a forked process nothing happens, because the device belongs to the
        parent.

        Raises:
            RuntimeError: The call is in a Trio task, or in a thread that a task of the device waits for.
            Exception: The error that has ended the run: actors in `system` may escalate theirs.
        """
        if self._calls.is_forked:
            return
        if not self._thread.ended.done():
            self._calls.check_place("close")
            if self._calls.is_waited_for():
                raise RuntimeError(
                    "close: a task of this blocking device waits for this thread; close it in another thread"
                )
        self._thread.end()
        failure, self._calls.failure = self._calls.failure, None
        if failure is not None:
            raise failure

    def _asked(
        self,
        name: str,
        ask: Callable[[str, Callable[[], Awaitable[ResultT]]], ReplyT],
        awaited: _Asked[ResultT],
        args: tuple[Any, ...],
        source: object,
    ) -> ReplyT:
        if args if isinstance(awaited, Awaitable) else not callable(awaited):
            silence(awaited, *args)
            argument = cast("Any", awaited)
            got = f"{argument!r} with arguments" if args else repr(argument)
            if isinstance(argument, (AccelRef, Array)):
                got += "; an array needs no wait: use it as it is, or copy it to the host: b.get(array)"
            raise TypeError(f"{name}: pass a call, or an async function and its arguments, got {got}")
        try:
            return ask(name, partial(self._awaited, name, awaited, args))
        except BaseException:
            silence(source)
            raise

    # A method, so that the device is not collected while one of its tasks runs.
    async def _awaited(self, name: str, awaited: Any, args: tuple[Any, ...]) -> Any:
        result: Any = awaited(*args) if callable(awaited) and not inspect.isawaitable(awaited) else awaited
        if not inspect.isawaitable(result):
            raise TypeError(f"{name}: {awaited!r} is not an async function: it has returned {result!r}")
        try:
            return await _result(result)
        except DeviceLostError as error:
            if error.retry_after is not None:
                raise
            message = error.message.replace(
                "system.open_device(adopt=device)", "b.wait(b.system.open_device(adopt=b.device))"
            )
            raise attrs.evolve(error, message=f"{message}; open another: ta.blocking(...)") from error


def blocking(
    spec: str | None = None,
    *,
    options: DeviceOptions | None = None,
    name: str | None = None,
    **_unknown: Never,
) -> BlockingDevice:
    """Open a device for code that blocks: notebooks, the interactive interpreter, scripts, threads.

    The device lives in a thread with a Trio run of its own. Close it by `BlockingDevice.close` or a ``with``.
    Otherwise it is closed when Python collects it, or at the end of the process.

    Args:
        spec: Name of a backend or device, such as ``"cpu"`` or ``"cuda:1"``; see `System.open_device`.
        options: How the device is opened and supervised.
        name: Name of the system, which the paths of its actors begin with; by default ``"blocking"``, then
            ``"blocking#2"`` and so on.

    Raises:
        RuntimeError: In a Trio task: await `System.open_device` there.
        ValueError, TypeError, NotSupportedError: As for `System.open_device`.
        KeyboardInterrupt: Ctrl-C; nothing stays open.
    """
    try:
        return BlockingDevice(
            name or next(_NAMES), lambda system: system.open_device(spec, options=options, **_unknown)
        )
    except BaseException as error:
        trim(error)
        raise


def _find(calls: RunCalls, function: Callable[[], ResultT]) -> ResultT:
    """Have the run find the layout of a call."""

    async def called() -> ResultT:
        return function()

    return calls.wait("shape", called)


async def _to_host(array: Any, *, is_result: bool = False) -> Any:
    """Copy an array, or several, to the host; see `BlockingDevice.get`."""
    if isinstance(array, Array):
        array = array.ref
    if inspect.isawaitable(array):
        return await _to_host(await _result(array), is_result=True)
    if hasattr(array, "to_host"):
        return await array.to_host()
    if isinstance(array, dict):
        named = cast("dict[object, Any]", array)
        return dict(zip(named, await _to_host([*named.values()], is_result=is_result), strict=True))
    if isinstance(array, (list, tuple)):
        items: list[Any] = [*array]
        # Calls of one list may share operands, so they run as one request.
        calls: dict[int, Any] = {id(item): item for item in items if issubclass(type(item), Call)}
        if calls:
            for call, result in zip(calls.values(), await gather(*calls.values()), strict=True):
                call.kept = result
        items = [await _to_host(item, is_result=is_result) for item in items]
        return items if isinstance(array, list) else tuple(items)
    if is_result:
        return array
    if isinstance(array, (set, frozenset)):
        silence(*cast("set[Any]", array))
    raise TypeError(
        "get: array must be an array of a device, a call or coroutine that makes one, or a list, tuple or "
        f"dict of these, got {array!r}; use wait for other awaitables"
    )


async def _result(awaited: Any) -> Any:
    """Await an object; a call that was awaited so before has its result still."""
    if not hasattr(type(cast("object", awaited)), "kept"):
        return await awaited
    if not hasattr(awaited, "kept"):
        awaited.kept = await awaited
    return awaited.kept
