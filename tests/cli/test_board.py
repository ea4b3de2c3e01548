from __future__ import annotations

import json
import math

import attrs
import numpy as np
import pytest
from rich.text import Text

from trio_accel.cli._board import Check, StepResult, as_json


@attrs.frozen(kw_only=True)
class Data:
    numbers: tuple[float, ...]
    name: str | None

    def figures(self) -> Text:
        return Text()


@pytest.mark.parametrize(
    ("value", "limit", "is_ok"),
    [(1.0, 1.0, True), (1.1, 1.0, False), (0, 0, True), (math.nan, 1.0, False), (math.inf, 1.0, False)],
)
def test_a_check_holds_up_to_its_limit(value: float, limit: float, is_ok: bool) -> None:
    assert Check(name="x", value=value, limit=limit).is_ok is is_ok


def test_a_step_without_checks_has_shown_nothing() -> None:
    assert not StepResult(name="x", summary="", checks=[], data=Data(numbers=(), name=None)).is_ok


def test_the_document_has_no_nan() -> None:
    check = Check(name="x", value=math.nan, limit=float(np.float64(1.0)))
    data = Data(numbers=(1.0, math.inf, -math.inf, math.nan), name=None)
    result = StepResult(name="x", summary="s", checks=[check], notes=["n"], seconds=0.25, data=data)
    assert json.loads(json.dumps(as_json(result), allow_nan=False)) == {
        "name": "x",
        "ok": False,
        "summary": "s",
        "seconds": 0.25,
        "checks": [{"name": "x", "value": None, "limit": 1.0, "ok": False}],
        "notes": ["n"],
        "data": {"numbers": [1.0, None, None, None], "name": None},
    }


def test_what_has_no_form_in_json_is_refused() -> None:
    with pytest.raises(TypeError, match="complex has no form in JSON"):
        as_json(1j)
