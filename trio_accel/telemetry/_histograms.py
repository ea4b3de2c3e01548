"""Histograms for OpenTelemetry, which its instruments cannot observe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends.base.extras import import_extra
from ._snapshot import Histogram, SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import (
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricExportResult,
        MetricsData,
    )

__all__ = ["HISTOGRAMS", "SCOPE", "add_histograms"]

SCOPE = "trio_accel"
"""Name of the meter."""

HISTOGRAMS = {
    "queue": "Seconds from sending a message to its handler's start.",
    "run": "Seconds from the start of a message's handler to its end.",
}
"""What each of the two is."""

_Source = Callable[[], SystemSnapshot | None]


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
            # What a reader asks an exporter for has no other name.
            super().__init__(
                getattr(exporter, "_preferred_temporality", None),
                getattr(exporter, "_preferred_aggregation", None),
            )
            # Each gives the snapshot that was collected last; `export_metrics` puts it in.
            self.sources: list[_Source] = []

        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
        ) -> MetricExportResult:
            snapshots = [found for source in self.sources if (found := source()) is not None]
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
    """The same data with metrics added to those of the meter."""
    return replace(
        data,
        resource_metrics=[
            replace(
                resource,
                scope_metrics=[
                    replace(scope, metrics=[*scope.metrics, *added]) if scope.scope.name == SCOPE else scope
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
        name=f"{SCOPE}.message_{what}",
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
