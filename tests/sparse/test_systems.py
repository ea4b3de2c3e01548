"""Triangular systems with sparse matrices, and incomplete factors, against SciPy and NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_matrices import (
    EXAMPLES,
    NEEDS_SYSTEMS,
    TOLERANCE,
    check,
    dense,
    laplacian,
    on_device,
    random_matrix,
    sides,
    systems,
    well_conditioned,
)

import trio_accel as ta
from trio_accel import sparse

pytestmark = NEEDS_SYSTEMS
ISOLATIONS = ["inline", "process"]


@given(
    case=systems,
    columns=st.sampled_from([None, 0, 2]),
    lower=st.booleans(),
    unit_diagonal=st.booleans(),
    trans=st.sampled_from("NTC"),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_triangular_solutions(
    case: Any, columns: int | None, lower: bool, unit_diagonal: bool, trans: Any
) -> None:
    matrix, dtype = well_conditioned(**case), case["dtype"]
    b, full = (
        sides(case["n"], columns, dtype),
        matrix.toarray().astype(complex if "complex" in dtype else float),
    )
    if unit_diagonal:
        full /= 1 + 2 * np.abs(full).max(initial=1)
        matrix = scipy.sparse.csr_array(full.astype(dtype))
    triangle = np.tril(full) if lower else np.triu(full)
    if unit_diagonal:
        np.fill_diagonal(triangle, 1)
    expected = np.linalg.solve({"N": triangle, "T": triangle.T, "C": triangle.conj().T}[trans], b)

    async def test(device: ta.Device) -> None:
        a = await sparse.csr(device, matrix)
        found = await sparse.spsolve_triangular(a, b, lower, unit_diagonal=unit_diagonal, trans=trans)
        check(await found.to_host(), expected, dtype, 10 * case["n"])

    on_device(test)


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_solutions_in_both_isolations(system: ta.System, isolation: Any) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    matrix, b = laplacian(6), np.arange(36.0)
    async with system.open_device(BACKEND, options=options) as device:
        a = await sparse.csr(device, matrix)
        product = await sparse.spgemm(a, a)
        np.testing.assert_allclose(await dense(product), (matrix @ matrix).toarray(), atol=1e-12)
        found = await (await sparse.spsolve_triangular(a, b)).to_host()
        np.testing.assert_allclose(np.tril(matrix.toarray()) @ found, b, atol=1e-11)
        empty = await sparse.csr(device, scipy.sparse.csr_array((3, 3)))
        with pytest.raises(ta.LinAlgError, match="is singular: its diagonal is missing or zero in row 0"):
            await sparse.spsolve_triangular(empty, np.ones(3))


async def test_solutions_follow_a_matrix_that_changes(device: ta.Device) -> None:
    """Factors are kept for the next solution, and none is taken for another matrix, triangle or dtype."""
    rng, indices = np.random.default_rng(0), np.tile(np.arange(4), 4)
    indptr, b = np.arange(0, 17, 4), np.arange(1.0, 5)
    data = await device.put(rng.normal(size=16))
    a = sparse.CsrMatrix((4, 4), await device.put(indptr), await device.put(indices), data)
    for turn in range(6):
        full = rng.normal(size=(4, 4)) + 4 * np.eye(4)
        await data.assign(full.reshape(-1))
        for _ in range(2):
            found = await (await sparse.spsolve_triangular(a, b, turn % 2 == 0)).to_host()
            half = np.tril(full) if turn % 2 == 0 else np.triu(full)
            np.testing.assert_allclose(half @ found, b, rtol=1e-13, atol=1e-13)
            if BACKEND == "cpu":
                np.testing.assert_allclose(full @ await (await sparse.spsolve(a, b)).to_host(), b, atol=1e-13)
    whole = np.array([[2.0, 0], [1.0, 4.0]])
    for dtype in ("float64", "float32", "complex128"):
        one = await sparse.csr(device, scipy.sparse.csr_array(whole.astype(dtype)))
        found = await sparse.spsolve_triangular(one, np.array([2.0, 5.0], dtype))
        assert (found.dtype, (await found.to_host()).tolist()) == (dtype, [1.0, 1.0])


async def test_values_of_one_place_are_one(device: ta.Device) -> None:
    # The diagonal of row 1 is stored twice, and its columns do not ascend.
    arrays = [np.array(one) for one in ([0, 1, 4, 5], [0, 1, 0, 1, 2], [2.0, 1.0, 2.0, 2.0, 4.0])]
    a = sparse.CsrMatrix((3, 3), *[await device.put(one) for one in arrays])
    full, b = (
        np.array([[2.0, 0, 0], [2.0, 3.0, 0], [0, 0, 4.0]]),
        np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    )
    for trans, matrix in (("N", full), ("T", full.T)):
        for side in (b, b[:, 0]):
            found = await sparse.spsolve_triangular(a, side, trans=trans)  # type: ignore[arg-type]
            np.testing.assert_allclose(await found.to_host(), np.linalg.solve(matrix, side), rtol=1e-14)


@given(case=systems)
@settings(max_examples=EXAMPLES, deadline=None)
def test_incomplete_factors_of_a_full_structure_are_complete(case: Any) -> None:
    matrix, dtype = well_conditioned(**{**case, "density": 1.0}), case["dtype"]
    wide = complex if dtype.startswith("complex") else float
    full, eye = matrix.toarray().astype(wide), np.eye(case["n"])
    hermitian = full @ full.conj().T + eye

    async def test(device: ta.Device) -> None:
        made = await dense(await sparse.ilu0(await sparse.csr(device, matrix)))
        product = (np.tril(made, -1) + eye) @ np.triu(made)
        np.testing.assert_allclose(product, full, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype] * 100)
        a = await sparse.csr(device, scipy.sparse.csr_array(hermitian.astype(dtype)))
        made = await dense(await sparse.ic0(a))
        scale = np.abs(hermitian).max(initial=1)
        np.testing.assert_allclose(
            np.tril(made) / scale, np.linalg.cholesky(hermitian) / scale, atol=TOLERANCE[dtype] * 100
        )
        np.testing.assert_allclose(np.triu(made), np.tril(made).conj().T, atol=TOLERANCE[dtype] * 100 * scale)

    on_device(test)


async def test_incomplete_factors_are_right_at_stored_elements(device: ta.Device) -> None:
    matrix = laplacian(7)
    made = await dense(await sparse.ilu0(await sparse.csr(device, matrix)))
    product = (np.tril(made, -1) + np.eye(49)) @ np.triu(made)
    is_stored = matrix.toarray() != 0
    np.testing.assert_allclose(product[is_stored], matrix.toarray()[is_stored], rtol=1e-13)
    assert not made[~is_stored].any()
    factor = np.tril(await dense(await sparse.ic0(await sparse.csr(device, matrix))))
    np.testing.assert_allclose((factor @ factor.T)[is_stored], matrix.toarray()[is_stored], rtol=1e-13)


def changed(row: int, column: int, value: float) -> Any:
    full = np.eye(3) * 2
    full[row, column] = value
    made = scipy.sparse.csr_array(full)
    made.eliminate_zeros()
    return made


ONES = np.ones(3)
REFUSED: dict[str, tuple[Any, Callable[[Any], Awaitable[object]], type[Exception], str]] = {
    "no diagonal": (
        changed(1, 1, 0),
        lambda a: sparse.spsolve_triangular(a, ONES),
        ta.LinAlgError,
        "missing or zero in row 1",
    ),
    "no pivot": (changed(1, 1, 0), sparse.ilu0, ta.LinAlgError, "its pivot of row 1 is missing or zero"),
    "a negative pivot": (changed(2, 2, -1), sparse.ic0, ta.LinAlgError, "its pivot of row 2 is missing or"),
    "not Hermitian": (changed(0, 1, 1), sparse.ic0, ta.LinAlgError, "is not Hermitian"),
    "a NaN to factor": (changed(0, 1, np.nan), sparse.ilu0, ta.LinAlgError, "NaN or an infinity"),
    "a letter": (
        changed(0, 1, 1),
        lambda a: sparse.spsolve_triangular(a, ONES, trans="X"),  # type: ignore[arg-type]
        ValueError,
        "trans must be",
    ),
    "a kind": (changed(0, 1, 1), lambda a: sparse.precondition(a, "ssor"), ValueError, "kind must be"),  # type: ignore[arg-type]
    "a zero for Jacobi": (changed(1, 1, 0), sparse.precondition, ta.LinAlgError, "not finite in row 1"),
    "Jacobi of rows": (random_matrix(3, 4), sparse.precondition, ValueError, "must be square"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_invalid_arguments_are_refused(device: ta.Device, case: str) -> None:
    matrix, ask, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        await ask(await sparse.csr(device, matrix))


async def test_columns_that_do_not_ascend(device: ta.Device) -> None:
    arrays = [await device.put(np.array(one)) for one in ([0, 2, 3], [1, 0, 1], [1.0, 2.0, 3.0])]
    a = sparse.CsrMatrix((2, 2), *arrays)
    with pytest.raises(
        ta.LibraryError, match=r"the columns of row 0 do not ascend; .*sparse\.sum_duplicates"
    ):
        await sparse.ilu0(a)
    made = await dense(await sparse.ilu0(await sparse.sum_duplicates(a)))
    assert made.tolist() == [[2.0, 1.0], [0.0, 3.0]]


async def test_an_unread_zero_on_the_diagonal(device: ta.Device) -> None:
    a = await sparse.csr(device, scipy.sparse.csr_array(np.array([[0.0, 5.0], [2.0, 0.0]])))
    found = await sparse.spsolve_triangular(a, np.array([1.0, 3.0]), unit_diagonal=True)
    assert (await found.to_host()).tolist() == [1.0, 1.0]
