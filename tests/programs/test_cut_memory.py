"""Code in a worker cuts the memory that it shares with the application, which lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from chosen import BACKEND, SEARCHED

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="chunks of other backends are no memory of the host")

# In a process of its own, because SIGBUS would end the process of the tests.
PROGRAM = """
import os
import bad_programs
import numpy as np
import trio
import trio_accel as ta

async def main():
    async with ta.open_system("cut") as system:
        device = await system.open_device("cpu", options=ta.DeviceOptions(isolation="process"))
        x = await device.put(np.arange(200_000.0))
        pinned = device.host_empty((200_000,), "float64")
        refused = await ta.run(bad_programs.cut_memory, x, os.getpid())
        pinned[:] = await x.to_host()
        y = await device.put(pinned + 1.0)
        print(refused, device.generation, (await y.to_host())[-1])

trio.run(main)
"""


async def test_the_application_lives() -> None:
    done = await trio.run_process(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SEARCHED, str(Path(__file__).parent)])},
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    refused, generation, last = done.stdout.split()
    # A chunk of the device, a slab of the host pool, and the page.
    assert int(refused) >= 3
    assert (int(generation), float(last)) == (1, 200_000.0)
