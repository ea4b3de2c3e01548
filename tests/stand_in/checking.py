"""Shared helpers of the programs that check the stand-in from inside: each runs the named function."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

Array = npt.NDArray[Any]

LIBRARY = ctypes.CDLL("libcuda.so.1")
LIBRARY.stand_in_calls.restype = ctypes.c_ulong

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Calls the driver, which must succeed, and gives the one result, or all, or None."""
    code, *results = function(*arguments)
    assert int(code) == 0, f"{function.__name__}: {code.name}"
    return results[0] if len(results) == 1 else results or None


def code_of(function: Callable[..., tuple[Any, ...]], *arguments: object) -> int:
    return int(function(*arguments)[0])


def open_device(ordinal: int = 0) -> None:
    """Makes the primary context of a device current to this thread."""
    call(driver.cuInit, 0)
    context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, ordinal))
    call(driver.cuCtxSetCurrent, context)


def make_stream() -> Any:
    return call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


def calls(name: str) -> int:
    return int(LIBRARY.stand_in_calls(name.encode()))


def pinned(count: int, dtype: npt.DTypeLike = np.uint32) -> Array:
    """An array of zeros in pinned memory, which is never freed."""
    size = count * np.dtype(dtype).itemsize
    address = call(driver.cuMemHostAlloc, size, 0)
    array = np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    array[:] = 0
    return array


def read(address: int, count: int, dtype: npt.DTypeLike) -> Array:
    """The contents of device memory."""
    array = np.empty(count, dtype)
    call(driver.cuMemcpyDtoH, array.ctypes.data, address, array.nbytes)
    return array


def launch_host(stream: object, function: Callable[[], object]) -> object:
    """Queues a function of no arguments. The result must live until it has run."""
    keep = HostFunction(lambda _: function() and None)
    address = ctypes.cast(keep, ctypes.c_void_p).value
    call(driver.cuLaunchHostFunc, stream, driver.CUhostFn(address), 0)
    return keep


def main(functions: Iterable[tuple[str, Any]]) -> None:
    dict(functions)[sys.argv[1]](*sys.argv[2:])
