"""The report of a replay: the first difference, and what else was not as it was recorded."""

from __future__ import annotations

from collections import Counter

import attrs

from ._compare import Difference

__all__ = ["Change", "Failure", "Report", "Skipped"]


@attrs.frozen
class Skipped:
    """An operation that was not asked again.

    Attributes:
        number: Its number.
        operation: Its name.
        reason: The reason.
    """

    number: int
    operation: str
    reason: str


@attrs.frozen
class Failure:
    """An operation that ended otherwise than it was recorded.

    Attributes:
        number: Its number.
        operation: Its name.
        recorded: Class and text of the error that was recorded; empty if there was none.
        replayed: The same of this run.
    """

    number: int
    operation: str
    recorded: str
    replayed: str


@attrs.frozen
class Change:
    """Something of the environment that is not as it was.

    Attributes:
        name: What.
        recorded: Its value then.
        replayed: Its value now.
    """

    name: str
    recorded: str
    replayed: str


@attrs.define(kw_only=True)
class Report:
    """The result of a replay. As a text, it begins with the first difference.

    Attributes:
        operations: Operations that were asked again.
        compared: Arrays that were compared.
        differences: Arrays that differ, in order.
        skipped: Operations that were not asked again.
        outside: Operations whose results came from outside, such as another device; the journal has them.
        failures: Operations that ended otherwise.
        environment: What has changed since the recording.
        seconds: How long it took.
    """

    operations: int = 0
    compared: int = 0
    differences: list[Difference] = attrs.field(factory=list[Difference])
    skipped: list[Skipped] = attrs.field(factory=list[Skipped])
    outside: list[str] = attrs.field(factory=list[str])
    failures: list[Failure] = attrs.field(factory=list[Failure])
    environment: list[Change] = attrs.field(factory=list[Change])
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, and nothing ended otherwise."""
        return not (self.differences or self.failures)

    def __str__(self) -> str:
        lines = [f"first difference: {self.differences[0]}"] if self.differences else ["no difference"]
        lines += [f"{one.name}: recorded {one.recorded}, here {one.replayed}" for one in self.environment]
        lines.append(
            f"{self.operations} operations, {self.compared} arrays compared, {len(self.differences)} differ, "
            f"{len(self.failures)} operations ended otherwise, {len(self.skipped)} were skipped, in "
            f"{self.seconds:.1f} s"
        )
        counts = Counter(one.operation for one in self.differences)
        lines += [f"  differ: {count} of {name}" for name, count in counts.most_common()]
        lines += [
            f"  operation {one.number}, {one.operation}: recorded {one.recorded or 'no error'}, here "
            f"{one.replayed or 'no error'}"
            for one in self.failures
        ]
        for name, count in Counter(self.outside).items():
            lines.append(f"  from outside: {count} of {name}")
        reasons = Counter((one.operation, one.reason) for one in self.skipped)
        lines += [f"  skipped: {count} of {name}: {why}" for (name, why), count in reasons.most_common()]
        return "\n".join(lines)


def note(report: Report, found: Difference | None) -> None:
    """Count a comparison."""
    report.compared += 1
    if found is not None:
        report.differences.append(found)
