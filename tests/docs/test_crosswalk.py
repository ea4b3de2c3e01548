"""The page "From NumPy": each row is computed by NumPy and on a device, and the page has the tables."""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

import crosswalk
import numpy as np
import pytest
import scipy.special

import trio_accel as ta

CASES = [row for rows in crosswalk.ROWS.values() for row in rows]


def values() -> dict[str, Any]:
    rng = np.random.default_rng(11)
    a = rng.standard_normal((5, 5))
    return {
        "x": rng.standard_normal((4, 6), np.float32),
        "y": rng.standard_normal((4, 6), np.float32),
        "a": a @ a.T + 5 * np.eye(5),
        "b": rng.standard_normal(5),
        "v": rng.standard_normal(6, np.float32),
        "t": rng.standard_normal((3, 4, 6), np.float32),
        "z": rng.standard_normal(8) + 1j * rng.standard_normal(8),
        "m": rng.random((4, 6)) < 0.5,
        "i": np.array([3, 0, -1]),
        "k": rng.integers(0, 6, (4, 2)),
        "n": rng.integers(0, 5, 20),
        "host": rng.standard_normal(7),
    }


def compiled(text: str) -> tuple[CodeType, bool]:
    tree = ast.parse(text)
    is_statement = not isinstance(tree.body[0], ast.Expr)
    mode = "exec" if is_statement else "eval"
    return compile(text, "row", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), is_statement


@pytest.mark.parametrize(("numpy_text", "text"), [(row[0], row[2]) for row in CASES])
async def test_a_row_is_true(device: ta.Device, numpy_text: str, text: str) -> None:
    names = values()
    on = {name: await device.put(value) for name, value in names.items()}
    code, changes = compiled(numpy_text)
    want: Any = eval(code, {"np": np, "scipy": scipy, **names})
    made = eval(compiled(text)[0], {"ta": ta, "device": device, **on, "host": names["host"]})
    got: Any = await made if hasattr(made, "__await__") else made
    if changes:
        want, got = names["x"], on["x"]
    got = await got.to_host() if isinstance(got, ta.AccelRef) else got
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_the_page_has_the_tables() -> None:
    text = crosswalk.PAGE.read_text(encoding="utf-8")
    assert crosswalk.page(text) == text, "run python docs/crosswalk.py"
    assert all(f"<!-- table: {title} -->" in text for title in crosswalk.ROWS)
