"""Base of every command: its errors, files and device, and a run under Trio that Ctrl-C ends in order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar, TypeVarTuple, cast

import trio

import trio_accel as ta

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_SHOW_CURSOR = "\x1b[?25h"


class InputError(Exception):
    """An argument of the caller (a file, an option, a backend name) cannot be used.

    The message is a line with the argument and its fault; the command line prints it on stderr and ends with
    the exit code.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(printable(" ".join(message.split())))
        self.code = code


def printable(text: str) -> str:
    """Return ``text`` with ``?`` for unprintable characters, such as ESC, because names may have any."""
    return "".join(char if char.isprintable() else "?" for char in text)


class InterruptError(Exception):
    """A signal ended the command.

    Attributes:
        signal: Its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted")
        self.signal = number


FAILURES = (InputError, InterruptError, ta.AccelError, ta.ActorError)
"""Errors that end a command with a line and an exit code, and not with a traceback."""


def run_async(job: Callable[[], Awaitable[_T]]) -> _T:
    """``trio.run(job)``, cancelled by SIGINT and SIGTERM.

    Returns:
        Result of ``job``.

    Raises:
        InterruptError: A signal was received; everything that ``job`` had opened is closed.
        BaseException: The error of ``job``; a group that holds one error is unwrapped.
    """
    try:
        return trio.run(_run, job)
    except BaseExceptionGroup as group:
        error = _only_error(group)
    raise error


def run_for_json(job: Callable[[], Awaitable[int]], render: Callable[[int, str | None], str]) -> int:
    """Run ``job`` under Trio and print the document, even if the job fails.

    Args:
        job: The command; returns its exit code.
        render: Makes the document, given the exit code and the error if there is one.

    Raises:
        InputError, InterruptError, AccelError, ActorError: As the job did, after the document is printed.
    """
    try:
        code = run_async(job)
    except FAILURES as error:
        print(render(exit_code_of(error), str(error)))
        raise
    print(render(code, None))
    return code


def exit_code_of(error: Exception) -> int:
    """Return the exit code of one of `FAILURES`; as in a shell, a signal's code is above 128."""
    if isinstance(error, InterruptError):
        return 128 + error.signal
    return error.code if isinstance(error, InputError) else 1


def _only_error(error: BaseException) -> BaseException:
    """Return the error in nested groups of one, else the innermost group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only_error(group.exceptions[0]) if len(group.exceptions) == 1 else group


async def in_thread(function: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """Run ``function(*args)`` in a thread and abandon it when cancelled, so that Ctrl-C does not wait."""
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


async def _run(job: Callable[[], Awaitable[_T]]) -> _T:
    interrupted: list[int] = []
    result: _T | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_watch, signals, scope, interrupted)
            with scope:
                result = await job()
            nursery.cancel_scope.cancel()
    # A signal after the job's last checkpoint has interrupted nothing.
    if result is not None:
        return result
    raise InterruptError(interrupted[0])


async def _watch(signals: AsyncIterator[int], scope: trio.CancelScope, interrupted: list[int]) -> None:
    async for number in signals:
        if interrupted:
            _leave_at_once(number)
        interrupted.append(number)
        scope.cancel()


def _leave_at_once(number: int) -> None:
    """End the process without cleaning up: a second signal means that the orderly way is too slow."""
    if sys.stderr.isatty():
        os.write(2, f"\r{_SHOW_CURSOR}".encode())
    os._exit(128 + number)


async def open_device(
    system: ta.System, backend: str | None, options: ta.DeviceOptions, *, name: str | None = None
) -> ta.Device:
    """Open a device by the name of its backend, or the best one.

    Raises:
        InputError: The device does not exist, or does not support the isolation.
    """
    try:
        return await system.open_device(backend, options=options, name=name)
    except (ta.NotSupportedError, ValueError) as error:
        raise InputError(f"cannot open a device: {str(error).removeprefix('spec: ')}") from error
