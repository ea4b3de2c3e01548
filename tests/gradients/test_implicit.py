"""Implicit gradients by `custom_root`, against differences through the solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from gradient_cases import numbers

import trio_accel as ta

pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
a: Any = ta.arrays
g: Any = ta.gradients


def along(f: Callable[..., Any], args: list[Any], directions: list[Any], order: int = 1) -> Any:
    """Return the first or second derivative along directions, by differences."""
    h = 1e-5 if order == 1 else 1e-3
    after, here, before = (
        f(*[arg + step * direction for arg, direction in zip(args, directions, strict=True)])
        for step in (h, 0, -h)
    )
    return (after - before) / (2 * h) if order == 1 else (after - 2 * here + before) / h**2


def equation(x: Any, p: Any, q: Any, lib: Any = a) -> Any:
    """Return p tanh(x) + 0.1 x³ - q, which rises with each element of x."""
    return p @ lib.tanh(x) + 2 * x + 0.1 * x**3 - q


def root_of_numpy(p: Any, q: Any) -> Any:
    x = np.zeros_like(q)
    for _ in range(60):
        jacobian = p * (1 - np.tanh(x) ** 2) + np.diag(2 + 0.3 * x**2)
        x = x - np.linalg.solve(jacobian, equation(x, p, q, np))
    return x


async def newton(x: Any, p: Any, q: Any) -> Any:
    """Solve with as many requests as it takes."""
    for _ in range(60):
        rows = await g.jacobian(equation)(x, p, q)
        step = await ta.linalg.solve(rows, equation(x, p, q))
        x = await (x - step)
        if await a.max(a.abs(step)).item() < 1e-14:
            break
    return x


P, Q = numbers((3, 3), 1) / 3, numbers((3,), 2)
WEIGHTS = numbers((3,), 5)


def loss_of_numpy(p: Any, q: Any, k: Any) -> Any:
    x = root_of_numpy(p * k, q)
    return (WEIGHTS * x**2).sum() + (x * q).sum()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_gradients_are_those_through_the_solver(device: ta.Device, dtype: str) -> None:
    args = [P, Q, np.array(1.3)]
    there = [await device.put(host.astype(dtype)) for host in args]
    x0 = await device.put(np.zeros(3, dtype))
    root = g.custom_root(equation, newton)

    def loss(p: Any, q: Any, k: Any) -> Any:
        x = root(x0, p * k, q)
        return a.sum(WEIGHTS.astype(dtype) * x**2) + a.sum(x * q)

    tolerance = 1e-8 if dtype == "float64" else 1e-4
    value, slopes = await ta.value_and_grad(loss, (0, 1, 2))(*there)
    np.testing.assert_allclose(await value.item(), loss_of_numpy(*args), rtol=tolerance)
    for place, slope in enumerate(slopes):
        assert slope.dtype == dtype
        directions = [numbers(host.shape, 7) * (place == number) for number, host in enumerate(args)]
        want = along(loss_of_numpy, args, directions)
        np.testing.assert_allclose((await slope.to_host() * directions[place]).sum(), want, rtol=tolerance)


async def test_second_derivatives(device: ta.Device) -> None:
    args = [P, Q, np.array(1.3)]
    there = [await device.put(host) for host in args]
    x0 = await device.put(np.zeros(3))
    root = g.custom_root(equation, newton)

    def loss(p: Any, q: Any, k: Any) -> Any:
        x = root(x0, p * k, q)
        return a.sum(WEIGHTS * x**2) + a.sum(x * q)

    directions = [numbers(host.shape, 8) for host in args]
    curves = await g.hvp(loss, there, [await device.put(d) for d in directions])
    found = sum([(await c.to_host() * d).sum() for c, d in zip(curves, directions, strict=True)])
    np.testing.assert_allclose(found, along(loss_of_numpy, args, directions, 2), rtol=1e-5)


async def test_a_fixed_point_of_arrays_that_the_equation_reads(device: ta.Device) -> None:
    """A nested root, whose parameters are no arguments."""
    rate, shift = 0.4, numbers((2,), 3)

    def following(x: Any, lib: Any, rate: Any, shift: Any) -> tuple[Any, Any]:
        return lib.cos(x[1][:2] * rate) + shift, lib.stack([x[0][0], x[0][1], rate * x[0][0]]) * 0.5

    async def iterate(x: Any) -> Any:
        state = [x["a"], x["b"]]
        rate, shift = there
        for _ in range(60):
            first, second = following(state, a, rate, shift)
            state = list(await ta.gather(first, second))
        return {"a": state[0], "b": state[1]}

    there = await device.put(np.array(rate)), await device.put(shift)
    x0 = {"a": await device.put(np.zeros(2)), "b": await device.put(np.zeros(3))}

    def loss(rate: Any, shift: Any) -> Any:
        def equation(x: Any) -> Any:
            first, second = following([x["a"], x["b"]], a, rate, shift)
            return {"a": first - x["a"], "b": second - x["b"]}

        x = g.custom_root(equation, iterate)(x0)
        return a.sum(x["a"] ** 2) + x["b"][2]

    def of_numpy(rate: Any, shift: Any) -> Any:
        state = np.zeros(2), np.zeros(3)
        for _ in range(60):
            state = following(state, np, rate, shift)
        return (state[0] ** 2).sum() + state[1][2]

    value, slopes = await ta.value_and_grad(loss, (0, 1))(*there)
    np.testing.assert_allclose(await value.item(), of_numpy(rate, shift), rtol=1e-12)
    np.testing.assert_allclose(
        await slopes[0].item(), along(of_numpy, [rate, shift], [1.0, 0.0 * shift]), rtol=1e-8
    )
    direction = numbers((2,), 4)
    want = along(of_numpy, [rate, shift], [0.0, direction])
    np.testing.assert_allclose((await slopes[1].to_host() * direction).sum(), want, rtol=1e-8)


async def test_the_value_alone_and_unused_arguments(device: ta.Device) -> None:
    p, q, x0 = [await device.put(host) for host in (P, Q, np.zeros(3))]
    root = g.custom_root(equation, newton)
    np.testing.assert_allclose(await (await root(x0, p, q)).to_host(), root_of_numpy(P, Q), rtol=1e-12)
    slope = await ta.grad(lambda x0: a.sum(root(x0, p, q)))(x0)
    np.testing.assert_array_equal(await slope.to_host(), np.zeros(3))

    async def halved(x: Any, p: Any, numbers: Any, name: str) -> Any:
        assert (numbers[0], name) == (2, "half")
        return await (p / 2)

    half = g.custom_root(lambda x, p, numbers, name: numbers[0] * x - p, halved)
    slope = await ta.grad(lambda q: a.sum(half(x0, q, [2, x0], "half") * q))(q)
    np.testing.assert_allclose(await slope.to_host(), Q)


async def test_wrong_arguments_are_refused(device: ta.Device) -> None:
    x, z, wide = [await device.put(host) for host in (np.ones(3), np.ones(3) * 1j, np.ones(901))]

    async def same(x: Any, *_: Any) -> Any:
        return x

    async def short(x: Any) -> Any:
        return x[:2]

    with pytest.raises(TypeError, match="custom_root: solve must be a function, got int"):
        g.custom_root(same, 3)
    with pytest.raises(TypeError, match="x0 must have floating arrays on a device"):
        g.custom_root(lambda x: x, same)(np.ones(3))
    with pytest.raises(TypeError, match=r"f must return .* of x0: float64 \(3,\); got float64 \(2,\)"):
        g.custom_root(lambda x: x[1:] * 2, same)(x)
    with pytest.raises(TypeError, match=r"solve must return .* of x0: float64 \(3,\); got float64 \(2,\)"):
        await g.custom_root(lambda x: x * 2, short)(x)
    of = g.custom_root(lambda x, p: x - p, same)
    for x0, text in ((z, "complex numbers"), (wide, "more than 3000 calls, because x0 has 901 elements")):
        with pytest.raises(ta.NotSupportedError, match=text):
            await ta.grad(lambda p, x0=x0: a.sum(a.abs(of(x0, p))))(x0)
    with pytest.raises(ta.LinAlgError):
        await ta.grad(lambda p: a.sum(g.custom_root(lambda x, p: x * 0 - p, same)(x, p)))(x)


async def test_implicit_steps_in_a_scan(device: ta.Device) -> None:
    """The implicit method of Euler for x' = -k x³."""
    start, rate = numbers((2,), 6, 1.0, 2.0), 1.5

    async def solve(x: Any, previous: Any, k: Any) -> Any:
        for _ in range(50):
            x = await (x - (x + 0.1 * k * x**3 - previous) / (1 + 0.3 * k * x**2))
        return x

    def loss(x: Any, k: Any) -> Any:
        root = g.custom_root(lambda x, previous, k: x + 0.1 * k * x**3 - previous, solve)

        def step(x: Any, _: None) -> tuple[Any, Any]:
            x = root(x, x, k)
            return x, x

        last, xs = g.scan(step, x, length=6, every=4)
        return a.sum(last**2) + a.sum(xs[2])

    def of_numpy(x: Any, k: Any) -> Any:
        xs = []
        for _ in range(6):
            previous = x
            for _ in range(50):
                x = x - (x + 0.1 * k * x**3 - previous) / (1 + 0.3 * k * x**2)
            xs.append(x)
        return (x**2).sum() + xs[2].sum()

    slopes = await ta.grad(loss, (0, 1))(await device.put(start), await device.put(np.array(rate)))
    direction = numbers((2,), 7)
    want = along(of_numpy, [start, rate], [direction, 0.0])
    np.testing.assert_allclose((await slopes[0].to_host() * direction).sum(), want, rtol=1e-8)
    np.testing.assert_allclose(
        await slopes[1].item(), along(of_numpy, [start, rate], [0 * start, 1.0]), rtol=1e-8
    )


