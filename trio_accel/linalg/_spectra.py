"""Singular values, eigenvalues, similar matrices of simpler form, and functions by these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias, overload

from ..backends.base import Ints, LibraryError, LinAlgError
from ..devices import AccelRef, Call, DeclaredSpec, Operand, Operation, composed, message_of
from ._actor import SolverActor, solving

__all__ = [
    "EigResult",
    "Eigh",
    "EighResult",
    "Hessenberg",
    "HessenbergResult",
    "LDLResult",
    "SVDResult",
    "SchurResult",
    "Svd",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "hessenberg",
    "ldl",
    "schur",
    "sqrtm",
    "svd",
    "svdvals",
]

Triangle: TypeAlias = Literal["L", "U", "l", "u"]
"""The lower or the upper triangle, with the diagonal."""

_NOT_FINITE = "holds a NaN or an infinity"
_DIVERGED = "has no solution by iteration: it did not converge (status {})"


class SVDResult(NamedTuple):
    """A singular value decomposition; see `svd`."""

    U: AccelRef
    """Left singular vectors, as columns."""
    S: AccelRef
    """Singular values, the largest first."""
    Vh: AccelRef
    """Right singular vectors, conjugated, as rows."""


class EighResult(NamedTuple):
    """Eigenvalues and eigenvectors; see `eigh`."""

    eigenvalues: AccelRef
    """Real numbers, the smallest first."""
    eigenvectors: AccelRef
    """Vectors of length 1, as columns."""


class EigResult(NamedTuple):
    """Eigenvalues and eigenvectors of general matrices; see `eig`."""

    eigenvalues: AccelRef
    """Complex numbers, in no order."""
    eigenvectors: AccelRef
    """Complex vectors of length 1, as columns."""


def _eigh_failure(spec: DeclaredSpec, matrix_name: str, code: int, index: Ints) -> LibraryError:
    """Return the error for a status word; words above n are n plus the order of b's leading minor."""
    trouble, order = _DIVERGED.format(code), code - spec.inputs()[0].shape[-1]
    if code < 0:
        trouble = _NOT_FINITE
    elif order > 0:
        matrix_name, code = f"b, {matrix_name}", order
        trouble = f"is not positive definite: its leading minor of order {order} is not positive"
    text = f"{spec.declaration.function}: {matrix_name} {trouble}"
    return LinAlgError(text, library="solver", code=code, index=index)


@overload
def svd(a: Operand, full_matrices: bool = True, compute_uv: Literal[True] = True) -> Call[SVDResult]: ...
@overload
def svd(a: Operand, full_matrices: bool = True, *, compute_uv: Literal[False]) -> Call[AccelRef]: ...
@overload
def svd(a: Operand, full_matrices: bool, compute_uv: Literal[False]) -> Call[AccelRef]: ...
@solving(
    {
        (True, True): "a(..., m, n) -> u(..., m, m), s: real(..., min(m, n)), vh(..., n, n)",
        (False, True): "a(..., m, n) -> u(..., m, min(m, n)), s: real(..., min(m, n)), vh(..., min(m, n), n)",
        (True, False): "a(..., m, n) -> s: real(..., min(m, n))",
        (False, False): "a(..., m, n) -> s: real(..., min(m, n))",
    },
    by=("full_matrices", "compute_uv"),
    status=_DIVERGED,
    reply=SVDResult,
)
async def svd(a: Operand, full_matrices: bool = True, compute_uv: bool = True) -> SVDResult | AccelRef:
    """Singular value decomposition, as `numpy.linalg.svd` (LAPACK ``gesdd``).

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128; k is min(m, n).
        full_matrices: Whether U has shape (..., m, m) and Vh (..., n, n), instead of (..., m, k) and
            (..., k, n).
        compute_uv: Whether to compute U and Vh.

    Returns:
        U, S and Vh such that ``a = (U * S[..., None, :]) @ Vh``, unless they are full; or only S. S has shape
        (..., k) and the real dtype.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` locates it.
    """
    ...


