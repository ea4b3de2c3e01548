"""Gradients where one array is several operands of a function.

The gradient by the one array is the sum of the gradients by all places. Central differences find that sum,
because they know no rules. Each function is tried with an array that the caller has, and with a call inside
of the derived function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import numbers
from test_functions import CASES

import trio_accel as ta

a: Any = ta.arrays
l: Any = ta.linalg  # noqa: E741
n: Any = ta.nn

F = Callable[[Any], Any]
PRODUCTS: Any = ta.jit.reduction("x * y", "sum", inputs=["x", "y"])
KNOTS = np.linspace(0.0, 2.5, 5)
FIRST = np.array([6.0, 0.0, 0.0, 0.0])  # makes a Toeplitz matrix with a dominant diagonal

# In `CASES`, these functions have operands of several shapes, lists of operands, or constants.
OF_ONE: dict[str, tuple[F, tuple[int, ...]]] = {
    "arrays.average": (lambda x: a.average(x, axis=1, weights=x), (3, 4)),
    "arrays.concat": (lambda x: a.concat([x, x, x], axis=1), (3, 4)),
    "arrays.cov": (lambda x: a.cov(a.concat([x, x])), (3, 4)),
    "arrays.diff": (lambda x: a.diff(x, prepend=x, append=x), (3, 4)),
    "arrays.interp": (lambda x: a.interp(x, KNOTS, x), (5,)),
    "arrays.polyval": (lambda x: a.polyval(x, x), (4,)),
    "arrays.stack": (lambda x: a.stack([x, x, x]), (3, 4)),
    "arrays.trapezoid": (lambda x: a.trapezoid(x, x), (5,)),
    "arrays.trapezoid by rows": (lambda x: a.trapezoid(x, x[0]), (3, 4)),
    "jit.reduction": (lambda x: PRODUCTS(x, x), (3, 4)),
    "linalg.cho_solve": (lambda x: l.cho_solve((x, True), x), (3, 3)),
    "linalg.dot": (lambda x: l.dot(x, x), (4,)),
    "linalg.dot of parts": (lambda x: l.dot(x[1:], x[:-1]), (4,)),
    "linalg.einsum": (lambda x: l.einsum("ij,jk,ki->ik", x, x, x), (3, 3)),
    "linalg.kron": (lambda x: l.kron(x, x), (2, 3)),
    "linalg.matmul": (lambda x: x @ x, (3, 3)),
    "linalg.multi_dot": (lambda x: l.multi_dot([x, x, x]), (3, 3)),
    "linalg.outer": (lambda x: l.outer(x, x), (4,)),
    "linalg.solve": (lambda x: l.solve(x + np.diag(FIRST[[0, 0, 0]]), x), (3, 3)),
    "linalg.solve of one call": (lambda x: l.solve(x, x @ x), (3, 3)),
    "linalg.solve_toeplitz": (lambda x: toeplitz(x + FIRST), (4,)),
    "linalg.tensordot": (lambda x: l.tensordot(x, x, axes=1), (3, 3)),
    "linalg.vecdot": (lambda x: l.vecdot(x, x), (3, 4)),
    "nested": (lambda x: l.outer(l.dot(x, x) * x, x), (4,)),
    "nn.linear": (lambda x: n.linear(x, x, x[0]), (3, 3)),
    "nn.triplet_margin_loss": (lambda x: n.triplet_margin_loss(x, x * x, x, margin=3.0), (3, 4)),
    "tensor.contract": (lambda x: ta.tensor.contract("ij,jk->ik", x, x), (3, 3)),
    "tensor.contract with c": (lambda x: ta.tensor.contract("ij,jk->ik", x, x, x, beta=2.0), (3, 3)),
    "tensor.einsum": (lambda x: ta.tensor.einsum("ij,jk->ik", x, x), (3, 3)),
}


def toeplitz(x: Any) -> Any:
    return l.solve_toeplitz((x, x), x)


def everywhere(f: Callable[..., Any], count: int) -> F:
    return lambda x: f(*(x,) * count)


def found_cases() -> dict[str, tuple[F, tuple[int, ...], float, float]]:
    """Return functions with shapes and ranges: `OF_ONE`, and all of `CASES` with operands of one shape."""
    found = {name: (f, shape, 0.5, 2.0) for name, (f, shape) in OF_ONE.items()}
    for name, cases in sorted(CASES.items()):
        for number, case in enumerate(cases if isinstance(cases, list) else [cases]):
            if len(case.shapes) > 1 and len(set(case.shapes)) == 1:
                f = everywhere(case.f, len(case.shapes))
                found[f"{name} {number} of the table"] = (f, case.shapes[0], case.low, case.high)
    return found


FOUND = found_cases()


@pytest.mark.parametrize("within", ["array", "call"])
@pytest.mark.parametrize("name", FOUND)
async def test_the_gradient_counts_each_place_once(device: ta.Device, name: str, within: str) -> None:
    f, shape, low, high = FOUND[name]
    host = numbers(shape, 7, low, high)

    def of_one(x: Any) -> Any:
        return f(x if within == "array" else x * 0.9 + 0.04)

    async def at(moved: Any) -> Any:
        return await (of_one(await device.put(moved)) * 1.0).to_host()

    try:
        weights = numbers((await at(host)).shape, 99)
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    slope = await ta.grad(lambda x: a.sum(of_one(x) * weights))(await device.put(host))
    direction = numbers(shape, 50, -1.0, 1.0)
    sides = [((await at(host + sign * 1e-5 * direction)) * weights).sum() for sign in (1, -1)]
    want = (sides[0] - sides[1]) / 2e-5
    np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=2e-6, atol=1e-8)


async def test_second_derivatives_count_each_place_once(device: ta.Device) -> None:
    """The Hessian of the squared norm is twice the unit matrix, whichever function squares."""
    host, v = numbers((4,)), numbers((4,), 1)
    x = await device.put(host)
    for f in (l.dot, l.vecdot, lambda p, q: l.trace(l.outer(p, q))):
        found = await ta.grad(lambda x, f=f: l.dot(ta.grad(lambda y: f(y, y))(x), v))(x)
        np.testing.assert_allclose(await found.to_host(), 2 * v, rtol=1e-12)


async def test_a_gaussian_process_reaches_its_optimum(device: ta.Device) -> None:
    """The negative log likelihood by ``dot(a, a)``: its gradient by the amplitude has a closed form."""
    points = np.linspace(0.0, 1.0, 12)
    kernel = np.exp(-8.0 * (points[:, None] - points) ** 2) + 0.1 * np.eye(12)
    y = np.sin(6.0 * points)
    lower = np.linalg.inv(np.linalg.cholesky(kernel))

    def loss(s: Any) -> Any:
        residual = a.exp(-0.5 * s) * (lower @ y)
        return 0.5 * l.dot(residual, residual) + 0.5 * 12 * s

    found = await ta.grad(loss)(await device.put(np.array(0.3)))
    want = -0.5 * np.exp(-0.3) * (y @ np.linalg.solve(kernel, y)) + 6.0
    np.testing.assert_allclose(await found.item(), want, rtol=1e-12)
