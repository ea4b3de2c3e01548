from __future__ import annotations

import json
import math

import attrs
import numpy as np
import pytest

from trio_accel.cli._console import as_json, count_of
from trio_accel.cli._recover import Check


@attrs.frozen
class Inner:
    value: float


@attrs.frozen
class Data:
    numbers: tuple[float, ...]
    by_name: dict[str, Inner]
    name: str | None


@pytest.mark.parametrize(
    ("value", "limit", "is_ok"),
    [(1.0, 1.0, True), (1.1, 1.0, False), (0, 0, True), (math.nan, 1.0, False), (math.inf, 1.0, False)],
)
def test_a_check_holds_up_to_its_limit(value: float, limit: float, is_ok: bool) -> None:
    assert Check("x", value, limit).is_ok is is_ok


def test_the_document_has_no_nan() -> None:
    numbers = (1.0, math.inf, -math.inf, math.nan, float(np.float64(0.5)))
    data = Data(numbers=numbers, by_name={"a": Inner(math.nan)}, name=None)
    assert json.loads(json.dumps(as_json(data), allow_nan=False)) == {
        "numbers": [1.0, None, None, None, 0.5],
        "by_name": {"a": {"value": None}},
        "name": None,
    }


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "fault", "0 faults"), (1, "row", "1 row"), (2, "goal", "2 goals")],
)
def test_a_number_with_its_noun(number: int, noun: str, text: str) -> None:
    assert count_of(number, noun) == text
