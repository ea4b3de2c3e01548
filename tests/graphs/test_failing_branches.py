"""Failures within a branch or a loop of a graph: their reports, and the state of the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from graph_arrays import N

import trio_accel as ta
from trio_accel import graphs, jit, linalg, sparse
from trio_accel.testing import inject_fault

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
GOOD = np.arange(N + 1, dtype=np.int32)
on_the_cpu = pytest.mark.skipif(
    BACKEND != "cpu", reason="what a kernel finds at run time has no place in a graph of the driver"
)
less = jit.elementwise("left = left - 1", name="less")


class Case:
    """A graph with a body that doubles x, multiplies it by a possibly broken matrix, and triples y.

    Another body, which does not run, changes another array.
    """

    def __init__(self, device: ta.Device, kind: str) -> None:
        self.device, self.kind = device, kind
        self.go = KINDS[kind]

    async def open(self) -> None:
        self.indptr = await self.device.put(GOOD)
        indices, data = np.arange(N, dtype=np.int32), np.ones(N)
        self.matrix = sparse.CsrMatrix(
            (N, N), self.indptr, await self.device.put(indices), await self.device.put(data)
        )
        self.graph = await graphs.capture(self.device, self.step, *await self.arrays())

    async def arrays(self) -> list[ta.AccelRef]:
        """New arguments: the condition, x, y, and the array of the other body."""
        hosts = (np.int64(self.go), np.ones(N), np.zeros(N), np.ones(N))
        return [await self.device.put(host) for host in hosts]

    async def step(self, go: ta.AccelRef, x: ta.AccelRef, y: ta.AccelRef, other: ta.AccelRef) -> Any:
        async def body() -> None:
            await linalg.scal(2.0, x)
            await sparse.spmv(self.matrix, x, out=y)
            await linalg.scal(3.0, y)

        async def turn() -> None:
            await body()
            await less(go, out=go)

        async def elsewhere() -> None:
            await linalg.scal(5.0, other)

        if self.kind == "while":
            return await graphs.while_(go, turn, limit=9)
        if self.kind == "if":
            await graphs.if_(go, body, orelse=elsewhere)
        elif self.kind == "orelse":
            await graphs.if_(go, elsewhere, orelse=body)
        elif self.kind == "switch":
            await graphs.switch(go, [elsewhere, body])
        else:
            await graphs.if_(go, lambda: graphs.switch(go, [elsewhere, body]))
        return None

    async def break_matrix(self, *, is_broken: bool) -> None:
        async with self.indptr.lease(write=True) as host:
            host[...] = np.full(N + 1, 99, np.int32) if is_broken else GOOD

    async def check(self) -> None:
        """The graph computes what it should, with new arrays."""
        go, x, y, other = await self.arrays()
        turns = await self.graph(go, x, y, other)
        count = await turns.item() if turns is not None else 1
        assert count == (self.go if self.kind == "while" else 1)
        assert (await x.to_host()).tolist() == [2.0**count] * N
        assert (await y.to_host()).tolist() == [3 * 2.0**count] * N
        assert (await other.to_host()).tolist() == [1.0] * N


async def spoiled(*refs: ta.AccelRef) -> list[bool]:
    """The arrays without contents since a replay failed."""
    found = []
    for ref in refs:
        try:
            await ref.to_host()
            found.append(False)
        except ta.StaleRefError as error:
            found.append("spoiled by Graph.replay" in str(error))
    return found


# The contents of the condition, so that the body in question runs.
KINDS = {"if": 1, "orelse": 0, "switch": 1, "nested": 1, "while": 3}
# The way to the operation.
WAYS = {
    "if": "graphs.If: node 0 of the graph, graphs.Body: node 1",
    "orelse": "graphs.If: node 1 of the graph, graphs.Body: node 1",
    "switch": "graphs.Switch: node 1 of the graph, graphs.Body: node 1",
    "nested": "graphs.If: node 0 of the graph, graphs.Body: node 0 of the graph, "
    "graphs.Switch: node 1 of the graph, graphs.Body: node 1",
    "while": "graphs.While: node 0 of the graph, graphs.Body: node 1",
}


@pytest.fixture(params=KINDS)
async def case(request: pytest.FixtureRequest, device: ta.Device) -> Case:
    made = Case(device, request.param)
    await made.open()
    return made


@on_the_cpu
async def test_an_operation_that_fails_in_a_body_is_named(case: Case) -> None:
    """The graph's targets are invalid, also those of bodies that did not run. It continues with others."""
    await case.check()
    await case.break_matrix(is_broken=True)
    go, x, y, other = await case.arrays()
    with pytest.raises(ta.LibraryError, match=f"node 0 of the graph, {WAYS[case.kind]}") as caught:
        await case.graph(go, x, y, other)
    assert "of the graph, sparse.Spmv: indptr" in str(caught.value)
    # The condition of a branch is only read, and the loop has one body.
    is_loop = case.kind == "while"
    assert await spoiled(go, x, y, other) == [is_loop, True, True, not is_loop]
    with pytest.raises(ta.StaleRefError, match=r"spoiled by Graph\.replay"):
        await case.graph(go, x, y, other)
    await case.break_matrix(is_broken=False)
    await case.check()
    assert case.device.generation == 1


