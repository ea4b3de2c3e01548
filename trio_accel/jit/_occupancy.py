"""The actor that serves kernels; and what a kernel needs of a device, and how many of its blocks fit."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import Dim3, KernelInfoSpec
from ..devices import LibraryActor, Operation, Planned, Planner

__all__ = ["JitActor", "Occupancy", "QueryOccupancy"]


class JitActor(LibraryActor):
    """Serves launches of kernels, on a stream of its own.

    CPU backend: functions that are named by import path. CUDA: NVRTC, nvJitLink and the driver.
    """

    library = "jit"


@attrs.frozen(kw_only=True)
class Occupancy:
    """A kernel on a device, with blocks of a given size.

    Attributes:
        max_active_blocks: Blocks that run at once on one multiprocessor; 0 for blocks that do not fit.
        suggested_block: Threads of a block with which the most threads run at once.
        suggested_grid: Blocks of that size that fill the device.
        max_active_clusters: Clusters that run at once on the device; 0 for a kernel without clusters.
        max_threads: The most threads that a block of it can have.
        registers: Registers of a thread.
        static_shared: Bytes of shared memory that it has statically.
        max_dynamic_shared: The most bytes of dynamic shared memory that a block can have.
        local_bytes: Bytes of local memory of a thread: registers that were spilled, and arrays.
        multiprocessors: How many the device has.
    """

    max_active_blocks: int
    suggested_block: int
    suggested_grid: int
    max_active_clusters: int
    max_threads: int
    registers: int
    static_shared: int
    max_dynamic_shared: int
    local_bytes: int
    multiprocessors: int


@attrs.define(eq=False, on_setattr=None)
class QueryOccupancy(Operation[JitActor, Occupancy]):
    """Asks what a kernel needs; see `Kernel.occupancy`."""

    name: str
    definition: str
    block: Dim3
    shared: int
    library: ClassVar[str] = "trio_accel.jit:JitActor"

    @property
    def operation(self) -> str:
        """Name of the operation: the kernel's."""
        return self.name

    def plan(self, planner: Planner) -> Planned[Occupancy]:
        """Name the words that tell."""
        words = planner.status(len(KernelInfoSpec.WORDS))

        def finish() -> Occupancy:
            return Occupancy(**dict(zip(KernelInfoSpec.WORDS, map(int, words), strict=True)))

        return Planned(KernelInfoSpec(self.definition, self.block, self.shared, words), finish=finish)
