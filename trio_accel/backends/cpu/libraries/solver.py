"""Dense solvers by LAPACK.

If a factorization of the transpose is also one of the matrix, rows stay in place: Cholesky of the other
triangle, LQ for QR, and a singular value decomposition with U and V exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias, cast

import numpy as np
import scipy.linalg

from ...base import NATIVE, DType, HostArray, HostCall, Ints, kernel
from ...base.contract.ops import ArraySpec, OperationSpec, StatusArray
from ..runtime.blas_threads import SCIPY, matrix_product
from ._fortran import Lapack, addresses_of, check_size

_Run: TypeAlias = Callable[..., None]

# SciPy's stubs do not know all result types.
_SCIPY = cast("Any", scipy.linalg)


def _solver(names: str, *fields: str, workspace: Callable[[int, int], int] = max) -> Callable[[_Run], _Run]:
    """Declare a function of the specification, LAPACK, and views of these fields as a kernel.

    Args:
        names: The functions of `trio_accel.linalg` that it runs.
        fields: Names of the arrays; the first one has the matrices.
        workspace: The largest size passed to LAPACK, for rows and columns.
    """

    def declare(run: _Run) -> _Run:
        def plan(spec: OperationSpec, device: object) -> Lapack:
            first: ArraySpec = getattr(spec, fields[0])
            rows, columns = first.shape[-2:]
            check_size(f"{run.__name__} of {rows} × {columns}", workspace(rows, columns))
            return Lapack(first.dtype, rows, columns)

        def solve(spec: Any, call: HostCall) -> None:
            arrays = [getattr(spec, field, None) for field in fields]
            if spec.descriptor().has_status:
                call.status(spec.info)
            # A factorization gains by a second thread from some 384 rows on, where a product does from 160.
            sizes = [math.prod(array.shape[-2:]) for array in arrays if array is not None]
            with SCIPY.for_work(math.isqrt(sizes[0]) * max(sizes) // 4):
                run(spec, call.plan, *[array if array is None else call.array(array) for array in arrays])

        solve.__name__, solve.__qualname__, solve.__doc__ = run.__name__, run.__qualname__, run.__doc__
        operations = [f"linalg.{name}" for name in names.split()]
        kernel(*operations, backend="cpu", dtypes={fields[0]: NATIVE}, plan=plan, is_quick=True)(solve)
        return solve

    return declare


@_solver("cholesky", "a", "out")
def cholesky(spec: Any, lapack: Lapack, a: HostArray, out: HostArray) -> None:
    """Triangular factors in place, of the triangle on the other side."""
    n = a.shape[-1]
    np.copyto(out, a)
    if not out.size:
        return
    lapack("potrf", b"L" if spec.upper else b"U", n, addresses_of(out), n, addresses_of(spec.info, 0))
    _clear(out, is_lower=spec.upper)
    _note_lost(np.diagonal(out, axis1=-2, axis2=-1), spec.info)


def _note_lost(diagonals: HostArray, info: StatusArray) -> None:
    """Note Cholesky factors that have lost their numbers: NaN or infinity reaches the diagonal."""
    is_bad = ~np.isfinite(diagonals).reshape(len(info), -1)
    lost = np.flatnonzero(is_bad.any(1) & (info == 0))
    info[lost] = is_bad[lost].argmax(1) + 1


@_solver("lu", "a", "lu", "piv")
def lu(spec: Any, lapack: Lapack, a: HostArray, lu: HostArray, piv: HostArray) -> None:
    """Triangular factors of a copy."""
    if a.size:
        np.copyto(lu, _factored(lapack, a, piv, spec.info).swapaxes(-1, -2))
    np.subtract(piv, 1, out=piv)


def _factored(lapack: Lapack, a: HostArray, piv: HostArray, info: StatusArray) -> HostArray:
    """Factor a copy in columns; pivots count from 1."""
    rows, columns = a.shape[-2:]
    packed = _packed(a)
    lapack("getrf", rows, columns, addresses_of(packed), rows, addresses_of(piv, 1), addresses_of(info, 0))
    return packed


@_solver("det slogdet", "a", "det", "sign", "logabsdet")
def det(spec: Any, lapack: Lapack, a: HostArray, *outputs: HostArray | None) -> None:
    """Compute determinants from the diagonal of U and the number of row exchanges."""
    n, info = a.shape[-1], np.zeros(math.prod(a.shape[:-2]), np.int32)
    piv = np.empty(a.shape[:-1], np.int32)
    diagonal: HostArray = np.empty(a.shape[:-1], a.dtype)
    if a.size:
        diagonal = np.diagonal(_factored(lapack, a, piv, info), axis1=-2, axis2=-1)
    # The product is made in double precision.
    diagonal = diagonal.astype(np.result_type(a.dtype, np.float64))
    size, is_zero = np.abs(diagonal), (diagonal == 0).any(-1)
    with np.errstate(all="ignore"):
        units = diagonal / size if lapack.is_complex else np.where(diagonal < 0, -1.0, 1.0)
        rows = np.arange(1, n + 1, dtype=np.int32)
        exchanges: HostArray = np.not_equal(piv, rows).sum(-1)
        sign = np.where(is_zero, 0, units.prod(-1) * (1 - 2 * (exchanges % 2)))
        logs = np.where(is_zero, -np.inf, np.log(size).sum(-1))
        results = sign * np.exp(logs), sign, logs
        for result, out in zip(results, outputs, strict=True):
            if out is not None:
                np.copyto(out, result, casting="same_kind")


# Rows of matrices for which a call by `ctypes` takes longer than the solution.
_MAX_CTYPES_ROWS = 16


@_solver("solve inv", "a", "b", "out")
def solve(spec: Any, lapack: Lapack, a: HostArray, b: HostArray | None, out: HostArray) -> None:
    """Solutions; a matrix that serves several right-hand sides is factored once."""
    if not a.size:
        return
    if b is None:
        b = np.eye(a.shape[-1], dtype=a.dtype)
    piv = np.empty(a.shape[:-1], np.int32)
    if a.shape[:-2] != out.shape[:-2] or not out.size:
        packed = _factored(lapack, a, piv, spec.info)
        if out.size and not spec.info.any():
            _substitute(b"N", packed, piv, b, out)
        return
    n, columns = out.shape[-2:]
    if n <= _MAX_CTYPES_ROWS:
        # NumPy calls the same routine in a loop of C, but does not report which matrix of a stack is
        # singular.
        with suppress(np.linalg.LinAlgError):
            np.copyto(out, np.linalg.solve(a, b))
            return
    packed, x = _packed(a), _packed(np.broadcast_to(b, out.shape))
    lapack = Lapack(spec.a.dtype, n, max(n, columns))
    lapack(
        "gesv",
        n,
        columns,
        addresses_of(packed),
        n,
        addresses_of(piv, 1),
        addresses_of(x),
        n,
        addresses_of(spec.info, 0),
    )
    np.copyto(out, x.swapaxes(-1, -2))


@_solver("lu_solve", "lu", "piv", "b", "out")
def lu_solve(spec: Any, _: Lapack, lu: HostArray, piv: HostArray, b: HostArray, out: HostArray) -> None:
    """Compute solutions from existing factors."""
    is_no_row = ((piv < 0) | (piv >= lu.shape[-1])).reshape(len(spec.info), lu.shape[-1])
    if is_no_row.any():
        spec.info[:] = np.where(is_no_row.any(1), is_no_row.argmax(1) + 1, 0)
    elif lu.size and out.size:
        _substitute(b"NTC"[spec.trans : spec.trans + 1], _packed(lu), piv + np.int32(1), b, out)


def _substitute(trans: bytes, packed: HostArray, piv: HostArray, b: HostArray, out: HostArray) -> None:
    """Solve with factors, of which one may belong to many right-hand sides."""
    *stack, n, columns = out.shape
    x = _packed(np.broadcast_to(b, out.shape))
    factors, pivots, sides = (
        addresses_of(packed, 2, tuple(stack)),
        addresses_of(piv, 1, tuple(stack)),
        addresses_of(x),
    )
    if packed.size == n * n:
        # The array is stored by columns.
        factors, pivots, sides, columns = factors[:1], pivots[:1], sides[:1], x.size // n
    lapack, info = Lapack(DType.of(out.dtype), n, max(n, columns)), np.zeros(1, np.int32)
    lapack("getrs", trans, n, columns, factors, n, pivots, sides, n, info)
    np.copyto(out, x.swapaxes(-1, -2))


def _packed(matrices: HostArray) -> HostArray:
    """Make a copy in columns, one after the other: the rows of its transpose, to NumPy."""
    return np.array(matrices.swapaxes(-1, -2), order="C")


@_solver("check_diagonal", "a")
def check_diagonal(spec: Any, _: Lapack, a: HostArray) -> None:
    """Note where the diagonals have a zero."""
    if a.size:
        is_zero = (np.diagonal(a, axis1=-2, axis2=-1) == 0).reshape(len(spec.info), -1)
        spec.info[:] = np.where(is_zero.any(1), is_zero.argmax(1) + 1, 0)


@_solver("qr", "a", "q", "r", workspace=lambda m, n: 64 * max(m, n))
def qr(spec: Any, lapack: Lapack, a: HostArray, q: HostArray | None, r: HostArray) -> None:
    """Factor the transpose as L @ Q: then r is the transpose of L, and q is the transpose of Q."""
    *stack, m, n = a.shape
    k = min(m, n)
    if not a.size:
        np.copyto(r, 0)
        if q is not None:
            np.copyto(q, np.eye(*q.shape[-2:]))
        return
    work = np.array(a, order="C")
    tau, info = np.empty((*stack, k), a.dtype), np.zeros(1, np.int32)
    lapack.with_workspace("gelqf", n, m, addresses_of(work), n, addresses_of(tau, 1), info)
    np.copyto(r, work[..., : r.shape[-2], :])
    _clear(r, is_lower=True)
    if q is not None:
        columns = q.shape[-1]
        np.copyto(q[..., :k], work[..., :k])
        make = "unglq" if lapack.is_complex else "orglq"
        lapack.with_workspace(make, columns, m, k, addresses_of(q), columns, addresses_of(tau, 1), info)


@_solver("svd", "a", "u", "s", "vh", workspace=lambda m, n: 4 * min(m, n) ** 2 + 64 * (m + n))
def svd(
    spec: Any, lapack: Lapack, a: HostArray, u: HostArray | None, s: HostArray, vh: HostArray | None
) -> None:
    """Values and vectors of the transpose: vh holds its left vectors, and u its right ones."""
    m, n = a.shape[-2:]
    if not _is_finite(a, spec.info):
        return
    if not a.size:
        for vectors in (u, vh):
            if vectors is not None:
                np.copyto(vectors, np.eye(*vectors.shape[-2:]))
        return
    left_vectors, right = (
        (_PLACEHOLDER, _PLACEHOLDER) if u is None or vh is None else (addresses_of(vh), addresses_of(u))
    )
    columns = 1 if u is None else u.shape[-1]
    job = b"N" if u is None else b"A" if columns == m and vh is not None and vh.shape[-2] == n else b"S"
    short_side, long_side = sorted((m, n))
    real = (
        np.empty(short_side * max(5 * short_side + 7, 2 * long_side + 2 * short_side + 1), lapack.real),
    ) * lapack.is_complex
    extra = (*real, np.empty(8 * short_side, np.int32))
    work = np.array(a, order="C")
    lapack.with_workspace(
        "gesdd",
        job,
        n,
        m,
        addresses_of(work),
        n,
        addresses_of(s, 1),
        left_vectors,
        n,
        right,
        columns,
        addresses_of(spec.info, 0),
        extra=extra,
    )


_PLACEHOLDER = np.empty(1)


@_solver("eigh eigvalsh", "a", "w", "v", "b", workspace=lambda _, n: 2 * n * n + 64 * n)
def eigh(
    spec: Any, lapack: Lapack, a: HostArray, w: HostArray, v: HostArray | None, b: HostArray | None
) -> None:
    """Eigenvalues, and eigenvectors if wanted, of a copy."""
    n = a.shape[-1]
    triangle: HostArray = np.tri(n, dtype=np.bool_)
    looked_at = triangle if spec.UPLO in "Ll" else triangle.T
    if (
        not all(_is_finite(matrix, spec.info, looked_at) for matrix in (a, b) if matrix is not None)
        or not a.size
    ):
        return
    packed = _packed(a)
    arrays: list[Any] = [addresses_of(packed), n]
    real_size, whole_size = (1 + 5 * n + 2 * n * n, 3 + 5 * n) if v is not None else (n, 1)
    integer = (np.empty(whole_size, np.int32), whole_size)
    real = (np.empty(real_size, lapack.real), real_size) * lapack.is_complex
    kind = "he" if lapack.is_complex else "sy"
    letters: list[Any] = [b"N" if v is None else b"V", spec.UPLO.upper().encode(), n]
    name = f"{kind}evd"
    if b is not None:
        packed_b = _packed(b)
        name, letters, arrays = f"{kind}gvd", [1, *letters], [*arrays, addresses_of(packed_b), n]
    lapack.with_workspace(
        name, *letters, *arrays, addresses_of(w, 1), addresses_of(spec.info, 0), extra=(*real, *integer)
    )
    if v is not None:
        np.copyto(v, packed.swapaxes(-1, -2))


@_solver("eig eigvals", "a", "w", "v", workspace=lambda _, n: 512 * n)
def eig(spec: Any, lapack: Lapack, a: HostArray, w: HostArray, v: HostArray | None) -> None:
    """Eigenvalues, and right eigenvectors if wanted, of a copy; real matrices have pairs of them."""
    n = a.shape[-1]
    if not _is_finite(a, spec.info) or not a.size:
        return
    packed, vectors = _packed(a), np.empty(a.shape, a.dtype)
    values = [np.empty(a.shape[:-1], a.dtype) for _ in range(1 if lapack.is_complex else 2)]
    real = (np.empty(2 * n, lapack.real),) * lapack.is_complex
    lapack.with_workspace(
        "geev",
        b"N",
        b"N" if v is None else b"V",
        n,
        addresses_of(packed),
        n,
        *(addresses_of(part, 1) for part in values),
        _PLACEHOLDER,
        1,
        addresses_of(vectors),
        n,
        addresses_of(spec.info, 0),
        extra=real,
    )
    np.copyto(w, values[0] if lapack.is_complex else values[0] + 1j * values[1])
    if v is not None:
        columns = vectors.swapaxes(-1, -2)
        np.copyto(v, columns)
        if not lapack.is_complex:
            # The first column of a pair is the real part of both, and the second the imaginary part.
            stack = np.nonzero(values[1] > 0)
            first, second = stack, (*stack[:-1], stack[-1] + 1)
            pair = vectors[first] + 1j * vectors[second]
            rows = v.swapaxes(-1, -2)
            rows[first], rows[second] = pair, pair.conj()


@_solver("solve_banded", "ab", "b", "out")
def solve_banded(spec: Any, lapack: Lapack, ab: HostArray, b: HostArray, out: HostArray) -> None:
    """Solutions, with rows of zeros above the diagonals, which exchanges of rows fill."""
    n, columns = out.shape[-2:]
    if not out.size:
        return
    packed, x = np.zeros((*ab.shape[:-2], n, 2 * spec.l + spec.u + 1), ab.dtype), _packed(b)
    np.copyto(packed[..., spec.l :], ab.swapaxes(-1, -2))
    piv, rows = np.empty((*ab.shape[:-2], n), np.int32), packed.shape[-1]
    info = addresses_of(spec.info, 0)
    lapack(
        "gbsv",
        n,
        spec.l,
        spec.u,
        columns,
        addresses_of(packed),
        rows,
        addresses_of(piv, 1),
        addresses_of(x),
        n,
        info,
    )
    np.copyto(out, x.swapaxes(-1, -2))


@_solver("solveh_banded", "ab", "b", "out")
def solveh_banded(spec: Any, lapack: Lapack, ab: HostArray, b: HostArray, out: HostArray) -> None:
    """Solutions by Cholesky factors of the band."""
    n, columns = out.shape[-2:]
    if not out.size:
        return
    packed, x, triangle = _packed(ab), _packed(b), b"L" if spec.lower else b"U"
    rows = ab.shape[-2]
    lapack(
        "pbsv",
        triangle,
        n,
        rows - 1,
        columns,
        addresses_of(packed),
        rows,
        addresses_of(x),
        n,
        addresses_of(spec.info, 0),
    )
    _note_lost(packed[..., 0 if spec.lower else -1], spec.info)
    np.copyto(out, x.swapaxes(-1, -2))


@_solver("solve_tridiagonal", "b", "dl", "d", "du", "out")
def solve_tridiagonal(
    spec: Any, lapack: Lapack, b: HostArray, dl: HostArray, d: HostArray, du: HostArray, out: HostArray
) -> None:
    """Compute solutions by elimination, on copies of the diagonals."""
    n, columns = out.shape[-2:]
    if out.size:
        diagonals = [np.array(diagonal, order="C") for diagonal in (dl[..., 1:], d, du)]
        x = _packed(b)
        addresses = [addresses_of(diagonal, 1) for diagonal in diagonals]
        lapack("gtsv", n, columns, *addresses, addresses_of(x), n, addresses_of(spec.info, 0))
        np.copyto(out, x.swapaxes(-1, -2))


@_solver("solve_toeplitz", "b", "c", "r", "out")
def solve_toeplitz(
    spec: Any, _: Lapack, b: HostArray, c: HostArray, r: HostArray | None, out: HostArray
) -> None:
    """Solutions by SciPy's recursion, one after another."""
    if not out.size:
        return
    for position, index in enumerate(np.ndindex(c.shape[:-1])):
        first = c[index] if r is None else (c[index], r[index])
        try:
            np.copyto(out[index], _SCIPY.solve_toeplitz(first, b[index]), casting="same_kind")
        except (ValueError, np.linalg.LinAlgError):
            spec.info[position] = 1


