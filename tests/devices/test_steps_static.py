"""Static values in a step's structure: equal but distinct values never share a plan."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import pytest

import trio_accel as ta


@dataclass(frozen=True)
class Settings:
    scale: Any
    note: str = field(default="", compare=False)


@attrs.frozen
class Options:
    scale: Any


@dataclass(frozen=True, slots=True)
class Nested:
    settings: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Level(enum.IntEnum):
    ONE = 1


class Plain:
    """Compares by value, as programs write it by hand."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and bool(self.scale == other.scale)

    def __hash__(self) -> int:
        return hash(self.scale)


class Slotted:
    __slots__ = ("scale",)
    __eq__ = lambda self, other: isinstance(other, Slotted)  # noqa: E731
    __hash__ = lambda self: 1  # noqa: E731

    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Number(int):
    """An int with a state of its own."""

    note: str

    def __new__(cls, value: int, note: str) -> Self:
        number = super().__new__(cls, value)
        number.note = note
        return number


# Pairs of values that compare equal, or might, and must not share a plan.
APART: list[tuple[Hashable, Hashable]] = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    (1, Level.ONE),
    (1.0, np.float64(1.0)),
    (np.float32(1), np.float64(1)),
    (np.int32(1), np.int64(1)),
    (np.float64(0.0), np.float64(-0.0)),
    (0j, -0j),
    (complex(0.0, -0.0), complex(0.0, 0.0)),
    (math.nan, -math.nan),
    ("a", np.str_("a")),
    (Decimal("1.0"), Decimal("1.00")),
    (Fraction(1), 1),
    (datetime(2020, 1, 1, 12, tzinfo=UTC), datetime(2020, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
    (range(0), range(1, 1)),
    (Number(1, "a"), Number(1, "b")),
    (frozenset({1}), frozenset({True})),
    (frozenset({0.0}), frozenset({-0.0})),
]
WRAPPED: list[Callable[[Any], Hashable]] = [
    lambda value: value,
    Settings,
    Options,
    Plain,
    Slotted,
    lambda value: Nested(Settings((value,))),
    lambda value: Pair(value, None),
    lambda value: (1, (value,)),
    lambda value: frozenset({(value,)}),
    lambda value: Nested(Plain(Options(frozenset({value})))),
]


def step_that_notes(seen: list[Any]) -> Callable[[ta.AccelRef, Any], Any]:
    @ta.step(static="value")
    def traced(x: ta.AccelRef, value: Any) -> ta.Call[ta.AccelRef]:
        seen.append(value)
        return x + 1

    return traced


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("wrap", WRAPPED)
async def test_equal_values_of_other_bits_or_types_do_not_share_a_plan(
    device: ta.Device, wrap: Callable[[Any], Hashable]
) -> None:
    x = await device.put(np.ones(2))
    for first, second in APART:
        seen: list[Any] = []
        traced = step_that_notes(seen)
        for value in (wrap(first), wrap(second)):
            await traced(x, value)
        assert len(seen) == 2, (first, second)


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("wrap", WRAPPED)
async def test_a_value_made_again_shares_the_plan(device: ta.Device, wrap: Callable[[Any], Hashable]) -> None:
    x = await device.put(np.ones(2))
    for make in (
        lambda: float("nan"),
        lambda: -0.0,
        lambda: np.float32(3),
        lambda: Level.ONE,
        lambda: "text",
    ):
        seen: list[Any] = []
        traced = step_that_notes(seen)
        for _ in range(3):
            await traced(x, wrap(make()))
        # A class of which only the program knows that two instances are equal may be traced again for NaN.
        assert len(seen) == 1, make()


@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_field_that_does_not_count_for_equality_does_not_count_here(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    seen: list[Any] = []
    traced = step_that_notes(seen)
    await traced(x, Settings(1.0, "a"))
    await traced(x, Settings(1.0, "b"))
    assert len(seen) == 1


@pytest.mark.parametrize("isolation", ["inline"])
async def test_objects_without_equality_and_functions_are_themselves(device: ta.Device) -> None:
    class Own:
        pass

    x = await device.put(np.ones(2))
    seen: list[Any] = []
    traced = step_that_notes(seen)
    own = Own()
    for value in (own, own, len, len, Own, Own, own.__init__, Own(), math.sqrt):
        await traced(x, value)
    assert [value for value in seen if value is own or value is len or value is Own] == [own, len, Own]
    assert len(seen) == 6


@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_value_in_a_cycle_and_an_uncopyable_value(device: ta.Device) -> None:
    class Loop(Plain):
        def __init__(self) -> None:
            super().__init__(1)
            self.own = self

    class Closed(Plain):
        def __reduce_ex__(self, _: Any) -> Any:
            raise TypeError("not copied")

    x = await device.put(np.ones(2))
    seen: list[Any] = []
    traced = step_that_notes(seen)
    for value in (Loop(), Loop(), Closed(1), Closed(1), Closed(2)):
        await traced(x, value)
    assert len(seen) == 3
