"""A chain of calls has one outcome: right, its step's error, or cancelled; nothing of it is left."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND

import trio_accel as ta
from trio_accel import arrays, linalg
from trio_accel.testing import inject_fault

pytestmark = pytest.mark.any_backend
RECOVERS = {"intensity": ta.Intensity(1000, 60.0), "backoff": ta.Backoff(base=0.0)}
# A lease of an array is one of NumPy there.
on_host = pytest.mark.skipif(BACKEND == "cuda", reason="NumPy does not write to the memory of the device")
# After this many a chain runs by its template.
TURNS = 3


def chains_of(device: ta.Device) -> Any:
    chains: Any = device.chains  # type: ignore[attr-defined]
    return chains


async def nothing_left(device: ta.Device, blocks: int) -> None:
    """Only the program's own blocks are there, and no request waits."""
    gc.collect()
    await device.synchronize()
    statistics = await device.statistics()
    assert statistics.memory.blocks == blocks
    assert all(queue.in_flight == 0 for queue in statistics.queues.values())
    assert device.pending == 0


async def in_turn() -> None:
    """Let ready tasks run, and begun work reach the device."""
    for _ in range(5):
        await trio.testing.wait_all_tasks_blocked(0.001)


class Asker:
    """Awaits a call in a task of its own, which can be cancelled."""

    def __init__(self, nursery: trio.Nursery, call: ta.Call[Any]) -> None:
        self.scope = trio.CancelScope()
        self.outcomes: list[Any] = []
        nursery.start_soon(self._run, call)

    async def _run(self, call: ta.Call[Any]) -> None:
        with self.scope:
            try:
                self.outcomes.append(await call)
            except Exception as error:  # noqa: BLE001  # looked at by the test
                self.outcomes.append(error)
        if self.scope.cancelled_caught:
            self.outcomes.append("cancelled")


@on_host
@pytest.mark.parametrize("turns", [0, 1, TURNS])
async def test_a_chain_that_waits_is_cancelled(device: ta.Device, turns: int) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    host = np.full(3, 5.0)

    def chain() -> Any:
        return arrays.add((x + host) * 2.0, 1.0, out=y)

    for _ in range(turns):
        await chain()
    await y.fill(7.0)
    chains_of(device).blocks.spare = None
    async with trio.open_nursery() as nursery, x.lease(write=True) as array:
        first, second = Asker(nursery, chain()), Asker(nursery, ((x + 1.0) * 3.0).to_host())
        await in_turn()
        first.scope.cancel()
        await in_turn()
        # The program may change what it gave.
        host[...] = np.nan
        array[...] = 2.0
    assert first.outcomes == ["cancelled"]
    assert second.outcomes[0].tolist() == [9.0] * 3
    assert (await y.to_host()).tolist() == [7.0] * 3
    del first, second, array, nursery
    host[...] = 4.0
    assert (await chain().to_host()).tolist() == [13.0] * 3
    await nothing_left(device, 2)


@on_host
async def test_the_memory_of_a_cancelled_chain_serves_the_next(device: ta.Device) -> None:
    """The first one makes the memory for results in between, and is withdrawn; the second one uses it."""
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    for _ in range(TURNS):
        await ((x + 1.0) * 2.0).to_host()
    chains_of(device).blocks.spare = None
    async with trio.open_nursery() as nursery, x.lease(write=True):
        askers = [Asker(nursery, ((x + 1.0) * 2.0).to_host()) for _ in range(2)]
        askers.append(Asker(nursery, ((y + 1.0) * 2.0).to_host()))
        await in_turn()
        askers[0].scope.cancel()
    assert askers[0].outcomes == ["cancelled"]
    for asker in askers[1:]:
        assert [one.tolist() for one in asker.outcomes] == [[4.0] * 3]
    del askers, asker, nursery
    await nothing_left(device, 2)


@pytest.mark.parametrize("turns", [0, 1, TURNS])
async def test_an_expired_deadline(device: ta.Device, turns: int) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    for _ in range(turns):
        await arrays.add(x + 1.0, 1.0, out=y)
    await y.fill(7.0)
    with pytest.raises(trio.TooSlowError), trio.fail_after(0):
        await arrays.add(x + 1.0, 1.0, out=y)
    assert (await y.to_host()).tolist() == [7.0] * 3
    await nothing_left(device, 2)


@on_host
async def test_a_chain_sees_the_writes_of_a_lease(device: ta.Device) -> None:
    x = await device.put(np.zeros(3))
    for turn in range(TURNS + 1):
        async with trio.open_nursery() as nursery, x.lease(write=True) as array:
            asker = Asker(nursery, ((x + 1.0) * 2.0).to_host())
            await in_turn()
            assert asker.outcomes == []
            array[...] = turn
        assert asker.outcomes[0].tolist() == [(turn + 1) * 2.0] * 3


