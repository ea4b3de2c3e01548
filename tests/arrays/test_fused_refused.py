"""What `ta.fused` does not record, and what it says of that."""

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
    return [
        (
            lambda x: x if x > 0 else -x,
            ta.NotSupportedError,
            r"__bool__ of an array is not recorded: xp\.where",
        ),
        (lambda x: [float(x)], ta.NotSupportedError, "__float__ .* keyword-only"),
        (lambda x: [int(x)], ta.NotSupportedError, "__int__ "),
        (lambda x: x[0], ta.NotSupportedError, "__getitem__ .* take parts before the call"),
        (lambda x: [*x], ta.NotSupportedError, "__iter__ "),
        (lambda x: [len(x)], ta.NotSupportedError, "__len__ "),
        (lambda x: x @ x, ta.NotSupportedError, r"__matmul__ .* ta\.linalg\.matmul"),
        (lambda x: np.ones((2, 2)) @ x, ta.NotSupportedError, "__rmatmul__ "),
        (
            lambda x: x.shape,
            ta.NotSupportedError,
            r"\.shape is not recorded, as one recording is for all shapes",
        ),
        (lambda x: x.T, AttributeError, r"\.T is not recorded"),
        (lambda x: [np.asarray(x)], ta.NotSupportedError, "__array__ .* in place of NumPy's"),
        (lambda x: [np.sqrt(x)], TypeError, "does not support ufuncs"),
        (
            lambda x: xp.sort(x, axis=0),
            ta.NotSupportedError,
            r"fused: sort is not recorded: .* before or behind",
        ),
        (lambda x: xp.matmul(x, x), AttributeError, "fused: matmul is not recorded"),
        (lambda x: xp.add(x, None), TypeError, "add: x2 must be a number or an array, got NoneType"),
        (lambda x: x + "1", TypeError, "add: x2 must be a number or an array, got str"),
        (
            lambda x: x + np.ones(3),
            TypeError,
            "add: x2 is an array that is no argument of the recorded function",
        ),
        (lambda x: np.ones(3) * x, TypeError, "multiply: x1 is an array that is no argument"),
        (lambda x: x & 1, TypeError, "bitwise_and"),
        (lambda x: xp.sqrt(2.0), TypeError, "fused: sqrt: one argument must be an argument of the recorded"),
        (lambda x: xp.sqrt(x, x), TypeError, "sqrt: too many positional"),
        (lambda x: xp.sum(x, axes=0), TypeError, "sum: .*axes"),
        (lambda x: xp.sum(x, axis=2), ValueError, r"sum: axis 2 of 2 axes: .*out of bounds"),
        (lambda x: xp.sum(x, axis=x), ta.NotSupportedError, "__index__ "),
        (lambda x: xp.argmax(x, axis=(0, 1)), TypeError, "argmax: axis must be one axis or None"),
        (lambda x: xp.add(x, 1, out=x), TypeError, "add: out is an argument of the recorded function"),
        (lambda x: xp.astype(x, "float8_e5m2"), ta.NotSupportedError, "float8_e5m2"),
        (
            lambda x: xp.astype(xp.astype(x, "complex64"), "int8"),
            TypeError,
            "astype: .* would drop the imaginary part",
        ),
        (lambda x: xp.where(x, x, 0), TypeError, "where: condition must be of bool"),
        (lambda x: x + xp.astype(x, xp.int32), TypeError, "add: x1 is float64 and x2 is int32"),
        (lambda x: (x, x), TypeError, "must return one array that it computes, got tuple"),
        (lambda x: None, TypeError, "must return one array that it computes, got NoneType"),
        (lambda x: 1.0, TypeError, "must return one array that it computes, got float"),
        (lambda x: xp.cosine_similarity(x, xp.sum(x, axis=0)), ta.NotSupportedError, "must have one shape"),
        (lambda x: xp.sum(x, axis=0) + xp.max(x, axis=0) + x[:, 0], ta.NotSupportedError, "__getitem__"),
    ]


async def test_what_is_refused(device: ta.Device) -> None:
    x = await device.put(np.ones((2, 3)))
    launched = (await device.statistics()).launched
    for function, error, told in kinds_of_refusals(x):
        with pytest.raises(error, match=told):
            await ta.fused(function)(x)
    for call, error, told in (
        (partial(norm, x), TypeError, r"fused\.norm: missing a required argument: 'y'"),
        (partial(norm, x, x, z=1), TypeError, r"fused\.norm: .*'z'"),
        (partial(norm, x, [1.0]), TypeError, r"fused\.norm: y must be a number or an array, got list"),
        (partial(norm, 1.0, 2.0), TypeError, r"fused\.norm: sqrt: one argument must be an array"),
        (partial(ta.fused(lambda k: k * 2), 2), TypeError, "computed of an array, not of numbers"),
        (
            partial(ta.fused(lambda k: xp.sum(k, axis=None)), 2),
            TypeError,
            "sum: one argument must be an array, got a number",
        ),
        (partial(norm, x, await device.zeros(4)), ValueError, r"fused\.norm: the shapes .* do not broadcast"),
        (
            partial(norm, x, await device.zeros(3, "int64")),
            TypeError,
            r"fused\.norm: add: x1 is float64 and x2",
        ),
        (partial(ta.fused(lambda x: xp.max(x, axis=None)), x[:0]), ValueError, "no elements"),
    ):
        with pytest.raises(error, match=told):
            await call()
    assert (await device.statistics()).launched == launched + 2
    assert not hasattr(xp, "sort")
    assert xp.astype is not None
    assert xp.float32 is ta.DType.float32


async def test_a_function_that_calls_itself_without_end_is_refused(device: ta.Device) -> None:
    x = await device.put(np.ones(3))

    @ta.fused
    def endless(x: Any) -> Any:
        return endless(x * 0.5) + x

    @ta.fused
    def halves(x: Any, *, steps: int) -> Any:
        return x if not steps else halves(x * 0.5, steps=steps - 1) + x

    with pytest.raises(
        ValueError, match=r"fused\.endless: calls itself without end; a keyword-only"
    ) as caught:
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


async def test_a_function_of_too_many_steps_is_refused_while_it_is_recorded(device: ta.Device) -> None:
    x, steps = await device.put(np.ones(3)), 0

    def endless(x: Any) -> Any:
        nonlocal steps
        while True:
            x = x + 1
            steps += 1

    with pytest.raises(ta.NotSupportedError, match="more than 1000 steps; make several functions of it"):
        await ta.fused(endless)(x)
    assert steps == 1000
