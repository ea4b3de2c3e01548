"""Blocking launches run in a thread, so the loop and unrelated work continue."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from blocking_library import AheadScale, OtherScale, Product, Scale
from chosen import BACKEND, NAME
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isolations import inline, isolated
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import InThread, Isolation
from trio_accel.devices import Fill, Operation, Pending
from trio_accel.devices.base import _bridge

AT_ONCE = ta.Backoff(base=0.0)
Pipes = Callable[[], Path]


@pytest.fixture
def pipes(tmp_path: Path) -> Pipes:
    """Makes pipes: a launch that reads one waits until somebody has written to it."""

    def make() -> Path:
        path = tmp_path / f"pipe {len(list(tmp_path.iterdir()))}"
        os.mkfifo(path)
        return path

    return make


@pytest.fixture
def pipe(pipes: Pipes) -> Path:
    return pipes()


async def begun(pipe: Path) -> int:
    """Wait until a launch blocks; gives the end to write to."""
    return await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY, abandon_on_cancel=True)


def finish(end: int, what: str = "enqueue") -> None:
    """Tell the launch to continue."""
    os.write(end, what.encode())
    os.close(end)


def let_go(pipe: Path) -> bool:
    """Let the launch continue that waits for a pipe; returns whether there is one."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    finish(end)
    return True


class Asker:
    """Runs one ask in a task of its own."""

    def __init__(self, nursery: trio.Nursery, device: ta.Device, operation: Operation[Any, Any]) -> None:
        self.scope = trio.CancelScope()
        self.outcome: object = None
        self.is_over = trio.Event()
        nursery.start_soon(self._run, device, operation)

    async def _run(self, device: ta.Device, operation: Operation[Any, Any]) -> None:
        with self.scope:
            try:
                self.outcome = await device.ask(operation)
            except Exception as error:  # noqa: BLE001  # looked at by the test
                self.outcome = error
        if self.scope.cancelled_caught:
            self.outcome = "cancelled"
        self.is_over.set()

    async def result(self) -> Any:
        with trio.fail_after(60):
            await self.is_over.wait()
        return self.outcome


async def settled(device: ta.Device) -> None:
    """Wait until what can be launched by now is, also in a worker."""
    await wait_all_tasks_blocked()
    await device.statistics()
    await wait_all_tasks_blocked()


async def test_others_continue_during_an_enqueue(
    device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.arange(3.0))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    y = await device.put(np.arange(4.0))
    assert await (await ta.linalg.dot(y, y)).item() == 14.0
    assert asker.outcome is None
    counted = await device.statistics()
    path = "blocking_library:BlockingActor"
    assert (counted.queues[path].waiting, counted.queues[path].in_flight) == (0, 1)
    finish(end)
    assert await asker.result() is x
    np.testing.assert_array_equal(await x.to_host(), [0.0, 2.0, 4.0])
    await device.synchronize()
    counted = await device.statistics()
    assert (counted.launched, counted.in_flight, counted.queues) == (counted.completed, 0, {})


async def test_later_work_on_its_arrays_follows_it(device: ta.Device, pipes: Pipes) -> None:
    """Read after write, write after read, and write after write."""
    host = np.array([[1.0, 2.0], [3.0, 4.0]])
    a, b = await device.put(host), await device.put(host + 1)
    first, second = pipes(), pipes()
    product = device.submit(Product(a, b, first))
    pending: list[Pending[Any]] = [
        product,
        device.submit(ta.linalg.Matmul(product.value, b)),
        device.submit(Fill(a, 9.0)),
        device.submit(ta.linalg.Scal(2.0, b)),
        device.submit(OtherScale(b, 3.0, second)),
        device.submit(Fill(product.value, 7.0)),
    ]
    end = await begun(first)
    await settled(device)
    assert not any(one.is_done for one in pending)
    assert not let_go(second)
    finish(end)
    end = await begun(second)
    assert not pending[4].is_done
    finish(end)
    for one in pending:
        await one.wait()
    later = await pending[1].value.to_host()
    np.testing.assert_array_equal(later, host @ (host + 1) @ (host + 1))
    np.testing.assert_array_equal(await a.to_host(), np.full((2, 2), 9.0))
    np.testing.assert_array_equal(await b.to_host(), 6.0 * (host + 1))
    np.testing.assert_array_equal(await product.value.to_host(), np.full((2, 2), 7.0))


