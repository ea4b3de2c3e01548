"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..backends.base.modules import import_extra
from ._figures import FIGURES, HISTOGRAMS, Figure
from ._gpus import GpuWatch
from ._recorder import Recorder
from ._snapshot import Histogram, SystemSnapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["exposition", "prometheus", "prometheus_gpus"]

_PREFIX = "trio_accel_"
_EXTRA = "metrics"


def prometheus(recorder: Recorder) -> Collector:
    """Make a collector of `prometheus-client`, to be registered. Needs the extra ``metrics``.

    It takes a snapshot when it is asked, and keeps nothing. It may be asked in any thread: from another than
    the system's, it waits until the loop has a moment. Its text is served by ``make_asgi_app(registry)`` of
    `prometheus-client`, which every ASGI server on Trio can mount.

    Labels have as many values as there are actors and types of messages, but for at most 1000 actors, and at
    most `operations` pairs of the two (see `record`).

    Args:
        recorder: Who records.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    import_extra("prometheus_client", _EXTRA)
    return _collector(lambda: _metrics(recorder))


def prometheus_gpus(watch: GpuWatch) -> Collector:
    """Make a collector of `prometheus-client` for GPUs, to be registered. Needs the extra ``metrics``.

    It has the last readings of `watch_gpus`, and waits for no new ones. What is None in a reading is left
    out. The label ``gpu`` is the UUID, or the number where the UUID is not known.

    Args:
        watch: Who reads.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    import_extra("prometheus_client", _EXTRA)
    return _collector(lambda: _gpus(watch))


def _gpus(watch: GpuWatch) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    readings = watch.latest
    yield GaugeMetricFamily(f"{_PREFIX}gpu_age", "Seconds since GPUs were read.", watch.age, unit="seconds")
    up = GaugeMetricFamily(f"{_PREFIX}gpu_up", "1 if a GPU answers, 0 if it does not.", labels=("gpu",))
    for reading in readings:
        up.add_metric([_plain(reading.uuid or str(reading.index))], reading.error is None)
    yield up
    for name, unit, text in _OF_GPUS:
        family = CounterMetricFamily if name.startswith("ecc") else GaugeMetricFamily
        metric = family(f"{_PREFIX}gpu_{name}", text, labels=("gpu",), unit=unit)
        for reading in readings:
            value: float | None = getattr(reading, name)
            if value is not None:
                metric.add_metric([_plain(reading.uuid or str(reading.index))], value)
        yield metric


# Attribute of a reading, unit and meaning.
_OF_GPUS = (
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
    """The metrics as text, in the format of Prometheus or in OpenMetrics. Needs the extra ``metrics``.

    Args:
        recorder: Who records.
        openmetrics: Whether it is to be OpenMetrics 1.0, which ends with ``# EOF``.

    Raises:
        NotSupportedError: `prometheus-client` is not installed.
    """
    import_extra("prometheus_client", _EXTRA)
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_collector(lambda: _metrics(recorder)))
    encode, _ = choose_encoder("application/openmetrics-text" if openmetrics else "")
    return encode(registry).decode()


def _collector(metrics: Callable[[], Iterator[Metric]]) -> Collector:
    # Its base is only there with the extra.
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
    for figure in FIGURES:
        yield _metric(figure, snapshot)
    for what, text in HISTOGRAMS.items():
        yield _histogram(what, text, snapshot)


def _metric(figure: Figure, snapshot: SystemSnapshot) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    metric = family(
        f"{_PREFIX}{figure.name}", figure.help, labels=("system", *figure.labels), unit=figure.unit
    )
    for labels, value in figure.samples(snapshot):
        metric.add_metric([_plain(snapshot.system), *map(_plain, labels)], value)
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
