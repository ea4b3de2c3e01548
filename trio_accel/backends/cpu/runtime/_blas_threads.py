"""How many threads a BLAS takes: one for a small call, what it was started with for others.

OpenBLAS's threads spin for one another. While the system has taken the core of one away, the others wait:
beside a busy process that makes a small call ten times as long, and a small factorization a hundred times.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ._memory import HostArray

BOUND = 1 << 22
"""The most multiplications of a call that has one thread: with two it would save 0.07 ms at most."""
# Numbers of a vector come from memory, and each takes as long as so many multiplications of a product.
OF_VECTORS = 8


class BlasThreads:
    """The threads of one copy of OpenBLAS; NumPy and SciPy each have one.

    The number of threads is one for the whole process, and the bits of a result depend on it. A call that is
    run again must give the same bits, so its size alone decides. Calls with one thread never overlap with
    calls that have more: who comes waits for the other kind to leave, and the next ones wait behind it.

    Args:
        number: OpenBLAS's own variable; None where it has one thread, or is not there: then nothing is done.
    """

    def __init__(self, number: ctypes.c_int | None) -> None:
        self._number = number
        self._started = 0
        self._inside = 0
        self._free_locks()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._free_locks)

    @classmethod
    def of(cls, package: ModuleType) -> BlasThreads:
        """Find the copy that the wheel of an imported package brought."""
        folder = Path(package.__path__[0])
        places = folder.parent / f"{folder.name}.libs", folder / ".dylibs"
        for path in (path for place in places for path in place.glob("*openblas*")):
            try:
                # D97: `openblas_set_num_threads` would start threads in a fork. To write the number does not:
                # OpenBLAS looks at it with each call, and starts what it lacks with the first large one.
                number = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "blas_cpu_number")
            except (OSError, ValueError):
                continue
            return cls(number if number.value > 1 else None)
        return cls(None)

    def _free_locks(self) -> None:
        """Begin with nobody inside: in a fork, the threads that were are gone."""
        if self._number is not None and self._inside:
            self._number.value = self._started
        self._inside, self._is_small = 0, False
        self._turn, self._left = threading.Lock(), threading.Condition()

    @contextmanager
    def for_work(self, multiplications: int) -> Generator[None]:
        """Call the BLAS within this, not nested.

        Args:
            multiplications: How many a call makes, at most.
        """
        if self._number is None:
            yield
            return
        is_small = multiplications <= BOUND
        with self._turn, self._left:
            while self._inside and self._is_small is not is_small:
                self._left.wait()
            if not self._inside:
                self._started, self._is_small = self._number.value, is_small
                if is_small:
                    self._number.value = 1
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                if not self._inside:
                    self._number.value = self._started
                    self._left.notify()


NUMPY = BlasThreads.of(np)
"""The copy that NumPy calls."""


def matrix_product(a: HostArray, b: HostArray, out: HostArray | None = None) -> HostArray:
    """Multiply as `numpy.matmul` does."""
    if a.dtype.kind not in "fc":
        # Whole numbers are multiplied without the BLAS.
        return np.matmul(a, b, out=out)
    rows, columns = (one.shape[axis] if one.ndim > 1 else 1 for one, axis in ((a, -2), (b, -1)))
    with NUMPY.for_work(max(a.size * columns, b.size * rows)):
        return np.matmul(a, b, out=out)


def vector_product(x: HostArray, y: HostArray, out: HostArray | None = None) -> Any:
    """Multiply vectors as `numpy.dot` does."""
    with NUMPY.for_work(OF_VECTORS * x.size):
        return np.dot(x, y, out=out)
