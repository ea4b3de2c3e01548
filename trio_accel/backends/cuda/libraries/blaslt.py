"""Fused products: cuBLASLt. Its descriptors, and products in its terms, are in `_cublaslt`."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import ClassVar

import attrs
from cuda.bindings import driver
from nvmath.bindings import cublas, cublasLt

from ...base import NotSupportedError
from ...base.device_array import broadcast
from ...base.kernels import kernel
from ...base.ops import ArraySpec, FusedMatmulSpec, OperationSpec
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ..runtime._context import CudaMemoryError
from ..runtime._stream import scratch
from ._cublaslt import Numbers, Order, Problem, Routine

__all__ = ["BlasLtLibrary"]

# NVIDIA's advice for Hopper, as for cuBLAS.
_WORKSPACE = 32 << 20
# What needs more memory is not tried out ahead of its first use.
_MOST_TRIED = 256 << 20
# How many ways are measured, and how often.
_WAYS, _TIMES = 8, 10


@attrs.frozen(eq=False)
class _Plan:
    """What products of one layout have in common; nothing where the result is empty."""

    routine: Routine | None = None


class BlasLtLibrary(CudaLibrary):
    """cuBLASLt: one call for each product. A plan has the algorithm, which the library is asked for once."""

    name = "blaslt"
    errors: ClassVar[Errors] = {cublasLt.cuBLASLtError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})
    # Graphs launch its products one by one: no captured one was replayed on a card yet.
    is_captured: ClassVar[bool] = False

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._numbers = Numbers()
        self._handle: int = cublasLt.create()

    def _destroy(self) -> None:
        cublasLt.destroy(self._handle)

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        key: tuple[object, ...] = getattr(spec, "key", ())
        return key or super()._key_of(spec)

    def _close_plan(self, plan: _Plan) -> None:
        if plan.routine is not None:
            plan.routine.close()

    def _plan(self, spec: FusedMatmulSpec, device: LibraryDevice) -> _Plan:
        """Ask the library for an algorithm, and try it out: its first call loads code, and may wait."""
        if not spec.out.size:
            if spec.sums is not None and spec.sums.size and spec.aux is None:
                raise NotSupportedError(
                    f"blaslt: CUDA has no sums with a product without elements, got shape {spec.out.shape}",
                    backend="cuda",
                )
            return _Plan()
        problem = Problem.of(spec)
        routine = Routine(self._handle, problem, _WORKSPACE, _WAYS if spec.is_tuned else 1)
        try:
            if spec.is_tuned or problem.nbytes <= _MOST_TRIED:
                # Without memory for it, it runs as the library advises.
                with suppress(CudaMemoryError):
                    self._try(routine)
        except BaseException:
            routine.close()
            raise
        return _Plan(routine)

    def _try(self, routine: Routine) -> None:
        """Run it in each of its ways on zeros, and choose the fastest one; waits for a stream of its own."""
        problem, numbers = routine.problem, Numbers()
        numbers.put(problem.scale, 1, 0)
        with scratch(self._context, problem.nbytes, problem.nbytes, _WORKSPACE) as (stream, rooms):
            source, out, workspace = rooms
            # Of what is written, nothing may be where another array is written.
            places, pointers = (source, source, 0, out), problem.places(source, out)

            def run(times: int) -> float:
                self._context.check(driver.cuStreamSynchronize(stream))
                start = perf_counter()
                for _ in range(times):
                    routine.run(numbers, places, pointers, workspace, stream)
                self._context.check(driver.cuStreamSynchronize(stream))
                return perf_counter() - start

            if routine.ways == 1:
                run(1)
                return
            took: list[float] = []
            for way in range(routine.ways):
                routine.choose(way)
                run(1)
                took.append(run(_TIMES))
            routine.choose(took.index(min(took)))

    @kernel(FusedMatmulSpec, backend="cuda", plan=_plan)
    def _fused_matmul(self, spec: FusedMatmulSpec, call: KernelCall) -> None:
        routine: Routine | None = call.plan.routine
        if routine is None:
            if spec.sums is not None:
                call.fill(spec.sums, 0)
            return
        problem = routine.problem
        a, b = (
            call.at(array) if order is None else _operand(call, array, order, problem)
            for array, order in zip((spec.a, spec.b), problem.orders, strict=True)
        )
        out = call.at(spec.out)
        # Without a factor it is not read; of float8 it must not be the result, whose type is another.
        c = call.packed(spec.c) if spec.c is not None and spec.beta else 0
        pointers = [call.packed(getattr(spec, field)) for _, field in problem.pointers]
        workspace = call.workspace(routine.workspace)
        self._numbers.put(problem.scale, spec.alpha, spec.beta)
        routine.run(self._numbers, (b, a, c, out), pointers, workspace, call.handle)


def _operand(call: KernelCall, array: ArraySpec, order: Order, problem: Problem) -> int:
    """Lay an operand out anew; returns the address. Where nothing is added, it is zeros."""
    if problem.is_zero:
        nbytes = problem.nbytes
        room = call.workspace(nbytes)
        call.stream.set_bytes(room, 0, nbytes)
        return room
    source = call.array(array)
    if problem.stack is not None:
        source = broadcast(source, (*problem.stack, *source.shape[-2:]))
    return call.copy_of(source, order).address
