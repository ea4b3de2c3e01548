"""Checks what the stand-in driver captures, instantiates and launches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from checking import LIBRARY, call, code_of, launch_host, main, make_stream, open_device, pinned, read
from cuda.bindings import driver
from nvmath.bindings import cublas

MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
KERNEL, HOST = 0, 4
UNSUPPORTED, INVALIDATED, WRONG_THREAD, ILLEGAL_STATE = 900, 901, 908, 401


class Scaling:
    """A vector that cuBLAS doubles, as work that can be captured."""

    def __init__(self) -> None:
        open_device()
        self.stream = make_stream()
        self.handle = cublas.create()
        cublas.set_stream(self.handle, int(self.stream))
        self.two = np.float32(2).reshape(1)
        self.vector = int(call(driver.cuMemAlloc, 16))
        call(driver.cuMemsetD32, self.vector, 0x3F800000, 4)
        call(driver.cuCtxSynchronize)

    def double(self) -> None:
        cublas.scal_ex_64(self.handle, 4, self.two.ctypes.data, 0, self.vector, 0, 1, 0)

    def capture(self, times: int = 1) -> Any:
        call(driver.cuStreamBeginCapture, self.stream, MODE)
        for _ in range(times):
            self.double()
        return call(driver.cuStreamEndCapture, self.stream)

    def values(self) -> list[float]:
        call(driver.cuStreamSynchronize, self.stream)
        return [float(value) for value in read(self.vector, 4, np.float32)]


def check_capture_does_not_run() -> None:
    scaling = Scaling()
    call(driver.cuStreamBeginCapture, scaling.stream, MODE)
    assert int(call(driver.cuStreamIsCapturing, scaling.stream)) == 1
    scaling.double()
    graph = call(driver.cuStreamEndCapture, scaling.stream)
    assert int(call(driver.cuStreamIsCapturing, scaling.stream)) == 0
    assert scaling.values() == [1.0] * 4
    executable = call(driver.cuGraphInstantiate, graph, 0)
    call(driver.cuGraphDestroy, graph)
    for _ in range(3):
        call(driver.cuGraphLaunch, executable, scaling.stream)
    assert scaling.values() == [8.0] * 4
    call(driver.cuGraphLaunch, executable, make_stream())
    call(driver.cuGraphExecDestroy, executable)
    call(driver.cuCtxSynchronize)
    assert scaling.values() == [16.0] * 4
    assert code_of(driver.cuGraphLaunch, executable, scaling.stream) == 1
    assert code_of(driver.cuGraphExecDestroy, executable) == 1


def check_nodes() -> None:
    scaling = Scaling()
    graph = scaling.capture(3)
    assert driver.cuGraphGetNodes(graph, 0)[2] == 3
    _, nodes, count = driver.cuGraphGetNodes(graph, 5)
    assert (count, [int(node) != 0 for node in nodes]) == (3, [True] * 3 + [False] * 2)
    assert [int(call(driver.cuGraphNodeGetType, node)) for node in nodes[:3]] == [KERNEL] * 3
    said: list[int] = []
    call(driver.cuStreamBeginCapture, scaling.stream, MODE)
    keep = launch_host(scaling.stream, lambda: said.append(1))
    graph = call(driver.cuStreamEndCapture, scaling.stream)
    (node,) = driver.cuGraphGetNodes(graph, 1)[1]
    assert int(call(driver.cuGraphNodeGetType, node)) == HOST
    call(driver.cuGraphLaunch, call(driver.cuGraphInstantiate, graph, 0), scaling.stream)
    call(driver.cuStreamSynchronize, scaling.stream)
    assert said == [1]
    del keep


def check_what_cannot_be_captured() -> None:
    scaling = Scaling()
    stream = scaling.stream
    word = int(pinned(1).ctypes.data)
    for function, arguments in (
        (driver.cuStreamSynchronize, (stream,)),
        (driver.cuStreamQuery, (stream,)),
        (driver.cuStreamWriteValue32, (stream, word, 1, 0)),
        (driver.cuEventRecord, (call(driver.cuEventCreate, 0), stream)),
    ):
        call(driver.cuStreamBeginCapture, stream, MODE)
        assert code_of(driver.cuStreamBeginCapture, stream, MODE) == ILLEGAL_STATE
        assert code_of(function, *arguments) == UNSUPPORTED
        assert int(call(driver.cuStreamIsCapturing, stream)) == 2
        assert code_of(function, *arguments) == INVALIDATED
        code, graph = driver.cuStreamEndCapture(stream)
        assert (int(code), graph and int(graph)) in ((INVALIDATED, None), (INVALIDATED, 0))
        assert code_of(driver.cuStreamEndCapture, stream) == ILLEGAL_STATE
    scaling.double()
    assert scaling.values() == [2.0] * 4
    assert code_of(driver.cuStreamBeginCapture, 0, MODE) == UNSUPPORTED


def check_copies_fills_and_memory() -> None:
    """Copies and fills of device memory are captured. A thread that captures takes no memory."""
    scaling = Scaling()
    other, copy = make_stream(), int(call(driver.cuMemAlloc, 16))
    call(driver.cuStreamBeginCapture, scaling.stream, MODE)
    call(driver.cuMemsetD32Async, copy, 0, 4, scaling.stream)
    call(driver.cuMemcpyDtoDAsync, copy, scaling.vector, 8, scaling.stream)
    assert code_of(driver.cuMemAllocAsync, 64, other) == UNSUPPORTED
    graph = call(driver.cuStreamEndCapture, scaling.stream)
    assert code_of(driver.cuMemAllocAsync, 64, other) == 0
    call(driver.cuGraphLaunch, call(driver.cuGraphInstantiate, graph, 0), scaling.stream)
    call(driver.cuStreamSynchronize, scaling.stream)
    assert list(read(copy, 4, np.float32)) == [1.0, 1.0, 0.0, 0.0]


def check_capture_ends_where_it_began() -> None:
    scaling = Scaling()
    call(driver.cuStreamBeginCapture, scaling.stream, MODE)
    codes: list[int] = []
    other = threading.Thread(
        target=lambda: codes.append(code_of(driver.cuStreamEndCapture, scaling.stream)), name="other"
    )
    other.start()
    other.join()
    assert codes == [WRONG_THREAD]
    call(driver.cuStreamEndCapture, scaling.stream)


def check_memory_for_graphs_grows_when_nothing_runs() -> None:
    scaling = Scaling()
    graph = scaling.capture()
    before = call(driver.cuMemGetInfo)[0]
    made = [call(driver.cuGraphInstantiate, graph, 0) for _ in range(8)]
    for executable in made:
        call(driver.cuGraphExecDestroy, executable)
    assert before - call(driver.cuMemGetInfo)[0] == 8 * (57 << 10)
    busy, words = make_stream(), pinned(1)
    call(driver.cuStreamWaitValue32, busy, int(words.ctypes.data), 1, 0)
    made = [call(driver.cuGraphInstantiate, graph, 0) for _ in range(8)]
    # One that is in flight keeps its memory.
    call(driver.cuGraphLaunch, made[0], busy)
    call(driver.cuGraphExecDestroy, made.pop(0))
    more = threading.Thread(
        target=lambda: made.append(call(driver.cuGraphInstantiate, graph, 0)), name="more"
    )
    more.start()
    more.join(0.05)
    assert more.is_alive()
    words[0] = 1
    more.join()
    assert len(made) == 8


def check_a_lost_context() -> None:
    scaling = Scaling()
    graph = scaling.capture()
    executable = call(driver.cuGraphInstantiate, graph, 0)
    assert LIBRARY.stand_in_poison(0, 700) == 0
    assert code_of(driver.cuGraphLaunch, executable, scaling.stream) == 700
    assert code_of(driver.cuGraphInstantiate, graph, 0) == 700
    assert code_of(driver.cuStreamBeginCapture, scaling.stream, MODE) == 700


if __name__ == "__main__":
    main(list(globals().items()))
