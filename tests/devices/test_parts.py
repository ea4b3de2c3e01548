"""Parts of calls with several results: each is an operand, and all of them are one request."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from test_gather import TURNS, blocks, found, numbers, requests, same

import trio_accel as ta
from trio_accel import jit, linalg

pytestmark = pytest.mark.any_backend
# Views of calls are calls, which their types do not say.
arrays: Any = ta.arrays
USES: list[Callable[[Any, Any], Any]] = [
    lambda w, v: None,
    lambda w, v: w,
    lambda w, v: (w * 2.0) + v,
]
needs_solvers = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")


def symmetric(turn: int) -> Any:
    host = numbers(turn)
    return host + host.T


@needs_solvers
async def test_parts_are_operands_of_one_request(device: ta.Device) -> None:
    for turn in range(TURNS):
        host = symmetric(turn)
        x = await device.put(host)
        # Their layouts are found by plans, which an observer also sees.
        w, v = linalg.eigh(x + 0.0)
        assert (w.shape, v.shape) == ((3,), (3, 3))
        call, made = ((v * w) @ v.T).to_host(), list[Any]()

        async def ask(call: Any = call, made: list[Any] = made) -> None:
            made.append(await call)

        told = await requests(device, ask)
        # The first is recorded, by its steps.
        assert len(told) == 1 or turn == 0
        assert told[-1] == "arrays.add, linalg.eigh, arrays.multiply, linalg.matmul, AccelRef.to_host"
        np.testing.assert_allclose(made[0], host, atol=1e-12)
    assert found(device) == TURNS


async def test_parts_have_the_bits_of_results(device: ta.Device) -> None:
    for turn in range(TURNS):
        x = await device.put(numbers(turn, 5))
        values, places = arrays.top_k(x, 3)
        want = await arrays.top_k(x, 3)
        one, two = await ta.gather(values * 2.0, places).to_host()
        same(one, await (want.values * 2.0).to_host())
        same(two, await want.indices.to_host())
        same(await arrays.top_k(x, 3)[0].to_host(), await want.values.to_host())
        same(await arrays.top_k(x, 3)[-1].to_host(), await want.indices.to_host())
    assert found(device) >= TURNS - 1


async def test_parts_of_all_kinds_of_calls(device: ta.Device) -> None:
    both = jit.elementwise("s = x + y; d = x - y", inputs=["x", "y"], outputs=["s", "d"])
    host = numbers(1, 2, 4)
    for _ in range(TURNS):
        x = await device.put(host)
        s, d = both(x, 2.0)
        same(await (s * d).to_host(), (host + 2.0) * (host - 2.0))
        rows = arrays.unstack(x * 1.0)
        assert len(rows) == 2
        first, second = rows
        same(await (first - second).to_host(), host[0] - host[1])
        left, right = arrays.split(x * 1.0, 2, axis=1)
        same(await (left * right).to_host(), host[:, :2] * host[:, 2:])
        a, b = arrays.broadcast_arrays(x * 1.0, x[0])
        same(await (a - b).to_host(), host - host[0])
        nested: Any = ta.gather(x + 1.0, ta.gather(x - 1.0, x))
        plus, (minus, again) = nested
        same(await (plus * minus * again).to_host(), (host + 1.0) * (host - 1.0) * host)
        on_host, _ = arrays.top_k(x[0], 2).to_host()
        same(await on_host, np.sort(host[0])[:1:-1])


@needs_solvers
async def test_a_call_of_parts_is_used_once(device: ta.Device) -> None:
    x = await device.put(symmetric(1))
    w, v = linalg.eigh(x)
    await (w * 2.0)
    with pytest.raises(RuntimeError, match=r"was awaited before, or in another call; .* await ta\.gather"):
        await v
    w, v = linalg.eigh(x)
    values, vectors = await ta.gather(w, v)
    np.testing.assert_allclose(await values.to_host(), np.linalg.eigvalsh(symmetric(1)))
    assert vectors.shape == (3, 3)


@needs_solvers
async def test_parts_that_nobody_uses(device: ta.Device) -> None:
    x = await device.put(symmetric(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(TURNS):
            u, s, vh = linalg.svd(x)
            assert (await s).shape == (3,)
            del u, s, vh
            gc.collect()
    del x
    assert await blocks(device) == 0


@needs_solvers
@pytest.mark.parametrize("use", USES)
async def test_parts_without_await_warn_once(device: ta.Device, use: Callable[[Any, Any], Any]) -> None:
    x = await device.put(symmetric(1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        w, v = linalg.eigh(x)
        kept = use(w, v)
        del w, v, kept
        gc.collect()
    assert len(told) == 1
    assert "was never awaited: nothing of it has run" in str(told[0].message)


async def test_calls_without_parts(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    with pytest.raises(TypeError, match="a Call is not iterable"):
        iter(arrays.add(x, 1.0))
    with pytest.raises(
        TypeError, match=r"the number of results of .* is not known .*; use a, b = await call"
    ):
        iter(arrays.unique_counts(x))
    with pytest.raises(ta.NotSupportedError, match=r"arrays\.top_k has several results, .*: a, b = call"):
        assert arrays.top_k(x, 2).shape
    rows = arrays.unstack(x * 1.0)
    with pytest.raises(ValueError, match="too many values to unpack"):
        _, _ = rows
    rows.close()
    with pytest.raises(IndexError):
        await arrays.top_k(x, 2)[2]
    with pytest.raises(TypeError, match=r"an operand is a TopKResult, .*; pass its arrays one by one"):
        await (arrays.top_k(x, 2) + 1.0)


@needs_solvers
async def test_errors_belong_to_the_step(device: ta.Device) -> None:
    for turn in range(TURNS):
        good, bad = symmetric(turn), np.full((3, 3), np.nan)
        for host in (good, bad):
            x = await device.put(host)
            w, v = linalg.eigh(x * 1.0)
            call = (v * w) @ v.T
            if host is bad:
                with pytest.raises(ta.LinAlgError, match=r"^linalg\.eigh: the matrix holds a NaN"):
                    await call
            else:
                np.testing.assert_allclose(await call.to_host(), good, atol=1e-12)
