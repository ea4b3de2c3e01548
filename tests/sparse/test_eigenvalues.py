"""Eigenvalues of sparse matrices against the exact spectrum: equal ones, clusters, and shifts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import IS_STAND_IN
from sparse_matrices import NEEDS_DIRECT, NEEDS_STRUCTURES, laplacian, well_conditioned

import trio_accel as ta
from trio_accel import sparse

NO_SPMM = pytest.mark.skipif(
    IS_STAND_IN, reason="compiles each step for the stand-in driver, which takes a minute"
)


def of_laplacian(*sides: int) -> tuple[Any, Any]:
    """Make the Laplacian of a box, and its spectrum: values of a cube occur up to six times."""
    lines = [scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in sides]
    made, spectrum = scipy.sparse.csr_array((1, 1)), np.zeros(1)
    for line, n in zip(lines, sides, strict=True):
        made = scipy.sparse.kronsum(line, made)
        ones = 2 - 2 * np.cos(np.arange(1, n + 1) * np.pi / (n + 1))
        spectrum = (spectrum[:, None] + ones).ravel()
    return scipy.sparse.csr_array(made), np.sort(spectrum)


def clustered() -> tuple[Any, Any]:
    """Make a matrix with five values within 1e-8, and five more within 1e-5."""
    n, generator = 90, np.random.default_rng(3)
    turned, _ = np.linalg.qr(generator.normal(size=(n, n)))
    spectrum = np.concatenate(
        [1 + 2e-9 * np.arange(5), 1.1 + 2e-6 * np.arange(5), np.linspace(0, 0.9, n - 10)]
    )
    full = (turned * spectrum) @ turned.T
    return scipy.sparse.csr_array((full + full.T) / 2), np.sort(spectrum)


def with_zero_blocks() -> tuple[Any, Any]:
    part, spectrum = of_laplacian(5, 5)
    made = scipy.sparse.block_diag([part, scipy.sparse.csr_array((20, 20)), part])
    return scipy.sparse.csr_array(made), np.sort([*spectrum, *np.zeros(20), *spectrum])


SPECTRA = {
    "a square": of_laplacian(12, 12),
    "a long box": of_laplacian(4, 40),
    "a cube": of_laplacian(5, 5, 5),
    "the identity": (scipy.sparse.csr_array(scipy.sparse.eye_array(60)), np.ones(60)),
    "zeros": (scipy.sparse.csr_array((50, 50)), np.zeros(50)),
    "zero blocks": with_zero_blocks(),
    "clusters": clustered(),
    "both signs": (of_laplacian(9, 9)[0] - 4 * scipy.sparse.eye_array(81), of_laplacian(9, 9)[1] - 4),
    "huge": (of_laplacian(7, 7)[0] * 1e250, of_laplacian(7, 7)[1] * 1e250),
    "tiny": (of_laplacian(7, 7)[0] * 1e-250, of_laplacian(7, 7)[1] * 1e-250),
}


def wanted(spectrum: Any, k: int, which: str) -> Any:
    order = {"LM": -np.abs(spectrum), "LA": -spectrum, "SA": spectrum}[which]
    return spectrum[np.argsort(order, kind="stable")[:k]]


async def check_pairs(found: sparse.EigshResult, matrix: Any, expected: Any, which: str, tol: float) -> None:
    w, v = await found.eigenvalues.to_host(), await found.eigenvectors.to_host()
    scale = np.abs(matrix).max() or 1
    assert np.all(np.diff(w) >= 0)
    # Of 4 and -4, either has the largest absolute value.
    known, values = (np.abs(expected), np.abs(w)) if which == "LM" else (expected, w)
    np.testing.assert_allclose(
        np.sort(values) / scale, np.sort(known) / scale, rtol=0, atol=10 * max(tol, 1e-14)
    )
    np.testing.assert_allclose(matrix / scale @ v, v * (w / scale), rtol=0, atol=4 * max(tol, 1e-13))
    np.testing.assert_allclose(v.T @ v, np.eye(len(w)), rtol=0, atol=1e-12)


@NO_SPMM
@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
@pytest.mark.parametrize("name", SPECTRA)
async def test_equal_and_close_values_are_all_found(device: ta.Device, name: str, which: Any) -> None:
    matrix, spectrum = SPECTRA[name]
    a = await sparse.csr(device, scipy.sparse.csr_array(matrix))
    for k, tol in ((1, 0.0), (4, 1e-6), (9, 1e-9)):
        found = await sparse.eigsh(a, k, which, tol=tol)
        await check_pairs(found, matrix, wanted(spectrum, k, which), which, tol)


@NO_SPMM
@pytest.mark.parametrize("which", ["LA", "SA"])
async def test_twenty_values_of_a_large_laplacian(device: ta.Device, which: Any) -> None:
    matrix, spectrum = of_laplacian(40, 40)
    a = await sparse.csr(device, matrix)
    for k, tol in ((4, 1e-12), (20, 1e-6)):
        await check_pairs(
            await sparse.eigsh(a, k, which, tol=tol), matrix, wanted(spectrum, k, which), which, tol
        )


@NEEDS_DIRECT
@NEEDS_STRUCTURES
async def test_values_near_a_number(device: ta.Device) -> None:
    for sides, sigma in itertools.product([(9, 9), (4, 4, 4)], [0.0, -1.0, 3.14]):
        matrix, spectrum = of_laplacian(*sides)
        expected = np.sort(spectrum[np.argsort(np.abs(spectrum - sigma), kind="stable")[:6]])
        for a in (await sparse.csr(device, matrix), await sparse.coo(device, matrix)):
            await check_pairs(await sparse.eigsh(a, 6, sigma=sigma), matrix, expected, "LA", 0)
    # By `which`, those above a number, and those below it.
    for which, side in (("LA", spectrum[spectrum > 3.14][:3]), ("SA", spectrum[spectrum < 3.14][-3:])):
        found = await sparse.eigsh(await sparse.csr(device, matrix), 3, which, sigma=3.14)  # type: ignore[arg-type]
        await check_pairs(found, matrix, side, "LA", 0)


@NEEDS_DIRECT
@NEEDS_STRUCTURES
async def test_values_after_a_much_nearer_value_on_the_other_side(device: ta.Device) -> None:
    spectrum = np.array([0.49999, 3.0, 5.0, 7.0, 11.0, 13.0])
    turned, _ = np.linalg.qr(np.random.default_rng(8).normal(size=(6, 6)))
    a = await sparse.csr(device, scipy.sparse.csr_array((turned * spectrum) @ turned.T))
    found = await sparse.eigsh(a, 2, "LA", sigma=0.5)
    np.testing.assert_allclose(await found.eigenvalues.to_host(), [3, 5], rtol=1e-9)


@NEEDS_DIRECT
@NEEDS_STRUCTURES
async def test_values_near_a_number_of_a_complex_matrix(device: ta.Device) -> None:
    matrix = well_conditioned(12, 0.4, "complex128", "int64", 3)
    matrix = scipy.sparse.csr_array(matrix + matrix.conj().T)
    spectrum = np.linalg.eigvalsh(matrix.toarray())
    found = await sparse.eigsh(await sparse.csr(device, matrix), 2, sigma=spectrum[5] + 1e-3)
    assert np.abs(await found.eigenvalues.to_host() - spectrum[5]).min() < 1e-12


@NEEDS_DIRECT
@NEEDS_STRUCTURES
async def test_refused_shifts(device: ta.Device) -> None:
    async def product(x: ta.AccelRef) -> ta.AccelRef:
        return x

    a = await sparse.csr(device, scipy.sparse.diags_array(np.arange(9.0)).tocsr())
    with pytest.raises(ta.LinAlgError, match="is singular"):
        await sparse.eigsh(a, 2, sigma=3.0)
    with pytest.raises(ValueError, match="sigma must be a finite real number, got nan"):
        await sparse.eigsh(a, 2, sigma=float("nan"))
    with pytest.raises(TypeError, match="A must be a sparse matrix if sigma is given"):
        await sparse.eigsh(product, 2, v0=await device.put(np.ones(9)), sigma=1.0)


async def test_rounds_are_bounded(device: ta.Device) -> None:
    a = await sparse.csr(device, laplacian(12))
    with pytest.raises(sparse.ConvergenceError, match=r"eigsh: a residual is .* after 2 rounds") as caught:
        await sparse.eigsh(a, 4, "LA", ncv=6, maxiter=2)
    assert caught.value.iterations == 2
    assert caught.value.residual > 1e-6
