"""First uses of the dense solvers' routines, at which the vendor's libraries load their kernels."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
from cuda.bindings import driver

from ...base import DType
from ..runtime._context import CudaContext
from ._cusolver import Handle, Routine, eigen, orthogonal, pivoted, positive, reflected, singular, solved
from ._solver_batched import Batched
from ._solver_kernels import POINTER, SolverKernels

__all__ = ["Trials"]

_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
# Larger matrices need no more kernels than one of this size.
_LARGE: dict[Callable[..., Routine], int] = {
    positive: 2048,
    pivoted: 2048,
    solved: 1024,
    reflected: 1024,
    orthogonal: 1024,
    singular: 256,
    eigen: 1024,
}


class Trials:
    """Runs each routine once before it is enqueued for the first time: then it waits for the whole device.

    Kernels depend on the element type and on the size of matrices; sizes with as many bits share one trial.

    Args:
        context: The device's context.
        handle: The handle; nothing else uses it meanwhile.
        kernels: Kernels of the backend's own.
    """

    def __init__(self, context: CudaContext, handle: Handle, kernels: SolverKernels) -> None:
        self._context = context
        self._handle = handle
        self._kernels = kernels
        self._done: set[tuple[object, ...]] = set()

    def routine(
        self,
        make: Callable[..., Routine],
        dtype: DType,
        extents: tuple[int, ...],
        options: tuple[object, ...],
    ) -> None:
        """Try out a routine for matrices of such extents; blocks. The context is current."""
        small = tuple(min(extent, _LARGE[make]) for extent in extents)
        key = (make, dtype, *(extent.bit_length() for extent in small), *options)
        if key in self._done:
            return
        if make is solved:
            # With pivots that are rows.
            first, second = pivoted(dtype, small[0], small[0]), solved(dtype, *small, *options)
            self._run(first, second)
        else:
            self._run(make(dtype, *small, *options))
        self._done.add(key)

    def batched(self, batched: Batched, name: str, dtype: DType, shape: tuple[int, int]) -> None:
        """Try out routines for stacks; blocks. The context is current."""
        key = (name, dtype, *(extent.bit_length() for extent in shape))
        if key in self._done:
            return
        m, n = shape
        whole, two = max(shape) ** 2 * dtype.itemsize, 2
        work = batched.gesvdj_size(dtype, m, n, two) * dtype.itemsize if name == "gesvdj" else 0
        rooms = (two * whole, two * whole, two * whole, two * whole, two * POINTER, two * POINTER, 8, work)
        with self._scratch(*rooms) as (stream, places):
            a, first, second, third, listed, sides, status, space = places
            self._upload(stream, a, dtype, shape)
            if name == "gesvdj":
                found = a, first, second, third
                batched.gesvdj(stream, dtype, shape, found, (space, work // dtype.itemsize), status, two)
            else:
                self._kernels.list_matrices(stream, a, whole, two, listed)
                self._kernels.list_matrices(stream, first, whole, two, sides)
                if name == "potrf":
                    batched.potrf(stream, dtype, n, "U", listed, status, two)
                else:
                    batched.getrf(stream, dtype, n, listed, second, status, two)
                    batched.getrs(stream, dtype, (n, 1), 0, listed, second, sides, two)
        self._done.add(key)

    def _run(self, *routines: Routine) -> None:
        first = routines[0]
        sizes = [routine.sizes(self._handle) for routine in routines]
        count = max(first.batch or 1, 1)
        rooms = [room * count for room in routines[-1].rooms]
        with self._scratch(*rooms, 4 * count, max(size[0] for size in sizes)) as (stream, places):
            *arrays, status, work = places
            self._upload(stream, arrays[0], first.dtype, first.shape)
            room = np.empty(max(1, *(size[1] for size in sizes)), np.uint8)
            self._handle.select(stream)
            for routine, size in zip(routines, sizes, strict=True):
                used = tuple(arrays[: len(routine.rooms)])
                routine.run(self._handle, used, count, size, (work, int(room.ctypes.data)), status)

    @contextmanager
    def _scratch(self, *rooms: int) -> Generator[tuple[int, list[int]]]:
        """A stream and memory, zero at first; waits for it at the end."""
        check = self._context.check
        stream = int(check(driver.cuStreamCreate(_NON_BLOCKING)))
        try:
            places = [int(check(driver.cuMemAllocAsync(max(room, 256), stream))) for room in rooms]
            for place, room in zip(places, rooms, strict=True):
                check(driver.cuMemsetD8Async(place, 0, max(room, 256), stream))
            yield stream, places
            for place in places:
                check(driver.cuMemFreeAsync(place, stream))
            check(driver.cuStreamSynchronize(stream))
            self._context.settle()
        finally:
            self._handle.select(0)
            driver.cuStreamDestroy(stream)

    def _upload(self, stream: int, place: int, dtype: DType, shape: tuple[int, int]) -> None:
        """Write a matrix by columns; its lower triangle is that of a positive definite one."""
        made = np.resize(np.random.default_rng(0).random(997), shape[::-1]).astype(dtype.dtype)
        diagonal = np.diag_indices(min(shape))
        made[diagonal] += sum(shape)
        self._context.check(driver.cuMemcpyHtoDAsync(place, made.ctypes.data, made.nbytes, stream))
        self._context.check(driver.cuStreamSynchronize(stream))
