"""Checks the stand-in driver by `cuda.bindings`: contexts, streams, events and words in memory."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
from checking import (
    LIBRARY,
    Callback,
    call,
    calls,
    code_of,
    launch_host,
    main,
    make_stream,
    open_device,
    pinned,
    read,
)
from cuda.bindings import driver

GEQ, EQ, AND, NOR = 0, 1, 2, 3


def check_contexts() -> None:
    assert code_of(driver.cuDeviceGetCount) == 3  # not initialised
    call(driver.cuInit, 0)
    needing = [
        (driver.cuStreamCreate, 0),
        (driver.cuEventCreate, 0),
        (driver.cuMemAlloc, 16),
        (driver.cuMemHostAlloc, 16, 0),
        (driver.cuMemHostRegister, 4096, 16, 0),
        (driver.cuMemGetInfo,),
        (driver.cuCtxSynchronize,),
        (driver.cuModuleLoadData, b"\x7fELF"),
    ]
    assert [code_of(*each) for each in needing] == [201] * len(needing)
    open_device(1)
    assert int(call(driver.cuCtxGetDevice)) == 1
    stream, event, address = make_stream(), call(driver.cuEventCreate, 0), int(call(driver.cuMemAlloc, 16))
    codes = []

    def elsewhere() -> None:  # a thread without a context can use what exists
        codes.append(code_of(driver.cuMemsetD8Async, address, 7, 16, stream))
        codes.append(code_of(driver.cuEventRecord, event, stream))
        codes.append(code_of(driver.cuStreamSynchronize, stream))
        codes.append(code_of(driver.cuEventQuery, event))
        codes.append(code_of(driver.cuStreamSynchronize, 0))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes == [0, 0, 0, 0, 201]
    assert read(address, 16, np.uint8).tolist() == [7] * 16
    context = call(driver.cuCtxPopCurrent)
    assert code_of(driver.cuCtxPopCurrent) == 201
    call(driver.cuCtxPushCurrent, context)
    call(driver.cuDevicePrimaryCtxRelease, 1)
    assert code_of(driver.cuMemAlloc, 16) == 709  # nobody holds the context


def check_order_of_streams() -> None:
    open_device()
    first, second = make_stream(), make_stream()
    word, log = pinned(1), []
    start, end = call(driver.cuEventCreate, 0), call(driver.cuEventCreate, 0)
    assert code_of(driver.cuEventQuery, start) == 0  # never recorded
    call(driver.cuStreamWaitValue32, first, word.ctypes.data, 1, GEQ)
    call(driver.cuEventRecord, start, first)
    keep = [launch_host(first, lambda i=i: log.append(i)) for i in range(100)]
    call(driver.cuEventRecord, end, first)
    call(driver.cuStreamWaitEvent, second, end, 0)
    keep.append(launch_host(second, lambda: log.append("second")))
    assert code_of(driver.cuStreamQuery, first) == 600
    assert code_of(driver.cuEventQuery, end) == 600
    assert code_of(driver.cuEventElapsedTime, start, end) == 600
    assert log == []
    word[0] = 1
    call(driver.cuStreamSynchronize, second)
    assert log == [*range(100), "second"]
    assert code_of(driver.cuStreamQuery, first) == 0
    assert 0 < call(driver.cuEventElapsedTime, start, end) < 10_000
    # An event recorded again counts for later waits only.
    word[0] = 0
    call(driver.cuStreamWaitEvent, second, start, 0)
    call(driver.cuStreamWaitValue32, first, word.ctypes.data, 1, GEQ)
    call(driver.cuEventRecord, start, first)
    call(driver.cuStreamSynchronize, second)
    assert code_of(driver.cuEventQuery, start) == 600
    word[0] = 1
    call(driver.cuEventSynchronize, start)
    call(driver.cuEventDestroy, start)
    assert code_of(driver.cuEventQuery, start) == 400


def check_destroyed_streams() -> None:
    open_device()
    stream, word, log = make_stream(), pinned(1), []
    call(driver.cuStreamWaitValue32, stream, word.ctypes.data, 1, GEQ)
    keep = launch_host(stream, lambda: log.append(1))
    done = call(driver.cuEventCreate, 0)
    call(driver.cuEventRecord, done, stream)
    call(driver.cuStreamDestroy, stream)  # at once, with work in the queue
    assert code_of(driver.cuStreamQuery, stream) == 400
    word[0] = 1
    call(driver.cuEventSynchronize, done)
    assert (log, keep is None) == ([1], False)
    call(driver.cuCtxSynchronize)


def _passes(wide: bool, condition: int, value: int, refused: list[int], accepted: int) -> None:
    """A wait lets none of the refused values through: the copy after it is the accepted one."""
    dtype = np.uint64 if wide else np.uint32
    wait = driver.cuStreamWaitValue64 if wide else driver.cuStreamWaitValue32
    stream, word, seen, started = make_stream(), pinned(1, dtype), pinned(1, dtype), pinned(1)
    word[0] = refused[0]
    call(driver.cuStreamWriteValue32, stream, started.ctypes.data, 1, 0)
    call(wait, stream, word.ctypes.data, value, condition)
    call(driver.cuMemcpyAsync, seen.ctypes.data, word.ctypes.data, word.itemsize, stream)
    while not started[0]:
        pass
    for each in refused:
        word[0] = each
        assert code_of(driver.cuStreamQuery, stream) == 600
    word[0] = accepted
    call(driver.cuStreamSynchronize, stream)
    assert int(seen[0]) == accepted


def check_waits_for_words() -> None:
    open_device()
    for wide, top in ((False, 2**32), (True, 2**64)):
        _passes(wide, GEQ, 5, [4, 0, top // 2 + 5, top - 1], 5)
        _passes(wide, GEQ, top - 2, [top - 3, top // 2], 1)  # cyclic: 1 is three after -2
        _passes(wide, EQ, 7, [6, 8, 0], 7)
        _passes(wide, AND, 6, [1, 8, 0], 4)
        _passes(wide, NOR, top - 2, [top - 1, 1, 3], 2)  # not both of bit 0 set
    word = pinned(2)
    stream = make_stream()
    call(driver.cuStreamWriteValue32, stream, word.ctypes.data, 2**32 - 1, 0)
    call(driver.cuStreamSynchronize, stream)
    assert word.tolist() == [2**32 - 1, 0]
    call(driver.cuStreamWriteValue64, stream, word.ctypes.data, 1, 0)
    call(driver.cuStreamSynchronize, stream)
    assert word.tolist() == [1, 0]
    plain = np.zeros(1, np.uint32)
    assert code_of(driver.cuStreamWriteValue32, stream, plain.ctypes.data, 1, 0) == 1
    assert code_of(driver.cuStreamWaitValue32, stream, word.ctypes.data + 2, 1, 0) == 1


def check_default_stream() -> None:
    """Work of the legacy default stream is between the work of blocking streams, and only of those."""
    open_device()
    first, second = (call(driver.cuStreamCreate, 0) for _ in range(2))
    free, word, log = make_stream(), pinned(1), []
    call(driver.cuStreamWaitValue32, first, word.ctypes.data, 1, GEQ)
    keep = [
        launch_host(first, lambda: log.append("before")),
        launch_host(0, lambda: log.append("default")),
        launch_host(second, lambda: log.append("after")),
        launch_host(free, lambda: log.append("free")),
    ]
    call(driver.cuStreamSynchronize, free)
    assert log == ["free"]
    assert code_of(driver.cuStreamQuery, second) == 600
    assert code_of(driver.cuStreamQuery, 1) == 600  # the other name of the default stream
    word[0] = 1
    call(driver.cuStreamSynchronize, second)
    assert log == ["free", "before", "default", "after"]
    keep.append(launch_host(2, lambda: log.append("per thread")))
    call(driver.cuStreamSynchronize, 2)
    assert log[-1] == "per thread"


def check_host_functions_may_not_call_the_driver() -> None:
    open_device()
    stream, codes = make_stream(), []

    def ask() -> None:
        codes.append(code_of(driver.cuMemAlloc, 16))
        codes.append(code_of(driver.cuStreamQuery, stream))

    keep = launch_host(stream, ask)
    call(driver.cuStreamSynchronize, stream)
    assert (codes, keep is None) == ([800, 800], False)


def check_copies_of_pageable_memory() -> None:
    """Ordinary memory holds the caller until the stream has copied it; pinned memory does not."""
    open_device()
    stream, word, log = make_stream(), pinned(1), []
    address = int(call(driver.cuMemAlloc, 16))
    plain, registered = np.arange(4, dtype=np.uint32), np.arange(4, 8, dtype=np.uint32)
    call(driver.cuMemHostRegister, registered.ctypes.data, 16, 0)
    call(driver.cuStreamWaitValue32, stream, word.ctypes.data, 1, GEQ)
    for _ in range(2):
        call(driver.cuMemcpyHtoDAsync, address, registered.ctypes.data, 16, stream)  # returns

    def copy() -> None:
        call(driver.cuMemcpyHtoDAsync, address, plain.ctypes.data, 16, stream)
        log.append("copied")

    thread = threading.Thread(target=copy)
    thread.start()
    while calls("cuMemcpyHtoDAsync") < 3:
        pass
    for _ in range(1000):
        assert code_of(driver.cuStreamQuery, stream) == 600
    assert log == []
    word[0] = 1
    thread.join()
    assert log == ["copied"]
    assert read(address, 4, np.uint32).tolist() == [0, 1, 2, 3]


def _poisoned_queue() -> tuple[Any, ...]:
    """Streams that wait, with later work of each kind, and a word that another write would change."""
    stream, waiting, third = make_stream(), make_stream(), make_stream()
    word, log = pinned(2), []
    before, behind = call(driver.cuEventCreate, 0), call(driver.cuEventCreate, 0)
    call(driver.cuEventRecord, before, stream)
    call(driver.cuEventSynchronize, before)
    call(driver.cuStreamWaitValue32, waiting, word.ctypes.data, 1, GEQ)
    keep = [launch_host(waiting, lambda: log.append("host function"))]
    callback = Callback(lambda _stream, code, _data: log.append(code))
    keep.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    call(driver.cuStreamAddCallback, waiting, driver.CUstreamCallback(address), 0, 0)
    call(driver.cuStreamWriteValue32, waiting, word.ctypes.data + 4, 1, 0)
    call(driver.cuEventRecord, behind, waiting)
    call(driver.cuStreamWaitEvent, third, behind, 0)
    return stream, waiting, third, word, log, before, behind, keep


def check_sticky_errors() -> None:
    open_device(1)
    other = make_stream()
    open_device(0)
    stream, waiting, third, word, log, before, behind, keep = _poisoned_queue()
    assert LIBRARY.stand_in_fail(ctypes.c_void_p(int(stream)), 700) == 0
    waits = [(driver.cuStreamSynchronize, each) for each in (stream, waiting, third)]
    assert [code_of(*each) for each in waits] == [700] * 3  # they come back, though no one wrote the word
    while not log:
        pass
    assert (log, word.tolist(), len(keep)) == ([700], [0, 0], 2)
    failing = [
        (driver.cuEventQuery, before),  # it had completed
        (driver.cuEventQuery, behind),
        (driver.cuEventSynchronize, behind),
        (driver.cuStreamQuery, third),
        (driver.cuMemAlloc, 16),
        (driver.cuMemHostAlloc, 16, 0),
        (driver.cuMemAllocAsync, 16, stream),
        (driver.cuMemGetInfo,),
        (driver.cuStreamCreate, 0),
        (driver.cuEventCreate, 0),
        (driver.cuEventRecord, before, stream),
        (driver.cuStreamWaitEvent, stream, before, 0),
        (driver.cuStreamWriteValue32, stream, word.ctypes.data, 1, 0),
        (driver.cuCtxSynchronize,),
        (driver.cuStreamDestroy, stream),
        (driver.cuEventDestroy, before),
        (driver.cuDevicePrimaryCtxReset, 0),
        (driver.cuMemAlloc, 16),
    ]
    assert [code_of(*each) for each in failing] == [700] * len(failing)
    assert LIBRARY.stand_in_check() == 700
    call(driver.cuDevicePrimaryCtxRetain, 0)  # the holder gets it again
    for _ in range(2):
        call(driver.cuDevicePrimaryCtxRelease, 0)
    assert code_of(driver.cuDevicePrimaryCtxRetain, 0) == 700  # but it is not made again
    call(driver.cuStreamSynchronize, other)  # the other device is none the worse
    open_device(1)
    assert LIBRARY.stand_in_check() == 0
    call(driver.cuMemAlloc, 16)


def check_forked_children() -> None:
    open_device()
    child = os.fork()
    if child == 0:
        codes = code_of(driver.cuInit, 0), code_of(driver.cuMemAlloc, 16)
        os._exit(0 if codes == (3, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0
    call(driver.cuMemAlloc, 16)


def check_calls_are_counted() -> None:
    open_device()
    before = calls("cuMemGetInfo"), calls("cuMemGetInfo_v2")
    for _ in range(3):
        call(driver.cuMemGetInfo)
    assert (calls("cuMemGetInfo"), calls("cuMemGetInfo_v2")) == (before[0] + 3, before[1] + 3)
    assert calls("cuNothing") == 0


def report_devices() -> None:
    """Prints what cuInit returns, and the devices by the last byte of their UUIDs."""
    code = code_of(driver.cuInit, 0)
    devices = range(call(driver.cuDeviceGetCount)) if code == 0 else ()
    print(code, *(call(driver.cuDeviceGetUuid, each).bytes[15] for each in devices))


def report_exclusive() -> None:
    """Prints the code of making a context, then waits for a line and for the end of the input."""
    call(driver.cuInit, 0)
    print(code_of(driver.cuDevicePrimaryCtxRetain, 0), flush=True)
    input()


if __name__ == "__main__":
    main(list(globals().items()))