@pytest.mark.parametrize("turns", [0, 1, TURNS])
async def test_a_fault_in_a_step(device: ta.Device, turns: int) -> None:
    x, y = await device.put(np.eye(3)), await device.put(np.zeros((3, 3)))

    def chain() -> Any:
        return arrays.add(((x + 1.0) @ x) * 2.0, 1.0, out=y)

    for _ in range(turns):
        await chain()
    await y.fill(7.0)
    fault = inject_fault(device, linalg.Matmul, fail=ta.LibraryError("broken", library="blas", code="1"))
    with pytest.raises(ta.LibraryError, match="broken") as caught:
        await chain()
    assert fault.hit == 1
    assert caught.value.operation == "linalg.Matmul"
    # Later steps have not run.
    assert (await y.to_host())[0, 0] == 7.0
    del caught
    for _ in range(TURNS):
        found = await chain().to_host()
        np.testing.assert_array_equal(found, (np.eye(3) + 1.0) * 2.0 + 1.0)
    await nothing_left(device, 2)


@pytest.mark.parametrize("turns", [0, 1, TURNS])
async def test_a_step_that_crashes_its_actor(device: ta.Device, turns: int) -> None:
    x = await device.put(np.eye(3))
    for _ in range(turns):
        await (((x + 1.0) @ x) * 2.0).to_host()
    inject_fault(device, linalg.Matmul, fail=RuntimeError("broken"))
    with pytest.raises(ta.ActorFailedError, match=r"linalg\.matmul.*broken"):
        await (((x + 1.0) @ x) * 2.0).to_host()
    for _ in range(TURNS):
        found = await (((x + 1.0) @ x) * 2.0).to_host()
        np.testing.assert_array_equal(found, (np.eye(3) + 1.0) * 2.0)
    await nothing_left(device, 1)


async def test_a_lost_context_takes_the_arrays_and_no_structure(system: ta.System) -> None:
    async with system.open_device(
        BACKEND, options=ta.DeviceOptions(isolation="inline", **RECOVERS)
    ) as device:  # type: ignore[arg-type]
        x = await device.put(np.eye(3))
        for _ in range(TURNS):
            await (((x + 1.0) @ x) * 2.0).to_host()
        inject_fault(device, linalg.Matmul, poison=True)
        with pytest.raises(ta.ContextLostError) as caught:
            await (((x + 1.0) @ x) * 2.0).to_host()
        assert caught.value.operation == "linalg.Matmul"
        del caught
        for _ in range(TURNS):
            with pytest.raises(ta.StaleRefError, match=r"x1( of arrays\.add)?: its memory was lost"):
                await (((x + 1.0) @ x) * 2.0).to_host()
        x = await device.put(np.eye(3))
        found, made = chains_of(device).kept.counts.hits, chains_of(device).kept.counts.recorded
        result = await (((x + 1.0) @ x) * 2.0).to_host()
        np.testing.assert_array_equal(result, (np.eye(3) + 1.0) * 2.0)
        assert (chains_of(device).kept.counts.hits, chains_of(device).kept.counts.recorded) == (
            found + 1,
            made,
        )
        await nothing_left(device, 1)


async def test_a_partly_damaged_array(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", **RECOVERS)  # type: ignore[arg-type]
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones((4, 6)))

        def chain(row: ta.AccelRef) -> Any:
            return ((row + 1.0) * 2.0).to_host()

        for _ in range(TURNS):
            await chain(x[1])
            await chain(x[2])
        inject_fault(device, linalg.Scal, kill=True)
        with pytest.raises(ta.ContextLostError):
            await linalg.scal(2.0, x[1])
        for _ in range(TURNS):
            with pytest.raises(
                ta.StaleRefError, match=r"^arrays\.add: x1: its contents were spoiled by linalg\.scal"
            ):
                await chain(x[1])
            assert (await chain(x[2])).tolist() == [4.0] * 6
        await x[1].fill(3.0)
        for _ in range(TURNS):
            assert (await chain(x[1])).tolist() == [8.0] * 6
        await nothing_left(device, 1)


async def test_borrowed_arrays(system: ta.System, device: ta.Device) -> None:
    options = ta.DeviceOptions(isolation=device.isolation)
    async with system.open_device(BACKEND, options=options, name="other") as other:
        x, y = await device.put(np.ones(3)), await other.put(np.full(3, 4.0))

        def chain(second: ta.AccelRef) -> Any:
            return ((x + second) * second).to_host()

        for turn in range(TURNS + 1):
            await y.fill(float(turn))
            async with device.borrow(y) as borrowed:
                assert (await chain(borrowed)).tolist() == [(turn + 1.0) * turn] * 3
                assert (await chain(x)).tolist() == [2.0] * 3
            with pytest.raises(ta.StaleRefError, match="borrowed from test/other, and was given back"):
                await chain(borrowed)
            async with device.borrow(y) as borrowed:
                if borrowed.block.frozen_by:
                    with pytest.raises(ValueError, match="can only be read"):
                        await arrays.add(x * 2.0, 1.0, out=borrowed)
        await other.put(np.ones(1))
        await nothing_left(device, 1)


