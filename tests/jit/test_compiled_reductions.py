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

SHAPES = ((1003,), (3, 403), (130, 70), (7, 30, 21))


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
                        await product(x, y, axis=axes), await ta.arrays.sum(x, axes),
                        await ta.arrays.prod(x, axes), await mean(y, x, axis=axes),
                    ):  # fmt: skip
                        made.append(await made_here.to_host())
            made.append(await (await ta.arrays.layer_norm(x)).to_host())
            made.append(await (await ta.arrays.var(x, axis=-1)).to_host())
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_bits_are_those_of_numpy(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_softmax_keeps_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("rows") as system, system.open_device("cpu", options=options) as device:
        for dtype in (np.float64, np.float32):
            x = np.random.default_rng(9).standard_normal((5, 301)).astype(dtype)
            x[1], x[2, 7], x[3, 9] = -np.inf, np.nan, np.inf
            before = counts.compiled
            on = await device.put(x)
            got = await (await ta.arrays.softmax(on, axis=-1)).to_host()
            assert counts.compiled > before
            with np.errstate(invalid="ignore"):
                e = np.exp(x - x.max(-1, keepdims=True))
            np.testing.assert_allclose(
                got, e / e.sum(-1, keepdims=True), rtol=1e-5 if dtype is np.float32 else 1e-14
            )
            # The result may be the argument.
            await ta.arrays.softmax(on, axis=-1, out=on)
            np.testing.assert_array_equal(await on.to_host(), got)
