"""Gradients through time by `scan`, and of functions that compute their results again by `checkpoint`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
g = ta.gradients
STATE, RATES = np.array([1.0, 0.8]), np.array([1.1, 0.4, 0.3, 0.9])
WEIGHTS = np.array([0.7, -1.3])


def runge_kutta(s: Any, p: Any, lib: Any, h: float = 0.05) -> Any:
    """One step of the equations of Lotka and Volterra."""

    def slope(s: Any) -> Any:
        return lib.stack([p[0] * s[0] - p[1] * s[0] * s[1], p[2] * s[0] * s[1] - p[3] * s[1]])

    k1 = slope(s)
    k2 = slope(s + 0.5 * h * k1)
    k3 = slope(s + 0.5 * h * k2)
    k4 = slope(s + h * k3)
    return s + (h / 6) * (k1 + 2 * k2 + 2 * k3 + k4)


def simulated(p: Any, s: Any, xs: Any) -> tuple[Any, Any]:
    states = []
    for x in xs:
        s = runge_kutta(s, p, np) + 0.01 * x
        states.append(s * x)
    return s, np.stack(states)


def along(f: Any, args: list[Any], place: int, direction: Any) -> Any:
    sides = []
    for sign in (1, -1):
        moved = [*args]
        moved[place] = args[place] + sign * 1e-6 * direction
        sides.append(f(*moved))
    return (sides[0] - sides[1]) / 2e-6


@pytest.mark.parametrize(("count", "every"), [(1, 10), (7, 3), (12, 4), (40, 10), (40, 100)])
async def test_a_scan_has_the_gradient_of_the_loop(device: ta.Device, count: int, every: int) -> None:
    xs = numbers((count,), 1)
    args = [RATES, STATE, xs]

    def loss(p: Any, s: Any, xs: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            following = runge_kutta(s, p, a) + 0.01 * x
            return following, following * x

        last, ys = g.scan(step, s, xs, every=every)
        return a.sum(last * WEIGHTS) + a.sum(ys**2)

    def of_numpy(p: Any, s: Any, xs: Any) -> Any:
        last, ys = simulated(p, s, xs)
        return (last * WEIGHTS).sum() + (ys**2).sum()

    value, slopes = await ta.value_and_grad(loss, (0, 1, 2))(*[await device.put(host) for host in args])
    np.testing.assert_allclose(await value.item(), of_numpy(*args), rtol=1e-12)
    for place, slope in enumerate(slopes):
        direction = numbers(args[place].shape, 9)
        want = along(of_numpy, args, place, direction)
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6, atol=1e-8)


async def test_a_scan_returns_the_last_state_and_all_results(device: ta.Device) -> None:
    p, s, xs = [await device.put(host) for host in (RATES, STATE, numbers((5,), 1))]
    last, ys = g.scan(lambda s, x: (runge_kutta(s, p, a), {"scaled": s * x}), {"s": s}["s"], xs)
    last, scaled = await ta.gather(last, ys["scaled"])
    state, rows = STATE, []
    for x in numbers((5,), 1):
        rows.append(state * x)
        state = runge_kutta(state, RATES, np)
    np.testing.assert_allclose(await last.to_host(), state, rtol=1e-14)
    np.testing.assert_allclose(await scaled.to_host(), np.stack(rows), rtol=1e-14)


async def test_states_and_elements_are_nested_and_need_no_results(device: ta.Device) -> None:
    """A Kalman-like pair of a mean and a covariance, by a count of iterations."""
    mean, cov, w = (
        await device.put(STATE),
        await device.put(np.eye(2)),
        await device.put(numbers((2, 2), 4) / 3),
    )

    def loss(w: Any) -> Any:
        def step(s: Any, _: None) -> Any:
            return {"m": w @ s["m"], "c": [w @ s["c"][0] @ w.T + np.eye(2)]}, None

        last, ys = g.scan(step, {"m": mean, "c": [cov]}, length=6, every=2)
        assert ys is None
        return a.sum(last["m"] ** 2) + a.sum(last["c"][0] * np.array([[1.0, 2.0], [3.0, 4.0]]))

    def of_numpy(w: Any) -> Any:
        m, c = STATE, np.eye(2)
        for _ in range(6):
            m, c = w @ m, w @ c @ w.T + np.eye(2)
        return (m**2).sum() + (c * np.array([[1.0, 2.0], [3.0, 4.0]])).sum()

    value, slope = await ta.value_and_grad(loss)(w)
    host = numbers((2, 2), 4) / 3
    np.testing.assert_allclose(await value.item(), of_numpy(host), rtol=1e-12)
    direction = numbers((2, 2), 5)
    want = along(of_numpy, [host], 0, direction)
    np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6)


async def test_integers_in_the_state_have_no_gradient(device: ta.Device) -> None:
    x, n = await device.put(STATE), await device.put(np.array(0))

    def loss(x: Any) -> Any:
        (y, count), _ = g.scan(lambda s, _: ((s[0] * s[0], s[1] + 1), None), (x, n), length=3)
        return a.sum(y) + 0.0 * count.cast("float64")

    found = await ta.grad(loss)(x)
    np.testing.assert_allclose(await found.to_host(), 8 * STATE**7, rtol=1e-12)


async def test_an_ode_is_fitted(device: ta.Device) -> None:
    """The rates of two species are found again from 60 states, by BFGS with gradients through time."""
    s, xs = await device.put(STATE), await device.put(np.zeros(60))
    _, data = simulated(RATES, STATE, np.ones(60))

    def loss(p: Any) -> Any:
        def step(s: Any, _: Any) -> Any:
            s = runge_kutta(s, p, a) + 0.01
            return s, s

        return a.sum((g.scan(step, s, xs)[1] - data) ** 2)

    both = ta.value_and_grad(loss)
    rates = np.array([0.9, 0.5, 0.4, 0.7])
    # BFGS by hand, because SciPy's calls no async function.
    inverse, (value, slope) = 0.02 * np.eye(4), await both(await device.put(rates))
    height, direction = await value.item(), await slope.to_host()
    for _ in range(60):
        move, rate = -inverse @ direction, 1.0
        while True:
            value, slope = await both(await device.put(rates + rate * move))
            if await value.item() <= height + 1e-4 * rate * (move @ direction) or rate < 1e-6:
                break
            rate /= 2
        change, turn = rate * move, await slope.to_host() - direction
        rates, height, direction = rates + change, await value.item(), direction + turn
        if turn @ change > 0:
            left = np.eye(4) - np.outer(change, turn) / (turn @ change)
            inverse = left @ inverse @ left.T + np.outer(change, change) / (turn @ change)
        if np.abs(direction).max() < 1e-8:
            break
    np.testing.assert_allclose(rates, RATES, rtol=1e-4)


async def test_a_body_is_derived_once_for_its_code(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lambdas of the same line share the derived body."""
    from trio_accel.gradients import _recomputed

    derived: list[int] = []
    original = _recomputed.backward

    def counted(*args: Any, **named: Any) -> Any:
        derived.append(1)
        return original(*args, **named)

    monkeypatch.setattr(_recomputed, "backward", counted)
    s = await device.put(STATE)
    loss = ta.grad(lambda p, n: a.sum(g.scan(lambda s, _: (runge_kutta(s, p, a), None), s, length=n)[0]))
    for count in (3, 5, 12):
        await loss(await device.put(RATES), count)
    assert len(derived) == 1


