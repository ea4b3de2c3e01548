"""Functions through time by `scan`: values, and gradients of any order."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
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
    """Other lambdas of the same line share the derived body of an iteration, and that of a segment."""
    from trio_accel.gradients import _scan

    derived: list[int] = []
    original = _scan.backward

    def counted(*args: Any, **named: Any) -> Any:
        derived.append(1)
        return original(*args, **named)

    monkeypatch.setattr(_scan, "backward", counted)
    s = await device.put(STATE)
    loss = ta.grad(lambda p, n: a.sum(g.scan(lambda s, _: (runge_kutta(s, p, a), None), s, length=n)[0]))
    for count in (3, 5, 12, 27, 10, 43):
        await loss(await device.put(RATES), count)
    assert len(derived) == 2


async def test_a_scan_of_a_worker_survives_between_requests(device: ta.Device) -> None:
    p, s = await device.put(RATES), await device.put(STATE)
    loss = ta.grad(lambda p: a.sum(g.scan(lambda s, _: (runge_kutta(s, p, a), None), s, length=15)[0]))
    first, second = await loss(p), await loss(p)
    np.testing.assert_array_equal(await first.to_host(), await second.to_host())


async def test_a_scan_in_a_step(device: ta.Device) -> None:
    """It is a part of the step's request."""
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


async def test_a_body_is_not_shared_with_host_arrays(device: ta.Device) -> None:
    """Host arrays have no gradient, and their elements may change."""
    s = await device.put(STATE)

    def loss(x: Any, w: Any) -> Any:
        return a.sum(g.scan(lambda s, _: (s * w * x, None), s, length=2)[0])

    x = await device.put(WEIGHTS)
    for w in (WEIGHTS, x, 2 * WEIGHTS, await device.put(WEIGHTS), WEIGHTS):
        host = w if isinstance(w, np.ndarray) else await w.to_host()
        for _ in range(2):
            found = await ta.grad(loss)(x, w)
            np.testing.assert_allclose(await found.to_host(), 2 * WEIGHTS * host**2 * STATE, rtol=1e-12)
        of_x, of_w = await ta.grad(loss, (0, 1))(x, await device.put(host))
        np.testing.assert_allclose(await of_x.to_host(), 2 * WEIGHTS * host**2 * STATE, rtol=1e-12)
        np.testing.assert_allclose(await of_w.to_host(), 2 * WEIGHTS**2 * host * STATE, rtol=1e-12)


async def test_host_arrays_of_an_iteration_are_read_at_each_call(device: ta.Device) -> None:
    """Indices on the host decide where gradients go."""
    s = await device.put(STATE)
    for indices in ([0, 0], [1, 1], [1, 0], [0, 0]):
        index = np.array(indices)
        for _ in range(2):
            found = await ta.grad(
                lambda x, index=index: a.sum(g.scan(lambda s, _: (a.take(s, index), None), x, length=1)[0])
            )(s)
            np.testing.assert_array_equal(await found.to_host(), np.bincount(indices, minlength=2))


async def test_a_body_is_not_shared_with_other_inputs(device: ta.Device) -> None:
    """The same code has other places of its inputs with an element that it does not read."""
    s, xs, w = await device.put(STATE), await device.put(np.full((3, 2), 9.0)), await device.put(WEIGHTS)

    def loss(w: Any, elements: Any, length: Any) -> Any:
        return a.sum(g.scan(lambda s, _: (s * w, None), s, elements, length=length)[0])

    for elements, length in ((xs, None), (None, 3), (xs, None)):
        found = await ta.grad(loss)(w, elements, length)
        np.testing.assert_allclose(await found.to_host(), 3 * WEIGHTS**2 * STATE, rtol=1e-12)