async def test_its_library_does_one_thing_at_a_time(device: ta.Device, pipes: Pipes) -> None:
    x, y, z = [await device.put(np.full(3, value)) for value in (1.0, 2.0, 3.0)]
    first, second = pipes(), pipes()
    pending = [
        device.submit(Scale(x, 2.0, first)),
        device.submit(Scale(y, 2.0)),
        device.submit(Scale(z, 2.0, second)),
    ]
    end = await begun(first)
    await settled(device)
    assert not pending[1].is_done
    assert not let_go(second)
    finish(end)
    finish(await begun(second))
    for one, value in zip(pending, (2.0, 4.0, 6.0), strict=True):
        await one.wait()
        np.testing.assert_array_equal(await one.value.to_host(), np.full(3, value))


STEPS = st.tuples(
    st.sampled_from(["scale", "other", "ahead", "ahead", "fill", "axpy", "plain", "plain ahead"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([-1.0, 0.5, 2.0, 3.0]),
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=8), seed=st.integers(0, 100))
async def test_any_program_matches_a_run_step_by_step(
    system: ta.System, pipes: Pipes, steps: list[tuple[str, int, int, float]], seed: int
) -> None:
    """Blocking launches of two libraries among others, let go in any order."""
    hosts = [np.arange(4.0) + number for number in range(3)]
    waiting: list[Path] = []
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        refs = [await device.put(host) for host in hosts]
        pending: list[Pending[Any]] = []
        for kind, i, j, value in steps:
            x, y = hosts[i], hosts[j]
            if kind in ("scale", "other", "ahead"):
                waiting.append(pipes())
                cls = {"scale": Scale, "other": OtherScale, "ahead": AheadScale}[kind]
                pending.append(device.submit(cls(refs[j], value, waiting[-1])))
                y *= value
            elif kind == "axpy" and i != j:
                pending.append(device.submit(ta.linalg.Axpy(value, refs[i], refs[j])))
                y += value * x
            elif kind.startswith("plain"):
                cls = Scale if kind == "plain" else AheadScale
                pending.append(device.submit(cls(refs[j], value)))
                y *= value
            else:
                pending.append(device.submit(Fill(refs[j], value)))
                y[:] = value
        while waiting:
            # At least one launch has begun, or will.
            await wait_all_tasks_blocked()
            waiting = waiting[seed % len(waiting) :] + waiting[: seed % len(waiting)]
            ready = next((path for path in waiting if let_go(path)), None)
            if ready is not None:
                waiting.remove(ready)
        for one in pending:
            await one.wait()
        for host, ref in zip(hosts, refs, strict=True):
            np.testing.assert_array_equal(await ref.to_host(), host)


async def test_a_thread_continues_with_the_next_call_without_the_loop(
    device: ta.Device, pipes: Pipes, nursery: trio.Nursery
) -> None:
    arrays = [await device.put(np.full(3, float(number))) for number in range(12)]
    paths = [pipes() for _ in arrays]
    pending = [device.submit(AheadScale(x, 2.0, path)) for x, path in zip(arrays, paths, strict=True)]
    end = await begun(paths[0])
    await settled(device)
    counted = await device.statistics()
    queue = counted.queues["blocking_library:AheadActor"]
    assert (queue.in_flight, queue.waiting) == (8, 4)
    # A launch can be withdrawn until it is handed over.
    follower = Asker(nursery, device, ta.linalg.Scal(2.0, arrays[7]))
    last = Asker(nursery, device, AheadScale(arrays[0], 2.0))
    other = await device.put(np.ones(3))
    await settled(device)
    last.scope.cancel()
    assert await last.result() == "cancelled"
    # Unrelated work continues.
    await other.fill(2.0)
    np.testing.assert_array_equal(await other.to_host(), np.full(3, 2.0))
    finish(end)
    if device.isolation == "inline":
        # The thread is at the next one before the loop has seen the end of the first.
        while not let_go(paths[1]):
            pass
        await pending[1].wait()
    for path in paths[2 if device.isolation == "inline" else 1 :]:
        finish(await begun(path))
    for number, one in enumerate(pending):
        await one.wait()
        factor = 4.0 if number == 7 else 2.0
        await follower.result()
        np.testing.assert_array_equal(await one.value.to_host(), np.full(3, factor * number))


async def test_an_injected_fault_has_the_thread_to_itself(
    device: ta.Device, pipes: Pipes, nursery: trio.Nursery
) -> None:
    arrays = [await device.put(np.ones(3)) for _ in range(3)]
    first, third = pipes(), pipes()
    pending = [device.submit(AheadScale(arrays[0], 2.0, first))]
    end = await begun(first)
    ta.testing.inject_fault(device, AheadScale, fail=ta.LibraryError("refused", library="blas", code="x"))
    pending.append(device.submit(AheadScale(arrays[1], 2.0, pipes())))
    pending.append(device.submit(AheadScale(arrays[2], 3.0, third)))
    await settled(device)
    counted = (await device.statistics()).queues["blocking_library:AheadActor"]
    assert (counted.in_flight, counted.waiting) == (1, 2)
    finish(end)
    await pending[0].wait()
    with pytest.raises(ta.LibraryError, match="refused"):
        await pending[1].wait()
    finish(await begun(third))
    await pending[2].wait()
    np.testing.assert_array_equal(await arrays[2].to_host(), np.full(3, 3.0))


async def test_calls_handed_over_in_advance_are_lost_with_the_context(
    device: ta.Device, pipes: Pipes, nursery: trio.Nursery
) -> None:
    arrays = [await device.put(np.ones(3)) for _ in range(4)]
    first = pipes()
    askers = [Asker(nursery, device, AheadScale(arrays[0], 2.0, first))]
    askers += [Asker(nursery, device, AheadScale(x, 2.0)) for x in arrays[1:]]
    end = await begun(first)
    await settled(device)
    finish(end, "lost")
    assert isinstance(await askers[0].result(), ta.ContextPoisonedError)
    for asker, x in zip(askers[1:], arrays[1:], strict=True):
        # The thread may have come so far before the loop saw it.
        outcome = await asker.result()
        assert outcome is x or isinstance(outcome, ta.AccelError)
    y = await device.put(np.ones(3))
    assert device.generation == 2
    assert await device.ask(AheadScale(y, 2.0)) is y
    np.testing.assert_array_equal(await y.to_host(), np.full(3, 2.0))


async def test_a_refused_launch_is_the_askers_problem(
    system: ta.System, device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    finish(await begun(pipe), "refused")
    error = await asker.result()
    assert isinstance(error, ta.LibraryError)
    assert (error.operation, error.device) == ("blocking_library.Scale", NAME)
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))  # nothing has begun to change it
    product = device.submit(Product(np.eye(2), np.eye(2), pipe))
    finish(await begun(pipe), "refused")
    with pytest.raises(ta.LibraryError):
        await product.wait()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by blocking_library\.Product"):
        await product.value.to_host()
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    finish(await begun(pipe))
    assert await asker.result() is x
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 2.0))
    assert {node.restarts for node in system.tree().walk()} == {0}
    await device.synchronize()
    assert not (await device.statistics()).queues


