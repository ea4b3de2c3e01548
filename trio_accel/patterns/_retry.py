"""Trying again: which errors allow it, and a budget that keeps it from becoming a storm."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import attrs
import trio

from ..actors import ActorFailedError, Backoff, NotExecutedError, named_arguments, named_options
from ..backends.base import CompletionTimeoutError, ContextLostError, InputFailedError
from ._bounded import RecentCounts
from ._numbers import must_be_count, must_be_positive, must_be_share
from ._servants import ItemT, Model, ResultT, as_callable

__all__ = ["RetryBudget", "RetryPolicy", "retry", "was_never_executed"]

_PERHAPS_EXECUTED = (ActorFailedError, ContextLostError, CompletionTimeoutError, InputFailedError)

_BACKOFF = Backoff(initial=0.05, base=0.1, maximum=2.0, jitter=0.5)

# Not cryptography: it spreads those that failed together.
_random = random.Random()  # noqa: S311


def was_never_executed(error: BaseException) -> bool:
    """Tell whether an error says that the request which it is the outcome of was not even begun.

    So is each `NotExecutedError`. It speaks of that one request. A model of several steps may have executed
    those before.
    """
    return isinstance(error, NotExecutedError)


class RetryBudget:
    """How many of the requests may be tried again, over all places that share the object.

    Of the last `within` seconds, retries are at most `share` of the requests, and `minimum` a second besides.
    A request counts once, also where the model of a `retry` has a `retry` inside with the same budget: in
    another actor, too, as context variables travel with asks. So a loss that fails everything in flight is
    followed by few retries, however many layers there are.

    The object is used in one Trio run.

    Args:
        share: Retries for each request, from 0 to 1.
        minimum: Retries a second besides, for a service with few requests; 0 or more.
        within: Seconds that are looked at.

    Raises:
        ValueError: A number is out of range, NaN or infinite.
        TypeError: An argument is no number.
    """

    def __init__(self, *, share: float = 0.1, minimum: float = 1.0, within: float = 10.0) -> None:
        self._share = must_be_share("share", share, allows_zero=True)
        self._minimum = must_be_positive("minimum", minimum) if minimum else 0.0
        self._within = must_be_positive("within", within)
        self._counts = RecentCounts(self._within)
        self._denied = 0

    def __repr__(self) -> str:
        return f"RetryBudget(share={self._share:g}, minimum={self._minimum:g}, within={self._within:g})"

    @property
    def denied(self) -> int:
        """How many retries it has not allowed so far."""
        return self._denied

    @property
    def left(self) -> float:
        """How many retries it would allow now."""
        requests, retries = self._counts.totals()
        return max(0.0, self._share * requests + self._minimum * self._within - retries)

    def note_request(self) -> None:
        """Count a request, when it is tried for the first time."""
        self._counts.add(count=1)

    def try_retry(self) -> bool:
        """Take a retry out of the budget, if there is one.

        Returns:
            Whether there was.
        """
        # A share such as 0.1 of 30 requests is not quite 3 in binary.
        if self.left < 1.0 - 1e-9:
            self._denied += 1
            return False
        self._counts.add(marked=1)
        return True


# The budgets that count the request which the running task works on.
_counted_by: ContextVar[tuple[RetryBudget, ...]] = ContextVar("trio_accel_retry_budgets", default=())


@named_options
@attrs.frozen(kw_only=True)
class RetryPolicy:
    """How a model is tried again: the options of `retry`, as one value.

    Attributes:
        budget: Budget of retries.
        attempts: The most attempts, the first included.
        backoff: Waiting before the second attempt, the third, and so on.
        may_run_twice: Whether the work may be done twice.
        is_safe: Whether an error allows another attempt, in place of the rule of `retry`.

    Raises:
        ValueError: `attempts` is below 1.
        TypeError: An argument is of another class.
    """

    budget: RetryBudget
    attempts: int = 3
    backoff: Backoff = _BACKOFF
    may_run_twice: bool = False
    is_safe: Callable[[Exception], bool] | None = None

    def __attrs_post_init__(self) -> None:
        must_be_count("attempts", self.attempts)
        if not isinstance(self.budget, RetryBudget):
            raise TypeError(f"budget must be a RetryBudget, got {self.budget!r}")
        if not isinstance(self.backoff, Backoff):
            raise TypeError(f"backoff must be a Backoff, got {self.backoff!r}")

    def wrap(self, model: Model[ItemT, ResultT]) -> Callable[[ItemT], Awaitable[ResultT]]:
        """Make a model that tries again; see `retry`.

        Raises:
            TypeError: It is no model.
        """
        call = as_callable(model)
        budget = self.budget
        safe = self.is_safe or (_is_transient if self.may_run_twice else _is_not_begun)

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

    By default these are the errors which say that nothing was executed, and that it may go better a moment
    later: `ActorStoppedError`, `ActorRestartingError`, `MailboxFullError`, `QueueFullError`, and classes that
    derive from these. With `may_run_twice` also `ActorFailedError`, `ContextLostError`,
    `CompletionTimeoutError` and `InputFailedError`. All other errors are raised at once, exception groups
    too.

    The last error is raised when there are no attempts left, when the budget has no retry, and when the
    deadline of the caller would pass during the wait.

    Args:
        model: The model. If it is one request, that alone is tried again.
        budget: Budget of retries: share one object between all users of the same devices.
        attempts: The most attempts, the first included.
        backoff: Waiting before the second attempt (`initial`), the third (`base`), and so on, with jitter.
        may_run_twice: Whether the work may be done twice: it changes nothing that a second time would spoil.
        is_safe: Whether an error allows another attempt, in place of the above.

    Returns:
        The model.

    Raises:
        ValueError: `attempts` is below 1.
        TypeError: `model` is no model, or an argument is of another class.
    """
    policy = RetryPolicy(
        budget=budget, attempts=attempts, backoff=backoff, may_run_twice=may_run_twice, is_safe=is_safe
    )
    return policy.wrap(model)


def _is_not_begun(error: Exception) -> bool:
    return isinstance(error, NotExecutedError) and error.may_go_elsewhere


def _is_transient(error: Exception) -> bool:
    return isinstance(error, _PERHAPS_EXECUTED) or _is_not_begun(error)
