"""Optimizers with their rate and step number in arrays of the device, alone and in captured graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from array_numbers import numbers
from differences import widest
from test_margins import STEPS as OTHERS
from test_training import adam, sgd

import trio_accel as ta
from trio_accel import nn

Case = tuple[str, Callable[..., Any], int, bool, dict[str, Any]]


def by_sgd(p: Any, grads: Any, lr: float, decay: float = 0.0, momentum: float = 0.0) -> Any:
    return sgd(p, grads, lr, momentum, 0.0, decay, nesterov=False)


def by_adam(
    p: Any, grads: Any, lr: float, betas: Any = (0.9, 0.999), decay: float = 0.0, *, is_apart: bool
) -> Any:
    return adam(p, grads, lr, betas, 1e-8, decay, is_apart)


STEPS: list[Case] = [
    *OTHERS,
    ("sgd", by_sgd, 0, False, {"lr": 0.1, "weight_decay": 0.3}),
    ("sgd", by_sgd, 1, False, {"lr": 0.1, "momentum": 0.9}),
    ("adam", partial(by_adam, is_apart=False), 2, True, {"lr": 0.1, "weight_decay": 0.3}),
    ("adam", partial(by_adam, is_apart=False), 2, True, {"lr": 0.1, "betas": (0.5, 0.0)}),
    ("adamw", partial(by_adam, is_apart=True), 2, True, {"lr": 0.1, "weight_decay": 0.3}),
]


def named(given: dict[str, Any]) -> dict[str, Any]:
    return {{"weight_decay": "decay"}.get(key, key): value for key, value in given.items()}


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("function", "formula", "states", "is_numbered", "options"), STEPS)
@pytest.mark.parametrize("which", ["both", "rate", "step"])
async def test_steps_by_arrays_match_the_formulas(
    device: ta.Device,
    which: str,
    function: str,
    formula: Callable[..., Any],
    states: int,
    is_numbered: bool,
    options: dict[str, Any],
    name: str,
) -> None:
    p, grads = numbers((4, 5), name), [numbers((4, 5), name, seed) for seed in range(8)]
    on = await device.put(p)
    wide = "float32" if name == "float16" else name
    kept = [await device.zeros((4, 5), wide) for _ in range(states)]
    rate = options["lr"] if which == "step" else await device.put(np.float64(options["lr"]))
    before = (await device.statistics()).launched
    asked = 0
    for step, grad in enumerate(grads, 1):
        # Integers of any width, and floating ones.
        dtype = ("int64", "int32", "float32", "uint8")[step % 4]
        number = step if which == "rate" else await device.put(np.array(step, dtype))
        asked += which != "rate"
        given = [number] if is_numbered else []
        assert await getattr(nn, function)(on, grad, *kept, *given, **options | {"lr": rate}) is on
    # One launch for each, besides the launches that put numbers there.
    assert (await device.statistics()).launched - before == len(grads) + asked
    want = formula(widest(p), [widest(grad) for grad in grads], **named(options))
    near = {"float16": 8e-3, "float32": 1e-5, "float64": 1e-12}[name]
    np.testing.assert_allclose(widest(await on.to_host()), want, rtol=near, atol=near)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**7, 10**12])
async def test_corrections_lose_no_digits(device: ta.Device, step: int) -> None:
    """The first step with a gradient of ones shows only the corrections of both means."""
    betas = 0.9, 1 - 1e-9
    found = []
    for number in (step, await device.put(np.int64(step))):
        on, states = await device.zeros(3), [await device.zeros(3) for _ in range(2)]
        await nn.adam(on, np.ones(3), *states, number, lr=1.0, betas=betas, eps=0.0)
        found.append(await on.to_host())
    first, second = (-math.expm1(step * math.log(beta)) for beta in betas)
    want = -(1 - betas[0]) / first / math.sqrt((1 - betas[1]) / second)
    np.testing.assert_allclose(found, np.full((2, 3), want), rtol=4e-15)


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize(("function", "formula", "states", "is_numbered", "options"), STEPS)
async def test_a_hundred_replays_follow_a_schedule(
    device: ta.Device,
    function: str,
    formula: Callable[..., Any],
    states: int,
    is_numbered: bool,
    options: dict[str, Any],
    name: str,
) -> None:
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")
    p, pull = numbers((4, 5), name), numbers((4, 5), name, 4)
    rates = 0.1 * np.cos(np.linspace(0, 1.5, 101)).astype(name)
    call, rest = getattr(nn, function), {key: one for key, one in options.items() if key != "lr"}
    on, kept = await device.put(p), [await device.zeros((4, 5), name) for _ in range(states)]
    schedule, count = await device.put(rates), await device.put(np.int64(0))
    goal = await device.put(pull)

    async def step() -> ta.AccelRef:
        await ta.arrays.add(count, 1, out=count)
        rate = await ta.arrays.take(schedule, count)
        given = [count] if is_numbered else []
        made: ta.AccelRef = await call(on, await (on - goal), *kept, *given, lr=rate, **rest)
        return made

    graph = await ta.graphs.capture(device, step)
    for _ in range(100):
        await graph()
    assert await count.item() == 100
    plain, state = await device.put(p), [await device.zeros((4, 5), name) for _ in range(states)]
    for number in range(1, 101):
        given = [number] if is_numbered else []
        await call(plain, await (plain - goal), *state, *given, lr=float(rates[number]), **rest)
    near = 1e-12 if name == "float64" else 1e-5
    np.testing.assert_allclose(await on.to_host(), await plain.to_host(), rtol=near, atol=near)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("shapes", [[(4, 5)], [(3,), (2, 4), ()]])
async def test_clip_grad_norm(
    device: ta.Device, shapes: list[tuple[int, ...]], max_norm: float, name: str
) -> None:
    given = [np.asarray(numbers(shape, name, seed)) for seed, shape in enumerate(shapes)]
    arrays = [await device.put(one) for one in given]
    found = await nn.clip_grad_norm(arrays[0] if len(arrays) == 1 else arrays, max_norm)
    norm = math.sqrt(sum(float((widest(one) ** 2).sum()) for one in given))
    assert (found.shape, found.dtype) == ((), "float64")
    np.testing.assert_allclose(await found.item(), norm, rtol=1e-14)
    factor = min(max_norm / (norm + 1e-6), 1.0)
    near = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-14}[name]
    for array, one in zip(arrays, given, strict=True):
        assert array.dtype == name
        np.testing.assert_allclose(widest(await array.to_host()), widest(one) * factor, rtol=near, atol=1e-7)


async def test_long_gradients_of_halves_do_not_overflow(device: ta.Device) -> None:
    array = await device.put(np.full(10_000, 6e4, np.float16))
    assert await (await nn.clip_grad_norm(array, 1.0)).item() == pytest.approx(6e6, rel=1e-4)
    np.testing.assert_allclose(await array.to_host(), np.full(10_000, 0.01), rtol=2e-3)


async def test_clipping_in_a_graph(device: ta.Device) -> None:
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")
    grad, scale = await device.zeros(4), await device.put(np.float64(1.0))
    long = await device.put(np.array([3.0, 0.0, 4.0, 0.0]))

    async def step() -> ta.AccelRef:
        await grad.assign(await (long * scale))
        return await nn.clip_grad_norm(grad, 1.0)

    graph = await ta.graphs.capture(device, step)
    for factor in (2.0, 0.1):
        await scale.fill(factor)
        norm: Any = await graph()
        assert await norm.item() == pytest.approx(5 * factor, rel=1e-14)
        want = np.array([0.6, 0.0, 0.8, 0.0]) * min(5 * factor, 1.0)
        np.testing.assert_allclose(await grad.to_host(), want, rtol=1e-6)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    call: Any = nn
    p, g, m, v = [await device.zeros((3, 2)) for _ in range(4)]
    rows, half = await device.zeros(3), await device.put(np.array(0.5 + 0j))
    for asked, error, match in (
        (lambda: call.adam(p, g, m, v, rows), ValueError, r"nn\.adam: step must be a number, or .* \(3,\)"),
        (lambda: call.adamw(p, g, m, v, 1, lr=rows), ValueError, r"nn\.adamw: lr must be a number, or"),
        (lambda: call.sgd(p, g, lr=half), TypeError, r"nn\.sgd: lr must be .* got complex128"),
        (lambda: call.adam(p, g, m, v, half), TypeError, r"nn\.adam: step must be .* got complex128"),
        (lambda: call.adam(p, g, m, v, 0, lr=m[0, 0]), ValueError, "step must be at least 1, got 0"),
        (lambda: call.clip_grad_norm([], 1.0), ValueError, "grads must have at least one array"),
        (lambda: call.clip_grad_norm(np.ones(3), 1.0), TypeError, "grads must be an AccelRef, which is"),
        (lambda: call.clip_grad_norm(p, -1.0), ValueError, "max_norm must be from 0 below inf"),
        (lambda: call.clip_grad_norm(p, math.nan), ValueError, "max_norm must be from 0 below inf"),
    ):
        with pytest.raises(error, match=match):
            await asked()
    assert not (await p.to_host()).any()
