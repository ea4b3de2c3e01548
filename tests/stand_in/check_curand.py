"""Checks the stand-in cuRAND by nvmath's bindings: its numbers are the real library's, and its limits too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from checking import call, main, make_stream, open_device, read
from cuda.bindings import driver
from nvmath.bindings import curand

Array = npt.NDArray[Any]

SEED = 0x0123456789ABCDEF
ROW = 1 << 18
LENGTH = 300_004

# What cuRAND 10.4.4's host generator PHILOX4_32_10 gave for this seed, by offset and place.
BITS = {
    0: 0xB850222E, 1: 0xC58CB04B, 4: 0xFA9DFF5E, 262143: 0xA2B781BA, 262144: 0xADCA1466, 300003: 0xFCB8C938,
}  # fmt: skip
UNIFORM = {0: "0x1.ef9c54p-1", 1: "0x1.047996p-1", 262144: "0x1.5860f2p-1", 300003: "0x1.f3b23cp-2"}
UNIFORM_DOUBLE = {
    0: "0x1.047999fce29a0p-1", 1: "0x1.a8fe4c97f1e64p-4", 2: "0x1.fefa370e0f1e1p-2",
    3: "0x1.fc270cde8e918p-1", 262144: "0x1.a4337d64a30bap-1", 300003: "0x1.5729a18e36122p-1",
}  # fmt: skip
NORMAL = {
    0: -0.8030993938446045, 1: 0.11006899178028107, 2: 0.300900936126709,
    262144: 0.7933948040008545, 300003: 1.1994473934173584,
}  # fmt: skip
NORMAL_DOUBLE = {
    0: 0.09655394047443411, 1: -0.7134790715091881, 2: -1.426230008354764,
    3: -0.4867060118006284, 262144: 0.7053753208590193, 300003: -0.7694805052168326,
}  # fmt: skip


class Rig:
    """A generator on a stream."""

    def __init__(self) -> None:
        open_device()
        self.stream = make_stream()
        self.generator = curand.create_generator(curand.RngType.PSEUDO_PHILOX4_32_10)
        curand.set_stream(self.generator, int(self.stream))
        curand.set_generator_ordering(self.generator, curand.Ordering.PSEUDO_LEGACY)
        curand.set_pseudo_random_generator_seed(self.generator, SEED)

    def draw(
        self, function: Callable[..., None], dtype: Any, *more: float, offset: int = 0, count: int = LENGTH
    ) -> Array:
        size = count * np.dtype(dtype).itemsize
        address = int(call(driver.cuMemAlloc, size + 16))
        call(driver.cuMemsetD8Async, address, 7, size + 16, self.stream)
        curand.set_generator_offset(self.generator, offset)
        function(self.generator, address, count, *more)
        call(driver.cuStreamSynchronize, self.stream)
        assert (read(address + size, 16, np.uint8) == 7).all()
        return read(address, count, dtype)


def status_of(function: Callable[..., object], *arguments: object) -> int:
    try:
        function(*arguments)
    except curand.cuRANDError as error:
        return int(error.status)
    return 0


def check_bits() -> None:
    rig = Rig()
    words = rig.draw(curand.generate, np.uint32)
    assert {place: int(words[place]) for place in BITS} == BITS
    for offset in (1, 4, 1000, ROW):
        later = rig.draw(curand.generate, np.uint32, offset=offset, count=999)
        np.testing.assert_array_equal(later, words[offset : offset + 999])


def check_uniform_numbers() -> None:
    rig = Rig()
    single = rig.draw(curand.generate_uniform, np.float32, offset=2 * ROW)
    assert {place: float(single[place]) for place in UNIFORM} == {
        place: float.fromhex(text) for place, text in UNIFORM.items()
    }
    double = rig.draw(curand.generate_uniform_double, np.float64, offset=2 * ROW)
    assert {place: float(double[place]) for place in UNIFORM_DOUBLE} == {
        place: float.fromhex(text) for place, text in UNIFORM_DOUBLE.items()
    }


def check_normal_numbers() -> None:
    rig = Rig()
    single = rig.draw(curand.generate_normal, np.float32, 0.0, 1.0)
    double = rig.draw(curand.generate_normal_double, np.float64, 0.0, 1.0)
    for place, number in NORMAL.items():
        assert abs(float(single[place]) - number) < 1e-6
    for place, number in NORMAL_DOUBLE.items():
        assert abs(float(double[place]) - number) < 1e-14
    moved = rig.draw(curand.generate_normal_double, np.float64, 5.0, 0.5)
    np.testing.assert_allclose(moved, 5.0 + 0.5 * double, rtol=1e-14)


def check_any_count_of_what_comes_alone() -> None:
    rig = Rig()
    for function, dtype in (
        (curand.generate, np.uint32),
        (curand.generate_uniform, np.float32),
        (curand.generate_uniform_double, np.float64),
    ):
        whole = rig.draw(function, dtype)
        for count in (1, 2, 3, 5, ROW + 1):
            np.testing.assert_array_equal(rig.draw(function, dtype, count=count), whole[:count])


def check_wrong_arguments() -> None:
    rig = Rig()
    at = int(call(driver.cuMemAlloc, 64))
    normal = curand.generate_normal
    assert status_of(normal, rig.generator, at, 3, 0.0, 1.0) == 105
    assert status_of(normal, rig.generator, at + 4, 2, 0.0, 1.0) == 201
    assert status_of(normal, rig.generator, at, 0, 0.0, 1.0) == 0
    assert status_of(normal, 0, at, 2, 0.0, 1.0) == 101
    assert status_of(curand.create_generator, int(curand.RngType.PSEUDO_XORWOW)) == 103
    assert status_of(curand.set_generator_ordering, rig.generator, 102) == 104
    # Not what the real one does: the stand-in does not know what that is.
    curand.set_generator_offset(rig.generator, 4)
    assert status_of(curand.generate_uniform_double, rig.generator, at, 2) == 999
    assert status_of(curand.generate, rig.generator, at, 2) == 0
    assert status_of(curand.generate, rig.generator, at, 2) == 999
    call(driver.cuStreamSynchronize, rig.stream)
    curand.destroy_generator(rig.generator)
    assert status_of(curand.generate, rig.generator, at, 2) == 101


def check_create_without_a_context() -> None:
    call(driver.cuInit, 0)
    assert status_of(curand.create_generator, int(curand.RngType.PSEUDO_PHILOX4_32_10)) == 203


if __name__ == "__main__":
    main(globals().items())
