"""Ctrl-C at any line of a device: the program ends, with that and nothing else, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, SEARCHED
from interrupter import interrupt_everywhere

import trio_accel as ta

PARTS = ("actors", "backends", "devices", "linalg")


async def program() -> None:
    """Two tasks that do everything, and one cancelled task."""
    async with (
        ta.open_system("s") as system,
        system.open_device(
            "cpu", options=ta.DeviceOptions(isolation="inline", cancel_grace=0.5, close_grace=0.5)
        ) as device,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_work, device)
        nursery.start_soon(_work, device)
        nursery.start_soon(_give_up, device)


async def _work(device: ta.Device) -> None:
    ref = await device.put(np.eye(8))
    out = await ta.linalg.matmul(ref, ref)
    await device.submit(ta.linalg.Scal(2.0, out)).wait()
    await out.to_host()
    async with out.lease(write=True) as array:
        array[0, 0] = 2.0
    await device.statistics()
    await device.synchronize()
    with pytest.raises(ValueError, match="last axis"):
        await ta.linalg.matmul(ref, await device.zeros((3, 3)))
    copy = await ref.copy()
    copy.release()


async def _give_up(device: ta.Device) -> None:
    with trio.move_on_after(0.001):
        while True:
            await ta.linalg.nrm2(await device.put(np.ones(1 << 16)))


@pytest.mark.slow
@pytest.mark.timeout(180, method="thread")  # who hangs in a lock hears of no other
@pytest.mark.skipif(BACKEND != "cpu", reason="no driver is to be met in the middle")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line(caplog: pytest.LogCaptureFixture) -> None:
    interrupt_everywhere(program, PARTS, caplog, step=13, least=5000)


async def program_by_mailbox() -> None:
    """Two tasks with operations sent to the library's handler, because somebody observes messages."""
    async with (
        ta.open_system("s") as system,
        system.open_device(
            "cpu", options=ta.DeviceOptions(isolation="inline", cancel_grace=0.5, close_grace=0.5)
        ) as device,
    ):
        ref = await device.put(np.eye(8))
        with system.subscribe(lambda _: None):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(ta.linalg.matmul, ref, ref)


@pytest.mark.slow
@pytest.mark.timeout(180, method="thread")  # who hangs in a lock hears of no other
@pytest.mark.skipif(BACKEND != "cpu", reason="no driver is to be met in the middle")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_every_line_of_a_launch(caplog: pytest.LogCaptureFixture) -> None:
    """The stream's lock among them: whoever closes the device would wait for it."""
    parts = ("backends/cpu/runtime/_stream.py", "devices/engine/_engine.py", "devices/engine/_library.py")
    interrupt_everywhere(program_by_mailbox, parts, caplog, step=1, least=200)


async def program_with_streams() -> None:
    """A source read in a thread to its end, an abandoned source, and an async one."""

    def source() -> Generator[tuple[np.ndarray[Any, Any], ...], None, None]:
        for number in range(3):
            yield np.full(10, number), np.ones(3)

    async def later() -> AsyncGenerator[np.ndarray[Any, Any], None]:
        for batch, _ in source():
            await trio.lowlevel.checkpoint()
            yield batch

    options = ta.DeviceOptions(isolation="inline", close_grace=0.5)
    async with ta.open_system("s") as system, system.open_device("cpu", options=options) as device:
        async with ta.stream(device, source(), depth=2) as ahead:
            async for _ in ahead:
                pass
        async with ta.stream(device, source()) as ahead:
            await anext(ahead)
        async with ta.stream(device, later()) as batches:
            async for _ in batches:
                pass


@pytest.mark.slow
@pytest.mark.timeout(180, method="thread")  # who hangs in a lock hears of no other
@pytest.mark.skipif(BACKEND != "cpu", reason="no driver is to be met in the middle")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_every_line_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    interrupt_everywhere(program_with_streams, ("devices/front/_stream.py",), caplog, step=1, least=50)


FIRST_IMPORTS = """
import sys, threading, numpy as np, trio, trio_accel as ta
from trio.lowlevel import currently_ki_protected

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if threading.current_thread() is threading.main_thread() and not currently_ki_protected():
            print(name)

async def main():
    sys.meta_path.insert(0, Finder)
    options = ta.DeviceOptions(isolation=sys.argv[1])
    async with ta.open_system("s") as system, system.open_device("cpu", options=options) as device:
        ref = await device.put(np.eye(4))
        await (ref @ ref)
        await ta.fft.fft(await device.put(np.ones(4, complex)))
        await (await ta.random.Generator(device).normal(3)).to_host()
        await device.statistics()
    sys.meta_path.remove(Finder)

trio.run(main)
"""


@pytest.mark.skipif(BACKEND != "cpu", reason="the program names its device")
@pytest.mark.parametrize("isolation", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_no_module_is_imported_in_the_handler_of_ctrl_c(isolation: ta.Isolation) -> None:
    """A `KeyboardInterrupt` in a callback of the import system is printed and lost; threads get none."""
    environment = {**os.environ, "PYTHONPATH": SEARCHED}
    program = [sys.executable, "-c", FIRST_IMPORTS, isolation]
    ended = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
