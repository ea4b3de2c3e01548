"""The figures of a snapshot under the names that metrics have, and these as Prometheus wants them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import attrs

from ..actors import Reading
from ..backends.base.kit.modules import import_extra
from ._gpus import GpuWatch
from ._recorder import Recorder
from ._snapshot import ActorRow, CacheRow, DeviceRow, Histogram, LibraryRow, SystemSnapshot
from ._tally import OTHER_ACTORS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["exposition", "prometheus", "prometheus_gpus"]

# Actors that are told apart; the number of metrics that a program exports has to be bounded.
_MOST_ACTORS = 1000
_UNUSED = CacheRow()
_PREFIX = "trio_accel_"

Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = tuple[Labels, float]


@attrs.frozen(kw_only=True)
class Figure:
    """One metric.

    Attributes:
        name: Words of its name, with an underscore between; without the unit.
        unit: ``"seconds"``, ``"bytes"`` or nothing.
        kind: A ``"counter"`` only rises, until the counted object begins anew; a ``"gauge"`` goes up and
            down.
        help: Its meaning, in a sentence.
        labels: Names of its labels; that of the system comes before them.
        samples: Its values in a snapshot, each with those of the labels.
    """

    name: str
    unit: str = ""
    kind: str
    help: str
    labels: Labels = ()
    samples: Callable[[SystemSnapshot], Iterable[Sample]]


def _of_actors(figure: Callable[[ActorRow], float]) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """One value for each actor; those of the last ones are added up, if there are very many."""

    def samples(snapshot: SystemSnapshot) -> Iterator[Sample]:
        for actor in snapshot.actors[:_MOST_ACTORS]:
            yield (actor.path,), figure(actor)
        if len(snapshot.actors) > _MOST_ACTORS:
            yield (OTHER_ACTORS,), sum(figure(actor) for actor in snapshot.actors[_MOST_ACTORS:])

    return samples


def _of_devices(
    figure: Callable[[DeviceRow], float | None],
) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """One value for each device of which it is known."""
    return lambda snapshot: (
        ((device.path,), value) for device in snapshot.devices if (value := figure(device)) is not None
    )


def _outcomes(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        for outcome in ("completed", "failed", "cancelled", "dropped"):
            yield (row.path, row.message_type, outcome), getattr(row, outcome)


def _states(snapshot: SystemSnapshot) -> Iterator[Sample]:
    states = ("starting", "running", "restarting", "stopping", "quarantined")
    counts = Counter[str](dict.fromkeys(states, 0))
    counts.update(actor.state for actor in snapshot.actors)
    for state, count in counts.items():
        yield (state,), count


def _memory(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        memory = device.memory
        if memory is not None:
            for kind in ("used", "reserved", "workspace", "foreign"):
                yield (device.path, kind), getattr(memory, kind)


def _of_libraries(
    figures: Callable[[LibraryRow], Mapping[str, float]],
) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """Some values for each library of a device, by the last label; it has none where that is empty."""

    def samples(snapshot: SystemSnapshot) -> Iterator[Sample]:
        for device in snapshot.devices:
            for library in device.libraries:
                for label, value in figures(library).items():
                    yield (device.path, library.library, *filter(None, [label])), value

    return samples


def _arrays(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for actor in device.actors:
            yield (device.path, actor.path), actor.used


def _cache(row: CacheRow) -> Mapping[str, float]:
    return attrs.asdict(row) if row != _UNUSED else {}


def _quantiles(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        for quantile, value in (("0.5", row.p50), ("0.99", row.p99)):
            if value is not None:
                yield (row.path, row.message_type, quantile), value


# Name, kind, unit, labels with commas between them, help.
_TABLE = """
uptime              gauge   seconds - Seconds since the system was opened.
dead_letters        counter -       - Messages that were sent and will not be served.
actors              gauge   -       state Actors by their state.
messages            counter -       path,message_type,outcome Messages by actor and type, and what became of them.
message_latency     gauge   seconds path,message_type,quantile Seconds from sending to the end that a share of the last messages took at most.
actor_restarts      counter -       path How often an actor was restarted.
actor_expired       counter -       path Requests that were dropped because their deadline had passed.
mailbox_messages    gauge   -       path Messages in the mailbox of an actor.
mailbox_senders     gauge   -       path Senders that wait for room in the mailbox of an actor.
actor_in_flight     gauge   -       path Messages that an actor serves, and requests whose reply it gives later.
device_up           gauge   -       device 1 while a device has a context, 0 while one is made.
device_generation   gauge   -       device Which context of the device this is, from 1.
device_losses       counter -       device Contexts that a device has lost.
device_recovery     gauge   seconds device Seconds from the last loss of a context to the next context.
device_pending      gauge   -       device Requests that wait while the context of a device is made.
device_age          gauge   seconds device How old the figures are that a device has told of itself: launches, requests and memory.
device_launches     counter -       device Operations launched by the current context of a device.
device_in_flight    gauge   -       device Operations that a device has now.
device_requests     gauge   -       device,library,state Requests of the libraries of a device.
device_plans        counter -       device,library,event Plans of the libraries of the current context of a device: found, made, evicted.
device_templates    counter -       device,library,event Launch templates of the worker of a device: found, made, evicted.
device_memory       gauge   bytes   device,kind Memory of a device by what it is taken for.
device_arrays       gauge   bytes   device,path Memory of the arrays of a device by the actor that made them.
device_workspace    gauge   bytes   device,library Memory that the libraries of a device hold for themselves.
device_memory_limit gauge   bytes   device The most memory that the arrays of a device may take.
"""  # noqa: E501  a row for a metric
_READ: Mapping[str, Callable[[SystemSnapshot], Iterable[Sample]]] = {
    "uptime": lambda snapshot: [((), snapshot.uptime)],
    "dead_letters": lambda snapshot: [((), snapshot.dead_letters)],
    "actors": _states,
    "messages": _outcomes,
    "message_latency": _quantiles,
    "actor_restarts": _of_actors(lambda actor: actor.restarts),
    "actor_expired": _of_actors(lambda actor: actor.expired),
    "mailbox_messages": _of_actors(lambda actor: actor.mailbox_depth),
    "mailbox_senders": _of_actors(lambda actor: actor.mailbox_waiting),
    "actor_in_flight": _of_actors(lambda actor: actor.running + actor.deferred),
    "device_up": _of_devices(lambda device: device.state == "running"),
    "device_generation": _of_devices(lambda device: device.generation),
    "device_losses": _of_devices(lambda device: device.losses),
    "device_recovery": _of_devices(lambda device: device.recovery_time),
    "device_pending": _of_devices(lambda device: device.pending),
    "device_age": _of_devices(lambda device: device.age),
    "device_launches": _of_devices(lambda device: None if device.age is None else device.launched),
    "device_in_flight": _of_devices(lambda device: None if device.age is None else device.in_flight),
    "device_requests": _of_libraries(lambda row: {"waiting": row.waiting, "in_flight": row.in_flight}),
    "device_plans": _of_libraries(lambda row: _cache(row.plans)),
    "device_templates": _of_libraries(lambda row: _cache(row.templates)),
    "device_memory": _memory,
    "device_arrays": _arrays,
    "device_workspace": _of_libraries(lambda row: {"": row.workspace} if row.workspace else {}),
    "device_memory_limit": _of_devices(lambda device: None if device.memory is None else device.memory.limit),
}


def _figure(row: str) -> Figure:
    name, kind, unit, labels, text = row.split(maxsplit=4)
    names = () if labels == "-" else tuple(labels.split(","))
    return Figure(name=name, unit=unit.strip("-"), kind=kind, help=text, labels=names, samples=_READ[name])


FIGURES: tuple[Figure, ...] = tuple(map(_figure, _TABLE.strip().splitlines()))

HISTOGRAMS = {
    "queue": "Seconds from sending a message to its handler's start.",
    "run": "Seconds from the start of a message's handler to its end.",
}
"""Describe the two histograms of messages."""


def prometheus(recorder: Recorder) -> Collector:
    """Make a collector of `prometheus-client`, to be registered. Needs the extra ``metrics``.

    It takes a snapshot when it is asked, and keeps nothing. It may be asked in any thread: from another than
    the system's, it waits until the loop has a moment. Its text is served by ``make_asgi_app(registry)`` of
    `prometheus-client`, which every ASGI server on Trio can mount.

    Labels have as many values as there are actors and types of messages, but for at most 1000 actors, and at
    most `operations` pairs of the two (see `record`).

    Args:
        recorder: The recorder.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    return _collector(lambda: _metrics(recorder))


