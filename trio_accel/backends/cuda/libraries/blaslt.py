"""Fused products: cuBLASLt. Its descriptors, and products in its terms, are in `_cublaslt`."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from time import perf_counter
from typing import ClassVar

from cuda.bindings import driver
from nvmath.bindings import cublas, cublasLt

from ...base import NotSupportedError
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, FusedMatmulSpec, OperationSpec
from ...base.kit.kernels import kernel
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ..runtime._context import CudaMemoryError
from ..runtime._stream import scratch
from ._cublaslt import Order, Problem, Routine

__all__ = ["BlasLtLibrary"]

# NVIDIA's advice for Hopper, as for cuBLAS.
_WORKSPACE = 32 << 20
# What needs more memory is not tried out ahead of its first use.
_MOST_TRIED = 256 << 20
# How many ways are measured, and how often.
_WAYS, _TIMES = 8, 10


class BlasLtLibrary(CudaLibrary):
    """cuBLASLt: one call for each product. A plan has the algorithm, which the library is asked for once."""

    name = "blaslt"
    errors: ClassVar[Errors] = {cublasLt.cuBLASLtError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})
    # Graphs launch its products one by one: no captured one was replayed on a card yet.
    is_captured: ClassVar[bool] = False

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._handle: int = cublasLt.create()

    def _destroy(self) -> None:
        cublasLt.destroy(self._handle)

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        key: tuple[object, ...] = getattr(spec, "key", ())
        return key or super()._key_of(spec)

    def _close_plan(self, plan: tuple[Routine, ...]) -> None:
        for routine in plan:
            routine.close()

    def _plan(self, spec: FusedMatmulSpec, device: LibraryDevice) -> tuple[Routine, ...]:
        """Ask the library for an algorithm, and try it out: its first call loads code, and may wait."""
        if not spec.out.size:
            if spec.sums is not None and spec.sums.size and spec.aux is None:
                raise NotSupportedError(
                    f"blaslt: CUDA has no sums with a product without elements, got shape {spec.out.shape}",
                    backend="cuda",
                )
            return ()
        problem = Problem.of(spec)
        routine = Routine(self._handle, problem, _WORKSPACE, _WAYS if spec.is_tuned else 1)
        with ExitStack() as undo:
            undo.callback(routine.close)
            # Without memory for it, it runs as the library advises.
            with suppress(CudaMemoryError):
                if spec.is_tuned or problem.nbytes <= _MOST_TRIED:
                    self._try(routine)
            undo.pop_all()
        return (routine,)

    def _try(self, routine: Routine) -> None:
        """Run it in each of its ways on zeros, and choose the fastest one; waits for a stream of its own."""
        nbytes, check = routine.problem.nbytes, self._context.check
        with scratch(self._context, nbytes, nbytes, _WORKSPACE) as (stream, (source, out, workspace)):
            # Of what is written, nothing may be where another array is written.
            pointers = [out if field in ("saved", "sums") else source for field in routine.fields]

            def run(way: int, times: int) -> float:
                routine.choose(way)
                check(driver.cuStreamSynchronize(stream))
                start = perf_counter()
                for _ in range(times):
                    routine.run((1, 0), (source, source, 0, out), pointers, workspace, stream)
                check(driver.cuStreamSynchronize(stream))
                return perf_counter() - start

            took: list[float] = []
            for way in range(routine.ways):
                took.append(run(way, 1))
                if routine.ways > 1:
                    took[way] = run(way, _TIMES)
            routine.choose(took.index(min(took)))

    @kernel(FusedMatmulSpec, backend="cuda", plan=_plan)
    def _fused_matmul(self, spec: FusedMatmulSpec, call: KernelCall) -> None:
        if not call.plan:
            if spec.sums is not None:
                call.fill(spec.sums, 0)
            return
        routine: Routine = call.plan[0]
        a, b = (
            _operand(call, array, order, routine.problem)
            for array, order in zip((spec.a, spec.b), routine.problem.orders, strict=True)
        )
        out = call.at(spec.out)
        # Without a factor it is not read; of float8 it must not be the result, whose type is another.
        c = call.packed(spec.c) if spec.c is not None and spec.beta else 0
        strides = routine.scale_strides
        pointers = [
            _scales(call, getattr(spec, field), strides[field])
            if field in strides
            else call.packed(getattr(spec, field))
            for field in routine.fields
        ]
        workspace = call.workspace(routine.workspace)
        routine.run((spec.alpha, spec.beta), (b, a, c, out), pointers, workspace, call.handle)


def _scales(call: KernelCall, array: ArraySpec, strides: tuple[int, int]) -> int:
    """Return the address of scales of blocks as they have to lie."""
    if array.strides[-2:] == strides and not array.offset % 16:
        return call.at(array)
    nbytes = max(extent * step for extent, step in zip(array.shape[-2:], strides, strict=True))
    # In front there are axes of one element alone.
    room = DeviceArray(
        call.workspace(nbytes), array.dtype, array.shape, (*[nbytes] * (array.ndim - 2), *strides)
    )
    call.convert(call.array(array), room)
    return room.address


def _operand(call: KernelCall, array: ArraySpec, order: Order | None, problem: Problem) -> int:
    """Return the address of an operand as it has to lie. Where nothing is added, it is zeros."""
    if problem.is_zero:
        room = call.workspace(problem.nbytes)
        call.stream.set_bytes(room, 0, problem.nbytes)
        return room
    if order is None:
        return call.at(array)
    source = call.array(array)
    if problem.stack is not None:
        source = broadcast(source, (*problem.stack, *source.shape[-2:]))
    return call.copy_of(source, order).address
