"""History of the dashboard's charts, in bounded memory."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable

import attrs

from ._snapshot import OperationRow, SystemSnapshot

# Seconds between two points, points of the last two minutes, and of the whole time.
INTERVAL, _RECENT_POINTS, _POINTS_OF_ALL_TIME = 1.0, 120, 240
# A point keeps the latency of the busiest messages.
_OPERATIONS = 20


@attrs.frozen
class _Figures:
    """The figures of one moment.

    Attributes:
        time: Seconds since the epoch.
        uptime: Seconds since the system was opened, unaffected by changes of the clock.
        ended: The number of ended messages, whatever their outcome.
        latency: p50 and p99 in seconds, by message name.
    """

    time: float
    uptime: float
    ended: int
    latency: dict[str, tuple[float | None, float | None]]


class Past:
    """Points of the last two minutes, and of the whole time.

    Whenever there are too many points of the whole time, half of them are dropped, and further points are
    twice as far apart. The points have counts instead of rates, so that dropping one loses no messages.
    """

    def __init__(self) -> None:
        self._recent: deque[_Figures] = deque(maxlen=_RECENT_POINTS)
        self._whole: list[_Figures] = []
        self._step = INTERVAL

    def add(self, snapshot: SystemSnapshot) -> None:
        """Take a snapshot's figures, unless the last point is too near."""
        # Snapshots of a timer may be slightly early or late.
        if self._recent and snapshot.uptime < self._recent[-1].uptime + 0.9 * INTERVAL:
            return
        rows = snapshot.operations
        busiest = busiest_first(rows)[:_OPERATIONS]
        point = _Figures(
            snapshot.time,
            snapshot.uptime,
            sum(row.completed + row.failed + row.cancelled for row in rows),
            {f"{row.path} {row.message_type}": (row.p50, row.p99) for row in busiest},
        )
        self._recent.append(point)
        if not self._whole or point.uptime >= self._whole[-1].uptime + 0.9 * self._step:
            self._whole.append(point)
        if len(self._whole) >= _POINTS_OF_ALL_TIME:
            del self._whole[1::2]
            self._step *= 2

    def to_json(self) -> str:
        """Return the lines of the charts as JSON text: ``recent`` and ``whole``."""
        return json.dumps({"recent": _lines(self._recent), "whole": _lines(self._whole)})


def busiest_first(rows: Iterable[OperationRow]) -> list[OperationRow]:
    """Sort messages by their rates."""
    return sorted(rows, key=lambda row: (-row.rate, -row.completed))


def _lines(points: Iterable[_Figures]) -> dict[str, object]:
    rate: list[tuple[float, float]] = []
    latency: dict[str, dict[str, list[tuple[float, float]]]] = {}
    previous: _Figures | None = None
    for point in points:
        if previous is not None:
            rate.append((1e3 * point.time, (point.ended - previous.ended) / (point.uptime - previous.uptime)))
        previous = point
        for name, values in point.latency.items():
            lines = latency.setdefault(name, {"p50": [], "p99": []})
            for line, value in zip(lines.values(), values, strict=True):
                if value is not None:
                    line.append((1e3 * point.time, value))
    return {"rate": rate, "latency": latency}
