"""Banded, tridiagonal and Toeplitz systems, Schur forms and their relatives, against SciPy in float64."""

from __future__ import annotations

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

only_cpu = pytest.mark.skipif(BACKEND != "cpu", reason="the CUDA backend has no such operations")
both = pytest.mark.parametrize("isolation", ["inline", "process"])

Array = npt.NDArray[Any]
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}
COMPLEX = {"float32": "complex64", "float64": "complex128"}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape)
    return (values + 1j * generator.normal(size=shape) if "complex" in dtype else values).astype(dtype)


def wide(array: Array) -> Array:
    return array.astype(complex if array.dtype.kind == "c" else float)


def adjoint(matrices: Array) -> Array:
    return matrices.conj().swapaxes(-1, -2)


def dense(ab: Array, l: int, u: int) -> Array:  # noqa: E741
    """The matrix of a banded one, by its definition."""
    n = ab.shape[-1]
    a = np.zeros((*ab.shape[:-2], n, n), ab.dtype)
    for i in range(n):
        for j in range(max(0, i - l), min(n, i + u + 1)):
            a[..., i, j] = ab[..., u + i - j, j]
    return a


async def check(result: ta.AccelRef, expected: Array, dtype: str) -> None:
    assert (result.shape, result.dtype) == (expected.shape, dtype)
    size = max(np.abs(expected).max(initial=0), 1.0)
    np.testing.assert_allclose(await result.to_host(), expected, rtol=0, atol=20 * TOLERANCE[dtype] * size)


def solved(a: Array, b: Array) -> Array:
    result: Array = np.linalg.solve(wide(a), wide(b))
    return result


