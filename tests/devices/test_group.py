"""Groups of devices: opened and closed as one, and their placement of work while devices come and go."""

from __future__ import annotations

import logging
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.backends.cpu import CpuBackend
from trio_accel.devices import DeviceActor, DeviceLoad, Fill

LIMIT = 1 << 20
CPU = pytest.mark.skipif(BACKEND != "cpu", reason="of the processor")
# The next context opens when the test is over.
ONCE_ONLY = ta.Backoff(initial=1000.0, base=1000.0, maximum=1000.0, jitter=0.0)


@pytest.fixture
async def three(system: ta.System, isolation: Isolation) -> AsyncGenerator[ta.devices.DeviceGroup, None]:
    """Three contexts with room for 1 MiB of arrays each."""
    options = ta.DeviceOptions(isolation=isolation, memory_limit=LIMIT)
    async with system.open_devices([BACKEND] * 3, options=options) as group:
        yield group


def numbers(group: ta.DeviceGroup, devices: Sequence[ta.Device]) -> list[int]:
    return [group.devices.index(device) for device in devices]


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # nobody tells of it
            await trio.sleep(0.005)


@asynccontextmanager
async def busy(device: ta.Device, count: int) -> AsyncGenerator[None, None]:
    """Have this many operations of a device wait for a lease of their array."""
    array = await device.zeros(4)
    async with array.lease(write=True):
        pending = [device.submit(Fill(array, 1.0)) for _ in range(count)]
        yield
    for each in pending:
        await each.wait()


async def lose(device: ta.Device) -> None:
    """Have the context of a device lost."""
    ta.testing.poison(device)
    with trio.fail_after(60):
        while device.is_ready:
            # An opening that has not begun would wait for the next context.
            with trio.move_on_after(0.2), suppress(ta.AccelError):
                await device.zeros(4)


async def test_a_group_is_one_whole_in_the_tree(system: ta.System) -> None:
    async with system.open_devices([BACKEND, f"{BACKEND}:0"], name="workers") as group:
        assert [device.path for device in group] == [
            f"{system.name}/workers/{BACKEND}:0",
            f"{system.name}/workers/{BACKEND}:0#2",
        ]
        assert (group.path, len(group), group.devices) == (f"{system.name}/workers", 2, tuple(group))
        assert system.devices == group.devices
        scope = system.tree().find(group.path)
        assert [child.actor_class for child in scope.children] == [DeviceActor.__name__] * 2
        for device in group:
            assert await (await device.put(np.arange(3.0))).to_host() == pytest.approx([0.0, 1.0, 2.0])
        opened = group.devices
    assert all(device.is_ended for device in opened)
    assert (len(group), system.devices) == (0, ())


async def test_all_devices_of_a_backend_and_of_the_machine(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = ta.list_devices()
    inline = ta.DeviceOptions(isolation="inline")
    async with system.open_devices(BACKEND, options=inline) as group:
        assert [device.info for device in group] == [info for info in infos if info.backend == BACKEND]
    async with system.open_devices(f"{BACKEND}:0", options=inline) as group:
        assert [device.name for device in group] == [f"{BACKEND}:0"]
    monkeypatch.delenv("TRIO_ACCEL_BACKEND", raising=False)
    async with system.open_devices(options=inline) as group:
        assert [device.info for device in group] == list(infos)
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "cpu")
    async with system.open_devices(options=inline) as group:
        assert [device.name for device in group] == ["cpu:0"]


async def test_a_device_open_elsewhere_is_reported(system: ta.System) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with system.open_devices([BACKEND] * 2) as group, group.open_device(BACKEND) as third:
            assert third.path == f"{group.path}/{BACKEND}:0#3"
    async with system.open_device(BACKEND) as alone:
        with pytest.warns(RuntimeWarning, match=f"{BACKEND}:0 is open already, as {alone.path}; ") as caught:
            async with system.open_devices([BACKEND]):
                pass
        assert {warning.filename for warning in caught} == {__file__}


async def test_free_memory_is_that_of_the_limit_and_of_the_hardware(three: ta.DeviceGroup) -> None:
    first, second, third = three
    arrays = [await first.zeros(1000), await third.zeros(2000)]
    assert [load.free for load in three.loads()] == [LIMIT - 8000, LIMIT, LIMIT - 16000]
    # Work is sent to the device with the most free memory, and work too large for all devices is refused.
    assert three.place() is second
    assert three.place(memory=LIMIT) is second
    keep = await second.zeros(LIMIT, "uint8")
    assert three.place(memory=LIMIT - 8000) is first
    assert three.place(memory=LIMIT - 8000, exclude=[second]) is first
    with pytest.raises(ta.PlacementError) as caught:
        three.place(memory=LIMIT - 7999)
    assert caught.value.reasons == {
        first.path: f"has {LIMIT - 8000} bytes free, and {LIMIT - 7999} are needed",
        second.path: f"has 0 bytes free, and {LIMIT - 7999} are needed",
        third.path: f"has {LIMIT - 16000} bytes free, and {LIMIT - 7999} are needed",
    }
    # The device counts it in the same way, and fitting arrays are there.
    arrays.append(await first.zeros(LIMIT - 8000, "uint8"))
    keep.release()
    assert three.place(memory=LIMIT) is second
    del arrays[:]
    await until(lambda: [load.free for load in three.loads()] == [LIMIT] * 3)


