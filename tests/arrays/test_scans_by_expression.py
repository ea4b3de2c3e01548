"""Scans by an expression, and linear recurrences: against Python's own loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

xp = ta.arrays
no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")
inline = pytest.mark.parametrize("isolation", ["inline"])

EXPRESSIONS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "maximum(a, b)": (np.maximum, "float32"),
    "a + b": (np.add, "int16"),
    "a * b": (np.multiply, "complex128"),
    "a ^ b": (np.bitwise_xor, "uint8"),
    "a | b": (np.bitwise_or, "bool"),
    "hypot(a, b)": (np.hypot, "float64"),
    "a if abs(a) > abs(b) else b": (lambda a, b: a if abs(a) > abs(b) else b, "float64"),
    "where(isnan(b), a, b)": (lambda a, b: a if np.isnan(b) else b, "float64"),
}


def numbers(shape: Any, dtype: str, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.1
    made = rng.integers(0, 9, shape) if dtype[0] in "iu" else rng.uniform(-1.1, 1.1, shape)
    return made.astype(dtype) + (1j * rng.normal(size=shape) if dtype[0] == "c" else np.zeros(1, dtype))


def stepped(function: Callable[[Any, Any], Any], x: Any, axis: int = 0) -> Any:
    rows = np.moveaxis(x, axis, 0)
    if not len(rows):
        return x
    with np.errstate(all="ignore"):
        made = np.array(list(accumulate(rows, np.vectorize(function, otypes=[x.dtype]))))
    return np.moveaxis(made, 0, axis)


@pytest.mark.parametrize("text", EXPRESSIONS)
async def test_each_expression(device: ta.Device, text: str) -> None:
    function, dtype = EXPRESSIONS[text]
    for size in (0, 1, 2, 3, 4, 17, 64, 257):
        x = numbers(size, dtype)
        if "isnan" in text:
            x[1:size:3] = np.nan
        got = await (await xp.scan(text, await device.put(x))).to_host()
        assert got.dtype == x.dtype
        exact = ta.DType(dtype).kind not in ("complex", "float") or text[0] != "h"
        np.testing.assert_allclose(got, stepped(function, x), rtol=0 if exact and dtype[0] != "c" else 1e-12)


@inline
async def test_any_axis_and_views(device: ta.Device) -> None:
    x = numbers((5, 9, 4), "float64")
    ref = await device.put(x)
    for axis in (0, 1, 2, -1):
        got = await (await xp.scan("maximum(a, b)", ref, axis=axis)).to_host()
        np.testing.assert_array_equal(got, np.maximum.accumulate(x, axis))
    got = await (await xp.scan("maximum(a, b)", ref[1, ::2, ::-1].T, axis=1)).to_host()
    np.testing.assert_array_equal(got, np.maximum.accumulate(x[1, ::2, ::-1].T, 1))
    for empty in ((0, 3), (3, 0)):
        assert (await xp.scan("a + b", await device.zeros(empty), axis=0)).shape == empty


@inline
async def test_a_scan_of_another_form_is_refused(device: ta.Device) -> None:
    x = await device.zeros(4)
    wrong = {
        "a - b": r"'a - b' is not associative: for .* it is .* from the left, and .* from the right",
        "(a + b) / 2": "is not associative",
        "a * b + 1": "is not associative",
        "a": r"it reads \['a'\]",
        "a + c": "reads c, which inputs",
        "a +": "line 1, column",
    }
    for text, told in wrong.items():
        with pytest.raises(ValueError, match=rf"^arrays\.scan: .*{told}"):
            await xp.scan(text, x)
    with pytest.raises(ValueError, match="is not associative"):
        await xp.scan("a - b", await device.zeros(4, "int8"))
    with pytest.raises(TypeError, match=r"'a < b' of two of float64 has the dtype bool; cast x first"):
        await xp.scan("a < b", x)
    with pytest.raises(ValueError, match="axis must be given for an array of shape"):
        await xp.scan("a + b", await device.zeros((2, 2)))
    with pytest.raises(ValueError, match="axis 1 is not there"):
        await xp.scan("a + b", x, axis=1)
    assert not (await x.to_host()).any()


def recurred(a: Any, b: Any, initial: Any = 0.0) -> Any:
    """The recurrence along the first axis, step by step."""
    a = np.broadcast_to(a, np.broadcast_shapes(np.shape(a), b.shape))
    b = np.broadcast_to(b, a.shape)
    made, before = [], initial
    for factor, more in zip(a, b, strict=True):
        before = factor * before + more
        made.append(before)
    return np.array(made).reshape(a.shape)


@no_stand_in
@given(
    size=st.integers(1, 300),
    columns=st.integers(1, 3),
    seed=st.integers(0, 99),
    shape_of=st.sampled_from(["number", "row", "column", "all"]),
    initial=st.sampled_from([0, -1.5]),
)
@settings(max_examples=25, deadline=None)
def test_recurrences(size: int, columns: int, seed: int, shape_of: str, initial: float) -> None:
    rng = np.random.default_rng(seed)
    shapes = {"number": (), "row": (columns,), "column": (size, 1), "all": (size, columns)}
    a, b = rng.uniform(-1, 1, shapes[shape_of]), rng.normal(size=(size, columns))
    factor = float(a) if shape_of == "number" else a

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            made = await xp.linear_recurrence(factor, await device.put(b), axis=0, initial=initial)
            np.testing.assert_allclose(await made.to_host(), recurred(a, b, initial), rtol=1e-9, atol=1e-12)

    trio.run(main)


async def test_recurrences_of_other_numbers(device: ta.Device) -> None:
    whole = await device.put(np.arange(1, 9))
    got = await (await xp.linear_recurrence(2, whole, initial=5)).to_host()
    np.testing.assert_array_equal(got, recurred(2, np.arange(1, 9), 5))
    assert got.dtype == np.int64
    a, b = numbers(40, "complex128", 1), numbers(40, "float32", 2)
    got = await (await xp.linear_recurrence(0.5 * a, await device.put(b))).to_host()
    np.testing.assert_allclose(got, recurred(0.5 * a, b), rtol=1e-12)
    first = numbers((1, 3), "float64", 3)
    b = numbers((50, 3), "float64", 4)
    refs = await device.put(b), await device.put(first)
    got = await (await xp.linear_recurrence(-0.5, refs[0], axis=0, initial=refs[1])).to_host()
    np.testing.assert_allclose(got, recurred(-0.5, b, first[0]), rtol=1e-12)
    for empty in ((0, 3), (3, 0)):
        assert (await xp.linear_recurrence(0.5, await device.zeros(empty), axis=0)).shape == empty


async def test_an_average_and_a_kalman_filter(device: ta.Device) -> None:
    """As in the docstring: against the formulas, one observation after another."""
    rng = np.random.default_rng(8)
    z = np.cumsum(rng.normal(size=200)) + rng.normal(size=200)
    observed = await device.put(z)
    average = await xp.linear_recurrence(1 - 0.25, await (0.25 * observed), initial=z[0])
    level, variance, gains, filtered, mean = z[0], 1.0, [], [], z[0]
    means = []
    for each in z:
        mean = 0.75 * mean + 0.25 * each
        means.append(mean)
        variance += 1.0
        gain = variance / (variance + 1.0)
        level, variance = level + gain * (each - level), (1 - gain) * variance
        gains.append(gain)
        filtered.append(level)
    np.testing.assert_allclose(await average.to_host(), means, rtol=1e-12)
    g = await device.put(np.array(gains))
    made = await xp.linear_recurrence(await (1 - g), await (g * observed), initial=z[0])
    np.testing.assert_allclose(await made.to_host(), filtered, rtol=1e-12)


@inline
async def test_invalid_recurrences_are_refused(device: ta.Device) -> None:
    b = await device.zeros(4)
    with pytest.raises(ValueError, match=r"^arrays\.linear_recurrence: .*do not broadcast"):
        await xp.linear_recurrence(np.ones(3), b)
    with pytest.raises(ValueError, match=r"^arrays\.linear_recurrence: .*do not broadcast"):
        await xp.linear_recurrence(0.5, b, initial=np.ones(5))
    with pytest.raises(ValueError, match=r"^arrays\.linear_recurrence: initial must have length 1 along"):
        await xp.linear_recurrence(0.5, b, initial=np.ones(4))
    with pytest.raises(TypeError, match="a must be a number or an array, got str"):
        await xp.linear_recurrence("a", b)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no operand is on a device"):
        await xp.linear_recurrence(0.5, np.ones(4))
    with pytest.raises(ValueError, match="axis must be given"):
        await xp.linear_recurrence(0.5, await device.zeros((2, 2)))


@pytest.mark.parametrize("isolation", ["process"])
async def test_a_kill_in_the_middle_changes_no_bit(device: ta.Device) -> None:
    import os
    import signal

    x = numbers(5000, "float64")
    ref = await device.put(x)
    results = []
    for turn in range(4):
        if turn:
            pid = (await device.statistics()).pid
            assert pid
            os.kill(pid, signal.SIGKILL)
        sums = await (await xp.scan("a + b", ref)).to_host()
        results.append(sums.tobytes() + (await (await xp.linear_recurrence(0.9, ref)).to_host()).tobytes())
    assert len(set(results)) == 1
