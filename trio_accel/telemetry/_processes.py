"""Memory and processor time of the program and its workers."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

import attrs

from ..actors import ActorSnapshot
from ..devices import ProcessStatistics
from ._snapshot import ProcessRow
from ._tally import rate_of


class ProcessRows:
    """The processes of a system, with their processor time at the last looks."""

    def __init__(self) -> None:
        self._histories: dict[int, deque[tuple[float, float]]] = {}

    def rows(self, actors: Sequence[ActorSnapshot]) -> tuple[ProcessRow, ...]:
        """Look at all processes that there are now.

        Args:
            actors: All actors, parents before their children; the first is the system.
        """
        paths = {os.getpid(): actors[0].path}
        for actor in actors:
            if actor.pid is not None:
                paths.setdefault(actor.pid, actor.path)
        # Real seconds, because the clock of processors is real.
        now, histories, rows = time.monotonic(), self._histories, list[ProcessRow]()
        self._histories = {}
        for pid, path in paths.items():
            if (statistics := ProcessStatistics.of(pid)) is not None:
                used = statistics.processor_seconds
                self._histories[pid] = history = histories.get(pid) or deque([(now, used)])
                rows.append(
                    ProcessRow(path=path, load=rate_of(history, now, used), **attrs.asdict(statistics))
                )
        return tuple(rows)