async def test_contexts_on_one_hardware_share_its_memory(system: ta.System) -> None:
    async with system.open_devices([BACKEND] * 2) as group:
        total = group.devices[0].info.total_memory
        array = await group.devices[0].zeros(1 << 16)
        assert [load.free for load in group.loads()] == [total - array.nbytes] * 2


async def test_work_is_sent_to_the_device_with_the_least_in_flight(
    three: ta.DeviceGroup, isolation: Isolation
) -> None:
    if isolation == "process" and BACKEND != "cpu":
        pytest.skip("arrays of GPUs are leased in their own process alone")
    first, second, third = three
    big = await second.zeros(1000)
    async with busy(first, 2), busy(second, 1), busy(third, 3):
        assert [load.in_flight for load in three.loads()] == [2, 1, 3]
        # That counts more than free memory.
        assert three.place() is second
        assert three.place(exclude=[second]) is first
        assert three.place(owner_of=big) is second
    await until(lambda: not any(load.in_flight for load in three.loads()))


async def test_equal_devices_take_turns(three: ta.DeviceGroup) -> None:
    assert numbers(three, [three.place() for _ in range(7)]) == [0, 1, 2, 0, 1, 2, 0]
    assert [load.turn for load in three.loads()] == [7, 5, 6]


async def test_hints_that_nothing_meets_are_refused(three: ta.DeviceGroup) -> None:
    first, second, third = three
    array = await second.zeros(1)
    assert three.place(owner_of=array, backend=BACKEND, product=first.info.description.upper()) is second
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"backend": "toaster"}, [f"is of backend '{BACKEND}', and not 'toaster'"] * 3),
        ({"product": "toaster"}, [f"is a {first.info.description!r}, and no 'toaster'"] * 3),
        ({"exclude": three.devices}, ["is excluded"] * 3),
        (
            {"owner_of": array, "exclude": {second}},
            ["does not have the array", "is excluded", "does not have the array"],
        ),
    ]
    for hints, reasons in refused:
        with pytest.raises(ta.PlacementError) as caught:
            three.place(**hints)
        assert list(caught.value.reasons.values()) == reasons
        for path, why in zip([first.path, second.path, third.path], reasons, strict=True):
            assert f"{path} {why}" in str(caught.value)
        assert caught.value.message.startswith(
            f"place: no device of the group {three.path} meets the hints: "
        )


async def test_a_policy_of_your_own(system: ta.System) -> None:
    seen: list[Sequence[DeviceLoad]] = []

    def last(loads: Sequence[DeviceLoad]) -> DeviceLoad:
        seen.append(loads)
        return loads[-1]

    async with system.open_devices([BACKEND] * 3, policy=last) as group:
        first, second, third = group
        assert group.place() is third
        assert group.place(exclude=[third]) is second
        assert [[load.device for load in loads] for loads in seen] == [
            [first, second, third],
            [first, second],
        ]
        assert [load.name for load in seen[0]] == [f"{BACKEND}:0", f"{BACKEND}:0#2", f"{BACKEND}:0#3"]
        # A key chooses its device on its own.
        assert {group.place(key="a") for _ in range(3)} <= set(group)
        assert len(seen) == 2

    def bad(loads: Sequence[DeviceLoad]) -> Any:
        return loads[0].device

    async with system.open_devices([BACKEND], policy=bad) as group:
        with pytest.raises(
            TypeError, match="place: the policy must return one of the loads that it is given"
        ):
            group.place()


async def test_a_device_without_a_context_is_left_out_while_another_has_one(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation, backoff=ONCE_ONLY, intensity=ta.Intensity(9))
    async with system.open_devices([BACKEND] * 3, options=options) as group:
        first, second, third = group
        keys = {key: group.place(key=key) for key in range(60)}
        assert set(keys.values()) == {first, second, third}
        array = await second.zeros(4)
        await lose(second)
        assert [load.is_available for load in group.loads()] == [True, False, True]
        assert set(group) == {first, second, third}
        assert {group.place() for _ in range(6)} == {first, third}
        # Objects cached for a key are there, and come back with the context.
        assert {key: group.place(key=key) for key in keys} == keys
        if isolation == "process":
            assert group.place(owner_of=array) is second
        # If all lack one, work waits at one of them.
        await lose(first)
        await lose(third)
        assert {group.place() for _ in range(6)} == {first, second, third}


