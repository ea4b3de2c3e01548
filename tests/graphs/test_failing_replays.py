"""Replays that fail, are cancelled, or lose their context."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from graph_arrays import N, close, matrix, put

import trio_accel as ta
from trio_accel import graphs, linalg
from trio_accel.backends.base import Isolation
from trio_accel.testing import inject_fault, poison

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
MANY = ta.Intensity(100, 60.0)


async def products(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    return await linalg.matmul(await linalg.matmul(x, y), y)


async def halved(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    out = await products(x, y)
    await linalg.scal(0.5, y)
    return out


def expected(a: int = 1, b: int = 2) -> Any:
    return matrix(a) @ matrix(b) @ matrix(b)


async def see_the_loss(x: ta.AccelRef) -> None:
    """Ask until the loss of the context has been found."""
    generation = x.device.generation
    while x.device.generation == generation:
        try:
            await x.copy()
        except (ta.ContextLostError, ta.StaleRefError):
            await trio.lowlevel.checkpoint()


@asynccontextmanager
async def opened(system: ta.System, isolation: Isolation, **more: Any) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=isolation, intensity=MANY, backoff=AT_ONCE, **more)
    async with system.open_device(BACKEND, options=options) as device:
        yield device


async def test_a_refused_replay(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, halved, x, y)
    out = await graph.replay()
    with (
        inject(device, fail=ta.LibraryError("no", library="graphs", code="x")),
        pytest.raises(ta.LibraryError, match="no"),
    ):
        await graph.replay()
    # Arrays updated in place are unchanged; outputs are missing.
    await close(y, matrix(2) / 2)
    with pytest.raises(ta.StaleRefError, match=r"spoiled by Graph.replay"):
        await out.to_host()
    again = await graph.replay()
    await close(again, expected() / 4)
    await close(y, matrix(2) / 4)
    assert device.generation == 1


class inject:  # noqa: N801  # a fault for the next replay, gone afterwards
    def __init__(self, device: ta.Device, **fault: Any) -> None:
        self._fault = inject_fault(device, graphs.Replay, **fault)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        assert self._fault.hit == 1
        self._fault.remove()


async def test_faults_of_single_operations_hit_no_capture(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    fault = inject_fault(device, linalg.Matmul, fail=ta.LibraryError("no", library="blas", code="x"))
    graph = await graphs.capture(device, products, x, y)
    await close(await graph.replay(), expected())
    assert fault.hit == 0
    with pytest.raises(ta.LibraryError, match="no"):
        await linalg.matmul(x, y)


@pytest.mark.skipif(
    BACKEND != "cpu", reason="what a kernel finds at run time has no place in a graph of the driver"
)
async def test_an_operation_that_fails_in_the_middle_is_named(device: ta.Device) -> None:
    (x,) = await put(device, 1)
    good, bad = np.arange(N + 1, dtype=np.int32), np.full(N + 1, 99, np.int32)
    indptr, indices = await device.put(good), await device.put(np.arange(N, dtype=np.int32))
    data = await device.put(np.ones(N))
    structure = ta.sparse.CsrMatrix((N, N), indptr, indices, data)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        doubled = await linalg.scal(2.0, await x.copy())
        product = await ta.sparse.spmv(structure, doubled[0])
        return await linalg.scal(3.0, product)

    graph = await graphs.capture(device, step, x)
    await close(await graph.replay(), 6 * matrix(1)[0])
    broken = await device.put(bad)
    await copy_into(broken, indptr)
    with pytest.raises(ta.LibraryError, match=r"node 2 of the graph, sparse.Spmv"):
        await graph.replay()
    await copy_into(await device.put(good), indptr)
    await close(await graph.replay(), 6 * matrix(1)[0])


async def copy_into(source: ta.AccelRef, out: ta.AccelRef) -> None:
    async with source.lease() as host, out.lease(write=True) as target:
        target[...] = host


@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_cancelled_replay_keeps_its_memory_until_it_ends(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, products, x, y)
    await graph(x, y)
    inject_fault(device, graphs.Replay, delay=0.05)
    with trio.move_on_after(0.0) as scope:
        await graph(x, y)
    graph.close()
    del x, y, graph
    await device.synchronize()
    assert scope.cancelled_caught
    assert (await device.statistics()).memory.used == 0


async def test_a_replay_cancelled_before_its_beginning(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, halved, x, y)
    with trio.CancelScope() as scope:
        scope.cancel()
        await graph.replay()
    await close(y, matrix(2))
    await close(await graph.replay(), expected())


async def test_not_enough_memory(system: ta.System, isolation: Isolation) -> None:
    async with opened(system, isolation, memory_limit=3 << 20) as device:
        x = await device.put(np.ones((256, 256)))

        async def step(x: ta.AccelRef) -> list[ta.AccelRef]:
            return [await linalg.matmul(x, x) for _ in range(8)]

        graph = await graphs.capture(device, step, x)
        for _ in range(2):
            with pytest.raises(ta.OutOfMemoryError):
                await graph.replay()
        with pytest.raises(ta.OutOfMemoryError):
            await graph(x)
        small = await graphs.capture(device, linalg.matmul, x, x)
        np.testing.assert_array_equal(await (await small.replay()).to_host(), np.full((256, 256), 256.0))
        graph.close()
        await device.synchronize()
        assert (await device.statistics()).memory.used <= 2 * (256 * 256 * 8)


async def test_after_a_loss_it_is_captured_again(system: ta.System, isolation: Isolation) -> None:
    async with opened(system, isolation) as device:
        x, y, weights = await put(device, 1, 2, 3)

        async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
            return await linalg.matmul(await products(x, y), weights)

        graph = await graphs.capture(device, step, x, y)
        free = await graphs.capture(device, products, x, y)
        out = await graph.replay()
        await free.replay()
        before = await out.to_host()
        with inject(device, poison=True), pytest.raises(ta.ContextLostError):
            await graph.replay()
        if isolation == "process":
            np.testing.assert_array_equal(await (await graph.replay()).to_host(), before)
        else:
            with pytest.raises(ta.StaleRefError, match=r"x: its memory was lost with generation 1"):
                await graph.replay()
            fresh = await put(device, 1, 2)
            with pytest.raises(
                ta.StaleRefError, match=r"b of linalg.Matmul in the graph: its memory was lost"
            ):
                await graph(*fresh)
        # One without constants works on new arrays, whatever was lost.
        fresh = await put(device, 1, 2)
        await close(await free(*fresh), expected())
        await close(await free(*fresh), expected())
        assert device.generation == 2


@pytest.mark.parametrize("isolation", ["process"])
@pytest.mark.parametrize(
    "fault", [{"poison": True}, {"kill": True}, {"segfault": True}], ids=["poison", "kill", "segfault"]
)
async def test_a_replay_runs_again_after_a_loss(system: ta.System, isolation: Isolation, fault: Any) -> None:
    """With `retry`, unless it changes an array from before."""
    async with opened(system, isolation, retry=1, retry_suspects=True) as device:
        x, y = await put(device, 1, 2)
        graph = await graphs.capture(device, products, x, y)
        for use in (graph.replay, lambda: graph(x, y)):
            await use()
            with inject(device, **fault):
                await close(await use(), expected())
        assert device.generation == 3
        changing = await graphs.capture(device, halved, x, y)
        await changing(x, (await put(device, 2))[0])
        with inject(device, **fault), pytest.raises(ta.ContextLostError, match="make the arrays"):
            await changing.replay()
        with pytest.raises(ta.StaleRefError, match=r"y: its contents were spoiled by Graph.replay"):
            await changing.replay()
        await close(await graph(x, (await put(device, 2))[0]), expected())


@pytest.mark.parametrize("isolation", ["process"])
async def test_a_worker_that_dies_between_replays(system: ta.System, isolation: Isolation) -> None:
    async with opened(system, isolation) as device:
        x, y = await put(device, 1, 2)
        graph = await graphs.capture(device, halved, x, y)
        await graph.replay()
        poison(device)
        await see_the_loss(x)
        await close(await graph.replay(), expected() / 4)
        await close(y, matrix(2) / 4)


async def test_a_capture_while_the_context_is_lost(system: ta.System, isolation: Isolation) -> None:
    """A capture needs no context: the next context launches the recorded operations."""
    async with opened(system, isolation) as device:
        (x,) = await put(device, 1)

        async def step(x: ta.AccelRef) -> ta.AccelRef:
            return await linalg.scal(2.0, await x.copy())

        poison(device)
        graph = await graphs.capture(device, step, x)
        await see_the_loss(x)
        (fresh,) = await put(device, 1)
        await close(await graph(fresh), 2 * matrix(1))


async def test_failed_inputs(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, products, x, y)
    inject_fault(device, linalg.Scal, fail=ta.LibraryError("no", library="blas", code="x"))
    first = device.submit(linalg.Scal(2.0, x))
    second = device.submit(graphs.Replay(graph))
    third = device.submit(linalg.Matmul(second.value, y, None))
    with pytest.raises(ta.LibraryError, match="no"):
        await first.wait()
    for pending in (second, third):
        with pytest.raises(ta.InputFailedError):
            await pending.wait()
    (fresh,) = await put(device, 1)
    await close(await graph(fresh, y), expected())
