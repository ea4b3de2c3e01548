"""Indices and loads in expressions: functions that move elements are one expression each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.expressions import Elementwise

pytestmark = pytest.mark.conformance

Array = npt.NDArray[Any]
INLINE = ta.DeviceOptions(isolation="inline")
DTYPES = ("bool", "int8", "uint64", "int64", "float16", "bfloat16", "float32", "float64", "complex128")

arange = ta.jit.elementwise("start + step * i(0)", name="arange")
eye = ta.jit.elementwise("i(1) == i(0) + k", dtypes="float32", name="eye")
tril = ta.jit.elementwise("x if i(-1) <= i(-2) + k else bool(0)", name="tril")
flip = ta.jit.elementwise("x[i(0), n - 1 - i(1)]", name="flip")
roll = ta.jit.elementwise("x[i(0), (i(1) - shift) % n]", name="roll")
tile = ta.jit.elementwise("x[i(-2) % m, i(-1) % n]", name="tile")
pad = ta.jit.elementwise("x[i(0) - before] if before <= i(0) < before + n else value", name="pad")
edge = ta.jit.elementwise("x[clip(i(0) - before, 0, n - 1)]", name="edge")
repeat = ta.jit.elementwise("x[i(0), i(1) // count]", name="repeat")
take = ta.jit.elementwise("x[rows, i(1)]", name="take")
transpose = ta.jit.elementwise("x[i(2), i(0), i(1)]", name="transpose")


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return (
        np.random.default_rng(seed)
        .integers(0, 2 if dtype == "bool" else 100, shape)
        .astype(ta.DType(dtype).dtype)
    )


async def check(want: Array, compute: Callable[[ta.Device], Awaitable[ta.AccelRef]]) -> None:
    """Require that a device of its own computes the same, in the same dtype."""
    async with ta.open_system("indices") as system, system.open_device(BACKEND, options=INLINE) as device:
        found = await compute(device)
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal((await found.to_host()).astype(want.dtype), want)


sizes = st.integers(1, 40)
seeds = st.integers(0, 99)
any_example = settings(max_examples=12, deadline=None)


@any_example
@given(st.integers(0, 3000), st.integers(-9, 9), st.sampled_from([-2, 1, 3, 0.5]))
async def test_arange(count: int, start: int, step: float) -> None:
    want = start + step * np.arange(count)
    await check(want, lambda device: device.ask(arange.compute(start, step, shape=count)))


@any_example
@given(sizes, sizes, st.integers(-5, 5))
async def test_eye(rows: int, columns: int, k: int) -> None:
    want = np.eye(rows, columns, k, np.float32)
    await check(want, lambda device: device.ask(eye.compute(k, shape=(rows, columns))))


@any_example
@given(st.integers(1, 3), sizes, sizes, st.integers(-5, 5), st.sampled_from(DTYPES), seeds)
async def test_tril(count: int, rows: int, columns: int, k: int, dtype: str, seed: int) -> None:
    x = numbers((count, rows, columns), dtype, seed)

    async def compute(device: ta.Device) -> ta.AccelRef:
        return await tril(x=await device.put(x), k=k)

    await check(np.tril(x, k), compute)


@any_example
@given(sizes, sizes, st.integers(-60, 60), st.sampled_from(DTYPES), seeds)
async def test_flip_and_roll(rows: int, columns: int, shift: int, dtype: str, seed: int) -> None:
    x = numbers((rows, columns), dtype, seed)

    async def flipped(device: ta.Device) -> ta.AccelRef:
        return await flip(await device.put(x), columns, shape=x.shape)

    async def rolled(device: ta.Device) -> ta.AccelRef:
        # A view is loaded from in place.
        on = (await device.put(x.T)).T
        return await roll(on, shift, columns, shape=x.shape)

    await check(np.flip(x, 1), flipped)
    await check(np.roll(x, shift, 1), rolled)


@any_example
@given(st.tuples(sizes, sizes), st.lists(st.integers(1, 3), min_size=2, max_size=3), seeds)
async def test_tile(shape: tuple[int, int], counts: list[int], seed: int) -> None:
    x = numbers(shape, "int64", seed)
    want = np.tile(x, counts)

    async def compute(device: ta.Device) -> ta.AccelRef:
        return await tile(await device.put(x), *shape, shape=want.shape)

    await check(want, compute)


@any_example
@given(sizes, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["int64", "float32"]), seeds)
async def test_pad(n: int, before: int, after: int, dtype: str, seed: int) -> None:
    x, shape = numbers((n,), dtype, seed), n + before + after

    async def padded(device: ta.Device) -> ta.AccelRef:
        return await pad(x=await device.put(x), before=before, n=n, value=0, shape=shape)

    async def extended(device: ta.Device) -> ta.AccelRef:
        return await edge(await device.put(x), before, n, shape=shape)

    await check(np.pad(x, (before, after)), padded)
    await check(np.pad(x, (before, after), mode="edge"), extended)


@any_example
@given(sizes, sizes, st.integers(1, 5), st.sampled_from(DTYPES), seeds)
async def test_repeat_and_take(rows: int, columns: int, count: int, dtype: str, seed: int) -> None:
    x = numbers((rows, columns), dtype, seed)
    chosen = np.random.default_rng(seed).integers(-rows, rows, (count, 1)).astype(np.int16)

    async def repeated(device: ta.Device) -> ta.AccelRef:
        return await repeat(await device.put(x), count, shape=(rows, columns * count))

    async def taken(device: ta.Device) -> ta.AccelRef:
        return await take(await device.put(x), chosen, shape=(count, columns))

    await check(np.repeat(x, count, axis=1), repeated)
    await check(np.take(x, chosen[:, 0], axis=0), taken)


async def test_an_index_outside_of_an_array_is_the_nearest_one_inside(device: ta.Device) -> None:
    far = np.iinfo(np.int64)
    at = np.array([-(10**12), -5, -4, -1, 0, 3, 4, 10**12, far.min, far.max])
    x = await device.put(np.arange(4.0))
    found = await ta.jit.elementwise("x[at]")(x, at)
    np.testing.assert_array_equal(await found.to_host(), [0, 0, 0, 3, 0, 3, 3, 3, 0, 3])
    found = await ta.jit.elementwise("x[at]")(x, np.array([0, 3, 2**64 - 1], np.uint64))
    np.testing.assert_array_equal(await found.to_host(), [0, 3, 3])
    found = await ta.jit.elementwise("x[i(0)]")(x, shape=6)
    np.testing.assert_array_equal(await found.to_host(), [0, 1, 2, 3, 3, 3])
    found = await ta.jit.elementwise("x[i(1)] + 0 * i(0)")(x, shape=(2, 6))
    np.testing.assert_array_equal(await found.to_host(), [[0, 1, 2, 3, 3, 3]] * 2)


async def test_an_argument_is_read_directly_and_loaded_from(device: ta.Device) -> None:
    x = np.random.default_rng(1).normal(size=(300, 1000)).astype(np.float32)
    on = await device.put(x)
    # More than the processor's backend computes at a time.
    found = await ta.jit.elementwise("x - x[i(0) - 1, i(1)]")(on)
    np.testing.assert_array_equal(await found.to_host(), x - np.roll(x, 1, axis=0))
    both = ta.jit.elementwise("row = i(0); far = x[j // 2, i(-1)] + j; j = i(0)", outputs=("row", "far"))
    with pytest.raises(TypeError, match="j is missing"):
        await both(on, shape=(300, 7))
    pair = ta.jit.elementwise("row = i(0); far = x[row // 2, i(-1)] + row", outputs=("row", "far"))
    row, far = await pair(on, shape=(300, 7))
    rows = np.arange(300)[:, None]
    np.testing.assert_array_equal(await row.to_host(), np.broadcast_to(rows, (300, 7)))
    np.testing.assert_array_equal(await far.to_host(), x[rows // 2, np.arange(7)] + rows)


async def test_three_axes_and_a_given_result(device: ta.Device) -> None:
    x = np.arange(24).reshape(2, 3, 4)
    out = await device.zeros((3, 4, 2), "int64")
    assert await transpose(await device.put(x), out=out) is out
    np.testing.assert_array_equal(await out.to_host(), x.transpose(1, 2, 0))
    filled = await device.zeros((2, 3))
    await device.ask(ta.jit.elementwise("a").compute(7.0, out=filled))
    assert (await filled.to_host() == 7).all()
    row = await ta.jit.elementwise("x + 0")(await device.put(x[0, 0]), shape=(2, 4))
    np.testing.assert_array_equal(await row.to_host(), np.tile(x[0, 0], (2, 1)))
    none = await transpose(await device.zeros((0, 3, 4)), shape=(3, 0, 2))
    assert none.shape == (3, 0, 2)


async def test_mismatched_arguments_are_refused(device: ta.Device) -> None:
    x = await device.zeros((4, 3))
    load = ta.jit.elementwise("x[i(0), 0]", name="column")
    with pytest.raises(
        ValueError, match=r"jit\.column: x must have 2 axes, one for each index of x\[\.\.\.\]"
    ):
        await load(x[0], shape=4)
    with pytest.raises(TypeError, match=r"jit\.column: x must be an array: elements are loaded from it"):
        await device.ask(load.compute(3.0, shape=4))
    with pytest.raises(ValueError, match=r"i\(0\): the axis is out of range for the result of shape \(\)"):
        await load(x)
    with pytest.raises(ValueError, match=r"x of shape \(0, 3\) has no elements to load"):
        await load(await device.zeros((0, 3)), shape=4)
    with pytest.raises(ValueError, match="must not share memory with x"):
        await ta.jit.elementwise("x[i(0), 2 - i(1)]")(x, out=x)
    with pytest.raises(
        ValueError, match=r"the shapes \(4, 3\) do not broadcast to \(4,\), which shape= says"
    ):
        await ta.jit.elementwise("x + i(0)")(x, shape=4)
    with pytest.raises(ValueError, match="shape must be integers of at least 0"):
        await ta.jit.elementwise("x + i(0)")(x, shape=(4, -3))
    with pytest.raises(TypeError, match="shape must be integers"):
        await ta.jit.elementwise("x + i(0)")(x, shape=(4, 3.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an index is an integer, got float64: int64"):
        await ta.jit.elementwise("y[x]")(await device.zeros(3), x)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("i(n)", "an axis of the result as a number that is written"),
        ("i(0, 1)", "an axis of the result"),
        ("i(axis=0)", "an axis of the result"),
        ("i(True)", "an axis of the result as a number that is written"),
        ("i(64)", "at most 64 axes"),
        ("x[0] + x[0, 1]", "'x' takes one index for each of its axes"),
        ("x[()]", "'x' takes one index for each of its axes"),
        ("x[1:2]", r"a slice \(a:b\) is not allowed"),
        ("(x + 1)[0]", "only arguments have elements to load"),
        ("y = x; z = y[0]", "'y' is not an argument"),
        ("sin[0]", "'sin' is not an argument"),
        ("shape + 1", "the name shape"),
    ],
)
def test_invalid_indices_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ta.jit.elementwise(text)


def test_reductions_have_no_indices() -> None:
    for text in ("x * i(0)", "x[0]"):
        with pytest.raises(ValueError, match=r"map: has i\(axis\) or x\[\.\.\.\]"):
            ta.jit.reduction(text)


@pytest.mark.parametrize("is_checked", [False, True])
async def test_an_index_of_the_result_is_the_nearest_one_inside(
    device: ta.Device, *, is_checked: bool
) -> None:
    x = np.arange(6.0).reshape(2, 3)
    function = Elementwise[ta.AccelRef](
        "x[i(0), (i(1) + 1) % 3] + x[i(0), i(1)]", inputs=("x",), operation="test.near", is_checked=is_checked
    )
    given = await device.put(x)
    for shape in ((1, 2), (2, 5), (5, 3), (4, 4)):
        rows, columns = np.minimum(np.arange(shape[0]), 1)[:, None], np.arange(shape[1])
        want = x[rows, (columns + 1) % 3] + x[rows, np.minimum(columns, 2)]
        found = await device.ask(function.compute(given, shape=shape))
        np.testing.assert_array_equal(await found.to_host(), want)


async def test_unused_elements_are_not_loaded(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    function = Elementwise[tuple[ta.AccelRef, ...]](
        "y = x[9]; z = x[i(0)]", inputs=("x",), outputs=("z",), operation="test.checked", is_checked=True
    )
    (found,) = await device.ask(function.compute(x, shape=3))
    np.testing.assert_array_equal(await found.to_host(), [0, 1, 2])


async def test_a_name_may_still_be_i(device: ta.Device) -> None:
    found = await ta.jit.elementwise("x * i + i(0)")(await device.put(np.ones(3)), 2)
    np.testing.assert_array_equal(await found.to_host(), [2, 3, 4])