async def test_a_root_in_a_step(device: ta.Device) -> None:
    p, q, x0 = [await device.put(host) for host in (P, Q, np.zeros(3))]
    root = g.custom_root(equation, newton)
    derived: Any = ta.value_and_grad(lambda q: a.sum(WEIGHTS * root(x0, p, q) ** 2))
    value, slope = await derived(q)

    @ta.step
    def stepped(q: Any, p: Any, x0: Any) -> Any:
        return ta.value_and_grad(lambda q: a.sum(WEIGHTS * root(x0, p, q) ** 2))(q)

    for _ in range(2):
        of_step = await stepped(q, p, x0)
        np.testing.assert_allclose(await of_step[0].item(), await value.item(), rtol=1e-14)
        np.testing.assert_allclose(await of_step[1].to_host(), await slope.to_host(), rtol=1e-12)


async def test_an_equation_may_contain_a_root_and_host_arrays(device: ta.Device) -> None:
    """The outer root of sqrt(x) + w x = k, with sqrt(x) as the root of y² = x."""
    host, w = np.array([3.0, 4.0]), np.array([1.0, 2.0])

    async def solve_outer(_: Any, k: Any) -> Any:
        return await (((a.sqrt(1 + 4 * w * k) - 1) / (2 * w)) ** 2)

    async def solve_inner(_: Any, x: Any) -> Any:
        return await a.sqrt(x)

    inner = g.custom_root(lambda y, x: y * y - x, solve_inner)
    outer = g.custom_root(lambda x, k: inner(x, x) + x * w - k, solve_outer)
    slope = await ta.grad(lambda k: a.sum(outer(k, k)))(await device.put(host))
    roots = ((np.sqrt(1 + 4 * w * host) - 1) / (2 * w)) ** 2
    np.testing.assert_allclose(await slope.to_host(), 1 / (0.5 / np.sqrt(roots) + w), rtol=1e-12)
