"""Kernels of the processor that copy no array that they only read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE

import trio_accel as ta
from trio_accel import arrays
from trio_accel.backends.cpu.libraries import arrays as kernels

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="of the kernels of the CPU backend")

SIZE = 1 << 20


async def _peak_of(ask: Callable[[], Awaitable[ta.AccelRef]]) -> tuple[int, Any]:
    """Return the most bytes that NumPy had allocated at a time, and the result."""
    await ask()
    tracemalloc.start()
    try:
        found = await ask()
        return tracemalloc.get_traced_memory()[1], await found.to_host()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["argmax", "argmin"])
async def test_the_place_of_an_extreme_is_found_without_a_copy(system: ta.System, name: str) -> None:
    x = np.random.default_rng(1).normal(size=SIZE)
    async with system.open_device("cpu", options=INLINE) as device:
        there = await device.put(x)
        peak, found = await _peak_of(lambda: getattr(arrays, name)(there))
        assert found == getattr(np, name)(x)
        assert peak < x.nbytes // 8
        rows = await device.put(x.reshape(1024, -1))
        peak, found = await _peak_of(lambda: getattr(arrays, name)(rows, axis=1))
        np.testing.assert_array_equal(found, getattr(np, name)(x.reshape(1024, -1), axis=1))
        assert peak < x.nbytes // 8


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "bool", "bfloat16"])
async def test_sums_up_to_each_element_are_made_in_place(system: ta.System, dtype: str) -> None:
    element = ta.DType(dtype).dtype
    x = np.random.default_rng(2).normal(size=SIZE).astype(element)
    async with system.open_device("cpu", options=INLINE) as device:
        there = await device.put(x)
        peak, found = await _peak_of(lambda: arrays.cumulative_sum(there))
        wide = np.float64 if element.kind not in "biu" else np.int64
        # In this process the result itself is also NumPy's memory.
        assert peak < 2 * found.nbytes + x.nbytes // 8
        np.testing.assert_array_equal(found, np.cumsum(x, dtype=wide).astype(found.dtype))


async def test_pieces_of_a_scan_have_the_bits_of_the_whole(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(3).normal(size=(40, 7)).astype("float32")
    x[0] = -0.0
    async with system.open_device("cpu", options=INLINE) as device:
        there = await device.put(x)
        for name in ("cumulative_sum", "cumulative_prod", "cumulative_max", "cumulative_logsumexp"):
            for axis in (0, 1):
                found = list[bytes]()
                for size in (1, 9, 1 << 20):
                    monkeypatch.setattr(kernels, "_ACCUMULATED", size)
                    found.append((await (await getattr(arrays, name)(there, axis=axis)).to_host()).tobytes())
                assert len(set(found)) == 1, (name, axis)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64"])
async def test_numbers_are_counted_in_pieces(
    system: ta.System, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_COUNT_CHUNK", 1 << 6)
    x = np.random.default_rng(4).integers(0, 10, 1000).astype(dtype)
    weights = np.random.default_rng(5).normal(size=1000)
    async with system.open_device("cpu", options=INLINE) as device:
        there = await device.put(x)
        np.testing.assert_array_equal(await (await arrays.bincount(there)).to_host(), np.bincount(x))
        # Of strided elements, and more bins than a piece has elements.
        for least in (0, 500):
            found = await (await arrays.bincount(there[::3], minlength=least)).to_host()
            np.testing.assert_array_equal(found, np.bincount(x[::3], minlength=least))
        # Sums of weights are made in NumPy's order.
        found = await (await arrays.bincount(there, weights)).to_host()
        np.testing.assert_array_equal(found, np.bincount(x, weights))
        assert not len(await (await arrays.bincount(there[:0])).to_host())
        if np.dtype(dtype).kind == "i":
            x[-1] = -1
            with pytest.raises(ta.LibraryError):
                await arrays.bincount(await device.put(x))
