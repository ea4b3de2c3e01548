"""Not asking what fails anyway: a circuit breaker."""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import attrs
import trio

from ..actors import NotExecutedError
from ..backends.base import NotSupportedError
from ._bounded import RecentCounts
from ._numbers import must_be_count, must_be_positive, must_be_share
from ._outputs import ModelOutputError
from ._servants import Model, as_callable

__all__ = ["CircuitBreaker", "CircuitOpenError", "CircuitState", "is_failure"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class CircuitState(enum.Enum):
    """Whether a `CircuitBreaker` lets calls through."""

    CLOSED = "closed"
    """All of them."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half-open"
    """One at a time, which probes whether it goes well again."""


class CircuitOpenError(NotExecutedError):
    """A `CircuitBreaker` did not let the call through; it was never executed.

    Attributes:
        retry_after: Seconds until the breaker lets one through again; 0 while it probes.
    """

    may_go_elsewhere = False

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def is_failure(error: Exception) -> bool:
    """Tell whether an error speaks against the model and not against its caller, for a `CircuitBreaker`.

    These do not: `ValueError` and `TypeError`, which singular matrices are too, but for `ModelOutputError`;
    `NotSupportedError`; `AskCycleError`; and what limits refuse, `RateLimitError`, `UnknownTenantError` and
    `CircuitOpenError`.
    """
    if isinstance(error, NotExecutedError):
        return error.may_go_elsewhere
    return isinstance(error, ModelOutputError) or not isinstance(error, _CALLERS)


_CALLERS = (ValueError, TypeError, NotSupportedError)


@attrs.frozen(eq=False)
class _Attempt:
    """A call that was let through, when, and in which period between two changes of state."""

    begun: float
    period: int


class CircuitBreaker:
    """Lets calls through to a model as long as few of them fail.

    * *Closed*: all calls go through. When at least `calls` of them have ended within the last `within`
      seconds, and the `share` of failures among these is reached, it opens.
    * *Open*: calls raise `CircuitOpenError` at once, for `open_for` seconds.
    * *Half-open*: one call goes through as a probe, the others raise. If the probe goes well, it closes, and
      counts anew. If the probe fails, it opens again. If the probe is cancelled, the next call is a probe.

    The end of a call that was let through before a change of state does not count. A cancelled call says
    nothing, unless it took `slow_after` seconds. So give calls a deadline, probes most of all.

    The object is used in one Trio run.

    Args:
        share: Share of failures at which it opens, above 0 and at most 1.
        calls: How many calls have to have ended before the share counts.
        within: Seconds that are looked at.
        open_for: Seconds for which it stays open.
        slow_after: Seconds after which a call is a failure, also one that went well or was cancelled.
        counts: Whether an error is a failure; others count as calls that went well.

    Raises:
        ValueError: A number is out of range, NaN, or infinite but for `slow_after`.
        TypeError: An argument is no number.
    """

    def __init__(
        self,
        *,
        share: float = 0.5,
        calls: int = 10,
        within: float = 10.0,
        open_for: float = 5.0,
        slow_after: float = math.inf,
        counts: Callable[[Exception], bool] = is_failure,
    ) -> None:
        self._share = must_be_share("share", share)
        self._calls = must_be_count("calls", calls)
        self._recent = RecentCounts(must_be_positive("within", within))
        self._open_for = must_be_positive("open_for", open_for)
        self._slow_after = (
            slow_after if slow_after == math.inf else must_be_positive("slow_after", slow_after)
        )
        self._counts = counts
        self._opens_until: float | None = None
        self._probe: _Attempt | None = None
        self._period = 0
        self._opened = 0

    def __repr__(self) -> str:
        return f"<CircuitBreaker {'closed' if self._opens_until is None else 'opened'}, {self._opened} times>"

    @property
    def state(self) -> CircuitState:
        """Whether it lets calls through now."""
        if self._opens_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if trio.current_time() < self._opens_until else CircuitState.HALF_OPEN

    @property
    def opened(self) -> int:
        """How often it has opened so far."""
        return self._opened

    @contextmanager
    def attempt(self) -> Generator[None, None, None]:
        """Let the block through, and count how it ends.

        Raises:
            CircuitOpenError: It is open, or half-open and another call probes.
        """
        attempt = self._admit()
        try:
            yield
        except Exception as error:
            has_failed = True
            try:
                has_failed = self._counts(error) or self._is_slow(attempt)
            finally:
                self._ended(attempt, has_failed=has_failed)
            raise
        except BaseException:
            self._ended(attempt, has_failed=self._is_slow(attempt) or None)
            raise
        else:
            self._ended(attempt, has_failed=self._is_slow(attempt))

    def wrap(self, model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
        """Make a model whose calls go through the breaker."""
        call = as_callable(model)

        async def guarded(item: ItemT) -> ResultT:
            with self.attempt():
                return await call(item)

        return guarded

    def _admit(self) -> _Attempt:
        now, until = trio.current_time(), self._opens_until
        if until is not None:
            if now < until:
                text = f"the circuit is open for another {until - now:.3g} s: too many calls have failed"
                raise CircuitOpenError(text, retry_after=until - now)
            if self._probe is not None:
                raise CircuitOpenError("the circuit is half-open, and one call probes it", retry_after=0.0)
            self._probe = _Attempt(now, self._period)
            return self._probe
        return _Attempt(now, self._period)

    def _is_slow(self, attempt: _Attempt) -> bool:
        return trio.current_time() - attempt.begun >= self._slow_after

    def _ended(self, attempt: _Attempt, *, has_failed: bool | None) -> None:
        """Count the end of a call; None if it says nothing."""
        if attempt.period != self._period:
            return
        if attempt is self._probe:
            self._probe = None
            if has_failed is not None:
                self._change(is_open=has_failed)
        elif has_failed is not None:
            self._recent.add(count=1, marked=int(has_failed))
            ended, failed = self._recent.totals()
            if has_failed and ended >= self._calls and failed >= self._share * ended:
                self._change(is_open=True)

    def _change(self, *, is_open: bool) -> None:
        self._period += 1
        self._recent.clear()
        self._opens_until = trio.current_time() + self._open_for if is_open else None
        self._opened += is_open