def prometheus_gpus(watch: GpuWatch) -> Collector:
    """Make a collector of `prometheus-client` for GPUs, to be registered. Needs the extra ``metrics``.

    It has the last readings of `watch_gpus`, and waits for no new ones. Values that are None in a reading are
    left out. The label ``gpu`` is the UUID, or the number where the UUID is not known.

    Args:
        watch: The watch.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    return _collector(lambda: _gpus(watch))


def _gpus(watch: GpuWatch) -> Iterator[Metric]:
    readings = watch.latest
    yield _family("gauge", "gpu_age", "seconds", "Seconds since GPUs were read.", (), [((), watch.age)])
    for name, unit, text in _OF_GPUS:
        known: list[Sample] = [
            ((one.uuid or str(one.index),), value)
            for one in readings
            if (value := one.error is None if name == "up" else getattr(one, name)) is not None
        ]
        kind = "counter" if name.startswith("ecc") else "gauge"
        yield _family(kind, f"gpu_{name}", unit, text, ("gpu",), known)


# Attribute of a reading, unit and meaning.
_OF_GPUS = (
    ("up", "", "1 if a GPU answers, 0 if it does not."),
    ("memory_used", "bytes", "Memory that is taken, by all processes."),
    ("memory_total", "bytes", "Memory that there is."),
    ("utilization", "percent", "Time in which a kernel ran."),
    ("memory_utilization", "percent", "Time in which memory was read or written."),
    ("power", "watts", "Power that is drawn."),
    ("power_limit", "watts", "Power that may be drawn."),
    ("temperature", "celsius", "Temperature."),
    ("ecc_corrected", "", "Errors of memory that were corrected, since the driver was loaded."),
    ("ecc_uncorrected", "", "Errors of memory that were not, since the driver was loaded."),
)


def exposition(recorder: Recorder, *, openmetrics: bool = False) -> str:
    """Return the metrics as text, in the format of Prometheus or in OpenMetrics. Needs the extra ``metrics``.

    Args:
        recorder: The recorder.
        openmetrics: Whether it is to be OpenMetrics 1.0, which ends with ``# EOF``.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    collector = prometheus(recorder)
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    encode, _ = choose_encoder("application/openmetrics-text" if openmetrics else "")
    return encode(registry).decode()


