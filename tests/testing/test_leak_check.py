"""The check that nothing is left behind: each kind of leak is found, and nothing else."""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, NAME
from opened_files import leaves_nothing

import trio_accel as ta
from trio_accel.testing import Leak, LeakError, leak_check

ISOLATIONS = ("inline", "process")

only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked in /proc")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaks do not go away on their own here."""
    monkeypatch.setattr("trio_accel.testing._leaks._SETTLE", 0.3)


@pytest.fixture(params=ISOLATIONS)
async def opened(request: pytest.FixtureRequest, system: ta.System) -> AsyncGenerator[ta.Device, None]:
    options = ta.DeviceOptions(isolation=request.param, close_grace=0.5)
    async with system.open_device(BACKEND, options=options) as device:
        # The memory that a simulated driver maps for its first arrays is not a leftover.
        await device.zeros(1)
        yield device


async def program(device: ta.Device) -> None:
    a = await device.put(np.eye(600))
    pending = device.submit(ta.linalg.Matmul(a, a))
    await ta.fft.fft(a)
    await (await ta.linalg.nrm2(pending.value.reshape(-1))).item()
    if device.info.backend == "cpu":
        async with a.lease() as array:
            assert array[0, 0] == 1.0


@contextmanager
def found() -> Generator[list[Leak], None, None]:
    leaks: list[Leak] = []
    with pytest.raises(LeakError) as caught:
        yield leaks
    leaks += caught.value.leaks
    assert str(caught.value) == "\n  ".join(["left behind:", *map(str, leaks)])


@contextmanager
def finds(*patterns: str) -> Generator[None, None, None]:
    with found() as leaks:
        yield
    assert len(leaks) == len(patterns), leaks
    for leak, pattern in zip(leaks, patterns, strict=True):
        assert pattern in str(leak)


async def test_a_clean_program_passes(opened: ta.Device) -> None:
    # Objects opened by a library with its first operation stay as long as the device.
    await program(opened)
    for _ in range(2):
        async with leaves_nothing():
            await program(opened)
        async with leaves_nothing(opened):
            await program(opened)


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_program_that_opens_and_closes_devices_passes(system: ta.System, isolation: Any) -> None:
    options = ta.DeviceOptions(isolation=isolation, spares=1 if isolation == "process" else 0)
    async with leaves_nothing(system), system.open_device(BACKEND, options=options) as device:
        await program(device)


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_program_with_a_system_of_its_own_passes(isolation: Any) -> None:
    async with leaves_nothing(), ta.open_system("own") as system:
        await program(await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)))


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("preload", [(), ("colorsys",)], ids=["", "preload"])
async def test_a_replaced_context_is_no_leak(
    system: ta.System, spares: int, preload: tuple[str, ...]
) -> None:
    options = ta.DeviceOptions(isolation="process", spares=spares, preload=preload)
    async with system.open_device(BACKEND, options=options) as device, leaves_nothing(device):
        await program(device)
        ta.testing.inject_fault(device, ta.linalg.Nrm2, kill=True)
        with pytest.raises(ta.ContextLostError):
            await device.ask(ta.linalg.Nrm2(np.ones(3)))
        await program(device)
        assert device.generation == 2


async def test_an_array(opened: ta.Device) -> None:
    kept = await opened.put(np.zeros(3))
    with finds(
        f"array <AccelRef float32 (5,) on {NAME}>, 20 bytes", f"memory of test/{NAME}: 1 block more, "
    ):
        async with leak_check():
            view = (await opened.put(np.ones((2, 5), np.float32)))[0]
            array = await opened.put(np.ones(3))
            array.release()
    del view
    async with leak_check(opened):
        del kept


async def test_an_array_in_a_cycle_is_no_leak(opened: ta.Device) -> None:
    async with leaves_nothing():
        cycle: list[Any] = [await opened.put(np.zeros(3))]
        cycle.append(cycle)
        del cycle


@pytest.mark.slow
async def test_memory_that_no_array_refers_to(opened: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with finds(f"memory of test/{NAME}: 1 block more, "), monkeypatch.context() as broken:
        async with leak_check():
            broken.setattr("trio_accel.devices.operations._blocks.Block.__del__", lambda block: None)
            await opened.put(np.ones(10))
            await opened.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_device(system: ta.System, isolation: Any) -> None:
    with finds(f"device test/{NAME} is open"):
        async with leak_check():
            device = await system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation))
            await program(device)


@only_linux
async def test_chunks(opened: ta.Device) -> None:
    with finds(*["chunk /memfd:trio_accel (inode "] * 3):
        async with leak_check():
            chunks: list[mmap.mmap] = []
            for _ in range(3):
                descriptor = os.memfd_create("trio_accel")
                os.ftruncate(descriptor, mmap.PAGESIZE)
                chunks.append(mmap.mmap(descriptor, mmap.PAGESIZE))
                os.close(descriptor)
    for chunk in chunks:
        chunk.close()


