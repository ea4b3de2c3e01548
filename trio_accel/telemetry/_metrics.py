"""The figures of a snapshot as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import attrs

from ..backends.base.kit.modules import import_extra
from ..devices import CacheStatistics
from ._snapshot import ActorRow, DeviceRow, Histogram, LibraryRow, SystemSnapshot, TakesSnapshots
from ._tally import OTHER_ACTORS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["exposition", "prometheus"]

# The maximum number of actors with separate metrics, because a program must not export unbounded metrics.
_MOST_ACTORS = 1000
_UNUSED = CacheStatistics()

Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = tuple[Labels, float | Histogram]
Samples: TypeAlias = Callable[[SystemSnapshot], Iterable[Sample]]


def _of_actors(figure: Callable[[ActorRow], float], snapshot: SystemSnapshot) -> Iterator[Sample]:
    """Yield a value for each actor; if there are very many, the values of the last ones are added up."""
    for actor in snapshot.actors[:_MOST_ACTORS]:
        yield (actor.path,), figure(actor)
    if len(snapshot.actors) > _MOST_ACTORS:
        yield (OTHER_ACTORS,), sum(figure(actor) for actor in snapshot.actors[_MOST_ACTORS:])


def _of_devices(figure: Callable[[DeviceRow], float | None], snapshot: SystemSnapshot) -> Iterator[Sample]:
    """Yield a value for each device with a known one."""
    for device in snapshot.devices:
        if (value := figure(device)) is not None:
            yield (device.path,), value


def _of_system(figure: Callable[[SystemSnapshot], float], snapshot: SystemSnapshot) -> Iterator[Sample]:
    yield (), figure(snapshot)


def _of_messages(figure: Callable[..., Histogram], snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        yield (row.path, row.message_type), figure(row)


def _of_libraries(
    figures: Callable[[LibraryRow], Mapping[str, float]], snapshot: SystemSnapshot
) -> Iterator[Sample]:
    """Yield values for each library of a device, with a last label if it is not empty."""
    for device in snapshot.devices:
        for library in device.libraries:
            for label, value in figures(library).items():
                yield (device.path, library.library, *filter(None, [label])), value


def _outcomes(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        for outcome in ("completed", "failed", "cancelled", "dropped"):
            yield (row.path, row.message_type, outcome), getattr(row, outcome)


def _percentiles(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        for percentile, value in (("50", row.p50), ("99", row.p99)):
            if value is not None:
                yield (row.path, row.message_type, percentile), value


def _states(snapshot: SystemSnapshot) -> Iterator[Sample]:
    states = ("starting", "running", "restarting", "stopping", "quarantined")
    counts = Counter(actor.state for actor in snapshot.actors)
    for state, count in {**dict.fromkeys(states, 0), **counts}.items():
        yield (state,), count


def _memory(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        if device.memory is not None:
            for kind in ("used", "reserved", "workspace", "foreign"):
                yield (device.path, kind), getattr(device.memory, kind)


def _arrays(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for actor in device.actors:
            yield (device.path, actor.path), actor.used


def _plan_cache_events(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for row in device.plan_caches:
            for event in ("unplanned", "hits", "recorded", "bound", "armed", "refused", "evicted"):
                yield (device.path, row.side, event), getattr(row, event)


def _of_processes(figure: str, snapshot: SystemSnapshot) -> Iterator[Sample]:
    for process in snapshot.processes:
        yield (process.path,), getattr(process, figure)


def _cache(row: CacheStatistics) -> Mapping[str, float]:
    return attrs.asdict(row) if row != _UNUSED else {}


# Name, kind, unit, labels with commas between them, where the value is read from, help.
_TABLE = """
uptime              gauge     seconds - uptime Seconds since the system was opened.
loop_holds          counter   -       - loop.count Times in which a task held the Trio loop for 0.1 s or longer.
loop_held           counter   seconds - loop.seconds Seconds for which tasks held the Trio loop, in all.
loop_longest_hold   gauge     seconds - loop.longest Seconds of the longest time in which a task held the Trio loop.
process_resident_memory gauge bytes   path * Resident memory of the program, and of the process of an actor.
process_cpu         counter   seconds path * Seconds for which the threads of a process have run.
dead_letters        counter   -       - dead_letters Messages that were sent and will not be served.
actors              gauge     -       state * Actors by their state.
messages            counter   -       path,message_type,outcome * Messages by actor and type, and what became of them.
message_latency     gauge     seconds path,message_type,percentile * Seconds from sending to the end that so many in 100 of the last messages took at most.
message_queue       histogram seconds path,message_type queue Seconds from sending a message to its handler's start.
message_run         histogram seconds path,message_type run Seconds from the start of a message's handler to its end.
actor_restarts      counter   -       path restarts How often an actor was restarted.
actor_expired       counter   -       path expired Requests that were dropped because their deadline had passed.
mailbox_messages    gauge     -       path mailbox_depth Messages in the mailbox of an actor.
mailbox_senders     gauge     -       path mailbox_waiting Senders that wait for room in the mailbox of an actor.
actor_in_flight     gauge     -       path * Messages that an actor serves, and requests whose reply it gives later.
device_up           gauge     -       device * 1 while a device has a context, 0 while one is made.
device_generation   gauge     -       device generation Which context of the device this is, from 1.
device_losses       counter   -       device losses Contexts that a device has lost.
device_recovery     gauge     seconds device recovery_time Seconds from the last loss of a context to the next context.
device_pending      gauge     -       device pending Requests that wait while the context of a device is made.
device_age          gauge     seconds device age How old the figures are that a device has told of itself: launches, requests and memory.
device_launches     counter   -       device * Operations launched by the current context of a device.
device_in_flight    gauge     -       device * Operations that a device has now.
device_requests     gauge     -       device,library,state * Requests of the libraries of a device.
device_plans        counter   -       device,library,event * Plans of the libraries of the current context of a device: hits, created, evicted.
device_plan_caches  counter   -       device,side,event * Plans that are cached for the requests of a device, and what became of them.
device_memory       gauge     bytes   device,kind * Memory of a device by what it is taken for.
device_arrays       gauge     bytes   device,path * Memory of the arrays of a device by the actor that made them.
device_workspace    gauge     bytes   device,library * Memory that the libraries of a device hold for themselves.
device_memory_limit gauge     bytes   device * The most memory that the arrays of a device may take.
"""  # noqa: E501  a row for a metric
# The readers of values outside of single attributes.
_READ: Mapping[str, Samples] = {
    "actors": _states,
    "messages": _outcomes,
    "message_latency": _percentiles,
    "actor_in_flight": partial(_of_actors, lambda actor: actor.running + actor.deferred),
    "process_resident_memory": partial(_of_processes, "memory"),
    "process_cpu": partial(_of_processes, "processor_seconds"),
    "device_up": partial(_of_devices, lambda device: device.state == "running"),
    "device_launches": partial(_of_devices, lambda device: None if device.age is None else device.launched),
    "device_in_flight": partial(_of_devices, lambda device: None if device.age is None else device.in_flight),
    "device_requests": partial(
        _of_libraries, lambda row: {"waiting": row.waiting, "in_flight": row.in_flight}
    ),
    "device_plans": partial(_of_libraries, lambda row: _cache(row.plans)),
    "device_plan_caches": _plan_cache_events,
    "device_memory": _memory,
    "device_arrays": _arrays,
    "device_workspace": partial(_of_libraries, lambda row: {"": row.workspace} if row.workspace else {}),
    "device_memory_limit": partial(
        _of_devices, lambda device: None if device.memory is None else device.memory.limit
    ),
}
_BY_LABELS: Mapping[str, Callable[..., Iterator[Sample]]] = {
    "-": _of_system,
    "path": _of_actors,
    "device": _of_devices,
    "path,message_type": _of_messages,
}
_UNITS = ("seconds", "bytes")


def _families(snapshot: SystemSnapshot) -> Iterator[Metric]:
    """Yield all metrics of a snapshot: from the table, and then from the program and the actors."""
    from prometheus_client.metrics_core import Metric

    for row in _TABLE.strip().splitlines():
        name, kind, unit, labels, source, text = row.split(maxsplit=5)
        read = _READ[name] if source == "*" else partial(_BY_LABELS[labels], attrgetter(source))
        names: list[str] = ["system", *([] if labels == "-" else labels.split(","))]
        metric = Metric(f"trio_accel_{name}", text, kind, unit.strip("-"))
        for values, value in read(snapshot):
            _add(metric, dict(zip(names, (snapshot.system, *values), strict=True)), value)
        yield metric
    named: dict[str, Metric] = {}
    for reading in snapshot.readings:
        # The program's own metrics keep their names, which do not begin with trio_accel.
        name = f"trio_accel_{reading.name}" if reading.path else reading.name
        if name not in named:
            suffix = name.rpartition("_")[2]
            stem = name.removesuffix("_total") if reading.kind == "counter" else name
            help_text = reading.help or f"{reading.name.replace('_', ' ').capitalize()}."
            named[name] = Metric(stem, help_text, reading.kind, suffix if suffix in _UNITS else "")
        if reading.kind == named[name].type:
            reading_labels = {"system": snapshot.system, **dict(reading.labels)}
            if reading.path:
                reading_labels["path"] = reading.path
            spread = Histogram(bounds=reading.bounds, counts=reading.counts, total=reading.value)
            _add(named[name], reading_labels, spread if reading.kind == "histogram" else reading.value)
    yield from named.values()


def prometheus(recorder: TakesSnapshots) -> Collector:
    """Make a collector of `prometheus-client`, to be registered. Needs the extra ``metrics``.

    It takes a snapshot at each request, and keeps nothing. It may be used in any thread: outside the system's
    thread, it waits until the loop has time. ``make_asgi_app(registry)`` of `prometheus-client` serves its
    text, and can be mounted by every ASGI server on Trio.

    Labels have as many values as there are actors and message types, but at most 1000 actors, and at most
    `operations` pairs of both (see `record`).

    Args:
        recorder: The recorder.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    # Its base class exists only with the extra.
    import_extra("prometheus_client", "metrics")
    from prometheus_client.registry import Collector

    class MetricsCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            return _families(recorder.snapshot())

        def describe(self) -> list[Metric]:
            # Registration must not take a snapshot, because the system may belong to another thread.
            return []

    return MetricsCollector()


def exposition(recorder: TakesSnapshots) -> str:
    """Return the metrics as text, in the format of Prometheus. Needs the extra ``metrics``.

    Args:
        recorder: The recorder.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    collector = prometheus(recorder)
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def _add(metric: Metric, raw_labels: dict[str, str], value: float | Histogram) -> None:
    """Add a value, under the names of its parts."""
    labels = {key: _plain(text) for key, text in raw_labels.items()}
    if not isinstance(value, Histogram):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        metric.add_sample(name, labels, value)
        return
    below = value.cumulated()
    for bound, count in zip([*map(str, value.bounds), "+Inf"], below, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_count", labels, below[-1])
    metric.add_sample(f"{metric.name}_sum", labels, value.total)


def _plain(text: str) -> str:
    """Return text that can be written as UTF-8, because names may contain half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()
