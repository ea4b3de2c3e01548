"""A timeline of a system as trace events, which Perfetto and Chrome show."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import trio

from ..actors import (
    ActorRestarted,
    ActorTerminated,
    Event,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    actor_path_of,
    around_each_system,
    describe,
)
from ..actors import System as ActorSystem
from ..devices import Ask, Launch, OpenDevice, Operation
from ._watch import Seen, Watch

__all__ = ["Timeline", "timeline"]

_logger = logging.getLogger("trio_accel.telemetry")
# Seconds after which what was written is given to the file system: a program may be killed.
_FLUSHED = 1.0

# Process, name and track.
_Row: TypeAlias = tuple[int, str, int]
# Since when, on which track, and the name of the message.
_Served: TypeAlias = tuple[int, int, str]
_Asked: TypeAlias = tuple[int, _Row]


@contextmanager
def timeline(system: ActorSystem | None, path: str | os.PathLike[str]) -> Generator[Timeline, None, None]:
    """Write what happens in a system to a file of trace events (JSON), inside the ``with``.

    Open it at https://ui.perfetto.dev or in ``chrome://tracing``. Each actor has a row with its messages,
    from the begin of the handler to the reply; those that overlap are in further rows of its. Each library of
    a device has a row, in the process that launches: an operation lasts there from its launch, or from the
    end of the one before it, to its completion. Tasks that are no actors' have rows with what they ask of
    devices. An arrow leads from an ask to its operation.

    Events are written as they come, so memory stays bounded. Where the file cannot be written any more, that
    is logged once, and the program goes on. An existing file is replaced.

    Args:
        system: The system; None for every one that is opened in this process meanwhile.
        path: The file.

    Raises:
        OSError: The file cannot be opened.
    """
    written = Timeline(Path(path).open("w", encoding="utf-8", buffering=1 << 16))  # noqa: SIM115  # `end` closes
    inside = around_each_system(written.watch) if system is None else written.watch(system)
    try:
        with inside:
            yield written
    finally:
        written.end()


class Timeline(Watch[_Served, _Asked]):
    """A timeline that is being written. Made by `timeline`.

    Attributes:
        events: How many were written.
    """

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.events: int = 0
        self._file: TextIO | None = file
        self._begin = self._now()
        self._flushed = time.monotonic()
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        # Rows by process, name and track; tracks in use by name.
        self._rows: dict[_Row, int] = {}
        self._tracks: dict[str, set[int]] = {}
        self._processes: set[int] = set()
        # The tracks of messages that are served.
        self._serving: dict[str, list[int]] = {}
        # When the last operation of a row was complete.
        self._over: dict[tuple[int, str], int] = {}
        # The tracks of tasks that ask now.
        self._asking: dict[trio.lowlevel.Task, _Row] = {}
        self._write_text("[\n")

    def end(self) -> None:
        """Write what is open still, and the end."""
        now = self._now()
        for (path, _), (begun, track, name) in self._served.items():
            self._slice((self._pid, path, track), name, "message", begun, now, {"outcome": "unfinished"})
        self._served.clear()
        self._write_text("\n]\n")
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(file, error)

    # Messages.

    def _observe(self, event: Event) -> None:
        """See `Watch`."""
        if isinstance(event, ActorRestarted):
            why = None if event.error is None else describe(event.error)
            self._instant(event.path, "restart", {"error": why})
        elif isinstance(event, ActorTerminated):
            self._instant(event.path, "end", {"reason": event.reason})
            # Its row is not used again.
            self._tracks.pop(event.path, None)
            for row in [row for row in self._rows if row[1] == event.path]:
                del self._rows[row]

    def _began(self, event: MessageStarted, context: Context) -> _Served:
        """See `Watch`."""
        track = self._take_track(event.path)
        self._serving.setdefault(event.path, []).append(track)
        return self._now(), track, event.message_type

    def _finished(self, event: MessageEvent, served: _Served | None) -> None:
        """See `Watch`."""
        if served is None:
            if isinstance(event, (MessageDropped, MessageWithdrawn)):
                what = "dropped" if isinstance(event, MessageDropped) else "withdrawn"
                self._instant(event.path, f"{what} {event.message_type}", {})
            return
        begun, track, name = served
        about: dict[str, object] = {"outcome": _outcome_of(event)}
        if isinstance(event, (MessageCompleted, MessageFailed, MessageCancelled)):
            about["queued_us"] = round(event.queue_time * 1e6, 3)
        self._slice((self._pid, event.path, track), name, "message", begun, self._now(), about)
        self._tracks.get(event.path, set[int]()).discard(track)
        self._serving[event.path].remove(track)
        if not self._serving[event.path]:
            del self._serving[event.path]

    # Operations.

    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """See `Watch`."""
        task = trio.lowlevel.current_task()
        path = actor_path_of(task)
        if path is not None and path in self._serving:
            # The message that it serves is what is shown.
            return await ask(operation)
        begun, track = self._now(), self._take_track(task.name)
        row = self._asking[task] = self._pid, task.name, track
        outcome = "completed"
        try:
            return await ask(operation)
        except trio.Cancelled:
            outcome = "cancelled"
            raise
        except BaseException as error:
            outcome = f"failed: {describe(error)}"
            raise
        finally:
            name: str = getattr(operation, "operation", type(operation).__name__)
            self._slice(row, f"ask {name}", "ask", begun, self._now(), {"outcome": outcome})
            self._tracks[task.name].discard(track)
            del self._asking[task]

    def _validated(self, launch: Launch) -> _Asked:
        """See `Watch`: the moment, and the row from which the operation is asked."""
        now = self._now()
        task = trio.lowlevel.current_task()
        path = actor_path_of(task)
        if path is not None and path in self._serving:
            return now, (self._pid, path, self._serving[path][-1])
        row = self._asking.get(task)
        if row is None:
            # It waits for nothing.
            row = self._pid, f"{task.name} submits", 0
            self._slice(row, f"submit {launch.name}", "ask", now, now, {})
        return now, row

    def _ended(self, device: OpenDevice, launch: Launch, seen: Seen[_Asked]) -> None:
        """See `Watch`."""
        process, begun, completed = seen.process, seen.begun, seen.completed
        if process not in self._processes and process != self._pid:
            self._name_process(process, f"worker of {device.path}")
        name = f"{device.path} {launch.library.partition('?')[0]}"
        start = min(max(begun, self._over.get((process, name), 0)), completed)
        self._over[process, name] = completed
        about = {"launched_us": self._us(begun), "behind_others_us": (start - begun) / 1000}
        row, number = (process, name, 0), next(self._ids)
        self._slice(row, launch.name, "operation", start, completed, about)
        flow = {"name": "ask", "cat": "flow", "id": number}
        asked, asker = seen.where
        self._event(asker, {"ph": "s", "ts": self._us(asked), **flow})
        self._event(row, {"ph": "f", "bp": "e", "ts": self._us(start), **flow})

    # The file.

    def _take_track(self, name: str) -> int:
        """Return the first track of a row that is free."""
        tracks = self._tracks.setdefault(name, set())
        track = next(track for track in itertools.count() if track not in tracks)
        tracks.add(track)
        return track

    def _us(self, moment: int) -> float:
        """Microseconds since the begin."""
        return max(moment - self._begin, 0) / 1000

    def _slice(self, row: _Row, name: str, kind: str, begun: int, ended: int, about: object) -> None:
        start = self._us(begun)
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": self._us(ended) - start}
        self._event(row, {**event, "args": about})

    def _instant(self, path: str, name: str, about: object) -> None:
        event = {"ph": "i", "s": "t", "name": name, "cat": "actor", "ts": self._us(self._now())}
        self._event((self._pid, path, 0), {**event, "args": about})

    def _event(self, row: _Row, event: dict[str, object]) -> None:
        process, name, track = row
        number = self._rows.get(row)
        if number is None:
            if process not in self._processes:
                self._name_process(process, "program")
            number = self._rows[row] = next(self._ids)
            shown = f"{name} ({track + 1})" if track else name
            self._write(process, number, {"ph": "M", "name": "thread_name", "args": {"name": shown}})
        self._write(process, number, event)

    def _name_process(self, process: int, name: str) -> None:
        self._processes.add(process)
        self._write(process, 0, {"ph": "M", "name": "process_name", "args": {"name": name}})

    def _write(self, process: int, row: int, event: dict[str, object]) -> None:
        text = json.dumps({"pid": process, "tid": row, **event}, separators=(",", ":"))
        self._write_text(f",\n{text}" if self.events else text)
        self.events += 1

    def _write_text(self, text: str) -> None:
        file = self._file
        if file is None:
            return
        try:
            file.write(text)
            now = time.monotonic()
            if now - self._flushed > _FLUSHED:
                self._flushed = now
                file.flush()
        except OSError as error:
            self._give_up(file, error)

    def _give_up(self, file: TextIO, error: OSError) -> None:
        _logger.error("the timeline ends here, as its file cannot be written: %s", error)
        self._file = None
        with suppress(OSError):
            file.close()


def _outcome_of(event: MessageEvent) -> str:
    if isinstance(event, MessageFailed):
        return f"failed: {describe(event.error)}"
    if isinstance(event, MessageDropped):
        return f"dropped: {event.reason}"
    return "completed" if isinstance(event, MessageCompleted) else "cancelled"
