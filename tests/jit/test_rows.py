"""Expressions along axes: which results they have, in one launch and in steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.backends.base.expressions import parse

pytestmark = pytest.mark.conformance

# Rows of this length are reduced by launches of their own.
LONG = (1 << 17) + 8


def rows(text: str, *inputs: str) -> ta.jit.Reduction:
    return ta.jit.Reduction(text, operation="jit.rows", inputs=inputs, library="trio_accel.jit:JitActor")


@pytest.mark.parametrize("post", ["n", "n // 2", "300", "n - 300"])
async def test_a_result_may_read_only_numbers(device: ta.Device, post: str) -> None:
    x = await device.put(np.ones((3, 4), np.int8))
    want = eval(post, {"n": 4})
    for keepdims in (False, True):
        found = await ta.jit.reduction("x", "max", post=post)(x, axis=1, keepdims=keepdims)
        np.testing.assert_array_equal(await found.to_host(), np.full((3, 1) if keepdims else 3, want))
    whole = await rows("s = sum(x); y = x * n", "x")(x, axis=1)
    np.testing.assert_array_equal(await whole.to_host(), np.full((3, 4), 4))
    np.testing.assert_array_equal(await (await rows("s = sum(x); y = 3 * n", "x")(x)).to_host(), 36)


@pytest.mark.parametrize(
    "body",
    [
        "    y = y * 2\n    if x > 1: break",
        "    y = b; b = c; c = d; d = x",
        "    for j in range(4):\n        t = j\n        if t > x: break\n        y = y + t",
    ],
)
async def test_a_result_is_whole_that_a_loop_makes_of_elements(device: ta.Device, body: str) -> None:
    text = f"y = sum(x); b = y; c = y; d = y\nfor k in range(4):\n{body}"
    x = np.arange(6.0).reshape(2, 3)
    found = await rows(text + "\nz = y", "x")(await device.put(x), axis=1)
    want = np.empty((2, 3))
    for row, column in np.ndindex(2, 3):
        names: dict[str, Any] = {"x": x[row, column], "total": x[row].sum()}
        exec(text.replace("sum(x)", "total"), names)
        want[row, column] = names["y"]
    np.testing.assert_array_equal(await found.to_host(), want)


def test_a_loop_reads_an_input_that_no_iteration_changes() -> None:
    text = "s = sum(x + y)\nfor k in range(n):\n    y = s\nz = y"
    assert parse(text, ("x", "y"), is_along=True).read_outside == {"y"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("s = max(x)\nr = x * 0\nfor k in range(3):\n    t = x * k\n    r = r + t\ny = r / s", {}),
        ("s = max(x)\nr = x * 0\nfor k in range(3):\n    r = r + x\n    if r > 1: break\ny = sum(r) + s", {}),
        ("s = sum(x); y = 3", {}),
        ("s = sum(x); y = x + s * n", {"n": 5}),
        ("s = sum(x); t = sum(s); y = x + t", {}),
        ("s = sum(c); y = max(x) + s", {"c": 0.5}),
    ],
)
async def test_steps_make_the_same_as_one_launch(
    device: ta.Device, text: str, numbers: dict[str, float]
) -> None:
    made = rows(text, "x", *numbers)
    x = await device.put(np.random.default_rng(4).integers(-2, 3, (2, LONG)).astype(float))
    message = made.compute(x, *numbers.values(), axis=1)
    whole, steps = await device.ask(message), await made.ask(message)
    np.testing.assert_allclose(await steps.to_host(), await whole.to_host(), rtol=1e-12)
