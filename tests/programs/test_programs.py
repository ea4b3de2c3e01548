"""The computations of programs: arguments, results, state; in this process and in workers."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from sample_programs import Counter, Layer, flat, scaled

import trio_accel as ta
from trio_accel.backends.base import Isolation

RANDOM = np.random.default_rng(1)
WEIGHTS, BIAS = RANDOM.standard_normal((4, 3)), RANDOM.standard_normal(3)
X = RANDOM.standard_normal((5, 4))


def expected(x: Any, scale: float = 1.0) -> Any:
    return np.tanh(x @ WEIGHTS + BIAS) * scale


async def layer(device: ta.Device, **options: Any) -> ta.programs.Program[Layer]:
    return await ta.open_program(device, Layer, {"weights": WEIGHTS, "bias": BIAS}, **options)


async def test_methods_compute(device: ta.Device) -> None:
    async with await layer(device, scale=3.0) as program:
        x = await device.put(X)
        for method in (Layer.forward, Layer.written, Layer.copied):
            for given in (x, X, x):
                result = await program.ask(method, given)
                np.testing.assert_allclose(await result.to_host(), expected(X, 3.0), rtol=1e-12)
        several = await program.ask(Layer.several, x)
        assert several["sum"].shape == ()
        np.testing.assert_allclose(await several["sum"].to_host(), X.sum(), rtol=1e-12)
        np.testing.assert_array_equal(await several["both"][0].to_host(), 2 * X)
        np.testing.assert_array_equal(await several["both"][1].to_host(), X.astype(np.float32).ravel())
        assert several["both"][1].dtype == "float32"


async def test_the_constructor_runs_once_in_the_process_of_the_context(
    device: ta.Device, isolation: Isolation
) -> None:
    async with await layer(device, scale=0.5) as program:
        await program.ask("forward", X)
        about = await program.ask(Layer.about)
    assert (about["calls"], about["is_warm"], about["scale"]) == (1, True, 0.5)
    assert (about["pid"] == os.getpid()) is (isolation == "inline")


async def test_results_are_written_to_arrays_of_the_asker(device: ta.Device) -> None:
    async with await layer(device) as program:
        mine = await device.zeros((5, 3))
        assert await program.ask(Layer.written, X, out=mine) is mine
        np.testing.assert_allclose(await mine.to_host(), expected(X), rtol=1e-12)
        with pytest.raises(ValueError, match=r"sample_programs.Layer.written: out must have shape \(5, 3\)"):
            await program.ask(Layer.written, X, out=await device.zeros((5, 4)))
        square = await device.put(np.ones((4, 4)))
        with pytest.raises(ValueError, match="out must not share memory"):
            await program.ask(Layer.several, square, out={"sum": None, "both": [square, None]})
        with pytest.raises(TypeError, match=r"out\['both'\] must be nested like the declared"):
            await program.ask(Layer.several, square, out={"sum": None, "both": mine})


async def test_arguments_arrive_as_they_were_given(device: ta.Device) -> None:
    async with await layer(device) as program:
        assert await program.ask(Layer.defaults) == [1, 2, 3]
        assert await program.ask(Layer.defaults, b=7) == [1, 7, 3]
        assert await program.ask(Layer.defaults, 5, c="x") == [5, 2, "x"]
        echo = await program.ask(Layer.echo, 1, X, deep={"k": [X[0], (None, b"\x00\xff", 1 + 2j)]})
        assert echo["args"][0] == 1
        np.testing.assert_array_equal(await echo["args"][1].to_host(), X)
        np.testing.assert_array_equal(await echo["kwargs"]["deep"]["k"][0].to_host(), X[0])
        assert echo["kwargs"]["deep"]["k"][1] == (None, b"\x00\xff", 1 + 2j)
        values = [math.nan, math.inf, -0.0, True, "ü\n\x00", 10**30]
        assert await program.ask(Layer.types, values) == repr(values)
        assert await program.ask(Layer.types, np.float32(0.5)) == "0.5"


async def test_results_of_any_size(device: ta.Device) -> None:
    async with await layer(device) as program:
        large = np.arange(3_000_000.0)
        parts = [large, large[:0], np.float32(large[:1]), np.bool_(large[:5])]
        text = "long" * 10_000
        echo = await program.ask(Layer.echo, *parts, text)
        for part, back in zip(parts, echo["args"], strict=False):
            assert back.dtype == part.dtype
            np.testing.assert_array_equal(await back.to_host(), part)
        assert echo["args"][-1] == text
        many = await program.ask(Layer.echo, *[np.full(2, number) for number in range(150)])
        np.testing.assert_array_equal(await many["args"][149].to_host(), [149, 149])


async def test_state_survives_in_arrays(device: ta.Device) -> None:
    counts = await device.zeros(4)
    async with ta.open_program(device, Counter, counts) as program:
        for _ in range(3):
            assert await program.ask(Counter.add, np.arange(4.0)) is None
        np.testing.assert_array_equal(await counts.to_host(), [0, 3, 6, 9])
        assert await program.ask(Counter.total) == 18.0
        target = await device.put(np.ones(3))
        assert await program.ask(Counter.add_to, target, 2.0) == 9.0
        np.testing.assert_array_equal(await target.to_host(), [3, 3, 3])
    np.testing.assert_array_equal(await counts.to_host(), [0, 3, 6, 9])


async def test_calls_are_ordered_with_other_operations(device: ta.Device) -> None:
    counts = await device.zeros(4)
    async with ta.open_program(device, Counter, counts) as program:
        for number in range(20):
            await program.ask(Counter.add, np.ones(4))
            await counts.fill(number)
            await program.ask(Counter.add, counts)
            np.testing.assert_array_equal(await counts.to_host(), np.full(4, 2.0 * number))


async def test_functions_are_programs_without_state(device: ta.Device) -> None:
    async with ta.open_program(device, scaled) as program, ta.open_program(device, flat) as other:
        result = await program.ask(X, factor=3.0)
        np.testing.assert_array_equal(await result.to_host(), 3.0 * X)
        result = await program.ask(X)
        np.testing.assert_array_equal(await result.to_host(), 2.0 * X)
        result = await other.ask(await device.put(X.astype(np.float32)))
        np.testing.assert_array_equal(await result.to_host(), X.astype(np.float32).ravel())


async def test_views_are_arguments_like_any(device: ta.Device) -> None:
    x = await device.put(np.arange(24.0).reshape(4, 6))
    async with ta.open_program(device, scaled) as program:
        result = await program.ask(x[::2, 1:4].T)
        np.testing.assert_array_equal(await result.to_host(), 2 * np.arange(24.0).reshape(4, 6)[::2, 1:4].T)


async def test_tree_and_statistics_name_it(system: ta.System, device: ta.Device) -> None:
    async with await layer(device, name="mine") as program, await layer(device) as other:
        assert (program.name, other.name) == ("mine", "layer-1")
        await program.ask(Layer.forward, X)
        await other.ask(Layer.forward, X)
        paths = {node.path for node in system.tree().walk()}
        assert {f"{device.path}/context/mine", f"{device.path}/context/layer-1"} <= paths
        with pytest.raises(ValueError, match="has a program named 'mine' already"):
            await layer(device, name="mine")
    await (await layer(device, name="mine")).aclose()