@composed
async def svdvals(x: Operand, /) -> AccelRef:
    """Singular values of matrices, as `numpy.linalg.svdvals`: `svd` without vectors, which raises the same.

    Args:
        x: Array of shape (..., m, n), of float32, float64, complex64 or complex128.

    Returns:
        The singular values, of shape (..., min(m, n)) and the real dtype, the largest first.
    """
    return await svd(x, compute_uv=False)


@solving(
    "a(s..., n, n), b(s..., n, n) -> w: real(s..., n), v(s..., n, n)", status=_eigh_failure, reply=EighResult
)
async def eigh(
    a: Operand,
    UPLO: Triangle = "L",  # noqa: N803  # NumPy's name
    *,
    b: Operand | None = None,
) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices, as `numpy.linalg.eigh` (LAPACK ``syevd``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        UPLO: Whether the lower or the upper triangle is read; the matrices count as Hermitian.
        b: Positive definite matrices, with the shape and dtype of `a`: then the results solve
            ``a @ v = b @ v * w``, as `scipy.linalg.eigh` (LAPACK ``sygvd``).

    Returns:
        The eigenvalues, of shape (..., n) and the real dtype, the smallest first; and the eigenvectors, as
        the columns of matrices with the shape of `a`. Their length is 1; with `b`, ``v^H @ b @ v`` is.

    Raises:
        LinAlgError: That triangle of a matrix holds a NaN or an infinity, a matrix of `b` is not positive
            definite, or an iteration did not converge; `LinAlgError.index` locates it.
    """
    ...


@solving("a(s..., n, n), b(s..., n, n) -> w: real(s..., n)", status=_eigh_failure)
async def eigvalsh(
    a: Operand,
    UPLO: Triangle = "L",  # noqa: N803  # NumPy's name
    *,
    b: Operand | None = None,
) -> AccelRef:
    """Eigenvalues of Hermitian matrices, as `numpy.linalg.eigvalsh` (LAPACK ``syevd``, ``sygvd``).

    Those of `eigh`, with its arguments and errors, in less time.
    """
    ...


@solving("a(..., n, n) -> w: complex(..., n), v: complex(..., n, n)", status=_DIVERGED, reply=EigResult)
async def eig(a: Operand) -> EigResult:
    """Eigenvalues and right eigenvectors of square matrices, as `numpy.linalg.eig` (LAPACK ``geev``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The eigenvalues, of shape (..., n), in no order; and the eigenvectors, as columns of length 1, in
        matrices with the shape of `a`. Both are complex, even if all imaginary parts are zero, because a
        dtype is known before the values are.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` locates it.
        NotSupportedError: cuSOLVER is older than in CUDA 12.6.
    """
    ...


@solving("a(..., n, n) -> w: complex(..., n)", status=_DIVERGED)
async def eigvals(a: Operand) -> AccelRef:
    """Eigenvalues of square matrices, as `numpy.linalg.eigvals` (LAPACK ``geev``).

    Those of `eig`, with its argument and errors, in less time.
    """
    ...


_NO_SCHUR = "has no Schur form by iteration: it did not converge"


class SchurResult(NamedTuple):
    """A Schur decomposition; see `schur`."""

    T: AccelRef
    """Upper triangular matrices; of real ones, pairs of eigenvalues are blocks on the diagonal."""
    Z: AccelRef
    """Unitary matrices."""


class HessenbergResult(NamedTuple):
    """A Hessenberg form with its transformation; see `hessenberg`."""

    H: AccelRef
    """Matrices of zeros below the diagonal that is next to the main one."""
    Q: AccelRef
    """Unitary matrices."""


class LDLResult(NamedTuple):
    """A factorization of Hermitian matrices that may be indefinite; see `ldl`."""

    lu: AccelRef
    """The outer factor; its rows in the order of `perm` are triangular."""
    d: AccelRef
    """Block diagonal matrices, of blocks of one or two rows."""
    perm: AccelRef
    """Order of the rows: int32."""


def _no_root(spec: DeclaredSpec, matrix_name: str, code: int, index: Ints) -> LibraryError:
    """Return the error for a status word; for a matrix without a root it is the place of an eigenvalue."""
    trouble = f"has no square root: eigenvalue {code} is zero to rounding, and has too few eigenvectors"
    if code < 0:
        trouble = _NOT_FINITE if code == -1 else _NO_SCHUR
    return LinAlgError(f"sqrtm: {matrix_name} {trouble}", library="solver", code=code, index=index)


@solving(
    {
        "real": "a(..., n, n) -> t(..., n, n), z(..., n, n)",
        "complex": "a(..., n, n) -> t: complex(..., n, n), z: complex(..., n, n)",
    },
    by="output",
    status=_NO_SCHUR,
    reply=SchurResult,
)
async def schur(a: Operand, output: Literal["real", "complex"] = "real") -> SchurResult:
    """Schur decomposition ``a = Z @ T @ Z^H``, as `scipy.linalg.schur` (LAPACK ``gees``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        output: ``"complex"`` for triangular matrices T, even if `a` is real.

    Returns:
        T and Z, with the shape of `a`, in its dtype or the complex one of the same precision.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


@overload
def hessenberg(a: Operand, calc_q: Literal[False] = False) -> Call[AccelRef]: ...
@overload
def hessenberg(a: Operand, calc_q: Literal[True]) -> Call[HessenbergResult]: ...
@solving(
    {
        False: "a(..., n, n) -> h(..., n, n)",
        True: "a(..., n, n) -> h(..., n, n), q(..., n, n)",
    },
    by="calc_q",
    status=_NOT_FINITE,
    reply=HessenbergResult,
)
async def hessenberg(a: Operand, calc_q: bool = False) -> HessenbergResult | AccelRef:
    """Hessenberg form ``a = Q @ H @ Q^H``, as `scipy.linalg.hessenberg` (LAPACK ``gehrd``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        calc_q: Whether to compute Q.

    Returns:
        H, or H and Q, with the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity; `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


@solving(
    "a(..., n, n) -> lu(..., n, n), d(..., n, n), perm: int32(..., n)", status=_NOT_FINITE, reply=LDLResult
)
async def ldl(a: Operand, lower: bool = True, hermitian: bool = True) -> LDLResult:
    """Factors ``a = lu @ d @ lu^H`` of Hermitian matrices, as `scipy.linalg.ldl` (LAPACK ``hetrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128; one triangle is read.
        lower: Whether the lower triangle is read, instead of the upper one.
        hermitian: Whether complex matrices count as Hermitian, instead of symmetric: then
            ``a = lu @ d @ lu^T``.

    Returns:
        The factors, with the shape and dtype of `a`, and the order of rows that makes ``lu`` triangular.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity; `LinAlgError.index` locates it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


@solving("a(..., n, n) -> out: complex(..., n, n)", status=_no_root)
async def sqrtm(a: Operand) -> AccelRef:
    """Principal square root of matrices, as `scipy.linalg.sqrtm`: by `schur` (Björck, Hammarling 1983).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The square roots, with the shape of `a`. They are complex, also where all imaginary parts are zero: a
        dtype is known before the values are.

    Raises:
        LinAlgError: A singular matrix has no square root, although SciPy returns infinities and warns. Or a
            matrix holds a NaN or an infinity, or its iteration did not converge; `LinAlgError.index` locates
            it.
        NotSupportedError: The CUDA backend lacks this operation.
    """
    ...


Eigh: Final = eigh.message
Svd: Callable[..., Operation[SolverActor, SVDResult | AccelRef]] = message_of(svd)
Hessenberg: Callable[..., Operation[SolverActor, HessenbergResult | AccelRef]] = message_of(hessenberg)