@pytest.mark.slow
@only_cpu
@given(
    n=st.integers(1, 9),
    l=st.integers(0, 3),
    u=st.integers(0, 3),
    stack=st.sampled_from([(), (2,), (2, 3), (0,)]),
    columns=st.integers(0, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=30, deadline=None)
def test_banded(n: int, l: int, u: int, stack: tuple[int, ...], columns: int, dtype: str) -> None:  # noqa: E741
    ab, b = normal((*stack, l + u + 1, n), dtype), normal((*stack, n, columns), dtype, 1)
    ab[..., u, :] += 9
    definite = wide(normal((*stack, u + 1, n), dtype))
    definite[..., u, :] = 20
    upper = dense(definite, 0, u)
    hermitian = upper + adjoint(upper) - 20 * np.eye(n)
    lower = np.zeros_like(definite)
    for row in range(u + 1):
        lower[..., row, : n - row] = np.diagonal(hermitian, -row, -2, -1) if row < n else 0

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await linalg.solve_banded((l, u), await device.put(ab), b)
            await check(result, solved(dense(ab, l, u), b), dtype)
            for band, is_lower in ((definite, False), (lower, True)):
                x = await linalg.solveh_banded(await device.put(band.astype(dtype)), b, is_lower)
                await check(x, solved(hermitian, b), dtype)

    trio.run(main)


@only_cpu
@given(
    n=st.integers(1, 9),
    stack=st.sampled_from([(), (2,), (2, 3)]),
    columns=st.integers(0, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=20, deadline=None)
def test_tridiagonal_and_toeplitz(n: int, stack: tuple[int, ...], columns: int, dtype: str) -> None:
    dl, d, du = (normal((*stack, n), dtype, seed) for seed in range(3))
    b = normal((*stack, n, columns), dtype, 3)
    d += 9
    # Unread elements may be anything.
    dl[..., 0], du[..., -1] = np.nan, np.nan
    a = dense(np.stack([np.roll(du, 1, -1), d, np.roll(dl, -1, -1)], -2), 1, 1)
    column = normal((*stack, n), dtype, 4)
    column[..., 0] += 9
    matrices = np.zeros((*stack, n, n), dtype)
    hermitian = matrices.copy()
    for index in np.ndindex(stack):
        matrices[index] = scipy.linalg.toeplitz(column[index], d[index] - 9)
        hermitian[index] = scipy.linalg.toeplitz(column[index])

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            await check(await linalg.solve_tridiagonal(dl, await device.put(d), du, b), solved(a, b), dtype)
            ref = await device.put(column)
            await check(await linalg.solve_toeplitz((ref, d - 9), b), solved(matrices, b), dtype)
            await check(await linalg.solve_toeplitz(ref, b), solved(hermitian, b), dtype)

    trio.run(main)


@only_cpu
@both
async def test_vectors(device: ta.Device) -> None:
    for dtype in TOLERANCE:
        b, d = normal((5,), dtype, 1), normal((5,), dtype) + 9
        off = normal((5,), dtype, 2)
        ab = np.stack([off, d, off])
        ref, right = await device.put(ab), await device.put(b)
        expected = solved(dense(ab, 1, 1), b)
        await check(await linalg.solve_banded((1, 1), ref, right), expected, dtype)
        tridiagonal = np.diag(d) + np.diag(off[1:], -1) + np.diag(off[:-1], 1)
        await check(await linalg.solve_tridiagonal(off, d, off, right), solved(tridiagonal, b), dtype)
        definite = np.stack([np.full(5, 9, dtype), off])
        hermitian = np.diag(definite[0]) + np.diag(off[:-1], -1) + np.diag(off[:-1].conj(), 1)
        x = await linalg.solveh_banded(await device.put(definite), right, lower=True)
        await check(x, solved(hermitian, b), dtype)
        first = d + 20 * np.eye(5, dtype=dtype)[0]
        await check(await linalg.solve_toeplitz(first, right), solved(scipy.linalg.toeplitz(first), b), dtype)


@only_cpu
@both
async def test_forms(device: ta.Device) -> None:
    for dtype in TOLERANCE:
        for shape in [(1, 1), (5, 5), (2, 3, 4, 4), (0, 3, 3), (2, 0, 0)]:
            a = normal(shape, dtype)
            ref = await device.put(a)
            for output in ("real", "complex"):
                t, z = await linalg.schur(ref, output)
                kind = COMPLEX.get(dtype, dtype) if output == "complex" else dtype
                form, vectors = await t.to_host(), await z.to_host()
                assert (form.dtype, vectors.dtype) == (kind, kind)
                assert not np.tril(form, -1 if output == "complex" or "complex" in dtype else -2).any()
                same(vectors @ form @ adjoint(vectors), a, dtype)
                same(vectors @ adjoint(vectors), np.broadcast_to(np.eye(shape[-1]), shape), dtype)
            h, q = await linalg.hessenberg(ref, calc_q=True)
            alone = await linalg.hessenberg(ref)
            reduced, vectors = await h.to_host(), await q.to_host()
            assert not np.tril(reduced, -2).any()
            same(vectors @ reduced @ adjoint(vectors), a, dtype)
            same(await alone.to_host(), reduced, dtype)


def same(left: Array, right: Array, dtype: str) -> None:
    assert left.shape == right.shape
    size = max(np.abs(right).max(initial=0), 1.0)
    np.testing.assert_allclose(left, right, rtol=0, atol=20 * TOLERANCE[dtype] * size)


@only_cpu
@both
async def test_factors_of_indefinite_matrices_and_square_roots(device: ta.Device) -> None:
    for dtype in TOLERANCE:
        for shape in [(1, 1), (6, 6), (2, 3, 4, 4), (0, 3, 3), (2, 0, 0)]:
            a = normal(shape, dtype)
            hermitian, symmetric = a + adjoint(a), a + a.swapaxes(-1, -2)
            for lower in (True, False):
                # Only one triangle is read.
                keep = np.tril if lower else np.triu
                lu, d, perm = await linalg.ldl(await device.put(keep(hermitian)), lower)
                outer = await lu.to_host()
                same(outer @ await d.to_host() @ adjoint(outer), hermitian, dtype)
                assert perm.dtype == "int32"
                order = np.take_along_axis(outer, (await perm.to_host())[..., None], -2)
                assert not (np.triu(order, 1) if lower else np.tril(order, -1)).any()
                lu, d, _ = await linalg.ldl(await device.put(keep(symmetric)), lower, hermitian=False)
                outer = await lu.to_host()
                same(outer @ await d.to_host() @ outer.swapaxes(-1, -2), symmetric, dtype)
            root = await linalg.sqrtm(await device.put(a))
            assert root.dtype == COMPLEX.get(dtype, dtype)
            found = await root.to_host()
            same(found @ found, a, dtype)
            # The principal one: no eigenvalue has a negative real part.
            assert (np.linalg.eigvals(found).real > -1e-5).all()


@only_cpu
async def test_roots_of_singular_matrices(device: ta.Device) -> None:
    turned, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))
    outer = np.array([[1.0, 2], [2, 4]])
    cases = [
        (np.zeros((3, 3)), np.zeros((3, 3))),
        (outer, outer / 5**0.5),
        (-outer, 1j * outer / 5**0.5),
        (np.diag([0.0, 4, 0, 9]), np.diag([0.0, 2, 0, 3])),
        (np.zeros((1, 1)), np.zeros((1, 1))),
        (turned * [0, 0, 1, 4] @ turned.T, turned * [0, 0, 1, 2] @ turned.T),
        (np.array([[0.0, 2, 0], [0, 4, 0], [0, 0, 0]]), np.array([[0.0, 1, 0], [0, 2, 0], [0, 0, 0]])),
    ]
    for matrix, root in cases:
        for dtype, tolerance in (("float64", 1e-13), ("complex64", 1e-5)):
            found = await (await linalg.sqrtm(await device.put(matrix.astype(dtype)))).to_host()
            np.testing.assert_allclose(found, root, rtol=0, atol=tolerance)


