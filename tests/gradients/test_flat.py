"""`flat_grad_and_value`: gradients and value in one array, derived once for each structure of calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.gradients import flat_grad_and_value

a: Any = ta.arrays
HOST = np.linspace(0.2, 1.4, 6)


async def derivations(work: Callable[[], Awaitable[object]]) -> int:
    """Count how often gradients are derived meanwhile."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        # The generator itself is called once for each slice.
        count += event == "call" and code.co_name == "_order" and code.co_filename.endswith("_backward.py")

    sys.setprofile(profile)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return count


def loss(parameters: Any, x: Any) -> Any:
    return a.mean((x * parameters["w"] + parameters["b"]) ** 2)


async def given(device: ta.Device) -> tuple[dict[str, ta.AccelRef], ta.AccelRef]:
    parameters = {"w": await device.put(HOST[:3]), "b": await device.put(np.array(0.5))}
    return parameters, await device.put(HOST[3:])


async def test_it_has_the_bits_of_value_and_grad(device: ta.Device) -> None:
    parameters, x = await given(device)
    value, slopes = await ta.value_and_grad(loss, scale=4.0)(parameters, x)
    expected = [*await slopes["w"].to_host(), await slopes["b"].item(), await value.item()]
    for _ in range(7):
        found = await flat_grad_and_value(loss, scale=4.0)(parameters, x).to_host()
        np.testing.assert_array_equal(found, expected)


def asked(device: Any) -> int:
    """Count the chains asked as one request."""
    counts = device.chains.kept.counts
    return int(counts.hits + counts.recorded)


async def test_later_steps_are_part_of_the_request(device: ta.Device) -> None:
    parameters, x = await given(device)
    made: Any = device
    found: list[Any] = []
    for _ in range(3):
        before = asked(made)
        both = flat_grad_and_value(loss)(parameters, x)
        stepped, value = await ta.gather(parameters["w"] - 0.5 * both[:3], both[-1].to_host())
        assert asked(made) == before + 1
        found.append((await stepped.to_host(), float(value)))
    slopes = 2 * (HOST[3:] * HOST[:3] + 0.5) * HOST[3:] / 3
    np.testing.assert_allclose(found[0][0], HOST[:3] - 0.5 * slopes)
    np.testing.assert_array_equal([one[0] for one in found], [found[0][0]] * 3)
    assert len({one[1] for one in found}) == 1


async def test_gradients_are_derived_once_for_a_structure(device: ta.Device) -> None:
    parameters, x = await given(device)

    def work() -> Awaitable[object]:
        return flat_grad_and_value(loss)(parameters, x).to_host()

    assert await derivations(work) == 1
    assert [await derivations(work) for _ in range(3)] == [0, 0, 0]
    # Neighbours are joined, which takes the steps once more.
    assert sum([await derivations(work) for _ in range(9)]) <= 1
    assert await derivations(lambda: flat_grad_and_value(loss)(parameters, x[:1]).to_host()) == 1
    await derivations(lambda: ta.value_and_grad(loss)(parameters, x))
    assert await derivations(lambda: ta.value_and_grad(loss)(parameters, x)) == 0


async def test_a_host_array_that_a_rule_reads_counts_each_time(device: ta.Device) -> None:
    x = await device.put(HOST)
    for shift in range(8):
        places = (np.arange(4) * (shift + 1) + shift) % 6
        found = await ta.grad(lambda x, at=places: a.sum(a.take(x, at, axis=0) * np.arange(4.0)))(x)
        expected = np.zeros(6)
        np.add.at(expected, places, np.arange(4.0))
        np.testing.assert_allclose(await found.to_host(), expected)


async def test_changing_numbers_belong_to_each_call(device: ta.Device) -> None:
    x = await device.put(HOST)
    for number in range(8):
        found = await ta.grad(lambda x, k=float(number): a.sum(x * k * x))(x)
        np.testing.assert_allclose(await found.to_host(), 2 * number * HOST)


async def test_a_rule_of_the_programs_own_is_called_each_time(device: ta.Device) -> None:
    x = await device.put(HOST)
    factors = iter(range(1, 9))
    own = ta.custom_gradient(a.sin, lambda g, result, x: g * float(next(factors)))
    for number in range(1, 9):
        found = await ta.grad(lambda x: a.sum(own(x)))(x)
        np.testing.assert_array_equal(await found.to_host(), np.full(6, float(number)))


async def test_its_layout_is_known_before_it_runs(device: ta.Device) -> None:
    parameters, x = await given(device)
    call = flat_grad_and_value(loss)(parameters, x)
    assert (call.shape, call.dtype) == ((5,), ta.DType.float64)
    assert (await call).shape == (5,)


async def test_arguments_may_be_calls(device: ta.Device) -> None:
    x = await device.put(HOST)
    flat = x.cast("float32")
    call = flat_grad_and_value(lambda p, q: a.sum(p * q * q), argnums=(1, 0))(flat[:3], flat[3:])
    found = await call.to_host()
    p, q = HOST[:3].astype("float32"), HOST[3:].astype("float32")
    np.testing.assert_allclose(found, [*(2 * p * q), *(q * q), (p * q * q).sum()], rtol=1e-6)


async def test_gradients_of_it(device: ta.Device) -> None:
    x = await device.put(HOST)
    for _ in range(2):
        found = await ta.grad(lambda x: a.sum(flat_grad_and_value(lambda y: a.sum(y**3))(x)[:6]))(x)
        np.testing.assert_allclose(await found.to_host(), 6 * HOST)


async def test_it_is_part_of_a_graph(device: ta.Device) -> None:
    parameters, x = await given(device)

    async def step() -> ta.AccelRef:
        return await flat_grad_and_value(loss)(parameters, x)

    graph = await ta.graphs.capture(device, step)
    expected = await (await step()).to_host()
    np.testing.assert_array_equal(await (await graph()).to_host(), expected)


async def test_it_refuses_invalid_functions(device: ta.Device) -> None:
    x, whole = await device.put(HOST), await device.put(np.arange(3))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the value must be a scalar, got shape \(6,\)"):
            await flat_grad_and_value(lambda x: x * x)(x)
        with pytest.raises(
            TypeError, match=r"flat_grad_and_value: .* must be floating or complex, got int64"
        ):
            _ = flat_grad_and_value(a.sum)(whole)
        with pytest.raises(
            TypeError, match=r"flat_grad_and_value: .* must be floating or complex, got int64"
        ):
            await flat_grad_and_value(a.sum)(whole * 2)
        with pytest.raises(ta.NotSupportedError, match=r"has no gradient"):
            await flat_grad_and_value(lambda x: a.sum(a.cumulative_prod(x, include_initial=True)))(x)
        with pytest.raises(TypeError, match="must return a call, got AccelRef"):
            _ = flat_grad_and_value(lambda x: whole)(x)
    gc.collect()  # none of them warns at its end


async def test_the_gradient_of_a_flat_gradient(device: ta.Device) -> None:
    host = np.linspace(0.1, 1.0, 5)
    flat = ta.gradients.flat_grad_and_value(lambda x: a.sum(a.sin(x)))
    found = await ta.grad(lambda x: a.sum(flat(x)))(await device.put(host))
    np.testing.assert_allclose(await found.to_host(), np.cos(host) - np.sin(host))
