"""Every operation of every capability in each isolation, with operands by every way that they may take.

The suites of the capabilities test the numbers for all dtypes and layouts. Here each operation runs once or
twice with arrays on the device, views of them, and host arrays that are sent with the message (small) or
through memory visible to both processes (large).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import scipy.fft
import scipy.sparse
from chosen import BACKEND, IS_STAND_IN
from isolations import isolated

import trio_accel as ta
from trio_accel import fft, linalg, random, sparse

Array = npt.NDArray[Any]
Way = Callable[[ta.Device, Array], Awaitable[ta.AccelRef | Array]]

needs_blas = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has products of general matrices only")
# Above 64 KiB a host array is copied by the application itself.
SMALL, LARGE = (6, 8), (130, 140)


async def _as_ref(device: ta.Device, host: Array) -> ta.AccelRef:
    return await device.put(host)


async def _as_view(device: ta.Device, host: Array) -> ta.AccelRef:
    """Every other element of a larger array, read backwards."""
    wide = np.zeros(tuple(2 * size for size in host.shape), host.dtype)
    every_other = (slice(None, None, -2),) * host.ndim
    wide[every_other] = host
    return (await device.put(wide))[every_other]


async def _as_host(device: ta.Device, host: Array) -> Array:
    return host


async def _as_fortran(device: ta.Device, host: Array) -> Array:
    return np.asfortranarray(host)


async def _as_strided(device: ta.Device, host: Array) -> Array:
    wide = np.zeros(tuple(3 * size for size in host.shape), host.dtype)
    part = wide[(slice(None, None, 3),) * host.ndim]
    part[...] = host
    return part


WAYS: list[Way] = [_as_ref, _as_view, _as_host, _as_fortran, _as_strided]


def normal(shape: int | tuple[int, ...], seed: int, *, is_complex: bool = False) -> Array:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    return values + 1j * generator.standard_normal(shape) if is_complex else values


async def close(ref: ta.AccelRef, expected: Array, terms: int = 1) -> None:
    host = await ref.to_host()
    assert (host.shape, host.dtype) == (expected.shape, expected.dtype)
    scale = np.abs(expected).max(initial=1.0) * max(terms, 1) ** 0.5
    np.testing.assert_allclose(host, expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_matrix_products(device: ta.Device, shape: tuple[int, int]) -> None:
    m, k = shape
    a, b, c = normal((m, k), 1), normal((k, m), 2), normal((m, m), 3)
    first = await device.put(a)
    out = await device.zeros((m, m))
    for way in WAYS:
        assert await linalg.matmul(first, await way(device, b), out=out) is out
        await close(out, a @ b, k)
    await close(await linalg.matmul(await _as_view(device, a), b), a @ b, k)
    await close(await linalg.matmul(b.T, await _as_view(device, b)), b.T @ b, k)
    stack = normal((3, *shape), 4)
    await close(await linalg.matmul(await device.put(stack), b), stack @ b, k)
    added = await device.put(c)
    assert await linalg.gemm(0.5, first.T, b.T, 2.0, added, "T", "C") is added
    await close(added, 0.5 * a @ b + 2.0 * c, k)


@pytest.mark.parametrize("n", [0, 1, 7, 20_001])
async def test_vectors(device: ta.Device, n: int) -> None:
    for way in WAYS:
        await _check_vectors(device, n, way)


async def _check_vectors(device: ta.Device, n: int, way: Way) -> None:
    x, y = normal(n, 1, is_complex=True), normal(n, 2, is_complex=True)
    other = await device.put(y)
    alpha = 0.5 - 2j
    assert await linalg.axpy(alpha, await way(device, x), other) is other
    await close(other, alpha * x + y)
    assert await linalg.scal(alpha, other) is other
    await close(other, alpha * (alpha * x + y))
    out = await device.zeros((), complex)
    on_device = await device.put(y)
    assert await linalg.dot(await way(device, x), on_device, out=out) is out
    scale = max(float(np.abs(x) @ np.abs(y)), 1.0)
    assert abs(await out.item() - np.sum(x * y)) <= 1e-12 * scale * max(n, 1) ** 0.5
    norm = await linalg.nrm2(await _as_view(device, x))
    assert await norm.item() == pytest.approx(float(np.linalg.norm(x)), rel=1e-12 * max(n, 1) ** 0.5)


@needs_blas
@pytest.mark.parametrize("n", [0, 1, 7, 70])
async def test_vectors_and_triangles(device: ta.Device, n: int) -> None:
    a, x, y = (normal(shape, seed, is_complex=True) for seed, shape in enumerate([(n, n), n, n]))
    a += (n + 1) * np.eye(n)
    lower, hermitian = np.tril(a), np.tril(a) + np.tril(a, -1).conj().T
    hermitian -= 1j * np.diag(hermitian.diagonal().imag)
    flags = {"lower": True, "hermitian": True}
    first, second = await device.put(x), await device.put(y)
    assert await linalg.swap(first, second) == (first, second)
    await linalg.rot(first, second, 0.6, 0.8)
    await close(first, 0.6 * y + 0.8 * x)
    await close(second, 0.6 * x - 0.8 * y)
    matrix = await device.put(a)
    total = await linalg.asum(await device.put(x))
    assert await total.item() == pytest.approx(np.abs(x.view(float)).sum(), rel=1e-12)
    for way in WAYS[: 5 if n else 0]:
        given = await way(device, a)
        await close(await linalg.gemv(2.0, given, first), 2.0 * a @ (0.6 * y + 0.8 * x), n)
        await close(await linalg.symv(1.0, matrix, await way(device, x), **flags), hermitian @ x, n)
        await close(await linalg.symm(1.0, matrix, given, side="R", **flags), a @ hermitian, n * n)
        await close(await linalg.trsv(matrix, await way(device, x), lower=True), np.linalg.solve(lower, x), n)
        await close(await linalg.trmv(matrix, await way(device, x), "C", True), lower.conj().T @ x, n)
        solved = await linalg.trsm(0.5j, matrix, given, lower=True)
        await close(await linalg.trmm(-2j, matrix, solved, lower=True, out=solved), a, n)
        for update, product in (
            (lambda c, w: linalg.syr(1.0, w, c, **flags), np.outer(x, x.conj())),
            (lambda c, w: linalg.syr2(1.0, w, y, c, **flags), np.outer(x, y.conj()) + np.outer(y, x.conj())),
            (lambda c, w: linalg.ger(1.0, w, y, c, conjugate=True), np.outer(x, y.conj())),
        ):
            out = await device.zeros((n, n), complex)
            assert await update(out, await way(device, x)) is out
            await close(await _lower(device, out), np.tril(product))
        for trans, left in (("N", a), ("C", a.conj().T)):
            out = await device.zeros((n, n), complex)
            assert await linalg.syrk(1.0, given, 0.0, out, trans, **flags) is out
            await close(out, np.tril(left @ left.conj().T), n * n)
            await linalg.syr2k(1.0, given, matrix, -1.0, out, trans, **flags)
            await close(out, np.tril(left @ left.conj().T), n * n)
        index = await device.ask(linalg.Iamax(await way(device, x)))
        assert await index.item() == np.abs(x.view(float)).reshape(n, 2).sum(1).argmax()


async def _lower(device: ta.Device, ref: ta.AccelRef) -> ta.AccelRef:
    """The lower triangle, without the elements above it."""
    return await device.put(np.tril(await ref.to_host()))


ONE_AXIS = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL_AXES = [f"{name}{axes}" for name in ONE_AXIS for axes in ("2", "n")]


def _input(name: str, shape: tuple[int, int]) -> Array:
    return normal(shape, 1, is_complex=not name.startswith(("rfft", "ihfft")))


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_transforms(device: ta.Device, shape: tuple[int, int]) -> None:
    for number, name in enumerate([*ONE_AXIS, *SEVERAL_AXES]):
        host = _input(name, shape)
        expected = getattr(scipy.fft, name)(host, norm="ortho")
        # The others are of the wrong device: a host array names none.
        operand = await WAYS[number % 2](device, host)
        result = await getattr(fft, name)(operand, norm="ortho")
        await close(result, expected, host.size)
        out = await device.zeros(expected.shape, expected.dtype)
        for way in WAYS[2:]:
            assert await getattr(fft, name)(await way(device, host), norm="ortho", out=out) is out
            await close(out, expected, host.size)


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (0, 3), (300, 20_000)])
async def test_sparse_products(device: ta.Device, rows: int, columns: int) -> None:
    matrix = scipy.sparse.random_array(
        (rows, columns), density=0.05, rng=np.random.default_rng(rows), format="csr"
    )
    a = await sparse.csr(device, matrix)
    x = normal(columns, 1)
    expected = matrix @ x
    out = await device.full(rows, np.nan)
    for way in WAYS:
        assert await sparse.spmv(a, await way(device, x), out=out) is out
        await close(out, expected, columns)
    await close(await sparse.spmv(a, x), expected, columns)


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (0, 3), (300, 400)])
async def test_sparse_matrices_and_dense_ones(device: ta.Device, rows: int, columns: int) -> None:
    matrix = scipy.sparse.random_array(
        (rows, columns), density=0.05, rng=np.random.default_rng(rows), format="csr"
    )
    a, dense = await sparse.csr(device, matrix), matrix.toarray()
    await close(await sparse.to_dense(a), dense)
    if IS_STAND_IN:
        return
    b, c = normal((columns, 3), 1), normal((rows, 3), 2)
    for way in WAYS:
        await close(await sparse.spmm(a, await way(device, b)), dense @ b, columns)
        out = await device.put(c)
        assert await sparse.spmm(a, await way(device, b), alpha=0.5, beta=-2.0, out=out) is out
        await close(out, 0.5 * dense @ b - 2.0 * c, columns)
        await close(await sparse.spmm(a, await way(device, c), transpose="T"), dense.T @ c, rows)
        sampled = await sparse.sddmm(a, await way(device, c), await way(device, b.T))
        await close(sampled, (c @ b.T)[matrix.nonzero()], 3)


async def test_random_numbers(system: ta.System, device: ta.Device) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as reference:
        mine, theirs = (random.Generator(place, seed=2**63 + 5) for place in (device, reference))
        for shape in (0, 1, (3, 5), 40_001):
            draws: Iterator[tuple[str, tuple[object, ...]]] = iter(
                [
                    ("bits", ()),
                    ("uniform", ("float32",)),
                    ("uniform", ("float64",)),
                    ("normal", ("float64",)),
                    ("exponential", ("float64",)),
                    ("lognormal", ("float64",)),
                    ("integers", (-7, 1 << 30)),
                ]
            )
            for name, arguments in draws:
                here = await getattr(mine, name)(shape, *arguments)
                there = await getattr(theirs, name)(shape, *arguments)
                np.testing.assert_array_equal(await here.to_host(), await there.to_host())
        # Once more against numbers from outside: NumPy's own Philox is another one, cuRAND's is this.
        bits = await (await random.Generator(device, seed=0x0123456789ABCDEF).bits(3)).to_host()
        assert bits.tolist() == [0xB850222E, 0xC58CB04B, 0x14A7A020]


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_arrays(device: ta.Device, shape: tuple[int, int]) -> None:
    host = normal(shape, 1)
    for way in WAYS:
        if way in (_as_ref, _as_view):
            ref = await way(device, host)
        else:
            ref = await device.put(await way(device, host))
        assert isinstance(ref, ta.AccelRef)
        np.testing.assert_array_equal(await ref.to_host(), host)
        np.testing.assert_array_equal(await (await ref.copy()).to_host(), host)
        np.testing.assert_array_equal(await (await ref.cast("float32")).to_host(), host.astype(np.float32))
        for out in (np.empty(shape), np.empty(shape, order="F"), np.empty((2 * shape[0], 3 * shape[1]))):
            into = out if out.shape == shape else out[1::2, ::-3]
            assert await ref.to_host(out=into) is into
            np.testing.assert_array_equal(into, host)
        await ref.fill(-2.5)
        np.testing.assert_array_equal(await ref.to_host(), np.full(shape, -2.5))
    np.testing.assert_array_equal(await (await device.full(shape, 7, "int8")).to_host(), np.full(shape, 7))
    np.testing.assert_array_equal(await (await device.zeros(shape)).to_host(), np.zeros(shape))


async def test_every_code_of_every_narrow_dtype(device: ta.Device) -> None:
    for code, dtypes in (
        (np.uint8, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.uint8)),
        (np.uint16, (ml_dtypes.bfloat16, np.float16, np.int16, np.uint16)),
    ):
        codes = np.arange(np.iinfo(code).max + 1, dtype=code)
        for dtype in dtypes:
            ref = await device.put(codes.view(dtype))
            np.testing.assert_array_equal((await ref.to_host()).view(code), codes)
            np.testing.assert_array_equal((await (await ref[::-3].copy()).to_host()).view(code), codes[::-3])


@isolated
@pytest.mark.parametrize("nbytes", [65_535, 65_536, 65_537])
async def test_both_ways_meet_at_their_border(device: ta.Device, nbytes: int) -> None:
    host = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    ref = await device.put(host)
    np.testing.assert_array_equal(await ref.to_host(), host)
    out = np.zeros((nbytes, 2), np.uint8)
    await ref.to_host(out=out[:, 1])
    np.testing.assert_array_equal(out[:, 1], host)
    assert not out[:, 0].any()


@pytest.mark.slow
async def test_a_gibibyte(device: ta.Device) -> None:
    size = 1 << 30
    if device.info.total_memory < 6 * size:
        pytest.skip("too little memory for an array of 1 GiB and its copy")
    host = np.arange(size // 8, dtype=np.int64)
    ref = await device.put(host)
    assert await (await ref[-1:].copy()).item() == host[-1]
    if device.info.backend == "cpu":
        async with ref.lease() as array:
            assert np.array_equal(array, host)
            # Objects kept from a lease keep the memory.
            del array
    host[: host.size // 4] = 0
    await ref[: host.size // 4].to_host(out=host[: host.size // 4])
    assert host[: host.size // 4].sum() == (host.size // 4) * (host.size // 4 - 1) // 2
    ref.release()
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0
