"""A fault in a process with CUDA itself: the process cannot recover, and the error says so at once."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.no_device

PROGRAM = """
import ctypes
from functools import partial
import numpy as np
import trio
import trio_accel as ta

INLINE = ta.DeviceOptions(isolation="inline", intensity=ta.Intensity(100, 60.0))


async def outcome(ask):
    try:
        await ask()
    except ta.AccelError as error:
        return type(error).__name__
    return "done"


async def main():
    async with ta.open_system("s") as system:
        device = await system.open_device("cuda", options=INLINE)
        ref = await device.put(np.arange(1000.0))
        ctypes.CDLL("libcuda.so.1").stand_in_poison(0, {code})
        with trio.fail_after(5):
            print(await outcome(ref.copy), await outcome(ref.copy), await outcome(ref.to_host))
            put, anew = partial(device.put, np.zeros(3)), partial(system.open_device, "cuda", options=INLINE)
            for again in (put, anew):
                try:
                    await again()
                except ta.DeviceLostError as error:
                    print("isolation='process'" in str(error))
            print(device.generation)
            async with system.open_device("cuda") as other:
                print((await (await other.put(np.arange(3.0))).to_host()).tolist())


trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [700, 719, 710, 214])
def test_the_device_is_lost_and_a_worker_still_works(run_on_stand_in, code):
    first, *others = run_on_stand_in(PROGRAM.replace("{code}", str(code))).splitlines()
    # Nothing was in flight, so whoever asks next finds out.
    found, *lost = first.split()
    assert found == "ContextPoisonedError"
    assert set(lost) <= {"DeviceLostError", "StaleRefError"}
    assert others == ["True", "True", "1", "[0.0, 1.0, 2.0]"]
