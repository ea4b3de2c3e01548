"""Arrays of other libraries that no kernel could read."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.no_device

PROGRAM = """
import numpy as np
import trio
from cuda.bindings import driver
import trio_accel as ta

INLINE = ta.DeviceOptions(isolation="inline")


class Foreign:
    def __init__(self, address, shape, strides, typestr="<f4"):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": typestr, "version": 3,
        }


async def main():
    async with ta.open_system("s") as system, system.open_device("cuda", options=INLINE) as device:
        async with (await device.put(np.arange(64, dtype=np.float32))).lease() as lent:
            address = lent.__cuda_array_interface__["data"][0]
            print((await (await device.put(Foreign(address + 4, (3,), (8,)))).to_host()).tolist())
            # A stride along one element is never taken.
            print((await (await device.put(Foreign(address, (1, 2), (3, 4)))).to_host()).tolist())
            for wrong in (
                Foreign(address + 1, (3,), (8,)),
                Foreign(address, (3,), (6,)),
                Foreign(address + 4, (3,), (16,), "<c8"),
            ):
                try:
                    await device.put(wrong)
                except ta.LibraryError as error:
                    print(error.code, "contiguous copy" in str(error))
        assert device.generation == 1
        print(await (await device.put(np.float64([7.0]))).item())


trio.run(main)
"""


def test_misaligned_ones_are_refused_and_harm_nothing(run_on_stand_in):
    said = run_on_stand_in(PROGRAM).splitlines()
    assert said == ["[1.0, 3.0, 5.0]", "[[0.0, 1.0]]", *["misaligned True"] * 3, "7.0"]
