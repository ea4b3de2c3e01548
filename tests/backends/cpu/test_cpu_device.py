from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest

from trio_accel import linalg
from trio_accel.backends import resolve
from trio_accel.backends.base import DType, OutOfMemoryError
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    FillSpec,
    MatmulSpec,
    contiguous_strides,
)
from trio_accel.backends.base.kit.kernels import KernelEntry
from trio_accel.backends.cpu import CpuBackend

pytestmark = [pytest.mark.no_device, pytest.mark.machine]

PATIENCE = 30


@pytest.fixture
def device():
    opened = CpuBackend().open_device(0, memory_limit=None)
    yield opened
    assert opened.close(PATIENCE)


def array_in(device, block, shape, dtype=DType.float64):
    strides = contiguous_strides(shape, dtype.itemsize)
    device.allocate(block, int(np.prod(shape)) * dtype.itemsize)
    return ArraySpec(block, 0, dtype, shape, strides)


def test_the_machine_is_described():
    info = resolve("cpu")[1]
    with open("/proc/cpuinfo", encoding="utf-8") as table:
        assert f": {info.description}\n" in table.read()
    assert info.compute_units == len(os.sched_getaffinity(0))
    assert info.total_memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert info.isolations == ("inline", "process")


def test_blocks_begin_at_cache_lines(device):
    for block, nbytes in enumerate([1, 63, 64, 65, 4096, 1 << 20]):
        device.allocate(block, nbytes)
        view = device.host_view(ArraySpec(block, 0, DType.uint8, (nbytes,), (1,)))
        assert view.ctypes.data % 64 == 0
        assert view.flags.writeable


def test_memory_is_not_touched_when_it_is_allocated(device):
    resident = _resident_bytes()
    device.allocate(1, 1 << 30)
    assert _resident_bytes() - resident < 1 << 26


def _resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as table:
        return int(table.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stuck_stream_does_not_hold_up_the_close_and_keeps_its_memory():
    device = CpuBackend().open_device(0, memory_limit=None)
    stuck, idle = device.open_stream("stuck"), device.open_stream("idle")
    array = array_in(device, 1, (1000,))
    view = device.host_view(array)
    buffer = weakref.ref(view.base.obj if isinstance(view.base, memoryview) else view.base)
    go, entered = threading.Event(), threading.Event()

    def work(target=view):
        entered.set()
        assert go.wait(PATIENCE)
        target.fill(1.0)

    stuck.enqueue(work)
    ran = []
    idle.enqueue(lambda: ran.append(True))
    del view, work
    assert entered.wait(PATIENCE)
    # It is stuck until `go` is set, so a close that returns has not waited for it.
    assert not device.close(0.05)
    assert ran == [True]
    assert device.memory().blocks == 0
    assert buffer() is not None  # the stuck work may still write to it
    go.set()
    assert device.close(PATIENCE)
    assert buffer() is None


def test_the_grace_is_for_all_streams_together():
    device = CpuBackend().open_device(0, memory_limit=None)
    go = threading.Event()
    for number in range(5):
        device.open_stream(f"stuck {number}").enqueue(lambda: go.wait(PATIENCE))
    start = time.monotonic()
    assert not device.close(1.5)
    # clock: five graces, one after the other, would take 7.5 s
    assert 1.5 <= time.monotonic() - start < 6.5
    go.set()
    assert device.close(PATIENCE)


def test_ended_streams_are_forgotten(device):
    for number in range(100):
        stream = device.open_stream(f"stream {number}")
        stream.record()
        stream.close()
        stream.join()
    device.open_stream("last")
    assert len(device.streams) == 1


def test_a_kernel_without_work_memory_reports_the_requested_size(device, monkeypatch):
    stream, library = device.open_stream("main"), device.open_library("blas")
    # One element, seen 2**50 times: a product of it takes more memory than any machine has.
    array = array_in(device, 1, (1,))
    wide = ArraySpec(array.block, 0, DType.float16, (1 << 25, 1 << 25), (0, 0))
    library.enqueue(MatmulSpec(wide, wide, wide), stream)
    event = stream.record()
    stream.synchronize()
    assert isinstance(event.error, OutOfMemoryError)
    assert event.error.requested == 4 << 50
    assert event.error.device == "cpu:0"
    assert isinstance(event.error.__cause__, MemoryError)


def test_a_memory_error_that_names_no_size(device):
    stream, library = device.open_stream("main"), device.open_library("memory")
    array = array_in(device, 1, (2,))
    library._kernels = {FillSpec.operation: KernelEntry(FillSpec.operation, "cpu", _exhausted)}
    library.enqueue(FillSpec(0, array), stream)
    event = stream.record()
    stream.synchronize()
    assert isinstance(event.error, OutOfMemoryError)
    assert event.error.requested == 0
    assert "unknown" in str(event.error)


def _exhausted(spec, call):
    raise MemoryError


def test_an_error_within_a_kernel_is_kept_unchanged(device):
    stream, library = device.open_stream("main"), device.open_library("memory")
    array = array_in(device, 1, (2,))
    library.enqueue(CopyFromHostSpec(np.zeros(3), array), stream)
    event = stream.record()
    clean = stream.record()
    stream.synchronize()
    assert isinstance(event.error, ValueError)
    assert clean.error is None


def test_finished_work_releases_the_hosts_array(device):
    stream, library = device.open_stream("main"), device.open_library("memory")
    array = array_in(device, 1, (3,))
    host = np.arange(3.0)
    gone = weakref.ref(host)
    library.enqueue(CopyFromHostSpec(host, array), stream)
    stream.synchronize()
    del host
    assert gone() is None


def test_axpy_needs_no_memory_of_its_own(device):
    stream, library = device.open_stream("main"), device.open_library("blas")
    x, y = (array_in(device, block, (1_000_000,)) for block in (1, 2))
    memory = device.open_library("memory")
    for array in (x, y):
        memory.enqueue(FillSpec(1.0, array), stream)
    stream.synchronize()
    tracemalloc.start()
    try:
        library.enqueue(linalg.axpy.spec(2.0, x, y), stream)
        stream.synchronize()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.slow
def test_a_worker_keeps_the_memory_freed_by_its_kernels():
    """In a thread the temporary arrays of each call cost a page fault for every 4 KiB otherwise."""
    program = """
import resource, sys, threading, numpy as np, scipy.fft
from trio_accel.backends import resolve
if sys.argv[1] == "worker":
    resolve("cpu")[0].prepare_worker()
def work():
    for _ in range(30):
        if _ == 10:
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        scipy.fft.rfft(signal)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
counts = []
signal = np.ones(1 << 20, np.float32)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(counts[1] - counts[0])
"""
    faults = {
        kind: int(
            subprocess.run([sys.executable, "-c", program, kind], capture_output=True, check=True).stdout
        )
        for kind in ("program", "worker")
    }
    assert faults["worker"] < 100
    assert faults["program"] == 0 or faults["worker"] < faults["program"] / 10
