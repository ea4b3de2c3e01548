"""Composed functions of matrices, against SciPy and NumPy in float64."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")

Array = npt.NDArray[Any]
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}
REAL = {"complex64": "float32", "complex128": "float64"}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
shapes = pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 3, 4, 4), (7, 3), (2, 3, 6)], ids=str)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    return (values + 1j * generator.normal(size=shape) if "complex" in dtype else values).astype(dtype)


def wide(array: Array) -> Array:
    return array.astype(complex if array.dtype.kind == "c" else float)


def adjoint(matrices: Array) -> Array:
    return matrices.conj().swapaxes(-1, -2)


def same(left: Array, right: Array, dtype: str, more: float = 1) -> None:
    assert left.shape == right.shape
    size = max(np.abs(right).max(initial=0), 1.0)
    np.testing.assert_allclose(left, right, rtol=0, atol=20 * more * TOLERANCE[dtype] * size)


@no_stand_in
@given(
    n=st.integers(1, 7),
    # Around the norms where the degree changes, and those where matrices are halved.
    size=st.sampled_from([0.0, 0.01, 0.1, 0.4, 0.9, 2.0, 4.0, 5.5, 20.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_expm(n: int, size: float, dtype: str, seed: int) -> None:
    a = normal((3, n, n), dtype, seed)
    # Each of a stack is halved as often as it needs.
    norms = np.abs(a).sum(-2).max(-1)[:, None, None]
    a = (a / norms * np.array([1, 0.1, 1e-3])[:, None, None] * size).astype(dtype)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await linalg.expm(await device.put(a))
            assert result.dtype == dtype
            # Squarings lose what the norm is: no algorithm in the dtype does better.
            same(await result.to_host(), scipy.linalg.expm(wide(a)), dtype, max(1, size))

    trio.run(main)


@no_stand_in
async def test_expm_of_known_matrices(device: ta.Device) -> None:
    # Rotations, nilpotent matrices, and diagonals: their exponentials are known.
    angle = 2.5
    a = np.array([[[0, -angle], [angle, 0]], [[0, 7], [0, 0]], [[-30, 0], [0, 3]]])
    c, s = np.cos(angle), np.sin(angle)
    expected = np.array([[[c, -s], [s, c]], [[1, 7], [0, 1]], [[np.exp(-30), 0], [0, np.exp(3)]]])
    result = await (await linalg.expm(await device.put(a))).to_host()
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-13)
    assert (await linalg.expm(await device.put(np.ones((2, 0, 0))))).shape == (2, 0, 0)
    one = await (await linalg.expm(await device.put(a[0]))).to_host()
    np.testing.assert_allclose(one, expected[0], atol=1e-14)
    a[1, 0, 0] = np.nan
    with_nan = await (await linalg.expm(await device.put(a))).to_host()
    assert np.isnan(with_nan[1]).all()
    np.testing.assert_allclose(with_nan[[0, 2]], expected[[0, 2]], rtol=1e-13, atol=1e-13)


@no_stand_in
@shapes
@dtypes
async def test_polar(device: ta.Device, shape: tuple[int, ...], dtype: str) -> None:
    a = normal(shape, dtype)
    for side in ("right", "left"):
        u, p = await linalg.polar(await device.put(a), side)
        assert (u.dtype, p.dtype) == (dtype, dtype)
        pairs = [scipy.linalg.polar(wide(one), side) for one in a.reshape(-1, *shape[-2:])]
        expected = [np.stack(parts) for parts in zip(*pairs, strict=True)]
        same(await p.to_host(), expected[1].reshape(p.shape), dtype, 10)
        # Of a matrix without full rank on that side, u is not the only one.
        unitary = await u.to_host()
        product = unitary @ await p.to_host() if side == "right" else await p.to_host() @ unitary
        same(product, a, dtype)
        if (shape[-2] >= shape[-1]) is (side == "right") or shape[-1] == shape[-2]:
            same(unitary, expected[0].reshape(shape), dtype, 10)


@no_stand_in
@pytest.mark.parametrize("rank", [0, 1, 3, 4])
@dtypes
async def test_ranges_and_null_spaces(device: ta.Device, rank: int, dtype: str) -> None:
    a = (normal((6, rank), dtype) @ normal((rank, 4), dtype, 1)).astype(dtype)
    for matrix in (a, np.ascontiguousarray(adjoint(a))):
        ref = await device.put(matrix)
        # Products in single precision are further from their rank than its roundings.
        basis = await (await linalg.orth(ref, 1e-4)).to_host()
        null = await (await linalg.null_space(ref, 1e-4)).to_host()
        m, n = matrix.shape
        assert (basis.shape, null.shape) == ((m, rank), (n, n - rank))
        same(adjoint(basis) @ basis, np.eye(rank), dtype)
        same(adjoint(null) @ null, np.eye(n - rank), dtype)
        same(basis @ (adjoint(basis) @ matrix), matrix, dtype)
        same(matrix @ null, np.zeros((m, n - rank)), dtype)
        # SciPy's spans the same space.
        theirs = scipy.linalg.null_space(wide(matrix), 1e-4)
        same(null @ adjoint(null), theirs @ adjoint(theirs), dtype)
    whole = await device.put(np.eye(3, dtype=dtype))
    assert (await linalg.orth(whole)).shape == (3, 3)
    assert (await linalg.null_space(whole)).shape == (3, 0)


def dtype_limit(dtype: str) -> float:
    """Return a number with a square outside the range of a dtype."""
    return 2.0**70 if dtype in ("float32", "complex64") else 2.0**600


@no_stand_in
@pytest.mark.parametrize("p", [None, 2, -2, 1, -1, np.inf, -np.inf, "fro", "nuc"], ids=str)
@dtypes
async def test_cond(device: ta.Device, p: Any, dtype: str) -> None:
    matrices = [(4, 4), (2, 3, 3, 3), *([(5, 2), (2, 2, 6)] if p in (None, 2, -2) else [])]
    for shape in matrices:
        a = normal(shape, dtype) + 3 * np.eye(*shape[-2:], dtype=dtype)
        result = await linalg.cond(await device.put(a), p)
        assert result.dtype == REAL.get(dtype, dtype)
        expected = np.asarray(np.linalg.cond(wide(a), p))
        assert result.shape == expected.shape
        np.testing.assert_allclose(await result.to_host(), expected, rtol=500 * TOLERANCE[dtype])
    singular = await linalg.cond(await device.put(np.diag([1, 0]).astype(dtype)))
    assert np.isinf(await singular.to_host())
    # Among others a singular one, zeros, and one with squares outside the range.
    full = np.array([[[1, 2], [2, 4]], [[3, 1], [1, 2]], [[0, 0], [0, 0]]], dtype)
    full = np.concatenate([full, full[1:2] * dtype_limit(dtype)])
    found = await (await linalg.cond(await device.put(full), p)).to_host()
    expected = np.linalg.cond(wide(full[1]), p)
    np.testing.assert_allclose(found[[1, 3]], expected, rtol=500 * TOLERANCE[dtype])
    if p in (None, 2, -2):
        assert found[2] == np.inf
    else:
        assert found[[0, 2]].tolist() == [np.inf, np.inf]


@given(
    extents=st.lists(st.integers(1, 6), min_size=3, max_size=6),
    first=st.booleans(),
    last=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=30, deadline=None)
def test_multi_dot(extents: list[int], dtype: str, *, first: bool, last: bool) -> None:
    arrays = [normal(pair, dtype, seed) for seed, pair in enumerate(itertools.pairwise(extents))]
    arrays[0] = arrays[0][0] if first else arrays[0]
    arrays[-1] = arrays[-1][:, 0] if last else arrays[-1]
    expected = np.asarray(np.linalg.multi_dot([wide(one) for one in arrays]))

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await linalg.multi_dot([*arrays[:-1], await device.put(arrays[-1])])
            assert result.dtype == dtype
            same(await result.to_host(), expected, dtype, 10)

    trio.run(main)


async def test_multi_dot_takes_the_order_of_fewest_steps(device: ta.Device) -> None:
    # From the left, the first product would have 160000 elements.
    column, row = await device.put(np.ones((400, 1))), await device.put(np.ones((1, 400)))
    await device.synchronize()
    before = (await device.statistics()).memory.used
    result = await linalg.multi_dot([column, row, column])
    assert (await result.to_host()).tolist() == [[400.0]] * 400
    await device.synchronize()
    statistics = await device.statistics()
    assert statistics.memory.used == before + result.nbytes
    assert statistics.memory.peak < before + 160000 * 8


@no_stand_in
async def test_intermediate_arrays_are_freed(device: ta.Device) -> None:
    x = await device.put(np.eye(20) * 9)
    results = [await linalg.expm(x), await linalg.cond(x), *await linalg.polar(x)]
    await device.synchronize()
    used = x.nbytes + sum(result.nbytes for result in results)
    assert (await device.statistics()).memory.used == used


REFUSED: dict[str, tuple[Callable[[Any], Awaitable[Any]], type[Exception], str]] = {
    "expm, not square": (
        lambda x: linalg.expm(x[:2]), np.linalg.LinAlgError,
        r"expm: x must have shape \(\.\.\., n, n\)",
    ),
    "expm of integers": (
        lambda x: linalg.expm(np.eye(2, dtype=int)), TypeError,
        r"no operand is on a device",
    ),
    "side": (lambda x: linalg.polar(x, "up"), ValueError, r"polar: side must be 'right' or 'left', got 'up'"),
    "a stack": (
        lambda x: linalg.orth(x[None]), np.linalg.LinAlgError,
        r"orth: A must have shape \(m, n\), got shape",
    ),
    "a vector": (
        lambda x: linalg.null_space(x[0]), np.linalg.LinAlgError,
        r"null_space: A must have shape \(m, n\)",
    ),
    "a tolerance on the device": (
        lambda x: linalg.orth(x, rcond=x), TypeError,
        r"linalg\.orth: rcond must be a real number, got <AccelRef float64 \(3, 3\)",
    ),
    "a tolerance of pinv": (
        lambda x: linalg.pinv(x, rtol="abc"), TypeError,
        r"linalg\.pinv: rtol must be a real number, got 'abc'",
    ),
    "a tolerance of another shape": (
        lambda x: linalg.matrix_rank(x, rtol=x), ValueError,
        r"linalg\.matrix_rank: rtol must have the shape of the stack, \(\), got shape \(3, 3\)",
    ),
    "a complex tolerance": (
        lambda x: linalg.null_space(x, 1j), TypeError,
        r"linalg\.null_space: rcond must be a real number, got 1j",
    ),
    "a tolerance of lstsq": (
        lambda x: linalg.lstsq(x, x[0], x), TypeError,
        r"linalg\.lstsq: rcond must be a real number, got <AccelRef float64 \(3, 3\)",
    ),
    "order": (lambda x: linalg.cond(x, 3), ValueError, r"cond: p must be None, 'fro', 'nuc', 1"),
    "cond, not square": (lambda x: linalg.cond(x[:2], 1), np.linalg.LinAlgError, r"cond: x must have shape"),
    "cond of nothing": (
        lambda x: linalg.cond(x[:0]), ValueError,
        r"cond: x must have elements, got shape \(0, 3\)",
    ),
    "one array": (
        lambda x: linalg.multi_dot([x]), ValueError,
        r"multi_dot: arrays must be at least two, got 1",
    ),
    "shapes": (
        lambda x: linalg.multi_dot([x, x[:2]]), ValueError,
        r"multi_dot: arrays must be matrices that fit",
    ),
    "a vector between": (
        lambda x: linalg.multi_dot([x, x[0], x]), ValueError,
        r"with vectors at the ends, got",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_before_anything_is_launched(device: ta.Device, case: str) -> None:
    call, error, match = REFUSED[case]
    x = await device.put(np.ones((3, 3)))
    before = (await device.statistics()).launched
    with pytest.raises(error, match=match):
        await call(x)
    assert (await device.statistics()).launched == before
