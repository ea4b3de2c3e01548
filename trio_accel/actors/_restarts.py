"""Restarts of actors: how often, after which delay, and in which order."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from ._messages import AwaitedStart, TaskEvent
from ._options import Backoff, Intensity, Policy


@attrs.define(eq=False)
class _Series:
    """The back-off state of one child."""

    attempt: int = 0
    attempt_after_progress: int = 0
    quiet_since: float = float("-inf")
    # The number of pauses, and the end of the last pause.
    pauses: int = 0
    resumed_at: float = float("-inf")


@attrs.define(eq=False, repr=False)
class Restarts:
    """The restarts made by one supervisor, checked against its intensity."""

    _intensity: Intensity
    _random: random.Random
    # The times of restarts, with the children's paths.
    _counted: deque[tuple[float, str]] = attrs.field(factory=deque[tuple[float, str]], init=False)
    _series: defaultdict[str, _Series] = attrs.field(
        factory=partial(defaultdict[str, _Series], _Series), init=False
    )

    def is_one_more_allowed(self, path: str, now: float, *, has_progressed: bool) -> bool:
        """Count a restart of a child, and return whether it is within the intensity."""
        intensity, counted = self._intensity, self._counted
        if has_progressed and not intensity.counts_progress:
            self._counted = deque(restart for restart in counted if restart[1] != path)
            self._series[path].pauses = 0
            return True
        counted.append((now, path))
        while counted[0][0] < now - intensity.within:
            counted.popleft()
        series = self._series[path]
        if now - series.resumed_at > intensity.within:
            series.pauses = 0
        # After a pause, a child is on probation until it makes progress.
        return len(counted) <= intensity.restarts and (has_progressed or not series.pauses)

    def pause(self, path: str, now: float) -> float | None:
        """Return the length in seconds of a child's pause after excess restarts; None without pauses."""
        if self._intensity.pause is None:
            return None
        self._counted.clear()
        series = self._series[path]
        delay = self._intensity.pause.delay(series.pauses, self._random)
        series.pauses += 1
        series.resumed_at = now + delay
        return delay

    def delay(self, path: str, policy: Policy, now: float, progressed_at: float | None) -> float:
        """Return the delay in seconds before a child's next incarnation.

        Args:
            path: Path of the child.
            policy: The child's policy.
            now: The time when its incarnation ended.
            progressed_at: The time when the incarnation first made progress, or None.
        """
        series = self._series[path]
        gentle = policy.backoff_after_progress
        if gentle is None or progressed_at is None:
            return self._delay(series, policy.backoff, now)
        # Waiting and starting do not count as quiet either, so measure from the first progress.
        if now - progressed_at > gentle.reset_after:
            series.attempt_after_progress = 0
        delay = gentle.delay(series.attempt_after_progress, self._random)
        series.attempt_after_progress += 1
        series.attempt = 0
        return delay

    def _delay(self, series: _Series, backoff: Backoff, now: float) -> float:
        if now - series.quiet_since > backoff.reset_after:
            series.attempt = 0
        delay = backoff.delay(series.attempt, self._random)
        # The delay itself does not count as quiet.
        series.quiet_since = now + delay
        series.attempt += 1
        return delay

    def forget(self, path: str) -> None:
        """Forget a child that has ended for good; a new child of the same name starts from scratch."""
        self._series.pop(path, None)


@attrs.define(eq=False, repr=False)
class StartGate:
    """The gate before each incarnation of an actor: whether it may start, and whether it has.

    Attributes:
        awaited_start: Set while another actor's task waits for this actor's start.
        swept: Not None while the actor takes part in a restart of several children; the event is set once its
            incarnation has ended.
    """

    awaited_start: AwaitedStart | None = None
    swept: TaskEvent | None = None
    _begun: TaskEvent | None = None
    _has_begun: bool = False
    _turn: TaskEvent | None = None
    _pause: trio.CancelScope | None = None
    _is_shut: bool = False

    def expect_begin(self) -> None:
        """Prepare for `wait_begun`, before the incarnation can start."""
        self._begun = TaskEvent()
        self._has_begun = False

    async def wait_begun(self) -> bool:
        """Wait until the incarnation accepts messages; return False if it failed before."""
        if self._begun is not None:
            await self._begun.wait()
        return self._has_begun  # noqa: ASYNC910  # its caller checkpoints

    def begin(self) -> None:
        """Record that the incarnation accepts messages."""
        self._has_begun = True
        self._release()

    def _release(self) -> None:
        begun, self._begun = self._begun, None
        self.awaited_start = None
        if begun is not None:
            begun.set()

    async def pause(self, wait: Callable[[], Awaitable[object]]) -> bool:
        """Wait between two incarnations; return False if the gate was shut."""
        with trio.CancelScope() as self._pause:  # noqa: ASYNC912  # there may be nothing to wait for
            if not self._is_shut:
                await wait()
        self._pause = None
        return not self._is_shut  # noqa: ASYNC910  # its caller checkpoints

    async def wait_turn(self) -> bool:
        """Wait for this child's turn in a restart of several children; False if the gate is shut first."""
        self._turn = TaskEvent()
        self._release()
        assert self.swept is not None
        self.swept.set()
        is_going_on = await self.pause(self._turn.wait)
        self._turn = self.swept = None
        return is_going_on

    async def take_turn(self) -> bool:
        """Start the next incarnation of a child in `wait_turn`; return False if it failed to start."""
        if self._turn is None:
            return False  # noqa: ASYNC910  # its caller checkpoints
        self.expect_begin()
        self._turn.set()
        return await self.wait_begun()

    def shut(self, reason: str) -> None:
        """Prevent further incarnations, because the actor is to end."""
        self._is_shut = True
        if self._pause is not None:
            self._pause.cancel(reason=reason)

    def end(self) -> None:
        """Release all waits for the start, because the actor has ended."""
        self._release()
        if self.swept is not None:
            self.swept.set()