async def test_a_scan_of_a_worker_survives_between_requests(device: ta.Device) -> None:
    p, s = await device.put(RATES), await device.put(STATE)
    loss = ta.grad(lambda p: a.sum(g.scan(lambda s, _: (runge_kutta(s, p, a), None), s, length=15)[0]))
    first, second = await loss(p), await loss(p)
    np.testing.assert_array_equal(await first.to_host(), await second.to_host())


async def test_a_scan_in_a_step(device: ta.Device) -> None:
    """A step with requests in the middle runs call by call."""
    s, xs = await device.put(STATE), await device.put(np.full((3, 2), 2.0))
    step: Any = ta.step(lambda s, xs: g.scan(lambda s, x: (s * x, None), s, xs)[0] + 1.0)
    for _ in range(3):
        np.testing.assert_array_equal(await (await step(s, xs)).to_host(), 8 * STATE + 1.0)


async def test_a_scan_refuses_wrong_arguments(device: ta.Device) -> None:
    s, xs = await device.put(STATE), await device.put(np.ones((3, 2)))
    with pytest.raises(ValueError, match="scan: pass length, because there are no xs"):
        g.scan(lambda s, _: (s, None), s)
    with pytest.raises(ValueError, match="scan: xs must have one number of iterations"):
        g.scan(lambda s, x: (s, x), s, xs, length=4)
    with pytest.raises(ValueError, match="scan: every must be at least 1, got 0"):
        g.scan(lambda s, x: (s, x), s, xs, every=0)
    with pytest.raises(TypeError, match=r"scan: the function must return a pair \(state, y\)"):
        g.scan(lambda s, x: s, s, xs)
    with pytest.raises(
        TypeError, match=r"scan: array 0 of the state must keep its shape and dtype, got \(2,\)"
    ):
        g.scan(lambda s, x: (s[:1], None), s, xs)
    with pytest.raises(TypeError, match="scan: state and xs must be arrays on a device"):
        g.scan(lambda s, x: (s, None), STATE, xs)
    twice = ta.grad(
        lambda s: a.sum(ta.grad(lambda s: a.sum(g.scan(lambda s, x: (s * s, None), s, xs)[0]))(s))
    )
    with pytest.raises(ta.NotSupportedError, match="scan_grad has no gradient"):
        await twice(s)


