"""Recording of systems and their devices, and the program's own metrics (D125)."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import trio

from ..actors import (
    ActorRestarted,
    ActorSnapshot,
    ActorStarted,
    ActorSystem,
    ActorTerminated,
    Buckets,
    Event,
    Reading,
    is_number,
)
from ..devices import Device, DeviceStatistics, KeptStatistics, LibraryStatistics, QueueStatistics, what_to_do
from ..devices import System as DeviceSystem
from ._metrics import exposition
from ._processes import ProcessRows
from ._snapshot import ActorMemoryRow, ActorRow, DeviceRow, KeptRow, LibraryRow, OperationRow, SystemSnapshot
from ._tally import BOUNDS, LONGEST_LINE, OTHER_ACTORS, Failures, MessageTally, Seconds, Tallies

__all__ = ["CustomCounter", "CustomGauge", "CustomHistogram", "Recorder", "record"]

_NAME = re.compile(r"(?!trio_accel)[a-zA-Z][a-zA-Z0-9_]{0,99}")
# The last parts of names by which a histogram or a counter writes its values.
_SUFFIXES = ("_total", "_count", "_sum", "_bucket", "_created")
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,49}")
_TAKEN = ("system", "path", "le", "quantile")
# The maximum number of label combinations in one metric, and of metrics in a recorder.
_MAX_LABEL_VALUES, _MAX_METRICS = 100, 1000
_OTHER_LABEL = "(other)"
_Labels = tuple[tuple[str, str], ...]
OwnT = TypeVar("OwnT", bound="_Own")


class _Own:
    """A metric, with a value for each combination of label values."""

    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:  # noqa: A002  # as in metrics
        self.name: str = name
        self.help: str = help
        self._values: dict[_Labels, float] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def readings(self) -> Iterator[Reading]:
        """Yield its current values."""
        for labels, value in self._values.items():
            yield Reading(name=self.name, kind=self.kind, help=self.help, value=value, labels=labels)

    def _key(self, labels: dict[str, str]) -> _Labels:
        key = tuple(sorted((name, str(value)) for name, value in labels.items()))
        if key in self._values:
            return key
        for name in labels:
            if _LABEL.fullmatch(name) is None or name in _TAKEN:
                raise ValueError(f"{self!r}: {name!r} is not a name of a label")
        # A client that makes up ever new values must not fill the memory.
        return (
            key if len(self._values) < _MAX_LABEL_VALUES else tuple((name, _OTHER_LABEL) for name, _ in key)
        )

    def _number(self, value: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self!r}: a value is a number, not {value!r}")
        if not is_number(value, -sys.float_info.max, sys.float_info.max):
            raise ValueError(f"{self!r}: a value is finite, not {value!r}")
        return float(value)


class CustomCounter(_Own):
    """A count that only rises. Made by `Recorder.counter`."""

    kind = "counter"

    def add(self, value: float = 1.0, **labels: str) -> None:
        """Add to the count.

        Args:
            value: The increase, at least 0.
            labels: The labels of the count. After 100 combinations, new ones count as ``"(other)"``.

        Raises:
            ValueError: The value is negative, NaN or infinite, or a label name is invalid.
            TypeError: The value is not a number.
        """
        if self._number(value) < 0:
            raise ValueError(f"{self!r}: a counter only rises, not by {value!r}")
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + value


class CustomGauge(_Own):
    """A value that rises and falls. Made by `Recorder.gauge`."""

    def set(self, value: float, **labels: str) -> None:
        """Set its value; arguments and errors as for `CustomCounter.add`, except that it may be negative."""
        self._values[self._key(labels)] = self._number(value)


class CustomHistogram(_Own):
    """Values counted by ranges. Made by `Recorder.histogram`."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:  # noqa: A002  # as in metrics
        super().__init__(name, help)
        self._bounds = tuple(map(self._number, bounds))
        if not self._bounds or list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"{self!r}: bounds rise, and there is at least one, got {bounds!r}")
        self._buckets: dict[_Labels, Buckets] = {}

    def observe(self, value: float, **labels: str) -> None:
        """Count a value; arguments and errors as for `CustomCounter.add`, except that it may be negative."""
        value = self._number(value)
        key = self._key(labels)
        self._values[key] = 0.0
        if key not in self._buckets:
            self._buckets[key] = Buckets(self._bounds)
        self._buckets[key].add(value)

    def readings(self) -> Iterator[Reading]:
        """Yield its current values."""
        for labels, buckets in self._buckets.items():
            yield buckets.reading(self.name, self.help, labels)