@pytest.mark.parametrize("said", ["broken", "enqueue, then broken", "exit"])
async def test_a_launch_that_breaks_restarts_its_library(
    system: ta.System, device: ta.Device, pipe: Path, nursery: trio.Nursery, said: str
) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    finish(await begun(pipe), said)
    error = await asker.result()
    assert isinstance(error, ta.ActorFailedError)
    assert "SystemExit" in str(error) if said == "exit" else "the launch is broken" in str(error)
    with pytest.raises(ta.StaleRefError):
        await ta.linalg.scal(2.0, x)  # nobody knows how far it has come
    asker = Asker(nursery, device, Scale(y, 3.0, pipe))
    finish(await begun(pipe))
    assert await asker.result() is y
    np.testing.assert_array_equal(await y.to_host(), np.full(3, 3.0))
    node = system.tree().find(f"test/{device.name}/context/blocking_library:BlockingActor")
    assert node.restarts == 1


async def test_a_context_lost_by_it_is_replaced(device: ta.Device, pipe: Path, nursery: trio.Nursery) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    finish(await begun(pipe), "lost")
    assert isinstance(await asker.result(), ta.ContextLostError)
    y = await device.put(np.ones(3))
    assert device.generation == 2
    asker = Asker(nursery, device, Scale(y, 2.0, pipe))
    finish(await begun(pipe))
    assert await asker.result() is y


