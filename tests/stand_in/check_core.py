"""Checks the stand-in driver and NVRTC by `cuda.core`: programs, launches, buffers, and kernels that fail."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from checking import LIBRARY, call, calls, code_of, launch_host, main, make_stream, open_device, pinned, read
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

AXPY = """
extern "C" __global__ void __launch_bounds__(256) axpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] += a * x[i];
}
template <typename T> __global__ void scale(T *x, T factor) { x[threadIdx.x] *= factor; }
"""

OWN = """
#ifndef STAND_IN
#define KERNEL(name, Arguments) \\
    extern "C" __global__ void name(const Arguments arguments)
#endif
struct Place { unsigned *out; unsigned short tag; unsigned columns; };
KERNEL(where, Place) {
    unsigned row = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
    arguments.out[row * arguments.columns + column] = arguments.tag + 100 * row + column;
    if (gridDim.x != 3 || gridDim.y != 2 || gridDim.z != 1)
        __trap();
}
struct Counters { unsigned *counts; float *sum; };
KERNEL(count, Counters) {
    unsigned before = atomicAdd(arguments.counts, 1);
    atomicMax(arguments.counts + 1, before);
    atomicAdd(arguments.sum, 0.5f);
}
struct Limit { int limit; };
KERNEL(checked, Limit) { assert((int)threadIdx.x < arguments.limit); }
KERNEL(trapped, Limit) { if ((int)threadIdx.x >= arguments.limit) __trap(); }
"""

FUNCTIONS = """
extern "C" __global__ void floats(const double *x, double *y) {
    double v = x[threadIdx.x];
    double results[] = {rsqrtf(fabs(v)), sinpif(v), cospi(v), __fmaf_rn(v, v, v), max(v, .25), min(-v, .25)};
    for (int i = 0; i < 6; i++)
        y[6 * threadIdx.x + i] = results[i];
}
extern "C" __global__ void integers(const unsigned long long *x, unsigned long long *y) {
    unsigned long long v = x[threadIdx.x];
    unsigned low = (unsigned)v;
    unsigned long long results[] = {__umul64hi(v, v), __umulhi(low, low), __popcll(v), __clz(low), __ffsll(v),
                                    __float_as_uint(__uint_as_float(low)), atomicCAS(&y[6], 0, v)};
    for (int i = 0; i < 6; i++)
        y[7 * threadIdx.x + i] = results[i];
}
"""


def _compile(source: str, *names: str) -> Any:
    options = ProgramOptions(arch="sm_90", std="c++17")
    return Program(source, code_type="c++", options=options).compile("cubin", name_expressions=names)


class Place(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("tag", ctypes.c_uint16), ("columns", ctypes.c_uint))


class Counters(ctypes.Structure):
    _fields_ = (("counts", ctypes.c_void_p), ("sum", ctypes.c_void_p))


def _launch(kernel: Any, stream: Any, arguments: Any, grid: Any, block: Any) -> int:
    """Launches with one argument, which is overwritten right after."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    function = driver.CUfunction(int(kernel.handle))  # a kernel may be launched as it is
    code = code_of(driver.cuLaunchKernel, function, *grid, *block, 0, stream, ctypes.addressof(pointers), 0)
    ctypes.memset(ctypes.addressof(arguments), 0, ctypes.sizeof(arguments))
    return code


def check_programs() -> None:
    device = Device(0)
    device.set_current()
    assert device.compute_capability == (9, 0)
    assert device.properties.multiprocessor_count == 132
    assert len(Device.get_all_devices()) == 2
    stream = device.create_stream()
    code = _compile(AXPY, "scale<double>", "scale<int>")
    kernel, n = code.get_kernel("axpy"), 1000
    x, y = device.allocate(4 * n, stream=stream), device.allocate(4 * n, stream=stream)
    host = np.random.default_rng(1).random(n, np.float32)
    call(driver.cuMemcpyHtoDAsync, int(x.handle), host.ctypes.data, 4 * n, stream.handle)
    call(driver.cuMemsetD32Async, int(y.handle), np.float32(1).view(np.uint32), n, stream.handle)
    launch(stream, LaunchConfig(grid=8, block=128), kernel, np.float32(2), x, y, np.int32(n))
    event = stream.record()
    event.sync()
    assert event.is_done
    assert (read(int(y.handle), n, np.float32) == 1 + 2 * host).all()
    assert [each.size for each in kernel.arguments_info] == [4, 8, 8, 4]
    launch(stream, LaunchConfig(grid=1, block=10), code.get_kernel("scale<int>"), x, np.int32(3))
    stream.sync()
    scaled = read(int(x.handle), n, np.int32)
    before = host.view(np.int32)
    assert (scaled == np.where(np.arange(n) < 10, before * np.int32(3), before)).all()
    assert code.get_kernel("scale<double>") is not None
    y.copy_from(x, stream=stream)
    stream.sync()
    assert (read(int(y.handle), n, np.int32) == scaled).all()
    x.close(stream=stream)
    y.close(stream=stream)
    stream.close()


