"""First uses of the dense solvers' routines, at which the vendor's libraries load their kernels."""

from __future__ import annotations

import attrs
import numpy as np
from cuda.bindings import driver

from ..runtime._context import CudaContext
from ..runtime._stream import scratch
from ._cusolver import Routine, Vendor
from ._solver_kernels import POINTER, SolverKernels

__all__ = ["Trials"]

# Larger matrices need no more kernels than one of this size.
_LARGE = {"xpotrf": 2048, "xgetrf": 2048, "xgesvd": 256}
_LARGE_OTHERS = 1024


class Trials:
    """Runs routines once before they are enqueued for the first time: then they wait for the whole device.

    Kernels depend on the element type and on the size of matrices; sizes with as many bits share one trial.

    Args:
        context: The device's context.
        vendor: The handles; nothing else uses them meanwhile.
        kernels: Kernels of the backend's own.
    """

    def __init__(self, context: CudaContext, vendor: Vendor, kernels: SolverKernels) -> None:
        self._context = context
        self._vendor = vendor
        self._kernels = kernels
        self._done: set[tuple[object, ...]] = set()

    def run(self, *routines: Routine) -> None:
        """Try out routines, each with what those before have made; blocks. The context is current."""
        most = _LARGE.get(routines[-1].name, _LARGE_OTHERS)
        chain = [_shrunk(routine, most) for routine in routines]
        key = tuple(map(_key, chain))
        if key not in self._done:
            self._run([self._vendor.sized(routine) for routine in chain])
            self._done.add(key)

    def _run(self, chain: list[Routine]) -> None:
        first, count = chain[0], chain[0].batch
        whole = max(size for routine in chain for size in routine.sizes.values()) ** 2 * first.dtype.itemsize
        # The matrix is the first one.
        words = dict.fromkeys(word for routine in chain for word in routine.arrays)
        lists = [word for word in words if word.endswith("*")]
        names = dict.fromkeys(word.rstrip("*") for word in words)
        device, host = (max(routine.work[place] for routine in chain) for place in (0, 1))
        rooms = [whole * count] * len(names) + [POINTER * count] * len(lists)
        with scratch(self._context, *rooms, 4 * count, device) as (stream, [*places, status, work]):
            arrays = dict(zip((*names, *lists), places, strict=True))
            self._upload(stream, places[0], first)
            for word in lists:
                self._kernels.list_matrices(stream, arrays[word[:-1]], whole, count, arrays[word])
            room = np.empty(max(1, host), np.uint8)
            at = {word: (address, whole) for word, address in arrays.items()}
            try:
                for routine in chain:
                    self._vendor.run(routine, stream, at, count, (work, int(room.ctypes.data)), status)
            finally:
                # The stream ends here, and another one may get its number.
                self._vendor.select_all(0)

    def _upload(self, stream: int, place: int, routine: Routine) -> None:
        """Write a matrix by columns; its lower triangle is that of a positive definite one."""
        shape = routine.shape
        made = np.resize(np.random.default_rng(0).random(997), shape[::-1]).astype(routine.dtype.dtype)
        made[np.diag_indices(min(shape))] += sum(shape)
        self._context.check(driver.cuMemcpyHtoDAsync(place, made.ctypes.data, made.nbytes, stream))
        self._context.check(driver.cuStreamSynchronize(stream))


def _shrunk(routine: Routine, most: int) -> Routine:
    return attrs.evolve(routine, sizes={word: min(size, most) for word, size in routine.sizes.items()})


def _key(routine: Routine) -> tuple[object, ...]:
    sizes = (size.bit_length() for size in routine.sizes.values())
    return routine.name, routine.dtype, *sizes, *routine.options.values(), routine.batch
