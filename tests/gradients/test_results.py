"""Gradients through functions with several results, of which a function may use some, all, or none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
la: Any = ta.linalg
# Python's warnings are errors here: nothing is left of calls that nobody has used.
needs_solvers = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
KERNELS: dict[str, Any] = {
    "elements": ta.jit.elementwise(
        "s = x * y; p = exp(x) + s; c = where(x > 0, 3.0, 2.0)", inputs=["x", "y"], outputs=["s", "p", "c"]
    ),
    "an input": ta.jit.elementwise("s = x; p = y; c = x", inputs=["x", "y"], outputs=["s", "p", "c"]),
    "loads": ta.jit.elementwise(
        "s = x[i(0), (i(1) + 1) % 4] * y; p = x[i(0), i(1)] - y * y; "
        "c = s * p + x[i(0), maximum(i(1) - 1, 0)]",
        inputs=["x", "y"],
        outputs=["s", "p", "c"],
    ),
    "loads of a loop": ta.jit.elementwise(
        "s = 0.0; p = y\nfor k in range(4):\n"
        "    s = s + x[i(0), k] * y\n    p = p + x[k % 3, i(1)] ** 2\nc = s",
        inputs=["x", "y"],
        outputs=["s", "p", "c"],
    ),
    "a loop": ta.jit.elementwise(
        "s = x; p = y\nfor k in range(4):\n    s = s + 0.1 * sin(p)\n    p = p - 0.1 * s\nc = s * p",
        inputs=["x", "y"],
        outputs=["s", "p", "c"],
    ),
    "places": ta.jit.elementwise(
        "s = x[2 - i(0), i(1)] * y; p = x[i(0), 0]; c = exp(y)", inputs=["x", "y"], outputs=["s", "p", "c"]
    ),
}
USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "one": lambda s, p, c: p * p,
    "another": lambda s, p, c: a.sin(c),
    "two": lambda s, p, c: s * p + p,
    "all": lambda s, p, c: s * p + c * s,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KERNELS)
async def test_kernels_of_several_results(device: ta.Device, kind: str, use: str) -> None:
    hosts = [numbers((3, 4)), numbers((3, 4), 1)]

    def f(given: Any) -> Any:
        return a.sum(USES[use](*KERNELS[kind](*given)) * numbers((3, 4), 2))

    found = await ta.grad(f)([await device.put(one) for one in hosts])
    for place, slope in enumerate(found):
        direction, sides = numbers((3, 4), 3), list[float]()
        for sign in (1, -1):
            moved = [one + sign * 1e-5 * direction * (k == place) for k, one in enumerate(hosts)]
            sides.append(await f([await device.put(one) for one in moved]).item())
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-7, atol=1e-8)


async def test_a_custom_rule_gets_a_gradient_for_each_result(device: ta.Device) -> None:
    host = numbers((3, 4))
    x = await device.put(host)
    both: Any = ta.jit.elementwise("s = x * x; p = sin(x)", inputs=["x"], outputs=["s", "p"], name="both")

    def rule(g: Any, result: Any, x: Any) -> Any:
        of_s, of_p = g
        s, p = result
        return of_s * x * 20.0 + of_p * p + s * 0.0

    function: Any = ta.custom_gradient(both, rule)

    def f(x: Any) -> Any:
        s, p = function(x)
        return a.sum(s * p)

    found = await ta.grad(f)(x)
    np.testing.assert_allclose(
        await found.to_host(), 20.0 * host * np.sin(host) + host * host * np.sin(host), rtol=1e-12
    )
    only = await ta.grad(lambda x: a.sum(function(x)[1]))(x)
    np.testing.assert_allclose(await only.to_host(), np.sin(host), rtol=1e-12)


def symmetric(n: int = 4) -> Any:
    x = numbers((n, n))
    return x + x.T


@needs_solvers
async def test_parts_that_nobody_uses_get_no_gradient(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def f(x: Any) -> Any:
        w, v = la.eigh(x)
        u, s, vh = la.svd(x)
        del v, u, vh
        return a.sum(w * w) + a.sum(s * s)

    # Both are the square of the norm.
    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 4.0 * host, rtol=1e-12)

    def constant(x: Any) -> Any:
        _, v = la.eigh(x)
        return a.sum(ta.stop_gradient(v)) + a.sum(la.slogdet(x)[0])

    assert not (await (await ta.grad(constant)(x)).to_host()).any()
    gc.collect()


@needs_solvers
async def test_a_part_used_twice(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def f(x: Any) -> Any:
        made = la.eigh(x)
        w, _ = made
        return a.sum(w * made[0] * made[-2])

    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 3.0 * host @ host, rtol=1e-11)


@needs_solvers
async def test_a_function_of_a_matrix_by_its_eigenvalues(device: ta.Device) -> None:
    """The same function as a series has the same gradient."""
    host, weights = 0.3 * symmetric(), numbers((4, 4), 7)
    weights = weights + weights.T
    x = await device.put(host)

    def by_values(x: Any) -> Any:
        w, v = la.eigh(x)
        return a.sum(((v * a.exp(w)) @ v.mT) * weights)

    found = await ta.grad(by_values)(x)
    want = await ta.grad(lambda x: a.sum(la.expm(x) * weights))(x)
    np.testing.assert_allclose(await found.to_host(), await want.to_host(), rtol=1e-10)


@needs_solvers
async def test_a_gradient_of_a_gradient(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def inner(x: Any) -> Any:
        w, _ = la.eigh(x)
        return a.sum(w**3)

    # The inner gradient is 3 x @ x, and the outer function the square of its norm.
    slope: Any = ta.grad(inner)
    found = await ta.grad(lambda x: a.sum(slope(x) ** 2))(x)
    np.testing.assert_allclose(await found.to_host(), 36.0 * host @ host @ host, rtol=1e-10)


async def test_values_of_gathered_calls(device: ta.Device) -> None:
    host = numbers((3,))
    x = await device.put(host)

    def f(x: Any) -> Any:
        square, double, kept = ta.gather(x * x, x * 2.0, x)
        return a.sum(square * kept) + a.sum(double)

    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 3.0 * host * host + 2.0, rtol=1e-14)


@needs_solvers
async def test_equal_eigenvalues(device: ta.Device) -> None:
    """The eigenvalues have a gradient, and the vectors none, as in PyTorch."""
    x = await device.put(np.eye(3))
    found = await ta.grad(lambda x: a.sum(la.eigh(x)[0] ** 3))(x)
    np.testing.assert_allclose(await found.to_host(), 3.0 * np.eye(3), atol=1e-14)
    of_vectors = await ta.grad(lambda x: a.sum(la.eigh(x)[1] ** 2 * numbers((3, 3))))(x)
    assert not np.isfinite(await of_vectors.to_host()).all()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tall": (
        lambda x: la.svd(x[:, :2])[0],
        r"linalg\.svd has no gradient, because the columns of U beyond 2 are not unique; pass full_matrices",
    ),
    "wide": (
        lambda x: la.svd(x[:3])[2],
        r"linalg\.svd has no gradient, because the rows of Vh beyond 3 are not unique; pass full_matrices",
    ),
    "complete": (
        lambda x: la.qr(x[:, :2], "complete")[0],
        r"linalg\.qr has no gradient, because the columns of Q beyond 2 are not unique; pass mode='reduced'",
    ),
}


@needs_solvers
async def test_equal_singular_values_have_a_polar_factor(device: ta.Device) -> None:
    """Sums of singular values divide, and not their gaps: the factor of the identity turns with it."""
    x, weights = await device.put(np.eye(3)), numbers((3, 3))
    found = await ta.grad(lambda x: a.sum(la.polar(x)[0] * weights))(x)
    np.testing.assert_allclose(await found.to_host(), 0.5 * (weights - weights.T), atol=1e-15)


@needs_solvers
async def test_equal_eigenvalues_without_vectors(device: ta.Device) -> None:
    """Their order does not matter, because equal eigenvalues have equal gradients."""
    x = await device.put(np.diag([2.0, 2.0, 5.0]))
    found = await ta.grad(lambda x: a.sum(a.real(la.eigvals(x) ** 2)))(x)
    np.testing.assert_allclose(await found.to_host(), np.diag([4.0, 4.0, 10.0]), atol=1e-14)


@needs_solvers
async def test_a_number_next_to_arrays_is_not_an_operand(device: ta.Device) -> None:
    """The arrays are, with the layouts of full rank."""
    x, b = await device.put(numbers((5, 3))), await device.put(numbers((5,)))
    made = la.lstsq(x, b)
    solution, residuals, rank, values = made
    assert (len(made), solution.shape, residuals.shape, values.shape) == (4, (3,), (1,), (3,))
    assert await rank == 3
    text = r"AccelRef.__getitem__ returns a number, which cannot be an operand; await it first"
    with pytest.raises(ta.NotSupportedError, match=text):
        la.lstsq(x, b)[2].shape  # noqa: B018  # it is found now
    del made, solution, residuals, values
    gc.collect()


@needs_solvers
async def test_a_matrix_without_full_rank_has_no_residuals(device: ta.Device) -> None:
    x, b = await device.put(numbers((5, 1)) * np.ones(3)), await device.put(numbers((5,)))
    value, found = await ta.value_and_grad(lambda x: a.sum(la.lstsq(x, b)[1]))(x)
    assert await value.item() == 0
    assert not (await found.to_host()).any()


@needs_solvers
async def test_long_recursions_are_refused(device: ta.Device) -> None:
    x = await device.put(np.eye(257))
    text = r"linalg\.hessenberg has no gradient, because its recursion is for up to 256 columns, and there"
    with pytest.raises(ta.NotSupportedError, match=text):
        await ta.grad(lambda x: a.sum(la.hessenberg(x)))(x)
    gc.collect()


@needs_solvers
@pytest.mark.parametrize("kind", REFUSED)
async def test_functions_without_a_gradient(device: ta.Device, kind: str) -> None:
    f, text = REFUSED[kind]
    x = await device.put(symmetric() + 9.0 * np.eye(4))
    with pytest.raises(ta.NotSupportedError, match=text):
        await ta.grad(lambda x: a.sum(f(x)))(x)
    gc.collect()