def check_launches() -> None:
    open_device()
    stream, code = make_stream(), _compile(OWN)
    columns, rows = 3 * 5, 2 * 4
    out = int(call(driver.cuMemAlloc, 4 * columns * rows))
    arguments = Place(out, 7000, columns)
    assert _launch(code.get_kernel("where"), stream, arguments, (3, 2, 1), (5, 4, 1)) == 0
    call(driver.cuStreamSynchronize, stream)
    expected = 7000 + 100 * np.arange(rows)[:, None] + np.arange(columns)
    assert (read(out, columns * rows, np.uint32).reshape(rows, columns) == expected).all()
    streams = [make_stream() for _ in range(4)]
    counts, total = pinned(2), pinned(1, np.float32)
    for each in streams:
        arguments = Counters(counts.ctypes.data, total.ctypes.data)
        assert _launch(code.get_kernel("count"), each, arguments, (100, 1, 1), (256, 1, 1)) == 0
    call(driver.cuCtxSynchronize)
    assert (counts.tolist(), float(total[0])) == ([102400, 102399], 51200.0)
    kernel = code.get_kernel("where")
    assert _launch(kernel, stream, Place(out, 0, columns), (1, 1, 1), (1025, 1, 1)) == 1
    assert _launch(kernel, stream, Place(out, 0, columns), (0, 1, 1), (1, 1, 1)) == 1
    library = call(driver.cuKernelGetLibrary, kernel.handle)
    assert code_of(driver.cuLibraryGetKernel, library, b"nothing") == 500
    assert code_of(driver.cuLibraryLoadData, b"\0" * 64, [], [], 0, [], [], 0) == 200


def _run(name: str, inputs: Any, outputs: int) -> Any:
    """Calls a kernel of one block with inputs and outputs of the same type."""
    stream, source, target = make_stream(), pinned(inputs.size, inputs.dtype), pinned(outputs, inputs.dtype)
    source[:] = inputs
    kernel = _compile(FUNCTIONS).get_kernel(name)
    addresses = (ctypes.c_uint64 * 2)(source.ctypes.data, target.ctypes.data)
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(addresses) + offset for offset in (0, 8)))
    shape = (1, 1, 1, inputs.size, 1, 1)
    function = driver.CUfunction(int(kernel.handle))
    call(driver.cuLaunchKernel, function, *shape, 0, stream, ctypes.addressof(pointers), 0)
    call(driver.cuStreamSynchronize, stream)
    return target.reshape(inputs.size, -1)


def check_functions_of_kernels() -> None:
    open_device()
    x = np.random.default_rng(2).uniform(-3, 3, 50)
    columns = [1 / np.sqrt(abs(x)), np.sin(np.pi * x), np.cos(np.pi * x), x * x + x]
    columns += [np.maximum(x, 0.25), np.minimum(-x, 0.25)]
    np.testing.assert_allclose(_run("floats", x, 300), np.stack(columns, 1), rtol=2e-6, atol=2e-6)
    found = _run("integers", np.array([2**63 + 5, 96], np.uint64), 14)
    big, low = 2**63 + 5, 5
    assert found[0, :6].tolist() == [big * big >> 64, low * low >> 32, 3, 29, 1, 5]
    assert found[1, :6].tolist() == [0, 0, 2, 25, 6, 96]
    assert found[0, 6] == big  # the first one, the second found it taken


