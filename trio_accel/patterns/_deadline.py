"""A deadline as a value, for where no cancel scope reaches: between processes."""

from __future__ import annotations

import math
import re
from typing import NoReturn

import attrs
import trio

from ._numbers import must_be_number

__all__ = ["Deadline"]

# No sign, no exponent, and no more digits than a number of seconds has.
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def _moment(value: object) -> float:
    moment = must_be_number("a deadline", value)
    if math.isnan(moment):
        raise ValueError("a deadline is a moment on Trio's clock, got NaN")
    return moment


@attrs.frozen(order=True)
class Deadline:
    """A moment by which an answer is needed, on the clock of this Trio run.

    A cancel scope says when its block gives up, and what its block has asked for is cancelled with it,
    through any number of actors, all of which know the time that is left. This needs no `Deadline`. It is for
    the edges of a program: a request comes in with the seconds that its sender has left, or goes out to
    another process. Clocks of two processes have nothing in common, so what travels is the rest of the time.

    Attributes:
        at: The moment, as ``trio.current_time()`` will say; infinity for none.
    """

    at: float = attrs.field(converter=_moment)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Deadline is a moment on the clock of one Trio run: send `to_header()` instead")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline in so many seconds; infinity for none.

        Raises:
            ValueError: The number is negative or NaN.
            TypeError: It is no number.
        """
        if not must_be_number("seconds", seconds) >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds!r}")
        return cls(trio.current_time() + seconds)

    @classmethod
    def current(cls) -> Deadline:
        """Return the deadline of the running task: when the first of its cancel scopes gives up."""
        return cls(trio.current_effective_deadline())

    @classmethod
    def from_header(cls, text: str | None, *, at_most: float = math.inf) -> Deadline:
        """Read a deadline from a header with seconds, such as ``"1.5"``.

        Args:
            text: Value of the header; None where there is none.
            at_most: The most seconds that are granted, also without a header.

        Raises:
            ValueError: The text is no plain decimal number, or too long.
        """
        limit = cls.after(at_most)
        if text is None:
            return limit
        if not _SECONDS.fullmatch(text.strip()):
            told = f"must be seconds as a decimal number, such as 1.5, got {text[:40]!r}"
            raise ValueError(f"Deadline.from_header: text {told}")
        return min(limit, cls.after(float(text)))

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.at - trio.current_time())

    @property
    def has_passed(self) -> bool:
        """Whether nothing is left."""
        return self.at <= trio.current_time()

    def to_header(self) -> str | None:
        """Return the seconds that are left, as the text of a header; None without a deadline.

        It is cut off at a microsecond, so the receiver never has more.
        """
        if self.at == math.inf:
            return None
        return f"{math.floor(min(self.remaining, 999_999_999) * 1e6) / 1e6:.6f}"

    def scope(self) -> trio.CancelScope:
        """Return a cancel scope with this deadline, for ``with deadline.scope() as scope:``.

        ``scope.cancelled_caught`` says afterwards whether it was too late.
        """
        return trio.CancelScope(deadline=self.at)
