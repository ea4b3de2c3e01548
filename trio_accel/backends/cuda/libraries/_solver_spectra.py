"""Singular values and eigenvalues by cuSOLVER."""

from __future__ import annotations

import math

from ...base.kernels import kernel
from ...base.ops import ArraySpec, EighSpec, SvdSpec
from ..kit._call import Call
from ..kit._matrices import first_rows, stacked, transposed
from ..runtime._device_array import DeviceArray
from ._cusolver import eigen, singular
from ._solver_base import WORD, Plan, SolverBase, Step, dtype_of, fill_identity, is_complex

__all__ = ["SpectraLibrary"]

_OTHER = {"L": "U", "U": "L"}
# Stacks of matrices up to these sizes have routines of their own.
_MOST_JACOBI, _MOST_EIGEN = 32, 128
# Bytes of workspace for one call with many matrices.
_MOST_WORKSPACE = 128 << 20


class SpectraLibrary(SolverBase):
    """Singular values and eigenvalues; `SolverLibrary` is the library."""

    def _plan_svd(self, spec: SvdSpec) -> Plan:
        m, n = spec.a.shape[-2:]
        dtype, most, least = dtype_of(spec.a), max(m, n), min(m, n)
        if stacked(spec.a) > 1 and least > 0 and most <= _MOST_JACOBI:
            return self.plan_batched("gesvdj", dtype, (n, m))
        job = "N" if spec.u is None else "S" if spec.u.shape[-1] == least == _rows(spec.vh) else "A"
        return self.planned(spec.a, lambda: [self.step(singular, dtype, (most, least), job)])

    @kernel(SvdSpec, backend="cuda", plan=_plan_svd)
    def _svd(self, spec: SvdSpec, call: Call) -> None:
        status = call.status(spec.info)
        *_, m, n = spec.a.shape
        if not math.prod(spec.a.shape):
            fill_identity(call, spec.u)
            fill_identity(call, spec.vh)
            return
        # The transpose has U and V exchanged; the routine wants as many rows as columns.
        is_turned = n >= m or call.plan.is_batched
        packed = call.copy_of(spec.a, "C" if is_turned else "F")
        self.blank(call, packed, status)
        said = call.workspace(WORD * stacked(packed))
        if call.plan.is_batched:
            self._svd_batched(spec, call, packed, said)
        else:
            left, right = (spec.vh, spec.u) if is_turned else (spec.u, spec.vh)
            vectors = [
                0 if one is None else call.result(one, "C" if is_turned else "F") for one in (left, right)
            ]
            places = (packed.address, call.at(spec.s), *vectors)
            self.run_step(call, call.plan.steps[0], places, stacked(packed), said)
        self.own.merge(call, said, status, stacked(packed))

    def _svd_batched(self, spec: SvdSpec, call: Call, packed: DeviceArray, said: int) -> None:
        *stack, m, n = packed.shape
        dtype, count = packed.dtype, stacked(packed)
        left, right = call.workspace_array(dtype, (*stack, n, n)), call.workspace_array(dtype, (*stack, m, m))
        size = self.batched.gesvdj_size(dtype, n, m, count)
        places = packed.address, call.at(spec.s), left.address, right.address
        work = call.workspace(size * dtype.itemsize), size
        self.batched.gesvdj(call.handle, dtype, (n, m), places, work, said, count)
        if spec.u is not None and spec.vh is not None:
            call.convert(first_rows(left, _rows(spec.vh)), call.array(spec.vh))
            turned = transposed(first_rows(right, spec.u.shape[-1]))
            call.convert(turned, call.array(spec.u), conjugate=is_complex(dtype))

    def _plan_eigh(self, spec: EighSpec) -> Plan:
        n, dtype = spec.a.shape[-1], dtype_of(spec.a)
        options = _OTHER[spec.uplo], spec.v is not None

        def steps() -> list[Step]:
            batch = 1
            if n <= _MOST_EIGEN:
                room = eigen(dtype, n, *options).sizes(self._handle)[0]
                batch = max(1, min(stacked(spec.a), _MOST_WORKSPACE // max(room, 1)))
            return [self.step(eigen, dtype, (n,), *options, batch)]

        return self.planned(spec.a, steps)

    @kernel(EighSpec, backend="cuda", plan=_plan_eigh)
    def _eigh(self, spec: EighSpec, call: Call) -> None:
        status = call.status(spec.info)
        if not math.prod(spec.a.shape):
            return
        # The transpose is the conjugate.
        packed = call.copy_of(spec.a)
        self.blank(call, packed, status, spec.uplo)
        count = stacked(packed)
        said = call.workspace(WORD * count)
        self.run_step(call, call.plan.steps[0], (packed.address, call.at(spec.w)), count, said)
        if spec.v is not None:
            call.convert(transposed(packed), call.array(spec.v), conjugate=is_complex(packed.dtype))
        self.own.merge(call, said, status, count)


def _rows(array: ArraySpec | None) -> int:
    return 0 if array is None else array.shape[-2]
