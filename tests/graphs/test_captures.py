"""Capturing: the recorded operations, the refusals, and the texts of a graph."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND
from graph_arrays import N, affine, close, matrix, put
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import graphs, linalg


async def test_two_captures_and_other_work_at_once(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    turns = [trio.Event() for _ in range(2)]
    made: list[graphs.Graph[ta.AccelRef]] = []

    async def step(a: ta.AccelRef, b: ta.AccelRef) -> ta.AccelRef:
        product = await linalg.matmul(a, b)
        turns[0].set()
        await turns[1].wait()
        return await linalg.matmul(product, b)

    async def one() -> None:
        made.append(await graphs.capture(device, step, x, y))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        nursery.start_soon(one)
        await turns[0].wait()
        await wait_all_tasks_blocked()
        # This task is not one of the capturing tasks.
        await close(await linalg.matmul(x, y), matrix(1) @ matrix(2))
        turns[1].set()
    for graph in made:
        assert len(graph) == 2
        await close(await graph.replay(), matrix(1) @ matrix(2) @ matrix(2))


async def test_tasks_of_a_step_are_recorded(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> list[ta.AccelRef]:
        made: list[ta.AccelRef] = []

        async def multiply(factor: float) -> None:
            product = await linalg.matmul(x, y)
            made.append(await linalg.scal(factor, product))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(multiply, 1.0)
            nursery.start_soon(multiply, 1.0)
        return made

    graph = await graphs.capture(device, step, x, y)
    found = await graph.replay()
    assert len(found) == 2
    for ref in found:
        await close(ref, matrix(1) @ matrix(2))


async def test_a_task_that_outlives_its_capture_launches(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    go = trio.Event()
    found: list[ta.AccelRef] = []

    async def later() -> None:
        await go.wait()
        found.append(await linalg.matmul(x, y))

    async with trio.open_nursery() as nursery:

        async def step(x: ta.AccelRef) -> ta.AccelRef:
            nursery.start_soon(later)
            return await x.copy()

        await graphs.capture(device, step, x)
        go.set()
    await close(found[0], matrix(1) @ matrix(2))


async def refused(
    device: ta.Device, step: Callable[..., Awaitable[Any]], text: str, *arrays: ta.AccelRef
) -> None:
    with pytest.raises(ta.NotSupportedError, match=text) as caught:
        await graphs.capture(device, step, *arrays)
    assert caught.value.operation


async def test_a_graph_refuses_unsupported_operations(device: ta.Device) -> None:
    (x,) = await put(device, 1)
    sparse = await ta.sparse.csr(device, scipy.sparse.eye_array(N, format="csr"))

    async def lease(x: ta.AccelRef) -> None:
        async with x.lease():
            pass

    async def control_flow(x: ta.AccelRef) -> None:
        if await x[0, 0].item() > 0:
            await linalg.scal(2.0, x)

    generator = ta.random.Generator(device, seed=1)
    host = "uses an array of the host"
    for step, text in (
        (lambda x: x.to_host(), f"to_host: a graph cannot record it: it {host}"),
        (control_flow, "to_host: a graph cannot record it"),
        (lambda x: device.put(np.ones(3)), f"put: .* {host}"),
        (lambda x: linalg.matmul(x, matrix(2)), f"linalg.matmul: .* {host}"),
        (linalg.cholesky, r"linalg.cholesky: .* status words"),
        (lambda x: generator.normal(3), r"random.normal: .* draw them outside"),
        (lease, "lease: a graph cannot record it; hold the array before"),
    ):
        await refused(device, step, text, x)
    graph = await graphs.capture(device, lambda x: ta.sparse.spmv(sparse, x[0]), x)
    assert len(graph) == 1
    await close(x, matrix(1))


async def test_another_device_is_refused(system: ta.System, device: ta.Device) -> None:
    (x,) = await put(device, 1)
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as other:
        theirs = await other.put(matrix(2))

        async def step(x: ta.AccelRef) -> None:
            await linalg.scal(2.0, theirs)

        await refused(
            device, step, rf"linalg.scal: .* asked of {other.path}, and the graph is of {device.path}", x
        )
        await refused(device, lambda x: x.copy_to(other), "copy_to: a graph cannot record it; read arrays", x)
        with pytest.raises(ValueError, match=r"b is on .*, this runs on"):
            await graphs.capture(device, lambda x: linalg.matmul(x, theirs), x)
        with pytest.raises(ValueError, match="argument 0 of the step is on"):
            await graphs.capture(device, affine, theirs)
        await close(theirs, matrix(2))


async def test_wrong_arguments_of_a_capture(device: ta.Device) -> None:
    (x,) = await put(device, 1)
    capture: Any = graphs.capture
    for arguments, error, text in (
        ((None, affine), TypeError, "device must be an open Device, got NoneType"),
        ((device, 3), TypeError, "step must be an async function, got int"),
        ((device, lambda: 3), TypeError, "step must be an async function; it returned int"),
        ((device, affine, matrix(1)), TypeError, "argument 0 of the step must be an AccelRef, got ndarray"),
    ):
        with pytest.raises(error, match=text):
            await capture(*arguments)

    async def nothing(x: ta.AccelRef) -> ta.AccelRef:
        return x

    async def number(x: ta.AccelRef) -> Any:
        await linalg.scal(2.0, x)
        return {"sum": 3}

    async def released(x: ta.AccelRef) -> ta.AccelRef:
        out = await x.copy()
        out.release()
        return out

    with pytest.raises(ValueError, match=r"the step asked .* for no operation"):
        await graphs.capture(device, nothing, x)
    with pytest.raises(TypeError, match=r"must return arrays of the device, .* got int"):
        await graphs.capture(device, number, x)
    with pytest.raises(ta.StaleRefError, match="that the step returned: its memory was released"):
        await graphs.capture(device, released, x)
    x.release()
    with pytest.raises(ta.StaleRefError, match="released"):
        await graphs.capture(device, affine, x)


async def test_wrong_operations_of_a_step_are_the_steps_errors(device: ta.Device) -> None:
    x, row = await device.put(matrix(1)), await device.put(matrix(2, N))
    with pytest.raises(ValueError, match=r"linalg.axpy: arrays must share a shape"):
        await graphs.capture(device, lambda x: linalg.axpy(1.0, x, row), x)
    with pytest.raises(ZeroDivisionError):
        await graphs.capture(device, _fails, x)
    await close(await linalg.matmul(x, x), matrix(1) @ matrix(1))


async def _fails(x: ta.AccelRef) -> None:
    await linalg.scal(2.0, x)
    raise ZeroDivisionError


async def test_arrays_of_a_capture_are_of_no_use_outside(device: ta.Device) -> None:
    (x,) = await put(device, 1)
    seen: list[ta.AccelRef] = []

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        seen.append(x)
        seen.append(await x.copy())
        return seen[-1]

    graph = await graphs.capture(device, step, x)
    for ref in seen:
        for use in (
            ref.to_host,
            ref.copy,
            lambda ref=ref: linalg.axpy(1.0, x, ref),
            lambda ref=ref: graph(ref),
        ):
            with pytest.raises(ta.StaleRefError, match="released"):
                await use()
    await close(await graph(x), matrix(1))


async def test_a_cancelled_capture_leaves_nothing(device: ta.Device) -> None:
    (x,) = await put(device, 1)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        await linalg.scal(2.0, x)
        await trio.sleep_forever()
        return x

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(graphs.capture, device, step, x)
            await wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    assert (await device.statistics()).memory.blocks == 1
    await close(await linalg.scal(2.0, x), 2 * matrix(1))


async def test_dot(device: ta.Device) -> None:
    x, y = await put(device, 1, 2)
    inner = await graphs.capture(device, affine, x, y)
    outer = await graphs.capture(device, inner, x, y)
    text = inner.dot()
    names = re.findall(r'n(\d+) \[label="([\w.]+)', text)
    assert names == [
        ("0", "linalg.Matmul"),
        ("1", "linalg.Matmul"),
        ("2", "linalg.Axpy"),
        ("3", "linalg.Scal"),
    ]
    edges = set(re.findall(r"n(\d+) -> n(\d+);", text))
    # The sum needs the second product; the array that both products read is changed after them.
    assert {("0", "1"), ("1", "2"), ("1", "3")} <= edges
    assert ("2", "3") not in edges
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    assert "subgraph cluster_n0" in outer.dot()
    assert outer.dot().count("linalg.Matmul") == 2


@pytest.mark.skipif(BACKEND != "cpu", reason="what is refused is the same")
async def test_programs_are_refused(device: ta.Device) -> None:
    (x,) = await put(device, 1)
    program = await ta.open_program(device, np.negative)
    await refused(device, program.ask, "it runs code of a program", x)
    await program.aclose()


@pytest.mark.skipif(BACKEND != "cpu", reason="what is refused is the same")
async def test_a_function_that_runs_without_opening_is_refused(device: ta.Device) -> None:
    (x,) = await put(device, 1)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        negated: ta.AccelRef = await ta.run(np.negative, x)
        return negated

    # Whether it has run before or not.
    for _ in range(2):
        await refused(device, step, "it runs code of a program", x)
        await close(await step(x), -matrix(1))
