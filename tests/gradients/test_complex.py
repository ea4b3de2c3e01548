"""Gradients through complex numbers: each function of the table, by the real and the imaginary part.

The oracle is a central difference along a direction of the complex plane, of a real number that both parts of
the result determine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays
# A function that refuses complex numbers is no case for its gradient.
REFUSED = (TypeError, ValueError, ta.NotSupportedError)
# Their cases are symmetric matrices, which are not Hermitian if they are complex, or depend on phases. The
# cases of `gradient_cases_of_results` have complex matrices of their own.
OF_SYMMETRIC = {
    "linalg.cho_solve",
    "linalg.cholesky",
    "linalg.eigh",
    "linalg.eigvalsh",
    "linalg.solveh_banded",
}
OF_PHASES = {"linalg.hessenberg", "linalg.schur", "linalg.svd"}


def case_of(name: str, number: int) -> Case:
    cases = CASES[name]
    return cases[number] if isinstance(cases, list) else cases


async def total(device: ta.Device, case: Case, values: list[Any], weights: Any) -> float:
    made = await (case.f(*[await device.put(value) for value in values]) * 1.0)
    return float((await made.to_host() * weights).real.sum())


@pytest.mark.parametrize("half", ["right", "left"])
@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_through_complex_numbers_match_differences(
    device: ta.Device, name: str, number: int, half: str
) -> None:
    if name in OF_SYMMETRIC | OF_PHASES:
        pytest.skip("the case is not defined for complex matrices")
    case = case_of(name, number)
    # Functions with a branch cut have other formulas in the other half of the plane.
    real = [value if half == "right" else -value for value in case.values()]
    imaginary = [numbers(value.shape, 70 + place, -0.7, 0.7) for place, value in enumerate(real)]
    values = [re + 1j * im for re, im in zip(real, imaginary, strict=True)]
    try:
        made = await (case.f(*[await device.put(value) for value in values]) * 1.0)
    except REFUSED:
        pytest.skip("no function of complex numbers")
    weights = numbers(made.shape, 99) + 1j * numbers(made.shape, 98)

    def f(re: Any, im: Any) -> Any:
        of_complex = [x + 1j * y for x, y in zip(re, im, strict=True)]
        return a.sum(a.real(case.f(*of_complex) * weights))

    parts = [await device.put(value) for value in real], [await device.put(value) for value in imaginary]
    # A function that takes complex numbers has a gradient of them: no name is missing in the list.
    found = await ta.grad(f, (0, 1))(*parts)
    for place, value in enumerate(values):
        directions = numbers(value.shape, 50, -1.0, 1.0), numbers(value.shape, 51, -1.0, 1.0)
        along = directions[0] + 1j * directions[1]
        sides = []
        for sign in (1, -1):
            moved = [*values[:place], value + sign * 1e-5 * along, *values[place + 1 :]]
            sides.append(await total(device, case, moved, weights))
        want = (sides[0] - sides[1]) / 2e-5
        slopes = [await slope[place].to_host() for slope in found]
        got = sum((slope * direction).sum() for slope, direction in zip(slopes, directions, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=f"{place}")


B = np.array([1.0, 0.5j])
MATRIX = np.array([[0.0, 2.0 - 1.0j, 0.0], [1.0j, 0.0, 3.0]])
WINDOW = np.array([[0.5j, 1.0], [2.0, -1.0 + 0.3j]])
# Functions with complex constants, of a vector or a matrix.
OF_CONSTANTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "arrays.cumulative_prod": (lambda x: a.cumulative_prod(x * np.array([1.0, 1.0j, 0.5])), (3,)),
    "arrays.interp of factors": (lambda x: a.polyval(np.array([1.0j, 2.0, 0.3 - 1.0j]), x), (3,)),
    "arrays.linear_recurrence": (lambda x: a.linear_recurrence(0.5j, x, initial=1.0j), (5,)),
    "arrays.sum of products": (lambda x: a.sum(x * np.array([1.0j, 2.0]), axis=1), (3, 2)),
    "fft.convolve": (lambda x: ta.fft.convolve(x, B), (5,)),
    "fft.correlate": (lambda x: ta.fft.correlate(x, B), (5,)),
    "linalg.einsum": (lambda x: ta.linalg.einsum("ij,jk->ik", MATRIX, x), (3, 2)),
    "linalg.gemm of alpha": (lambda x: ta.tensor.contract("ij,jk->ik", MATRIX, x, alpha=0.5j), (3, 2)),
    "linalg.matmul": (lambda x: MATRIX @ x, (3, 2)),
    "linalg.vecdot": (lambda x: ta.linalg.vecdot(np.array([1.0j, 2.0, -1.0]), x), (3,)),
    "linalg.vecdot of the first": (lambda x: ta.linalg.vecdot(x, np.array([1.0j, 2.0, -1.0])), (3,)),
    "ndimage.convolve": (lambda x: ta.ndimage.convolve(x, WINDOW), (4, 3)),
    "ndimage.convolve1d": (lambda x: ta.ndimage.convolve1d(x, B, axis=0), (4, 3)),
    "ndimage.correlate": (lambda x: ta.ndimage.correlate(x, WINDOW, mode="constant"), (4, 3)),
    "signal.lfilter": (lambda x: ta.signal.lfilter(B, [1.0, -0.3 + 0.2j, 0.2], x), (6,)),
    "signal.sosfilt": (lambda x: ta.signal.sosfilt([[1.0, 0.5, 0.2, 1.0, -0.3, 0.1]], x), (6,)),
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
async def test_complex_constants_are_conjugated(device: ta.Device, name: str) -> None:
    f, shape = OF_CONSTANTS[name]
    real, imaginary = numbers(shape, 1), numbers(shape, 2)
    case = Case(f, (shape,))
    made = await (f(await device.put(real + 1j * imaginary)) * 1.0)
    weights = numbers(made.shape, 3) + 1j * numbers(made.shape, 4)
    parts = await device.put(real), await device.put(imaginary)
    found = await ta.grad(lambda x, y: a.sum(a.real(f(x + 1j * y) * weights)), (0, 1))(*parts)
    along = numbers(shape, 5) + 1j * numbers(shape, 6)
    sides = [
        await total(device, case, [real + 1j * imaginary + sign * 1e-5 * along], weights) for sign in (1, -1)
    ]
    got = (await found[0].to_host() * along.real + await found[1].to_host() * along.imag).sum()
    np.testing.assert_allclose(got, (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["spmm", "spmv"])
async def test_complex_sparse_matrices_are_conjugated(device: ta.Device, name: str) -> None:
    matrix = await ta.sparse.csr(device, scipy.sparse.csr_array(MATRIX))
    shape = (3, 2) if name == "spmm" else (3,)
    weights = numbers((2, *shape[1:])) + 1j * numbers((2, *shape[1:]), 1)
    f: Any = getattr(ta.sparse, name)
    real, imaginary = await device.put(numbers(shape, 2)), await device.put(numbers(shape, 3))
    found = await ta.grad(lambda x, y: a.sum(a.real(f(matrix, x + 1j * y) * weights)), (0, 1))(
        real, imaginary
    )
    # The real part of sum(w * (m @ z)) grows by re(m.T @ w) with the real part of z, by -im with the other.
    want = MATRIX.T @ weights
    np.testing.assert_allclose(await found[0].to_host(), want.real, rtol=1e-12)
    np.testing.assert_allclose(await found[1].to_host(), -want.imag, rtol=1e-12)