# Newer counts of a device are not requested again.
_FRESH = 0.5
# The maximum number of actors' readings in a snapshot.
_MOST_READINGS = 2000
# The maximum number of actors per device in a snapshot.
_MOST_ACTORS = 100
_IDLE = QueueStatistics(waiting=0, in_flight=0)
_UNUSED = LibraryStatistics()
_NONE_KEPT = KeptStatistics()
# The fields of an actor that the tree and a snapshot have under the same names.
_OF_ACTORS = tuple(
    [field.name for field in attrs.fields(ActorRow) if field.name in attrs.fields_dict(ActorSnapshot)]
)
_OF_DEVICES = ("path", "name", "isolation", "generation", "losses", "pending")
_recorders: WeakKeyDictionary[ActorSystem, Recorder] = WeakKeyDictionary()


class Recorder:
    """Counts the activity of a system. Made by `record`.

    Attributes:
        system: The system.
    """

    def __init__(self, system: ActorSystem, *, operations: int, failures: int) -> None:
        self.system: ActorSystem = system
        self._since = trio.current_time()
        self._failures = Failures(failures)
        self._tallies = Tallies(operations, self._failures.message, self._since)
        self._devices = _DeviceRows(system)
        self._processes = ProcessRows()
        self._own: dict[str, _Own] = {}
        self._users = 0
        self._ends = ExitStack()

    def __repr__(self) -> str:
        return f"<Recorder of {self.system.name}, {len(self._tallies.by_key)} operations>"

    def exposition(self) -> str:
        """Return the metrics as text: see `exposition`."""
        return exposition(self)

    def snapshot(self, *, asks: bool = True) -> SystemSnapshot:
        """Return the current state. It waits for no answer, so it works while actors and workers hang.

        Counts of devices come from their workers: the last known ones are returned, with their `age`, and new
        ones are requested in the background.

        Args:
            asks: Whether to request new counts of devices.

        In a thread without a Trio run, it waits until the system's loop has time. So a thread must not call
        it while the loop waits for that thread.

        Raises:
            RuntimeError: This is another Trio run than the system's.
            trio.RunFinishedError: The call is made in another thread, and the system's run is over.
        """
        try:
            self.system.check_run("snapshot")
        except RuntimeError:
            see = partial(self.snapshot, asks=asks)
            return trio.from_thread.run_sync(see, trio_token=self.system.token)
        if asks:
            self._devices.ask()
        now = trio.current_time()
        actors = list(self.system.tree().walk())
        by_path, rates = defaultdict[str, list[MessageTally]](list), defaultdict[str, float](float)
        operations: list[OperationRow] = []
        for tally in self._tallies.by_key.values():
            tally.count()
            by_path[tally.path].append(tally)
            row = _operation(tally, now)
            operations.append(row)
            rates[tally.path] += row.rate
        self._tallies.saw(now)
        nbytes = self._devices.array_bytes()
        of_actors = [reading for actor in actors for reading in actor.readings]
        of_program = [reading for metric in self._own.values() for reading in metric.readings()]
        rows = [_actor(actor, by_path[actor.path], rates[actor.path], nbytes[actor.path]) for actor in actors]
        return SystemSnapshot(
            time=time.time(),
            system=self.system.name,
            pid=os.getpid(),
            uptime=now - self.system.opened_at,
            recorded=now - self._since,
            rate=sum(rates.values()),
            dead_letters=self.system.dead_letters,
            quarantined=self.system.quarantined,
            actors=tuple(rows),
            operations=tuple(operations),
            devices=self._devices.rows({actor.path: actor for actor in actors}),
            failures=self._failures.rows,
            readings=(*of_program, *of_actors[:_MOST_READINGS]),
            processes=self._processes.rows(actors),
            loop=self.system.loop_holds,
        )

    def counter(self, name: str, help: str = "") -> CustomCounter:  # noqa: A002  # as in metrics
        """Return a counter of the program's own: ``recorder.counter("tokens").add(17, model="small")``.

        It is shown on the dashboard, and in metrics under its own name, with the label ``system``. The same
        name gives the same counter. It costs 1 µs to count. Its methods are for the Trio thread.

        Args:
            name: Letters, digits and ``_``; the unit last, as in ``"audio_seconds"``. In metrics it has the
                suffix ``_total``, which you may leave out. Names must not end in other suffixes of
                Prometheus: ``_count``, ``_sum``, ``_bucket``, ``_created``.
            help: Its meaning, in a sentence.

        Raises:
            ValueError: The name is not valid, it is one of another kind, or there are 1000.
        """
        return self._named(CustomCounter, name, help)

    def gauge(self, name: str, help: str = "") -> CustomGauge:  # noqa: A002  # as in metrics
        """Return a value of the program's own that rises and falls; otherwise as `counter`."""
        return self._named(CustomGauge, name, help)

    def histogram(self, name: str, help: str = "", *, bounds: Sequence[float] = ()) -> CustomHistogram:  # noqa: A002  # as in metrics
        """Return a histogram of the program's own; otherwise as `counter`.

        Args:
            name: See `counter`.
            help: See `counter`.
            bounds: Upper ends of its ranges, in rising order; by default, from 10 µs to 25 s.

        Raises:
            ValueError: See `counter`; or the bounds do not rise.
        """
        return self._named(CustomHistogram, name, help, bounds or BOUNDS)

    def _named(self, kind: type[OwnT], name: str, *rest: Any) -> OwnT:
        """Return the metric with a name, and make it if necessary; see `counter`."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(f"a metric's name is letters, digits and _, and not trio_accel's, got {name!r}")
        if kind is CustomCounter:
            name = name.removesuffix("_total")
        if name.endswith(_SUFFIXES):
            raise ValueError(f"a {kind.kind}'s name must not end in {', '.join(_SUFFIXES)}, got {name!r}")
        metric = self._own.get(name)
        if metric is None:
            if len(self._own) >= _MAX_METRICS:
                raise ValueError(
                    f"there are {_MAX_METRICS} metrics already: tell values apart by labels, not names"
                )
            metric = self._own[name] = kind(name, *rest)
        if not isinstance(metric, kind):
            raise ValueError(f"{name} is a {metric.kind} already")  # noqa: TRY004  # of a name
        return metric

    async def refresh(self) -> None:
        """Wait for the counts of all devices, so that the next snapshot has fresh ones.

        A hanging worker does not answer: use it in ``trio.move_on_after``. A device answers after its context
        is rebuilt.
        """
        await trio.lowlevel.checkpoint()
        for answered in self._devices.ask(oldest=0.0):
            await answered.wait()

    def _observe(self, event: Event) -> None:
        self._failures.observe(event)
        self._devices.observe(event)
        if isinstance(event, ActorStarted):
            self._tallies.began(event.path)
        elif isinstance(event, ActorTerminated):
            self._tallies.ended(event.path)

    def begin(self) -> None:
        """Add a user; the first one starts the recording."""
        self._users += 1
        if self._users == 1:
            self._ends.enter_context(self.system.measure(self._tallies))
            self._ends.enter_context(self.system.subscribe(self._observe, messages=False))
            self._ends.callback(self._devices.close)
            _recorders[self.system] = self

    def end(self) -> None:
        """Remove a user; the last one ends the recording."""
        self._users -= 1
        if not self._users:
            _recorders.pop(self.system, None)
            self._ends.close()


def check_system(verb: str, system: object) -> None:
    """Refuse anything but an open system.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(system, ActorSystem):
        received = f"got {system!r}{what_to_do(system)}"
        raise TypeError(f"{verb}: system must be an open system, such as device.system, {received}")


