"""Asks the CUDA driver one thing: ``free``, or ``report HOW``. Uses the package's kernels only."""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from cuda.core import Program, ProgramOptions

KERNELS = Path(__file__).parents[2] / "trio_accel/backends/cuda/kernels/faults.cu"


def check(result: tuple) -> object:
    if result[0]:
        sys.exit(f"the driver answers {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def use() -> object:
    """Make a context, and make it current."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def report(how: str) -> float:
    """Seconds from the launch of a faulty kernel to the driver's word of it."""
    device = use()
    kinds = driver.CUdevice_attribute
    major = check(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = check(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    program = Program(KERNELS.read_text(), "c++", ProgramOptions(arch=f"sm_{major}{minor}"))
    library = check(driver.cuLibraryLoadData(program.compile("cubin").code, None, None, 0, None, None, 0))
    kernel = check(driver.cuLibraryGetKernel(library, f"fault_{how}".encode()))
    function = check(driver.cuKernelGetFunction(kernel))
    argument = np.frombuffer(struct.pack("<QQqQ", 16, 0, 0, 0), np.uint8)
    pointers = np.array([argument.ctypes.data], np.uint64)
    stream = check(driver.cuStreamCreate(1))
    start = time.perf_counter()
    check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers.ctypes.data, 0))
    if not driver.cuStreamSynchronize(stream)[0]:
        sys.exit(f"the driver reports no {how}")
    return time.perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1] == "free":
        use()
        print(check(driver.cuMemGetInfo())[0])
    else:
        print(report(sys.argv[2]))
