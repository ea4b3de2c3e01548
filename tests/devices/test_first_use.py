"""The first operations of a program import nothing in any thread, as their modules are imported earlier."""

from __future__ import annotations

import subprocess
import sys

import pytest
from chosen import BACKEND

PROGRAM = """
import sys, threading
import numpy as np, scipy.sparse, trio
import trio_accel as ta

async def main():
    options = ta.DeviceOptions(isolation=sys.argv[2])
    async with ta.open_system("first") as system, system.open_device(sys.argv[1], options=options) as device:
        before = set(sys.modules)
        a = await device.put(np.ones((4, 4)))
        z = await device.put(np.ones(8, np.complex64))
        matrix = await ta.sparse.csr(device, scipy.sparse.eye_array(4, format="csr"))
        for name, ask in (
            ("@", lambda: a @ a),
            ("matmul", lambda: ta.linalg.matmul(a, a)),
            ("fft", lambda: ta.fft.fft(z)),
            ("spmv", lambda: ta.sparse.spmv(matrix, a[0])),
            ("normal", lambda: ta.random.Generator(device, seed=1).normal((8,))),
            ("elementwise", lambda: ta.jit.elementwise("x + 1.0")(a)),
            ("relu", lambda: ta.nn.relu(a)),
            ("chain", lambda: (a @ a + 1.0).to_host()),
            ("chain again", lambda: (a @ a + 1.0).to_host()),
        ):
            await ask()
            print(name, *sorted(set(sys.modules) - before))
            before = set(sys.modules)

trio.run(main)
"""


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_the_first_operations_import_nothing(isolation: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BACKEND, isolation], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "@",
        "matmul",
        "fft",
        "spmv",
        "normal",
        "elementwise",
        "relu",
        "chain",
        "chain again",
    ]
