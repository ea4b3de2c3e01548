"""Rules for calls: which may begin, which are tried again, and by when they must be answered.

A circuit breaker refuses calls that fail anyway. The limit of a rate is a token bucket, for all or for each
key. A budget keeps retries from becoming a storm. A deadline is a value, for where no cancel scope reaches.
The memory for keys and events from outside is bounded.
"""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, NoReturn, TypeVar

import attrs
import trio

from ..actors import (
    ActorFailedError,
    Backoff,
    NotExecutedError,
    TaskLock,
    checked_options,
    must_be_count,
    must_be_number,
    must_be_positive,
    named_arguments,
    named_options,
)
from ..backends.base import CompletionTimeoutError, ContextLostError, InputFailedError, NotSupportedError
from ._checks import ModelOutputError, positive_integer
from ._submit import ItemT, Model, ResultT, as_callable

__all__ = [
    "CircuitBreaker",
    "CircuitOpenError",
    "CircuitState",
    "Deadline",
    "RateLimit",
    "RateLimitError",
    "RetryBudget",
    "RetryPolicy",
    "is_failure",
    "retry",
    "was_never_executed",
]

StateT = TypeVar("StateT")

_MIN_KEYS = 64


class KeyedStates(Generic[StateT]):
    """Remembers the states of keys that still matter, for a bounded number of keys.

    Args:
        make: Makes the state of a new key.
        debt: The importance of remembering a state. At 0 or below, a new state is equivalent. At infinity the
            state is in use and stays.
        limit: The maximum number of states. Above it, the states with the least debt are forgotten.
    """

    def __init__(
        self, make: Callable[[Hashable], StateT], debt: Callable[[StateT], float], limit: int
    ) -> None:
        self._make = make
        self._debt = debt
        self._limit = limit
        self._states: dict[Hashable, StateT] = {}
        # Doubled with the number of states after a sweep, so that sweeps cost a constant time per new key.
        self._sweep_at = min(_MIN_KEYS, limit)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[StateT]:
        return iter(self._states.values())

    def find(self, key: Hashable) -> StateT | None:
        """Return the state of a key; None without one."""
        return self._states.get(key)

    def get(self, key: Hashable) -> StateT:
        """Return the state of a key; make a new one if necessary.

        If more states than the limit are in use, all of them stay, so the user has to count them.
        """
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= self._sweep_at:
                self._sweep()
            state = self._states[key] = self._make(key)
        return state

    def _sweep(self) -> None:
        debts = [(debt, key) for key, state in self._states.items() if (debt := self._debt(state)) > 0]
        if len(debts) >= self._limit:
            # A tenth more than is needed now, so that the next new keys find room. The sort is stable: among
            # equals the oldest go first.
            debts.sort(key=lambda pair: pair[0])
            excess = len(debts) - self._limit + max(1, self._limit // 10)
            debts = [pair for pair in debts[:excess] if pair[0] == math.inf] + debts[excess:]
        retained_keys = {key for _, key in debts}
        self._states = {key: state for key, state in self._states.items() if key in retained_keys}
        self._sweep_at = min(
            max(_MIN_KEYS, 2 * len(retained_keys)),
            max(self._limit, len(retained_keys) + len(retained_keys) // 10 + 1),
        )


_SLOTS = 10


class RecentCounts:
    """The number of recent events, and of the marked ones among them.

    Time is divided into slots with a tenth of the window. The counts cover the current slot and the nine
    before, so at least nine tenths of the window.

    Args:
        within: Length of the window in seconds.
    """

    def __init__(self, within: float) -> None:
        self._width = within / _SLOTS
        # Events and marked events by slot number, oldest first.
        self._slots: dict[int, list[int]] = {}

    def add(self, *, count: int = 0, marked: int = 0) -> None:
        """Count events now, and marked events separately."""
        counts = self._slots.setdefault(self._drop_old(), [0, 0])
        counts[0] += count
        counts[1] += marked

    def totals(self) -> tuple[int, int]:
        """Return the counts of the window: events, and marked events."""
        self._drop_old()
        slots = self._slots.values()
        return sum(things for things, _ in slots), sum(marked for _, marked in slots)

    def clear(self) -> None:
        """Start again."""
        self._slots.clear()

    def _drop_old(self) -> int:
        number = int(trio.current_time() // self._width)
        while self._slots and (oldest := next(iter(self._slots))) <= number - _SLOTS:
            del self._slots[oldest]
        return number


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
    """A `CircuitBreaker` refused the call, which was never executed.

    Attributes:
        retry_after: Seconds until the breaker lets one through again; 0 while it probes.
    """


def is_failure(error: Exception) -> bool:
    """Return whether an error counts against the model instead of its caller, for a `CircuitBreaker`.

    These errors do not count: `ValueError` and `TypeError`, including singular matrices but not
    `ModelOutputError`; `NotSupportedError`; `AskCycleError`; and refusals by limits, namely `RateLimitError`,
    `UnknownTenantError` and `CircuitOpenError`.
    """
    if isinstance(error, NotExecutedError):
        return error.may_go_elsewhere
    return isinstance(error, ModelOutputError) or not isinstance(error, _CALLERS)


_CALLERS = (ValueError, TypeError, NotSupportedError)


@attrs.frozen(eq=False)
class _Attempt:
    """An admitted call: when it began, and in which period between two state changes."""

    begun: float
    period: int


class CircuitBreaker:
    """Lets calls through to a model while few of them fail.

    * *Closed*: all calls go through. When at least `calls` of them have ended within the last `within`
      seconds, and the `share` of failures among these is reached, it opens.
    * *Open*: calls raise `CircuitOpenError` at once, for `open_for` seconds.
    * *Half-open*: one call is let through as a probe, the others raise. If the probe succeeds, it closes, and
      counts from zero. If the probe fails, it opens again. If the probe is cancelled, the next call is a
      probe.

    The end of a call does not count if the state has changed since the call began. A cancelled call does not
    count, unless it took `slow_after` seconds. So set deadlines for calls, especially for probes.

    Use the object in only one Trio run.

    Args:
        share: The share of failures at which it opens, above 0 and at most 1.
        calls: The number of calls that must have ended before the share counts.
        within: The length of the window in seconds.
        open_for: The seconds for which it stays open.
        slow_after: The seconds after which a call counts as a failure, even if it succeeded or was cancelled.
        counts: Whether an error is a failure; other errors count as success.

    Raises:
        ValueError: A number is out of range, NaN, or infinite (except `slow_after`).
        TypeError: An argument is not a number.
    """

    @checked_options
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
        self._share = must_be_positive("share", share, maximum=1.0)
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
        """The number of times that it has opened so far."""
        return self._opened

    @contextmanager
    def attempt(self) -> Generator[None]:
        """Let the block through, and count its outcome.

        Raises:
            CircuitOpenError: It is open, or it is half-open and another call is the probe.
        """
        attempt = self._admit()
        # So it is if `counts` itself fails.
        has_failed: bool | None = True
        try:
            yield
            has_failed = False
        except Exception as error:
            has_failed = self._counts(error)
            raise
        except BaseException:
            has_failed = None
            raise
        finally:
            is_slow = trio.current_time() - attempt.begun >= self._slow_after
            self._ended(attempt, has_failed=is_slow or has_failed)

    def wrap(self, model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
        """Wrap a model so that its calls pass the breaker."""
        call = as_callable(model)

        async def guarded(item: ItemT) -> ResultT:
            with self.attempt():
                return await call(item)

        return guarded

    def _admit(self) -> _Attempt:
        now, until = trio.current_time(), self._opens_until
        attempt = _Attempt(now, self._period)
        if until is not None:
            if now < until:
                text = f"the circuit is open for another {until - now:.3g} s: too many calls have failed"
                raise CircuitOpenError(text, retry_after=until - now)
            if self._probe is not None:
                raise CircuitOpenError("the circuit is half-open, and one call probes it", retry_after=0.0)
            self._probe = attempt
        return attempt

    def _ended(self, attempt: _Attempt, *, has_failed: bool | None) -> None:
        """Count the end of a call; None does not count."""
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


_MIN_RATE, _MAX_RATE = 1e-6, 1e9


class RateLimitError(_LimitedError):
    """A `RateLimit` did not allow the call, which was never executed.

    Attributes:
        retry_after: Seconds until there are tokens for it, if no other call takes them.
    """


@attrs.define(eq=False)
class _Bucket:
    """The tokens of a key.

    Attributes:
        missing: The number of tokens missing from a full bucket, at the time `changed_at`.
        changed_at: The time of the last change.
        turn: Held by the first call that waits for tokens.
    """

    missing: float = 0.0
    changed_at: float = -math.inf
    turn: TaskLock = attrs.field(factory=TaskLock)


class RateLimit:
    """A token bucket: at most `burst` at once, and `rate` a second in the long run.

    A bucket holds at most `burst` tokens, and is full at first. `rate` tokens are added per second. A call
    takes as many tokens as it costs. Between any two moments ``t`` seconds apart, at most
    ``burst + rate * t`` are taken.

    Each key has its own bucket, made when the key is first seen. A full bucket is forgotten, since a new one
    is equivalent. Above `max_keys`, the buckets with the fewest missing tokens are forgotten, except buckets
    with waiting calls.

    ``async with limit:`` is `acquire` without a key. Use the object in only one Trio run.

    Args:
        rate: Tokens per second, from 1e-6 to 1e9.
        burst: The maximum number of tokens in a bucket, in the same range; by default the tokens of a second,
            and at least 1.
        max_keys: The maximum number of remembered buckets.

    Raises:
        ValueError: A number is zero, negative, NaN, infinite or out of range.
        TypeError: An argument is not a number.
    """

    @checked_options
    def __init__(self, rate: float, *, burst: float | None = None, max_keys: int = 10_000) -> None:
        self._rate = must_be_positive("the rate", rate, minimum=_MIN_RATE, maximum=_MAX_RATE)
        self._burst = must_be_positive(
            "the burst",
            max(self._rate, 1.0) if burst is None else burst,
            minimum=_MIN_RATE,
            maximum=_MAX_RATE,
        )
        self._buckets: KeyedStates[_Bucket] = KeyedStates(
            lambda _: _Bucket(), self._debt, must_be_count("max_keys", max_keys)
        )

    def __repr__(self) -> str:
        return f"RateLimit({self._rate:g}, burst={self._burst:g})"

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        """Return nothing to the bucket, because tokens pay for the beginning of a call."""

    @property
    def keys(self) -> int:
        """The number of remembered buckets."""
        return len(self._buckets)

    async def acquire(self, key: Hashable = None, *, cost: float = 1.0) -> None:
        """Take tokens, and wait for them after earlier calls with the same key.

        If cancelled, it takes no tokens, and later calls move up.

        Raises:
            ValueError: The cost is zero, negative, NaN, infinite, or more than a full bucket.
            TypeError: The cost is not a number.
        """
        cost = self._cost(cost)
        bucket = self._buckets.get(key)
        async with bucket.turn:
            wait = self._delay(bucket, cost)
            if wait > 0:
                await trio.sleep(wait)
            self._take(bucket, cost)

    def try_acquire(self, key: Hashable = None, *, cost: float = 1.0) -> bool:
        """Take tokens if they are available and no call waits for the same key.

        Returns:
            Whether it did.

        Raises:
            ValueError, TypeError: As for `acquire`.
        """
        cost = self._cost(cost)
        bucket = self._buckets.get(key)
        if bucket.turn.locked() or self._delay(bucket, cost) > 0:
            return False
        self._take(bucket, cost)
        return True

    def delay(self, key: Hashable = None, *, cost: float = 1.0) -> float:
        """Return the seconds until the tokens are available, if no other call takes them; 0 for now.

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
        """Wrap a model so that its calls take tokens first.

        Args:
            model: The model.
            key: Returns the key of an item.
            cost: Returns the cost of an item.
            wait: Whether a call waits for its tokens. Otherwise it raises `RateLimitError` without them.

        Returns:
            The wrapped model.
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
        return max(0.0, bucket.missing - (trio.current_time() - bucket.changed_at) * self._rate)

    def _delay(self, bucket: _Bucket, cost: float) -> float:
        return max(0.0, (self._missing(bucket) + cost - self._burst) / self._rate)

    def _take(self, bucket: _Bucket, cost: float) -> None:
        bucket.missing = self._missing(bucket) + cost
        bucket.changed_at = trio.current_time()

    def _debt(self, bucket: _Bucket) -> float:
        return math.inf if bucket.turn.locked() else self._missing(bucket)


_PERHAPS_EXECUTED = (ActorFailedError, ContextLostError, CompletionTimeoutError, InputFailedError)

_BACKOFF = Backoff(initial=0.05, base=0.1, maximum=2.0, jitter=0.5)

# The numbers are for no cryptography: they spread calls that failed together.
_random = random.Random()  # noqa: S311


def was_never_executed(error: BaseException) -> bool:
    """Return whether an error means that its own request was never begun.

    This holds for each `NotExecutedError`, but only for its own request. A model of several steps may have
    executed the steps before.
    """
    return isinstance(error, NotExecutedError)


class RetryBudget:
    """A budget for retried requests, shared by all users of the object.

    Retries are at most `share` of the requests in the last `within` seconds, plus `minimum` per second. A
    request counts once, even if the model of a `retry` contains a `retry` with the same budget. That also
    holds across actors, because context variables travel with asks. So a loss that fails everything in flight
    causes few retries, however many layers there are.

    Use the object in only one Trio run.

    Args:
        share: The number of retries per request, from 0 to 1.
        minimum: Additional retries per second, for a service with few requests; 0 or more.
        within: The length of the window in seconds.

    Raises:
        ValueError: A number is out of range, NaN or infinite.
        TypeError: An argument is not a number.
    """

    @checked_options
    def __init__(self, *, share: float = 0.1, minimum: float = 1.0, within: float = 10.0) -> None:
        self._share = must_be_positive("share", share, maximum=1.0, allows_zero=True)
        self._minimum = must_be_positive("minimum", minimum, allows_zero=True)
        self._within = must_be_positive("within", within)
        self._counts = RecentCounts(self._within)
        self._denied = 0

    def __repr__(self) -> str:
        return f"RetryBudget(share={self._share:g}, minimum={self._minimum:g}, within={self._within:g})"

    @property
    def denied(self) -> int:
        """The number of retries that it has denied so far."""
        return self._denied

    @property
    def remaining(self) -> float:
        """The number of retries that it would allow now."""
        requests, retries = self._counts.totals()
        return max(0.0, self._share * requests + self._minimum * self._within - retries)

    def note_request(self) -> None:
        """Count a request at its first attempt."""
        self._counts.add(count=1)

    def try_retry(self) -> bool:
        """Take a retry from the budget, if there is one.

        Returns:
            Whether there was.
        """
        # A share such as 0.1 of 30 requests is not quite 3 in binary.
        if self.remaining < 1.0 - 1e-9:
            self._denied += 1
            return False
        self._counts.add(marked=1)
        return True


# The budgets that count the request which the running task works on.
_counted_by: ContextVar[tuple[RetryBudget, ...]] = ContextVar("trio_accel_retry_budgets", default=())


@named_options
@attrs.frozen(kw_only=True)
class RetryPolicy:
    """The rules for retrying a model: the options of `retry`, as one value.

    Attributes:
        budget: The budget for retries.
        attempts: The maximum number of attempts, including the first.
        backoff: The waits before the second attempt, the third, and so on.
        may_run_twice: Whether the work may be done twice.
        is_safe: Whether an error allows another attempt; replaces the rule of `retry`.

    Raises:
        ValueError: `attempts` is below 1.
        TypeError: An argument is of another class.
    """

    budget: RetryBudget
    attempts: int = attrs.field(default=3, validator=positive_integer)
    backoff: Backoff = _BACKOFF
    may_run_twice: bool = False
    is_safe: Callable[[Exception], bool] | None = None

    def wrap(self, model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
        """Make a model that tries again; see `retry`.

        Raises:
            TypeError: `model` is not a model.
        """
        call = as_callable(model)
        budget = self.budget
        safe = self.is_safe or (is_transient if self.may_run_twice else _is_not_begun)

        async def retried(item: ItemT) -> ResultT:
            outer = _counted_by.get()
            if budget not in outer:
                budget.note_request()
            token = _counted_by.set((*outer, budget))
            try:
                for attempt in range(self.attempts - 1):
                    try:
                        return await call(item)
                    except Exception as error:
                        delay = self.backoff.delay(attempt, _random)
                        has_time = trio.current_time() + delay < trio.current_effective_deadline()
                        if not (safe(error) and has_time and budget.try_retry()):
                            raise
                    await trio.sleep(delay)
                return await call(item)
            finally:
                _counted_by.reset(token)

        return retried


@named_arguments
def retry(
    model: Model[ItemT, ResultT],
    *,
    budget: RetryBudget,
    attempts: int = 3,
    backoff: Backoff = _BACKOFF,
    may_run_twice: bool = False,
    is_safe: Callable[[Exception], bool] | None = None,
) -> Callable[[ItemT], Awaitable[ResultT]]:
    """Make a model that tries again after errors that allow it.

    By default these are errors without any execution that may soon disappear: `ActorStoppedError`,
    `ActorRestartingError`, `MailboxFullError`, `QueueFullError`, and their subclasses. With `may_run_twice`
    also `ActorFailedError`, `ContextLostError`, `CompletionTimeoutError` and `InputFailedError`. All other
    errors are raised at once, including exception groups.

    The last error is raised when the attempts or the budget are used up, or when the caller's deadline would
    pass during the wait.

    Args:
        model: The model. If it sends a single request, only this request is repeated.
        budget: The budget for retries; share one object between all users of the same devices.
        attempts: The maximum number of attempts, including the first.
        backoff: The waits before the second attempt (`initial`), the third (`base`), and so on, with jitter.
        may_run_twice: Whether the work may be done twice, because a repetition would do no harm.
        is_safe: Whether an error allows another attempt; replaces the rule above.

    Returns:
        The wrapped model.

    Raises:
        ValueError: `attempts` is below 1.
        TypeError: `model` is not a model, or an argument has another class.
    """
    return RetryPolicy(
        budget=budget, attempts=attempts, backoff=backoff, may_run_twice=may_run_twice, is_safe=is_safe
    ).wrap(model)


def _is_not_begun(error: Exception) -> bool:
    return isinstance(error, NotExecutedError) and error.may_go_elsewhere


def is_transient(error: Exception) -> bool:
    """Return whether the same work may succeed a moment later, if it may run twice."""
    return isinstance(error, _PERHAPS_EXECUTED) or _is_not_begun(error)


# No sign, no exponent, and no more digits than a number of seconds has.
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def _moment(value: object) -> float:
    moment = must_be_number("a deadline", value)
    if math.isnan(moment):
        raise ValueError("a deadline is a moment on Trio's clock, got NaN")
    return moment


@attrs.frozen(order=True)
class Deadline:
    """The moment by which an answer is needed, on the clock of this Trio run.

    If you only need a timeout, use a cancel scope: it also cancels the requests of its block, through any
    number of actors, and all of them know the remaining time. A `Deadline` is for the edges of a program: a
    request arrives with the seconds that its sender has left, or is sent to another process. Because clocks
    of two processes differ, the remaining time is sent.

    Attributes:
        at: The moment, as a value of ``trio.current_time()``; infinity for none.
    """

    at: float = attrs.field(converter=_moment)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Deadline is a moment on the clock of one Trio run: send `to_header()` instead")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline after a number of seconds; infinity for none.

        Raises:
            ValueError: The number is negative or NaN.
            TypeError: It is not a number.
        """
        if not must_be_number("seconds", seconds) >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds!r}")
        return cls(trio.current_time() + seconds)

    @classmethod
    def current(cls) -> Deadline:
        """Return the deadline of the running task: the earliest deadline of its cancel scopes."""
        return cls(trio.current_effective_deadline())

    @classmethod
    def from_header(cls, text: str | None, *, at_most: float = math.inf) -> Deadline:
        """Read a deadline from a header with seconds, such as ``"1.5"``.

        Args:
            text: The value of the header; None without one.
            at_most: The maximum seconds to grant, also without a header.

        Raises:
            ValueError: The text is not a plain decimal number, or is too long.
        """
        limit = cls.after(at_most)
        if text is None:
            return limit
        if not _SECONDS.fullmatch(text.strip()):
            problem = f"must be seconds as a decimal number, such as 1.5, got {text[:40]!r}"
            raise ValueError(f"Deadline.from_header: text {problem}")
        return min(limit, cls.after(float(text)))

    @property
    def remaining(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self.at - trio.current_time())

    @property
    def has_passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.at <= trio.current_time()

    def to_header(self) -> str | None:
        """Return the remaining seconds as the text of a header; None without a deadline.

        The number is truncated to microseconds, so the receiver never has more time.
        """
        if self.at == math.inf:
            return None
        return f"{math.floor(min(self.remaining, 999_999_999) * 1e6) / 1e6:.6f}"

    def scope(self) -> trio.CancelScope:
        """Return a cancel scope with this deadline, for ``with deadline.scope() as scope:``.

        Afterwards, ``scope.cancelled_caught`` is True if it was too late.
        """
        return trio.CancelScope(deadline=self.at)