async def test_a_template_of_own_arrays_takes_a_borrowed_one(system: ta.System, device: ta.Device) -> None:
    options = ta.DeviceOptions(isolation=device.isolation)
    async with system.open_device(BACKEND, options=options, name="other") as other:
        x, y, z = await device.put(np.ones(3)), await other.put(np.full(3, 4.0)), await device.put(np.ones(3))
        for _ in range(TURNS):
            assert (await ((x + z) * 2.0).to_host()).tolist() == [4.0] * 3
            assert (await arrays.add(x * 2.0, 1.0, out=z).to_host()).tolist() == [3.0] * 3
            await z.fill(1.0)
        async with device.borrow(y) as borrowed:
            assert (await ((x + borrowed) * 2.0).to_host()).tolist() == [10.0] * 3
            with pytest.raises(ValueError, match=r"^arrays\.add: out: the array is borrowed from test/other"):
                await arrays.add(x * 2.0, 1.0, out=borrowed)


async def test_borrowed_arrays_that_come_first(system: ta.System, device: ta.Device) -> None:
    options = ta.DeviceOptions(isolation=device.isolation)
    async with system.open_device(BACKEND, options=options, name="other") as other:
        x, y = await device.put(np.ones(3)), await other.put(np.full(3, 4.0))
        async with device.borrow(y) as borrowed:
            for _ in range(TURNS):
                assert (await ((borrowed + x) * 2.0).to_host()).tolist() == [10.0] * 3
        for _ in range(TURNS):
            assert (await ((x + x) * 2.0).to_host()).tolist() == [4.0] * 3
            assert (await ((await device.put(np.ones(3)) + x) * 2.0).to_host()).tolist() == [4.0] * 3
        assert chains_of(device).kept.counts.recorded == 2


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_an_array_that_goes_while_its_chain_is_recorded(device: ta.Device, turns: int) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, ((x + 1.0) * x).to_host())
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        x.release()
    # It may have been sent by then.
    (found,) = asker.outcomes
    assert isinstance(found, ta.StaleRefError) or found.tolist() == [2.0] * 3
    del asker, found
    # Others of its structure have a template.
    counts = chains_of(device).kept.counts
    before = counts.hits + counts.recorded
    for _ in range(TURNS):
        assert (await ((y + 1.0) * y).to_host()).tolist() == [2.0] * 3
    assert (counts.recorded, counts.hits + counts.recorded) == (1, before + TURNS)
    await nothing_left(device, 1)


async def test_a_chain_is_joined_although_the_joining_call_is_cancelled(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    for turn in range(8):
        with trio.CancelScope() as scope:
            if turn == 4:
                scope.cancel()
            assert (await ((x + 1.0) * x).to_host()).tolist() == [2.0] * 3
        assert scope.cancelled_caught == (turn == 4)
    assert chains_of(device).kept.counts.recorded == 2
    await nothing_left(device, 1)


async def test_a_call_that_several_tasks_share_as_an_operand(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    shared = x + 1.0
    async with trio.open_nursery() as nursery:
        askers = [Asker(nursery, (shared * 2.0).to_host()) for _ in range(3)]
    outcomes = [asker.outcomes[0] for asker in askers]
    right = [one for one in outcomes if isinstance(one, np.ndarray)]
    assert [one.tolist() for one in right] == [[4.0] * 3]
    assert all(
        "was awaited before, or in another call" in str(one) for one in outcomes if one is not right[0]
    )


async def test_steps_after_a_refused_chain_have_unchanged_host_arrays(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, host = await device.put(np.full(3, 2.0)), np.ones(3)
    for _ in range(2):
        assert (await ((x + host) * host).to_host()).tolist() == [3.0] * 3
    opened: Any = device
    ask = opened.ask

    async def refuse(message: Any, **named: Any) -> Any:
        if type(message).__name__ == "RunChain":
            # An operand of the plan, which the program changes before the refusal.
            message.payload = host.tobytes()
            host[...] = 1000.0
            raise ta.OutOfMemoryError("none", requested=1, free=0, total=1, device="cpu:0")
        return await ask(message, **named)

    monkeypatch.setattr(device, "ask", refuse)
    assert (await ((x + host) * host).to_host()).tolist() == [3.0] * 3
