"""Metrics for OpenTelemetry: observable instruments, and histograms, which no instrument can observe."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import attrs

from ..backends.base.modules import import_extra
from ._metrics import FIGURES, HISTOGRAMS, Figure, Sample
from ._recorder import Recorder
from ._snapshot import Histogram, SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.sdk.metrics.export import (
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricExportResult,
        MetricsData,
    )

__all__ = ["add_histograms", "export_metrics"]

# Name of the meter.
_SCOPE = "trio_accel"
_UNITS = {"seconds": "s", "bytes": "By", "": "1"}


def _sums(what: str, snapshot: SystemSnapshot) -> Iterable[Sample]:
    for row in snapshot.operations:
        yield (row.path, row.message_type), (row.queue if what == "queue" else row.run).total


# Where no exporter adds the histograms, these are their sums, and `messages` has the counts.
_SUMS = tuple(
    Figure(
        name=f"message_{what}",
        unit="seconds",
        kind="counter",
        help=text,
        labels=("path", "message_type"),
        samples=partial(_sums, what),
    )
    for what, text in (
        ("queue", "Seconds that messages were queued, in all."),
        ("run", "Seconds that messages were served, in all."),
    )
)


@attrs.define(eq=False)
class _Latest:
    """The snapshot that all instruments of one collection show."""

    recorder: Recorder | None
    snapshot: SystemSnapshot | None = None


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

    Args:
        recorder: The recorder.
        meter_provider: Where the instruments are made; the global one of OpenTelemetry if there is none.
        histograms: An exporter of this provider that `add_histograms` has made. It exports the times of
            messages as histograms. Without it, their sums are counters of the same names.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
        TypeError: `histograms` is another exporter.
    """
    import_extra("opentelemetry.metrics", "tracing")
    from opentelemetry.metrics import get_meter

    sources = _sources(histograms)
    meter = get_meter(_SCOPE, meter_provider=meter_provider)
    latest = _Latest(recorder)
    figures = FIGURES if sources is not None else (*FIGURES, *_SUMS)
    for index, figure in enumerate(figures):
        make = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
        # They are asked in the order in which they were made.
        callback = _callback(figure, latest, is_first=not index)
        make(f"trio_accel.{figure.name}", [callback], _UNITS[figure.unit], figure.help)
    if sources is not None:
        sources.append(latest)
    try:
        yield
    finally:
        if sources is not None:
            sources.remove(latest)
        latest.recorder = latest.snapshot = None


def _sources(exporter: MetricExporter | None) -> list[_Latest] | None:
    if exporter is None:
        return None
    found: list[_Latest] | None = getattr(exporter, "sources", None)
    if not isinstance(found, list):
        raise TypeError(
            f"export_metrics: histograms must be an exporter that add_histograms has made, got {exporter!r}"
        )
    return found


def _callback(
    figure: Figure, latest: _Latest, *, is_first: bool
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        # Read once: this may be a thread of the reader, and the loop may end `export_metrics` meanwhile.
        recorder = latest.recorder
        if recorder is not None and (is_first or latest.snapshot is None):
            latest.snapshot = recorder.snapshot()
        snapshot = latest.snapshot
        if snapshot is None:
            return []
        return [
            Observation(value, {"system": snapshot.system, **dict(zip(figure.labels, labels, strict=True))})
            for labels, value in figure.samples(snapshot)
        ]

    return observe


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
            self.sources: list[_Latest] = []

        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
        ) -> MetricExportResult:
            # Each is read once: the loop may end `export_metrics` meanwhile.
            snapshots = [found for one in self.sources if (found := one.snapshot) is not None]
            added = [_metric(what, snapshots) for what in HISTOGRAMS] if snapshots else []
            data = _with(metrics_data, added)
            # The base says nothing of these arguments' types.
            return exporter.export(data, timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            return exporter.force_flush(timeout_millis)

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
            exporter.shutdown(timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    return AddedHistograms()


def _with(data: MetricsData, added: list[Metric]) -> MetricsData:
    """Return the same data with metrics added to those of the meter."""
    return replace(
        data,
        resource_metrics=[
            replace(
                resource,
                scope_metrics=[
                    replace(scope, metrics=[*scope.metrics, *added]) if scope.scope.name == _SCOPE else scope
                    for scope in resource.scope_metrics
                ],
            )
            for resource in data.resource_metrics
        ],
    )


def _metric(what: str, snapshots: list[SystemSnapshot]) -> Metric:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Metric
    from opentelemetry.sdk.metrics.export import Histogram as HistogramPoints

    points = [point for snapshot in snapshots for point in _points(what, snapshot)]
    return Metric(
        name=f"{_SCOPE}.message_{what}",
        description=HISTOGRAMS[what],
        unit="s",
        data=HistogramPoints(points, AggregationTemporality.CUMULATIVE),
    )


def _points(what: str, snapshot: SystemSnapshot) -> Iterator[HistogramDataPoint]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    now = round(snapshot.time * 1e9)
    for row in snapshot.operations:
        times: Histogram = row.queue if what == "queue" else row.run
        yield HistogramDataPoint(
            attributes={"system": snapshot.system, "path": row.path, "message_type": row.message_type},
            start_time_unix_nano=now - round(snapshot.recorded * 1e9),
            time_unix_nano=now,
            count=times.count,
            sum=times.total,
            bucket_counts=times.counts,
            explicit_bounds=times.bounds,
            min=math.inf,
            max=-math.inf,
        )
