"""A watch over the Trio loop, which finds the code that holds the loop, and for how long.

A task that computes or blocks without a checkpoint holds the loop: other tasks cannot run, and timeouts
cannot fire. The task cannot detect that itself, and a Trio instrument would slow down each turn of the loop.
So a thread samples the loop ten times a second. While it sees the loop wait for events, it does nothing else,
and after some seconds it samples less often, because each wake-up takes up to 0.1 ms. Otherwise it asks the
loop to call back, and records the loop's current line at each sample until the callback runs.

The thread needs the interpreter's lock for a sample. If the sample itself is late, a function has kept the
lock, and thereby held the loop. The thread gets the lock as soon as the function returns, so the sampled line
is the line of the call. Without any sampled line, the processor time of the process shows whether it ran at
all: on a busy machine it may wait for a second, which is not the fault of its code and not worth a warning.
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


# Seconds between two samples, which is also the shortest hold that counts. After `_QUIET_LOOKS` samples of a
# waiting loop, `_QUIET_INTERVAL` applies.
_INTERVAL, _QUIET_INTERVAL, _QUIET_LOOKS = 0.1, 0.5, 50
# Seconds until a hold is reported while it lasts, and between two warnings about the same line.
_REPORT_INTERVAL = 10.0
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (_PACKAGE, "<", *[sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")])
_Line: TypeAlias = tuple[CodeType, int]


@attrs.frozen(kw_only=True)
class LoopHolds:
    """The times when one task held the Trio loop for 0.1 s or longer, so that other tasks could not run.

    A thread samples the loop ten times a second, so the measured time is up to 0.1 s below the real time.
    After five idle seconds it samples every 0.5 s.

    Attributes:
        count: The number of holds.
        seconds: Their total duration.
        longest: The longest duration in seconds.
        longest_at: The file, line and function that held the loop for that time; None if unknown.
    """

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    longest_at: str | None = None


@attrs.define(eq=False)
class _LoopProbe:
    """A suspected hold: from the first busy sample until the loop calls back.

    Attributes:
        began: The time when the loop was first seen busy.
        used: The process's processor time in seconds before that.
        lines: The sampled lines, with their frequency.
        is_over: Whether the loop has called back.
        is_logged: Whether the hold was reported while it lasted.
    """

    began: float
    used: float
    lines: Counter[_Line] = attrs.field(factory=Counter[_Line])
    is_over: bool = False
    is_logged: bool = False

    def location(self) -> str | None:
        """Return the most frequent line as text."""
        if not self.lines:
            return None
        [[(code, line), _]] = self.lines.most_common(1)
        return f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"

    def level(self, seconds: float) -> int:
        """Return the logging level for a hold of this duration."""
        has_run = process_time() - self.used >= seconds / 2
        # A stopped process uses no processor time, but code that keeps the interpreter's lock does.
        return logging.INFO if self.is_logged or not (self.lines or has_run) else logging.WARNING


class LoopWatch:
    """The watch over this Trio run's loop, shared by all its systems.

    Args:
        warn_after: Seconds after which a hold is logged.

    Attributes:
        holds: The holds seen so far.
        users: The number of systems that share the watch.
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
        probe: _LoopProbe | None = None
        quiet = 0
        while True:
            interval = _INTERVAL if quiet < _QUIET_LOOKS else _QUIET_INTERVAL
            due, used = perf_counter() + interval, process_time()
            if self._end.wait(interval):
                return
            line, is_running = _sampled_line(self._loop)
            now = perf_counter()
            if probe is None or probe.is_over:
                if not is_running or (line is None and now < due + _INTERVAL):
                    quiet += 1
                    continue
                probe, quiet = _LoopProbe(due, used), 0
                try:
                    self._token.run_sync_soon(self._called_back, probe)
                except trio.RunFinishedError:
                    return
            if line is not None:
                probe.lines[line] += 1
            if now - probe.began >= _REPORT_INTERVAL and not probe.is_logged:
                _log(probe.level(now - probe.began), "is held", now - probe.began, probe.location(), "")
                probe.is_logged = True

    def _called_back(self, probe: _LoopProbe) -> None:
        probe.is_over = True
        now = perf_counter()
        seconds, holds = now - probe.began, self.holds
        if seconds < _INTERVAL:
            return
        location = probe.location()
        is_longest = seconds > holds.longest
        self.holds = LoopHolds(
            count=holds.count + 1,
            seconds=holds.seconds + seconds,
            longest=max(seconds, holds.longest),
            longest_at=location if is_longest else holds.longest_at,
        )
        if seconds < self._warn_after:
            return
        if location == self._logged and now < self._logged_at + _REPORT_INTERVAL:
            self._unlogged += 1
            return
        suffix = f" ({self._unlogged} more since the last warning)" if self._unlogged else ""
        self._unlogged, self._logged, self._logged_at = 0, location, now
        _log(probe.level(seconds), "was held", seconds, location, suffix)


def _sampled_line(thread: int) -> tuple[_Line | None, bool]:
    """Return the line that a loop executes, or None while it waits; and whether its thread is running.

    All frames are released on return, because a frame keeps the arrays in its variables alive.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return None, False
    return None if _is_idle(frame) else _line(frame), True


def _is_idle(frame: FrameType) -> bool:
    """Return whether the loop is waiting for events."""
    code = frame.f_code
    return code.co_name == "get_events" and "_io_" in code.co_filename


def _line(frame: FrameType) -> _Line:
    """Find the task's innermost line outside all libraries, or the innermost line at all if there is none."""
    inner: FrameType | None = frame
    # Frames further out call `trio.run`, and do not hold the loop.
    while inner is not None and inner.f_code.co_name != "unrolled_run":
        if not inner.f_code.co_filename.startswith(_LIBRARIES):
            return inner.f_code, inner.f_lineno
        inner = inner.f_back
    return frame.f_code, frame.f_lineno


def _log(level: int, verb: str, seconds: float, location: str | None, suffix: str) -> None:
    text = "the Trio loop %s for %.1f s %s%s"
    cause = "while none of its code ran: the process was stopped, or a thread kept the interpreter's lock"
    if location is not None:
        remedy = "no other task ran; move such work to a thread (trio.to_thread.run_sync) or to a device"
        cause = f"by {location}: {remedy}"
    values = verb, seconds, cause, suffix
    warn_untold("trio_accel.actors", text, *values, level=level, seconds=seconds, where=location)


# The watch of each Trio run with a system.
_watches: dict[trio.lowlevel.TrioToken, LoopWatch] = {}


@contextmanager
def watch_loop(warn_after: float | None) -> Generator[LoopWatch | None, None, None]:
    """Watch this run's loop for the body of the ``with``.

    Args:
        warn_after: Seconds after which a hold is logged, unless another system of the run already has a
            watch; None disables the watch.
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
