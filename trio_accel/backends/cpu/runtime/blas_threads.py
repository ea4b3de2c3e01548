"""The number of threads of a BLAS: one for a small call, and the number at its start for other calls.

OpenBLAS's threads wait for one another by spinning. While the system has taken the core of one thread, the
others wait. With a busy process on the machine, that makes a small call ten times as long, and a small
factorization a hundred times.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import scipy

from ...base import HostArray

BOUND = 1 << 22
"""The most multiplications of a call that has one thread: with two it would save 0.07 ms at most."""
MAX_SINGLE_THREAD_PRODUCT = 1 << 18
"""The most multiplications of a product of real matrices that OpenBLAS gives one thread by itself.

Its `interface/gemm.c` has this bound, 65536 times `GEMM_MULTITHREAD_THRESHOLD`, which is 4.
"""
LOAD_COST = 8
"""The multiplications that take as long as loading a number from memory that is used only once."""


def find_number(package: ModuleType) -> ctypes.c_int:
    """Find the thread count of the OpenBLAS in the wheel of an imported package; else return 1.

    D97: `openblas_set_num_threads` would start threads in a fork. Writing this variable does not, because
    OpenBLAS reads it with each call, and starts missing threads with the first large call.
    """
    folder = Path(package.__path__[0])
    for path in (*folder.parent.glob(f"{folder.name}.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")):
        with suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "blas_cpu_number")
    return ctypes.c_int(1)


class BlasThreads:
    """The threads of one copy of OpenBLAS; NumPy and SciPy each have one.

    The whole process has one number of threads, and the bits of a result depend on it. A repeated call must
    give the same bits, so only its size decides. Calls with one thread never overlap with calls that have
    more: a new call waits for calls of the other kind to leave, and later calls wait after it.

    Args:
        number: OpenBLAS's own variable.

    Attributes:
        started: The number of threads at its start, which the user allows.
    """

    def __init__(self, number: ctypes.c_int) -> None:
        self._number = number
        self.started: int = number.value
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin without any caller inside, because the threads of callers do not exist in a fork."""
        self._number.value, self._inside, self._queued, self._is_small = self.started, 0, 0, True
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._left = threading.Condition(self._lock)

    @contextmanager
    def for_work(self, multiplications: int) -> Generator[None]:
        """Call the BLAS within this, not nested.

        Args:
            multiplications: How many a call makes, at most.
        """
        self.enter(multiplications)
        try:
            yield
        finally:
            self.leave()

    def enter(self, multiplications: int) -> None:
        """Begin a call of at most `multiplications` multiplications; `leave` ends it."""
        # With a single thread anyway, all calls are of one kind.
        is_small = multiplications <= BOUND or self.started == 1
        with self._lock:
            if not self._queued and (not self._inside or self._is_small is is_small):
                self._count(is_small)
                return
            self._queued += 1
        with self._turn, self._left:
            self._left.wait_for(lambda: not self._inside or self._is_small is is_small)
            self._queued -= 1
            self._count(is_small)

    def leave(self) -> None:
        """End a call."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._number.value = self.started
                if self._queued:
                    self._left.notify()

    def _count(self, is_small: bool) -> None:
        if not self._inside:
            self.started, self._is_small = self._number.value, is_small
            if is_small:
                self._number.value = 1
        self._inside += 1


NUMPY, SCIPY = (BlasThreads(find_number(package)) for package in (np, scipy))
"""The copies that NumPy and SciPy call."""


def matrix_product(a: HostArray, b: HostArray, out: HostArray | None = None) -> HostArray:
    """Multiply as `numpy.matmul` does, which uses the BLAS for numbers other than integers."""
    rows, columns = a.shape[-2] if a.ndim > 1 else 1, b.shape[-1] if b.ndim > 1 else 1
    cost = max(a.size * max(columns, LOAD_COST), b.size * max(rows, LOAD_COST))
    kind = a.dtype.kind
    # NumPy has another routine for an array by its own transpose, with bounds of its own.
    is_plain = rows > 1 < columns and a.ctypes.data != b.ctypes.data
    if kind in "iu" or (kind == "f" and cost <= MAX_SINGLE_THREAD_PRODUCT and is_plain):
        return np.matmul(a, b, out=out)
    NUMPY.enter(cost)
    try:
        return np.matmul(a, b, out=out)
    finally:
        NUMPY.leave()
