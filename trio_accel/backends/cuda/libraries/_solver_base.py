"""What the dense solvers have in common: how their routines are planned and enqueued."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import attrs
from nvmath.bindings import cublas, cusolver

from ...base import DType
from ...base.checks import NATIVE
from ...base.ops import ArraySpec, real_of
from ..kit._call import Call
from ..kit._checks import check_dtype
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary, Errors
from ..kit._matrices import diagonals, stacked
from ..runtime._device_array import DeviceArray
from ._cusolver import Handle, Routine
from ._solver_batched import Batched
from ._solver_kernels import POINTER, SolverKernels
from ._solver_trials import Trials

__all__ = ["WORD", "Plan", "SolverBase", "Step", "dtype_of", "fill_identity", "is_complex"]

WORD = 4
"""Bytes of a status word, and of a pivot of batched routines."""


@attrs.frozen(eq=False)
class Step:
    """A routine with its workspace: bytes on the device, and on the host."""

    routine: Routine
    sizes: tuple[int, int]


@attrs.frozen(eq=False)
class Plan:
    """What an operation is made of: routines one after another, or routines for stacks instead."""

    steps: tuple[Step, ...] = ()
    is_batched: bool = False


class SolverBase(CudaLibrary):
    """Handles of the vendor's libraries, and how operations use them.

    Routines that iterate wait for the device, and never get a NaN or an infinity.

    Attributes:
        own: Kernels of the backend's own.
        batched: Routines for stacks of small matrices.
    """

    name: ClassVar[str] = "solver"
    # Stacks of small matrices are factored by cuBLAS.
    errors: ClassVar[Errors] = {cusolver.cuSOLVERError: cusolver.Status, cublas.cuBLASError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self.own: SolverKernels = SolverKernels(device.kernels)
        self._handle = Handle()
        self.batched: Batched = Batched(self._handle)
        self._trials = Trials(self._context, self._handle, self.own)

    def _destroy(self) -> None:
        self.batched.destroy()
        self._handle.destroy()

    def plan_batched(self, name: str, dtype: DType, shape: tuple[int, int]) -> Plan:
        """The plan of an operation by routines for stacks, which are tried out."""
        self._trials.batched(self.batched, name, dtype, shape)
        return Plan(is_batched=True)

    def planned(self, array: ArraySpec, steps: Callable[[], list[Step]]) -> Plan:
        """The plan of such steps; an empty array needs none."""
        return Plan(tuple(steps()) if math.prod(array.shape) else ())

    def step(
        self, make: Callable[..., Routine], dtype: DType, extents: tuple[int, ...], *options: object
    ) -> Step:
        """A routine that is tried out, and its workspace; see `Trials.routine`."""
        self._trials.routine(make, dtype, extents, options)
        routine = make(dtype, *extents, *options)
        return Step(routine, routine.sizes(self._handle))

    def run_step(self, call: Call, step: Step, places: tuple[int, ...], count: int, status: int) -> None:
        """Enqueue a routine for each matrix of a stack; `singular` and `eigen` wait for the device."""
        self._handle.select(call.handle)
        work = call.workspace(step.sizes[0]), call.host_workspace(step.sizes[1])
        step.routine.run(self._handle, places, count, step.sizes, work, status)

    def listed(self, call: Call, matrices: DeviceArray) -> int:
        """The addresses of matrices, in device memory."""
        count = stacked(matrices)
        listed = call.workspace(POINTER * count)
        nbytes = matrices.nbytes // count
        self.own.list_matrices(call.handle, matrices.address, nbytes, count, listed)
        return listed

    def blank(self, call: Call, matrices: DeviceArray, status: int, triangle: str = "") -> None:
        """Keep what is no finite number from routines that iterate, perhaps for ever."""
        self.own.apply(call, "screen", matrices, status, triangle)
        self.own.apply(call, "blank", matrices, status, triangle)


def fill_identity(call: Call, matrices: ArraySpec | None) -> None:
    """Make matrices the identity, where there are any."""
    if matrices is not None:
        array = call.array(matrices)
        call.fill(array, 0)
        call.fill(diagonals(array), 1)


def dtype_of(array: ArraySpec) -> DType:
    """The dtype of an array; refused where there is no solver for it."""
    check_dtype("solver", array.dtype, NATIVE)
    return array.dtype


def is_complex(dtype: DType) -> bool:
    """Whether its elements have an imaginary part."""
    return real_of(dtype) is not dtype
