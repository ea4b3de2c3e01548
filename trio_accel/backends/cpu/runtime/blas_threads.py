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

from ._memory import HostArray

BOUND = 1 << 22
"""The most multiplications of a call that has one thread: with two it would save 0.07 ms at most."""
ONCE = 8
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
    """

    def __init__(self, number: ctypes.c_int) -> None:
        self._number, self._started = number, number.value
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin with nobody inside: in a fork, the threads that were are gone."""
        self._number.value, self._inside = self._started, 0
        self._turn, self._left = threading.Lock(), threading.Condition()

    @contextmanager
    def for_work(self, multiplications: int) -> Generator[None]:
        """Call the BLAS within this, not nested.

        Args:
            multiplications: How many a call makes, at most.
        """
        # Where there is one thread anyway, all calls are of one kind.
        is_small = multiplications <= BOUND or self._started == 1
        with self._turn, self._left:
            self._left.wait_for(lambda: not self._inside or (self._number.value == 1) is is_small)
            if not self._inside:
                self._started = self._number.value
                self._number.value = 1 if is_small else self._started
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                if not self._inside:
                    self._number.value = self._started
                    self._left.notify()


NUMPY, SCIPY = (BlasThreads(find_number(package)) for package in (np, scipy))
"""The copies that NumPy and SciPy call."""


def matrix_product(a: HostArray, b: HostArray, out: HostArray | None = None) -> HostArray:
    """Multiply as `numpy.matmul` does, which takes the BLAS for numbers that are not whole."""
    rows, columns = (one.shape[axis] if one.ndim > 1 else 1 for one, axis in ((a, -2), (b, -1)))
    with NUMPY.for_work(max(a.size * max(columns, ONCE), b.size * max(rows, ONCE))):
        return np.matmul(a, b, out=out)