async def test_a_loss_through_time_has_a_hessian(device: ta.Device) -> None:
    """Second derivatives pass the gradient's scan, in one segment, in several, and in a last part of one."""
    s, direction = await device.put(STATE), await device.put(numbers(RATES.shape, 3))
    for count, every in ((3, 10), (7, 3), (6, 3), (4, 1)):

        def loss(p: Any, count: int = count, every: int = every) -> Any:
            last, ys = g.scan(lambda s, _: (runge_kutta(s, p, a), s * p[0]), s, length=count, every=every)
            return a.sum(last * WEIGHTS) + a.sum(ys**2)

        found = await (await g.hessian(loss)(await device.put(RATES))).to_host()
        (moved,) = await g.hvp(loss, (await device.put(RATES),), (direction,))
        product = await moved.to_host()
        columns = []
        for number in range(RATES.size):
            sides = []
            for sign in (1, -1):
                moved = RATES + sign * 1e-5 * np.eye(RATES.size)[number]
                sides.append(await (await ta.grad(loss)(await device.put(moved))).to_host())
            columns.append((sides[0] - sides[1]) / 2e-5)
        np.testing.assert_allclose(found, np.stack(columns), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(product, found @ numbers(RATES.shape, 3), rtol=1e-10)


def unrolled(f: Any, state: Any, xs: Any, count: int) -> tuple[Any, Any]:
    """Apply a function of `scan` without it."""
    rows = []
    for number in range(count):
        x = xs[number]
        # A body may not read it.
        x.silence()
        state, y = f(state, x)
        rows.append(y)
    return state, [a.stack([row[k] for row in rows]) for k in range(len(rows[0]))]


# Functions of the state (u, v, n), an element and a parameter: ways in which outputs depend on inputs.
BODIES: dict[str, Any] = {
    "exchanged": lambda s, x, p: ((s[1], s[0], s[2]), [s[0] * p]),
    "unchanged": lambda s, x, p: ((s[0], s[1] * p, s[2]), [s[1]]),
    "the state before": lambda s, x, p: ((s[0] * x, s[0] + s[1], s[2] + 1), [s[0], s[1]]),
    "the state after": lambda s, x, p: ((y := s[0] * p, y, s[2]), [y, y * 2]),
    "parts of the state": lambda s, x, p: ((s[0][::-1], s[1] + s[0][:1], s[2]), [s[0][1:], s[1][0]]),
    "the parameter": lambda s, x, p: ((p, s[1] * s[0], s[2]), [p, x]),
    "numbers": lambda s, x, p: ((s[0] * 0.5, s[1], s[2] + 2), [s[2].cast("float64") * p]),
    "products": lambda s, x, p: ((a.tanh(s[0] * x + p), s[1] * s[0], s[2]), [a.sum(s[0])]),
    "host arrays": lambda s, x, p: ((s[0] * WEIGHTS, s[1] + WEIGHTS * p, s[2]), [s[0] + WEIGHTS]),
    # It checks indices, which a graph cannot.
    "taken": lambda s, x, p: ((a.take(s[0], np.array([1, 0])) * p, s[1] * x, s[2]), [a.take(s[1], s[2] % 2)]),
    "a sum of rows": lambda s, x, p: (
        (s[0] - a.mean(s[1]) * p, s[1] / (1 + a.sum(x * x)), s[2]),
        [a.max(s[0])],
    ),
    "a scan": lambda s, x, p: ((g.scan(lambda t, _: (t * p, None), s[0], length=3)[0], s[1], s[2]), [s[0]]),
    "nothing": lambda s, x, p: ((a.sum(s[0][:0]) * p + s[0], s[1], s[2]), [s[1][:0]]),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("count", "every"), [(1, 1), (5, 1), (5, 2), (4, 2), (3, 9)])
async def test_a_scan_equals_its_calls(device: ta.Device, name: str, count: int, every: int) -> None:
    body = BODIES[name]
    hosts = [numbers((2,), 1), numbers((2,), 2), numbers((count, 2), 3), numbers((2,), 4)]
    u, v, xs, p = [await device.put(host) for host in hosts]
    n = await device.put(np.array(3))

    def loss(run: Any) -> Any:
        def value(u: Any, v: Any, xs: Any, p: Any) -> Any:
            state, ys = run(lambda s, x: body(s, x, p), (u, v, n), xs)
            parts = [*state[:2], state[2].cast("float64") * a.sum(p), *ys]
            return sum((a.sum(part * part * (0.3 + k)) for k, part in enumerate(parts)), a.sum(u))

        return value

    ours = loss(lambda f, s, xs: g.scan(f, s, xs, every=every))
    right = loss(lambda f, s, xs: unrolled(f, s, xs, count))
    operands = u, v, xs, p
    for _ in range(2):
        found, want = [await ta.value_and_grad(f, (0, 1, 2, 3))(*operands) for f in (ours, right)]
        assert await found[0].item() == pytest.approx(await want[0].item(), rel=1e-13)
        for mine, other in zip(found[1], want[1], strict=True):
            np.testing.assert_allclose(await mine.to_host(), await other.to_host(), rtol=1e-11, atol=1e-13)
    tangents = [await device.put(numbers(host.shape, 7 + k)) for k, host in enumerate(hosts)]
    products = [await g.hvp(f, operands, tangents) for f in (ours, right)]
    for mine, other in zip(*products, strict=True):
        np.testing.assert_allclose(await mine.to_host(), await other.to_host(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16"])
async def test_states_of_other_dtypes(device: ta.Device, dtype: str) -> None:
    host = numbers((3,), 1).astype(dtype)
    s, xs = await device.put(host), await device.put(np.stack([host, -host]))
    last, ys = await ta.gather(*g.scan(lambda s, x: (s * x, s + x), s, xs))
    np.testing.assert_allclose(await last.to_host(), host * host * -host, rtol=2e-3)
    np.testing.assert_allclose(await ys.to_host(), np.stack([host + host, host * host - host]), rtol=2e-3)
    assert last.dtype == ys.dtype == ta.DType.of(dtype)


def asked(device: Any) -> int:
    """Count the chains asked as one request, and those that run step by step."""
    counts = device.chains.kept.counts
    return int(counts.hits + counts.recorded + counts.unplanned + counts.refused)


async def test_a_scan_is_one_request(device: ta.Device) -> None:
    """It is a part of its function's chain, and so is its gradient."""
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")
    p, s = await device.put(RATES), await device.put(STATE)
    loss = ta.value_and_grad(
        lambda p: a.sum(
            g.scan(lambda s, _: (runge_kutta(s, p, a) * WEIGHTS, None), s, length=43)[0] * WEIGHTS
        )
    )
    counts = []
    for _ in range(4):
        before = asked(device)
        await loss(p)
        counts.append(asked(device) - before)
    assert counts[-1] == 1, counts


@pytest.mark.skipif(BACKEND != "cpu", reason="kills the worker of a device of the CPU")
async def test_a_loop_runs_again_after_a_kill(system: ta.System) -> None:
    """It changes no array but its own, so the next worker repeats it."""
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="process", retry=2)) as device:
        p, s = await device.put(RATES), await device.put(STATE)

        def loss(p: Any) -> Any:
            return a.sum(g.scan(lambda s, _: (runge_kutta(s, p, a, 1e-4), None), s, length=4000)[0])

        want = await (await ta.grad(loss)(p)).to_host()
        for _ in range(3):
            generation, pid = device.generation, (await device.statistics()).pid
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_later, pid)
                found = await ta.grad(loss)(p)
            np.testing.assert_array_equal(await found.to_host(), want)
            assert device.generation > generation


