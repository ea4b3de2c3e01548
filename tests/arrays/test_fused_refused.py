"""What `ta.fused` refuses, and what it says of that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

xp = ta.fused.xp


@ta.fused
def norm(x: Any, y: Any) -> Any:
    return xp.sqrt(x * x + y * y)


def kinds_of_refusals(x: Any) -> list[tuple[Callable[[Any], Any], type[Exception], str]]:
    several = "it takes several launches, as .*; leave ta.fused off: calls compose, and are one request"
    return [
        (
            lambda x: x if x > 0 else -x,
            TypeError,
            "a Call has no truth value: its elements are on the device",
        ),
        (lambda x: [float(x)], TypeError, r"float\(\) of an AccelRef"),
        (lambda x: [int(x)], TypeError, r"int\(\) of an AccelRef"),
        (lambda x: [*x], TypeError, "an AccelRef is not iterable"),
        (lambda x: [np.asarray(x)], TypeError, "an AccelRef is no host array"),
        (lambda x: [np.sqrt(x)], TypeError, "does not support ufuncs"),
        (
            lambda x: x @ x.T,
            ta.NotSupportedError,
            r"matmul is no function of each element, .* Call it before or behind .*, or leave ta.fused off",
        ),
        (
            lambda x: xp.cumulative_sum(x, axis=0),
            ta.NotSupportedError,
            r"arrays\.cumulative_sum is no function",
        ),
        (lambda x: (x + 1)[0], ta.NotSupportedError, r"AccelRef\.__getitem__ is no function of each element"),
        (lambda x: (x * 2).T + 1, ta.NotSupportedError, r"AccelRef\.T is no function of each element"),
        (lambda x: xp.add(x, None), TypeError, "arrays.add: x2 must be a number or an array, got NoneType"),
        (lambda x: x + "1", TypeError, "unsupported operand type"),
        (lambda x: x & 1, TypeError, "bitwise_and"),
        (lambda x: x + (1 << 64), ValueError, r"fused\.<lambda>: a number must have at most 64"),
        (lambda x: xp.sqrt(2.0), TypeError, r"fused\.<lambda>: no operand is on a device"),
        (lambda x: x * xp.sqrt(2.0), TypeError, r"fused\.<lambda>: arrays\.sqrt: no operand is on a device"),
        (lambda x: xp.sqrt(x, x), TypeError, r"arrays\.sqrt takes 1 arguments \(x\), got 2"),
        (lambda x: xp.sum(x, axes=0), TypeError, "sum: .*axes"),
        (lambda x: xp.sum(x, axis=2), ValueError, r"sum: axis 2 is not there in an array of shape \(2, 3\)"),
        (lambda x: xp.argmax(x, axis=(0, 1)), TypeError, "argmax: axis must be one axis or None"),
        (
            lambda x: xp.add(x, 1, out=x),
            TypeError,
            "out is an argument of the function, and of no step of it",
        ),
        (lambda x: norm(x, x, out=x) + 1, TypeError, r"fused\.norm: out is an argument of the outer fused"),
        (lambda x: xp.astype(x, "float8_e5m2"), ta.NotSupportedError, "do not compute with float8_e5m2"),
        (lambda x: xp.astype(xp.astype(x, "complex64"), "int8"), TypeError, "would drop the imaginary part"),
        (lambda x: xp.where(x, x, 0), TypeError, "where: condition must be of bool"),
        (lambda x: x + xp.astype(x, xp.int32), TypeError, "arrays.add: x1 is float64 and x2 is int32"),
        (lambda x: (x, x), TypeError, "must return one array that it computes, got tuple"),
        (lambda x: None, TypeError, "must return one array that it computes, got NoneType"),
        (lambda x: 1.0, TypeError, "must return one array that it computes, got float"),
        (lambda x: xp.cosine_similarity(x, xp.sum(x, axis=0)), ta.NotSupportedError, several),
        (lambda x: xp.sum(x, axis=0) + xp.max(x, axis=1)[0], ta.NotSupportedError, "AccelRef.__getitem__"),
    ]


async def test_what_is_refused(device: ta.Device) -> None:
    x = await device.put(np.ones((2, 3)))
    few, whole = await device.zeros(4), await device.zeros(3, "int64")
    launched = (await device.statistics()).launched
    for function, error, told in kinds_of_refusals(x):
        with pytest.raises(error, match=told):
            await ta.fused(function)(x)
    for call, error, told in (
        (partial(norm, x), TypeError, r"fused\.norm: missing a required argument: 'y'"),
        (partial(norm, x, x, z=1), TypeError, r"fused\.norm: .*'z'"),
        (partial(norm, 1.0, 2.0), TypeError, r"arrays.sqrt: x must be a number or an array|no operand is on"),
        (partial(ta.fused(lambda k: k * 2), 2), TypeError, "must return one array that it computes, got int"),
        (partial(norm, np.ones(3), 2.0), TypeError, r"numpy|no operand is on a device"),
        (partial(norm, x, few), ValueError, r"fused\.norm: arrays\.add: the shapes .* do not broadcast"),
        (partial(norm, x, whole), TypeError, r"fused\.norm: arrays\.add: x1 is float64 and x2"),
        (partial(ta.fused(lambda x: xp.max(x, axis=None)), x[:0]), ValueError, "no elements"),
        (partial(ta.fused(lambda x: xp.max(x * 2, axis=0) + 1), x[:0]), ValueError, "no elements"),
    ):
        with pytest.raises(error, match=told):
            await call()
    assert (await device.statistics()).launched == launched


@pytest.mark.filterwarnings("ignore:.*never awaited")  # the calls are there, and unused
async def test_a_refusal_leaves_the_operands_as_they_are(device: ta.Device) -> None:
    x = await device.put(np.arange(4.0).reshape(2, 2))
    product = x @ x
    with pytest.raises(ta.NotSupportedError, match=r"linalg\.matmul is no function"):
        ta.fused(lambda a: a[0] + a @ a)(product)
    np.testing.assert_array_equal(await norm(product, 0.0).to_host(), [[2, 3], [6, 11]])
    with pytest.raises(RuntimeError, match=r"<Call linalg\.matmul> was awaited before, or in another call"):
        norm(product, 0.0)
    kept = x + 1.0
    made = ta.fused(lambda a: a * kept)(x)
    with pytest.raises(RuntimeError, match=r"<Call arrays\.add> was awaited before"):
        await kept
    np.testing.assert_array_equal(await made.to_host(), [[0, 2], [6, 12]])


@pytest.mark.filterwarnings("ignore:.*never awaited")  # each of them has made one
async def test_a_function_that_calls_itself_without_end_is_refused(device: ta.Device) -> None:
    x = await device.put(np.ones(3))

    @ta.fused
    def endless(x: Any) -> Any:
        return endless(x * 0.5) + x

    @ta.fused
    def halves(x: Any, *, steps: int) -> Any:
        return x if not steps else halves(x * 0.5, steps=steps - 1) + x

    with pytest.raises(ValueError, match=r"fused\.endless: calls itself without end") as caught:
        await endless(x)
    assert isinstance(caught.value.__cause__, RecursionError)
    np.testing.assert_array_equal(await (await halves(x, steps=3)).to_host(), np.full(3, 1.875))


def test_what_cannot_be_declared() -> None:
    async def waits(x: Any) -> Any:
        return x

    def writes(x: Any, out: Any) -> Any:
        return x

    for function in (waits, writes):
        with pytest.raises(TypeError, match=rf"fused\.{function.__name__}: must be a plain function"):
            ta.fused(function)
    for function in (lambda *x: x, lambda x, **more: x):
        with pytest.raises(TypeError, match=r"without \* and \*\*"):
            ta.fused(function)


@pytest.mark.filterwarnings("ignore:.*never awaited")  # the calls are there, and unused
async def test_a_function_of_too_many_steps_is_refused(device: ta.Device) -> None:
    x = await device.put(np.ones(3))

    def many(x: Any, *, steps: int) -> Any:
        for _ in range(steps):
            x = x + 1
        return x

    with pytest.raises(ValueError, match="a chain has at most 4096 calls"):
        await ta.fused(many)(x, steps=4097)
    with pytest.raises(
        ta.NotSupportedError, match=r"fused\.many: too much for one .*several functions of it"
    ):
        await ta.fused(many)(x, steps=1500)
    np.testing.assert_array_equal(await many(x, steps=1500).to_host(), np.full(3, 1501.0))
