"""Products with factors and transposes, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "complex128": 1e-12,
    "complex64": 1e-5,
    "float16": 2e-3,
    "bfloat16": 2e-2,
}
WIDE = {"complex64": np.complex128, "complex128": np.complex128}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.uniform(-1, 1, shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.uniform(-1, 1, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _op(matrix: np.ndarray, letter: str) -> np.ndarray:
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[letter]


def _expected(alpha: complex, a: Any, b: Any, beta: complex, c: Any, op_a: str, op_b: str, dtype: str) -> Any:
    a, b, c = (matrix.astype(WIDE.get(dtype, np.float64)) for matrix in (a, b, c))
    product = alpha * _op(a, op_a) @ _op(b, op_b)
    return product + beta * c if beta else product


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op_a", ["N", "T", "C"])
@pytest.mark.parametrize("op_b", ["N", "T", "C"])
async def test_all_transposes_with_factors(device: ta.Device, dtype: str, op_a: Any, op_b: Any) -> None:
    rng = np.random.default_rng(1)
    m, n, k = 7, 5, 9
    a = _random(rng, (m, k) if op_a == "N" else (k, m), dtype)
    b = _random(rng, (k, n) if op_b == "N" else (n, k), dtype)
    c = _random(rng, (m, n), dtype)
    alpha, beta = (1.5 - 0.5j, -0.25 + 1j) if dtype.startswith("complex") else (1.5, -0.25)
    ref = await device.put(c)
    result = await ta.linalg.gemm(alpha, await device.put(a), b, beta, ref, op_a, op_b)
    assert result is ref
    expected = _expected(alpha, a, b, beta, c, op_a, op_b, dtype)
    error = np.abs(np.asarray(await ref.to_host(), expected.dtype) - expected).max()
    assert error <= TOLERANCE[dtype] * math.sqrt(k) * max(1.0, np.abs(expected).max())


async def test_without_c_the_result_is_new(device: ta.Device) -> None:
    rng = np.random.default_rng(2)
    a, b = _random(rng, (4, 3), "float64"), _random(rng, (3, 6), "float64")
    result = await ta.linalg.gemm(2.0, await device.put(a), b)
    np.testing.assert_allclose(await result.to_host(), 2 * a @ b, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
async def test_c_is_not_read_if_beta_is_zero(device: ta.Device, dtype: str) -> None:
    c = await device.full((2, 2), math.nan, dtype)
    eye = await (await device.put(np.eye(2))).cast(dtype)
    await ta.linalg.gemm(1.0, eye, eye, 0.0, c)
    np.testing.assert_array_equal(np.asarray(await c.to_host(), float), np.eye(2))


@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0)), ((1, 1), (1, 1))])
async def test_empty_and_tiny_matrices(device: ta.Device, shapes: Any) -> None:
    a, b = (np.ones(shape) for shape in shapes)
    c = np.full((a.shape[0], b.shape[1]), 3.0)
    ref = await device.put(c)
    await ta.linalg.gemm(2.0, await device.put(a), b, 0.5, ref)
    np.testing.assert_array_equal(await ref.to_host(), 2 * a @ b + 0.5 * c)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    letters=st.tuples(*[st.sampled_from("NTC")] * 2),
    dtype=st.sampled_from(["float32", "float64", "complex64", "complex128"]),
    factors=st.tuples(*[st.sampled_from([0.0, 1.0, -0.5, 3.0])] * 2),
    seed=st.integers(0, 2**32),
)
async def test_any_shape(sizes: Any, letters: Any, dtype: str, factors: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (m, n, k), (op_a, op_b), (alpha, beta) = sizes, letters, factors
    a = _random(rng, (m, k) if op_a == "N" else (k, m), dtype)
    b = _random(rng, (k, n) if op_b == "N" else (n, k), dtype)
    c = _random(rng, (m, n), dtype)
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
        ref = await device.put(c)
        await ta.linalg.gemm(alpha, a, await device.put(b), beta, ref, op_a, op_b)
        got = await ref.to_host()
    expected = _expected(alpha, a, b, beta, c, op_a, op_b, dtype)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype] * math.sqrt(k) * 4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"b": np.ones((4, 2))},
            ValueError,
            r"op\(b\) must have shape \(3, n\), got a of shape \(2, 3\) and b of shape \(4, 2\)",
        ),
        ({"b": np.ones(3)}, ValueError, r"b must have two axes, got shape \(3,\)"),
        ({"trans_a": "H"}, ValueError, "trans_a must be 'N', 'T' or 'C', got 'H'"),
        ({"beta": 1.0}, ValueError, "beta must be 0 without c"),
        ({"alpha": 1j}, TypeError, "alpha 1j is complex, the arrays are float64"),
        ({"b": np.ones((3, 2), "float32")}, TypeError, "share a dtype, got a float64, b float32"),
        ({"alpha": "2"}, TypeError, "alpha must be a number, got str"),
    ],
)
async def test_wrong_arguments_are_refused(
    device: ta.Device, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = {"alpha": 1.0, "a": await device.put(np.ones((2, 3))), "b": np.ones((3, 2)), **arguments}
    launched = (await device.statistics()).launched
    with pytest.raises(error, match=text):
        await ta.linalg.gemm(**given)
    assert (await device.statistics()).launched == launched


async def test_c_must_fit_and_be_apart(device: ta.Device) -> None:
    a = await device.put(np.ones((2, 2)))
    with pytest.raises(ValueError, match="c must not share memory with a"):
        await ta.linalg.gemm(1.0, a, a, 1.0, a)
    with pytest.raises(ValueError, match=r"c must have shape \(2, 2\) and dtype float64, got shape \(3, 2\)"):
        await ta.linalg.gemm(1.0, a, a, 1.0, await device.zeros((3, 2)))


async def test_c_may_be_a_view_with_gaps(device: ta.Device) -> None:
    whole = await device.put(np.ones((4, 6)))
    await ta.linalg.gemm(2.0, await device.put(np.eye(2)), np.ones((2, 3)), 1.0, whole[::2, ::2])
    expected = np.ones((4, 6))
    expected[::2, ::2] = 3.0
    np.testing.assert_array_equal(await whole.to_host(), expected)
