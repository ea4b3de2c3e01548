"""A device for code that blocks: notebooks, the interactive interpreter, scripts, threads of Flask.

A `BlockingDevice` has a thread with a Trio run, which has a system with one device. Other threads submit
async functions to a nursery of that run. Its end has a fixed order: the tasks of the nursery are cancelled,
then the device and the system are closed, then the thread ends.

The thread is a daemon, because the interpreter joins other threads before it calls the functions of `atexit`,
one of which closes the device.
"""

from __future__ import annotations

import atexit
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias, TypeVar, cast

import trio

from ..actors import not_copied, silence, single, warn_untold
from ..devices import Device, DeviceOptions, System, open_system
from ._array_api import ArrayApi, array_api
from ._array_api_array import Array
from ._blocking import RunCalls, result_of

ResultT = TypeVar("ResultT")
ReplyT = TypeVar("ReplyT")
_Asked: TypeAlias = Awaitable[ResultT] | Callable[..., Awaitable[ResultT]]
_EXIT_SECONDS = 10.0
"""How long the end of the process waits for tasks that do not end after their cancellation."""


class BlockingDevice:
    """A device in a Trio run of its own thread, for code that blocks; made by `blocking`.

    It is closed by `close`, at the end of a ``with``, or at the end of the process. Its methods may be called
    in any thread at the same time, but not in a Trio task, because they would block its loop.

    Attributes:
        device: The device.
        system: The system of the device, such as for ``b.wait(b.system.open_device("cuda:1"))``.
        xp: The array namespace of the device; see `array_api`.
    """

    device: Device
    system: System
    xp: ArrayApi

    def __init__(self, spec: str | None, options: DeviceOptions | None, name: str) -> None:
        if trio.lowlevel.in_trio_run():
            raise RuntimeError(
                "blocking: this would block the Trio loop; open a device: await system.open_device(...)"
            )
        self._begun: Future[RunCalls] = Future()
        self._opened: Future[RunCalls] = Future()
        self._ended: Future[None] = Future()
        # Whether Ctrl-C has ended the opening, maybe before the thread's first line.
        self._is_given_up = False
        # Ends the opening, and later the tasks.
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(
            target=self._run_thread, args=(spec, options, name), name=f"trio_accel.{name}", daemon=True
        )
        try:
            self._thread.start()
            self._calls = result_of(self._opened)
        except BaseException:
            # Also for Ctrl-C, so that nothing stays open that nobody can close.
            self._is_given_up = True
            self._end()
            raise
        atexit.register(self._at_exit)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a BlockingDevice", "open one where it is needed: ta.blocking(...)")

    def __repr__(self) -> str:
        return f"<BlockingDevice {self.device!r}>"

    def _repr_html_(self) -> str:
        return self.device._repr_html_()  # pyright: ignore[reportPrivateUsage]  # the name is that of notebooks

    def __enter__(self) -> Self:
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
        return self._asked("wait", self._calls.wait, awaited, args, awaited)

    def get(self, array: Any) -> Any:
        """Wait for an array or a call, and copy the result to the host.

        Args:
            array: An `AccelRef`, an array of `xp`, or a call such as ``x @ w``.

        Returns:
            The NumPy array; a tuple of them for a call with several results.

        Raises:
            RuntimeError, Exception: As for `wait`.
            TypeError: Neither an array of a device nor a call.
        """
        source = array.ref if isinstance(array, Array) else array
        to_host: Callable[[], Awaitable[Any]] | None = getattr(source, "to_host", None)
        if to_host is None:
            silence(source)
            raise TypeError(
                f"get: array must be an array of a device, or a call that makes one, got {array!r}; use "
                "wait for other awaitables"
            )
        return self._asked("get", self._calls.wait, to_host, (), source)

    def close(self) -> None:
        """Cancel the tasks of the run, close the device, and wait for the end of the thread.

        A closed device stays closed. In a forked process nothing happens, because the device belongs to the
        parent.

        Raises:
            RuntimeError: The call is in a Trio task, or in a thread that a task of the device waits for.
            Exception: The error that has ended the run: actors in `system` may escalate theirs.
        """
        if self._thread.is_alive() and not self._calls.is_forked:
            self._calls.check_place("close")
            if self._calls.is_waited_for():
                raise RuntimeError(
                    "close: a task of this blocking device waits for this thread; close it in another thread"
                )
        self._end()
        atexit.unregister(self._at_exit)
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
            got = f"{awaited!r} with arguments" if args else repr(cast("Any", awaited))
            raise TypeError(f"{name}: pass a call, or an async function and its arguments, got {got}")
        try:
            return ask(name, partial(_awaited, name, awaited, args))
        except RuntimeError:
            silence(source)
            raise

    def _run_thread(self, spec: str | None, options: DeviceOptions | None, name: str) -> None:
        try:
            self._run(spec, options, name)
        finally:
            self._ended.set_result(None)

    def _run(self, spec: str | None, options: DeviceOptions | None, name: str) -> None:
        try:
            if not self._is_given_up:
                trio.run(self._serve, spec, options, name)
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the thread that opens or closes raises it
            failure = single(error)
            if self._opened.done():
                self._calls.failure = failure
                return  # noqa: ASYNC104
            if not self._begun.done():
                self._begun.set_exception(failure)
            self._opened.set_exception(failure)
        for future in (self._begun, self._opened):
            if not future.done():
                future.set_exception(RuntimeError("blocking: closed while it was opened"))

    async def _serve(self, spec: str | None, options: DeviceOptions | None, name: str) -> None:
        calls = RunCalls(
            trio.lowlevel.current_trio_token(),
            owner="blocking device",
            instead="await the call itself, or call it in a thread",
            belongs="this blocking device",
            spawn=self._spawn,
        )
        self._begun.set_result(calls)
        async with open_system(name) as system:
            with self._scope:
                self.system, self.device = system, await system.open_device(spec, options=options)
                self.xp = array_api(self.device)
                async with trio.open_nursery() as self._tasks:
                    self._opened.set_result(calls)
                    await trio.sleep_forever()

    def _spawn(self, call: Callable[[], Awaitable[None]]) -> None:
        self._tasks.start_soon(call)

    def _end(self, limit: float = math.inf) -> None:
        """End the run, and wait for the thread, at most the limit's number of seconds."""
        if self._thread.ident is None or self._begun.exception() is not None:
            return
        calls = self._begun.result()
        if not calls.is_forked:
            calls.call_soon(self._scope.cancel)
            # CPython before 3.13 takes a thread for dead whose `join` Ctrl-C has interrupted.
            with suppress(TimeoutError):
                result_of(self._ended, limit)
                self._thread.join()

    def _at_exit(self) -> None:
        self._end(_EXIT_SECONDS)
        if not self._calls.is_forked and self._thread.is_alive():
            text = "%r did not close within %g seconds"
            warn_untold("trio_accel.interop", text, self, _EXIT_SECONDS)


def blocking(
    spec: str | None = None, *, options: DeviceOptions | None = None, name: str = "blocking"
) -> BlockingDevice:
    """Open a device for code that blocks: notebooks, the interactive interpreter, scripts, threads.

    The device lives in a thread with a Trio run of its own. Close it by `BlockingDevice.close` or a ``with``;
    else the end of the process closes it.

    Args:
        spec: Name of a backend or device, such as ``"cpu"`` or ``"cuda:1"``; see `System.open_device`.
        options: How the device is opened and supervised.
        name: Name of the system, which the paths of its actors begin with.

    Raises:
        RuntimeError: In a Trio task: await `System.open_device` there.
        ValueError, TypeError, NotSupportedError: As for `System.open_device`.
        KeyboardInterrupt: Ctrl-C; nothing stays open.
    """
    return BlockingDevice(spec, options, name)


async def _awaited(name: str, awaited: Any, args: tuple[Any, ...]) -> Any:
    result: Any = awaited(*args) if callable(awaited) and not inspect.isawaitable(awaited) else awaited
    if not inspect.isawaitable(result):
        raise TypeError(f"{name}: {awaited!r} is not an async function: it has returned {result!r}")
    return await result
