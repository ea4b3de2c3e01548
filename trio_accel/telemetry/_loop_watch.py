"""Finding what holds the loop."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import contextmanager
from traceback import extract_stack, format_list
from types import CodeType, FrameType

import attrs
import trio

from ..actors import actor_path_of, is_number

__all__ = ["LoopWatch", "SlowStep", "watch_loop"]

_logger = logging.getLogger("trio_accel.telemetry")

# Looks at a loop within the bound; a step is seen by the second one.
_LOOKS = 4
_SHORTEST = 0.01
# Share of the bound for which a thread must have computed to have kept the interpreter's lock.
_MOSTLY = 0.75
# Places that are remembered, and seconds after which one is logged again.
_PLACES = 100
_AGAIN = 60.0
_KEPT = 50


@attrs.frozen(kw_only=True)
class SlowStep:
    """A task that held the loop: it ran for longer than the bound without giving other tasks a turn.

    Attributes:
        time: When it was noticed, in seconds since the epoch.
        seconds: How long it had held the loop by then.
        task: Name of the task; empty where Trio itself was at work.
        path: Path of the actor that has the task; None if it has no actor.
        stack: Its stack, as in a traceback, the innermost call last.
        place: File, line and function of that call.
    """

    time: float
    seconds: float
    task: str
    path: str | None
    stack: str
    place: str


class LoopWatch:
    """Looks at a loop from a thread of its own. Made by `watch_loop`.

    Attributes:
        bound: Seconds that a task may hold the loop.
    """

    def __init__(self, bound: float) -> None:
        self.bound: float = bound
        self._reports: deque[SlowStep] = deque(maxlen=_KEPT)
        self._token = trio.lowlevel.current_trio_token()
        self._loop = threading.get_ident()
        self._clock: int | None = None
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(self._loop)
        # Whether the loop has had a turn since it was asked for one.
        self._has_turned = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trio_accel loop watch", daemon=True)
        # The time when a place was logged last, and the number of times that it was seen since and not
        # logged.
        self._places: OrderedDict[str, tuple[float, int]] = OrderedDict()

    @property
    def reports(self) -> tuple[SlowStep, ...]:
        """The last 50 that were noticed, the oldest first."""
        return tuple(self._reports)

    def begin(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        self._thread.join()

    def _processor_time(self) -> float:
        """Return the seconds that the loop's thread has computed; 0 on systems that do not tell."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def _turned(self) -> None:
        self._has_turned = True

    def _watch(self) -> None:
        seen: tuple[int, CodeType] | None = None
        since = now = time.perf_counter()
        used = self._processor_time()
        is_reported = False
        while not self._end.wait(min(self.bound / _LOOKS, threading.TIMEOUT_MAX)):
            before, now = now, time.perf_counter()
            used_before, used = used, self._processor_time()
            # A call that keeps the interpreter's lock hides the loop until it is over.
            is_late = now - before >= self.bound and used - used_before >= self.bound * _MOSTLY
            if self._has_turned and not is_late:
                seen, self._has_turned = None, False
                try:
                    # The loop pays for this alone, and not for each step of a task.
                    self._token.run_sync_soon(self._turned)
                except trio.RunFinishedError:
                    return
                continue
            # The only way to see it.
            frames: dict[int, FrameType] = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            frame = frames.get(self._loop)
            del frames
            step = frame and _step_of(frame)
            if frame is None or step is None:
                seen = None
                continue
            # Between two turns a task has one step: what has the same frame at its bottom is one.
            sight = id(step), step.f_code
            if sight != seen:
                seen, since, is_reported = sight, before if is_late else now, False
            if now - since >= self.bound and not is_reported:
                is_reported = True
                self._report(frame, step, now - since)
            del frame, step

    def _report(self, frame: FrameType, step: FrameType, seconds: float) -> None:
        task = step.f_back.f_locals.get("task") if step.f_back is not None else None
        below: list[FrameType] = []
        inner: FrameType | None = frame
        while inner is not None and inner is not step.f_back:
            below.append(inner)
            inner = inner.f_back
        summary = extract_stack(frame, limit=len(below))
        last = summary[-1]
        name, path = "", None
        if isinstance(task, trio.lowlevel.Task):
            name, path = task.name, actor_path_of(task)
        self._note(
            seconds,
            task=name,
            path=path,
            stack="".join(format_list(summary)),
            place=f"{last.filename}:{last.lineno}, in {last.name}",
        )

    def _note(self, seconds: float, *, task: str, path: str | None, stack: str, place: str) -> None:
        report = SlowStep(time=time.time(), seconds=seconds, task=task, path=path, stack=stack, place=place)
        self._reports.append(report)
        # The time of day may be set back, and then a place would not be logged for hours.
        now = time.monotonic()
        logged_at, unlogged = self._places.pop(place, (float("-inf"), 0))
        if now < logged_at + _AGAIN:
            self._places[place] = logged_at, unlogged + 1
            return
        self._places[place] = now, 0
        if len(self._places) > _PLACES:
            self._places.popitem(last=False)
        _logger.warning(
            "%s has held the loop for %.3f s (%s)%s\n%s",
            f"actor {path}" if path is not None else f"task {task}" if task else "something",
            seconds,
            place,
            f", and {unlogged} times before" if unlogged else "",
            stack.rstrip(),
            extra={"path": path, "task": task, "seconds": seconds, "place": place},
        )


def _step_of(frame: FrameType) -> FrameType | None:
    """Return the bottom frame of the loop's calls; None if it has called nothing."""
    step: FrameType | None = None
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code.co_name == "unrolled_run" and inner.f_globals.get("__name__") == "trio._core._run":
            return step
        step, inner = inner, inner.f_back
    return None


@contextmanager
def watch_loop(bound: float = 0.1) -> Generator[LoopWatch, None, None]:
    """Report every task that holds the Trio loop for longer than a bound, with its stack.

    While a handler computes, or calls what blocks, no other task of the program runs. Each such step is
    reported once, while it goes on: in `LoopWatch.reports`, and as a warning of the logger
    ``trio_accel.telemetry``, at most once a minute for one place in the code.

    A thread looks at the loop four times within the bound, so a step is surely seen if it is half as long
    again as the bound. Two steps of a task may count as one, if nothing came between. Where a call computes
    and keeps the interpreter's lock, no thread can look: it is reported when it is over (on Linux). Tasks pay
    nothing for being watched.

    Args:
        bound: Seconds, at least 0.01.

    Raises:
        ValueError: The bound is no such number.
        RuntimeError: This is no Trio run.
    """
    if not is_number(bound, _SHORTEST, sys.float_info.max):
        raise ValueError(f"watch_loop: bound must be seconds of at least {_SHORTEST:g}, got {bound!r}")
    watch = LoopWatch(bound)
    watch.begin()
    try:
        yield watch
    finally:
        watch.close()
