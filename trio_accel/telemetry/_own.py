"""Counters, gauges and histograms of the program's own, which its recorder shows beside the others."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..actors import Reading, Spread, is_number
from ._tally import BOUNDS

__all__ = ["OwnCounter", "OwnGauge", "OwnHistogram", "OwnMetrics"]

_NAME = re.compile(r"(?!trio_accel)[a-zA-Z][a-zA-Z0-9_]{0,99}")
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,49}")
_TAKEN = ("system", "path", "le", "quantile")
# Of one metric, values of labels that are told apart, and metrics of a recorder.
_MOST_LABELS, _MOST = 100, 1000
_OTHERS = "(other)"
_Labels = tuple[tuple[str, str], ...]
OwnT = TypeVar("OwnT", bound="_Own")


class _Own:
    """One metric, with a value for each combination of the values of its labels."""

    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:  # noqa: A002  # as in metrics
        self.name, self.help = name, help
        self._values: dict[_Labels, float] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def readings(self) -> Iterator[Reading]:
        """Yield its values now."""
        for labels, value in self._values.items():
            yield Reading(name=self.name, kind=self.kind, help=self.help, value=value, labels=labels)

    def _key(self, labels: dict[str, str]) -> _Labels:
        key = tuple(sorted((name, str(value)) for name, value in labels.items()))
        if key in self._values:
            return key
        for name in labels:
            if _LABEL.fullmatch(name) is None or name in _TAKEN:
                raise ValueError(f"{self!r}: {name!r} is no name of a label")
        # A client that makes up ever new values must not fill the memory.
        return key if len(self._values) < _MOST_LABELS else tuple((name, _OTHERS) for name, _ in key)

    def _number(self, value: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self!r}: a value is a number, not {value!r}")
        if not is_number(value, -sys.float_info.max, sys.float_info.max):
            raise ValueError(f"{self!r}: a value is finite, not {value!r}")
        return float(value)


class OwnCounter(_Own):
    """A count that only rises. Made by `Recorder.counter`."""

    kind = "counter"

    def add(self, value: float = 1.0, **labels: str) -> None:
        """Count so much more.

        Args:
            value: At least 0.
            labels: What to count it by. Beyond 100 combinations, it counts for ``"(other)"``.

        Raises:
            ValueError: The value is negative, NaN or infinite, or a label has no valid name.
            TypeError: The value is no number.
        """
        if self._number(value) < 0:
            raise ValueError(f"{self!r}: a counter only rises, not by {value!r}")
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + value


class OwnGauge(_Own):
    """A value that goes up and down. Made by `Recorder.gauge`."""

    def set(self, value: float, **labels: str) -> None:
        """Set its value; arguments and errors are those of `OwnCounter.add`, but for the sign."""
        self._values[self._key(labels)] = self._number(value)


class OwnHistogram(_Own):
    """Values counted by ranges. Made by `Recorder.histogram`."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:  # noqa: A002  # as in metrics
        super().__init__(name, help)
        self._bounds = tuple(map(self._number, bounds))
        if not self._bounds or list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"{self!r}: bounds rise, and there is at least one, got {bounds!r}")
        self._spreads: dict[_Labels, Spread] = {}

    def observe(self, value: float, **labels: str) -> None:
        """Count a value; arguments and errors are those of `OwnCounter.add`, but for the sign."""
        value = self._number(value)
        key = self._key(labels)
        self._values[key] = 0.0
        if key not in self._spreads:
            self._spreads[key] = Spread(self._bounds)
        self._spreads[key].add(value)

    def readings(self) -> Iterator[Reading]:
        """Yield its values now."""
        for labels, spread in self._spreads.items():
            yield spread.reading(self.name, self.help, labels)


class OwnMetrics:
    """The metrics of a program's own, by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Own] = {}

    def readings(self) -> Iterator[Reading]:
        """Yield all values now."""
        for metric in self._metrics.values():
            yield from metric.readings()

    def counter(self, name: str, help: str) -> OwnCounter:  # noqa: A002  # as in metrics
        """See `Recorder.counter`."""
        return self._of(OwnCounter, name, lambda: OwnCounter(name, help))

    def gauge(self, name: str, help: str) -> OwnGauge:  # noqa: A002  # as in metrics
        """See `Recorder.gauge`."""
        return self._of(OwnGauge, name, lambda: OwnGauge(name, help))

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> OwnHistogram:  # noqa: A002  # as in metrics
        """See `Recorder.histogram`."""
        return self._of(OwnHistogram, name, lambda: OwnHistogram(name, help, bounds or BOUNDS))

    def _of(self, kind: type[OwnT], name: str, make: Callable[[], OwnT]) -> OwnT:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(f"a metric's name is letters, digits and _, and not trio_accel's, got {name!r}")
        known = self._metrics.get(name)
        if known is None:
            if len(self._metrics) >= _MOST:
                raise ValueError(f"there are {_MOST} metrics already: tell values apart by labels, not names")
            known = self._metrics[name] = make()
        if not isinstance(known, kind):
            raise ValueError(f"{name} is a {known.kind} already")  # noqa: TRY004  # of a name
        return known
