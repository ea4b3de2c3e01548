"""A program with its device's context in a worker does not touch the driver, and nobody loads NVML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chosen import BACKEND

import trio_accel as ta

ROOT = Path(ta.__file__).parents[1]
NOT_INITIALIZED = 3
PROGRAM = """
import ctypes
from pathlib import Path
import numpy as np
import trio
import trio_accel as ta


def has_nvml(process):
    return "libnvidia-ml.so" in Path(f"/proc/{process}/maps").read_text()


async def main():
    async with ta.open_system("s") as system, system.open_device("cuda") as device:
        host = device.host_empty((4, 4), np.float32)
        host[:] = 2.0
        x = await device.put(host)
        print((await (await ta.linalg.matmul(x, x)).to_host()).tolist() == [[16.0] * 4] * 4)
        print(has_nvml("self"), has_nvml(device.dispatch.process.pid))
        # A process that has called cuInit is told how many there are.
        print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())))


trio.run(main)
"""


@pytest.mark.skipif(BACKEND != "cuda", reason="other backends have no driver")
def test_only_the_worker_begins_with_the_driver() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False", str(NOT_INITIALIZED)]
