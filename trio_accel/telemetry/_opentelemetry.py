"""Metrics for OpenTelemetry: observable instruments, and histograms, which no instrument can observe."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import attrs
import trio

from ..actors import Reading
from ..backends.base.kit.modules import import_extra
from ._metrics import FIGURES, HISTOGRAMS, Figure
from ._recorder import Recorder
from ._snapshot import Histogram, SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.sdk.metrics.export import (
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricExportResult,
        MetricsData,
        ScopeMetrics,
    )

__all__ = ["add_histograms", "export_metrics"]

# Name of the meter.
_SCOPE = "trio_accel"
_UNITS = {"seconds": "s", "bytes": "By"}
# Names that OpenTelemetry takes.
_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")


@attrs.frozen
class _Shown:
    """The words of a recorder at the last collection.

    Attributes:
        snapshot: Its snapshot.
        has_histograms: Whether an exporter adds the histograms.
        named: Its words on figures of the program's own and of actors, by the names of instruments.
    """

    snapshot: SystemSnapshot
    has_histograms: bool
    named: dict[str, list[Reading]]

    @classmethod
    def of(cls, snapshot: SystemSnapshot, has_histograms: bool) -> Self:
        """Sort it."""
        named: dict[str, list[Reading]] = {}
        for one in _numbers(snapshot.readings, has_histograms):
            named.setdefault(_name(one), []).append(one)
        return cls(snapshot, has_histograms, named)


@attrs.define(eq=False)
class _Source:
    """A recorder whose metrics are shown; nothing is, once it has none."""

    recorder: Recorder | None
    has_histograms: bool
    shown: _Shown | None = None


@attrs.frozen
class _Instrument:
    """An instrument to be made, and what gives its values with their labels."""

    name: str
    kind: str
    unit: str
    help: str
    values: Callable[[_Shown], Iterable[tuple[dict[str, str], float]]]


class _Instruments:
    """The instruments of a meter. All recorders share them: a second one of one name would show nothing."""

    def __init__(self) -> None:
        self.sources: list[_Source] = []
        self._made: set[str] = set()

    def make(self, meter: Meter, instruments: Iterable[_Instrument]) -> None:
        """Make those that there are not yet."""
        make = {
            "counter": meter.create_observable_counter,
            "gauge": meter.create_observable_gauge,
            "sum": meter.create_observable_up_down_counter,
        }
        for one in instruments:
            if one.name not in self._made and one.kind in make and _NAME.fullmatch(one.name):
                # They are asked in the order in which they were made: the first one looks.
                callback = partial(self._observe, one, None if self._made else meter)
                self._made.add(one.name)
                make[one.kind](one.name, [callback], one.unit, one.help)

    def _observe(self, one: _Instrument, meter: Meter | None, _: CallbackOptions) -> list[Observation]:
        from opentelemetry.metrics import Observation

        sources = tuple(self.sources)
        if meter is not None:
            for source in sources:
                self._look(meter, source)
        return [
            Observation(value, {"system": shown.snapshot.system, **labels})
            for source in sources
            if (shown := source.shown) is not None
            for labels, value in one.values(shown)
        ]

    def _look(self, meter: Meter, source: _Source) -> None:
        # Read once: this may be a thread of the reader, and the loop may end `export_metrics` meanwhile.
        recorder = source.recorder
        if recorder is None:
            return
        source.shown = shown = _Shown.of(recorder.snapshot(), source.has_histograms)
        new = [_of_reading(found[0]) for name, found in shown.named.items() if name not in self._made]
        if new:
            # Later, and in a thread: the reader that asks holds a lock of the meter, maybe in one that waits
            # for the loop.
            make = partial(self.make, meter, new)
            recorder.system.token.run_sync_soon(lambda: trio.lowlevel.spawn_system_task(_in_thread, make))


async def _in_thread(make: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(make, abandon_on_cancel=True)


_instruments: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()


def _of_figure(figure: Figure) -> _Instrument:
    def values(shown: _Shown) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in figure.samples(shown.snapshot):
            yield dict(zip(figure.labels, labels, strict=True)), value

    name, unit = f"{_SCOPE}.{figure.name}", _UNITS.get(figure.unit, "1")
    return _Instrument(name, figure.kind, unit, figure.help, values)


def _of_times(what: str) -> _Instrument:
    """Where no exporter adds a histogram, this is its sum, and `messages` has the counts."""

    def values(shown: _Shown) -> Iterator[tuple[dict[str, str], float]]:
        for row in () if shown.has_histograms else shown.snapshot.operations:
            times: Histogram = getattr(row, what)
            yield {"path": row.path, "message_type": row.message_type}, times.total

    return _Instrument(f"{_SCOPE}.message_{what}", "counter", "s", HISTOGRAMS[what], values)


def _of_reading(first: Reading) -> _Instrument:
    """One instrument for all readings of a name and kind."""

    def values(shown: _Shown) -> Iterator[tuple[dict[str, str], float]]:
        for one in shown.named.get(name, ()):
            if one.kind == first.kind:
                yield _labels(one), one.value

    name = _name(first)
    return _Instrument(name, first.kind, _unit(first), first.help, values)


def _numbers(readings: Iterable[Reading], has_histograms: bool) -> Iterator[Reading]:
    """Give readings as instruments can observe them: of a histogram, the sum and the count."""
    for one in readings:
        if one.kind != "histogram":
            yield one
        elif not has_histograms:
            yield attrs.evolve(one, kind="sum")
            yield attrs.evolve(one, name=f"{one.name}_count", kind="counter", value=sum(one.counts))


def _name(reading: Reading) -> str:
    return f"{_SCOPE}.{reading.name}" if reading.path else reading.name


def _unit(reading: Reading) -> str:
    return _UNITS.get(reading.name.rpartition("_")[2], "1")


def _labels(reading: Reading) -> dict[str, str]:
    return dict([*reading.labels, *([("path", reading.path)] if reading.path else [])])


@contextmanager
def export_metrics(
    recorder: Recorder,
    meter_provider: MeterProvider | None = None,
    *,
    histograms: MetricExporter | None = None,
) -> Generator[None, None, None]:
    """Show the metrics as observable instruments of OpenTelemetry, inside the ``with``.

    Needs the extra ``tracing``.

    They have the names of those for Prometheus, with a dot behind ``trio_accel``. The reader of the provider
    gets a snapshot of the moment of its question. It may ask in a thread of its own, as the periodic one
    does: it waits then until the loop has a moment. So the provider must not be shut down on the loop's
    thread inside the ``with``. Afterwards the instruments show nothing.

    Figures of the program's own keep their names, and what actors show has ``trio_accel.`` in front. Such a
    figure that is new at one collection is there from the next one on.

    Args:
        recorder: The recorder.
        meter_provider: Where the instruments are made; the global one of OpenTelemetry if there is none.
        histograms: An exporter of this provider that `add_histograms` has made. It exports the times of
            messages, and histograms of the program's own, as histograms. Without it, their sums have the same
            names, and ``_count`` is behind the names of counts of one's own.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
        TypeError: `histograms` is another exporter.
    """
    import_extra("opentelemetry.metrics", "tracing")
    from opentelemetry.metrics import get_meter

    added = _sources(histograms)
    meter = get_meter(_SCOPE, meter_provider=meter_provider)
    instruments = _instruments.setdefault(meter, _Instruments())
    known = _numbers(recorder.readings(), added is not None)
    fixed = (*map(_of_figure, FIGURES), *map(_of_times, HISTOGRAMS))
    instruments.make(meter, (*fixed, *map(_of_reading, known)))
    source = _Source(recorder, has_histograms=added is not None)
    lists = [instruments.sources, *([] if added is None else [added])]
    for sources in lists:
        sources.append(source)
    try:
        yield
    finally:
        for sources in lists:
            sources.remove(source)
        source.recorder = source.shown = None


def _sources(exporter: MetricExporter | None) -> list[_Source] | None:
    if exporter is None:
        return None
    found: list[_Source] | None = getattr(exporter, "sources", None)
    if not isinstance(found, list):
        raise TypeError(
            f"export_metrics: histograms must be an exporter that add_histograms has made, got {exporter!r}"
        )
    return found


def add_histograms(exporter: MetricExporter) -> MetricExporter:
    """Wrap an exporter of OpenTelemetry's, to export histograms, too. Needs the extra ``tracing``.

    The instruments of OpenTelemetry have no histogram that is observed: each value would have to be handed
    over by itself. So the exporter adds the points to what the instruments have. Give it to a reader, such as
    ``PeriodicExportingMetricReader``, and to `export_metrics`.

    The histograms count from when recording began (cumulative), whatever temporality the exporter prefers for
    others. Their ranges are those for Prometheus. The least and the largest value are not known, and said to
    be infinite, as the SDK says it.

    Args:
        exporter: Exports the metrics. It is shut down with the wrapper.

    Raises:
        NotSupportedError: OpenTelemetry's SDK is not installed.
    """
    import_extra("opentelemetry.sdk.metrics.export", "tracing")
    from opentelemetry.sdk.metrics.export import MetricExporter

    class AddedHistograms(MetricExporter):
        def __init__(self) -> None:
            # The reader's question to an exporter has no public name.
            super().__init__(
                getattr(exporter, "_preferred_temporality", None),
                getattr(exporter, "_preferred_aggregation", None),
            )
            # `export_metrics` puts them in.
            self.sources: list[_Source] = []

        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
        ) -> MetricExportResult:
            # Each is read once: the loop may end `export_metrics` meanwhile.
            snapshots = [shown.snapshot for one in self.sources if (shown := one.shown) is not None]
            data = _with(metrics_data, _histograms(snapshots))
            # The base says nothing of these arguments' types.
            return exporter.export(data, timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            return exporter.force_flush(timeout_millis)

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
            exporter.shutdown(timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    return AddedHistograms()


def _with(data: MetricsData, added: list[Metric]) -> MetricsData:
    """Return the same data with metrics added to those of the meter."""

    def of_scope(scope: ScopeMetrics) -> ScopeMetrics:
        more = added if scope.scope.name == _SCOPE else []
        return replace(scope, metrics=[*scope.metrics, *more])

    resources = [
        replace(resource, scope_metrics=list(map(of_scope, resource.scope_metrics)))
        for resource in data.resource_metrics
    ]
    return replace(data, resource_metrics=resources)


def _histograms(snapshots: list[SystemSnapshot]) -> list[Metric]:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Metric
    from opentelemetry.sdk.metrics.export import Histogram as HistogramPoints

    found: dict[tuple[str, str, str], list[HistogramDataPoint]] = {}
    for snapshot in snapshots:
        for what, text in HISTOGRAMS.items():
            points = found.setdefault((f"{_SCOPE}.message_{what}", "s", text), [])
            for row in snapshot.operations:
                times: Histogram = getattr(row, what)
                labels = {"path": row.path, "message_type": row.message_type}
                points.append(_point(snapshot, labels, times.bounds, times.counts, times.total))
        for one in snapshot.readings:
            if one.kind == "histogram":
                points = found.setdefault((_name(one), _unit(one), one.help), [])
                points.append(_point(snapshot, _labels(one), one.bounds, one.counts, one.value))
    return [
        Metric(name, text, unit, HistogramPoints(points, AggregationTemporality.CUMULATIVE))
        for (name, unit, text), points in found.items()
    ]


def _point(
    snapshot: SystemSnapshot,
    labels: dict[str, str],
    bounds: tuple[float, ...],
    counts: tuple[int, ...],
    total: float,
) -> HistogramDataPoint:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    now = round(snapshot.time * 1e9)
    return HistogramDataPoint(
        attributes={"system": snapshot.system, **labels},
        start_time_unix_nano=now - round(snapshot.recorded * 1e9),
        time_unix_nano=now,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
        explicit_bounds=bounds,
        min=math.inf,
        max=-math.inf,
    )