async def test_a_checkpoint_has_the_same_gradient(device: ta.Device) -> None:
    w, x = await device.put(numbers((4, 4), 1)), await device.put(numbers((3, 4), 2))

    def layer(p: Any, x: Any, *, scale: float) -> Any:
        return a.tanh(x @ p["w"]) * scale + x

    def loss(p: Any, x: Any, layer: Any) -> Any:
        for _ in range(3):
            x = layer(p, x, scale=0.5)
        return a.sum(x * x)

    want = await ta.grad(loss, (0, 1))({"w": w}, x, layer)
    found = await ta.grad(loss, (0, 1))({"w": w}, x, g.checkpoint(layer))
    np.testing.assert_allclose(await found[0]["w"].to_host(), await want[0]["w"].to_host(), rtol=1e-12)
    np.testing.assert_allclose(await found[1].to_host(), await want[1].to_host(), rtol=1e-12)
    second = await g.hvp(lambda x: loss({"w": w}, x, g.checkpoint(layer)), (x,), (x,))
    right = await g.hvp(lambda x: loss({"w": w}, x, layer), (x,), (x,))
    np.testing.assert_allclose(await second[0].to_host(), await right[0].to_host(), rtol=1e-11)


async def test_the_plan_of_a_checkpoint_is_kept(device: ta.Device) -> None:
    x = await device.put(STATE)
    calls: list[int] = []

    def f(x: Any) -> Any:
        calls.append(1)
        return a.exp(x)

    loss = ta.grad(lambda x: a.sum(wrapped(x)))
    wrapped = g.checkpoint(f)
    for _ in range(4):
        await loss(x)
    # Once for each value, and once when the gradient was derived.
    assert len(calls) == 5


def test_names_are_documented() -> None:
    for name in ("scan", "checkpoint", "jacobian", "hessian", "hvp", "jvp"):
        assert inspect.getdoc(getattr(g, name)), name


async def test_a_body_is_not_shared_with_other_inputs(device: ta.Device) -> None:
    """The same code has other places of its inputs with an element that it does not read."""
    s, xs, w = await device.put(STATE), await device.put(np.full((3, 2), 9.0)), await device.put(WEIGHTS)

    def loss(w: Any, elements: Any, length: Any) -> Any:
        return a.sum(g.scan(lambda s, _: (s * w, None), s, elements, length=length)[0])

    for elements, length in ((xs, None), (None, 3), (xs, None)):
        found = await ta.grad(loss)(w, elements, length)
        np.testing.assert_allclose(await found.to_host(), 3 * WEIGHTS**2 * STATE, rtol=1e-12)


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, True), (2.0, 3.0)])
async def test_a_checkpoint_has_the_numbers_of_its_call(device: ta.Device, values: tuple[Any, Any]) -> None:
    """Equal numbers with other bits are others: `copysign` tells them apart."""
    x = await device.put(STATE)

    def f(x: Any, options: Any) -> Any:
        return x * np.copysign(2.0, options["scale"]) * (1 + abs(options["scale"]))

    wrapped = g.checkpoint(f)
    for value in values:
        found = await ta.grad(lambda x, v=value: a.sum(wrapped(x, {"scale": v}) ** 2))(x)
        factor = np.copysign(2.0, value) * (1 + abs(value))
        np.testing.assert_allclose(await found.to_host(), 2 * factor**2 * STATE, rtol=1e-12)
        cubed = await ta.grad(lambda x, v=value: a.sum(wrapped(x, {"scale": v})))(x)
        np.testing.assert_allclose(await cubed.to_host(), np.full(2, factor), rtol=1e-12)
