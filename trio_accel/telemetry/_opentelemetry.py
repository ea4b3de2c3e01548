"""Metrics for OpenTelemetry: observable instruments."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import attrs
import trio

from ..backends.base.kit.modules import import_extra
from ._metrics import Family, Labelled, families
from ._recorder import Recorder
from ._snapshot import Histogram, SystemSnapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

__all__ = ["export_metrics"]

# Name of the meter.
_SCOPE = "trio_accel"
_UNITS = {"seconds": "s", "bytes": "By"}
# Names that OpenTelemetry takes.
_NAME = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")


def _numbers(snapshot: SystemSnapshot) -> Iterator[tuple[str, Family]]:
    """Give metrics as instruments can observe them, by name: of a histogram, the sum and the count."""
    for family in families(snapshot):
        name = family.name if family.is_own else f"{_SCOPE}.{family.name}"
        if family.kind != "histogram":
            yield name, family
            continue
        found = [(labels, value) for labels, value in family.samples if isinstance(value, Histogram)]
        # Values of the program's own may be negative.
        kind = "sum" if family.is_own else "counter"
        sums: list[Labelled] = [(labels, one.total) for labels, one in found]
        yield name, attrs.evolve(family, kind=kind, samples=sums)
        counts: list[Labelled] = [(labels, one.count) for labels, one in found]
        yield f"{name}_count", attrs.evolve(family, kind="counter", unit="", samples=counts)


class _Instruments:
    """The instruments of a meter. All recorders share them: a second one of one name would show nothing."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        # The metrics of the last collection, by name.
        self._shown: dict[str, list[Family]] = {}
        self._made: set[str] = set()

    def make(self, meter: Meter, found: Iterable[tuple[str, Family]]) -> None:
        """Make those that there are not yet."""
        make = {
            "counter": meter.create_observable_counter,
            "gauge": meter.create_observable_gauge,
            "sum": meter.create_observable_up_down_counter,
        }
        for name, one in found:
            if name not in self._made and one.kind in make and _NAME.fullmatch(name):
                # They are asked in the order in which they were made: the first one looks.
                callback = partial(self._observe, name, None if self._made else meter)
                self._made.add(name)
                make[one.kind](name, [callback], _UNITS.get(one.unit, "1"), one.help)

    def _observe(self, name: str, meter: Meter | None, _: CallbackOptions) -> list[Observation]:
        from opentelemetry.metrics import Observation

        if meter is not None:
            self._look(meter)
        return [
            Observation(value, labels)
            for family in self._shown.get(name, ())
            for labels, value in family.samples
            if not isinstance(value, Histogram)
        ]

    def _look(self, meter: Meter) -> None:
        shown: dict[str, list[Family]] = {}
        # This may be a thread of the reader, and the loop may end `export_metrics` meanwhile.
        for recorder in tuple(self.recorders):
            found = list(_numbers(recorder.snapshot()))
            for name, family in found:
                shown.setdefault(name, []).append(family)
            if any(name not in self._made for name, _ in found):
                # Later, and in a thread: the reader that asks holds a lock of the meter, maybe in one that
                # waits for the loop.
                make = partial(self.make, meter, found)
                recorder.system.token.run_sync_soon(trio.lowlevel.spawn_system_task, _in_thread, make)
        self._shown = shown


async def _in_thread(make: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(make, abandon_on_cancel=True)


_instruments: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()


@contextmanager
def export_metrics(
    recorder: Recorder, meter_provider: MeterProvider | None = None
) -> Generator[None, None, None]:
    """Show the metrics as observable instruments of OpenTelemetry, inside the ``with``.

    Needs the extra ``tracing``.

    They have the names of those for Prometheus, with a dot behind ``trio_accel``. The reader of the provider
    gets a snapshot of the moment of its question. It may ask in a thread of its own, as the periodic one
    does: it waits then until the loop has a moment. So the provider must not be shut down on the loop's
    thread inside the ``with``. Afterwards the instruments show nothing.

    Figures of the program's own keep their names, and what actors show has ``trio_accel.`` in front. Such a
    figure that is new at one collection is there from the next one on. OpenTelemetry has no histogram that
    can be observed: of one there are the sum of its values, and with ``_count`` behind the name their number.

    Args:
        recorder: The recorder.
        meter_provider: Where the instruments are made; the global one of OpenTelemetry if there is none.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
    """
    import_extra("opentelemetry.metrics", "tracing")
    from opentelemetry.metrics import get_meter

    meter = get_meter(_SCOPE, meter_provider=meter_provider)
    instruments = _instruments.setdefault(meter, _Instruments())
    instruments.make(meter, _numbers(recorder.snapshot()))
    instruments.recorders.append(recorder)
    try:
        yield
    finally:
        instruments.recorders.remove(recorder)