async def kill_later(pid: int | None) -> None:
    # clock: it kills a worker in the middle of a loop
    await trio.sleep(0.1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


A, OBSERVED, EYE = np.array([[1.0, 0.1], [-0.2, 0.95]]), np.array([[1.0, 0.3]]), np.eye(2)


def smoother(lib: Any, loop: Any, q: Any, r: Any, observations: Any, mean: Any, cov: Any) -> tuple[Any, Any]:
    """Return the log-likelihood of a Kalman filter, and the means of Rauch, Tung and Striebel's smoother."""

    def forward(s: Any, y: Any) -> Any:
        m, c, total = s
        m_ahead, c_ahead = A @ m, A @ c @ A.T + q * EYE
        h = c_ahead @ OBSERVED.T
        variance = OBSERVED @ h + r
        off = y - OBSERVED @ m_ahead
        gain = h / variance
        m, c = m_ahead + gain @ off, c_ahead - gain @ h.T
        total = total - 0.5 * lib.sum(off * off / variance + lib.log(variance))
        return (m, c, total), (m, c, m_ahead, c_ahead)

    def backward(s: Any, x: Any) -> Any:
        m, c, m_next, c_next = x
        # The inverse of two by two.
        turned = lib.stack(
            [lib.stack([c_next[1, 1], -c_next[0, 1]]), lib.stack([-c_next[1, 0], c_next[0, 0]])]
        )
        inverse = turned / (c_next[0, 0] * c_next[1, 1] - c_next[0, 1] * c_next[1, 0])
        m = m + c @ A.T @ inverse @ (s - m_next)
        return m, m

    (last, _, total), (means, covs, ahead, covs_ahead) = loop(
        forward, (mean, cov, lib.sum(0 * mean)), observations[:, None]
    )
    reverse = means[:-1][::-1], covs[:-1][::-1], ahead[1:][::-1], covs_ahead[1:][::-1]
    _, smooth = loop(backward, last, reverse)
    return total, smooth


def looped(f: Any, state: Any, xs: Any) -> tuple[Any, Any]:
    """Apply a function of `scan` in NumPy."""
    rows = []
    for x in zip(*xs, strict=True) if isinstance(xs, tuple) else xs:
        state, y = f(state, x)
        rows.append(y)
    return state, tuple(map(np.stack, zip(*rows, strict=True))) if isinstance(rows[0], tuple) else np.stack(
        rows
    )


async def test_a_kalman_smoother_of_200_steps(device: ta.Device) -> None:
    hosts = [np.array(0.1), np.array(0.5), numbers((200,), 1), numbers((2,), 2), np.eye(2)]
    weights = numbers((199, 2), 3)

    def value(lib: Any, loop: Any, weights: Any, args: Any) -> Any:
        total, smooth = smoother(lib, loop, *args)
        return 0.1 * total + lib.sum(smooth * smooth * weights)

    operands = [await device.put(host) for host in hosts]
    loss = ta.value_and_grad(lambda *args: value(a, g.scan, weights, args), (0, 1, 2, 3))
    found, slopes = await loss(*operands)
    assert await found.item() == pytest.approx(value(np, looped, weights, hosts), rel=1e-11)
    for place, slope in enumerate(slopes):
        direction = numbers(hosts[place].shape, 9)
        want = along(lambda *args: value(np, looped, weights, args), hosts, place, direction)
        assert (await slope.to_host() * direction).sum() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("axes", [(0, 0, None), (0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
async def test_a_batch_of_scans(device: ta.Device, axes: Any) -> None:
    """Values, gradients of a batch, and a batch of gradients equal the results of single examples."""
    hosts = [numbers((3, 2), 1), numbers((3, 2), 2), numbers((3, 7, 2), 3)]
    used = [host if axis == 0 else host[0] for host, axis in zip(hosts, axes, strict=True)]
    operands = [await device.put(host) for host in used]

    def f(p: Any, s: Any, xs: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            u = a.tanh(s[0] * p + x * WEIGHTS)
            return (u, s[1] * a.sum(u)), (u, s[1])

        (u, v), (us, vs) = g.scan(step, (s, a.sum(s)), xs, every=3)
        return u * v, us, vs

    def total(results: Any) -> Any:
        return a.sum(results[0]) + a.sum(a.sin(results[1])) + a.sum(results[2] ** 2)

    examples = [
        [x[number] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)] for number in range(3)
    ]
    rows = [await ta.gather(*f(*example)) for example in examples]
    one = ta.grad(lambda *args: total(f(*args)), (0, 1, 2))
    slopes = [[await slope.to_host() for slope in await one(*example)] for example in examples]
    for _ in range(2):
        found = await ta.gather(*ta.vmap(f, axes)(*operands))
        for ours, wants in zip(found, zip(*rows, strict=True), strict=True):
            want = np.stack([await row.to_host() for row in wants])
            np.testing.assert_allclose(await ours.to_host(), want, rtol=1e-13)
        found = await ta.gather(*ta.vmap(one, axes)(*operands))
        for ours, wants in zip(found, zip(*slopes, strict=True), strict=True):
            np.testing.assert_allclose(await ours.to_host(), np.stack(wants), rtol=1e-10, atol=1e-13)
        of_batch = ta.grad(lambda *args: total(ta.vmap(f, axes)(*args)), (0, 1, 2))
        for ours, wants, axis in zip(await of_batch(*operands), zip(*slopes, strict=True), axes, strict=True):
            want = np.stack(wants) if axis == 0 else sum(wants)
            np.testing.assert_allclose(await ours.to_host(), want, rtol=1e-10, atol=1e-13)
