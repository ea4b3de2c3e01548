"""Dense solvers by cuSOLVER, and by cuBLAS for stacks of small matrices.

The vendor stores matrices by columns, so it sees a matrix by rows as its transpose. If a factor of the
transpose is also one of the matrix, nothing is copied: Cholesky of the other triangle for small matrices, and
singular values with U and V exchanged.

Routines that iterate, such as `xgesvd` and `xsyev_batched`, wait for the device, so they are called in a
thread. They never get a NaN or an infinity: with one, `gesvd` of 300² took 52 s.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from nvmath.bindings import cublas, cusolver

from ...base import NATIVE, ArraySpec, DType, Ints, kernel
from ...base.contract.device_array import DeviceArray, broadcast, diagonals, first_rows, stacked, transposed
from ...base.gpu.library import Order
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ._cusolver import LOWER, POINTER, UPPER, SolverHandles, SolverKernels, SolverRoutine, WarmUps

_WORD = 4
# Stacks of matrices up to these sizes have routines of their own.
_MOST_BATCHED, _MOST_JACOBI, _MOST_EIGEN = 512, 32, 128
# Bytes of workspace for one call with many matrices.
_MOST_WORKSPACE = 128 << 20
# The vendor factors a lower triangle in half the time of an upper one (H100, 4096 rows: 1.9 and 4.1 ms). From
# this number of rows on, two copies of the matrix cost less than the difference.
_TURNED = 512


class SolverLibrary(CudaLibrary):
    """Factorizations, equations, singular values and eigenvalues.

    The plan of an operation is the routines that it is made of; an empty array needs none.
    """

    name = "solver"
    # It needs memory of the host, and status words.
    is_captured: ClassVar[bool] = False
    # Stacks of small matrices are factored by cuBLAS.
    errors: ClassVar[Errors] = {cusolver.cuSOLVERError: cusolver.Status, cublas.cuBLASError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._own = SolverKernels(device.kernels)
        self._vendor = SolverHandles()
        self._trials = WarmUps(self._context, self._vendor, self._own)

    def _destroy(self) -> None:
        self._vendor.destroy()

    def _ready(self, routine: SolverRoutine, *previous: SolverRoutine) -> SolverRoutine:
        """Return a tried routine with its workspace; it is tried on the results of `previous`."""
        self._trials.run(*previous, routine)
        return self._vendor.sized(routine)

    def _enqueue(
        self, call: KernelCall, routine: SolverRoutine, status: int, **arrays: DeviceArray | tuple[int, int]
    ) -> None:
        """Enqueue a routine of the plan for each matrix of the stack ``a``; see `SolverHandles.run`."""
        matrices = arrays["a"]
        assert isinstance(matrices, DeviceArray)
        count, addresses = stacked(matrices), dict[str, tuple[int, int]]()
        for word in routine.arrays:
            array = arrays[word.rstrip("*")]
            operand = (array.address, array.nbytes // count) if isinstance(array, DeviceArray) else array
            if word.endswith("*"):
                listed = call.workspace(POINTER * count)
                self._own.list_matrices(call.handle, *operand, count, listed)
                operand = listed, 0
            addresses[word] = operand
        work = call.workspace(routine.work[0]), call.host_workspace(routine.work[1])
        self._vendor.run(routine, call.handle, addresses, count, work, status)

    def _blank(self, call: KernelCall, matrices: DeviceArray, status: int, triangle: str = "") -> None:
        """Remove NaN and infinity before routines that iterate, because these may never return."""
        self._own.apply(call.handle, "screen", matrices, status, triangle)
        self._own.apply(call.handle, "blank", matrices, status, triangle)

    def _plan_cholesky(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        n, dtype = spec.a.shape[-1], spec.a.dtype
        options = {"uplo": LOWER if spec.upper or _is_turned(spec) else UPPER}
        if not spec.a.size:
            return ()
        if stacked(spec.a) == 1 or n > _MOST_BATCHED:
            return (self._ready(SolverRoutine("xpotrf", dtype, {"n": n}, options)),)
        routine = SolverRoutine("?potrf_batched", dtype, {"n": n}, options, stacked(spec.a))
        self._trials.run(attrs.evolve(routine, options={"uplo": UPPER}, batch=2))
        return (routine,)

    @kernel("linalg.cholesky", backend="cuda", dtypes=NATIVE, plan=_plan_cholesky)
    def _cholesky(self, spec: Any, call: KernelCall) -> None:
        # The triangle to read of the transpose; it is the triangle of the factor that becomes zero.
        out, status, triangle = call.array(spec.out), call.status(spec.info), "L" if spec.upper else "U"
        if not out.size:
            return
        is_turned = _is_turned(spec)
        factor = call.room(out) if is_turned else out
        source = call.array(spec.a)
        call.convert(transposed(source) if is_turned else source, factor)
        if out.dtype.kind == "complex":
            self._own.apply(call.handle, "blank", factor, status, triangle)
        self._enqueue(call, call.plan[0], status, a=factor)
        if is_turned:
            call.convert(transposed(factor), out)
        self._own.apply(call.handle, "finish_triangle", out, status, triangle)

    def _plan_lu(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        """Plan an LU factorization, followed by a substitution if there are right-hand sides."""
        a = spec.lu if spec.operation == "linalg.lu_solve" else spec.a
        (m, n), dtype, count = a.shape[-2:], a.dtype, stacked(a)
        trans = spec.trans if spec.operation == "linalg.lu_solve" else 0
        out = getattr(spec, "out", None)
        columns, total = (0, 0) if out is None else (out.shape[-1], stacked(out))
        if not a.size:
            return ()
        if count > 1 and m == n <= _MOST_BATCHED:
            factor = SolverRoutine("?getrf_batched", dtype, {"n": n}, batch=count)
            sides = SolverRoutine(
                "?getrs_batched", dtype, {"n": n, "columns": columns}, {"trans": trans}, total
            )
            first = attrs.evolve(sides, sizes={"n": n, "columns": 1}, options={"trans": 0}, batch=2)
            self._trials.run(attrs.evolve(factor, batch=2), first)
            return factor, sides
        factor = SolverRoutine("xgetrf", dtype, {"m": m, "n": n})
        planned = self._ready(factor)
        if out is None:
            return (planned,)
        sizes = {"n": n, "columns": columns * (total if count == 1 else 1) or 1}
        return planned, self._ready(SolverRoutine("xgetrs", dtype, sizes, {"trans": trans}), factor)

    @kernel("linalg.lu", backend="cuda", dtypes=NATIVE, plan=_plan_lu)
    def _lu(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if call.plan:
            packed = call.copy_of(spec.a, "F")
            pivots = self._factor(call, packed, status)
            call.convert(transposed(packed), call.array(spec.lu))
            self._own.move_pivots(call.handle, pivots, call.array(spec.piv), -1)

    @kernel("linalg.det", "linalg.slogdet", backend="cuda", dtypes=NATIVE, plan=_plan_lu)
    def _det(self, spec: Any, call: KernelCall) -> None:
        stack, is_complex = spec.a.shape[:-2], spec.a.dtype.kind == "complex"
        # Three numbers for each matrix, in double precision: the determinant, its sign, and the logarithm of
        # its size.
        numbers = call.workspace_array(DType.complex128, (*stack, 3))
        if call.plan:
            status = call.workspace_array(DType.int32, (stacked(spec.a),))
            call.fill(status, 0)
            packed = call.copy_of(spec.a, "F")
            pivots = self._factor(call, packed, status.address)
            self._own.determinants(call.handle, packed, pivots, status.address, numbers.address)
        else:
            call.fill(numbers, 1)
            call.fill(_part(numbers, 2, DType.complex128), 0)
        for index, name in enumerate(("det", "sign", "logabsdet")):
            out = getattr(spec, name, None)
            if out is not None:
                dtype = DType.complex128 if is_complex and index < 2 else DType.float64
                call.convert(_part(numbers, index, dtype), call.array(out))

    @kernel("linalg.solve", "linalg.inv", backend="cuda", dtypes=NATIVE, plan=_plan_lu)
    def _solve(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if call.plan:
            packed = call.copy_of(spec.a, "F")
            self._substitute(
                call, packed, self._factor(call, packed, status), getattr(spec, "b", None), spec.out
            )

    @kernel("linalg.lu_solve", backend="cuda", dtypes=NATIVE, plan=_plan_lu)
    def _lu_solve(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if call.plan:
            pivots = _pivots(call, spec.piv.shape)
            source = DeviceArray.packed(call.packed(spec.piv), DType.int32, spec.piv.shape)
            self._own.move_pivots(call.handle, source, pivots, 1, status)
            self._substitute(call, call.copy_of(spec.lu, "F"), pivots, spec.b, spec.out)

    def _factor(self, call: KernelCall, packed: DeviceArray, status: int) -> DeviceArray:
        """Factor matrices by columns in their place; the pivots count from 1."""
        *stack, n, m = packed.shape
        pivots = _pivots(call, (*stack, min(m, n)))
        self._enqueue(call, call.plan[0], status, a=packed, pivots=pivots)
        # `xgetrf` takes a NaN pivot for zero.
        self._own.apply(call.handle, "confirm_pivots", packed, status)
        return pivots

    def _substitute(
        self, call: KernelCall, factors: DeviceArray, pivots: DeviceArray, b: ArraySpec | None, out: ArraySpec
    ) -> None:
        """Solve with factors by columns, of which one may belong to many right-hand sides; or invert."""
        *stack, n, columns = out.shape
        x = call.workspace_array(out.dtype, (*stack, columns, n))
        if not x.size:
            return
        if b is None:
            _fill_identity(call, x)
        else:
            call.convert(broadcast(transposed(call.array(b)), x.shape), x)
        if 1 != stacked(factors) != stacked(x):
            factors = _repeated(call, factors, (*stack, n, n))
            pivots = _repeated(call, pivots, (*stack, n))
        said = call.workspace(_WORD * stacked(factors))
        self._enqueue(call, call.plan[1], said, a=factors, pivots=pivots, x=x)
        call.convert(transposed(x), call.array(out))

    @kernel("linalg.check_diagonal", backend="cuda", dtypes=NATIVE)
    def _check_diagonal(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if spec.a.size:
            # Each status begins as if LU had named the first pivot.
            call.fill(DeviceArray.packed(status, DType.int32, spec.info.shape), 1)
            matrices = DeviceArray.packed(call.packed(spec.a), spec.a.dtype, spec.a.shape)
            self._own.apply(call.handle, "confirm_pivots", matrices, status)

    def _plan_qr(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        (m, n), dtype = spec.a.shape[-2:], spec.a.dtype
        if not spec.a.size:
            return ()
        planned = self._ready(SolverRoutine("xgeqrf", dtype, {"m": m, "n": n}))
        if spec.q is None:
            return (planned,)
        sizes = {"m": m, "n": spec.q.shape[-1], "k": min(m, n)}
        return planned, self._ready(SolverRoutine("?orgqr", dtype, sizes))

    @kernel("linalg.qr", backend="cuda", dtypes=NATIVE, plan=_plan_qr)
    def _qr(self, spec: Any, call: KernelCall) -> None:
        *stack, m, n = spec.a.shape
        k, r = min(m, n), call.array(spec.r)
        if not call.plan:
            call.fill(r, 0)
            _fill_identity(call, spec.q)
            return
        packed, tau = call.copy_of(spec.a, "F"), call.workspace_array(spec.a.dtype, (*stack, k))
        said = call.workspace(_WORD * stacked(packed))
        self._enqueue(call, call.plan[0], said, a=packed, tau=tau)
        call.convert(first_rows(transposed(packed), r.shape[-2]), r)
        self._own.apply(call.handle, "finish_triangle", r, 0, "L")
        if spec.q is not None:
            q = packed
            if spec.q.shape[-1] != n:
                q = call.workspace_array(packed.dtype, (*stack, spec.q.shape[-1], m))
                call.convert(first_rows(packed, k), first_rows(q, k))
            self._enqueue(call, call.plan[1], said, a=q, tau=tau)
            call.convert(transposed(q), call.array(spec.q))

    def _plan_svd(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        (m, n), dtype = spec.a.shape[-2:], spec.a.dtype
        longer, shorter = max(m, n), min(m, n)
        if not spec.a.size:
            return ()
        if stacked(spec.a) > 1 and longer <= _MOST_JACOBI:
            routine = SolverRoutine("?gesvdj_batched", dtype, {"m": n, "n": m}, {"job": 1}, stacked(spec.a))
            self._trials.run(attrs.evolve(routine, batch=2))
            return (self._vendor.sized(routine),)
        job = "N" if spec.u is None else "S" if spec.u.shape[-1] == shorter == _rows(spec.vh) else "A"
        return (self._ready(SolverRoutine("xgesvd", dtype, {"m": longer, "n": shorter}, {"job": ord(job)})),)

    @kernel("linalg.svd", backend="cuda", dtypes=NATIVE, plan=_plan_svd, is_blocking=True)
    def _svd(self, spec: Any, call: KernelCall) -> None:
        status, (m, n) = call.status(spec.info), spec.a.shape[-2:]
        if not call.plan:
            _fill_identity(call, spec.u)
            _fill_identity(call, spec.vh)
            return
        # The transpose has U and V exchanged; the routine wants as many rows as columns.
        is_batched = call.plan[0].name == "?gesvdj_batched"
        is_turned = n >= m or is_batched
        order: Order = "C" if is_turned else "F"
        packed = call.copy_of(spec.a, order)
        self._blank(call, packed, status)
        said = call.workspace(_WORD * stacked(packed))
        if is_batched:
            self._svd_batched(spec, call, packed, said)
        else:
            u, vh = [
                (0, 0) if array is None else _result(call, array, order)
                for array in ((spec.vh, spec.u) if is_turned else (spec.u, spec.vh))
            ]
            self._enqueue(call, call.plan[0], said, a=packed, s=call.array(spec.s), u=u, vh=vh)
        self._own.merge(call.handle, said, status, stacked(packed))

    def _svd_batched(self, spec: Any, call: KernelCall, packed: DeviceArray, said: int) -> None:
        *stack, m, n = packed.shape
        dtype = packed.dtype
        u, v = call.workspace_array(dtype, (*stack, n, n)), call.workspace_array(dtype, (*stack, m, m))
        self._enqueue(call, call.plan[0], said, a=packed, s=call.array(spec.s), u=u, v=v)
        if spec.u is not None and spec.vh is not None:
            call.convert(first_rows(u, _rows(spec.vh)), call.array(spec.vh))
            turned = transposed(first_rows(v, spec.u.shape[-1]))
            call.convert(turned, call.array(spec.u), conjugate=dtype.kind == "complex")

    def _plan_eigh(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        n, dtype = spec.a.shape[-1], spec.a.dtype
        if not spec.a.size:
            return ()
        # To the routine, the triangle is the other one.
        options = {"uplo": UPPER if spec.UPLO in "Ll" else LOWER, "job": int(hasattr(spec, "v"))}
        if spec.b is not None:
            return (self._ready(SolverRoutine("?sygvd", dtype, {"n": n}, options)),)
        routine = SolverRoutine("xsyev_batched", dtype, {"n": n}, options)
        if n <= _MOST_EIGEN:
            room = self._vendor.sized(routine).work[0]
            batch = max(1, min(stacked(spec.a), _MOST_WORKSPACE // max(room, 1)))
            routine = attrs.evolve(routine, batch=batch)
        return (self._ready(routine),)

    @kernel(
        "linalg.eigh", "linalg.eigvalsh", backend="cuda", dtypes=NATIVE, plan=_plan_eigh, is_blocking=True
    )
    def _eigh(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if not call.plan:
            return
        # The transpose is the conjugate.
        packed = call.copy_of(spec.a)
        arrays = {"a": packed, "w": _result(call, spec.w)}
        if spec.b is not None:
            arrays["b"] = call.copy_of(spec.b)
            self._blank(call, arrays["b"], status, spec.UPLO.upper())
        self._blank(call, packed, status, spec.UPLO.upper())
        said = call.workspace(_WORD * stacked(packed))
        self._enqueue(call, call.plan[0], said, **arrays)
        if hasattr(spec, "v"):
            call.convert(transposed(packed), call.array(spec.v), conjugate=packed.dtype.kind == "complex")
        self._own.merge(call.handle, said, status, stacked(packed))

    def _plan_eig(self, spec: Any, device: LibraryDevice) -> tuple[SolverRoutine, ...]:
        if not spec.a.size:
            return ()
        options = {"job": int(hasattr(spec, "v"))}
        return (self._ready(SolverRoutine("xgeev", spec.a.dtype, {"n": spec.a.shape[-1]}, options)),)

    @kernel("linalg.eig", "linalg.eigvals", backend="cuda", dtypes=NATIVE, plan=_plan_eig, is_blocking=True)
    def _eig(self, spec: Any, call: KernelCall) -> None:
        status = call.status(spec.info)
        if not call.plan:
            return
        packed = call.copy_of(spec.a, "F")
        self._blank(call, packed, status)
        said = call.workspace(_WORD * stacked(packed))
        w = _result(call, spec.w)
        v = call.room(packed) if hasattr(spec, "v") else (0, 0)
        self._enqueue(call, call.plan[0], said, a=packed, w=w, v=v)
        if isinstance(v, DeviceArray):
            if v.dtype.kind != "complex":
                joined = call.workspace_array(spec.v.dtype, v.shape)
                self._own.join_pairs(call.handle, v, w.address, joined.address)
                v = joined
            call.convert(transposed(v), call.array(spec.v))
        self._own.merge(call.handle, said, status, stacked(packed))


def _result(call: KernelCall, array: ArraySpec, order: Order = "C") -> DeviceArray:
    """Return the array without gaps that a routine writes to."""
    return DeviceArray.packed(call.result(array, order), array.dtype, array.shape)


def _rows(array: ArraySpec | None) -> int:
    return 0 if array is None else array.shape[-2]


def _pivots(call: KernelCall, shape: Ints) -> DeviceArray:
    """Room for the pivots of the planned routine."""
    is_batched = call.plan[0].name == "?getrf_batched"
    return call.workspace_array(DType.int32 if is_batched else DType.int64, shape)


def _part(array: DeviceArray, index: int, dtype: DType) -> DeviceArray:
    """Return one complex number of each row, or its real part."""
    address = array.address + index * array.dtype.itemsize
    return DeviceArray(address, dtype, array.shape[:-1], array.strides[:-1])


def _repeated(call: KernelCall, array: DeviceArray, shape: Ints) -> DeviceArray:
    """Return an array broadcast in full."""
    full = call.workspace_array(array.dtype, shape)
    call.convert(broadcast(array, shape), full)
    return full


def _fill_identity(call: KernelCall, matrices: ArraySpec | DeviceArray | None) -> None:
    """Make matrices the identity, where there are any."""
    if matrices is not None:
        array = call.array(matrices) if isinstance(matrices, ArraySpec) else matrices
        call.fill(array, 0)
        call.fill(diagonals(array), 1)


def _is_turned(spec: Any) -> bool:
    """Return whether Cholesky factors the transpose, whose lower triangle is that of the matrix."""
    return not spec.upper and spec.a.shape[-1] >= _TURNED
