"""How much may begin in how much time: a token bucket, for all or for each key."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import attrs
import trio

from ..actors import NotExecutedError
from ._bounded import KeyedStates
from ._numbers import must_be_count, must_be_positive
from ._servants import Model, as_callable

__all__ = ["RateLimit", "RateLimitError"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_LEAST, _MOST = 1e-6, 1e9


class RateLimitError(NotExecutedError):
    """More was asked for than a `RateLimit` allows; it was never executed.

    Attributes:
        retry_after: Seconds until there are tokens for it, if no other call takes them.
    """

    may_go_elsewhere = False

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
        """Nothing is given back: tokens are for what begins."""

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