async def test_keys_of_a_given_up_device_move_and_come_back(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(0))
    async with system.open_devices([BACKEND] * 3, options=options) as group:
        first, second, third = group
        keys = {key: group.place(key=key).path for key in range(90)}
        array = await second.put(np.arange(5.0))
        ta.testing.inject_fault(second, Fill, kill=True)
        with pytest.raises(ta.ContextLostError):
            await (await second.zeros(4)).fill(1.0)
        await until(lambda: second.is_ended)
        assert group.devices == (first, third)
        assert (len(group), [load.device for load in group.loads()]) == (2, [first, third])
        moved = {key: group.place(key=key).path for key in keys}
        assert all(moved[key] == path for key, path in keys.items() if path != second.path)
        assert {moved[key] for key, path in keys.items() if path == second.path} == {first.path, third.path}
        with pytest.raises(ta.PlacementError, match=f"{second.path} was given up; "):
            group.place(exclude=[first, third])
        # Another one takes its place, with its arrays, and gets its keys back.
        heir = await group.open_device(adopt=second)
        assert (heir.path, heir.options) == (second.path, second.options)
        assert {key: group.place(key=key).path for key in keys} == keys
        assert group.place(owner_of=array) is heir
        assert await array.to_host() == pytest.approx(np.arange(5.0))
        await first.close()
        with pytest.raises(ta.PlacementError, match=f"{first.path} was closed"):
            group.place(exclude=group.devices)


async def test_a_group_knows_a_given_up_device_while_its_workers_are_ended(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(0))
    async with system.open_devices([BACKEND] * 2, options=options) as group:
        first, second = group
        opened: Any = second
        pool = opened.dispatch._pool
        ended, is_held = pool.close, trio.Event()

        async def close_later() -> None:
            await is_held.wait()
            await ended()

        monkeypatch.setattr(type(pool), "close", lambda _self: close_later())
        ta.testing.inject_fault(second, Fill, kill=True)
        with pytest.raises(ta.ContextLostError):
            await (await second.zeros(4)).fill(1.0)
        await until(lambda: second.is_ended)
        monkeypatch.undo()
        try:
            with pytest.raises(ta.PlacementError, match=f"{second.path} was given up"):
                group.place(exclude=[first])
        finally:
            is_held.set()


async def test_four_workers_share_the_work(system: ta.System) -> None:
    """All requests are answered though one worker is killed in between; it gets work again."""
    options = ta.DeviceOptions(isolation="process", retry=3, retry_suspects=True)
    rng = np.random.default_rng(3)
    hosts = [rng.standard_normal((16, 16)) for _ in range(80)]
    results: dict[int, Any] = {}
    async with system.open_devices([BACKEND] * 4, options=options) as group:

        async def work(number: int) -> None:
            device = group.place(memory=3 * hosts[number].nbytes)
            product = await device.ask(ta.linalg.Matmul(hosts[number], hosts[number]))
            results[number] = await product.to_host()
            counts[group.devices.index(device)] += 1

        counts = [0] * 4
        ta.testing.inject_fault(group.devices[1], ta.linalg.Matmul, kill=True)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(len(hosts)):
                    nursery.start_soon(work, number)
        assert min(counts) > 0
        assert [device.losses for device in group] == [0, 1, 0, 0]
    for number, host in enumerate(hosts):
        np.testing.assert_allclose(results[number], host @ host, rtol=1e-12, atol=1e-12)


async def test_if_one_cannot_be_opened_none_is(system: ta.System, isolation: Isolation) -> None:
    for specs, error, match in (
        ([BACKEND, f"{BACKEND}:99"], ValueError, f"'{BACKEND}:99': the device does not exist"),
        ([BACKEND, "toaster"], ValueError, "'toaster' names no device"),
        ("toaster", ValueError, "'toaster' names no device"),
    ):
        with pytest.raises(error, match=match):
            async with system.open_devices(specs, options=ta.DeviceOptions(isolation=isolation)):
                raise AssertionError
    options = ta.DeviceOptions(isolation=isolation, libraries=("no_module:NoActor",))
    with pytest.raises(Exception, match="no_module") as caught:
        async with system.open_devices([BACKEND] * 2, options=options):
            raise AssertionError
    assert not isinstance(caught.value, ExceptionGroup)
    assert system.devices == ()
    assert not [actor for actor in system.tree().walk() if actor.actor_class in ("supervisor", "DeviceActor")]
    # And all is as before.
    async with system.open_devices([BACKEND]) as group:
        assert group.devices[0].name == f"{BACKEND}:0"