@contextmanager
def finds_open(*patterns: str) -> Generator[None, None, None]:
    with pytest.raises(AssertionError, match="left open: ") as caught:
        yield
    for pattern in patterns:
        assert str(caught.value).count(pattern) == patterns.count(pattern)


@only_linux
async def test_descriptors(opened: ta.Device) -> None:
    with finds_open("(pipe:[", "(pipe:["):
        async with leaves_nothing(opened):
            ends = os.pipe()
    for end in ends:
        os.close(end)
    with finds_open(f"({os.devnull})"):
        async with leaves_nothing(opened):
            null = os.open(os.devnull, os.O_RDONLY)
    os.close(null)


@only_linux
async def test_shared_memory(opened: ta.Device) -> None:
    with finds_open("/memfd:mine inode "):
        async with leaves_nothing():
            descriptor = os.memfd_create("mine")
            os.ftruncate(descriptor, mmap.PAGESIZE)
            mapped = mmap.mmap(descriptor, mmap.PAGESIZE)
            os.close(descriptor)
    mapped.close()


@only_linux
@pytest.mark.skipif(BACKEND != "cpu", reason="the host cannot address its memory")
async def test_the_memory_of_a_device_that_an_array_outlives(system: ta.System) -> None:
    kept: list[Any] = []

    async def keep(device: ta.Device) -> None:
        # It should not be kept.
        async with (await device.put(np.ones(10))).lease() as array:
            kept.append(array)

    options = ta.DeviceOptions(isolation="process")
    with finds("chunk /memfd:trio_accel (inode "):
        async with leak_check(), system.open_device(BACKEND, options=options) as device:
            await keep(device)
    kept.clear()


async def test_a_thread(opened: ta.Device) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="left alone")
    with finds("thread 'left alone'"):
        async with leak_check(opened):
            thread.start()
    go_on.set()
    thread.join()  # noqa: ASYNC200  # it has been told to end


async def test_threads_kept_by_trio_are_no_leak(opened: ta.Device) -> None:
    async with leaves_nothing(), trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(trio.to_thread.run_sync, threading.Event().wait, 0.01)


SLEEPER = "import time; time.sleep(100)"
PARENT = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {SLEEPER!r}]) as child:
    print(flush=True)
    sys.stdin.read()
    child.kill()
"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@only_linux
async def test_processes_and_their_children(opened: ta.Device) -> None:
    with found() as leaks:
        async with leak_check(opened):
            parent = start(PARENT)
            assert parent.stdout is not None
            parent.stdout.readline()
    with parent:
        child, grandchild = (leak.description for leak in leaks if leak.kind == "process")
        assert child.startswith(f"{parent.pid} ({sys.executable} -c")
        assert SLEEPER in grandchild
        assert {leak.kind for leak in leaks} == {"process"}


@only_linux
async def test_a_dead_process_that_nobody_reaped(opened: ta.Device) -> None:
    with found() as leaks:
        async with leak_check(opened):
            process = start("")
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # it ends at once
    with process:
        assert Leak("process", f"{process.pid} (dead, not reaped)") in leaks


async def test_only_the_requested_kinds(system: ta.System, opened: ta.Device) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as other:
        async with leak_check(other):
            kept = await opened.put(np.ones(3))
        async with ta.open_system("another") as another, leak_check(another):
            again = await opened.put(np.ones(3))
        with finds("array ", "memory "):
            async with leak_check(other, system):
                third = await opened.put(np.ones(3))
    del kept, again, third


async def test_ending_objects_get_a_moment(opened: ta.Device) -> None:
    async with leaves_nothing(opened):
        threading.Thread(target=threading.Event().wait, args=(0.05,), name="ending").start()


async def test_a_virtual_clock_does_not_disturb(
    autojump_clock: trio.testing.MockClock, system: ta.System
) -> None:
    async with leak_check(system):
        threading.Thread(target=threading.Event().wait, args=(0.05,), name="ending").start()


async def test_an_error_of_the_body_is_raised_without_a_check(opened: ta.Device) -> None:
    kept: list[ta.AccelRef] = []

    async def fail() -> None:
        async with leak_check(opened):
            kept.append(await opened.put(np.ones(3)))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()


async def test_scope_must_be_devices_and_systems() -> None:
    with pytest.raises(TypeError, match="leak_check: scope must be devices and systems, got 'cpu'"):
        async with leak_check("cpu"):  # type: ignore[arg-type]
            pass


def test_the_error_lists_leftovers_and_can_be_copied() -> None:
    leaks = [Leak("thread", "'a'"), Leak("process", "3 (sleep 1)")]
    error = LeakError(leaks)
    assert str(error) == "left behind:\n  thread 'a'\n  process 3 (sleep 1)"
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(again), again.leaks) == (str(error), tuple(leaks))


async def test_memory_of_chains_is_not_a_leak(device: ta.Device) -> None:
    async with leaves_nothing(device):
        x = await device.put(np.ones(4))
        for _ in range(4):
            await ((x + 1.0) * 2.0).to_host()
        del x
