"""Which calls may begin: not those that fail anyway (a circuit breaker), and not too many in a time.

The limit of a rate is a token bucket, for all or for each key.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Generator, Hashable
from contextlib import contextmanager

import attrs
import trio

from ..actors import NotExecutedError
from ..backends.base import NotSupportedError
from ._bounded import KeyedStates, RecentCounts
from ._numbers import must_be_count, must_be_positive, must_be_share
from ._outputs import ModelOutputError
from ._servants import ItemT, Model, ResultT, as_callable

__all__ = ["CircuitBreaker", "CircuitOpenError", "CircuitState", "RateLimit", "RateLimitError", "is_failure"]


class CircuitState(enum.Enum):
    """Whether a `CircuitBreaker` lets calls through."""

    CLOSED = "closed"
    """All of them."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half-open"
    """One at a time, which probes whether it goes well again."""


class _LimitedError(NotExecutedError):
    may_go_elsewhere = False

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CircuitOpenError(_LimitedError):
    """A `CircuitBreaker` did not let the call through; it was never executed.

    Attributes:
        retry_after: Seconds until the breaker lets one through again; 0 while it probes.
    """


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


_LEAST, _MOST = 1e-6, 1e9


class RateLimitError(_LimitedError):
    """More was asked for than a `RateLimit` allows; it was never executed.

    Attributes:
        retry_after: Seconds until there are tokens for it, if no other call takes them.
    """


@attrs.define(eq=False)
class _Bucket:
    """The tokens of a key.

    Attributes:
        missing: How many were missing to a full bucket, at `at`.
        at: When that was.
        waiting: How many wait for tokens, the one whose turn it is included.
        turn: Held by the one that is next.
    """

    missing: float = 0.0
    at: float = -math.inf
    waiting: int = 0
    turn: trio.Lock = attrs.field(factory=trio.Lock)


class RateLimit:
    """A token bucket: at most `burst` at once, and `rate` a second in the long run.

    A bucket holds at most `burst` tokens, and is full at first. `rate` tokens a second flow in. A call
    takes as many as it costs. Between any two moments ``t`` seconds apart, at most ``burst + rate * t`` are
    taken.

    Each key has a bucket of its own, made when it is first seen. A full bucket is forgotten, since a new one
    would be the same. Beyond `max_keys`, those that miss the fewest tokens are forgotten; no bucket is
    that waits.

    ``async with limit:`` is `acquire` without a key. The object is used in one Trio run.

    Args:
        rate: Tokens a second, from 1e-6 to 1e9.
        burst: The most tokens in a bucket, in the same range; by default as many as flow in within a second,
            and at least 1.
        max_keys: The most buckets that are remembered.

    Raises:
        ValueError: A number is zero, negative, NaN, infinite or out of range.
        TypeError: An argument is no number.
    """

    def __init__(self, rate: float, *, burst: float | None = None, max_keys: int = 10_000) -> None:
        self._rate = must_be_positive("the rate", rate, minimum=_LEAST, maximum=_MOST)
        self._burst = must_be_positive(
            "the burst", max(self._rate, 1.0) if burst is None else burst, minimum=_LEAST, maximum=_MOST
        )
        self._buckets: KeyedStates[_Bucket] = KeyedStates(
            lambda _: _Bucket(), self._debt, must_be_count("max_keys", max_keys)
        )

    def __repr__(self) -> str:
        return f"RateLimit({self._rate:g}, burst={self._burst:g})"

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        """Give nothing back: tokens are for what begins."""

    @property
    def keys(self) -> int:
        """How many buckets are remembered."""
        return len(self._buckets)

    async def acquire(self, key: Hashable = None, *, cost: float = 1.0) -> None:
        """Take tokens, and wait for them behind those that have waited longer for the same key.

        Cancelled, it takes none, and those behind move up.

        Raises:
            ValueError: The cost is zero, negative, NaN, infinite, or more than a full bucket.
            TypeError: The cost is no number.
        """
        cost = self._cost(cost)
        bucket = self._buckets.get(key)
        bucket.waiting += 1
        try:
            async with bucket.turn:
                wait = self._delay(bucket, cost)
                if wait > 0:
                    await trio.sleep(wait)
                self._take(bucket, cost)
        finally:
            bucket.waiting -= 1

    def try_acquire(self, key: Hashable = None, *, cost: float = 1.0) -> bool:
        """Take tokens if they are there and no call waits for the same key.

        Returns:
            Whether it did.

        Raises:
            ValueError, TypeError: As for `acquire`.
        """
        cost = self._cost(cost)
        bucket = self._buckets.get(key)
        if bucket.waiting or self._delay(bucket, cost) > 0:
            return False
        self._take(bucket, cost)
        return True

    def delay(self, key: Hashable = None, *, cost: float = 1.0) -> float:
        """Return the seconds until the tokens are there, if no other call takes them; 0 if they are.

        Raises:
            ValueError, TypeError: As for `acquire`.
        """
        cost = self._cost(cost)
        bucket = self._buckets.find(key)
        return self._delay(bucket or _Bucket(), cost)

    def wrap(
        self,
        model: Model[ItemT, ResultT],
        *,
        key: Callable[[ItemT], Hashable] = lambda item: None,
        cost: Callable[[ItemT], float] = lambda item: 1.0,
        wait: bool = True,
    ) -> Callable[[ItemT], Awaitable[ResultT]]:
        """Make a model whose calls take tokens first.

        Args:
            model: The model.
            key: Key of an item.
            cost: Cost of an item.
            wait: Whether a call waits for its tokens. If not, one without them raises `RateLimitError`.

        Returns:
            The model.
        """
        call = as_callable(model)

        async def limited(item: ItemT) -> ResultT:
            whose, tokens = key(item), cost(item)
            if wait:
                await self.acquire(whose, cost=tokens)
            elif not self.try_acquire(whose, cost=tokens):
                after = self.delay(whose, cost=tokens)
                text = f"{self!r} has no {tokens:g} tokens for {whose!r}: ask again in {after:.3g} s"
                raise RateLimitError(text, retry_after=after)
            return await call(item)

        return limited

    def _cost(self, cost: float) -> float:
        return must_be_positive("the cost", cost, maximum=self._burst)

    def _missing(self, bucket: _Bucket) -> float:
        return max(0.0, bucket.missing - (trio.current_time() - bucket.at) * self._rate)

    def _delay(self, bucket: _Bucket, cost: float) -> float:
        return max(0.0, (self._missing(bucket) + cost - self._burst) / self._rate)

    def _take(self, bucket: _Bucket, cost: float) -> None:
        bucket.missing = self._missing(bucket) + cost
        bucket.at = trio.current_time()

    def _debt(self, bucket: _Bucket) -> float:
        return math.inf if bucket.waiting else self._missing(bucket)