@inline
async def test_a_context_lost_meanwhile_fails_the_asker_at_once(
    device: ta.Device, pipe: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    follower = Asker(nursery, device, ta.linalg.Scal(2.0, x))
    await wait_all_tasks_blocked()
    ta.testing.inject_fault(device, Fill, fail=ta.ContextPoisonedError("gone"))
    with pytest.raises(ta.ContextLostError):
        await device.ask(Fill(y, 1.0))
    error = await asker.result()
    assert isinstance(error, ta.ContextLostError)
    assert "was in flight" in str(error)
    assert isinstance(await follower.result(), ta.AccelError)
    # The next context does not wait for the thread.
    again = await device.put(np.ones(3))
    assert device.generation == 2
    caplog.clear()
    await until_threads_end(lambda: finish(end))
    await ta.linalg.scal(2.0, again)
    np.testing.assert_array_equal(await again.to_host(), np.full(3, 2.0))
    assert not caplog.records


async def until_threads_end(let_go: Callable[[], None]) -> None:
    """Release the threads, and wait until they have reported their results."""
    reported = trio.Event()
    token = trio.lowlevel.current_trio_token()
    before = _bridge._report

    def report(*arguments: Any) -> None:
        before(*arguments)
        token.run_sync_soon(reported.set)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bridge, "_report", report)
        let_go()
        with trio.fail_after(60):
            await reported.wait()


async def test_an_endless_launch_is_given_up(system: ta.System, isolation: Isolation, pipe: Path) -> None:
    options = ta.DeviceOptions(isolation=isolation, stuck_after=0.2, close_grace=0.2, backoff=AT_ONCE)
    async with system.open_device(BACKEND, options=options) as device:
        pending = device.submit(Scale(await device.put(np.ones(3)), 2.0, pipe))
        end = await begun(pipe)
        with trio.fail_after(60), pytest.raises(ta.CompletionTimeoutError, match=r"stuck_after = 0\.2 s"):
            await pending.wait()
        y = await device.put(np.ones(3))
        assert device.generation == 2
        await ta.linalg.scal(2.0, y)
        np.testing.assert_array_equal(await y.to_host(), np.full(3, 2.0))
        if isolation == "inline":
            await until_threads_end(lambda: finish(end))
        else:
            os.close(end)


async def test_a_device_that_closes_waits_no_longer_than_its_grace(system: ta.System, pipe: Path) -> None:
    options = ta.DeviceOptions(isolation="inline", close_grace=0.3)
    async with system.open_device(BACKEND, options=options) as device:
        pending = device.submit(Scale(await device.put(np.ones(3)), 2.0, pipe))
        end = await begun(pipe)
        started = trio.current_time()
    took = trio.current_time() - started
    # The launch ends only after this, so the close has not waited for it.
    assert took >= 0.3
    with pytest.raises(ta.DeviceLostError):
        await pending.wait()
    await until_threads_end(lambda: finish(end))


@inline
async def test_its_library_waits_for_it_when_it_ends(
    system: ta.System, isolation: Isolation, pipe: Path, nursery: trio.Nursery
) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        x = await device.put(np.ones(3))
        asker = Asker(nursery, device, Scale(x, 2.0, pipe))
        end = await begun(pipe)
        nursery.start_soon(finish_later, end)
    assert await asker.result() is x