def with_bad(values: Array, bad: Array) -> Array:
    """Six of them, of which the last but one is bad."""
    return np.stack([values, values, values, values, bad, values]).reshape(2, 3, *values.shape)


NOTHING = np.zeros((2, 3, 3))
BAND = np.array([[1.0, 1, 1], [9, 9, 9], [1, 1, 1]])
BAD: dict[str, tuple[Callable[[Any], Awaitable[Any]], Array, int, str]] = {
    "banded": (
        lambda ab: linalg.solve_banded((1, 1), ab, np.ones((2, 3, 3, 1))), with_bad(BAND, BAND * 0), 1,
        r"solve_banded: matrix \(1, 1\) of the stack is singular: its pivot 1 is zero",
    ),
    "definite": (
        lambda ab: linalg.solveh_banded(ab, np.ones((2, 3, 3, 1)), lower=True),
        with_bad(BAND[1:], np.array([[1.0, 0, 1], [0, 0, 0]])), 2,
        r"solveh_banded: matrix \(1, 1\) of the stack is not positive definite: its leading minor of",
    ),
    "NaN of a definite one": (
        lambda ab: linalg.solveh_banded(ab, np.ones((2, 3, 3, 1)), lower=True),
        with_bad(BAND[1:], np.array([[1.0, np.nan, 1], [0, 0, 0]])), 2,
        r"solveh_banded: matrix \(1, 1\) of the stack is not positive definite",
    ),
    "tridiagonal": (
        lambda d: linalg.solve_tridiagonal(NOTHING, d, NOTHING, np.ones((2, 3, 3, 1))),
        with_bad(np.ones(3), np.array([1.0, 2, 0])), 3,
        r"solve_tridiagonal: matrix \(1, 1\) of the stack is singular: its pivot 3 is zero",
    ),
    "Toeplitz": (
        lambda c: linalg.solve_toeplitz(c, np.ones((2, 3, 3, 1))),
        with_bad(np.array([3.0, 1, 0]), np.zeros(3)), 1,
        r"solve_toeplitz: matrix \(1, 1\) of the stack has a singular leading minor",
    ),
    "schur": (
        linalg.schur, with_bad(np.eye(3), np.diag([1, np.nan, 1])), -1,
        r"schur: matrix \(1, 1\) of the stack holds a NaN or an infinity",
    ),
    "hessenberg": (
        linalg.hessenberg, with_bad(np.eye(3), np.diag([1, np.inf, 1])), -1,
        r"hessenberg: matrix \(1, 1\) of the stack holds a NaN or an infinity",
    ),
    "ldl": (
        linalg.ldl, with_bad(np.eye(3), np.diag([1, np.inf, 1])), -1,
        r"ldl: matrix \(1, 1\) of the stack holds a NaN or an infinity",
    ),
    "singular of sqrtm": (
        linalg.sqrtm, with_bad(np.eye(3), np.diag([1.0, 0, 0]) + np.eye(3, k=1)), 2,
        r"sqrtm: matrix \(1, 1\) of the stack has no square root: eigenvalue 2 is zero to rounding",
    ),
    "NaN of sqrtm": (
        linalg.sqrtm, with_bad(np.eye(3), np.diag([1.0, np.nan, 0])), -1,
        r"sqrtm: matrix \(1, 1\) of the stack holds a NaN or an infinity",
    ),
}  # fmt: skip