@on_the_cpu
async def test_work_after_a_failed_branch_fails_with_it(device: ta.Device) -> None:
    case = Case(device, "while")
    await case.open()
    await case.break_matrix(is_broken=True)
    arrays = await case.arrays()
    first = device.submit(graphs.Replay(case.graph, arrays))
    second = device.submit(linalg.Scal(2.0, arrays[1]))
    with pytest.raises(ta.LibraryError, match=r"sparse\.Spmv"):
        await first.wait()
    with pytest.raises(ta.InputFailedError):
        await second.wait()
    with pytest.raises(ta.StaleRefError, match="spoiled"):
        await first.value.item()
    await case.break_matrix(is_broken=False)
    await case.check()


async def test_a_refused_replay_with_branches_has_changed_nothing(case: Case) -> None:
    go, x, y, other = await case.arrays()
    fault = inject_fault(case.device, graphs.Replay, fail=ta.LibraryError("no", library="graphs", code="x"))
    with pytest.raises(ta.LibraryError, match="no"):
        await case.graph(go, x, y, other)
    fault.remove()
    assert await spoiled(go, x, y, other) == [False] * 4
    await case.check()


@pytest.mark.parametrize("fault", [{"poison": True}, {"kill": True}], ids=["poison", "kill"])
@pytest.mark.parametrize("kind", ["if", "while"])
async def test_a_context_lost_in_a_branch(system: ta.System, kind: str, fault: Any) -> None:
    """Such a graph changes existing arrays, so that `retry` does not run it again."""
    options = ta.DeviceOptions(isolation="process", backoff=AT_ONCE, retry=1)
    async with system.open_device(BACKEND, options=options) as device:
        case = Case(device, kind)
        await case.open()
        for generation in (1, 2):
            await case.check()
            go, x, y, other = await case.arrays()
            held = inject_fault(device, graphs.Replay, **fault)
            with pytest.raises(ta.ContextLostError):
                await case.graph(go, x, y, other)
            held.remove()
            assert await spoiled(go, x, y, other) == [kind == "while", True, True, kind != "while"]
            await case.check()
            assert device.generation == generation + 1


@on_the_cpu
async def test_a_constant_that_a_body_has_spoiled_is_named(device: ta.Device) -> None:
    """A graph captured again, with a new one, continues."""
    case = Case(device, "if")
    await case.open()
    go, x, y, _ = await case.arrays()

    async def made(total: ta.AccelRef) -> graphs.Graph[Any]:
        async def body(y: ta.AccelRef) -> None:
            await linalg.axpy(1.0, x, total)
            await sparse.spmv(case.matrix, x, out=y)

        return await graphs.capture(device, lambda y: graphs.if_(go, body, y), y)

    total = await device.put(np.zeros(N))
    graph = await made(total)
    await case.break_matrix(is_broken=True)
    with pytest.raises(ta.LibraryError):
        await graph(y)
    await case.break_matrix(is_broken=False)
    assert await spoiled(x, y, total) == [False, True, True]
    _, _, y, _ = await case.arrays()
    with pytest.raises(ta.StaleRefError, match=r"y of linalg\.Axpy in the graph of graphs\.If .* spoiled"):
        await graph(y)
    total = await device.put(np.zeros(N))
    await (await made(total))(y)
    assert (await total.to_host()).tolist() == [1.0] * N
