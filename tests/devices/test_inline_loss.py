"""A kernel really loses the context of a process that uses CUDA itself, which cannot recover."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chosen import BACKEND

import trio_accel as ta

ROOT = Path(ta.__file__).parents[1]
PROGRAM = """
import numpy as np
import trio
import trio_accel as ta

INLINE = ta.DeviceOptions(isolation="inline", intensity=ta.Intensity(100, 60.0))


async def main():
    async with ta.open_system("s") as system:
        device = await system.open_device("cuda", options=INLINE)
        ref = await device.put(np.arange(1000.0))
        # Through the actor it would only be said: tests of a program are to outlive it.
        device.dispatch.session.engine.device._faults.launch(HOW, None)
        asks = [ref.copy, ref.copy, lambda: device.put(np.ones(3))]
        asks.append(lambda: system.open_device("cuda", options=INLINE))
        with trio.fail_after(20):
            for ask in asks:
                try:
                    await ask()
                    await trio.sleep(1.0)
                except ta.AccelError as error:
                    print(type(error).__name__)
                else:
                    print("done")
            async with system.open_device("cuda") as other:
                print(other.isolation, (await (await other.put(np.arange(3.0))).to_host()).tolist())


trio.run(main)
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(BACKEND != "cuda", reason="other backends have no context to lose")
@pytest.mark.parametrize("how", ["illegal_address", "trap", "assert"])
def test_the_device_is_lost_for_good_and_a_worker_still_works(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"HOW = {how!r}\n{PROGRAM}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # An assertion speaks for itself.
    *said, worker = [line for line in done.stdout.splitlines() if "Assertion" not in line]
    # The driver reports it after a while; requests in the meantime may run.
    asked = [outcome for outcome in said if outcome != "done"]
    assert asked[0] == "ContextPoisonedError"
    assert set(asked[1:-2]) <= {"DeviceLostError", "StaleRefError"}
    assert said[-2:] == ["DeviceLostError", "DeviceLostError"]
    assert worker == "process [0.0, 1.0, 2.0]"
