"""A watch over the Trio loop: which code holds it, and for how long.

A task that computes or waits without a checkpoint holds the loop: no other task runs, nor does a timeout. A
task cannot see that while it lasts, and an instrument of Trio would cost each turn of the loop. So a thread
looks ten times a second. While it sees the loop wait for events, that is all it does, and after some seconds
it looks less often, because a wake-up takes up to 0.1 ms. Otherwise it asks the loop to call back, and notes
which line the loop is in at each look until it does.

A thread needs the interpreter's lock to look. If it comes late itself, a function has kept that lock, and
with it the loop. The thread gets the lock as soon as the function returns, so the line that it sees is that
of the call. Where it sees no line, the processor time of the process tells whether it ran at all: on a busy
machine it may wait for a second, which is no fault of its code and no warning.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter, process_time
from types import CodeType, FrameType
from typing import TypeAlias

import attrs
import trio

from ._errors import warn_untold

__all__ = ["LoopHolds"]


# Seconds between two looks: the shortest hold that counts. They are rarer after so many looks at a loop that
# waits.
_INTERVAL, _QUIET_INTERVAL, _QUIET_LOOKS = 0.1, 0.5, 50
# Seconds after which a hold is reported while it lasts, and between two warnings of the same line.
_REPORT_INTERVAL = 10.0
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (_PACKAGE, "<", *[sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")])
_Line: TypeAlias = tuple[CodeType, int]


@attrs.frozen(kw_only=True)
class LoopHolds:
    """The times in which one task held the Trio loop for 0.1 s or longer, so that no other task ran.

    A thread looks ten times a second, so a hold counts up to 0.1 s less than it took. After five seconds in
    which the loop did nothing, it looks every 0.5 s.

    Attributes:
        count: How many there were.
        seconds: Their sum.
        longest: Seconds of the longest.
        longest_at: The file, line and function in which the loop was then; None if that was not seen.
    """

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    longest_at: str | None = None


@attrs.define(eq=False)
class _LoopProbe:
    """A time from which on the loop is asked to call back, until it does.

    Attributes:
        began: When the loop was first seen busy.
        used: Seconds of processor time that the process had used before.
        lines: The lines in which it was seen, by how often.
        is_over: Whether it has called back.
        is_logged: Whether it was reported while it lasts.
    """

    began: float
    used: float
    lines: Counter[_Line] = attrs.field(factory=Counter[_Line])
    is_over: bool = False
    is_logged: bool = False

    def where(self) -> str | None:
        """Return the line in which the loop was seen most often, as text."""
        if not self.lines:
            return None
        [[(code, line), _]] = self.lines.most_common(1)
        return f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"

    def level(self, seconds: float) -> int:
        """Return the level at which a hold of so many seconds is logged."""
        has_run = process_time() - self.used >= seconds / 2
        # A process that is stopped uses no time, and one whose code keeps the interpreter's lock does.
        return logging.INFO if self.is_logged or not (self.lines or has_run) else logging.WARNING


class LoopWatch:
    """The watch over the loop of this Trio run, which all its systems share.

    Args:
        warn_after: Seconds after which a hold is logged.

    Attributes:
        holds: What was seen.
        users: How many systems share it.
    """

    def __init__(self, warn_after: float) -> None:
        self.holds = LoopHolds()
        self.users = 0
        self._warn_after = warn_after
        self._loop = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._unlogged = 0
        self._logged: str | None = None
        self._logged_at = float("-inf")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trio_accel loop watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        look: _LoopProbe | None = None
        quiet = 0
        while True:
            interval = _INTERVAL if quiet < _QUIET_LOOKS else _QUIET_INTERVAL
            due, used = perf_counter() + interval, process_time()
            if self._end.wait(interval):
                return
            line, is_running = _seen(self._loop)
            now = perf_counter()
            if look is None or look.is_over:
                if not is_running or (line is None and now < due + _INTERVAL):
                    quiet += 1
                    continue
                look, quiet = _LoopProbe(due, used), 0
                try:
                    self._token.run_sync_soon(self._called_back, look)
                except trio.RunFinishedError:
                    return
            if line is not None:
                look.lines[line] += 1
            if now - look.began >= _REPORT_INTERVAL and not look.is_logged:
                _log(look.level(now - look.began), "is held", now - look.began, look.where(), "")
                look.is_logged = True

    def _called_back(self, look: _LoopProbe) -> None:
        look.is_over = True
        now = perf_counter()
        seconds, holds = now - look.began, self.holds
        if seconds < _INTERVAL:
            return
        where = look.where()
        is_longest = seconds > holds.longest
        self.holds = LoopHolds(
            count=holds.count + 1,
            seconds=holds.seconds + seconds,
            longest=max(seconds, holds.longest),
            longest_at=where if is_longest else holds.longest_at,
        )
        if seconds < self._warn_after:
            return
        if where == self._logged and now < self._logged_at + _REPORT_INTERVAL:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more since the last warning)" if self._unlogged else ""
        self._unlogged, self._logged, self._logged_at = 0, where, now
        _log(look.level(seconds), "was held", seconds, where, others)


def _seen(thread: int) -> tuple[_Line | None, bool]:
    """Return the line that a loop executes, or None while it waits; and whether its thread runs.

    No frame outlives this call, because a frame keeps the arrays in its variables alive.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return None, False
    return None if _is_idle(frame) else _line(frame), True


def _is_idle(frame: FrameType) -> bool:
    """Return whether a loop waits for events."""
    code = frame.f_code
    return code.co_name == "get_events" and "_io_" in code.co_filename


def _line(frame: FrameType) -> _Line:
    """Find the innermost line of the task that is not a library's, or of any library if there is none."""
    inner: FrameType | None = frame
    # Outer frames call `trio.run`, and hold nothing.
    while inner is not None and inner.f_code.co_name != "unrolled_run":
        if not inner.f_code.co_filename.startswith(_LIBRARIES):
            return inner.f_code, inner.f_lineno
        inner = inner.f_back
    return frame.f_code, frame.f_lineno


def _log(level: int, verb: str, seconds: float, where: str | None, others: str) -> None:
    text = "the Trio loop %s for %.1f s %s%s"
    place = "while none of its code ran: the process was stopped, or a thread kept the interpreter's lock"
    if where is not None:
        remedy = "no other task ran; move such work to a thread (trio.to_thread.run_sync) or to a device"
        place = f"by {where}: {remedy}"
    values = verb, seconds, place, others
    warn_untold("trio_accel.actors", text, *values, level=level, seconds=seconds, where=where)


# The watch of each Trio run that has a system.
_watches: dict[trio.lowlevel.TrioToken, LoopWatch] = {}


@contextmanager
def watch_loop(warn_after: float | None) -> Generator[LoopWatch | None, None, None]:
    """Watch the loop of this run for the body of the ``with``.

    Args:
        warn_after: Seconds after which a hold is logged, unless another system of the run has begun to watch;
            None not to watch.
    """
    if warn_after is None:
        yield None
        return
    token = trio.lowlevel.current_trio_token()
    watch = _watches.get(token)
    if watch is None:
        watch = _watches[token] = LoopWatch(warn_after)
    watch.users += 1
    try:
        yield watch
    finally:
        watch.users -= 1
        if not watch.users:
            del _watches[token]
            watch.close()
