"""An argument selected twice, and one array or call for two arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

X, Y = np.array([2.0, 3.0]), np.array([5.0, 7.0])
# The gradients of the sum of a * a * b by a and b.
SLOPES = (2 * X * Y, X * X)


def product(a: Any, b: Any) -> Any:
    return ta.arrays.sum(a * a * b)


@pytest.mark.parametrize("argnums", [(0, 0), (1, 1), (0, -2), (0, 1, 0), (-1, 1), (1, 0)])
async def test_an_argument_selected_twice_gets_its_gradient_twice(
    device: ta.Device, argnums: tuple[int, ...]
) -> None:
    x, y = await device.put(X), await device.put(Y)
    want = [SLOPES[number] for number in argnums]
    found = await ta.grad(product, argnums)(x, y)
    for slope, wanted in zip(found, want, strict=True):
        np.testing.assert_array_equal(await slope.to_host(), wanted)
    value, found = await ta.value_and_grad(product, argnums, scale=2.0)(x, y)
    assert await value.item() == 83
    for slope, wanted in zip(found, want, strict=True):
        np.testing.assert_array_equal(await slope.to_host(), 2 * wanted)
    flat = await ta.gradients.flat_grad_and_value(product, argnums)(x, y).to_host()
    np.testing.assert_array_equal(flat, [*np.concatenate(want), 83])


async def test_nested_arguments_selected_twice(device: ta.Device) -> None:
    x, y = await device.put(X), await device.put(Y)
    first, second = await ta.grad(lambda p: product(p["a"], p["b"][0]), (0, -1))({"a": x, "b": [y]})
    for slopes in (first, second):
        np.testing.assert_array_equal(await slopes["a"].to_host(), SLOPES[0])
        np.testing.assert_array_equal(await slopes["b"][0].to_host(), SLOPES[1])


@pytest.mark.parametrize("is_call", [False, True])
async def test_one_array_for_two_arguments_gets_the_gradient_of_each(
    device: ta.Device, is_call: bool
) -> None:
    x = await device.put(X)
    given: Any = x * 1.0 if is_call else x
    both: Any = ta.grad(product, (0, 1))(given, given)
    first, second = await ta.gather(*both) if is_call else await both
    np.testing.assert_array_equal(await first.to_host(), 2 * X * X)
    np.testing.assert_array_equal(await second.to_host(), X * X)
    given = {"a": x * 1.0, "b": x} if is_call else {"a": x, "b": x}
    if is_call:
        given["b"] = given["a"]
    slopes: Any = ta.grad(lambda p: product(p["a"], p["b"]))(given)
    first, second = await ta.gather(*slopes.values()) if is_call else (await slopes).values()
    np.testing.assert_array_equal(await first.to_host(), 2 * X * X)
    np.testing.assert_array_equal(await second.to_host(), X * X)


async def test_gradients_of_gradients_of_an_argument_selected_twice(device: ta.Device) -> None:
    x, y = await device.put(X), await device.put(Y)

    def slopes(p: Any) -> Any:
        return ta.arrays.sum(ta.arrays.stack(ta.grad(product, (0, 0))(p, y)))  # type: ignore[arg-type]

    np.testing.assert_array_equal(await (await ta.grad(slopes)(x)).to_host(), 4 * Y)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: ta.arrays.sum(x * y),  # each gradient is the other argument
        lambda x, y: ta.arrays.sum(x + y),  # both gradients are one broadcast number
        lambda x, y: ta.arrays.sum(x) + ta.arrays.sum(ta.arrays.flip(y)),
        lambda x, y: ta.arrays.sum(x * x),  # one gradient is 0
    ],
)
async def test_gradients_are_arrays_of_their_own(device: ta.Device, f: Any) -> None:
    """A program may change each of them, and no other array changes."""
    hosts = [np.array([1.0, 2.0]), np.array([3.0, 5.0])]
    x, y = [await device.put(host) for host in hosts]
    value, (gx, gy) = await ta.value_and_grad(f, (0, 1))(x, y)
    before, right = await value.item(), await gy.to_host()
    await gx.assign(np.array([-7.0, -8.0]))
    np.testing.assert_array_equal(await gy.to_host(), right)
    np.testing.assert_array_equal(await x.to_host(), hosts[0])
    np.testing.assert_array_equal(await y.to_host(), hosts[1])
    assert await value.item() == before


async def test_a_value_is_not_its_argument(device: ta.Device) -> None:
    x = await device.put(np.array(2.0))
    value, slope = await ta.value_and_grad(lambda x: x)(x)
    await value.assign(np.array(9.0))
    assert (await x.item(), await slope.item()) == (2.0, 1.0)