async def finish_later(end: int) -> None:
    await wait_all_tasks_blocked()
    finish(end)


async def test_a_cancelled_asker_leaves_and_the_launch_continues(
    device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    asker.scope.cancel()
    assert await asker.result() == "cancelled"
    # It keeps its position, because work on its array must follow it all the same.
    writer = device.submit(ta.linalg.Scal(5.0, x))
    await settled(device)
    assert not writer.is_done
    finish(end)
    await writer.wait()
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 10.0))


@inline
async def test_a_cancelled_asker_has_a_grace(device: ta.Device, pipe: Path, nursery: trio.Nursery) -> None:
    x = await device.put(np.ones(3))
    with ta.cancel_grace(60.0):
        asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    asker.scope.cancel()
    await wait_all_tasks_blocked()
    assert asker.outcome is None
    finish(end)
    assert await asker.result() is x  # the device was done before the grace was over


async def test_a_launch_waiting_for_it_can_be_cancelled(
    device: ta.Device, pipes: Pipes, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    first, second = pipes(), pipes()
    asker = Asker(nursery, device, Scale(x, 2.0, first))
    end = await begun(first)
    behind = Asker(nursery, device, Scale(x, 3.0, second))
    await settled(device)
    behind.scope.cancel()
    assert await behind.result() == "cancelled"
    finish(end)
    assert await asker.result() is x
    assert not let_go(second)
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 2.0))


@inline
async def test_it_outlives_a_restart_of_its_library(
    system: ta.System, device: ta.Device, pipes: Pipes, nursery: trio.Nursery
) -> None:
    """The next incarnation has another handle and another stream; the order of launches also holds for it."""
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    first = pipes()
    library = await _library(device, Scale(y, 1.0))
    asker = Asker(nursery, device, Scale(x, 2.0, first))
    end = await begun(first)
    library.context.crash(RuntimeError("broken by the test"))
    independent = Asker(nursery, device, Scale(y, 3.0))
    assert await independent.result() is y
    plain = Asker(nursery, device, Scale(x, 3.0))
    await wait_all_tasks_blocked()
    assert system.tree().find(f"test/{NAME}/context/blocking_library:BlockingActor").restarts == 1
    assert (asker.outcome, plain.outcome) == (None, None)
    finish(end)
    assert await asker.result() is x
    assert await plain.result() is x
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 6.0))


async def _library(device: ta.Device, operation: Operation[Any, Any]) -> Any:
    """The library actor that serves an operation, which is asked."""
    await device.ask(operation)
    session = device.dispatch.session  # type: ignore[union-attr]
    return session.libraries[operation.library]._cell.incarnation.actor


async def test_libraries_that_share_its_stream_wait(
    system: ta.System, pipe: Path, nursery: trio.Nursery
) -> None:
    options = ta.DeviceOptions(isolation="inline", streams=ta.SingleStream())
    async with system.open_device(BACKEND, options=options) as device:
        x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
        await ta.linalg.scal(1.0, y)
        asker = Asker(nursery, device, Scale(x, 2.0, pipe))
        end = await begun(pipe)
        other = Asker(nursery, device, ta.linalg.Scal(3.0, y))
        await wait_all_tasks_blocked()
        assert other.outcome is None
        finish(end)
        assert await asker.result() is x
        assert await other.result() is y
        np.testing.assert_array_equal(await y.to_host(), np.full(3, 3.0))


@inline
async def test_a_lease_waits_for_it(device: ta.Device, pipe: Path, nursery: trio.Nursery) -> None:
    x = await device.put(np.ones(3))
    Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    has_lease = trio.Event()

    async def lease() -> None:
        async with x.lease():
            has_lease.set()

    nursery.start_soon(lease)
    await wait_all_tasks_blocked()
    assert not has_lease.is_set()
    finish(end)
    with trio.fail_after(60):
        await has_lease.wait()


