"""Ctrl-C at a line of the package, by its number in the order of execution."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import pytest
import trio

import trio_accel as ta
from trio_accel.actors._messages import running_cells

_PACKAGE = Path(ta.__file__).parent
_LAST = 150


class Interrupter:
    """Counts executed lines, and sends Ctrl-C at one of them.

    Args:
        parts: Files or folders of the package, or how the paths of files begin.
        at: Number of the line, from 1; 0 for none.
    """

    def __init__(self, parts: tuple[str, ...], at: int) -> None:
        self.at = at
        self.lines = 0
        self.where = "nowhere"
        self._files = tuple(str(_PACKAGE / part) for part in parts)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.line if frame.f_code.co_filename.startswith(self._files) else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self.line


@attrs.frozen
class Interrupted:
    """How a program ended that Ctrl-C has met.

    Attributes:
        at: Number of the line.
        lines: How many it has executed; that varies with the order of its tasks.
        where: The line.
        error: Its error, if any.
    """

    at: int
    lines: int
    where: str
    error: BaseException | None

    def check(self) -> None:
        """Check that nothing else resulted from it."""
        if self.error is None:
            # The last lines run when the main task waits no more: there the run may be over before it
            # hears of it.
            assert self.at > self.lines - _LAST, f"line {self.at} of {self.lines}, {self.where}: it was lost"
        else:
            message = f"line {self.at} of {self.lines}, {self.where}: {self.error!r}"
            assert is_only_ctrl_c(self.error), message


def interrupt_everywhere(
    program: Callable[[], Awaitable[None]],
    parts: tuple[str, ...],
    log: pytest.LogCaptureFixture,
    *,
    step: int,
    least: int,
) -> None:
    """Run a program again and again, with Ctrl-C at one line after the other: it has no other effect.

    Args:
        program: The program to run.
        parts: As of an `Interrupter`.
        log: The logged records, which are not kept because they hold frames.
        step: The distance of tested lines: together with the varying order of tasks, it meets each in time.
        least: The least number of lines in a correct run.
    """
    whole = interrupt(program, parts, at=0)
    assert whole.error is None
    assert whole.lines > least
    for at in range(1, whole.lines + 1, step):
        interrupted = interrupt(program, parts, at)
        interrupted.check()
        assert running_cells() == [], f"{interrupted}: left behind"
        log.clear()


def is_only_ctrl_c(error: BaseException) -> bool:
    """Whether it is Ctrl-C, alone or with the resulting errors of its callers."""
    if not isinstance(error, BaseExceptionGroup):
        return isinstance(error, KeyboardInterrupt)
    _, rest = error.split((KeyboardInterrupt, ta.ActorError, ta.DeviceLostError))
    return rest is None and error.subgroup(KeyboardInterrupt) is not None


def interrupt(
    program: Callable[[], Awaitable[None]],
    parts: tuple[str, ...],
    at: int,
) -> Interrupted:
    """Run a program with Ctrl-C at a line; see `Interrupter`."""
    interrupter, previous = Interrupter(parts, at), sys.gettrace()
    error: BaseException | None = None
    sys.settrace(interrupter)
    try:
        trio.run(program)
    except BaseException as raised:  # noqa: ASYNC103, BLE001  # the caller looks at it
        error = raised
    finally:
        sys.settrace(previous)
    return Interrupted(at, interrupter.lines, interrupter.where, error)