@CPU
async def test_some_unnamed_devices_may_be_left_out(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (info,) = CpuBackend().list_devices()
    infos = tuple(attrs.evolve(info, index=index) for index in range(3))
    refused = {1}
    open_device = CpuBackend.open_device

    def list_all(self: CpuBackend) -> tuple[ta.DeviceInfo, ...]:
        return infos

    def open_some(self: CpuBackend, index: int, **options: Any) -> Any:
        if index in refused:
            raise ta.NotSupportedError(f"device {index} is another process's")
        return open_device(self, index, **options)

    monkeypatch.setattr(CpuBackend, "list_devices", list_all)
    monkeypatch.setattr(CpuBackend, "open_device", open_some)
    with caplog.at_level(logging.WARNING, "trio_accel.devices"):
        async with system.open_devices("cpu") as group:
            assert [device.name for device in group] == ["cpu:0", "cpu:2"]
    assert "cpu:1 was found, but cannot be opened: device 1 is another process's" in caplog.text
    with pytest.raises(ta.NotSupportedError, match="device 1 is another process's"):
        async with system.open_devices(["cpu:0", "cpu:1"]):
            raise AssertionError
    refused |= {0, 2}
    with pytest.raises(ta.NotSupportedError, match="device 0 is another process's"):
        async with system.open_devices("cpu"):
            raise AssertionError
    assert system.devices == ()


async def test_devices_end_when_the_body_fails_or_is_cancelled(
    system: ta.System, isolation: Isolation
) -> None:
    options = ta.DeviceOptions(isolation=isolation)
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="of the body"), flatten_subgroups=True):
        async with system.open_devices([BACKEND] * 2, options=options):
            raise OSError("of the body")
    assert system.devices == ()
    for seconds in (0.0, 0.01, 0.1):
        with trio.move_on_after(seconds):
            async with system.open_devices([BACKEND] * 2, options=options):
                await trio.sleep_forever()
        assert system.devices == ()
        assert len(system.opening) == 0


async def test_bad_input(system: ta.System) -> None:
    bad: list[Any] = [5, ["cpu", 5], [], "", b"cpu", 3.0]
    for specs, match in (
        (bad[0], "specs must be .*, got 5"),
        (bad[1], r"specs must be .*, got \['cpu', 5\]"),
        (bad[4], "specs must be .*, got b'cpu'"),
    ):
        with pytest.raises(TypeError, match=f"open_devices: {match}"):
            async with system.open_devices(specs):
                raise AssertionError
    for specs in (bad[2], bad[3]):
        with pytest.raises(ValueError, match="open_devices: specs must name at least one device"):
            async with system.open_devices(specs):
                raise AssertionError
    for arguments, match in (
        ({"options": bad[0]}, "options must be DeviceOptions, got 5"),
        ({"policy": bad[0]}, "policy must be a function of loads, got 5"),
    ):
        with pytest.raises(TypeError, match=f"open_devices: {match}"):
            async with system.open_devices(BACKEND, **arguments):
                raise AssertionError
    with pytest.raises(TypeError, match=r"async with system\.open_devices"):
        await system.open_devices(BACKEND)  # type: ignore[misc]
    async with system.open_devices([BACKEND]) as group:
        with pytest.raises(ValueError, match="has a child named 'devices' already"):
            async with system.open_devices([BACKEND]):
                raise AssertionError
        array = await group.devices[0].zeros(1)
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"backend": bad[0]}, TypeError, "backend must be a str or None, got 5"),
            ({"product": bad[0]}, TypeError, "product must be a str or None, got 5"),
            ({"memory": bad[5]}, TypeError, r"memory must be bytes, an integer, got 3\.0"),
            ({"memory": True}, TypeError, "memory must be bytes, an integer, got True"),
            ({"memory": -1}, ValueError, "memory must be at least 0, got -1"),
            ({"exclude": group.devices[0]}, TypeError, "exclude must be open devices"),
            ({"exclude": ["cpu:0"]}, TypeError, r"exclude must be open devices, got \['cpu:0'\]"),
            ({"owner_of": np.ones(1)}, TypeError, "owner_of must be an array of a device"),
        ]
        for hints, error, match in refused:
            with pytest.raises(error, match=f"place: {match}"):
                group.place(**hints)
        with pytest.raises(TypeError, match=r"a key must be a str, bytes or an int, got 3\.0"):
            group.place(key=bad[5])
        with pytest.raises(TypeError, match="did you mean 'memory'"):
            group.place(memroy=1)  # type: ignore[call-arg]
        array.release()
        with pytest.raises(ta.StaleRefError, match="place: owner_of: its memory was released"):
            group.place(owner_of=array)
        with pytest.raises(TypeError, match="open_device: give options in one"):
            group.open_device(BACKEND, retry=1)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="another thread"):
            await trio.to_thread.run_sync(group.place)
