"""How many threads a BLAS takes: one for a small call, what it was started with for others.

OpenBLAS's threads spin for one another. While the system has taken the core of one away, the others wait:
beside a busy process that makes a small call ten times as long, and a small factorization a hundred times.
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
"""A number that is used but once comes from memory, and takes as long as so many multiplications."""


def find_number(package: ModuleType) -> ctypes.c_int:
    """Find the number of threads of the OpenBLAS that the wheel of an imported package brought; else 1.

    D97: `openblas_set_num_threads` would start threads in a fork. To write this variable does not: OpenBLAS
    reads it with each call, and starts what it lacks with the first large one.
    """
    folder = Path(package.__path__[0])
    for path in (*folder.parent.glob(f"{folder.name}.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")):
        with suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "blas_cpu_number")
    return ctypes.c_int(1)


class BlasThreads:
    """The threads of one copy of OpenBLAS; NumPy and SciPy each have one.

    The number of threads is one for the whole process, and the bits of a result depend on it. A call that is
    run again must give the same bits, so its size alone decides. Calls with one thread never overlap with
    calls that have more: who comes waits for the other kind to leave, and the next ones wait behind it.

    Args:
        number: OpenBLAS's own variable.

    Attributes:
        started: How many threads it was started with: what the user allows.
    """

    def __init__(self, number: ctypes.c_int) -> None:
        self._number = number
        self.started: int = number.value
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin with nobody inside: in a fork, the threads that were are gone."""
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
        """Begin a call that makes so many multiplications at most; `leave` ends it."""
        # Where there is one thread anyway, all calls are of one kind.
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
    """Multiply as `numpy.matmul` does, which takes the BLAS for numbers that are not whole."""
    rows, columns = a.shape[-2] if a.ndim > 1 else 1, b.shape[-1] if b.ndim > 1 else 1
    most = max(a.size * max(columns, LOAD_COST), b.size * max(rows, LOAD_COST))
    kind = a.dtype.kind
    # NumPy has another routine for an array by its own transpose, with bounds of its own.
    is_plain = rows > 1 < columns and a.ctypes.data != b.ctypes.data
    if kind in "iu" or (kind == "f" and most <= MAX_SINGLE_THREAD_PRODUCT and is_plain):
        return np.matmul(a, b, out=out)
    NUMPY.enter(most)
    try:
        return np.matmul(a, b, out=out)
    finally:
        NUMPY.leave()
