"""Step results of all kinds and sizes, and data-dependent errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from step_programs import outcome_of

import trio_accel as ta

N = 8
WARM = 40


async def compared(step: Any, calls: Callable[..., Any], *args: Any, runs: int = WARM) -> Any:
    """Compare runs of a step with its calls, and return the outcome."""
    expected = await outcome_of(_run(calls, *args))
    for _ in range(runs):
        assert await outcome_of(step(*args)) == expected
    return expected


async def _run(calls: Callable[..., Any], *args: Any) -> Any:
    made = calls(*args)
    return await (ta.gather(*made) if isinstance(made, tuple) else made)


@pytest.mark.parametrize("size", [0, 1, 100, 300])
async def test_results_for_the_host_of_any_size(device: ta.Device, size: int) -> None:
    x = await device.put(np.random.default_rng(0).standard_normal((size, size)))

    def calls(x: Any, k: float) -> Any:
        y = x * k
        return y.to_host(), ta.arrays.sum(y).item(), y, (y + 1.0).to_host()

    await compared(ta.step(calls), calls, x, 1.5, runs=25)


@pytest.mark.parametrize("size", [10, 20_000])
async def test_host_arguments_of_any_size(device: ta.Device, size: int) -> None:
    x = await device.put(np.ones(size))

    def calls(x: Any, h: Any, k: float) -> Any:
        return (x * k + h).to_host()

    step = ta.step(calls)
    for turn in range(4):
        await compared(step, calls, x, np.full(size, float(turn)), 0.5 * turn, runs=12)


async def test_values_within_the_structure(device: ta.Device) -> None:
    x = await device.put(np.arange(24.0).reshape(2, 3, 4))

    def calls(x: Any, axis: Any, options: dict[str, Any], number: Any) -> Any:
        y = ta.arrays.sum(x * number, axis=axis, **options)
        return y.to_host()

    step = ta.step(calls)
    for _ in range(3):
        for axis in (0, 1, -1, (0, 2), None, True):
            for keepdims in (False, True):
                for number in (2, 2.0, True, np.float32(2), np.float64(2.5), 0.0, -0.0, 1j):
                    await compared(step, calls, x, axis, {"keepdims": keepdims}, number, runs=1)


async def test_equal_static_values_with_other_bits(device: ta.Device) -> None:
    x = await device.put(np.ones(N))

    def calls(x: Any, number: Any) -> Any:
        return (x / number).to_host()

    step: Any = ta.step(calls, static="number")
    for number in (
        np.float64(0.0),
        np.float64(-0.0),
        np.float64(math.nan),
        complex(0.0, 1.0),
        complex(-0.0, 1.0),
    ):
        await compared(step, calls, x, number, runs=2)


async def test_arguments_by_name_and_defaults(device: ta.Device) -> None:
    x, y = await device.put(np.ones(N)), await device.put(np.full(N, 2.0))

    def calls(x: Any, y: Any, k: float = 3.0) -> Any:
        return ((x - y) * k).to_host()

    step: Any = ta.step(calls)
    for _ in range(2):
        for args, named in (
            ((x, y), {}),
            ((y, x), {}),
            ((x,), {"y": y}),
            ((), {"y": x, "x": y}),
            ((), {"x": x, "y": y, "k": 2.0}),
            ((x, y, 2.0), {}),
        ):
            expected = await outcome_of(calls(*args, **named))
            assert await outcome_of(step(*args, **named)) == expected


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_a_matrix_that_cannot_be_solved(device: ta.Device) -> None:
    a, b = await device.put(np.eye(N)), await device.put(np.ones(N))

    def calls(a: Any, b: Any) -> Any:
        return (ta.linalg.solve(a, b) * 2.0).to_host()

    step = ta.step(calls)
    await compared(step, calls, a, b)
    await a.fill(0.0)
    kind, text = await compared(step, calls, a, b, runs=3)
    assert issubclass(kind, ta.AccelError)
    assert "singular" in text
    await a.assign(np.eye(N) * 4.0)
    await compared(step, calls, a, b)


async def test_indices_out_of_range(device: ta.Device) -> None:
    x, places = await device.put(np.arange(float(N))), await device.put(np.array([3, 0, 1]))

    def calls(x: Any, places: Any) -> Any:
        return (ta.arrays.take(x, places) + 1.0).to_host()

    step = ta.step(calls)
    await compared(step, calls, x, places)
    await places.assign(np.array([3, N, 1]))
    kind, _ = await compared(step, calls, x, places, runs=3)
    assert issubclass(kind, IndexError)
    await places.assign(np.array([7, 7, 7]))
    await compared(step, calls, x, places)


async def test_calls_that_cannot_be_recorded(device: ta.Device) -> None:
    x = await device.put(np.array([3.0, 1.0, 3.0, 2.0]))

    def calls(x: Any) -> Any:
        return ta.arrays.unique_values(x).to_host()

    await compared(ta.step(calls), calls, x, runs=4)


async def test_gradients_in_a_step(device: ta.Device) -> None:
    rng = np.random.default_rng(1)
    x, w = await device.put(rng.standard_normal((4, N))), await device.put(rng.standard_normal((N, 3)))

    def loss(w: Any, x: Any) -> Any:
        return ta.arrays.mean(ta.arrays.tanh(x @ w) ** 2.0)

    value, grad = await ta.value_and_grad(loss)(w, x)

    @ta.step
    def train(w: Any, x: Any, rate: float) -> Any:
        value, grad = ta.value_and_grad(loss)(w, x)
        return value.to_host(), w - grad * rate

    for rate in (0.1, 0.2, 0.3):
        found, new = await train(w, x, rate)
        np.testing.assert_array_equal(found, await value.to_host())
        np.testing.assert_array_equal(await new.to_host(), await (w - grad * rate).to_host())


@pytest.mark.parametrize(
    "slope_of",
    [
        lambda w, k: ta.value_and_grad(lambda w: ta.arrays.sum(w * w * k))(w),
        ta.value_and_grad(lambda w, k: ta.arrays.sum(k / w) * (1.0 - k)),
        lambda w, k: ta.value_and_grad(lambda w: ta.arrays.sum(ta.arrays.clip(w, -k, k) * w))(w),
        lambda w, k: ta.value_and_grad(lambda w: ta.arrays.sum(w * w), scale=k)(w),
        lambda w, k: ta.value_and_grad(lambda w: ta.arrays.sum(ta.arrays.where(w > k, w * k, k)))(w),
    ],
)
async def test_gradients_with_a_number(device: ta.Device, slope_of: Callable[..., Any]) -> None:
    w = await device.put(np.random.default_rng(1).standard_normal(N))
    step = ta.step(slope_of)
    for rate in (0.5, 1.5, -0.0, 0.5):
        for found, expected in zip(await step(w, rate), await slope_of(w, rate), strict=True):
            np.testing.assert_array_equal(await found.to_host(), await expected.to_host())


@pytest.mark.parametrize("calls", [lambda x, k: x * (k * 1j), lambda x, k: x * float(f"{k}")])
async def test_a_step_traces_each_number_if_a_slot_fails(
    device: ta.Device, calls: Callable[..., Any]
) -> None:
    x = await device.put(np.ones(N))
    step = ta.step(calls)
    for number in (0.5, 2.0, 0.5):
        await compared(step, calls, x, number, runs=3)
    assert repr(step).endswith("traced 2 times>")


async def test_an_error_next_to_a_number(device: ta.Device) -> None:
    x = await device.put(np.ones(N))
    step: Any = ta.step(lambda x, k, shape: x.reshape(shape) * k)
    for _ in range(3):
        with pytest.raises(ValueError, match="reshape"):
            await step(x, 0.5, (3,))
        np.testing.assert_array_equal(await (await step(x, 0.5, (N,))).to_host(), np.full(N, 0.5))


async def test_layouts_next_to_a_number(device: ta.Device) -> None:
    x = await device.put(np.arange(24.0).reshape(4, 6))
    traced: list[object] = []

    def calls(x: Any, number: float) -> Any:
        traced.append(number)
        y = x * number
        return (y.reshape(y.shape[1], -1) + y.ndim).to_host()

    step = ta.step(calls)
    for number in (0.5, 2.0, -1.0):
        await compared(step, calls, x, number, runs=2)
    # Each comparison makes the calls once, and the step once in all: the layout is the same for each number.
    assert len(traced) == 4


async def test_a_layout_that_a_number_decides(device: ta.Device) -> None:
    x = await device.put(np.ones(N))

    def calls(x: Any, number: float) -> Any:
        line = ta.arrays.arange(x.device, 0.0, number, 1.0)
        length = line.shape[0]
        line.close()
        return (x * float(length)).to_host()

    step = ta.step(calls)
    for number in (2.0, 5.0, 2.0):
        await compared(step, calls, x, number, runs=2)


async def test_the_written_array_is_returned(device: ta.Device) -> None:
    x, out = await device.put(np.ones(N)), await device.put(np.zeros(N))

    @ta.step
    def add_to(x: Any, out: Any, k: float) -> Any:
        return ta.arrays.add(x * k, out, out=out)

    for turn in range(30):
        result = await add_to(x, out, 2.0)
        assert result is out
        np.testing.assert_array_equal(await out.to_host(), np.full(N, 2.0 * (turn + 1)))


async def test_a_step_within_a_graph(device: ta.Device) -> None:
    x = await device.put(np.ones(N))
    doubled = ta.step(lambda x, k: x * k)
    for _ in range(20):
        await doubled(x, 2.0)

    async def step(x: Any) -> Any:
        return await doubled(x, 3.0)

    graph = await ta.graphs.capture(device, step, x)
    result = await device.ask(ta.graphs.Replay(graph, (await device.put(np.full(N, 5.0)),)))
    np.testing.assert_array_equal(await result.to_host(), np.full(N, 15.0))
    graph.close()
