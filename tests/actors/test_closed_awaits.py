"""A task that drives an await by hand and leaves it half-way wakes nobody at the wrong place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import Do, Echo, Gate, Note, Puppet

from trio_accel.actors import (
    ActorSystem,
    Leavable,
    MailboxOptions,
    ParkingLot,
    Ref,
    TaskEvent,
    TaskLock,
)
from trio_accel.patterns import Batcher, Submit

wait = trio.testing.wait_all_tasks_blocked


def begin(awaitable: Awaitable[Any]) -> Any:
    waiting = awaitable.__await__()
    waiting.send(None)
    return waiting


async def _receive(stop: Callable[[Any], object]) -> None:
    send, receive = trio.open_memory_channel[int](0)
    stop(begin(Leavable(receive.receive())))
    with pytest.raises(trio.WouldBlock):
        send.send_nowait(1)


@pytest.mark.parametrize("stop", [lambda waiting: waiting.close(), lambda _: None], ids=["close", "drop"])
async def test_a_wait_left_half_way_is_forgotten(stop: Callable[[Any], object]) -> None:
    lot, event, lock = ParkingLot(), TaskEvent(), TaskLock()
    await lock.acquire()
    for awaitable in (lot.park(), event.wait(), lock.acquire()):
        stop(begin(awaitable))
    assert not lot
    event.set()
    lock.release()
    assert not lock.locked()
    await _receive(stop)
    await trio.lowlevel.checkpoint()


async def test_a_kept_wait_is_passed_over_once_the_task_waits_elsewhere() -> None:
    lot, other = ParkingLot(), ParkingLot()
    kept = begin(lot.park())
    woken: list[str] = []

    async def wake() -> None:
        await wait()
        assert not lot.unpark()
        await wait()
        woken.append("by the right lot")
        other.unpark_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wake)
        await other.park()
        assert woken
    kept.close()


async def test_a_lock_is_passed_on_in_order() -> None:
    lock, order = TaskLock(), list[int]()

    async def hold(number: int) -> None:
        async with lock:
            order.append(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await lock.acquire()
        with pytest.raises(trio.WouldBlock):
            lock.acquire_nowait()
        for number in range(3):
            nursery.start_soon(hold, number)
            await wait()
        with trio.move_on_after(0) as scope:
            await lock.acquire()
        assert scope.cancelled_caught
        begin(lock.acquire()).close()
        lock.release()
    assert order == [0, 1, 2]
    assert not lock.locked()


async def test_a_closed_ask_of_a_busy_actor_never_runs(system: ActorSystem) -> None:
    puppet: Ref[Puppet] = await system.spawn(Puppet, name="puppet")
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.ask, Do(gate))
        await wait()
        begin(puppet.ask(Echo("closed"))).close()
        begin(puppet.ask(Echo("dropped")))
        gate.open.set()
    assert await puppet.ask(Echo("last")) == "last"
    assert await puppet.ask(Do(_notes)) == ["last"]


async def test_a_closed_ask_cancels_its_handler(system: ActorSystem) -> None:
    puppet: Ref[Puppet] = await system.spawn(Puppet, name="puppet")
    waiting = begin(puppet.ask(Do(_sleep)))
    await wait()
    waiting.close()
    # The actor takes the next message, because its handler was cancelled.
    assert await puppet.ask(Echo("next")) == "next"


async def test_a_closed_ask_of_an_actor_that_unwinds_at_once(system: ActorSystem) -> None:
    async def model(items: Sequence[float]) -> list[float]:
        await trio.lowlevel.checkpoint()
        return [item * 2 for item in items]

    batcher = await system.spawn(Batcher[float, float], model, name="batcher")
    for _ in range(3):
        begin(batcher.ask(Submit(1.0))).close()
        begin(batcher.ask(Submit(1.0)))
        assert await batcher.ask(Submit(2.0)) == 4.0


async def test_a_closed_tell_is_not_sent(system: ActorSystem) -> None:
    puppet: Ref[Puppet] = await system.spawn(Puppet, name="puppet", mailbox=MailboxOptions(capacity=1))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.ask, Do(gate))
        await wait()
        puppet.tell_nowait(Note("kept"))
        begin(puppet.tell(Note("closed"))).close()
        gate.open.set()
    assert await puppet.ask(Do(_notes)) == ["kept"]


async def test_a_closed_wait_for_the_end_of_an_actor(system: ActorSystem) -> None:
    puppet: Ref[Puppet] = await system.spawn(Puppet, name="puppet")
    begin(puppet.wait_terminated()).close()
    await puppet.stop()
    await puppet.wait_terminated()


async def _sleep(_: Puppet) -> None:
    await trio.sleep_forever()


async def _notes(puppet: Puppet) -> list[str]:
    return puppet.notes


async def test_a_callback_of_trio_wakes_parked_tasks() -> None:
    """No task runs while Trio cancels another task, or calls a function for another thread."""
    event, woken = TaskEvent(), list[str]()

    async def park() -> None:
        await event.wait()
        woken.append("waiter")

    def abort(_: object) -> trio.lowlevel.Abort:
        event.set()
        return trio.lowlevel.Abort.SUCCEEDED

    async with trio.open_nursery() as nursery:
        nursery.start_soon(park)
        await wait()
        with trio.move_on_after(0):
            await trio.lowlevel.wait_task_rescheduled(abort)
    assert woken == ["waiter"]
    event, woken = TaskEvent(), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(park)
        await wait()
        trio.lowlevel.current_trio_token().run_sync_soon(event.set)
    assert woken == ["waiter"]


async def test_a_cancelled_task_leaves_its_lot_at_once() -> None:
    """Not when it runs next: another cancelled task may hand its work over before."""
    lot = ParkingLot()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lot.park)
        await wait()
        nursery.cancel_scope.cancel()
        assert (len(lot), lot.unpark()) == (0, False)
