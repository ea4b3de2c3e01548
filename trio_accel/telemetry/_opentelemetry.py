"""Metrics for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from ..backends.base.extras import import_extra
from ._figures import FIGURES, Figure, Sample
from ._recorder import Recorder
from ._snapshot import SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

__all__ = ["export_metrics"]

_UNITS = {"seconds": "s", "bytes": "By", "": "1"}


def _sums(what: str, snapshot: SystemSnapshot) -> Iterable[Sample]:
    for row in snapshot.operations:
        yield (row.path, row.message_type), (row.queue if what == "queue" else row.run).total


_ALL = (
    *FIGURES,
    # OpenTelemetry has no histogram that is observed: these are its sums, and `messages` has the counts.
    *(
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
    ),
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


@contextmanager
def export_metrics(
    recorder: Recorder, meter_provider: MeterProvider | None = None
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

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
    """
    import_extra("opentelemetry.metrics", "tracing")
    from opentelemetry.metrics import get_meter

    meter = get_meter("trio_accel", meter_provider=meter_provider)
    latest = _Latest(recorder)
    for index, figure in enumerate(_ALL):
        make = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
        # They are asked in the order in which they were made.
        callback = _callback(figure, latest, is_first=not index)
        make(f"trio_accel.{figure.name}", [callback], _UNITS[figure.unit], figure.help)
    try:
        yield
    finally:
        latest.recorder = latest.snapshot = None


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
