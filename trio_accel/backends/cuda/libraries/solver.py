"""Dense solvers by cuSOLVER, and by cuBLAS for stacks of small matrices.

To the vendor, who knows matrices by columns, a matrix by rows is its transpose. Where a factor of that is one
of the matrix, nothing is laid out anew: Cholesky of the other triangle, and singular values with U and V
exchanged.
"""

from __future__ import annotations

import math

from ...base import DType
from ...base.kernels import kernel
from ...base.ops import ArraySpec, CholeskySpec, LuSolveSpec, LuSpec, QrSpec, SolveSpec
from ..kit._call import Call
from ..kit._matrices import broadcast, first_rows, stacked, transposed
from ..runtime._device_array import DeviceArray
from ._cusolver import orthogonal, pivoted, positive, reflected, solved
from ._solver_base import WORD, Plan, dtype_of, fill_identity, is_complex
from ._solver_spectra import SpectraLibrary

__all__ = ["SolverLibrary"]

_TRANSPOSES = {"N": 0, "T": 1, "C": 2}
# Stacks of matrices up to this size have routines of their own.
_MOST_BATCHED = 512


class SolverLibrary(SpectraLibrary):
    """Factorizations and equations, and by its base singular values and eigenvalues."""

    def _plan_cholesky(self, spec: CholeskySpec) -> Plan:
        n, dtype = spec.a.shape[-1], dtype_of(spec.a)
        if stacked(spec.a) > 1 and 0 < n <= _MOST_BATCHED:
            return self.plan_batched("potrf", dtype, (n, n))
        return self.planned(spec.a, lambda: [self.step(positive, dtype, (n,), _triangle(spec))])

    @kernel(CholeskySpec, backend="cuda", plan=_plan_cholesky)
    def _cholesky(self, spec: CholeskySpec, call: Call) -> None:
        out, status, triangle = call.array(spec.out), call.status(spec.info), _triangle(spec)
        if not out.size:
            return
        call.convert(call.array(spec.a), out)
        if is_complex(out.dtype):
            self.own.apply(call, "blank", out, status, triangle)
        if call.plan.is_batched:
            listed, n = self.listed(call, out), out.shape[-1]
            self.batched.potrf(call.handle, out.dtype, n, triangle, listed, status, stacked(out))
        else:
            self.run_step(call, call.plan.steps[0], (out.address,), stacked(out), status)
        self.own.apply(call, "finish_triangle", out, status, triangle)

    def _plan_lu(self, spec: LuSpec) -> Plan:
        m, n = spec.a.shape[-2:]
        dtype = dtype_of(spec.a)
        if stacked(spec.a) > 1 and 0 < m == n <= _MOST_BATCHED:
            return self.plan_batched("getrf", dtype, (n, n))
        return self.planned(spec.a, lambda: [self.step(pivoted, dtype, (m, n))])

    @kernel(LuSpec, backend="cuda", plan=_plan_lu)
    def _lu(self, spec: LuSpec, call: Call) -> None:
        status = call.status(spec.info)
        if not math.prod(spec.a.shape):
            return
        packed = call.copy_of(spec.a, "F")
        pivots = self._factor(call, packed, status)
        call.convert(transposed(packed), call.array(spec.lu))
        found, out = (pivots.address, pivots.dtype.itemsize), (call.at(spec.piv), WORD)
        self.own.move_pivots(call, found, out, (stacked(packed), pivots.shape[-1]), -1)

    def _plan_solve(self, spec: SolveSpec | LuSolveSpec) -> Plan:
        a, trans = (spec.a, "N") if isinstance(spec, SolveSpec) else (spec.lu, spec.trans)
        n, dtype, count = a.shape[-1], dtype_of(a), stacked(spec.out)
        if stacked(a) > 1 and 0 < n <= _MOST_BATCHED:
            return self.plan_batched("getrf", dtype, (n, n))
        columns = spec.out.shape[-1] * (count if stacked(a) == 1 else 1)
        if not columns:
            columns = 1
        return self.planned(
            a,
            lambda: [
                self.step(pivoted, dtype, (n, n)),
                self.step(solved, dtype, (n, columns), _TRANSPOSES[trans]),
            ],
        )

    @kernel(SolveSpec, backend="cuda", plan=_plan_solve)
    def _solve(self, spec: SolveSpec, call: Call) -> None:
        status = call.status(spec.info)
        if math.prod(spec.a.shape):
            packed = call.copy_of(spec.a, "F")
            self._substitute(call, "N", packed, self._factor(call, packed, status), spec.b, spec.out)

    @kernel(LuSolveSpec, backend="cuda", plan=_plan_solve)
    def _lu_solve(self, spec: LuSolveSpec, call: Call) -> None:
        status = call.status(spec.info)
        if not math.prod(spec.lu.shape):
            return
        dtype = DType.int32 if call.plan.is_batched else DType.int64
        pivots = call.workspace_array(dtype, spec.piv.shape)
        given, out = (call.packed(spec.piv), WORD), (pivots.address, dtype.itemsize)
        self.own.move_pivots(call, given, out, (stacked(spec.lu), spec.piv.shape[-1]), 1, status)
        self._substitute(call, spec.trans, call.copy_of(spec.lu, "F"), pivots, spec.b, spec.out)

    def _factor(self, call: Call, packed: DeviceArray, status: int) -> DeviceArray:
        """Factor matrices by columns in their place; the pivots count from 1."""
        *stack, n, m = packed.shape
        count = stacked(packed)
        pivots = call.workspace_array(
            DType.int32 if call.plan.is_batched else DType.int64, (*stack, min(m, n))
        )
        if call.plan.is_batched:
            listed = self.listed(call, packed)
            self.batched.getrf(call.handle, packed.dtype, n, listed, pivots.address, status, count)
        else:
            self.run_step(call, call.plan.steps[0], (packed.address, pivots.address), count, status)
        self.own.confirm_pivots(call, packed, status)
        return pivots

    def _substitute(
        self, call: Call, trans: str, factors: DeviceArray, pivots: DeviceArray, b: ArraySpec, out: ArraySpec
    ) -> None:
        """Solve with factors by columns, of which one may belong to many right-hand sides."""
        *stack, n, columns = out.shape
        x = call.workspace_array(out.dtype, (*stack, columns, n))
        if not x.size:
            return
        call.convert(broadcast(transposed(call.array(b)), x.shape), x)
        count = math.prod(stack)
        if stacked(factors) == 1:
            count, columns = 1, columns * count
        elif stacked(factors) != count:
            factors = _repeated(call, factors, (*stack, n, n))
            pivots = _repeated(call, pivots, (*stack, n))
        if call.plan.is_batched:
            listed, sides = self.listed(call, factors), self.listed(call, x)
            shape, letter = (n, columns), _TRANSPOSES[trans]
            self.batched.getrs(call.handle, out.dtype, shape, letter, listed, pivots.address, sides, count)
        else:
            places = (factors.address, pivots.address, x.address)
            self.run_step(call, call.plan.steps[1], places, count, call.workspace(WORD * count))
        call.convert(transposed(x), call.array(out))

    def _plan_qr(self, spec: QrSpec) -> Plan:
        m, n = spec.a.shape[-2:]
        dtype, k = dtype_of(spec.a), min(m, n)
        columns = 0 if spec.q is None else spec.q.shape[-1]
        return self.planned(
            spec.a,
            lambda: [
                self.step(reflected, dtype, (m, n)),
                *([self.step(orthogonal, dtype, (m, columns, k))] if columns else []),
            ],
        )

    @kernel(QrSpec, backend="cuda", plan=_plan_qr)
    def _qr(self, spec: QrSpec, call: Call) -> None:
        *stack, m, n = spec.a.shape
        k, r = min(m, n), call.array(spec.r)
        if not math.prod(spec.a.shape):
            call.fill(r, 0)
            fill_identity(call, spec.q)
            return
        packed, tau = call.copy_of(spec.a, "F"), call.workspace_array(spec.a.dtype, (*stack, k))
        count = stacked(packed)
        said = call.workspace(WORD * count)
        self.run_step(call, call.plan.steps[0], (packed.address, tau.address), count, said)
        call.convert(first_rows(transposed(packed), r.shape[-2]), r)
        self.own.apply(call, "finish_triangle", r, 0, "L")
        if spec.q is not None:
            q = packed
            if spec.q.shape[-1] != n:
                q = call.workspace_array(packed.dtype, (*stack, spec.q.shape[-1], m))
                call.convert(first_rows(packed, k), first_rows(q, k))
            self.run_step(call, call.plan.steps[1], (q.address, tau.address), count, said)
            call.convert(transposed(q), call.array(spec.q))


def _triangle(spec: CholeskySpec) -> str:
    """The triangle that is read, of the transpose; of the factor, it is the one that becomes zero."""
    return "L" if spec.upper else "U"


def _repeated(call: Call, array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """An array broadcast in full."""
    full = call.workspace_array(array.dtype, shape)
    call.convert(broadcast(array, shape), full)
    return full
