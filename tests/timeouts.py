"""Hooks that end a test after its time limit without harm to the tests that follow in its process.

pytest-timeout raises its error from a signal handler. If Trio waits for events at that moment, the error
leaves `trio.run` from inside of the event loop, and Trio still counts the run as active. Every later test
of the process then fails with "Attempted to call run() from inside a run()", because the traceback of the
first failure keeps the run alive. So these hooks send what Ctrl-C sends, which Trio delivers as
`KeyboardInterrupt` to the main task: nurseries cancel, fixtures close, and the run returns. A run that does
not return within `_GRACE` ends the process, because pytest-xdist then reports this one test and starts a
new process for the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, ClassVar

import pytest
import trio

__all__ = [
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
]

# Seconds that fixtures have to close devices and launchers.
_GRACE = float(os.environ.get("TRIO_ACCEL_TEST_GRACE", "60"))
_IS_XDIST = "PYTEST_XDIST_WORKER" in os.environ


class _Limit:
    """The time limit of the running test."""

    expired: ClassVar[float | None] = None
    """Its seconds, after they have passed."""


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> bool | None:
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # pytest-timeout's own timer

    def end_process(_signal: int, _frame: FrameType | None) -> None:
        _report(f"the test did not end within {_GRACE:g} s after its interrupt")
        if _IS_XDIST:
            os._exit(70)
        pytest.fail(f"Timeout (>{settings.timeout:g}s), and {_GRACE:g} s more after the interrupt")

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        _Limit.expired = settings.timeout
        _report(f"the test has run for {settings.timeout:g} s")
        signal.signal(signal.SIGALRM, end_process)
        signal.setitimer(signal.ITIMER_REAL, _GRACE)
        signal.raise_signal(signal.SIGINT)

    _Limit.expired = None
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _Limit.expired = None


def _fail_if_expired() -> Generator[None, object, object]:
    try:
        result = yield
    except BaseException as error:
        if _Limit.expired is None:
            raise
        raise pytest.fail.Exception(f"Timeout (>{_Limit.expired:g}s)") from error  # noqa: ASYNC104  # the failure that replaces it names the limit
    if _Limit.expired is not None:
        pytest.fail(f"Timeout (>{_Limit.expired:g}s)")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _fail_if_expired())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _fail_if_expired())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    # The call reported an expired limit already, and fixtures may need the grace to close.
    before, _Limit.expired = _Limit.expired, None
    if before is None:
        return (yield from _fail_if_expired())
    return (yield)


def _report(reason: str) -> None:
    """Write the stacks of Trio's tasks and of all threads to stderr."""
    print(f"\n{reason}", *_tasks(), sep="\n", file=sys.stderr, flush=True)
    # The stderr of pytest's capturing has no descriptor.
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


def _tasks() -> list[str]:
    """Return a line for each Trio task, with the innermost frames below it."""
    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        return ["no Trio run is active"]
    lines: list[str] = []
    waiting = [(root, 0)] if root is not None else []
    while waiting:
        task, depth = waiting.pop()
        lines.append(f"{'  ' * depth}{task.name}")
        frames = [f"{frame.f_code.co_filename}:{line}" for frame, line in task.iter_await_frames()]
        lines += [f"{'  ' * depth}  | {frame}" for frame in frames[-6:]]
        waiting += [(child, depth + 1) for nursery in task.child_nurseries for child in nursery.child_tasks]
    return lines
