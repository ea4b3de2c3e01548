"""Records of messages: their counts and times, as cheaply as possible, and the last failures as text."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from traceback import format_exception
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..actors import ActorRestarted, ActorTerminated, Event, SupervisorFailed, describe
from ..backends.base import AccelError
from ._snapshot import FailureRow, Histogram

Seconds: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]
OnFailure: TypeAlias = Callable[[str, str, BaseException], None]

BOUNDS = tuple(float(f"{digits}e{exponent}") for exponent in range(-5, 2) for digits in (1, 2.5, 5))[:-1]
"""Upper ends of the ranges of all histograms, in seconds: 10 µs to 25 s."""

OTHER_ACTORS = "(other)"
"""The placeholder for actors above the maximum number, the ended ones first."""

_EDGES = np.array(BOUNDS)
# The number of messages with raw times, which are then counted by ranges in one call.
_AT_ONCE = 512
# The number of last messages for p50 and p99, which are None after `_LATELY` seconds without messages.
_MAX_SAMPLES = 1024
_LATELY = 60.0
_SETTLED = 5.0
_APART = 0.5
# A message and an actor that report the same cause within this number of seconds make one failure.
_ALIKE = 1.0
# The maximum number of tracebacks formatted per second: one takes about as long as ten messages.
_WRITTEN_OUT = 20
_MAX_TRACEBACK_CHARACTERS = 20_000
LONGEST_LINE = 1000
_MOST_CAUSES = 5
_KINDS: dict[type[Event], str] = {
    ActorRestarted: "restart",
    ActorTerminated: "end",
    SupervisorFailed: "supervisor",
}


@attrs.define(eq=False)
class MessageTally:
    """Counts and times of an actor's messages with one type.

    Attributes:
        path: The path of the actor.
        message_type: The name of the messages.
        times: Uncounted seconds in the queue and in the handler, alternating.
        max_times: The maximum length of `times`.
    """

    path: str
    message_type: str
    _on_failure: OnFailure
    _since: float
    max_times: int = 2 * _AT_ONCE
    times: list[float] = attrs.field(factory=list[float])
    failed_count: int = 0
    cancelled_count: int = 0
    dropped_count: int = 0
    _counted: int = 0
    # Times are counted by ranges, and in all: a row for the queue, and one for the handler.
    _ranges: Counts = attrs.field(factory=lambda: np.zeros((2, len(BOUNDS) + 1), np.int64), init=False)
    _totals: Seconds = attrs.field(factory=lambda: np.zeros(2), init=False)
    _recent: Seconds = attrs.field(factory=lambda: np.empty(0), init=False)
    _counted_at: float = 0.0
    _history: deque[tuple[float, float]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._history = deque([(self._since, 0)])

    def failed(self, error: BaseException) -> None:
        """See `Measured.failed`."""
        self.failed_count += 1
        self._on_failure(self.path, self.message_type, error)

    def cancelled(self) -> None:
        """See `Measured.cancelled`."""
        self.cancelled_count += 1

    def dropped(self) -> None:
        """See `Measured.dropped`."""
        self.dropped_count += 1

    @property
    def ended(self) -> int:
        """The number of begun and ended messages, whatever their outcome."""
        return self._counted + len(self.times) // 2

    @property
    def completed_count(self) -> int:
        """The number that got their reply, or were served."""
        return self.ended - self.failed_count - self.cancelled_count

    def count(self) -> None:
        """Count the raw times."""
        if not self.times:
            return
        times = np.fromiter(self.times, np.float64, len(self.times)).reshape(-1, 2)
        self.times.clear()
        self._counted += len(times)
        for row, seconds in enumerate(times.T):
            self._ranges[row] += np.bincount(np.searchsorted(_EDGES, seconds), minlength=len(BOUNDS) + 1)
        self._totals += times.sum(axis=0)
        self._recent = np.concatenate([self.recent(), times.sum(axis=1)])[-_MAX_SAMPLES:]
        # Use real seconds, because the program's clock does not determine how long something is remembered.
        self._counted_at = time.monotonic()

    def add(self, tally: MessageTally) -> None:
        """Add the counts of another tally as earlier ones, so that no rate rises."""
        self.count()
        tally.count()
        self._counted += tally._counted
        self._ranges += tally._ranges
        self._totals += tally._totals
        self.failed_count += tally.failed_count
        self.cancelled_count += tally.cancelled_count
        self.dropped_count += tally.dropped_count
        self._history = deque([(moment, count + tally._counted) for moment, count in self._history])
        self._recent = np.concatenate([self.recent(), tally.recent()])[-_MAX_SAMPLES:]
        self._counted_at = max(self._counted_at, tally._counted_at)

    def queue(self) -> Histogram:
        """Return the seconds in the queue, as of the last `count`."""
        return self._histogram(0)

    def run(self) -> Histogram:
        """Return the seconds from the handler's start to the end, as of the last `count`."""
        return self._histogram(1)

    def _histogram(self, row: int) -> Histogram:
        counts, total = tuple(self._ranges[row].tolist()), float(self._totals[row])
        return Histogram(bounds=BOUNDS, counts=counts, total=total)

    def recent(self) -> Seconds:
        """Return the seconds from sending to the end of the last messages."""
        return self._recent if time.monotonic() < self._counted_at + _LATELY else np.empty(0)

    def rate(self, now: float) -> float:
        """Return the number ended per second, over the last 5 seconds or since the previous call."""
        return rate_of(self._history, now, self.ended)


