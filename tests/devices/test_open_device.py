"""Opening and closing devices."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, NAME
from isolations import isolated
from manual_backend import ManualBackend
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices import OpenDevice, describe_workers

pytestmark = pytest.mark.any_backend


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cpu:")]


def devices(system: ta.System) -> list[str]:
    # The launcher of workers stays for the next device.
    return [child.name for child in system.tree().children if child.name != "launcher"]


async def test_awaited(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    assert (device.name, device.path, device.generation) == (NAME, f"test/{NAME}", 1)
    assert device.info.backend == BACKEND
    assert {"blas", "fft", "memory", "sparse"} <= set(device.libraries)
    assert repr(device) == f"<Device test/{NAME}, ready, generation 1>"
    await device.close()
    assert repr(device) == f"<Device test/{NAME}, closed, generation 1>"


async def test_in_a_block_that_closes_it(system: ta.System) -> None:
    async with system.open_device("cpu:0") as device:
        await device.put(np.ones(2))
        assert stream_threads() == ["cpu:0 memory"]
        assert [node.name for node in system.tree().walk()] == ["test", "cpu:0", "context", "memory"]
    assert [node.name for node in system.tree().walk()] == ["test"]
    with pytest.raises(ta.DeviceLostError, match="the device is closed"):
        await device.put(np.ones(2))


async def test_a_device_is_a_block_too(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    async with device as same:
        assert same is device
    with pytest.raises(ta.DeviceLostError):
        await device.zeros(1)


async def test_settings_of_the_environment(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "cpu:0")
    async with system.open_device() as device:
        assert device.name == "cpu:0"
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "abacus")
    with pytest.raises(ValueError, match=r"'abacus' \(from the environment variable TRIO_ACCEL_BACKEND\)"):
        await system.open_device()
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "")
    async with system.open_device() as device:
        assert device.name.endswith(":0")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("abacus", ValueError, r"'abacus' names no device; allowed: .*cpu, cpu:<number>"),
        ("cpu:7", ValueError, r"'cpu:7': the device does not exist; available: .*cpu:0"),
        ("cpu:x", ValueError, r"'cpu:x' names no device"),
        ("cuda", ta.NotSupportedError, r"'cuda': .+; available: cpu:0"),
        (0, TypeError, r"spec must be the name of a device such as 'cpu' or None, got 0"),
        (b"cpu", TypeError, r"spec must be the name of a device"),
    ],
)
async def test_invalid_names_are_refused(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, spec: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU, with a driver as without one
    with pytest.raises(error, match=message):
        await system.open_device(spec)
    assert system.tree().children == ()


async def test_spares_are_refused_without_workers(system: ta.System) -> None:
    with pytest.raises(ta.NotSupportedError) as caught:
        await system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline", spares=2))
    assert caught.value.message == (
        f"spares=2: spares are worker processes, and the context of {BACKEND}:0 is in this process; open it "
        "with isolation='process', or with spares=0"
    )
    assert system.tree().children == ()


async def test_spares_are_refused_if_inline_is_the_default(system: ta.System) -> None:
    with pytest.raises(ta.NotSupportedError, match=r"spares=1: .* the context of cpu:0 is in this process"):
        await system.open_device("cpu", options=ta.DeviceOptions(spares=1))
    assert system.tree().children == ()


async def test_without_worker_processes_inline_is_the_default(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    options = ta.DeviceOptions(isolation="process")
    with pytest.raises(ta.NotSupportedError, match=r"isolation='process' .*; it has 'inline'") as caught:
        await system.open_device("cpu", options=options)
    assert (caught.value.device, caught.value.backend) == ("cpu:0", "cpu")
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        assert device.generation == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"isolation": "thread"}, ValueError, "isolation must be 'process', 'inline' or None, got 'thread'"),
        ({"in_flight": 0}, ValueError, "in_flight must be an integer of at least 1, got 0"),
        ({"in_flight": True}, ValueError, "in_flight must be an integer"),
        ({"in_flight": 1.5}, ValueError, "in_flight must be an integer"),
        ({"cancel_grace": -1}, ValueError, "cancel_grace must be seconds of at least 0, got -1"),
        ({"cancel_grace": float("nan")}, ValueError, "cancel_grace must be seconds"),
        ({"cancel_grace": "5"}, ValueError, "cancel_grace must be seconds"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be an integer of at least 1, got 0"),
        ({"intensity": 3}, TypeError, "intensity must be an Intensity or None, got 3"),
        ({"backoff": 0.1}, TypeError, "backoff must be a Backoff or None, got 0.1"),
        ({"heartbeat_timeout": None}, ValueError, "heartbeat_timeout must be seconds above 0, got None"),
        ({"stuck_after": 0}, ValueError, "stuck_after must be seconds above 0 or None, got 0"),
        ({"spares": -1}, ValueError, "spares must be an integer of at least 0, got -1"),
        (
            {"spares": 17},
            ValueError,
            (
                "spares must be from 0 to 16, got 17: each is a process with a context of its own, which "
                "takes memory of the device while it stands ready; one or two bridge"
            ),
        ),
        ({"completion": "fast"}, TypeError, "completion must be a completion strategy .*, got 'fast'"),
    ],
)
def test_options_are_checked_when_they_are_made(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"DeviceOptions: {message}"):
        ta.DeviceOptions(**options)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_subclass_may_ask_in_its_own_way(
    system: ta.System, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(OpenDevice):
        asked = 0

        async def ask(self, operation: Any, /) -> Any:
            type(self).asked += 1
            return await super().ask(operation)

    monkeypatch.setattr("trio_accel.devices.front._system.OpenDevice", Counting)
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation=isolation)) as device:
        ref = await device.put(np.ones(3))
        np.testing.assert_array_equal(await ref.to_host(), [1, 1, 1])
        assert Counting.asked == 2


async def test_two_devices_are_apart(system: ta.System, isolation: Isolation) -> None:
    async with (
        system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as first,
        system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as second,
    ):
        assert (first.path, second.path) == (f"test/{NAME}", f"test/{NAME}#2")
        x, y = await first.put(np.ones((2, 2))), await second.put(np.ones((2, 2)))
        with pytest.raises(
            ValueError, match=rf"b is on test/{NAME}#2, this runs on test/{NAME}; copy it there"
        ):
            await ta.linalg.matmul(x, y)
        moved = await second.put(await x.to_host())
        np.testing.assert_array_equal(
            await (await ta.linalg.matmul(moved, y)).to_host(), np.full((2, 2), 2.0)
        )
        assert (await first.statistics()).memory.used == 32
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as third:
        assert third.path == f"test/{NAME}"


async def test_a_device_with_a_name_has_it_in_paths_and_figures(
    system: ta.System, isolation: Isolation, recwarn: pytest.WarningsRecorder
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with (
        system.open_device(BACKEND, options=options, name="left") as left,
        system.open_device(BACKEND, options=options, name="right") as right,
    ):
        assert not recwarn.list
        assert (left.path, right.path) == ("test/left", "test/right")
        assert left.name == right.name == NAME
        x, y = await left.put(np.ones((2, 2))), await right.put(np.ones((2, 2)))
        with pytest.raises(ValueError, match="b is on test/right, this runs on test/left; copy it there"):
            await ta.linalg.matmul(x, y)
        with ta.telemetry.record(system) as recorder:
            assert [row.path for row in recorder.snapshot().devices] == ["test/left", "test/right"]
        with pytest.raises(ValueError, match="name='left' is taken: there is test/left already"):
            await system.open_device(BACKEND, options=options, name="left")
        with pytest.warns(RuntimeWarning, match=f"{NAME} is open already, as test/left"):
            async with system.open_device(BACKEND, options=options) as third:
                assert third.path == f"test/{NAME}"
    async with system.open_device(BACKEND, options=options, name="left") as again:
        assert again.path == "test/left"


@pytest.mark.parametrize("name", ["", "a/b", 3])
async def test_a_bad_name_is_refused(system: ta.System, name: Any) -> None:
    with pytest.raises(ValueError, match="open_device: name must be a non-empty string"):
        await system.open_device(BACKEND, name=name)


async def test_several_opened_at_once(system: ta.System, isolation: Isolation) -> None:
    devices: list[ta.Device] = []

    async def open_one() -> None:
        devices.append(await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(open_one)
    assert sorted(device.path for device in devices) == [f"test/{NAME}", f"test/{NAME}#2", f"test/{NAME}#3"]


async def test_closing_finishes_the_work_in_flight(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    device = await system.open_device()
    x = await device.put(np.eye(2))
    await ta.linalg.matmul(x, x)
    backend.device.is_held = True
    results: list[ta.AccelRef] = []

    async def ask() -> None:
        results.append(await ta.linalg.matmul(x, x))

    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    nursery.start_soon(device.close)
    await wait_all_tasks_blocked()
    assert not results
    assert not backend.device.is_closed
    backend.device.release()
    await wait_all_tasks_blocked()
    assert len(results) == 1
    assert backend.device.is_closed


async def test_requests_queued_at_the_closing_get_an_error(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    device = await system.open_device(options=ta.DeviceOptions(in_flight=1))
    x = await device.put(np.eye(2))
    await ta.linalg.matmul(x, x)
    backend.device.is_held = True
    outcomes: list[object] = []

    async def ask() -> None:
        try:
            outcomes.append(await ta.linalg.matmul(x, x))
        except ta.DeviceLostError as error:
            outcomes.append(error)

    for _ in range(4):
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
    nursery.start_soon(device.close)
    await wait_all_tasks_blocked()
    nursery.start_soon(ask)  # while it closes
    await wait_all_tasks_blocked()
    assert not outcomes
    backend.device.release()
    await wait_all_tasks_blocked()
    kinds = [type(outcome).__name__ for outcome in outcomes]
    # One was in flight, one in the hands of the actor; the others never started.
    assert sorted(kinds) == ["AccelRef", "AccelRef", "DeviceLostError", "DeviceLostError", "DeviceLostError"]
    for outcome in outcomes:
        if isinstance(outcome, ta.DeviceLostError):
            assert "the device is closed" in str(outcome)


async def test_work_that_never_ends_is_given_up_when_the_device_closes(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    device = await system.open_device(options=ta.DeviceOptions(close_grace=0.2))
    x = await device.put(np.eye(2))
    await ta.linalg.matmul(x, x)
    backend.device.is_held = True
    outcomes: list[object] = []

    async def ask() -> None:
        try:
            outcomes.append(await ta.linalg.matmul(x, x))
        except ta.DeviceLostError as error:
            outcomes.append(error)

    nursery.start_soon(ask)
    await trio.sleep(0.01)
    start = trio.current_time()
    await device.close()
    await wait_all_tasks_blocked()
    assert trio.current_time() - start <= 0.3  # its grace
    assert [type(outcome) for outcome in outcomes] == [ta.DeviceLostError]
    assert "closed while this operation was in flight" in str(outcomes[0])
    assert "linalg.matmul" in str(outcomes[0])
    assert backend.device.is_closed


@pytest.mark.parametrize("ends", [True, False])
async def test_an_unused_library_is_closed(system: ta.System, backend: ManualBackend, ends: bool) -> None:
    device = await system.open_device(options=ta.DeviceOptions(close_grace=0.1, cancel_grace=0.01))
    x = await device.put(np.eye(2))
    # The library is open, so the next ask is in flight within its time.
    await ta.linalg.matmul(x, x)
    # Held by a fault until the end of the device, and left by its caller.
    ta.testing.inject_fault(device, ta.linalg.Matmul, delay=60)
    with trio.move_on_after(0.05):
        await ta.linalg.matmul(x, x)
    backend.device.is_held = not ends
    await device.close()
    (blas,) = (library for library in backend.device.opened if library.name == "blas")
    assert blas.is_closed == ends


async def test_closing_twice_and_at_once(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.close)
        nursery.start_soon(device.close)
    await device.close()
    assert devices(system) == []


async def test_every_use_after_the_end_is_an_error(system: ta.System, isolation: Isolation) -> None:
    device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    x = await device.put(np.ones(2))
    await device.close()
    for use in (
        x.to_host,
        device.synchronize,
        device.statistics,
        lambda: device.zeros(1),
        lambda: ta.linalg.scal(2.0, x),
    ):
        with pytest.raises(ta.DeviceLostError, match="the device is closed") as caught:
            await use()
        assert caught.value.device == NAME
    with pytest.raises(ta.DeviceLostError):
        _ = device.libraries
    x.release()
    assert "released" in repr(x)


async def test_a_system_that_ends_closes_its_devices(isolation: Isolation) -> None:
    async with ta.open_system("test") as system:
        device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
        await device.put(np.ones(2))
        other = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
    for ended in (device, other):
        with pytest.raises(ta.DeviceLostError, match="the device is closed"):
            await ended.zeros(1)
    assert stream_threads() == []


async def test_a_body_that_fails_closes_them_too(isolation: Isolation) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="mine")):
        async with (
            ta.open_system("test") as system,
            system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device,
        ):
            await device.put(np.ones(2))
            raise KeyError("mine")
    assert stream_threads() == []


async def test_a_cancelled_opening_leaves_nothing(system: ta.System, backend: ManualBackend) -> None:
    backend.may_open = trio.Event()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                await wait_all_tasks_blocked()
                scope.cancel()
                backend.may_open.set()

            nursery.start_soon(cancel)
            await system.open_device()
    assert scope.cancelled_caught
    assert [device.is_closed for device in backend.devices] == [True]
    assert system.tree().children == ()


async def test_opening_that_fails_leaves_nothing(system: ta.System, backend: ManualBackend) -> None:
    backend.refuse_open = ta.DriverError("no driver", code=35)
    with pytest.raises(ta.DriverError, match="no driver"):
        await system.open_device()
    backend.refuse_open = None
    backend.refuse_library = ta.NotSupportedError("no memory library", backend="manual")
    with pytest.raises(ta.NotSupportedError, match="no memory library"):
        await system.open_device()
    assert [device.is_closed for device in backend.devices] == [True]
    assert system.tree().children == ()
    backend.refuse_library = None
    async with system.open_device() as device:
        assert await (await device.put(1.0)).item() == 1.0


async def test_a_real_opening_is_cancelled(system: ta.System, isolation: Isolation) -> None:
    for delay in range(6):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel(delay: int, scope: trio.CancelScope) -> None:
                    for _ in range(delay):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel, delay, scope)
                device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
                await device.close()
        assert devices(system) == []


@isolated
async def test_an_opening_of_a_worker_is_cancelled_at_any_moment(
    system: ta.System, isolation: Isolation
) -> None:
    for milliseconds in (0, 5, 20, 50, 100, 150, 200, 250, 300):
        with trio.move_on_after(milliseconds / 1000):
            async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
                await device.put(np.ones(2))
        assert devices(system) == []


async def test_the_limit_is_the_devices(system: ta.System, isolation: Isolation) -> None:
    async with system.open_device(
        "cpu", options=ta.DeviceOptions(memory_limit=64, isolation=isolation)
    ) as device:
        assert (await device.statistics()).memory.limit == 64


@pytest.mark.parametrize("in_run", [True, False], ids=["another run", "no run"])
async def test_a_device_is_not_opened_from_elsewhere(
    system: ta.System, isolation: Isolation, in_run: bool
) -> None:
    options = ta.DeviceOptions(isolation=isolation)

    async def open_it() -> None:
        with pytest.raises(RuntimeError, match="open_device: system test belongs to another thread"):
            await system.open_device(BACKEND, options=options)
        with pytest.raises(RuntimeError, match="open_device: system test belongs to another thread"):
            async with system.open_device(BACKEND, options=options):
                pass

    def step() -> None:
        with suppress(StopIteration):
            next(open_it().__await__())

    await trio.to_thread.run_sync(*((trio.run, open_it) if in_run else (step,)))
    assert system.tree().children == ()
    async with system.open_device(BACKEND, options=options) as device:
        assert (await (await device.put(np.ones(2))).to_host()).sum() == 2.0


@pytest.mark.filterwarnings("always:open_device")
async def test_a_second_context_of_a_device_is_reported_with_its_place_and_a_remedy(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(BACKEND, options=options):
        text = (
            rf"open_device: {NAME} is open already, as test/{NAME}; test/{NAME}#2 is a second context, with "
            r"memory of its own\. Share the Device object that you have, or close it first; "
        )
        with pytest.warns(RuntimeWarning, match=text) as caught:
            second = await system.open_device(BACKEND, options=options)
        with pytest.warns(RuntimeWarning, match=rf"test/{NAME}#3 is a second context") as more:
            async with system.open_device(BACKEND, options=options):
                pass
        assert [warning.filename for warning in (*caught, *more)] == [__file__, __file__]
        await second.close()


@pytest.mark.filterwarnings("error")
async def test_a_closed_device_is_opened_again_without_a_warning(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    for _ in range(2):
        async with system.open_device(BACKEND, options=options) as device:
            assert device.path == f"test/{NAME}"


@pytest.mark.filterwarnings("error")
async def test_a_device_avoids_the_name_of_an_actor(system: ta.System, isolation: Isolation) -> None:
    class Idle(ta.Actor):
        pass

    await system.spawn(Idle, name=NAME)
    await system.spawn(Idle, name="launcher")
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        # The names at the top are the program's: the first owner has them, and the device reports its own.
        assert device.path == f"test/{NAME}#2"
        assert (await (await device.put(np.ones(2))).to_host()).sum() == 2.0
        with pytest.raises(ValueError, match=rf"has a child named '{NAME}#2' already; choose another name"):
            await system.spawn(Idle, name=f"{NAME}#2")


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux")
async def test_a_worker_without_proc_is_refused_in_a_sentence(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_accel.devices.launcher._launcher._DESCRIPTORS", "/nowhere/self/fd")
    with pytest.raises(ta.NotSupportedError, match="need /proc, which is not mounted here: mount it"):
        await system.open_device("cpu", options=ta.DeviceOptions(isolation="process"))
    assert (await describe_workers()).startswith("none: worker processes need /proc")
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        assert await (await device.put(np.ones(()))).item() == 1