def _collector(metrics: Callable[[], Iterator[Metric]]) -> Collector:
    # Its base is only there with the extra.
    import_extra("prometheus_client", "metrics")
    from prometheus_client.registry import Collector

    class MetricsCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            return metrics()

        def describe(self) -> list[Metric]:
            # Nothing is asked when it is registered: the system may be another thread's.
            return []

    return MetricsCollector()


def _metrics(recorder: Recorder) -> Iterator[Metric]:
    snapshot = recorder.snapshot()
    for one in FIGURES:
        samples = (((snapshot.system, *labels), value) for labels, value in one.samples(snapshot))
        yield _family(one.kind, one.name, one.unit, one.help, ("system", *one.labels), samples)
    for what, text in HISTOGRAMS.items():
        yield _histogram(what, text, snapshot)
    named: dict[str, list[Reading]] = {}
    for reading in snapshot.readings:
        named.setdefault(f"{_PREFIX}{reading.name}" if reading.path else reading.name, []).append(reading)
    for name, readings in named.items():
        yield _of_readings(name, readings, snapshot.system)


def _of_readings(name: str, readings: list[Reading], system: str) -> Metric:
    from prometheus_client.metrics_core import Metric

    first = readings[0]
    metric = Metric(name.removesuffix("_total") if first.kind == "counter" else name, first.help, first.kind)
    for reading in readings:
        if reading.kind != first.kind:
            continue
        labels = {"system": _plain(system), **{key: _plain(value) for key, value in reading.labels}}
        if reading.path:
            labels["path"] = _plain(reading.path)
        if reading.kind != "histogram":
            end = "_total" if reading.kind == "counter" else ""
            metric.add_sample(f"{metric.name}{end}", labels, reading.value)
            continue
        below = list(accumulate(reading.counts))
        for bound, count in zip([*map(str, reading.bounds), "+Inf"], below, strict=True):
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
        metric.add_sample(f"{name}_count", labels, below[-1])
        metric.add_sample(f"{name}_sum", labels, reading.value)
    return metric


def _family(kind: str, name: str, unit: str, text: str, labels: Labels, samples: Iterable[Sample]) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    metric = make(f"{_PREFIX}{name}", text, labels=labels, unit=unit)
    for values, value in samples:
        metric.add_metric(list(map(_plain, values)), value)
    return metric


def _histogram(what: str, text: str, snapshot: SystemSnapshot) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    metric = HistogramMetricFamily(
        f"{_PREFIX}message_{what}", text, labels=("system", "path", "message_type"), unit="seconds"
    )
    for row in snapshot.operations:
        times: Histogram = row.queue if what == "queue" else row.run
        ends = [*map(str, times.bounds), "+Inf"]
        metric.add_metric(
            [_plain(snapshot.system), _plain(row.path), _plain(row.message_type)],
            list(zip(ends, map(float, times.cumulated()), strict=True)),
            times.total,
        )
    return metric


def _plain(text: str) -> str:
    """Text that can be written as UTF-8: names may have what is half of a character."""
    return text.encode("utf-8", "replace").decode()
