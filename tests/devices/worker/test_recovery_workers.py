"""Workers that cannot start, spares, and the end of a device's patience."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import aclosing
from typing import Any

import broken_library
import numpy as np
import pytest
import trio
from chosen import BACKEND, NAME
from isolated import options, wait_in_flight
from processes import descriptors, launcher, until, wait_dead, workers
from recovery_load import AT_ONCE

import trio_accel as ta
from trio_accel.actors import ActorRestarted, ActorStarted
from trio_accel.devices.wire._channel import Channel, Received

# Settings that end a launcher, or start one in another environment.
own_launcher = pytest.mark.own_launcher


async def wait_spares(device: ta.Device, count: int) -> None:
    await until(lambda: device.dispatch.spares == count)


async def wait_generation(device: ta.Device, number: int) -> None:
    async with aclosing(device.watch_generation()) as generations:
        async for generation in generations:
            if generation >= number:
                return


async def kill(device: ta.Device) -> None:
    """Lose the worker, and wait for the next."""
    generation = device.generation
    device.dispatch.process.kill()
    await until(lambda: device.generation > generation)


@pytest.mark.parametrize("how", ["illegal_address", "trap", "assert"])
async def test_a_fault_next_to_a_held_operation(system: ta.System, how: Any) -> None:
    async with system.open_device(BACKEND, options=options(backoff=AT_ONCE)) as device:
        x = await device.put(np.ones(3))
        # A library loaded only now would wait for the held stream.
        await ta.linalg.scal(1.0, x)
        await device.ask(ta.random.Bits(1, 0, (4,)))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        held = device.submit(ta.linalg.Scal(2.0, x))
        await wait_in_flight(device, 1)
        ta.testing.inject_fault(device, ta.random.Bits, poison=True, how=how)
        with trio.fail_after(60), pytest.raises(ta.ContextLostError):
            await device.ask(ta.random.Bits(1, 0, (4,)))
        with pytest.raises(ta.ContextLostError):
            await held.wait()
        assert device.generation <= 2


async def test_a_loss_that_the_device_did_not_report_is_waited_for(system: ta.System) -> None:
    """A library reports it, and its kernels do not know: they write on until the process is dead."""
    changes = options(spares=1, backoff=AT_ONCE)
    async with system.open_device(BACKEND, options=changes) as device:
        await device.put(np.ones(3))
        for _ in range(3):
            await wait_spares(device, 1)
            before, generation = device.dispatch.process, device.generation
            ta.testing.inject_fault(device, ta.linalg.Scal, hang=True, how="writing")
            writing = device.submit(ta.linalg.Scal(2.0, await device.put(np.ones(1 << 12))))
            await wait_in_flight(device, 1)
            ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=ta.ContextPoisonedError("it says so"))
            with trio.fail_after(60), pytest.raises(ta.ContextLostError):
                await device.ask(ta.linalg.Nrm2(np.ones(3)))
            with pytest.raises(ta.ContextLostError):
                await writing.wait()
            with trio.fail_after(60):
                await wait_generation(device, generation + 1)
            assert before.is_dead


async def test_the_fourth_loss_in_a_minute_is_the_last_if_every_loss_counts(system: ta.System) -> None:
    device = await system.open_device(BACKEND, options=options(intensity=ta.Intensity(3, 60.0)))
    x = await device.put(np.ones(3))
    pid = launcher()
    for _ in range(3):
        await kill(device)
        assert (await x.to_host()).tolist() == [1.0] * 3
    assert device.generation == 4
    found: list[BaseException] = []

    async def ask(operation: Any) -> None:
        with pytest.raises(ta.AccelError) as caught:
            await device.ask(operation)
        found.append(caught.value)

    ta.testing.inject_fault(device, ta.linalg.Scal, kill=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, ta.linalg.Scal(2.0, x))
        await trio.lowlevel.checkpoint()
        for _ in range(40):
            nursery.start_soon(ask, ta.linalg.Matmul(np.eye(2), np.eye(2)))
    kinds = {type(error) for error in found}
    assert kinds <= {ta.ContextLostError, ta.DeviceLostError}
    assert ta.DeviceLostError in kinds
    with pytest.raises(ta.DeviceLostError) as caught:
        await x.to_host()
    assert "given up" in str(caught.value)
    assert "3 restarts within 60 s" in str(caught.value)
    assert "SIGKILL" in str(caught.value.__cause__) or "SIGKILL" in str(caught.value)
    with pytest.raises(ta.DeviceLostError):
        device.submit(ta.linalg.Scal(2.0, x))
    assert workers(pid) == set()
    await device.close()
    async with system.open_device(BACKEND, options=options()) as other:
        assert (await (await other.put(np.ones(2))).to_host()).tolist() == [1.0, 1.0]


async def test_a_spare_takes_over_and_is_replaced(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        x = await device.put(np.arange(1 << 20, dtype=float))
        for generation in range(2, 5):
            await wait_spares(device, 1)
            (spare,) = workers(launcher()) - {device.dispatch.process.pid}
            await kill(device)
            assert device.generation == generation
            assert device.dispatch.process.pid == spare
            assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(np.linalg.norm(np.arange(1 << 20)))
        await wait_spares(device, 1)
        assert len(workers(launcher())) == 2


async def test_a_loss_while_a_spare_starts_leaves_no_third_worker(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=1, backoff=AT_ONCE)) as device:
        for _ in range(3):
            await wait_spares(device, 1)
            await kill(device)
            # The replacement of the spare exists, and is not ready yet.
            await until(lambda: len(workers(launcher())) == 2)
            assert device.dispatch.spares == 0
            await kill(device)
        await wait_spares(device, 1)
        await until(lambda: len(workers(launcher())) == 2)


async def test_a_spare_has_later_declarations(system: ta.System) -> None:
    """Chunks made, given back and made again while it stands ready."""
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        await wait_spares(device, 1)
        kept = []
        for number in range(4):
            kept.append(await device.put(np.full(10 << 20, float(number))))
            dropped = await device.put(np.zeros(12 << 20))
            dropped.release()
            await device.synchronize()
        await kill(device)
        for number, ref in enumerate(kept):
            assert (await ref.to_host() == float(number)).all()
            assert float((await ref[:1].to_host())[0]) == number


async def test_a_dead_spare_is_not_handed_out(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=2)) as device:
        await wait_spares(device, 2)
        serving = device.dispatch.process
        for pid in workers(launcher()) - {serving.pid}:
            os.kill(pid, signal.SIGKILL)
        # All at once: whether its death is known by then must not matter.
        serving.kill()
        x = await device.put(np.ones(3))
        assert (await x.to_host()).tolist() == [1.0] * 3
        await wait_spares(device, 2)
        assert len(workers(launcher())) == 3


async def test_a_stopped_spare_does_not_delay_the_device(system: ta.System) -> None:
    changes = options(spares=1, heartbeat_timeout=1.0)
    async with system.open_device(BACKEND, options=changes) as device:
        await wait_spares(device, 1)
        (spare,) = workers(launcher()) - {device.dispatch.process.pid}
        os.kill(spare, signal.SIGSTOP)
        await kill(device)
        with trio.fail_after(60):
            x = await device.put(np.ones(3))
        assert (await x.to_host()).tolist() == [1.0] * 3


async def test_the_tree_shows_nothing_of_a_worker_that_died_before_it_served(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        dispatch = device.dispatch
        take = dispatch._pool.take

        async def take_behind_another() -> Any:
            link = await take()
            # Its reports from before it should serve.
            ghost = f"{device.path}/context/ghost"
            dispatch._answers.actors.take(ActorStarted(path=ghost, incarnation=0), "BlasActor")
            return link

        monkeypatch.setattr(dispatch._pool, "take", take_behind_another)
        await device.put(np.ones(3))
        await kill(device)
        await device.put(np.ones(3))
        context = system.tree().find(f"{device.path}/context")
        assert [child.name for child in context.children] == ["memory"]


async def test_a_spare_that_dies_in_peace_is_replaced(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        await wait_spares(device, 1)
        (spare,) = workers(launcher()) - {device.dispatch.process.pid}
        os.kill(spare, signal.SIGKILL)
        others = {spare, device.dispatch.process.pid}
        await until(lambda: workers(launcher()) - others)
        await wait_spares(device, 1)
        assert device.generation == 1


async def test_a_spare_that_dies_while_it_starts(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        x = await device.put(np.ones(3))
        serving = {device.dispatch.process.pid}
        await until(lambda: workers(launcher()) - serving)
        (spare,) = workers(launcher()) - serving
        os.kill(spare, signal.SIGKILL)
        await until(lambda: spare not in workers(launcher()))
        await ta.linalg.scal(2.0, x)
        assert device.generation == 1
        await kill(device)
        assert (await x.to_host()).tolist() == [2.0] * 3


async def test_the_spares_of_a_closed_device_have_ended(system: ta.System) -> None:
    for ready in (False, True):
        device = await system.open_device(BACKEND, options=options(spares=2))
        if ready:
            await wait_spares(device, 2)
        await device.close()
        assert workers(launcher()) == set()


@own_launcher
@pytest.mark.slow
async def test_the_death_of_the_launcher_is_one_loss(system: ta.System) -> None:
    """All its workers die with it, spares too; a new one starts others."""
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        await wait_spares(device, 1)
        x = await device.put(np.arange(1 << 20, dtype=float))
        y = await device.put(np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, hang=True)
        pid = launcher()
        pidfds = [os.pidfd_open(worker) for worker in workers(pid)]
        pending = device.submit(ta.linalg.Scal(2.0, y))
        await wait_in_flight(device)
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(60):
            await wait_dead(*pidfds)
            with pytest.raises(ta.ContextLostError):
                await pending.wait()
            np.testing.assert_array_equal(await x.to_host(), np.arange(1 << 20))
            assert launcher() != pid
            await wait_spares(device, 1)
        for pidfd in pidfds:
            os.close(pidfd)
        assert device.generation == 2


async def opened_in_vain(system: ta.System, **changes: Any) -> BaseException:
    """The error of opening a device; it leaves nothing, and is bounded."""
    before = descriptors()
    with trio.fail_after(60), pytest.raises(BaseException) as caught:  # noqa: PT011  # see the caller
        await system.open_device(BACKEND, options=options(**changes))
    assert [node.name for node in system.tree().children if node.name != "launcher"] == []
    left = set(descriptors().items()) - set(before.items())
    assert not [target for _, target in left if "memfd" in target], left
    return caught.value


@own_launcher
async def test_a_library_that_only_the_worker_cannot_import(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_ACCEL_TEST_BROKEN", "1")
    changes = {"libraries": ("broken_library:BrokenActor",), "intensity": ta.Intensity(3, 60.0)}
    error = await opened_in_vain(system, **changes)
    assert "this module is broken on purpose" in f"{error} {error.__cause__}"
    assert workers(launcher()) == set()


async def test_a_library_that_ends_every_worker(system: ta.System) -> None:
    starts = 0

    def count(event: object) -> None:
        nonlocal starts
        starts += isinstance(event, (ActorStarted, ActorRestarted))

    with system.subscribe(count):
        changes = {"libraries": ("broken_library:ExitingActor",), "intensity": ta.Intensity(3, 60.0)}
        error = await opened_in_vain(system, **changes)
    assert "exited with code 3" in f"{error} {error.__cause__}"
    assert workers(launcher()) == set()
    assert starts < 12


async def test_a_library_that_finds_the_context_lost(system: ta.System) -> None:
    """Its first caller gets the error; nothing was begun, so that nothing is invalid."""
    async with system.open_device(BACKEND, options=options()) as device:
        x = await device.put(np.ones(3))
        with pytest.raises(ta.ContextLostError, match="waited for its library to be opened") as caught:
            await device.ask(broken_library.Negate(x))
        lost = caught.value
        assert (lost.device, lost.operation, lost.generation) == (NAME, "broken_library.Negate", 1)
        assert "an illegal address" in str(lost.__cause__)
        assert await device.ask(broken_library.Negate(x)) is x
        np.testing.assert_array_equal(await x.to_host(), -np.ones(3))
        assert device.generation == 2


@own_launcher
async def test_an_interpreter_that_does_not_exist(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    error = await opened_in_vain(system, intensity=ta.Intensity(3, 60.0))
    assert "/no/such/python" in f"{error} {error.__cause__}"


@own_launcher
async def test_an_interpreter_that_ends_at_once(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    async with system.open_device(BACKEND, options=options()) as device:
        await device.put(np.ones(3))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    # The launcher runs by now.
    monkeypatch.setattr(sys, "executable", str(program))
    error = await opened_in_vain(system, intensity=ta.Intensity(3, 60.0))
    assert "exited with code 7" in f"{error} {error.__cause__}"
    assert workers(launcher()) == set()


@own_launcher
async def test_a_device_is_given_up_if_its_next_worker_cannot_start(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    device = await system.open_device(BACKEND, options=options(intensity=ta.Intensity(3, 60.0)))
    x = await device.put(np.ones(3))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    device.dispatch.process.kill()
    await until(lambda: device.dispatch.process is None)
    with trio.fail_after(60), pytest.raises(ta.DeviceLostError, match="given up"):
        await ta.linalg.scal(2.0, x)
    await device.close()
    assert workers(launcher()) == set()


async def test_an_interrupt_that_hits_the_connection_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C is raised wherever the program happens to be, also in the middle of a message."""
    found: list[BaseException] = []
    receive = Channel.receive
    is_armed = False

    async def interrupted(self: Channel) -> list[Received]:
        received = await receive(self)
        if is_armed and not any(descriptors for _, descriptors in received):
            raise KeyboardInterrupt
        return received

    async def ask(device: ta.Device) -> None:
        try:
            while True:
                await device.ask(ta.linalg.Matmul(np.eye(2), np.eye(2)))
        except (ta.AccelError, trio.Cancelled) as error:
            found.append(error)
            raise

    async def program() -> None:
        nonlocal is_armed
        async with (
            ta.open_system("short") as system,
            system.open_device(BACKEND, options=options()) as device,
            trio.open_nursery() as nursery,
        ):
            for _ in range(4):
                nursery.start_soon(ask, device)
            # clock: any moment will do
            await trio.sleep(0.1)
            is_armed = True
            await trio.sleep_forever()

    monkeypatch.setattr(Channel, "receive", interrupted)
    with trio.fail_after(60), pytest.raises(BaseExceptionGroup) as caught:  # noqa: ASYNC401  # checked below, at any depth
        await program()
    assert caught.group_contains(KeyboardInterrupt)
    assert len(found) == 4
