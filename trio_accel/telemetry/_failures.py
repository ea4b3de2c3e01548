"""The last failures of a system."""

from __future__ import annotations

import time
from collections import OrderedDict
from traceback import format_exception

import attrs

from ..actors import ActorRestarted, ActorTerminated, Event, SupervisorFailed, describe
from ._snapshot import FailureRow

__all__ = ["LONGEST_LINE", "Failures"]

# The same failure of an actor again within so many seconds is counted, and not kept apart.
_ALIKE = 1.0
# So many tracebacks a second are written out: one takes about as long as ten messages.
_WRITTEN_OUT = 20
_LONGEST = 20_000
LONGEST_LINE = 1000


class Failures:
    """Keeps what failed as text, as an exception would keep alive all that its frames refer to.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By path and line, the one that was seen last at the end.
        self._rows: OrderedDict[tuple[str, str], FailureRow] = OrderedDict()
        self._second = 0.0
        self._left = _WRITTEN_OUT

    @property
    def rows(self) -> tuple[FailureRow, ...]:
        """The last ones, the oldest first."""
        return tuple(self._rows.values())

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
        key = path, line
        known = self._rows.get(key)
        if known is not None and now - known.time < _ALIKE:
            # A crash over a message is a failure of both; what came of it says more.
            is_again = kind in {"message", known.kind}
            known = attrs.evolve(
                known,
                time=now,
                kind=known.kind if kind == "message" else kind,
                message_type=message_type or known.message_type,
                count=known.count + is_again,
            )
        else:
            known = FailureRow(
                time=now,
                path=path,
                kind=kind,
                message_type=message_type,
                error=line,
                traceback=self._written_out(error, line, now),
            )
        self._rows[key] = known
        self._rows.move_to_end(key)
        if len(self._rows) > self._most:
            self._rows.popitem(last=False)

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
