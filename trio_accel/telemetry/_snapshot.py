"""The state of a running program at one moment, as plain data."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import Protocol, cast

import attrs

from ..actors import ActorFigures, LoopHolds, Reading
from ..backends.base import MemoryStatistics
from ..devices import KeptStatistics, LibraryStatistics, ProcessStatistics

__all__ = [
    "ActorMemoryRow",
    "ActorRow",
    "DeviceRow",
    "FailureRow",
    "Histogram",
    "KeptRow",
    "LibraryRow",
    "OperationRow",
    "ProcessRow",
    "SystemSnapshot",
]


@attrs.frozen(kw_only=True)
class Histogram:
    """Durations in seconds, counted by ranges.

    Attributes:
        bounds: The upper ends of the ranges, in rising order; a value equal to a bound counts as below it.
        counts: The number of values in each range; the last range is above the last bound.
        total: The sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def cumulated(self) -> tuple[int, ...]:
        """Return the numbers of values up to each bound; the last is the number of all."""
        return tuple(accumulate(self.counts))


@attrs.frozen(kw_only=True)
class ActorRow(ActorFigures):
    """One actor. Actors are in tree order, parents before their children.

    Attributes:
        path: The path in the tree.
        actor_class: The name of the class.
        state: See `ActorSnapshot.state`.
        restarts: The number of restarts; also the number of the incarnation.
        pid: The process in which it works; None for the program's.
        mailbox_depth: Messages in the mailbox.
        mailbox_peak: The maximum number that were in it at once.
        mailbox_waiting: Senders that wait for room.
        stashed: Messages that it has set aside.
        running: Messages being served.
        deferred: Requests with a deferred reply; of a library, operations in flight.
        handled: Messages that were handled successfully.
        failed: Messages with a failed handler.
        expired: Requests dropped because their deadline had passed.
        dropped: Messages that the mailbox dropped or refused.
        last_error: The error of the last failed incarnation; at most 1000 characters.
        rate: Ended messages per second recently, whatever their outcome.
        p50: Seconds from sending to the end within which half of the last messages ended; None without any.
        p99: The same for 99 percent.
        array_bytes: Bytes of device arrays that its tasks have made and that still exist.
    """

    restarts: int = 0
    rate: float = 0.0
    p50: float | None = None
    p99: float | None = None
    array_bytes: int = 0


@attrs.frozen(kw_only=True)
class OperationRow:
    """Messages of one type to one actor, since recording began.

    Attributes:
        path: The path of the actor.
        message_type: The name of the message's class, or of the operation that it carries.
        completed: The number that got their reply, or were served.
        failed: The number that failed.
        cancelled: The number that were begun and cancelled by their caller.
        dropped: The number that became dead letters.
        queue: Seconds from sending to the handler's start.
        run: Seconds from there to the end.
        rate: The number that ended per second recently.
        p50: Seconds from sending to the end within which half of the last messages ended; None without any.
        p99: The same for 99 percent.
    """

    path: str
    message_type: str
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    dropped: int = 0
    queue: Histogram
    run: Histogram
    rate: float = 0.0
    p50: float | None = None
    p99: float | None = None


@attrs.frozen(kw_only=True)
class LibraryRow(LibraryStatistics):
    """A library of a device: its requests, its plans in this generation, and its workspace.

    Attributes:
        library: Its title: the import path, or the name that its argument begins with.
        waiting: Handed over and not launched.
        in_flight: Launched and not complete.
        plans: Plans of its operations.
        workspace: Bytes that it holds for itself.
    """

    library: str
    waiting: int = 0
    in_flight: int = 0


@attrs.frozen(kw_only=True)
class KeptRow(KeptStatistics):
    """A device's table of cached plans.

    Attributes:
        side: The process that has it, see `DeviceStatistics.plan_caches`.
    """

    side: str


@attrs.frozen(kw_only=True)
class ActorMemoryRow:
    """Device arrays made by one actor.

    Attributes:
        path: The path of the actor, which may have ended since. ``""`` for tasks outside of actors, and
            ``"(other)"`` for all actors except the hundred with the most bytes.
        used: The bytes of the arrays.
    """

    path: str
    used: int


