"""Norms, ranks, pseudo-inverses and powers of matrices, against NumPy in wider types."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

TOLERANCE = {
    "float64": 1e-11,
    "float32": 1e-5,
    "complex128": 1e-11,
    "complex64": 1e-5,
    "float16": 2e-3,
    "bfloat16": 1e-2,
}
SOLVER = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")
NATIVE = ["float64", "float32", "complex128", "complex64"]
REAL = {"complex64": "float32", "complex128": "float64"}
ORDERS = [2, 1, 0, 3, -1, -2, 0.5, -1.5, math.inf, -math.inf]
SHAPES: list[tuple[int, ...]] = [(0, 3), (3, 0), (1, 1), (4, 3), (3, 5), (2, 3, 3), (0, 2, 2)]


def values(shape: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=shape)
    if dtype.startswith("complex"):
        drawn = drawn + 1j * generator.normal(size=shape)
    return np.asarray(drawn).astype(ta.DType.of(dtype).dtype)


def wide(array: Array) -> Array:
    return array.astype(complex if array.dtype.kind == "c" else float)


async def check(result: ta.AccelRef, expected: Any, dtype: str) -> None:
    """Compare a result with the result of the wider type."""
    assert result.shape == np.shape(expected)
    assert result.dtype == REAL.get(dtype, dtype)
    np.testing.assert_allclose(
        wide(await result.to_host()), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_vector_norm(device: ta.Device, dtype: str, order: float) -> None:
    for shape in ((1,), (257,), (3, 4), (1025,)):
        # Away from 0, where negative powers are inaccurate in any type.
        x = np.asarray(values(shape, dtype) + np.asarray(3, ta.DType.of(dtype).dtype))
        expected = np.linalg.vector_norm(wide(x), ord=order)
        if abs(expected) < 6e4 or dtype != "float16":
            await check(await linalg.vector_norm(await device.put(x), ord=order), expected, dtype)


async def test_vector_norm_along_axes(device: ta.Device) -> None:
    x = values((2, 3, 4))
    ref = await device.put(x)
    for axis in (0, -1, (0, 2), (1, 0)):
        for keepdims in (False, True):
            expected = np.linalg.vector_norm(x, axis=axis, keepdims=keepdims)
            await check(await linalg.vector_norm(ref, axis=axis, keepdims=keepdims), expected, "float64")
    out = await device.zeros((2, 4))
    assert await linalg.vector_norm(ref[:, ::-1], axis=1, out=out) is out
    await check(out, np.linalg.vector_norm(x, axis=1), "float64")


async def test_vector_norm_of_nothing(device: ta.Device) -> None:
    ref = await device.zeros((0, 2))
    for order in (0, 1, 2, 3.5, math.inf):
        assert (await (await linalg.vector_norm(ref, ord=order, axis=0)).to_host()).tolist() == [0, 0]
    assert (await linalg.vector_norm(ref, ord=-math.inf, axis=1)).shape == (0,)
    with pytest.raises(ValueError, match=r"axes .* are empty, and the reduction has no identity"):
        await linalg.vector_norm(ref, ord=-math.inf, axis=0)


async def test_squares_do_not_overflow(device: ta.Device) -> None:
    half = await device.put(np.full(1000, 100, np.float16))
    assert await (await linalg.vector_norm(half)).item() == np.float16(math.sqrt(1000) * 100)
    single = await device.put(np.full(4, 1e30 + 1e30j, np.complex64))
    assert await (await linalg.vector_norm(single)).item() == pytest.approx(math.sqrt(8) * 1e30)
    brain = await device.put(np.full(4, 1e30, ml_dtypes.bfloat16))
    assert float(await (await linalg.vector_norm(brain, ord=3)).item()) == pytest.approx(
        4 ** (1 / 3) * 1e30, rel=1e-2
    )


async def test_nan_and_infinities_pass_through(device: ta.Device) -> None:
    for given in ([1.0, np.nan], [1.0, -np.inf], [0.0, -0.0]):
        ref = await device.put(np.array(given))
        for order in ORDERS:
            with np.errstate(all="ignore"):
                expected = np.linalg.vector_norm(np.array(given), ord=order)
            np.testing.assert_equal(await (await linalg.vector_norm(ref, ord=order)).item(), expected)


@pytest.mark.parametrize(
    "order",
    [
        *("fro", 1, -1, math.inf, -math.inf),
        *(pytest.param(order, marks=SOLVER) for order in ("nuc", 2, -2)),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_matrix_norm(device: ta.Device, shape: tuple[int, ...], order: Any) -> None:
    for dtype in NATIVE:
        x = values(shape, dtype)
        ref = await device.put(x)
        for keepdims in (False, True):
            try:
                expected = np.linalg.matrix_norm(wide(x), ord=order, keepdims=keepdims)
            except ValueError:
                with pytest.raises(ValueError, match="are empty, and the reduction has no identity"):
                    await linalg.matrix_norm(ref, ord=order, keepdims=keepdims)
            else:
                await check(await linalg.matrix_norm(ref, ord=order, keepdims=keepdims), expected, dtype)


@SOLVER
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NATIVE)
async def test_pinv(device: ta.Device, shape: tuple[int, ...], dtype: str) -> None:
    x = values(shape, dtype)
    result = await linalg.pinv(await device.put(x))
    assert result.dtype == dtype
    expected = np.linalg.pinv(wide(x))
    assert result.shape == expected.shape
    tolerance = 100 * TOLERANCE[dtype]
    np.testing.assert_allclose(await result.to_host(), expected, rtol=tolerance, atol=tolerance)


@SOLVER
async def test_ranks_and_tolerances(device: ta.Device) -> None:
    stack = np.array([np.diag([1.0, 0.5, 1e-3]), np.diag([1.0, 1e-20, 0.0]), np.zeros((3, 3))])
    ref = await device.put(stack)
    each = np.array([1e-2, 1e-30, 0.1])
    for rtol in (None, 0.1, each, await device.put(each)):
        told = rtol if rtol is None or isinstance(rtol, float) else each
        ranks = await linalg.matrix_rank(ref, rtol=rtol)
        assert ranks.dtype == "int64"
        expected = np.linalg.matrix_rank(stack, rtol=told)
        assert (await ranks.to_host()).tolist() == expected.tolist()
        inverse = await linalg.pinv(ref, rtol=rtol)
        np.testing.assert_allclose(
            await inverse.to_host(),
            np.linalg.pinv(stack, rtol=1e-15 * 3 if told is None else told),
            rtol=1e-12,
        )
    for shape in SHAPES:
        x = values(shape)
        ranks = await linalg.matrix_rank(await device.put(x))
        np.testing.assert_array_equal(await ranks.to_host(), np.linalg.matrix_rank(x))


@pytest.mark.parametrize(
    "n", [*(0, 1, 2, 3, 5, 8, 11), *(pytest.param(n, marks=SOLVER) for n in (-1, -2, -3))]
)
async def test_matrix_power(device: ta.Device, n: int) -> None:
    for shape in ((1, 1), (3, 3), (2, 2, 2), (0, 0)):
        for dtype in ("float64", "complex64"):
            x = values(shape, dtype, 1)
            result = await linalg.matrix_power(await device.put(x), n)
            expected = np.linalg.matrix_power(wide(x), n)
            tolerance = 100 * TOLERANCE[dtype]
            scale = float(np.abs(expected).max(initial=1))
            assert result.shape == shape
            assert result.dtype == dtype
            np.testing.assert_allclose(
                await result.to_host(), expected, rtol=tolerance, atol=tolerance * scale
            )


async def test_powers_of_whole_numbers(device: ta.Device) -> None:
    x = np.array([[1, 1], [1, 0]])
    ref = await device.put(x)
    for n in (0, 1, 2, 50):
        result = await linalg.matrix_power(ref, n)
        assert (await result.to_host()).tolist() == np.linalg.matrix_power(x, n).tolist()
    await (await linalg.matrix_power(ref, 1)).fill(0)
    assert (await ref.to_host()).tolist() == x.tolist()


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    ref = await device.zeros((2, 3))
    whole = await device.zeros((2, 2), "int64")
    with pytest.raises(TypeError, match="vector_norm: x must be of a floating or complex dtype, got int64"):
        await linalg.vector_norm(whole)
    with pytest.raises(TypeError, match="vector_norm: ord must be a number"):
        await linalg.vector_norm(ref, ord="fro")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vector_norm: axis 2 is not there"):
        await linalg.vector_norm(ref, axis=2)
    with pytest.raises(ValueError, match="matrix_norm: ord must be 'fro', 'nuc', 1"):
        await linalg.matrix_norm(ref, ord=3)
    with pytest.raises(np.linalg.LinAlgError, match="matrix_norm: x must have shape"):
        await linalg.matrix_norm(ref[0])
    with pytest.raises(np.linalg.LinAlgError, match=r"matrix_power: x must have shape \(\.\.\., n, n\)"):
        await linalg.matrix_power(ref, 2)
    with pytest.raises(TypeError, match="matrix_power: n must be an integer"):
        await linalg.matrix_power(whole, 1.5)  # type: ignore[arg-type]
    with pytest.raises(np.linalg.LinAlgError, match="pinv: x must have shape"):
        await linalg.pinv(ref[0])


@SOLVER
async def test_failures_of_solvers_pass_through(device: ta.Device) -> None:
    ref = await device.zeros((2, 2))
    with pytest.raises(ta.LinAlgError, match="singular"):
        await linalg.matrix_power(ref, -2)
    with pytest.raises(ta.LinAlgError, match="NaN"):
        await linalg.matrix_norm(await (await device.zeros((2, 2))).fill(np.nan), ord=2)


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**600, 2.0**-600, 2.0**-1000])
async def test_powers_beyond_the_range(device: ta.Device, scale: float) -> None:
    x = values((6, 5)) + 3
    ref = await device.put(x * scale)
    for order in ORDERS:
        found = await (await linalg.vector_norm(ref, ord=order, axis=1)).to_host()
        expected = np.linalg.vector_norm(x, ord=order, axis=1) * (scale if order else 1)
        np.testing.assert_allclose(found, expected, rtol=1e-11)
    turned = await device.put(x * scale * (0.6 + 0.8j))
    for name in (2, "fro"):
        ask = linalg.vector_norm if name == 2 else linalg.matrix_norm
        for matrix in (ref, turned):
            found = await (await ask(matrix, ord=name)).to_host()  # type: ignore[arg-type]
            np.testing.assert_allclose(found, np.linalg.norm(x) * scale, rtol=1e-11)
    largest = float(np.finfo(np.float32).max)
    found = await linalg.vector_norm(await device.put(np.full(4, largest / 2, np.float32)), ord=20)
    np.testing.assert_allclose(await found.item(), largest / 2 * 4**0.05, rtol=1e-5)


async def test_norms_of_zeros_and_of_nan(device: ta.Device) -> None:
    for row in ([0.0, 0.0], [np.inf, 1.0], [np.inf, np.nan], [np.nan, 0.0], [-np.inf, np.inf]):
        for order in (2, 3, 0.5, -1, -3):
            found = await (await linalg.vector_norm(await device.put(np.array(row)), ord=order)).item()
            with np.errstate(all="ignore"):
                expected = np.linalg.norm(row, order)
            np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=f"{row} {order}")
