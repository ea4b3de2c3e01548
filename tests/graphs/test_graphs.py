"""Capturing and replaying: the checks, the caches, and the refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graph_arrays import N, affine, close, matrix, put

import trio_accel as ta
from trio_accel import graphs, linalg


async def test_a_capture_runs_nothing(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    before = (await device.statistics()).launched
    calls = []

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        calls.append((x.shape, y.dtype, x.device is device))
        return await affine(x, y)

    graph = await graphs.capture(device, step, x, y)
    assert (await device.statistics()).launched == before
    np.testing.assert_array_equal(await y.to_host(), matrix(2))
    assert calls == [((N, N), ta.DType.float64, True)]
    assert (len(graph), graph.nbytes, graph.device, graph.is_closed) == (4, 0, device, False)
    await graph.replay()
    await graph(x, y)
    assert len(calls) == 1
    assert repr(graph) == f"<Graph of 4 operations on {device.path}>"


async def test_in_place_and_on_other_arrays(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    a, b = matrix(1), matrix(2)
    for _ in range(3):
        out = await graph.replay()
        await close(out, a @ b @ b + 2 * a)
        b = b / 2
        await close(y, b)
    kept = await out.to_host()
    others = await put(device, 3, 4)
    new = await graph(*others)
    a, b = matrix(3), matrix(4)
    await close(new, a @ b @ b + 2 * a)
    await close(others[1], b / 2)
    # Neither the arrays of the capture nor the arrays of the replay in place have changed.
    np.testing.assert_array_equal(await out.to_host(), kept)
    np.testing.assert_array_equal(await x.to_host(), matrix(1))
    newer = await graph(*others)
    await close(newer, a @ b @ b / 4 + 2 * a)
    await close(new, a @ b @ b + 2 * a)


async def test_a_replay_is_one_operation(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    before = (await device.statistics()).launched
    for _ in range(3):
        await graph.replay()
    assert (await device.statistics()).launched == before + 3


async def test_submitted_replays_follow_one_another(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    a, b = matrix(1), matrix(2)

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        half = await linalg.matmul(x, y)
        await linalg.axpy(1.0, half, x)
        return await x.copy()

    graph = await graphs.capture(device, step, x, y)
    pending = [device.submit(graphs.Replay(graph, (x, y))) for _ in range(5)]
    product = device.submit(linalg.Matmul(pending[-1].value, y, None))
    last = device.submit(graphs.Replay(graph))
    for one in pending:
        a = a + a @ b
        await close(await one.wait(), a)
    await close(await product.wait(), a @ b)
    await close(await last.wait(), a + a @ b)


async def test_hazards_with_single_operations(device: ta.Device) -> None:
    """Of other libraries, on other streams, before and after replays, without a wait in between."""
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    a, b = matrix(1), matrix(2)
    waiting = []
    for turn in range(6):
        waiting.append(device.submit(linalg.Scal(-1.0, x)))
        replay = device.submit(graphs.Replay(graph))
        spectrum = device.submit(ta.fft.Fft(replay.value))
        waiting += [replay, spectrum, device.submit(linalg.Scal(2.0, y))]
        a = -a
        expected = a @ b @ b + 2 * a
        if turn == 5:
            await close(await spectrum.wait(), np.fft.fft(expected))
    for one in waiting:
        await one.wait()
    await close(y, b)


async def test_results_of_a_step(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> dict[str, Any]:
        product = await linalg.matmul(x, y)
        return {
            "views": (product[1:, ::2], product.T, product.reshape(-1)),
            "given": [x, x[2], y],
            "kept": y_outside,
            "nothing": None,
            "named": linalg.QRResult(product, x),
        }

    y_outside = y
    graph = await graphs.capture(device, step, x, y)
    a, b = await put(device, 3, 4)
    for given, found in (((x, y), await graph.replay()), ((a, b), await graph(a, b))):
        first, second = [await ref.to_host() for ref in given]
        product = first @ second
        for ref, expected in zip(
            (*found["views"], *found["given"], found["kept"], *found["named"]),
            (
                product[1:, ::2],
                product.T,
                product.reshape(-1),
                first,
                first[2],
                second,
                matrix(2),
                product,
                first,
            ),
            strict=True,
        ):
            await close(ref, expected)
        assert found["nothing"] is None
        assert found["given"][0].block is given[0].block
        assert found["views"][0].block is found["views"][1].block
        assert isinstance(found["named"], linalg.QRResult)


async def test_a_step_may_return_nothing(device: ta.Device) -> None:
    (x,) = await put(device, 1)

    async def step(x: ta.AccelRef) -> None:
        await linalg.scal(2.0, x)

    graph = await graphs.capture(device, step, x)
    await graph.replay()
    await graph(x)
    await close(x, 4 * matrix(1))


async def test_a_step_without_arguments_works_on_its_own_arrays(device: ta.Device) -> None:
    (state,) = await put(device, 1)

    async def step() -> ta.AccelRef:
        await linalg.scal(2.0, state)
        return await device.full((3,), 7.0)

    graph = await graphs.capture(device, step)
    for power in (1, 2):
        np.testing.assert_array_equal(await (await graph()).to_host(), np.full(3, 7.0))
        await close(state, 2**power * matrix(1))


async def test_host_arrays_at_a_replay(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    for shape in range(3):
        host = matrix(10 + shape)
        (b,) = await put(device, 4)
        await close(await graph(host, b), host @ matrix(4) @ matrix(4) + 2 * host)
    with pytest.raises(TypeError, match="y must be an AccelRef"):
        await graph(matrix(1), matrix(2))

    async def identity(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        await linalg.scal(2.0, y)
        return x

    returned = await graphs.capture(device, identity, x, y)
    with pytest.raises(TypeError, match="x must be an AccelRef, because the graph returns it"):
        await returned(matrix(1), y)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x: x[:4], ValueError, r"x must have shape \(6, 6\), as in the capture, got \(4, 6\)"),
        (lambda x: x.reshape(36), ValueError, r"got \(36,\)"),
        (
            lambda x: x.T,
            ValueError,
            r"x must have strides \(48, 8\), as in the capture, got \(8, 48\); give a copy",
        ),
    ],
)
async def test_other_layouts_are_refused(
    device: ta.Device, change: Callable[[ta.AccelRef], ta.AccelRef], error: type[Exception], text: str
) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    before = (await device.statistics()).launched
    with pytest.raises(error, match=text):
        await graph(change(x), y)
    assert (await device.statistics()).launched == before


async def test_other_arguments_are_refused(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, affine, x, y)
    with pytest.raises(TypeError, match="x must have dtype float64, as in the capture, got float32"):
        await graph(await x.cast("float32"), y)
    with pytest.raises(TypeError, match=r"the graph takes 2 arrays \(x, y\), got 1"):
        await graph(x)
    with pytest.raises(ValueError, match="y must not share memory with x of the graph"):
        await graph(x, x)
    gone = (await put(device, 3))[0]
    gone.release()
    with pytest.raises(ta.StaleRefError, match="x: its memory was released"):
        await graph(gone, y)
    await graph(x, y)


async def test_an_array_that_only_reads_may_be_given_twice(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    graph = await graphs.capture(device, linalg.matmul, x, y)
    await close(await graph(x, x), matrix(1) @ matrix(1))
    twice = await graphs.capture(device, linalg.matmul, x, x)
    await close(await twice.replay(), matrix(1) @ matrix(1))
    await close(await twice(x, y), matrix(1) @ matrix(2))


async def test_a_changed_array_that_the_graph_has_as_a_constant(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)

    async def step(out: ta.AccelRef) -> None:
        await linalg.matmul(x, y, out=out)

    out = await device.zeros((N, N))
    graph = await graphs.capture(device, step, out)
    with pytest.raises(ValueError, match=r"out must not share memory with a of linalg.Matmul of the graph"):
        await graph(x)
    await graph(out)
    await close(out, matrix(1) @ matrix(2))


@pytest.mark.parametrize("captured", [0, 5])
async def test_views_as_arguments(device: ta.Device, captured: int) -> None:
    """Another place in its block, and the same layout."""
    wide = await device.put(matrix(1, 3 * N, 2 * N))
    y = await device.put(matrix(2))

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        await linalg.scal(3.0, x[1])
        return await linalg.matmul(x, y), x[1]

    graph = await graphs.capture(device, step, wide[captured : captured + N, ::2], y)
    host = matrix(1, 3 * N, 2 * N)
    for start in (0, 3, N, 2 * N):
        part = host[start : start + N, ::2]
        part[1] *= 3
        product, row = await graph(wide[start : start + N, ::2], y)
        await close(product, part @ matrix(2))
        await close(row, part[1])
    await close(wide, host)


async def test_a_graph_keeps_its_arrays(device: ta.Device) -> None:
    async def captured() -> graphs.Graph[ta.AccelRef]:
        x, y, weights = await put(device, 1, 2, 3)

        async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
            return await linalg.matmul(await linalg.matmul(x, y), weights)

        return await graphs.capture(device, step, x, y)

    graph = await captured()
    await device.synchronize()
    await close(await graph.replay(), matrix(1) @ matrix(2) @ matrix(3))
    assert (await device.statistics()).memory.used >= 3 * 8 * N * N


async def test_released_arrays(device: ta.Device) -> None:
    x, y, weights = await put(device, 1, 2, 3)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await linalg.matmul(x, weights)

    graph = await graphs.capture(device, step, x)
    out = await graph.replay()
    out.release()
    # Its results are made again.
    await close(await graph.replay(), matrix(1) @ matrix(3))
    x.release()
    with pytest.raises(ta.StaleRefError, match="x: its memory was released"):
        await graph.replay()
    await close(await graph(y), matrix(2) @ matrix(3))
    weights.release()
    with pytest.raises(ta.StaleRefError, match=r"b of linalg.Matmul in the graph: its memory was released"):
        await graph(y)


async def test_memory_is_counted_and_given_back(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    await device.synchronize()
    before = (await device.statistics()).memory.used
    graph = await graphs.capture(device, affine, x, y)
    assert (await device.statistics()).memory.used == before
    await graph(x, y)
    await device.synchronize()
    # One intermediate product, in kept memory.
    assert graph.nbytes == 512
    assert (await device.statistics()).memory.used == before + 512
    out = await graph.replay()
    assert graph.nbytes == 512 + out.nbytes
    assert (await device.statistics()).memory.used == before + graph.nbytes
    graph.close()
    await device.synchronize()
    assert (await device.statistics()).memory.used == before + out.nbytes
    del out
    await device.synchronize()
    assert (await device.statistics()).memory.used == before


async def test_memory_of_results_in_between_is_used_again(device: ta.Device) -> None:
    (x,) = await put(device, 1)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        for _ in range(20):
            x = await linalg.matmul(x, x)
            await linalg.scal(0.1, x)
        return x

    graph = await graphs.capture(device, step, x)
    expected = matrix(1)
    for _ in range(20):
        expected = 0.1 * (expected @ expected)
    await close(await graph(x), expected)
    assert graph.nbytes == 2 * 512


async def test_close(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    with await graphs.capture(device, affine, x, y) as graph:
        pending = device.submit(graphs.Replay(graph))
    graph.close()
    assert (graph.is_closed, graph.nbytes) == (True, 0)
    await close(await pending.wait(), matrix(1) @ matrix(2) @ matrix(2) + 2 * matrix(1))
    for use in (graph.replay, lambda: graph(x, y)):
        with pytest.raises(RuntimeError, match="the graph is closed"):
            await use()
    assert "closed" in repr(graph)


async def test_a_graph_in_a_graph(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    inner = await graphs.capture(device, affine, x, y)
    await inner.replay()
    kept = inner.nbytes

    async def step(a: ta.AccelRef, b: ta.AccelRef) -> ta.AccelRef:
        first = await inner(a, b)
        second = await inner(first, b)
        return await linalg.matmul(second, await inner(a, b))

    outer = await graphs.capture(device, step, x, y)

    async def twice(a: ta.AccelRef, b: ta.AccelRef) -> ta.AccelRef:
        return await outer(await outer(a, b), b)

    outermost = await graphs.capture(device, twice, x, y)
    inner.close()
    plain, mine = await put(device, 3, 4), await put(device, 3, 4)

    async def one_by_one(a: ta.AccelRef, b: ta.AccelRef) -> ta.AccelRef:
        second = await affine(await affine(a, b), b)
        return await linalg.matmul(second, await affine(a, b))

    for _ in range(3):
        expected = await one_by_one(*plain)
        np.testing.assert_array_equal(await (await outer(*mine)).to_host(), await expected.to_host())
        np.testing.assert_array_equal(await mine[1].to_host(), await plain[1].to_host())
    expected = await one_by_one(await one_by_one(*plain), plain[1])
    np.testing.assert_array_equal(await (await outermost(*mine)).to_host(), await expected.to_host())
    assert (kept, len(outer), len(outermost)) == (512 + 8 * N * N, 4, 2)
