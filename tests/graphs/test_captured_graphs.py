"""Graphs of the driver: the time of a chain's capture, its resources, and its behaviour without a capture."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND
from driver_spy import Spy
from graph_arrays import N, matrix, put

import trio_accel as ta
from trio_accel import graphs, jit, linalg

pytestmark = [
    pytest.mark.skipif(BACKEND != "cuda", reason="graphs of the driver are those of CUDA"),
    # The calls of the driver are counted in this process.
    pytest.mark.parametrize("isolation", ["inline"]),
]

minus_one = jit.elementwise("left = n - 1", name="minus_one")
positive = jit.elementwise("go = n > 0", name="positive")


async def sums(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
    """``2 y + x``, without a product, which has graphs of its own."""
    out = await y.copy()
    await linalg.scal(2.0, out)
    return await linalg.axpy(1.0, x, out)


async def test_a_repeated_chain_is_one_launch(device: ta.Device, spy: Spy) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, sums, x, y)
    await graph.replay()
    # By now the libraries are open, which capture something themselves.
    launches, captures = spy("cuGraphLaunch"), spy("cuStreamBeginCapture")
    for turn in range(1, 10):
        out = await graph.replay()
        np.testing.assert_array_equal(await out.to_host(), 2 * matrix(2) + matrix(1))
        assert launches.count == max(turn - 2, 0)
    assert captures.count == 1
    await linalg.scal(3.0, y)
    np.testing.assert_array_equal(await (await graph.replay()).to_host(), 6 * matrix(2) + matrix(1))


async def test_each_place_has_a_graph_of_its_own(device: ta.Device, spy: Spy) -> None:
    pairs = [await put(device, 2 * number, 2 * number + 1) for number in range(5)]
    graph = await graphs.capture(device, sums, *pairs[0])
    launches = spy("cuGraphLaunch")
    for turn in range(60):
        number = turn % 5
        out = await graph(*pairs[number])
        expected = 2 * matrix(2 * number + 1) + matrix(2 * number)
        np.testing.assert_array_equal(await out.to_host(), expected)
    assert 25 <= launches.count <= 45


async def test_there_are_not_too_many(device: ta.Device, spy: Spy) -> None:
    many = await put(device, *range(160))
    graph = await graphs.capture(device, sums, many[0], many[1])
    await graph.replay()
    made, destroyed = spy("cuGraphInstantiate"), spy("cuGraphExecDestroy")
    # Graphs in use stay; then others are in use.
    for others in ((1, 3), (5, 7)):
        for _ in range(24):
            for number in range(0, 160, 2):
                for other in others:
                    await graph(many[number], many[other])
        assert made.count - destroyed.count == 128
    assert destroyed.count > 0
    out = await graph(many[4], many[3])
    np.testing.assert_array_equal(await out.to_host(), 2 * matrix(3) + matrix(4))


async def test_workspace_that_moves(device: ta.Device, spy: Spy) -> None:
    """A chain with operations that need more and more of it, and a chain that needed less before."""

    async def packs(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        out = await y.copy()
        rows, columns = x.shape
        for number in range(1, rows):
            await linalg.axpy(0.5, x[:number, ::2], out[:number, ::2])
        return await linalg.axpy(1.0, x[:, : columns - 1], out[:, 1:])

    small, large = await put(device, 1, 2), await put(device, 3, 4, n=60)
    chains = [(packs, small), (packs, large), (sums, small)]
    made = [(await graphs.capture(device, step, *arrays), step, arrays) for step, arrays in chains]
    captures, launches = spy("cuStreamBeginCapture"), spy("cuGraphLaunch")
    for turn in range(15):
        for graph, step, arrays in made if turn % 2 else made[:1]:
            expected = await (await step(*arrays)).to_host()
            np.testing.assert_array_equal(await (await graph.replay()).to_host(), expected)
    assert launches.count > 10
    # Of what was captured first, at least one was captured again.
    assert captures.count > len(made)


async def test_uncapturable_graphs_are_replayed_one_by_one(device: ta.Device, spy: Spy) -> None:
    (x,) = await put(device, 1)
    sparse = await ta.sparse.csr(device, scipy.sparse.eye_array(N, format="csr") * 3.0)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await linalg.axpy(2.0, x, await ta.sparse.to_dense(sparse))

    graph = await graphs.capture(device, step, x)
    await graph.replay()
    launches, captures = spy("cuGraphLaunch"), spy("cuStreamBeginCapture")
    for _ in range(6):
        np.testing.assert_array_equal(await (await graph.replay()).to_host(), 2 * matrix(1) + 3 * np.eye(N))
    assert (launches.count, captures.count) == (0, 0)


async def test_a_sparse_product_is_captured_while_its_structure_is_known(device: ta.Device, spy: Spy) -> None:
    launches, x = spy("cuGraphLaunch"), np.arange(float(N))

    async def arrays(last: int) -> list[ta.AccelRef]:
        columns = np.append(np.arange(N - 1), last).astype(np.int32)
        pointers, values = np.arange(N + 1, dtype=np.int32), np.full(N, 3.0)
        return [await device.put(one) for one in (pointers, columns, values, x, np.zeros(N))]

    async def step(
        indptr: ta.AccelRef, indices: ta.AccelRef, data: ta.AccelRef, x: ta.AccelRef, out: ta.AccelRef
    ) -> None:
        await ta.sparse.spmv(ta.sparse.CsrMatrix((N, N), indptr, indices, data), x, out=out)

    graph = await graphs.capture(device, step, *await arrays(N - 1))
    for turn in range(1, 4):
        # They have the addresses of the old ones, and nobody has looked at the contents.
        given = await arrays(N - 1)
        for _ in range(6):
            await graph(*given)
        np.testing.assert_array_equal(await given[-1].to_host(), 3 * x)
        assert launches.count >= 2 * turn
        del given
        wrong = await arrays(N)
        with pytest.raises(ta.LibraryError, match="column"):
            await graph(*wrong)
        del wrong


async def test_the_driver_does_not_capture(
    device: ta.Device, spy: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    from cuda.bindings import driver

    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, sums, x, y)
    await graph.replay()
    captures, made = spy("cuStreamBeginCapture"), spy("cuGraphInstantiate")
    made.answer = (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)
    with caplog.at_level(logging.INFO, "trio_accel.devices"):
        for _ in range(8):
            out = await graph.replay()
    np.testing.assert_array_equal(await out.to_host(), 2 * matrix(2) + matrix(1))
    assert captures.count == 1
    assert "a graph of 3 operations is replayed one by one" in caplog.text


async def test_the_driver_refuses_a_launch(device: ta.Device, spy: Spy) -> None:
    from cuda.bindings import driver

    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, sums, x, y)
    launches = spy("cuGraphLaunch")
    launches.answer = (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
    for _ in range(8):
        out = await graph.replay()
        np.testing.assert_array_equal(await out.to_host(), 2 * matrix(2) + matrix(1))
    assert launches.count == 1


async def test_an_operation_refused_in_the_middle(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    bits = await x.cast("float8_e4m3fn")

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        await linalg.scal(2.0, y)
        await linalg.matmul(bits, bits)
        return await linalg.axpy(1.0, x, y)

    graph = await graphs.capture(device, step, x, y)
    with pytest.raises(ta.NotSupportedError, match=r"node 1 of the graph, linalg.Matmul: .*float8"):
        await graph.replay()
    # It was being changed at that time.
    with pytest.raises(ta.StaleRefError, match=r"spoiled by Graph.replay"):
        await y.to_host()
    good = await graphs.capture(device, sums, x, (await put(device, 2))[0])
    np.testing.assert_array_equal(await (await good.replay()).to_host(), 2 * matrix(2) + matrix(1))
    assert device.generation == 1


@pytest.mark.parametrize("before", [0, 5])
async def test_an_operation_refused_in_a_branch(device: ta.Device, before: int) -> None:
    """Also after the chain was to be captured; while the branch is not taken, nothing is refused."""
    x, y = await put(device, 1, 2)
    bits = await x.cast("float8_e4m3fn")
    go = await device.put(np.int64(0))

    async def step(go: ta.AccelRef, y: ta.AccelRef) -> None:
        async def body(y: ta.AccelRef) -> None:
            await linalg.scal(2.0, y)
            await linalg.matmul(bits, bits)

        await graphs.if_(go, body, y)

    graph = await graphs.capture(device, step, go, y)
    for _ in range(before):
        await graph.replay()
    np.testing.assert_array_equal(await y.to_host(), matrix(2))
    await go.fill(1)
    with pytest.raises(ta.NotSupportedError, match=r"graphs.If: node 0 .* graphs.Body: node 1 .*float8"):
        await graph.replay()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by Graph.replay"):
        await y.to_host()
    await go.fill(0)
    (fresh,) = await put(device, 2)
    await graph(go, fresh)
    np.testing.assert_array_equal(await fresh.to_host(), matrix(2))
    assert device.generation == 1


async def test_workspace_counts_and_is_given_back(system: ta.System, isolation: Any) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        x, y = await put(device, 1, 2, n=40)
        graph = await graphs.capture(device, lambda x, y: linalg.axpy(1.0, x.T, y), x, y)
        for _ in range(6):
            await graph.replay()
        await device.synchronize()
        assert (await device.statistics()).memory.workspace >= 2 * x.nbytes


async def looped(device: ta.Device) -> tuple[graphs.Graph[ta.AccelRef], ta.AccelRef, ta.AccelRef]:
    """A graph that adds an array to another n times; n, and the sum."""
    n, go = await device.put(np.int64(0)), await device.put(np.bool_(False))
    x, total = await device.put(np.ones(N)), await device.put(np.zeros(N))

    async def body() -> None:
        await linalg.axpy(1.0, x, total)
        await minus_one(n, out=n)
        await positive(n, out=go)

    async def step() -> ta.AccelRef:
        await positive(n, out=go)
        return await graphs.while_(go, body)

    return await graphs.capture(device, step), n, total


async def run_loop(device: ta.Device, turns: list[int]) -> Callable[[int], Awaitable[None]]:
    """Replay such a graph this many turns each, and return a function that replays it once more."""
    graph, n, total = await looped(device)
    run = 0

    async def replay(turns: int) -> None:
        nonlocal run
        run += turns
        await n.fill(turns)
        assert await (await graph.replay()).item() == turns
        np.testing.assert_array_equal(await total.to_host(), np.full(N, float(run)))

    for each in turns:
        await replay(each)
    return replay


async def test_a_loop_is_one_launch(device: ta.Device, spy: Spy) -> None:
    """The driver goes through all turns on its own; before, the host reads the condition for each."""
    handles, parts = spy("cuGraphConditionalHandleCreate"), spy("cuStreamBeginCaptureToGraph")
    replay = await run_loop(device, [2, 0, 1])
    assert (handles.count, parts.count) == (0, 0)
    await replay(3)
    # Into the part, and after it.
    assert (handles.count, parts.count) == (1, 2)
    launches, reads, graph_ends = spy("cuGraphLaunch"), spy("cuMemcpyDtoHAsync"), spy("cuGraphDestroy")
    for turns in (0, 1, 100, 7):
        await replay(turns)
    assert launches.count == 4
    # Those of the test itself: how many turns there were, and the sum.
    assert reads.count == 2 * 4
    assert graph_ends.count == 0


async def test_a_graph_in_a_graph_is_one_launch(device: ta.Device, spy: Spy) -> None:
    x, y = await put(device, 1, 2)
    inner = await graphs.capture(device, sums, x, y)

    async def twice(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        return await inner(await inner(x, y), y)

    graph = await graphs.capture(device, twice, x, y)
    await graph.replay()
    launches = spy("cuGraphLaunch")
    for turn in range(1, 6):
        out = await graph.replay()
        np.testing.assert_array_equal(await out.to_host(), 2 * matrix(2) + (2 * matrix(2) + matrix(1)))
        assert launches.count == max(turn - 2, 0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("cuGraphConditionalHandleCreate", (801, None)),
        ("cuStreamBeginCaptureToGraph", (801,)),
        ("cuStreamGetCaptureInfo", (801, None)),
    ],
)
async def test_a_driver_without_conditions(
    device: ta.Device, spy: Spy, caplog: pytest.LogCaptureFixture, name: str, answer: tuple[Any, ...]
) -> None:
    """The host continues to read the condition; begun work is ended, so that other chains are captured."""
    from cuda.bindings import driver

    caplog.set_level(logging.INFO, "trio_accel.devices")
    refused = spy(name)
    refused.answer = (driver.CUresult(answer[0]), *answer[1:])
    replay = await run_loop(device, [1, 2, 3, 4, 5])
    assert refused.count == 1
    assert any("replayed one by one" in message for message in caplog.messages)
    await replay(6)
    assert refused.count == 1
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, sums, x, y)
    launches = spy("cuGraphLaunch")
    for _ in range(5):
        np.testing.assert_array_equal(await (await graph.replay()).to_host(), 2 * matrix(2) + matrix(1))
    assert launches.count == 2


async def test_a_compiler_without_conditions(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trio_accel.backends.cuda.runtime._kernels import Kernels

    compile_others = Kernels.function

    def refuse(kernels: Kernels, source: str, *more: Any) -> Any:
        if source == "conditions":
            raise RuntimeError('identifier "cudaGraphConditionalHandle" is undefined')
        return compile_others(kernels, source, *more)

    caplog.set_level(logging.INFO, "trio_accel.devices")
    monkeypatch.setattr(Kernels, "function", refuse)
    replay = await run_loop(device, [1, 2, 3, 4, 5])
    assert any("is undefined" in message for message in caplog.messages)
    await replay(2)


async def test_the_needs_of_a_branch_are_found_when_it_is_captured(device: ta.Device, spy: Spy) -> None:
    """It has never run by then: its workspace is taken while it is captured, and it is captured once more."""
    x, small = await device.put(matrix(1, 96, 96)), await device.put(np.zeros((48, 48)))
    out, flag = await device.put(np.ones(N)), await device.put(np.bool_(False))
    part = x[::2, ::2]

    async def step() -> ta.AccelRef:
        await graphs.if_(flag, lambda: linalg.matmul(part, part, out=small))
        return await linalg.scal(2.0, out)

    graph = await graphs.capture(device, step)
    await graph.replay()
    captures = spy("cuStreamBeginCapture")
    for _ in range(5):
        await graph.replay()
    assert captures.count == 2
    launches = spy("cuGraphLaunch")
    await flag.fill(1)
    await graph.replay()
    assert launches.count == 1
    host = matrix(1, 96, 96)[::2, ::2]
    np.testing.assert_allclose(await small.to_host(), host @ host, atol=1e-12)
    np.testing.assert_array_equal(await out.to_host(), np.full(N, 2.0**7))
