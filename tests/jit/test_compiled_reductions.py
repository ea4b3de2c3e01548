"""Reductions and rows, compiled: the bits of NumPy's executor, by one thread and by two."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.cpu.compiled import _plans
from trio_accel.backends.cpu.compiled._compiler import compiler, counts, has_fma

pytestmark = [
    pytest.mark.no_device,
    pytest.mark.machine,
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

SHAPES = ((1003,), (3, 403), (130, 70), (7, 30, 21), (6, 4100))


async def results(
    shape: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> list[npt.NDArray[Any]]:
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", mode)
    monkeypatch.setattr(_plans, "_plans", {})
    rng, made = np.random.default_rng(8), list[npt.NDArray[Any]]()
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("reductions") as system, system.open_device("cpu", options=options) as device:
        product, mean = jit.reduction("x*y + 0.5", "sum"), jit.reduction("(x - y)**2", "mean")
        for name in ("float64", "float32", "float16"):
            x, y = [await device.put(each.astype(name)) for each in rng.uniform(0.5, 1, (2, *shape))]
            for count in range(1, len(shape) + 1):
                for axes in itertools.combinations(range(len(shape)), count):
                    for made_here in (
                        await product(x, y, axis=axes),
                        await ta.arrays.sum(x, axes),
                        await ta.arrays.prod(x, axes),
                        await mean(y, x, axis=axes),
                    ):
                        made.append(await made_here.to_host())
                    made.append(await ta.arrays.var(x, axis=axes, correction=1).to_host())
            # Rows that lie in the memory, and across it.
            for axis in range(len(shape)):
                made.append(await ta.arrays.layer_norm(x, 2.0, y, axis=axis).to_host())
                made.append(await ta.arrays.zscore(x, axis=axis).to_host())
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_bits_match_numpy(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    by_numpy = await results(shape, "never", monkeypatch)
    before = counts.compiled
    compiled = await results(shape, "always", monkeypatch)
    assert counts.compiled - before > len(compiled) // 2
    monkeypatch.setattr(_plans, "_SHARE", 1)
    split = await results(shape, "always", monkeypatch)
    for number, (want, *others) in enumerate(zip(by_numpy, compiled, split, strict=True)):
        for got in others:
            assert got.tobytes() == want.tobytes(), number


@pytest.mark.skipif(not has_fma(), reason="functions of our own take a processor with fused multiplication")
async def test_softmax_keeps_its_intermediate_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("rows") as system, system.open_device("cpu", options=options) as device:
        for dtype in (np.float64, np.float32):
            rows = np.random.default_rng(9).standard_normal((5, 301)).astype(dtype)
            rows[1], rows[2, 7], rows[3, 9] = -np.inf, np.nan, np.inf
            for x, axis in ((rows, -1), (np.ascontiguousarray(rows.T), 0), (rows.reshape(5, 43, 7), 1)):
                before = counts.compiled
                on = await device.put(x)
                got = await (await ta.arrays.softmax(on, axis=axis)).to_host()
                assert counts.compiled > before
                with np.errstate(invalid="ignore"):
                    e = np.exp(x - x.max(axis, keepdims=True))
                np.testing.assert_allclose(
                    got, e / e.sum(axis, keepdims=True), rtol=1e-5 if dtype is np.float32 else 1e-14
                )
                # The result may be the argument.
                await ta.arrays.softmax(on, axis=axis, out=on)
                np.testing.assert_array_equal(await on.to_host(), got)


@pytest.mark.parametrize("columns", [2, 3])
async def test_long_columns_are_added_like_others(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for one column in a piece of NumPy's executor: a single one would be added in pairs.
    x = np.random.default_rng(10).standard_normal(((1 << 18) + 1, columns))
    made = list[npt.NDArray[Any]]()
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("columns") as system, system.open_device("cpu", options=options) as device:
        for mode in ("never", "always"):
            monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", mode)
            monkeypatch.setattr(_plans, "_plans", {})
            made.append(await ta.arrays.var(await device.put(x), axis=0).to_host())
    assert made[0].tobytes() == made[1].tobytes() == x.var(0).tobytes()