@_solver("schur", "a", "t", "z")
def schur(spec: Any, _: Lapack, a: HostArray, t: HostArray, z: HostArray) -> None:
    """Forms by SciPy, one after another."""
    for position, index in _matrices(a, spec.info):
        try:
            t[index], z[index] = _SCIPY.schur(a[index], output=spec.output)
        except np.linalg.LinAlgError:
            spec.info[position] = 1


@_solver("hessenberg", "a", "h", "q")
def hessenberg(spec: Any, _: Lapack, a: HostArray, h: HostArray, q: HostArray | None) -> None:
    """Forms by SciPy, one after another."""
    for _position, index in _matrices(a, spec.info):
        if q is None:
            h[index] = _SCIPY.hessenberg(a[index])
        else:
            h[index], q[index] = _SCIPY.hessenberg(a[index], calc_q=True)


@_solver("ldl", "a", "lu", "d", "perm")
def ldl(spec: Any, _: Lapack, a: HostArray, lu: HostArray, d: HostArray, perm: HostArray) -> None:
    """Factors by SciPy, one after another."""
    for _position, index in _matrices(a, spec.info):
        factors = _SCIPY.ldl(a[index], lower=spec.lower, hermitian=spec.hermitian)
        lu[index], d[index], perm[index] = factors