def rate_of(history: deque[tuple[float, float]], now: float, count: float) -> float:
    """Return the rise of a count per second, over the last 5 seconds or since the previous call.

    Args:
        history: Times of looks and the counts then; the first entry is the begin.
        now: The time.
        count: Its value now.
    """
    while len(history) > 1 and history[1][0] <= now - _SETTLED:
        history.popleft()
    since, first_count = history[0]
    if now >= history[-1][0] + _APART:
        history.append((now, count))
    return (count - first_count) / (now - since) if now > since else 0.0


class Tallies:
    """The tallies of a system: its meter.

    Args:
        limit: The maximum number of tallies. Above it, ended actors are counted together, and so are further
            ones if that many are alive.
        on_failure: Called with each message that failed.
        now: The time on Trio's clock.

    Attributes:
        by_key: The tallies, by path and message type.
        seen_at: The time when they were last read; the first rates of new ones are since then.
    """

    def __init__(self, limit: int, on_failure: OnFailure, now: float) -> None:
        self.by_key: dict[tuple[str, str], MessageTally] = {}
        self._limit = limit
        self._on_failure = on_failure
        self._types: dict[str, list[str]] = {}
        # Paths of ended actors, the first to end first; their number is limited like the tallies.
        self._ended: dict[str, None] = {}
        # Paths that existed at the last read.
        self._seen: frozenset[str] = frozenset()
        self.seen_at: float = now

    def measured(self, path: str, message_type: str) -> MessageTally:
        """See `Meter.measured`."""
        tally = self.by_key.get((path, message_type))
        if tally is not None:
            return tally
        if len(self.by_key) >= self._limit:
            # Ended actors are counted together: half of them at once, so that this is rare.
            for ended in list(islice(self._ended, (len(self._ended) + 1) // 2)):
                self._join(ended)
        is_known = path in self._types
        # A counter may vanish and start again, but it must not fall, so a reader has to see that it is gone.
        is_joined = not is_known and path in self._seen
        # Message names are class names, so there are only a few of them.
        is_other = is_joined or len(self.by_key) >= self._limit
        return self._of(OTHER_ACTORS if is_other else path, message_type)

    def saw(self, now: float) -> None:
        """Record that all of them were read."""
        self.seen_at = now
        self._seen = frozenset(self._types)

    def began(self, path: str) -> None:
        """Record that an actor with this path takes messages."""
        for part in self._with_parts(path):
            self._ended.pop(part, None)

    def ended(self, path: str) -> None:
        """Record that it has ended for good. Its counts stay as long as there is room."""
        # It may lack a tally now, but messages dropped from now on make one.
        self._ended.update(dict.fromkeys(self._with_parts(path)))
        while len(self._ended) > self._limit:
            self._join(next(iter(self._ended)))

    def _with_parts(self, path: str) -> list[str]:
        """Return an actor and the named parts of its work (`ActorContext.part`)."""
        return [path, *[part for part, types in self._types.items() if part == f"{path}/{types[0]}"]]

    def _of(self, path: str, message_type: str) -> MessageTally:
        tally = self.by_key.get((path, message_type))
        if tally is None:
            tally = MessageTally(path, message_type, self._on_failure, self.seen_at)
            self.by_key[path, message_type] = tally
            self._types.setdefault(path, []).append(message_type)
        return tally

    def _join(self, path: str) -> None:
        del self._ended[path]
        for message_type in self._types.pop(path, ()):
            self._of(OTHER_ACTORS, message_type).add(self.by_key.pop((path, message_type)))


class Failures:
    """Keeps failures as text, because an exception would keep alive everything that its frames refer to.

    Args:
        limit: The maximum number of retained failures.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The row of each path and line, with the texts of its error and causes, and the time when it was last
        # seen, by a clock that cannot be set. The last seen row is at the end.
        self._rows: OrderedDict[tuple[str, str], tuple[FailureRow, frozenset[str], float]] = OrderedDict()
        self._second = 0.0
        self._left = _WRITTEN_OUT

    @property
    def rows(self) -> tuple[FailureRow, ...]:
        """The last failures, oldest first."""
        return tuple([row for row, _, _ in self._rows.values()])

    def message(self, path: str, message_type: str, error: BaseException) -> None:
        """Record that a message failed."""
        self._add(path, "message", message_type, error)

    def observe(self, event: Event) -> None:
        """Record an actor's failure."""
        if isinstance(event, (ActorRestarted, ActorTerminated, SupervisorFailed)) and event.error is not None:
            self._add(event.path, _KINDS[type(event)], None, event.error)

    def _add(self, path: str, kind: str, message_type: str | None, error: BaseException) -> None:
        if not self._limit:
            return
        now, moment, line = time.time(), time.monotonic(), describe(error)[:LONGEST_LINE]
        is_message = kind == "message"
        earlier, texts, seen_at = self._rows.get((path, line), (None, frozenset[str](), 0.0))
        if earlier is None or moment - seen_at >= _ALIKE:
            texts = _failure_texts(error)
            related = self._of_others(path, kind, texts, moment)
            if related and (earlier is None or is_message):
                earlier = related.pop(0)
            if not is_message and earlier is not None:
                # The messages of the last moment belong to the failure of the actor.
                for related_row in related:
                    del self._rows[related_row.path, related_row.error]
                    earlier = attrs.evolve(earlier, message_type=related_row.message_type)
        if earlier is None:
            row = FailureRow(
                time=now,
                first=now,
                path=path,
                kind=kind,
                message_type=message_type,
                error=line,
                traceback=self._written_out(error, line, moment),
            )
        else:
            # A crash over a message is a failure of both; the later event has more information, and is
            # counted.
            is_earlier_message = earlier.kind == "message"
            row = attrs.evolve(
                earlier,
                time=now,
                path=earlier.path if is_message else path,
                kind=earlier.kind if is_message else kind,
                error=earlier.error if is_message else line,
                message_type=message_type or earlier.message_type,
                count=1
                if is_earlier_message and not is_message
                else earlier.count + (is_earlier_message or not is_message),
            )
            del self._rows[earlier.path, earlier.error]
        self._rows[row.path, row.error] = row, texts, moment
        self._rows.move_to_end((row.path, row.error))
        if len(self._rows) > self._limit:
            self._rows.popitem(last=False)

    def _of_others(self, path: str, kind: str, texts: frozenset[str], now: float) -> list[FailureRow]:
        """Return rows of the same failure seen just now, for a message or for a restarting actor.

        That actor has served the message, or is its ancestor: an operation ends its context, which is above
        its library.
        """
        rows: list[FailureRow] = []
        for row, of_row, seen_at in reversed(self._rows.values()):
            if now - seen_at >= _ALIKE:
                break
            if of_row & texts and (kind == "message") is not (row.kind == "message"):
                below, above = (path, row.path) if kind == "message" else (row.path, path)
                if f"{below}/".startswith(f"{above}/"):
                    rows.append(row)
        return rows

    def _written_out(self, error: BaseException, line: str, now: float) -> str:
        if not self._second <= now < self._second + 1.0:
            self._second, self._left = now, _WRITTEN_OUT
        if not self._left:
            return line
        self._left -= 1
        text = "".join(format_exception(error))
        if len(text) <= _MAX_TRACEBACK_CHARACTERS:
            return text
        half = _MAX_TRACEBACK_CHARACTERS // 2
        return f"{text[:half]}\n[...]\n{text[-half:]}"


def _failure_texts(error: BaseException) -> frozenset[str]:
    """Return the texts of a failure and its cause, without the operation that device errors add."""
    texts: set[str] = set()
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            break
        text = cause.message if isinstance(cause, AccelError) else describe(cause)
        texts.add(f"{type(cause).__name__}: {text}"[:LONGEST_LINE])
        cause = cause.__cause__
    return frozenset(texts)
