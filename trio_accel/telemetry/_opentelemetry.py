"""Metrics for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from ..backends.base.extras import import_extra
from ._figures import FIGURES, Figure, Sample
from ._histograms import SCOPE
from ._recorder import Recorder
from ._snapshot import SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.sdk.metrics.export import MetricExporter

__all__ = ["export_metrics"]

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

    def take(self) -> None:
        """Take a new one."""
        if self.recorder is not None:
            self.snapshot = self.recorder.snapshot()

    def last(self) -> SystemSnapshot | None:
        """The one that was taken last."""
        return self.snapshot


@contextmanager
def export_metrics(
    recorder: Recorder,
    meter_provider: MeterProvider | None = None,
    *,
    histograms: MetricExporter | None = None,
) -> Generator[None, None, None]:
    """Show the metrics as observable instruments of OpenTelemetry, inside the ``with``.

    Needs the extra ``tracing``.

    They have the names of those for Prometheus, with a dot behind ``trio_accel``. What the reader of the
    provider asks for is a snapshot of that moment. It may ask in a thread of its own, as the periodic one
    does: it waits then until the loop has a moment. So the provider must not be shut down on the loop's
    thread inside the ``with``. Afterwards the instruments show nothing.

    Args:
        recorder: Who records.
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
    meter = get_meter(SCOPE, meter_provider=meter_provider)
    latest = _Latest(recorder)
    figures = FIGURES if sources is not None else (*FIGURES, *_SUMS)
    for index, figure in enumerate(figures):
        make = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
        # They are asked in the order in which they were made.
        callback = _callback(figure, latest, is_first=not index)
        make(f"trio_accel.{figure.name}", [callback], _UNITS[figure.unit], figure.help)
    if sources is not None:
        sources.append(latest.last)
    try:
        yield
    finally:
        if sources is not None:
            sources.remove(latest.last)
        latest.recorder = latest.snapshot = None


def _sources(exporter: MetricExporter | None) -> list[Callable[[], SystemSnapshot | None]] | None:
    if exporter is None:
        return None
    found: list[Callable[[], SystemSnapshot | None]] | None = getattr(exporter, "sources", None)
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
        if is_first or latest.snapshot is None:
            latest.take()
        snapshot = latest.snapshot
        if snapshot is None:
            return []
        return [
            Observation(value, {"system": snapshot.system, **dict(zip(figure.labels, labels, strict=True))})
            for labels, value in figure.samples(snapshot)
        ]

    return observe
