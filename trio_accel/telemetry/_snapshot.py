"""State of a running program at one moment, as plain data."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Protocol

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
    """Seconds that something took, counted by ranges.

    Attributes:
        bounds: Upper ends of the ranges, in rising order; a value that equals one counts as below it.
        counts: How many values are in each range; one more than there are bounds, for those above the last.
        total: Sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def cumulated(self) -> tuple[int, ...]:
        """Tell how many values are at most each bound; the last is the number of all."""
        return tuple(accumulate(self.counts))


@attrs.frozen(kw_only=True)
class ActorRow(ActorFigures):
    """One actor. Actors stand in the order of the tree, parents before their children.

    Attributes:
        path: Path in the tree.
        actor_class: Name of the class.
        state: See `ActorSnapshot.state`.
        restarts: How often it was restarted; also the number of the incarnation.
        pid: The process in which it does its work; None where that is the program's.
        mailbox_depth: Messages in the mailbox.
        mailbox_peak: The most that were in it at once.
        mailbox_waiting: Senders that wait for room.
        stashed: Messages that it has set aside.
        running: Messages being served.
        deferred: Requests whose reply is given later; of a library, operations in flight.
        handled: Messages whose handler returned.
        failed: Messages whose handler raised.
        expired: Requests dropped because their deadline had passed.
        dropped: Messages that the mailbox dropped or refused.
        last_error: Error of the last incarnation that failed; at most 1000 characters.
        rate: Messages per second that ended lately, however they did.
        p50: Seconds from sending to the end that half of the last messages took at most; None without any.
        p99: The same of 99 in 100.
        array_bytes: Bytes of arrays on devices that its tasks have made, and that are there.
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
        path: Path of the actor.
        message_type: Name of the message's class, or of the operation it carries.
        completed: How many got their reply, or were served.
        failed: How many failed.
        cancelled: How many were begun and cancelled by their asker.
        dropped: How many became dead letters.
        queue: Seconds from sending to the handler's start.
        run: Seconds from there to the end.
        rate: How many ended per second lately.
        p50: Seconds from sending to the end that half of the last messages took at most; None without any.
        p99: The same of 99 in 100.
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
    """One library of a device: its requests, its plans in this generation, and its workspace.

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
    """One table of kept plans of a device.

    Attributes:
        side: Where it is, see `DeviceStatistics.kept`.
    """

    side: str


@attrs.frozen(kw_only=True)
class ActorMemoryRow:
    """Arrays of a device that one actor has made.

    Attributes:
        path: Path of the actor, which may have ended since. ``""`` for tasks that are no actor's, and
            ``"(other)"`` for the actors beyond the hundred that have made most.
        used: Bytes of the arrays.
    """

    path: str
    used: int


@attrs.frozen(kw_only=True)
class DeviceRow:
    """One open device.

    The device's own counts are asked for in the background, and are as old as `age` says.

    Attributes:
        path: Path of its actor.
        name: Name of the hardware, such as ``"cpu:0"``.
        backend: Name of the backend.
        isolation: ``"inline"`` or ``"process"``.
        state: State of its actor's context: ``"running"``, ``"restarting"`` and so on; ``"given up"`` while
            it is, and will be opened again.
        generation: Which context this is, from 1.
        losses: Contexts that it has lost since it was opened.
        recovery_time: Seconds from the last loss that was seen to the next context; None without one.
        recovery_cost: Seconds that the next recovery takes without a spare; see `RecoveryCost`. Before the
            first recovery, those of the first start, which `recovery_text` says.
        recovery_text: The parts of that time, and why modules are imported again, in one line.
        pending: Requests that wait while the context is being rebuilt.
        pid: Process of the worker, if it has one.
        served: Seconds since this generation began, from which on the rest counts; None if that was not seen.
        age: Seconds since the rest was true; None if it was never known.
        launched: Operations enqueued in this generation.
        completed: Operations that completed, with or without an error.
        in_flight: Operations that the backend has.
        memory: Memory of its arrays.
        libraries: Libraries that have requests, have planned something, or hold workspace.
        kept: Tables of kept plans that were used.
        actors: Memory of arrays by the actors that made them, the largest first: together, all that is used.
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
    kept: tuple[KeptRow, ...] = ()
    actors: tuple[ActorMemoryRow, ...] = ()


@attrs.frozen(kw_only=True)
class ProcessRow(ProcessStatistics):
    """The program's process, or the process in which an actor does its work.

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
    """A failure, of an actor by a cause, that came once or again and again.

    Attributes:
        time: When it did last, in seconds since the epoch.
        first: When it did first; None from a program that does not tell.
        path: Path of the actor.
        kind: ``"message"``, ``"restart"`` (an incarnation ended), ``"end"`` (the actor ended for good) or
            ``"supervisor"`` (it gave up).
        message_type: Type of the message that was served, if any.
        error: The error in one line.
        traceback: The first error with its traceback, cut off if it is very long. Where many came at once, of
            some only the line.
        count: How often it did. A message that fails and the restart that this causes count once.
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
        time: When, in seconds since the epoch.
        system: Name of the system.
        pid: The program's process.
        uptime: Seconds since the system was opened.
        recorded: Seconds since recording began; what operations and failures show began then.
        rate: Messages per second that ended lately, of all actors, those that have ended too.
        dead_letters: Messages that were dropped or refused, in all.
        quarantined: Actors that were cancelled and did not end, in all.
        actors: All actors, parents before children; the first is the system itself.
        operations: Messages by actor and type.
        devices: The open devices.
        failures: The last failures, the oldest first.
        readings: Figures of the program's own, and then those that actors show of themselves.
        processes: The program and its workers, as far as the machine tells of them.
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
        """Return the snapshot as one line of JSON text."""
        return json.dumps(self, default=_members, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _members(one: attrs.AttrsInstance) -> dict[str, object]:
    """Convert a row to JSON's types."""
    return {field.name: getattr(one, field.name) for field in attrs.fields(type(one))}


class TakesSnapshots(Protocol):
    """A recorder, as the module of metrics knows it, which the recorder's own module imports."""

    def snapshot(self) -> SystemSnapshot:
        """Take a snapshot."""
        ...
