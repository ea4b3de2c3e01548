"""A fault in a process that has CUDA itself: there is no way back in it, and that is said at once."""

from __future__ import annotations

import pytest

PROGRAM = """
import ctypes
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
            try:
                await device.put(np.zeros(3))
            except ta.DeviceLostError as error:
                assert "isolation='process'" in str(error), error
            assert device.generation == 1
            try:
                await system.open_device("cuda", options=INLINE)
            except ta.DeviceLostError as error:
                print("lost for good")
            async with system.open_device("cuda") as other:
                print((await (await other.put(np.arange(3.0))).to_host()).tolist())


trio.run(main)
"""


@pytest.mark.parametrize("code", [700, 719, 710, 214])
def test_the_device_is_lost_and_a_worker_still_works(run_on_stand_in, code):
    said = run_on_stand_in(PROGRAM.replace("{code}", str(code))).splitlines()
    assert said[0].split()[0] in ("ContextPoisonedError", "StaleRefError")
    assert set(said[0].split()[1:]) <= {"DeviceLostError", "StaleRefError"}
    assert said[1:] == ["lost for good", "[0.0, 1.0, 2.0]"]