@_solver("sqrtm", "a", "out")
def sqrtm(spec: Any, _: Lapack, a: HostArray, out: HostArray) -> None:
    """Square roots of triangular forms, by SciPy, which only warns of singular ones: they are found first."""
    for position, index in _matrices(a, spec.info):
        try:
            t, z = _SCIPY.schur(a[index].astype(out.dtype), output="complex")
        except np.linalg.LinAlgError:
            spec.info[position] = -2
            continue
        size = np.abs(np.diagonal(t))
        is_zero = size <= len(size) * np.finfo(size.dtype).eps * size.max()
        root = _singular_root(t, is_zero) if is_zero.any() else _SCIPY.sqrtm(t)
        if root is None:
            spec.info[position] = is_zero.argmax() + 1
        else:
            out[index] = matrix_product(matrix_product(z, root), z.conj().T)


def _singular_root(t: HostArray, is_zero: HostArray) -> HostArray | None:
    """Return the root of a triangle with zeros on the diagonal, or None where there is none."""
    values = np.where(is_zero, 0, np.diagonal(t))
    root: HostArray = np.diag(np.sqrt(values)).astype(t.dtype)
    tolerance = len(t) * np.finfo(t.dtype).eps * np.abs(t).max()
    for column in range(1, len(t)):
        for row in range(column - 1, -1, -1):
            inner = slice(row + 1, column)
            numerator = t[row, column] - root[row, inner] @ root[inner, column]
            divisor = root[row, row] + root[column, column]
            if divisor:
                root[row, column] = numerator / divisor
            elif np.abs(numerator) > tolerance:
                return None
    return root


def _matrices(a: HostArray, info: StatusArray) -> Iterator[tuple[int, Ints]]:
    """Yield number and index of each matrix in a stack, if it has elements and all of them are finite."""
    if _is_finite(a, info) and a.size:
        yield from enumerate(np.ndindex(a.shape[:-2]))


def _clear(matrices: HostArray, *, is_lower: bool) -> None:
    """Make the elements below the diagonal zero, or those above it."""
    row: HostArray = np.arange(int(matrices.shape[-2]))
    column: HostArray = np.arange(int(matrices.shape[-1]))
    np.copyto(matrices, 0, where=row[:, None] > column if is_lower else row[:, None] < column)


def _is_finite(a: HostArray, info: StatusArray, looked_at: HostArray | None = None) -> bool:
    """Return whether all numbers are finite, or routines may never return; note matrices with others."""
    is_held = np.isfinite(a)
    if looked_at is not None:
        is_held |= ~looked_at
    info[:] = -(~is_held.all((-2, -1))).astype(np.int32).ravel()
    return not info.any()