@contextmanager
def record(system: ActorSystem, *, operations: int = 1000, failures: int = 50) -> Generator[Recorder]:
    """Record what a system does, for the body of the ``with``.

    If the system is recorded already, this is the same recorder, with its bounds.

    Args:
        system: The system.
        operations: The maximum number of recorded pairs of an actor and a message type. Above it, ended
            actors are counted together, as one actor ``"(other)"``. So are further actors if that many are
            alive.
        failures: The maximum number of retained failures.

    Raises:
        TypeError: `system` is not a system.
        ValueError: A bound is not an integer of at least 1, or of at least 0 for failures.
        RuntimeError: This is another thread or Trio run than the system's; or another meter measures it.
    """
    check_system("record", system)
    for name, value, minimum in (("operations", operations, 1), ("failures", failures, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"record: {name} must be an integer of at least {minimum}, got {value!r}")
    system.check_run("record")
    recorder = _recorders.get(system)
    if recorder is None:
        recorder = Recorder(system, operations=operations, failures=failures)
    recorder.begin()
    try:
        yield recorder
    finally:
        recorder.end()


def _actor(actor: ActorSnapshot, tallies: list[MessageTally], rate: float, array_bytes: int) -> ActorRow:
    p50, p99 = _quantiles(tallies)
    fields: dict[str, Any] = {name: getattr(actor, name) for name in _OF_ACTORS}
    if actor.last_error is not None:
        fields["last_error"] = actor.last_error[:LONGEST_LINE]
    return ActorRow(**fields, restarts=actor.restarts, rate=rate, p50=p50, p99=p99, array_bytes=array_bytes)


def _operation(tally: MessageTally, now: float) -> OperationRow:
    p50, p99 = _quantiles([tally])
    return OperationRow(
        path=tally.path,
        message_type=tally.message_type,
        completed=tally.completed_count,
        failed=tally.failed_count,
        cancelled=tally.cancelled_count,
        dropped=tally.dropped_count,
        queue=tally.queue(),
        run=tally.run(),
        rate=tally.rate(now),
        p50=p50,
        p99=p99,
    )


def _quantiles(tallies: list[MessageTally]) -> tuple[float | None, float | None]:
    """Return the times within which 50 and 99 percent of the last messages ended (nearest rank)."""
    recent: list[Seconds] = [tally.recent() for tally in tallies]
    seconds = recent[0] if len(recent) == 1 else np.concatenate(recent) if recent else np.empty(0)
    count = len(seconds)
    if not count:
        return None, None
    p50_index, p99_index = (count + 1) // 2 - 1, -(-99 * count // 100) - 1
    ordered = np.partition(seconds, (p50_index, p99_index))
    return float(ordered[p50_index]), float(ordered[p99_index])


@attrs.define(eq=False)
class _DeviceState:
    """The state of one device.

    Attributes:
        statistics: Its own counts, from its last answer.
        told_at: The time of its last answer, on Trio's clock.
        asking: Set when the device has answered the pending request or failed; None without a request.
        scope: The cancel scope of the requesting task.
        lost_at: The time when its context was lost, until there is another one.
        served_since: The time when its context began to serve, if that was seen.
        recovery_time: The seconds of the last recovery.
    """

    statistics: DeviceStatistics | None = None
    told_at: float = float("-inf")
    asking: trio.Event | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    lost_at: float | None = None
    served_since: float | None = None
    recovery_time: float | None = None


class _DeviceRows:
    """The devices of a system, with their last answers.

    A device answers from its worker process, which may hang. So a snapshot does not wait for that: tasks of
    their own ask, at most one for each device.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._known: defaultdict[Device, _DeviceState] = defaultdict(_DeviceState)
        self._is_closed = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The open devices of the system; empty if it does not open devices."""
        return self._system.devices if isinstance(self._system, DeviceSystem) else ()

    def observe(self, event: Event) -> None:
        """Measure the time without a context for each device, and forget devices that have ended."""
        if isinstance(event, ActorTerminated):
            for ended in [device for device in self._known if device.path == event.path]:
                self._known.pop(ended).scope.cancel(reason="the device has ended")
            return
        if not isinstance(event, (ActorRestarted, ActorStarted)) or not event.path.endswith("/context"):
            return
        path = event.path.removesuffix("/context")
        for device in self.devices:
            if device.path == path:
                state = self._known[device]
                now = trio.current_time()
                if isinstance(event, ActorRestarted):
                    if state.lost_at is None:
                        state.lost_at = now
                    continue
                state.served_since = now
                if state.lost_at is not None:
                    state.recovery_time = now - state.lost_at
                    state.lost_at = None

    def ask(self, oldest: float = _FRESH) -> list[trio.Event]:
        """Request counts older than `oldest` seconds; return events that are set after the answers."""
        devices = self.devices
        now = trio.current_time()
        for device in devices:
            state = self._known[device]
            if state.asking is None and state.told_at <= now - oldest and not self._is_closed:
                state.asking, state.scope = trio.Event(), trio.CancelScope()
                asked = device, state, state.asking
                trio.lowlevel.spawn_system_task(self._ask, *asked, name=f"statistics of {device.path}")
        return [state.asking for state in self._known.values() if state.asking is not None]

    async def _ask(self, device: Device, state: _DeviceState, asking: trio.Event) -> None:
        try:
            with state.scope:
                state.statistics = await device.statistics()
                state.told_at = trio.current_time()
        except Exception:  # noqa: BLE001  # a device that is lost or closes says so to its own askers
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            state.asking = None
            asking.set()

    def close(self) -> None:
        """Stop asking."""
        self._is_closed = True
        for state in self._known.values():
            state.scope.cancel(reason="recording ends")

    def rows(self, actors: dict[str, ActorSnapshot]) -> tuple[DeviceRow, ...]:
        """Return the current devices.

        Args:
            actors: All actors by their paths.
        """
        return tuple([_row(device, self._known[device], actors) for device in self.devices])

    def array_bytes(self) -> Counter[str]:
        """Return the bytes of all devices' arrays, by the path of the actor that made them."""
        total: Counter[str] = Counter()
        for state in self._known.values():
            if state.statistics is not None:
                total.update(state.statistics.actors)
        return total


def _row(device: Device, device_state: _DeviceState, actors: dict[str, ActorSnapshot]) -> DeviceRow:
    context, cost = actors.get(f"{device.path}/context"), device.recovery
    state = "restarting" if context is None else context.state
    row = DeviceRow(
        **{name: getattr(device, name) for name in _OF_DEVICES},
        backend=device.info.backend,
        state=state if device.outage is None else "given up",
        recovery_time=device_state.recovery_time,
        recovery_cost=cost.seconds,
        recovery_text=None if cost.seconds is None else str(cost),
        pid=None if context is None else context.pid,
        served=None if device_state.served_since is None else trio.current_time() - device_state.served_since,
    )
    statistics = device_state.statistics
    if statistics is None:
        return row
    return attrs.evolve(
        row,
        age=trio.current_time() - device_state.told_at,
        launched=statistics.launched,
        completed=statistics.completed,
        in_flight=statistics.in_flight,
        memory=statistics.memory,
        libraries=tuple(
            [
                _library(library, statistics)
                for library in sorted(statistics.queues.keys() | statistics.libraries.keys())
            ]
        ),
        plan_caches=tuple(
            [
                KeptRow(side=side, **attrs.asdict(row))
                for side, row in statistics.plan_caches.items()
                if row != _NONE_KEPT
            ]
        ),
        actors=_actors(statistics),
    )


def _actors(statistics: DeviceStatistics) -> tuple[ActorMemoryRow, ...]:
    nbytes_by_path = {path: nbytes for path, nbytes in statistics.actors.items() if path}
    # A worker's use differs from the blocks known here while a message is in flight.
    rest = statistics.memory.used - sum(nbytes_by_path.values())
    if rest > 0:
        nbytes_by_path[""] = rest
    ordered = sorted(nbytes_by_path.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(nbytes for _, nbytes in ordered[_MOST_ACTORS:])
    shown = [*ordered[:_MOST_ACTORS], *([(OTHER_ACTORS, rest)] if rest else [])]
    return tuple([ActorMemoryRow(path=path, used=nbytes) for path, nbytes in shown])


def _library(library: str, statistics: DeviceStatistics) -> LibraryRow:
    queue = statistics.queues.get(library, _IDLE)
    planned = statistics.libraries.get(library, _UNUSED)
    return LibraryRow(
        library=library,
        waiting=queue.waiting,
        in_flight=queue.in_flight,
        **attrs.asdict(planned, recurse=False),
    )
