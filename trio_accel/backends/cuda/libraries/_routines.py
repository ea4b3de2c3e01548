"""BLAS 2 and 3, but for products of general matrices: routines of cuBLAS for one type each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
from cuda.bindings import driver

from ...base.blas import Factor, Matrix, Plan, Routine, plan_routine
from ...base.checks import NATIVE
from ...base.device_array import broadcast
from ...base.kernels import kernel
from ...base.ops import ArraySpec, OperationSpec, contiguous_strides
from ..kit._device import LibraryDevice
from ..kit._library import Call, factor_of
from ._cublas import HOST, KINDS, Kind
from ._vectors import VectorLibrary

__all__ = ["RoutineLibrary"]

_MATRICES = frozenset({"linalg.symm", "linalg.syrk", "linalg.syr2k", "linalg.trmm", "linalg.trsm"})
# Operations whose routines wait for the device when they are called for the first time.
_TRIED = _MATRICES | {"linalg.asum", "linalg.iamax", "linalg.rot"}
# Larger arrays need no more kernels than those of this size.
_LARGE = 512


class RoutineLibrary(VectorLibrary):
    """Operations on symmetric, Hermitian and triangular matrices."""

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._tried: set[tuple[object, ...]] = set()

    def _plan_matrices(self, spec: Any, device: LibraryDevice) -> Plan:
        return plan_routine(spec)

    @kernel("linalg.symm", backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    @kernel("linalg.syrk", backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    @kernel("linalg.syr2k", backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    @kernel("linalg.trmm", backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    @kernel("linalg.trsm", backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    def _matrices(self, spec: Any, call: Call) -> None:
        plan: Plan = call.plan
        routine = plan.routine_for(spec)
        if routine is None:
            return
        if "out" in plan.steps and spec.b != spec.out:
            call.convert(broadcast(call.array(spec.b), spec.out.shape), call.array(spec.out))
        arrays = {field: call.array(getattr(spec, field)) for field in plan.steps}
        copies = {field: call.copy_of(arrays[field], order) for field, order in plan.copies.items()}
        addresses = {field: array.address for field, array in {**arrays, **copies}.items()}
        self._blas.select(call.stream, HOST)
        kind = KINDS[spec.a.dtype]
        batched = _batched(plan)
        # What is captured would read the lists again when it runs; they are not kept.
        if batched is not None and not call.stream.is_capturing:
            lists = {field: call.uploaded(plan.addresses(field, addresses[field])) for field in plan.steps}
            self._invoke(kind, batched, spec, lists)
        else:
            for places in plan.calls(addresses):
                self._invoke(kind, routine, spec, places)
        for field in copies.keys() & {"c", "out"}:
            call.convert(copies[field], arrays[field])

    def _invoke(self, kind: Kind, routine: Routine, spec: Any, addresses: Mapping[str, int]) -> None:
        arguments: list[str | complex] = []
        for value in routine.arguments:
            if isinstance(value, Factor):
                arguments.append(factor_of("blas", value.field, value.of(spec), spec.a.dtype))
            else:
                arguments.append(addresses[value.field] if isinstance(value, Matrix) else value)
        # This one writes to an array of its own, which may be the operand.
        result = arguments[-2:] if routine.name == "trmm" else ()
        self._blas.invoke(kind, routine.name, *arguments, *result)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Try a routine out before it is enqueued for the first time: it waits for the device then."""
        if spec.operation not in _TRIED:
            return None
        dtype = spec.inputs()[0].dtype
        if self._find_plan(spec) is not None or dtype not in NATIVE:
            return None
        key: tuple[object, ...] = spec.operation, dtype
        if spec.operation in _MATRICES:
            is_stack = spec.outputs()[0].ndim > 2
            spec = _small(spec, (1,) * is_stack)
            key = spec.descriptor().plan_key(spec)
        return None if key in self._tried else partial(self._in_context, self._try_out, spec, key)

    def _try_out(self, spec: OperationSpec, key: tuple[object, ...]) -> None:
        arrays = _arrays(spec)
        kind, room = KINDS[spec.inputs()[0].dtype], 16 * _LARGE**2
        with self._blas.scratch(len(arrays) * (room + 8)) as (stream, place):
            addresses = {field: place + number * room for number, field in enumerate(arrays)}
            if spec.operation in _MATRICES:
                plan = plan_routine(spec)
                for routine in (plan.routine, plan.plain):
                    if routine is not None:
                        self._invoke(kind, routine, spec, addresses)
                batched = _batched(plan)
                if batched is not None:
                    words, lists = np.array([*addresses.values()], np.uint64), place + len(arrays) * room
                    copied = driver.cuMemcpyHtoDAsync(lists, words.ctypes.data, words.nbytes, stream)
                    self._context.check(copied)
                    places = {field: lists + 8 * number for number, field in enumerate(arrays)}
                    self._invoke(kind, batched, spec, places)
            else:
                self.try_vectors(kind, spec.operation, place)
        self._tried.add(key)


def _batched(plan: Plan) -> Routine | None:
    """The one call for all matrices of a stack, which takes lists of addresses; None where there is none."""
    if not plan.stack or plan.routine is None or plan.routine.name != "trsm":
        return None
    return Routine("trsm_batched", (*plan.routine.arguments, math.prod(plan.stack)))


def _small(spec: Any, stack: tuple[int, ...]) -> Any:
    """An operation of one matrix that needs the same kernels: sizes with as many bits are one size."""
    arrays = {name: _small_array(array, stack) for name, array in _arrays(spec).items() if array}
    return attrs.evolve(spec, **arrays)


def _arrays(spec: Any) -> dict[str, ArraySpec | None]:
    return {field.name: getattr(spec, field.name) for field in spec.descriptor().fields if field.is_array}


def _small_array(array: ArraySpec, stack: tuple[int, ...]) -> ArraySpec:
    rows, columns = (min(1 << max(extent - 1, 0).bit_length(), _LARGE) for extent in array.shape[-2:])
    size, is_by_rows = array.dtype.itemsize, array.strides[-2] >= array.strides[-1]
    strides = contiguous_strides((rows, columns), size) if is_by_rows else (size, rows * size)
    return ArraySpec(0, 0, array.dtype, (*stack, rows, columns), (*(0,) * len(stack), *strides))
