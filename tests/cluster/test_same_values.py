"""Replies are compared by their contents: equal ones are the same, others are not."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from trio_accel.cluster._frames import are_same

pytestmark = pytest.mark.no_device

TEXT, ITSELF = str(b"open", "ascii"), list[Any]()
ITSELF.append(ITSELF)
DIFFERENT: list[tuple[object, object]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ("a", b"a"),
    ([1], (1,)),
    ({1}, {True}),
    ({1}, frozenset({1})),
    ({1, 2}, {1, 3}),
    (np.zeros(3), np.zeros(3, "f")),
    (np.zeros(3), -np.zeros(3)),
    ([TEXT, TEXT], [TEXT]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([TEXT, TEXT], [TEXT, str(b"open", "ascii")]),
        ({0, 8}, {8, 0}),
        ({"x": [{0, 8}, frozenset({8, 0})]}, {"x": [{8, 0}, frozenset({0, 8})]}),
        ({frozenset({0, 8}), "a"}, {"a", frozenset({8, 0})}),
        (math.nan, math.nan),
        (np.arange(3), np.arange(3)),
        (ITSELF, ITSELF),
    ],
)
def test_equal_values_are_the_same(first: object, second: object) -> None:
    assert are_same(first, second)
    assert are_same(copy.deepcopy(first), copy.deepcopy(second))


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_values(first: object, second: object) -> None:
    assert not are_same(first, second)
    assert not are_same(second, first)
