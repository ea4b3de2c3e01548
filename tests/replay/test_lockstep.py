"""Two devices in lockstep: the first operation that differs is named, and the first step of a chain."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from shutil import which
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from planted import FAULT, turned
from random_work import recorded
from replayed_programs import Drawing, Scaler

import trio_accel as ta
from trio_accel import replay

pytestmark = pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")


@asynccontextmanager
async def two(system: ta.System) -> AsyncGenerator[tuple[ta.Device, ta.Device]]:
    async with (
        system.open_device(BACKEND, options=INLINE, name="one") as one,
        system.open_device(BACKEND, options=INLINE, name="two") as other,
    ):
        yield one, other


async def test_one_device_opened_twice(system: ta.System) -> None:
    journal, read, _ = await recorded(system, "inline", 1, 60)
    async with two(system) as devices:
        report = await replay.lockstep(journal, *devices, programs=True)
        assert report.is_same, report
        assert report.compared > len(read)
        assert str(report).startswith("no difference")
        for device in devices:
            await device.synchronize()
        whole = await replay.lockstep(journal, *devices, programs=True, steps=False)
        assert whole.is_same, whole
        assert whole.operations == report.operations
        assert whole.compared < report.compared
        with pytest.raises(ValueError, match="the devices must be two; open the device twice"):
            await replay.lockstep(journal, devices[0], devices[0])


async def test_randomness_of_the_system_is_named(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND, options=INLINE) as device, replay.record(device, journal):
        x = await device.put(np.ones((4, 4)))
        async with (
            ta.open_program(device, Drawing) as drawing,
            ta.open_program(device, Scaler, x) as scaler,
        ):
            for _ in range(3):
                drawn = await drawing.ask(Drawing.noise, 4)
                await (await scaler.ask(Scaler.scaled, drawn)).to_host()
    async with two(system) as devices:
        report = await replay.lockstep(journal, *devices, programs=True, max_differences=99)
        assert len(report.differences) >= 3
        # The call, and the copy of the result that the program has kept.
        noise = "replayed_programs.Drawing.noise"
        assert {one.operation for one in report.differences} == {noise, f"{noise}.fetch"}
        assert not report.failures
        # Each result of the first device is also the second one's, unless differences are inherited.
        inherited = await replay.lockstep(
            journal, *devices, programs=True, max_differences=99, isolated=False
        )
        assert len(inherited.differences) > len(report.differences)


JOURNALS, ROUNDS = 5, 5
Places = list[tuple[replay.RecordingJournal, int, int]]


async def planted_work(device: ta.Device) -> Places:
    """Record operations, and chains in which `relu` hides negative numbers.

    Returns:
        Journal, operation and round of a chain (0 outside of chains) of each place for a fault.
    """
    places: Places = []
    x = await device.put(np.linspace(0.5, 1.5, 12).reshape(3, 4))
    value: Any = x
    for _ in range(JOURNALS):
        journal = replay.MemoryJournal()
        async with replay.record(device, journal):
            for turn in range(ROUNDS):
                value = await turned(value)
                places.append((journal, 1 + turn, 0))
    for _ in range(JOURNALS):
        journal = replay.MemoryJournal()
        value = x
        for _ in range(ROUNDS):
            value = ta.nn.relu(turned(value)) + x
        async with replay.record(device, journal):
            await value.to_host()
        places += [(journal, 1, 1 + turn) for turn in range(ROUNDS)]
    return places


@pytest.mark.skipif(BACKEND != "cpu", reason="the kernel is the CPU's")
async def test_one_unit_in_the_last_place(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        places = await planted_work(device)
    assert len(places) == 50
    async with two(system) as devices:
        for journal, _, _ in places[::ROUNDS]:
            FAULT.plant(0)
            report = await replay.lockstep(journal, *devices)
            assert report.is_same, report
            assert FAULT.count == ROUNDS
        for number, (journal, operation, turn) in enumerate(places):
            FAULT.plant(turn or operation, element := number % 12)
            report = await replay.lockstep(journal, *devices, max_differences=99)
            # With each operation judged alone, it is the only one.
            [found] = report.differences
            assert (found.number, found.elements, found.size) == (operation, 1, 12)
            assert (found.ulps, found.index) == (1, (element // 4, element % 4))
            assert str(report).startswith(f"first difference: {found}")
            assert bool(found.step) == bool(turn)
            if turn:
                # The last chain is recorded with neighbours joined.
                steps = 2 if "of 10, " in str(found) else 3
                assert found.step == 1 + steps * (turn - 1)
                assert f"step {found.step} of {steps * ROUNDS}, planted.Turned: 1 of 12" in str(found)
                FAULT.plant(turn, element)
                # A comparison of whole chains hides it.
                whole = await replay.lockstep(journal, *devices, steps=False)
                assert whole.is_same, whole
                assert FAULT.count == ROUNDS


@pytest.mark.skipif(BACKEND != "cpu", reason="the kernel is the CPU's")
@pytest.mark.parametrize("contents", [True, False])
async def test_marks_inherit_differences(system: ta.System, contents: bool) -> None:
    journal = replay.MemoryJournal()
    async with (
        system.open_device(BACKEND, options=INLINE) as device,
        replay.record(device, journal, contents=contents) as recording,
    ):
        x = await device.put(np.linspace(0.5, 1.5, 12).reshape(3, 4))
        y = await turned(x)
        await recording.mark("turned", x=x, part=y[1:, ::2])
    async with two(system) as devices:
        FAULT.plant(1, 6)
        report = await replay.lockstep(journal, *devices, max_differences=99)
        assert [each.operation for each in report.differences] == ["planted.Turned"]
        marks = report.compared
        FAULT.plant(1, 6)
        report = await replay.lockstep(journal, *devices, max_differences=99, isolated=False)
    assert report.compared == marks == 4
    assert (
        str(report.differences[-1])
        == "mark 'turned': 1 of 4 elements differ in part, first at [0, 1], by 1 ulp at most"
    )
    assert len(report.differences) == 2


@pytest.mark.skipif(BACKEND != "cpu" or which("cc") is None, reason="it compiles for the CPU")
async def test_compiled_code_differs_in_named_steps(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND, options=INLINE) as device, replay.record(device, journal):
        x = await device.put(np.random.default_rng(0).standard_normal((9, 8)))
        w = await device.put(np.random.default_rng(1).standard_normal((8, 8)))
        for _ in range(3):
            await ta.arrays.softmax(ta.nn.relu(x @ w) @ w, axis=1).to_host()
    async with AsyncExitStack() as stack:
        devices: list[ta.Device] = []
        for way in ("never", "always"):
            options = ta.DeviceOptions(isolation="process")
            monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", way)
            devices.append(
                await stack.enter_async_context(system.open_device(BACKEND, options=options, name=way))
            )
        report = await replay.lockstep(journal, devices[0], devices[1], max_differences=9)
    assert report.differences
    assert all(one.step and one.ulps is not None and one.ulps < 9 for one in report.differences)
    named = {(one.step, one.operation.rpartition(", ")[2]) for one in report.differences}
    assert {operation for _, operation in named} <= {"arrays.softmax"}, named


async def test_failures_and_skips_in_lockstep(system: ta.System) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND, options=INLINE) as device, replay.record(device, journal):
        singular = await device.put(np.zeros((3, 3)))
        with pytest.raises(ta.LinAlgError):
            await ta.linalg.solve(singular, singular)
        with pytest.raises(ta.LinAlgError):
            await (ta.linalg.solve(singular, singular) + 1.0).to_host()
        ta.testing.inject_fault(device, ta.linalg.Scal, fail=ta.LibraryError("no", library="blas", code="x"))
        with pytest.raises(ta.LibraryError):
            await ta.linalg.scal(2.0, singular)
    async with two(system) as devices:
        report = await replay.lockstep(journal, *devices)
        assert not report.differences
        [failure] = report.failures
        assert (failure.operation, failure.replayed) == ("linalg.Scal", "")
        assert "linalg.Scal: recorded LibraryError: no" in str(report)
        assert "here no error" in str(report)