@only_cpu
@both
async def test_one_of_a_stack_is_bad(device: ta.Device) -> None:
    for name, (ask, arrays, code, message) in BAD.items():
        ref = await device.put(arrays)
        with pytest.raises(ta.LinAlgError, match=message) as caught:
            print(name, await ask(ref))
        assert (caught.value.index, caught.value.code) == ((1, 1), code), name


REFUSED: dict[str, tuple[Callable[[Any], Awaitable[Any]], type[Exception], str]] = {
    "rows of a band": (
        lambda x: linalg.solve_banded((1, 0), x, np.ones(3)), ValueError,
        r"solve_banded: ab must have a row for each of l \+ u \+ 1 diagonals, got l 1, u 0 and ab of",
    ),
    "negative diagonals": (
        lambda x: linalg.solve_banded((-1, 3), x, np.ones(3)), ValueError, r"ab must have a row for each of",
    ),
    "no whole diagonals": (
        lambda x: linalg.solve_banded((1.0, 1), x, np.ones(3)),  # type: ignore[arg-type]
        TypeError, r"solve_banded: l must be an integer, got 1\.0",
    ),
    "no row": (lambda x: linalg.solveh_banded(x[:0], np.ones(3)), ValueError, r"ab must have a row for the"),
    "lengths": (
        lambda x: linalg.solve_tridiagonal(x[0], x[0], x[0, :2], np.ones(3)), ValueError,
        r"solve_tridiagonal: du must have shape \(\.\.\., 3\)",
    ),
    "another stack": (
        lambda x: linalg.solve_tridiagonal(x, x, x, np.ones((2, 3, 1))), ValueError, r"same leading axes",
    ),
    "output": (
        lambda x: linalg.schur(x, "upper"),  # type: ignore[arg-type]
        ValueError, r"schur: output must be 'real' or 'complex', got 'upper'",
    ),
    "not square": (lambda x: linalg.sqrtm(x[:2]), ValueError, r"sqrtm: last 2 dimensions of a must be"),
    "no device": (lambda x: linalg.ldl(np.ones((2, 2))), TypeError, r"no operand is on a device"),
    "factor": (lambda x: linalg.cho_solve((x, True), np.ones(4)), ValueError, r"b must have shape \(3,\) or"),
    "which triangle": (
        lambda x: linalg.cho_solve((x, 2), np.ones(3)),  # type: ignore[arg-type]
        ValueError, r"cho_solve: lower must be False or True, got 2",
    ),
    "no factor": (
        lambda x: linalg.cho_solve(("x", True), x),  # type: ignore[arg-type]
        TypeError, r"linalg\.cho_solve: c must be an AccelRef or a NumPy array, got str",
    ),
    "a factor of integers": (
        lambda x: linalg.cho_solve((np.eye(3, dtype=int), True), x), TypeError, r"solve: c has dtype int64",
    ),
    "no first row": (
        lambda x: linalg.solve_toeplitz((x[0], "x"), x[0]),  # type: ignore[arg-type]
        TypeError, r"solve_toeplitz: r must be an AccelRef or a NumPy array, got str",
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


@pytest.mark.skipif(BACKEND != "cuda", reason="others have them")
async def test_cuda_refuses_them(device: ta.Device) -> None:
    x = await device.put(np.eye(3))
    for ask in (linalg.schur, linalg.hessenberg, linalg.ldl, linalg.sqrtm):
        with pytest.raises(ta.NotSupportedError):
            await ask(x)
    for solving in (
        lambda: linalg.solve_banded((1, 1), x, np.ones(3)),
        lambda: linalg.solveh_banded(x, np.ones(3)),
        lambda: linalg.solve_tridiagonal(x[0], x[0], x[0], np.ones(3)),
        lambda: linalg.solve_toeplitz(x[0], np.ones(3)),
    ):
        with pytest.raises(ta.NotSupportedError):
            await solving()


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuSOLVER")
@dtypes
async def test_cho_solve(device: ta.Device, dtype: str) -> None:
    for lower in (True, False):
        a = normal((3, 5, 5), dtype)
        definite = (wide(a) @ adjoint(wide(a)) + 5 * np.eye(5)).astype(dtype)
        factor = np.linalg.cholesky(definite)
        ref = await device.put(factor if lower else adjoint(factor))
        for sides in ((5,), (3, 5, 2), (5, 0)):
            b = normal(sides, dtype, 2)
            expected = solved(definite, b)
            await check(await linalg.cho_solve((ref, lower), b), expected, dtype)
