"""Groups of parameters, chosen by name, with a rate and a decay of their own (D229)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..actors import named_options, validator
from ._layout import FlatLayout
from ._optimizers import Optimizer, Schedule, as_schedule, check_number, rate_of

__all__ = ["ParameterGroup"]


def _rate(lr: float | Schedule | None) -> Schedule | None:
    return None if lr is None else as_schedule("ParameterGroup", lr)


def _decay(decay: float | None) -> float | None:
    return None if decay is None else check_number("ParameterGroup: weight_decay", decay)


@named_options
@attrs.frozen
class ParameterGroup:
    """Parameters with their own rate or decay, or frozen parameters.

    Attributes:
        matches: Returns whether a parameter belongs to the group, by its name.
        lr: The rate, or a schedule; None for the rate of the optimizer.
        weight_decay: The weight decay; None for the optimizer's.
        is_frozen: Whether its parameters stay as they are. They are not part of the state, so they are
            neither copied nor saved.
    """

    matches: Callable[[str], bool]
    lr: Schedule | None = attrs.field(default=None, kw_only=True, converter=_rate)
    weight_decay: float | None = attrs.field(default=None, kw_only=True, converter=_decay)
    is_frozen: bool = attrs.field(
        default=False,
        kw_only=True,
        validator=validator("be True or False", lambda value: value in (True, False)),
    )


def chosen(groups: Sequence[ParameterGroup], names: Iterable[str]) -> dict[str, int]:
    """Return the group number of each parameter, from 1 on; 0 without a group.

    Raises:
        ValueError: A group matches no parameter, or two groups match the same parameter.
    """
    group_numbers: dict[str, int] = {}
    for name in names:
        numbers = [number for number, group in enumerate(groups, 1) if group.matches(name)]
        if len(numbers) > 1:
            raise ValueError(f"groups: parameter {name!r} belongs to groups {numbers[0]} and {numbers[1]}")
        group_numbers[name] = numbers[0] if numbers else 0
    for number in range(1, len(groups) + 1):
        if number not in group_numbers.values():
            raise ValueError(f"groups: group {number} matches no parameter; there are {[*group_numbers][:5]}")
    return group_numbers


@attrs.frozen
class GroupPart:
    """Adjacent parameters of one group.

    Attributes:
        group: The group number; see `chosen`.
        start: The offset of the first element in the flat parameters.
        stop: The offset after the last element.
    """

    group: int
    start: int
    stop: int


def parts_of(layout: FlatLayout, groups: Mapping[str, int]) -> list[GroupPart]:
    """Return the parts of a layout in which the parameters of each group are adjacent."""
    parts: list[GroupPart] = []
    for name, span, _ in layout.entries():
        number, start = groups[name], span.start
        if parts and parts[-1].group == number:
            start = parts.pop().start
        parts.append(GroupPart(number, start, span.stop))
    # The zeros at the end belong to the last part, so that a single part is the whole array.
    return [*parts[:-1], attrs.evolve(parts[-1], stop=layout.padded)]


def within(parts: Sequence[GroupPart], rank_slice: slice) -> list[tuple[int, slice]]:
    """Return the groups in a rank's slice of the flat array, and their places in the slice."""
    spans = [
        (
            part.group,
            slice(
                max(part.start, rank_slice.start) - rank_slice.start,
                min(part.stop, rank_slice.stop) - rank_slice.start,
            ),
        )
        for part in parts
    ]
    return [(group, span) for group, span in spans if span.start < span.stop]


def rates_of(optimizer: Optimizer, groups: Sequence[ParameterGroup], step: int) -> list[float]:
    """Return the rate of the optimizer in a step, and the rate of each group."""
    schedules = [optimizer.rate, *(optimizer.rate if group.lr is None else group.lr for group in groups)]
    return [rate_of(schedule, step) for schedule in schedules]


def decays_of(optimizer: Optimizer, groups: Sequence[ParameterGroup]) -> list[Any]:
    """Return the weight decay of the optimizer, None without one, and of each group."""
    default: Any = optimizer.numbers.get("weight_decay")
    return [default, *(default if group.weight_decay is None else group.weight_decay for group in groups)]
