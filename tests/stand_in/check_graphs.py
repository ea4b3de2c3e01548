"""Checks the captures, instantiations and launches of the stand-in driver."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from checking import LIBRARY, call, code_of, launch_host, main, make_stream, open_device, pinned, read
from cuda.bindings import driver
from cuda.core import Program, ProgramOptions
from nvmath.bindings import cublas

MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
KERNEL, HOST = 0, 4
UNSUPPORTED, INVALIDATED, WRONG_THREAD, ILLEGAL_STATE = 900, 901, 908, 401
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
CONDITIONAL, INVALID, NOT_SUPPORTED = 13, 1, 801
COUNT_DOWN = """
extern "C" __global__ void count_down(unsigned long long handle, int *number, int by) {
    *number -= by;
    cudaGraphSetConditional(handle, *number > 0);
}
"""


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


def check_uncapturable_work() -> None:
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


def check_capture_ends_on_its_first_thread() -> None:
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
    # A graph in flight keeps its memory.
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


class Countdown:
    """A graph with a part that runs as long as, or if, a number in memory is above zero."""

    def __init__(self) -> None:
        self.scaling = Scaling()
        self.number = int(call(driver.cuMemAlloc, 4))
        made = Program(COUNT_DOWN, "c++", ProgramOptions(arch="sm_90")).compile("cubin")
        library = call(driver.cuLibraryLoadData, bytes(made.code), None, None, 0, None, None, 0)
        self.kernel = call(driver.cuLibraryGetKernel, library, b"count_down")
        self.stream = self.scaling.stream

    def set(self, handle: Any, by: int) -> None:
        values = [np.array([int(handle)], np.uint64), np.array([self.number], np.uint64)]
        values.append(np.array([by], np.int32))
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        shape = (1, 1, 1, 1, 1, 1, 0)
        call(
            driver.cuLaunchKernel,
            driver.CUfunction(int(self.kernel)),
            *shape,
            self.stream,
            pointers.ctypes.data,
            0,
        )

    def handle(self, graph: Any) -> Any:
        context = call(driver.cuCtxGetCurrent)
        return call(driver.cuGraphConditionalHandleCreate, graph, context, 0, 0)

    def parameters(self, handle: Any, kind: int) -> Any:
        made = driver.CUgraphNodeParams()
        made.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        made.conditional.handle = handle
        made.conditional.type = driver.CUgraphConditionalNodeType(kind)
        made.conditional.size = 1
        made.conditional.ctx = call(driver.cuCtxGetCurrent)
        return made

    def begin(self, graph: Any, after: list[Any]) -> int:
        edges = [driver.CUgraphEdgeData() for _ in after]
        arguments = (self.stream, graph, after, edges, len(after), RELAXED)
        return code_of(driver.cuStreamBeginCaptureToGraph, *arguments)

    def captured(self) -> tuple[Any, list[Any]]:
        status, _, graph, nodes, _, count = call(driver.cuStreamGetCaptureInfo, self.stream)
        assert int(status) == 1
        return graph, list(nodes)[:count]

    def graph(self, kind: int) -> Any:
        """The number goes down by one, and then for each time that the vector is doubled."""
        call(driver.cuStreamBeginCapture, self.stream, RELAXED)
        handle = self.handle(self.captured()[0])
        self.set(handle, 1)
        graph, after = self.captured()
        call(driver.cuStreamEndCapture, self.stream)
        parameters = self.parameters(handle, kind)
        node = call(driver.cuGraphAddNode, graph, after, [driver.CUgraphEdgeData()], 1, parameters)
        assert int(call(driver.cuGraphNodeGetType, node)) == CONDITIONAL
        assert self.begin(parameters.conditional.phGraph_out[0], []) == 0
        self.scaling.double()
        self.set(handle, 1)
        call(driver.cuStreamEndCapture, self.stream)
        assert self.begin(graph, after) == INVALID  # the part is the last node now
        assert self.begin(graph, [node]) == 0
        self.scaling.double()
        call(driver.cuStreamEndCapture, self.stream)
        return graph

    def run(self, executable: Any, number: int) -> tuple[list[float], int]:
        call(driver.cuMemsetD32, self.number, number, 1)
        call(driver.cuMemsetD32, self.scaling.vector, 0x3F800000, 4)
        call(driver.cuCtxSynchronize)
        call(driver.cuGraphLaunch, executable, self.stream)
        return self.scaling.values(), int(read(self.number, 1, np.int32)[0])


def check_parts_that_run_on_a_condition() -> None:
    countdown = Countdown()
    for kind, expected in ((1, {1: (2, 0), 2: (4, 0), 6: (64, 0), 0: (2, -1)}), (0, {1: (2, 0), 6: (4, 4)})):
        graph = countdown.graph(kind)
        executable = call(driver.cuGraphInstantiate, graph, 0)
        for number, (value, left) in expected.items():
            assert countdown.run(executable, number) == ([float(value)] * 4, left)
        call(driver.cuGraphDestroy, graph)
        call(driver.cuGraphExecDestroy, executable)


def check_refused_conditions() -> None:
    countdown = Countdown()
    graph, other = call(driver.cuGraphCreate, 0), call(driver.cuGraphCreate, 0)
    handle = countdown.handle(graph)
    add = driver.cuGraphAddNode
    # Without a node of its own, of another graph, of an unknown kind, and twice.
    assert code_of(driver.cuGraphInstantiate, graph, 0) == INVALID
    assert code_of(add, other, [], [], 0, countdown.parameters(handle, 0)) == INVALID
    assert code_of(add, graph, [], [], 0, countdown.parameters(handle, 2)) == INVALID
    assert code_of(add, graph, [], [], 0, driver.CUgraphNodeParams()) == NOT_SUPPORTED
    parameters = countdown.parameters(handle, 0)
    node = call(add, graph, [], [], 0, parameters)
    assert code_of(add, graph, [node], [driver.CUgraphEdgeData()], 1, parameters) == INVALID
    part = driver.CUgraph(int(parameters.conditional.phGraph_out[0]))
    assert code_of(driver.cuGraphDestroy, part) == INVALID
    assert code_of(driver.cuGraphInstantiate, part, 0) == INVALID
    # No function of the host runs on a condition.
    assert countdown.begin(part, []) == 0
    function = driver.CUhostFn(ctypes.cast(LIBRARY.stand_in_calls, ctypes.c_void_p).value)
    assert code_of(driver.cuLaunchHostFunc, countdown.stream, function, 0) == UNSUPPORTED
    assert code_of(driver.cuStreamEndCapture, countdown.stream) == INVALIDATED
    call(driver.cuGraphDestroy, graph)


def check_relaxed_captures_leave_memory_alone() -> None:
    scaling, other = Scaling(), make_stream()
    call(driver.cuStreamBeginCapture, scaling.stream, RELAXED)
    call(driver.cuMemAllocAsync, 64, other)
    call(driver.cuStreamEndCapture, scaling.stream)


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