@attrs.frozen(kw_only=True)
class DeviceRow:
    """One open device.

    The device's own counts are requested in the background; `age` is their age.

    Attributes:
        path: The path of its actor.
        name: The name of the hardware, such as ``"cpu:0"``.
        backend: The name of the backend.
        isolation: ``"inline"`` or ``"process"``.
        state: The state of its context's actor: ``"running"``, ``"restarting"`` and so on; ``"given up"``
            while it waits to be opened again.
        generation: The number of this context, from 1.
        losses: The number of contexts lost since it was opened.
        recovery_time: Seconds from the last seen loss to the next context; None without one.
        recovery_cost: Seconds that the next recovery takes without a spare; see `RecoveryCost`. Before the
            first recovery, the seconds of the first start, as `recovery_text` explains.
        recovery_text: The parts of that time, and why modules are imported again, in one line.
        pending: Requests that wait while the context is being rebuilt.
        pid: The process of the worker, if it has one.
        served: Seconds since this generation began, from which on the rest counts; None if that was not seen.
        age: Seconds since the rest was true; None if it was never known.
        launched: Operations enqueued in this generation.
        completed: Operations that completed, with or without an error.
        in_flight: Operations that the backend has.
        memory: The memory of its arrays.
        libraries: Libraries that have requests, have planned something, or hold workspace.
        plan_caches: The tables of cached plans that were used.
        actors: The memory of arrays by actor, the largest first; the sum is all used memory.
    """

    path: str
    name: str
    backend: str
    isolation: str
    state: str
    generation: int
    losses: int = 0
    recovery_time: float | None = None
    recovery_cost: float | None = None
    recovery_text: str | None = None
    pending: int = 0
    pid: int | None = None
    served: float | None = None
    age: float | None = None
    launched: int = 0
    completed: int = 0
    in_flight: int = 0
    memory: MemoryStatistics | None = None
    libraries: tuple[LibraryRow, ...] = ()
    plan_caches: tuple[KeptRow, ...] = ()
    actors: tuple[ActorMemoryRow, ...] = ()


@attrs.frozen(kw_only=True)
class ProcessRow(ProcessStatistics):
    """The program's process, or the process in which an actor works.

    Attributes:
        pid: Its number.
        memory: Bytes of its resident memory, with the shared memory that it has touched.
        processor_seconds: Seconds for which its threads have run.
        path: Path of the actor; the name of the system if it is the program's.
        load: Seconds for which its threads ran per second lately: 1.0 keeps one processor busy.
    """

    path: str
    load: float = 0.0


@attrs.frozen(kw_only=True)
class FailureRow:
    """A failure of an actor by a cause, seen once or several times.

    Attributes:
        time: The time of the last occurrence, in seconds since the epoch.
        first: The time of the first occurrence; None from a program that does not report it.
        path: The path of the actor.
        kind: ``"message"``, ``"restart"`` (an incarnation ended), ``"end"`` (the actor ended for good) or
            ``"supervisor"`` (it gave up).
        message_type: The type of the message being served, if any.
        error: The error in one line.
        traceback: The first error with its traceback, truncated if it is very long. If many occurred at once,
            some have only the line.
        count: The number of occurrences. A failed message and the restart that it causes count once.
    """

    time: float
    path: str
    kind: str
    message_type: str | None = None
    error: str
    traceback: str
    count: int = 1
    first: float | None = None


@attrs.frozen(kw_only=True)
class SystemSnapshot:
    """A system at one moment. Plain data: `to_json` writes it.

    Attributes:
        time: The time, in seconds since the epoch.
        system: The name of the system.
        pid: The program's process.
        uptime: Seconds since the system was opened.
        recorded: Seconds since recording began, which is the beginning of the operations and failures.
        rate: Ended messages per second recently, of all actors, including ended ones.
        dead_letters: The total number of messages that were dropped or refused.
        quarantined: The total number of actors that were cancelled and did not end.
        actors: All actors, parents before children; the first is the system itself.
        operations: Messages by actor and type.
        devices: The open devices.
        failures: The last failures, oldest first.
        readings: The program's own figures, and then the figures that actors show.
        processes: The program and its workers, as far as the machine reports them.
        loop: The times in which a task held the Trio loop, since the first system of the run was opened.
    """

    time: float
    system: str
    pid: int
    uptime: float
    recorded: float
    rate: float = 0.0
    dead_letters: int = 0
    quarantined: int = 0
    actors: tuple[ActorRow, ...] = ()
    operations: tuple[OperationRow, ...] = ()
    devices: tuple[DeviceRow, ...] = ()
    failures: tuple[FailureRow, ...] = ()
    readings: tuple[Reading, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    loop: LoopHolds = attrs.field(factory=LoopHolds)

    def to_json(self) -> str:
        """Return the snapshot as a line of JSON text; NaN and infinities become ``null``."""
        return json.dumps(self, default=_members, ensure_ascii=True, separators=(",", ":"))


def _members(row: attrs.AttrsInstance) -> dict[str, object]:
    """Convert a row to JSON types."""
    return {field.name: _without_nan(getattr(row, field.name)) for field in attrs.fields(type(row))}


def _without_nan(value: object) -> object:
    """Replace numbers that JSON lacks, because a reading of a program may have any value."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_without_nan(member) for member in cast("tuple[object, ...]", value)]
    return value


class TakesSnapshots(Protocol):
    """A recorder, as seen by the metrics module, which the recorder's module imports."""

    def snapshot(self) -> SystemSnapshot:
        """Take a snapshot."""
        ...
