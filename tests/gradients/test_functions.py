"""Gradients of own operations' functions: each function of the table against central differences."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND
from gradient_cases import CASES_OF_ELEMENTS, Case, Y, numbers
from gradient_cases_of_arrays import CASES_OF_ARRAYS
from gradient_cases_of_libraries import CASES_OF_LIBRARIES
from gradient_cases_of_results import CASES_OF_RESULTS
from gradient_cases_of_slopes import CASES_OF_SLOPES

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
CASES = CASES_OF_ELEMENTS | CASES_OF_ARRAYS | CASES_OF_LIBRARIES | CASES_OF_RESULTS | CASES_OF_SLOPES
# They take more than arrays, and have tests of their own below.
ELSEWHERE = (
    "nn.dropout",
    "signal.evaluate_spline",
    "sparse.spmm",
    "sparse.spmv",
    "sparse.spsolve",
    "sparse.spsolve_triangular",
)
NUMBERED = [
    (name, number)
    for name, cases in sorted(CASES.items())
    for number in range(len(cases) if isinstance(cases, list) else 1)
]


def test_each_function_with_a_gradient_has_a_case() -> None:
    found = {name for name, (word, _) in ta.gradients.words().items() if word in ("derived", "rule")}
    assert {name for name in CASES if not name.startswith("AccelRef.")} == found - set(ELSEWHERE)


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_match_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case = cases[number] if isinstance(cases, list) else cases
    values = case.values()
    try:
        # Views of arrays are arrays, and not calls.
        shape = (await (case.f(*[await device.put(one) for one in values]) * 1.0)).shape
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    weights = numbers(shape, 99)

    def f(parameters: Any) -> Any:
        return a.sum(case.f(*parameters) * weights)

    value, found = await ta.value_and_grad(f)([await device.put(one) for one in values])
    np.testing.assert_allclose(await value.item(), await total(device, case, values, weights), rtol=1e-12)
    for place, slope in enumerate(found):
        assert (slope.shape, slope.dtype) == (values[place].shape, "float64")
        # Along a direction: each element for itself would ask a thousand times.
        direction = numbers(values[place].shape, 50, -1.0, 1.0)
        sides = []
        for sign in (1, -1):
            moved = [one.copy() for one in values]
            moved[place] += sign * 1e-5 * direction
            sides.append(await total(device, case, moved, weights))
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6, atol=1e-8)


async def total(device: ta.Device, case: Case, values: list[Any], weights: Any) -> float:
    made = await (case.f(*[await device.put(one) for one in values]) * 1.0)
    return float((await made.to_host() * weights).sum())


async def test_products_with_sparse_matrices(device: ta.Device) -> None:
    """The matrix is not an array of the tape; the dense factor is."""
    dense = np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    matrix = await ta.sparse.csr(device, scipy.sparse.csr_array(dense))
    weights = numbers((2, 4))
    x, v = await device.put(numbers((3, 4))), await device.put(numbers((3,)))
    found = await ta.grad(lambda x: a.sum(ta.sparse.spmm(matrix, x, alpha=2.0) * weights))(x)
    np.testing.assert_allclose(await found.to_host(), 2 * dense.T @ weights)
    found = await ta.grad(lambda v: a.sum(ta.sparse.spmv(matrix, v) * weights[:, 0]))(v)
    np.testing.assert_allclose(await found.to_host(), dense.T @ weights[:, 0])


async def test_solutions_of_sparse_systems(device: ta.Device) -> None:
    dense = np.array([[4.0, 2.0, 0.0], [1.0, 5.0, 3.0], [0.0, 1.0, 6.0]])
    matrix = await ta.sparse.csr(device, scipy.sparse.csr_array(dense))
    weights = numbers((3, 2))
    b = await device.put(numbers((3, 2), 1))
    for is_lower, trans in ((True, "N"), (False, "T")):
        triangle = np.tril(dense) if is_lower else np.triu(dense)
        of_weights = triangle.T if trans == "N" else triangle
        solve = partial(ta.sparse.spsolve_triangular, matrix, lower=is_lower, trans=trans)
        found = await ta.grad(lambda b, solve=solve: a.sum(solve(b) * weights))(b)
        np.testing.assert_allclose(await found.to_host(), np.linalg.solve(of_weights, weights), rtol=1e-12)


async def test_a_spline_has_the_derivative_of_its_pieces(device: ta.Device) -> None:
    knots = np.linspace(0.0, 3.0, 8)
    spline = await ta.signal.cubic_spline(knots, await device.put(np.sin(knots)))
    x = await device.put(np.array([0.3, 1.1, 2.6]))
    found = await ta.grad(lambda x: a.sum(ta.signal.evaluate_spline(spline, x)))(x)
    want = await ta.signal.evaluate_spline(spline, x, 1)
    np.testing.assert_allclose(await found.to_host(), await want.to_host())


async def test_parameters_in_dicts_and_lists_used_twice_or_never(device: ta.Device) -> None:
    given = {
        "w": [await device.put(numbers((3,))), await device.put(numbers((3,), 1))],
        "never": await device.put(Y),
    }

    def f(p: Any, x: Any) -> Any:
        return a.sum(p["w"][0] * p["w"][0] * x + a.exp(p["w"][1]) * p["w"][0])

    x = await device.put(numbers((3,), 2))
    value, found = await ta.value_and_grad(f)(given, x)
    w, v, hosts = numbers((3,)), numbers((3,), 1), numbers((3,), 2)
    np.testing.assert_allclose(await value.item(), (w * w * hosts + np.exp(v) * w).sum(), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][0].to_host(), 2 * w * hosts + np.exp(v), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][1].to_host(), np.exp(v) * w, rtol=1e-14)
    assert not (await found["never"].to_host()).any()
    alone = await ta.grad(f)(given, x)
    np.testing.assert_array_equal(await alone["w"][1].to_host(), await found["w"][1].to_host())


@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_nothing_is_left_of_calls_that_nobody_else_has_made(device: ta.Device) -> None:
    """Neither by gradients of only some arguments, nor by a refusal after some of them were made."""
    x, w, v = [await device.put(numbers(shape, 1)) for shape in ((3, 4), (4, 4), (4,))]
    hosts = [numbers(shape, 2) for shape in ((3, 4), (4, 4), (4,))]
    for f, given in (
        (lambda p: a.sum(hosts[0] @ p), v),
        (lambda p: a.sum(p @ hosts[1]), v),
        (lambda p: a.sum(n.linear(x, w, p)), v),
        (lambda p: a.sum(a.layer_norm(x, 1, p)), v),
        (lambda p: a.sum(a.layer_norm(x, p, 0)), v),
        (lambda p: a.sum(n.batch_norm(x, v, v * v + 1.0, 1, p)), v),
        (lambda p: a.sum(ta.linalg.kron(p, w)), x),
        (lambda p: a.sum(ta.linalg.tensordot(x, p)), x),
    ):
        assert (await ta.grad(f)(given)).shape == given.shape
        gc.collect()
    refused: list[Callable[[Any], Any]] = [
        lambda p: a.sum(a.exp(a.cumulative_prod(p * 2.0, axis=0, include_initial=True)[1:] + p)),
        lambda p: a.sum(a.segmented_reduce(p * 2.0, np.array([0, 2, 3]), op="max")),
        lambda p: a.exp(p) * 2.0,
    ]
    for f in refused:
        with pytest.raises((ta.NotSupportedError, ValueError)):
            await ta.value_and_grad(f)(x)
    gc.collect()
