"""The report of a replay: the first difference, and other deviations from the recording."""

from __future__ import annotations

from collections import Counter

import attrs

from ._compare import Difference

__all__ = ["Change", "Failure", "Report", "Skipped"]

NO_END = "no end: the recording was not ended, or entries at the end of the journal are missing"


@attrs.frozen
class Skipped:
    """An operation that was not run again.

    Attributes:
        number: The number of the operation.
        operation: The name of the operation.
        reason: The reason.
    """

    number: int
    operation: str
    reason: str


@attrs.frozen
class Failure:
    """An operation with another outcome than in the recording.

    Attributes:
        number: The number of the operation.
        operation: The name of the operation.
        recorded: Class and text of the recorded error; empty if there was none.
        replayed: The same for this run.
    """

    number: int
    operation: str
    recorded: str
    replayed: str


@attrs.frozen
class Change:
    """A difference between the environments.

    Attributes:
        name: The name of the property.
        recorded: Its recorded value.
        replayed: Its value now.
    """

    name: str
    recorded: str
    replayed: str


@attrs.define(kw_only=True)
class Report:
    """The result of a replay. As a text, it begins with the first difference.

    Attributes:
        operations: The number of operations run again.
        compared: The number of compared arrays.
        differences: The arrays that differ, in order.
        skipped: The operations that were not run again.
        outside: Operations with results from outside, such as another device; the journal has the results.
        failures: Operations with another outcome.
        environment: The changes since the recording.
        left_out: The number of bytes of an incomplete last entry of the journal, which is left out.
        is_ended: Whether the journal has an end. Without it, the recording was not ended, for example because
            of a kill, or entries at the end are missing.
        seconds: The duration.
    """

    operations: int = 0
    compared: int = 0
    differences: list[Difference] = attrs.field(factory=list[Difference])
    skipped: list[Skipped] = attrs.field(factory=list[Skipped])
    outside: list[str] = attrs.field(factory=list[str])
    failures: list[Failure] = attrs.field(factory=list[Failure])
    environment: list[Change] = attrs.field(factory=list[Change])
    left_out: int = 0
    is_ended: bool = True
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether there are no differences and no other outcomes."""
        return not (self.differences or self.failures)

    def __str__(self) -> str:
        lines = [f"first difference: {self.differences[0]}"] if self.differences else ["no difference"]
        lines += [
            f"{change.name}: recorded {change.recorded}, here {change.replayed}"
            for change in self.environment
        ]
        lines.append(
            f"{self.operations} operations, {self.compared} arrays compared, {len(self.differences)} differ, "
            f"{len(self.failures)} operations ended otherwise, {len(self.skipped)} were skipped, in "
            f"{self.seconds:.1f} s"
        )
        if self.left_out:
            lines.append(f"  left out: an incomplete last entry of {self.left_out} bytes")
        elif not self.is_ended:
            lines.append(f"  {NO_END}")
        counts = Counter(difference.operation for difference in self.differences)
        lines += [f"  differ: {count} of {name}" for name, count in counts.most_common()]
        lines += [
            f"  operation {failure.number}, {failure.operation}: recorded "
            f"{failure.recorded or 'no error'}, here {failure.replayed or 'no error'}"
            for failure in self.failures
        ]
        for name, count in Counter(self.outside).items():
            lines.append(f"  from outside: {count} of {name}")
        reasons = Counter((skip.operation, skip.reason) for skip in self.skipped)
        lines += [
            f"  skipped: {count} of {name}: {reason}" for (name, reason), count in reasons.most_common()
        ]
        return "\n".join(lines)


def note(report: Report, difference: Difference | None) -> None:
    """Count a comparison."""
    report.compared += 1
    if difference is not None:
        report.differences.append(difference)
