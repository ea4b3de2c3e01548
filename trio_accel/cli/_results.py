"""What a step of the demo found: one shape for the terminal and for ``--json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import trio_accel as ta

__all__ = [
    "Bench",
    "Check",
    "Progress",
    "Step",
    "StepResult",
    "as_json",
    "count_of",
    "relative_error",
    "worst_of",
]


@attrs.frozen(kw_only=True)
class Check:
    """A number that must not exceed a limit; NaN exceeds every limit.

    Attributes:
        name: What was measured.
        value: The measured number.
        limit: The largest number that is right.
    """

    name: str
    value: float
    limit: float

    @property
    def is_ok(self) -> bool:
        """Whether the number is within its limit."""
        return bool(self.value <= self.limit)


@attrs.frozen(kw_only=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        name: The step's name on the command line.
        summary: One line for a person.
        seconds: How long the step took.
        checks: What was compared with NumPy or SciPy; the step holds if each is within its limit.
        notes: Anything that a reader should know, one line each.
        data: The step's own figures, a frozen attrs class.
    """

    name: str
    summary: str
    seconds: float = 0.0
    checks: Sequence[Check]
    notes: Sequence[str] = ()
    data: attrs.AttrsInstance

    @property
    def is_ok(self) -> bool:
        """Whether there is a check and every check is within its limit."""
        return bool(self.checks) and all(check.is_ok for check in self.checks)


class Progress(Protocol):
    """Where a step says how far it is."""

    def update(self, done: int, total: int, text: str) -> None:
        """``done`` of ``total`` parts are finished; ``text`` says what is going on."""
        ...

    def tell(self, text: str) -> None:
        """Something has happened; a person reads it until the step ends."""
        ...

    def watch(self, look: Callable[[], str]) -> None:
        """Show what ``look`` returns, some lines, anew all the time until the step ends."""
        ...


@attrs.frozen(kw_only=True)
class Bench:
    """What a step works with.

    Attributes:
        system: The actor system.
        device: The device that every step of this run uses.
        progress: Where to report.
    """

    system: ta.System
    device: ta.Device
    progress: Progress


class Step(Protocol):
    """One step of the demo."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    async def prepare(self) -> None:
        """Read and check every input, before a device is opened.

        Raises:
            InputError: An input cannot be used.
        """
        ...

    async def run(self, bench: Bench) -> StepResult:
        """Do it.

        Raises:
            InputError: The work showed that an input cannot be used.
        """
        ...


def relative_error(result: NDArray[Any], reference: NDArray[Any]) -> float:
    """Compare a result with a reference, relative to its Frobenius norm."""
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))


def worst_of(errors: Sequence[float]) -> float:
    """Find the largest error; NaN if one is NaN, or if there is none."""
    # `max` would pass over a NaN that does not come first.
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan)


def count_of(number: int, noun: str) -> str:
    """``"1 crash"``, but ``"2 crashes"``: a number with its noun."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('sh', 'ss')) else 's'}"


def as_json(value: object) -> object:
    """``value`` in terms of JSON: attrs classes become objects, numbers that are not finite become null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    cls = type(value)
    if attrs.has(cls):
        found = {field.name: as_json(getattr(value, field.name)) for field in attrs.fields(cls)}
        if isinstance(value, StepResult):
            return {"name": value.name, "ok": value.is_ok, **found}
        return {**found, "ok": value.is_ok} if isinstance(value, Check) else found
    return _container_as_json(value)


def _container_as_json(value: object) -> object:
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return {str(key): as_json(item) for key, item in items.items()}
    if isinstance(value, Sequence):
        return [as_json(item) for item in cast("Sequence[object]", value)]
    raise TypeError(f"{type(value).__name__} has no form in JSON")
