"""Runs a command under Trio so that Ctrl-C ends it in order: cancelled, cleaned up, exit code 130."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

import trio

import trio_accel as ta
from trio_accel.cli._errors import InputError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Generator

__all__ = ["InterruptError", "at_a_second_signal", "in_thread", "run_async", "run_for_json"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_SHOW_CURSOR = "\x1b[?25h"
# What a second signal has called, in place of the orderly end.
_last_steps: list[Callable[[], object]] = []


class InterruptError(Exception):
    """A signal ended the command.

    Attributes:
        signal: Its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def run_async(job: Callable[[], Awaitable[int]]) -> int:
    """``trio.run(job)``, cancelled by SIGINT and SIGTERM.

    Returns:
        What ``job`` returned.

    Raises:
        InterruptError: A signal came; everything that ``job`` had opened is closed.
        BaseException: What ``job`` raised; a group that holds one error is unwrapped.
    """
    try:
        return trio.run(_run, job)
    except BaseExceptionGroup as group:
        error = _only_error(group)
    raise error


def run_for_json(job: Callable[[], Awaitable[int]], render: Callable[[int, str | None], str]) -> int:
    """Run ``job`` under Trio and print the document, also where the job fails.

    Args:
        job: The command; returns its exit code.
        render: Makes the document, given the exit code and the error if there is one.

    Raises:
        InputError, InterruptError, AccelError, ActorError: As the job did, after the document is printed.
    """
    try:
        code = run_async(job)
    except InputError as error:
        print(render(2, str(error)))
        raise
    except (ta.AccelError, ta.ActorError) as error:
        print(render(1, str(error)))
        raise
    except InterruptError as error:
        print(render(128 + error.signal, "interrupted"))
        raise
    print(render(code, None))
    return code


def _only_error(error: BaseException) -> BaseException:
    """The error in nested groups of one, else the innermost group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only_error(group.exceptions[0]) if len(group.exceptions) == 1 else group


@contextmanager
def at_a_second_signal(*steps: Callable[[], object]) -> Generator[None]:
    """Have ``steps`` called if a second signal ends the process without cleaning up meanwhile."""
    _last_steps.extend(steps)
    try:
        yield
    finally:
        del _last_steps[len(_last_steps) - len(steps) :]


async def in_thread(function: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """``function(*args)`` in a worker thread, left to itself when cancelled: Ctrl-C does not wait."""
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


async def _run(job: Callable[[], Awaitable[int]]) -> int:
    interrupted: list[int] = []
    code: int | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_watch, signals, scope, interrupted)
            with scope:
                code = await job()
            nursery.cancel_scope.cancel()
    # A signal that came after the job's last checkpoint has cut nothing short.
    if code is not None:
        return code
    raise InterruptError(interrupted[0])


async def _watch(signals: AsyncIterator[int], scope: trio.CancelScope, interrupted: list[int]) -> None:
    async for number in signals:
        if interrupted:
            _leave_at_once(number)
        interrupted.append(number)
        scope.cancel()


def _leave_at_once(number: int) -> None:
    """End the process without cleaning up: a second signal means that the orderly way is too slow."""
    for step in _last_steps:
        with suppress(Exception):
            step()
    if sys.stderr.isatty():
        os.write(2, f"\r{_SHOW_CURSOR}".encode())
    os._exit(128 + number)
