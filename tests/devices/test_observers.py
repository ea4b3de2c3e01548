"""Who observes a system hears of every operation once, wherever the device works."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import trio
from chosen import BACKEND, NAME
from isolations import isolated
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices import QueueStatistics

BLAS = "trio_accel.linalg:BlasActor"
NONE = QueueStatistics(waiting=0, in_flight=0)
BEGUN = (ta.MessageStarted,)
ENDED = (ta.MessageCompleted, ta.MessageFailed, ta.MessageCancelled)


class Heard:
    """The reports of an observer about the operations of a device."""

    def __init__(self) -> None:
        self.events: list[ta.Event] = []

    def __call__(self, event: ta.Event) -> None:
        self.events.append(event)

    def count(self, *kinds: type) -> Counter[tuple[str, str]]:
        """Counts, by the name of the actor and of the operation."""
        return Counter(
            (event.path.rpartition("/")[2], event.message_type)
            for event in self.events
            if isinstance(event, kinds) and "/context/" in event.path
        )


async def test_each_operation_begins_and_ends_exactly_once(system: ta.System, device: ta.Device) -> None:
    heard = Heard()
    x = await device.put(np.ones((8, 8)))
    with system.subscribe(heard):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ta.linalg.matmul, x, np.ones((8, 8)))
                nursery.start_soon(ta.fft.fft, x)
                nursery.start_soon(x.to_host)
        submitted = [device.submit(ta.linalg.Scal(1.0, x)) for _ in range(20)]
        for pending in submitted:
            await pending.wait()
        refused = ta.LibraryError("no", library="blas", code=7)
        ta.testing.inject_fault(device, ta.linalg.Dot, fail=refused, count=2)
        for _ in range(3):
            try:
                await ta.linalg.dot(x[0], x[1])
            except ta.LibraryError:
                continue
        with pytest.raises(ValueError, match="y must have shape"):
            await ta.linalg.dot(x[0], np.ones(3))  # nobody but the caller hears of it
        await device.synchronize()
        await wait_all_tasks_blocked()
    expected = {
        ("blas", "linalg.Matmul"): 20,
        ("fft", "fft.Fft"): 20,
        ("memory", "devices.ToHost"): 20,
        ("blas", "linalg.Scal"): 20,
        ("blas", "linalg.Dot"): 3,
    }
    assert heard.count(*BEGUN) == heard.count(*ENDED) == expected
    assert heard.count(ta.MessageFailed) == {("blas", "linalg.Dot"): 2}
    assert heard.count(ta.MessageCancelled) == {}
    await ta.linalg.dot(x[0], x[1])
    assert heard.count(*BEGUN) == expected  # the subscription is over


async def test_a_failure_is_reported_with_its_error_and_times(system: ta.System, device: ta.Device) -> None:
    heard = Heard()
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("broken"))
    ta.testing.inject_fault(device, ta.linalg.Dot, delay=0.05)
    with system.subscribe(heard):
        with pytest.raises(ta.ActorFailedError):
            await ta.linalg.scal(2.0, x)
        y = await device.put(np.ones(3))
        await ta.linalg.dot(y, y)
        await device.synchronize()
        await wait_all_tasks_blocked()
    [failed] = [event for event in heard.events if isinstance(event, ta.MessageFailed)]
    assert (failed.path, failed.message_type) == (f"test/{NAME}/context/blas", "linalg.Scal")
    assert isinstance(failed.error, RuntimeError)
    assert str(failed.error) == "broken"
    [restarted] = [event for event in heard.events if isinstance(event, ta.ActorRestarted)]
    assert (restarted.path, restarted.incarnation) == (f"test/{NAME}/context/blas", 1)
    [slow] = [
        event
        for event in heard.events
        if isinstance(event, ta.MessageCompleted) and event.message_type == "linalg.Dot"
    ]
    assert 0.05 <= slow.run_time < 5.0
    assert 0.0 <= slow.queue_time < 5.0


async def test_the_tree_shows_library_actors_with_true_counts(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(4))
    for _ in range(5):
        await ta.linalg.scal(1.0, x)
    await ta.fft.fft(x)
    refused = ta.LibraryError("no", library="fft", code=7)
    ta.testing.inject_fault(device, ta.fft.Fft, fail=refused)
    with pytest.raises(ta.LibraryError):
        await ta.fft.fft(x)
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("broken"))
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(1.0, x)
    await ta.linalg.dot(await device.put(np.ones(4)), np.ones(4))
    await device.synchronize()
    nodes = {node.name: node for node in system.tree().find(f"test/{NAME}/context").children}
    shown = {
        name: (node.actor_class, node.state, node.handled, node.failed, node.restarts)
        for name, node in nodes.items()
    }
    assert shown == {
        "memory": ("MemoryActor", "running", 2, 0, 0),
        # A refusal of the library was served; a crash of the actor was not.
        "blas": ("BlasActor", "running", 6, 1, 1),
        "fft": ("FftActor", "running", 2, 0, 0),
    }
    assert nodes["blas"].last_error == "RuntimeError: broken"


async def test_the_tree_shows_waiting_and_running_requests(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, in_flight=2)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.ones(4))
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.3)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ta.linalg.scal, 1.0, x)
            # To open NVIDIA's library takes seconds.
            with trio.fail_after(60):
                while True:
                    queue = (await device.statistics()).queues.get(BLAS, NONE)
                    if (queue.in_flight, queue.waiting) == (2, 3):
                        break
            node = system.tree().find(f"test/{NAME}/context/blas")
            assert node.deferred == 2
            # Inline one of the three is in the hands of the actor, which waits for room.
            assert node.mailbox_depth + node.running == 3
        assert system.tree().find(f"test/{NAME}/context/blas").handled == 5


@isolated
async def test_a_late_observer_gets_the_next_worker_too(system: ta.System, device: ta.Device) -> None:
    heard = Heard()
    x = await device.put(np.ones(4))
    await ta.linalg.scal(1.0, x)
    with system.subscribe(heard):
        ta.testing.poison(device)
        # The next operation fails by it, unless the loss is found before one is asked for.
        with trio.fail_after(60), suppress(ta.ContextPoisonedError):
            while device.generation == 1:
                await ta.linalg.scal(2.0, x)
        heard.events.clear()
        await ta.linalg.dot(await device.put(np.ones(4)), np.ones(4))
        await device.synchronize()
        await wait_all_tasks_blocked()
    assert device.generation == 2
    assert heard.count(ta.MessageCompleted) == {("memory", "devices.Put"): 1, ("blas", "linalg.Dot"): 1}
