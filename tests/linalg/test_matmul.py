"""Matrix products against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "complex128": 1e-12,
    "complex64": 1e-5,
}
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    if dtype.startswith("complex"):
        return (values + 1j * generator.normal(size=shape)).astype(dtype)
    return values.astype(ta.DType.of(dtype).dtype)


def check_product(result: Array, a: Array, b: Array, dtype: str) -> None:
    """Compare with the product in double precision, relative to the size of the summands."""
    wide = complex if dtype.startswith("complex") else float
    expected = np.matmul(a.astype(wide), b.astype(wide))
    assert result.dtype == ta.DType.of(dtype).dtype
    assert result.shape == expected.shape
    scale = np.matmul(np.abs(a.astype(wide)), np.abs(b.astype(wide)))
    tolerance = TOLERANCE[dtype] * np.sqrt(max(a.shape[-1], 1))
    assert np.all(np.abs(result.astype(wide) - expected) <= tolerance * np.maximum(scale, 1e-30))


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 4), (4, 5)),
    ((1, 1), (1, 1)),
    ((65, 130), (130, 33)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((1, 3, 4), (6, 4, 2)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((3, 4), (4, 0)),
    ((0, 3, 4), (4, 5)),
    ((0,), (0,)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_shapes_and_dtypes(
    device: ta.Device, a: tuple[int, ...], b: tuple[int, ...], dtype: str
) -> None:
    left, right = normal(a, dtype, 1), normal(b, dtype, 2)
    result = await linalg.matmul(await device.put(left), await device.put(right))
    assert result.dtype == dtype
    check_product(await result.to_host(), left, right, dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
async def test_integers_are_exact_and_wrap_around(device: ta.Device, dtype: str) -> None:
    generator = np.random.default_rng(3)
    limits = np.iinfo(dtype)
    a, b = (generator.integers(limits.min, limits.max, (5, 5), dtype) for _ in range(2))
    result = await linalg.matmul(await device.put(a), b)
    wrapped = [
        [sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) for column in b.T] for row in a
    ]
    modulus = limits.max - limits.min + 1
    expected = [[(value - limits.min) % modulus + limits.min for value in row] for row in wrapped]
    assert (await result.to_host()).tolist() == expected


async def test_host_operands_next_to_references(device: ta.Device) -> None:
    a, b = normal((4, 3), "float64", 1), normal((3, 2), "float64", 2)
    ref = await device.put(a)
    check_product(await (await linalg.matmul(ref, b)).to_host(), a, b, "float64")
    check_product(await (await linalg.matmul(b.T, await device.put(a.T))).to_host(), b.T, a.T, "float64")
    check_product(await (await device.ask(linalg.Matmul(a, b))).to_host(), a, b, "float64")
    await device.synchronize()
    assert (await device.statistics()).memory.used == a.nbytes


async def test_out(device: ta.Device) -> None:
    a, b = normal((4, 3), "float32", 1), normal((3, 2), "float32", 2)
    out = await device.full((4, 2), 7.0, "float32")
    assert await linalg.matmul(a, b, out=out) is out
    check_product(await out.to_host(), a, b, "float32")
    scalar = await device.zeros((), "float32")
    await linalg.matmul(a[0], a[0], out=scalar)
    assert await scalar.item() == pytest.approx(float(np.dot(a[0], a[0])), rel=1e-5)


async def test_one_array_as_both_operands(device: ta.Device) -> None:
    a = normal((6, 6), "float64")
    ref = await device.put(a)
    check_product(await (await linalg.matmul(ref, ref)).to_host(), a, a, "float64")


async def test_low_precision_sums_in_more(device: ta.Device) -> None:
    ones = np.ones((1, 4096), ml_dtypes.bfloat16)
    result = await linalg.matmul(await device.put(ones), ones.T)
    # A sum kept in bfloat16 would stop at 256.
    assert await result.item() == 4096


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    m, k, n = (draw(st.integers(0, 6)) for _ in range(3))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    left = [draw(st.sampled_from([size, 1])) for size in batch]
    right = [draw(st.sampled_from([size, 1])) for size in batch][draw(st.integers(0, len(batch))) :]
    a = draw(st.sampled_from([(*left, m, k), (k,)]))
    b = draw(st.sampled_from([(*right, k, n), (k,)]))
    return a, b


@given(shapes=shapes(), dtype=st.sampled_from(sorted(TOLERANCE)))
@settings(max_examples=40, deadline=None)
def test_random_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> None:
    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            a, b = normal(shapes[0], dtype, 1), normal(shapes[1], dtype, 2)
            result = await linalg.matmul(await device.put(a), b)
            check_product(await result.to_host(), a, b, dtype)

    trio.run(main)
