"""The last failures of a system."""

from __future__ import annotations

import time
from collections import OrderedDict
from traceback import format_exception

import attrs

from ..actors import ActorRestarted, ActorTerminated, Event, SupervisorFailed, describe
from ..backends.base import AccelError
from ._snapshot import FailureRow

__all__ = ["LONGEST_LINE", "Failures"]

# The same failure of an actor again within so many seconds is counted, and not kept apart.
_ALIKE = 1.0
# So many tracebacks a second are written out: one takes about as long as ten messages.
_WRITTEN_OUT = 20
_LONGEST = 20_000
LONGEST_LINE = 1000
_MOST_CAUSES = 5


class Failures:
    """Keeps what failed as text, as an exception would keep alive all that its frames refer to.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By path and line, each with the texts of its error and causes; the last one seen is at the end.
        self._rows: OrderedDict[tuple[str, str], tuple[FailureRow, frozenset[str]]] = OrderedDict()
        self._second = 0.0
        self._left = _WRITTEN_OUT

    @property
    def rows(self) -> tuple[FailureRow, ...]:
        """The last ones, the oldest first."""
        return tuple([row for row, _ in self._rows.values()])

    def message(self, path: str, message_type: str, error: BaseException) -> None:
        """A message failed."""
        self._add(path, "message", message_type, error)

    def observe(self, event: Event) -> None:
        """Take note of an actor's failure."""
        match event:
            case ActorRestarted(path=path, error=error) if error is not None:
                self._add(path, "restart", None, error)
            case ActorTerminated(path=path, error=error) if error is not None:
                self._add(path, "end", None, error)
            case SupervisorFailed(path=path, error=error):
                self._add(path, "supervisor", None, error)
            case _:
                pass

    def _add(self, path: str, kind: str, message_type: str | None, error: BaseException) -> None:
        if not self._most:
            return
        now, line = time.time(), describe(error)[:LONGEST_LINE]
        known, what = self._rows.get((path, line), (None, frozenset[str]()))
        if known is None or now - known.time >= _ALIKE:
            what = _what(error)
            known = self._of_another(path, kind, what, now)
        if known is None:
            row = FailureRow(
                time=now,
                path=path,
                kind=kind,
                message_type=message_type,
                error=line,
                traceback=self._written_out(error, line, now),
            )
        else:
            # A crash over a message is a failure of both; what came of it says more.
            is_message = kind == "message"
            row = attrs.evolve(
                known,
                time=now,
                path=known.path if is_message else path,
                kind=known.kind if is_message else kind,
                error=known.error if is_message else line,
                message_type=message_type or known.message_type,
                count=known.count + (kind == known.kind or (is_message and known.message_type is not None)),
            )
            del self._rows[known.path, known.error]
        self._rows[row.path, row.error] = row, what
        self._rows.move_to_end((row.path, row.error))
        if len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def _of_another(self, path: str, kind: str, what: frozenset[str], now: float) -> FailureRow | None:
        """The same failure, if it was seen just now as a message's, or as that of an actor that restarts.

        That actor has served the message, or is above the one that has: an operation takes its context along,
        which is above its library.
        """
        for row, of_row in reversed(self._rows.values()):
            if now - row.time >= _ALIKE:
                break
            if of_row & what and (kind == "message") is not (row.kind == "message"):
                below, above = (path, row.path) if kind == "message" else (row.path, path)
                if f"{below}/".startswith(f"{above}/"):
                    return row
        return None

    def _written_out(self, error: BaseException, line: str, now: float) -> str:
        if not self._second <= now < self._second + 1.0:
            self._second, self._left = now, _WRITTEN_OUT
        if not self._left:
            return line
        self._left -= 1
        text = "".join(format_exception(error))
        if len(text) <= _LONGEST:
            return text
        half = _LONGEST // 2
        return f"{text[:half]}\n[...]\n{text[-half:]}"


def _what(error: BaseException) -> frozenset[str]:
    """What has failed and by what cause, without the operation that errors of devices add to their texts."""
    found: set[str] = set()
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            break
        text = cause.message if isinstance(cause, AccelError) else describe(cause)
        found.add(f"{type(cause).__name__}: {text}"[:LONGEST_LINE])
        cause = cause.__cause__
    return frozenset(found)