@inline
@pytest.mark.parametrize("said", ["enqueue", "refused", "broken"])
async def test_hooks_see_each_step_once(
    device: ta.Device, pipe: Path, nursery: trio.Nursery, said: str
) -> None:
    phases: list[str] = []
    x = await device.put(np.ones(3))
    device.state.hooks.append(lambda phase, launch: phases.append(phase.value))
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    end = await begun(pipe)
    assert phases == ["validate", "enqueue"]
    finish(end, said)
    await asker.result()
    await device.synchronize()
    device.state.hooks.clear()
    assert phases == ["validate", "enqueue", "complete", "reply", "release"]


@inline
async def test_enqueued_work_of_a_refused_launch_keeps_its_memory(
    device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    """The stream is held in front of it: its blocks are somebody else's only when it has passed."""
    host = np.ones((4, 4))
    # The driver loads a kernel with its first launch, and waits for held streams then.
    await ta.linalg.matmul(await device.put(host), host)
    await device.statistics()  # gives back what was dropped
    hold = ta.testing.inject_fault(device, Product, hang=True)
    product = Product(host, host, pipe)
    asker = Asker(nursery, device, product)
    end = await begun(pipe)
    session = device.dispatch.session  # type: ignore[union-attr]
    blocks = session.engine.device.memory().blocks
    assert blocks == 3
    finish(end, "enqueue, then refused")
    assert isinstance(await asker.result(), ta.LibraryError)
    await wait_all_tasks_blocked()
    assert session.engine.device.memory().blocks == blocks
    session.engine.enqueuer.end_holds()
    # Nobody waits for it: the loop learns of its end when the device gets there.
    with trio.fail_after(60):
        while session.engine.device.memory().blocks:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.001)
    assert hold is not None


@pytest.mark.parametrize(
    "fault", [{"fail": ta.LibraryError("no", library="blas", code="x")}, {"delay": 0.01}]
)
async def test_faults_hit_it_like_any_operation(
    device: ta.Device, pipe: Path, nursery: trio.Nursery, fault: dict[str, Any]
) -> None:
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, Scale, **fault)
    asker = Asker(nursery, device, Scale(x, 2.0, pipe))
    if "fail" in fault:
        assert isinstance(await asker.result(), ta.LibraryError)
        assert not let_go(pipe)
    else:
        finish(await begun(pipe))
        assert await asker.result() is x


@isolated
async def test_a_worker_that_dies_meanwhile_is_replaced_and_the_launch_runs_again(
    system: ta.System, isolation: Isolation, pipe: Path, nursery: trio.Nursery
) -> None:
    options = ta.DeviceOptions(isolation=isolation, retry=1, backoff=AT_ONCE)
    async with system.open_device(BACKEND, options=options) as device:
        a = await device.put(np.full((2, 2), 3.0))
        asker = Asker(nursery, device, Product(a, a, pipe))
        end = await begun(pipe)
        pid = system.tree().find(f"test/{NAME}/context").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.close(end)
        # Until it is dead, it counts as a reader.
        await device.put(np.ones(3))
        finish(await begun(pipe))
        np.testing.assert_array_equal(await (await asker.result()).to_host(), np.full((2, 2), 18.0))
        assert device.generation == 2


async def test_a_system_without_threads_refuses_it(
    device: ta.Device, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.isolation == "process":
        pytest.skip("the thread would be started there")
    x = await device.put(np.ones(3))
    await device.ask(Scale(x, 1.0))

    def one_less(thread: threading.Thread) -> None:
        if thread.name.endswith("launches"):
            raise RuntimeError("can't start new thread")
        start(thread)

    # Planned operations have a thread of Trio's.
    asked = InThread()
    monkeypatch.setattr("blocking_library._Blocking.prepare", lambda *_: asked)
    start: Any = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", one_less)
    with pytest.raises(ta.ActorFailedError, match="can't start new thread"):
        await device.ask(Scale(x, 2.0, pipe))


def test_a_plan_is_done_by_calling_it() -> None:
    done: list[int] = []
    InThread(lambda: done.append(1))()
    InThread()()
    assert done == [1]