def check_unloading() -> None:
    """A launch that waits in a queue keeps its code."""
    open_device()
    stream, word, counts, total = make_stream(), pinned(1), pinned(2), pinned(1, np.float32)
    library = call(driver.cuLibraryLoadData, _compile(OWN).code, [], [], 0, [], [], 0)
    kernel = call(driver.cuLibraryGetKernel, library, b"count")
    pointers = (ctypes.c_void_p * 1)(
        ctypes.addressof(arguments := Counters(counts.ctypes.data, total.ctypes.data))
    )
    function = call(driver.cuKernelGetFunction, kernel)
    call(driver.cuStreamWaitValue32, stream, word.ctypes.data, 1, 0)
    shape = (2, 1, 1, 3, 1, 1)
    call(driver.cuLaunchKernel, function, *shape, 0, stream, ctypes.addressof(pointers), 0)
    call(driver.cuLibraryUnload, library)
    word[0] = 1
    call(driver.cuStreamSynchronize, stream)
    assert (counts.tolist(), ctypes.sizeof(arguments)) == ([6, 5], 16)


def check_failing_kernels(name: str, code: str) -> None:
    """The last thread of the block fails. Runs with a delay of faults that leaves time for a call."""
    open_device()
    stream, log = make_stream(), []
    kernel = _compile(OWN).get_kernel(name)
    before = call(driver.cuEventCreate, 0)
    call(driver.cuEventRecord, before, stream)
    call(driver.cuEventSynchronize, before)
    assert _launch(kernel, stream, ctypes.c_int(3), (1, 1, 1), (4, 1, 1)) == 0
    keep = launch_host(stream, lambda: log.append("called"))
    assert code_of(driver.cuEventQuery, before) == 0  # the error shows after a while only
    codes = [code_of(driver.cuStreamSynchronize, stream), code_of(driver.cuEventQuery, before)]
    codes.append(_launch(kernel, stream, ctypes.c_int(3), (1, 1, 1), (1, 1, 1)))
    assert codes == [int(code)] * 3
    assert (log, keep is None) == ([], False)


def check_endless_kernels() -> None:
    open_device()
    stream, other = make_stream(), make_stream()
    kernel = _compile(OWN).get_kernel("fault_spin")
    assert _launch(kernel, stream, ctypes.c_int(0), (1, 1, 1), (1, 1, 1)) == 0
    call(driver.cuStreamSynchronize, other)
    assert code_of(driver.cuStreamQuery, stream) == 600
    assert LIBRARY.stand_in_fail(ctypes.c_void_p(int(other)), 719) == 0
    assert code_of(driver.cuStreamSynchronize, stream) == 719


def check_errors_of_the_compiler() -> None:
    open_device()
    for source, part in (
        ('extern "C" __global__ void f(int *x) { *x = unknown; }', "unknown"),
        ('extern "C" __global__ void f(int *x) { __syncthreads(); }', "__syncthreads"),
    ):
        try:
            _compile(source)
        except Exception as error:  # noqa: BLE001  (its type is private to cuda.core)
            text = str(error)
        else:
            text = ""
        assert "NVRTC_ERROR_COMPILATION" in text
        assert part in text
    assert calls("cuLibraryLoadData") == 0


def check_library_work() -> None:
    """The base of the stand-in math libraries: work in the order of a stream, dropped after an error."""
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    log: list[int] = []
    assert LIBRARY.stand_in_check() == 201
    open_device()
    stream, word = make_stream(), pinned(1)

    def run(argument: int) -> None:
        log.append(argument)
        library.free(ctypes.c_void_p(argument))

    keep = work(run)
    arguments = [library.malloc(8) for _ in range(3)]
    handle = ctypes.c_void_p(int(stream))
    call(driver.cuStreamWaitValue32, stream, word.ctypes.data, 1, 0)
    for each in arguments[:2]:
        assert LIBRARY.stand_in_enqueue(handle, keep, ctypes.c_void_p(each)) == 0
    assert log == []
    word[0] = 1
    call(driver.cuStreamSynchronize, stream)
    assert log == arguments[:2]
    LIBRARY.stand_in_poison(0, 700)
    assert LIBRARY.stand_in_enqueue(handle, keep, ctypes.c_void_p(arguments[2])) == 700
    assert log == arguments[:2]


if __name__ == "__main__":
    main(list(globals().items()))
