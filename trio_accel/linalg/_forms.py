"""Similar matrices of simpler form, and functions by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, overload

from ..backends.base import LibraryError, LinAlgError
from ..devices import AccelRef, Call, DeclaredSpec, Operand, Operation, message_of, operation
from ._actor import SolverActor

__all__ = [
    "Hessenberg", "HessenbergResult", "LDLResult", "Ldl", "Schur", "SchurResult", "Sqrtm", "hessenberg",
    "ldl", "schur", "sqrtm",
]  # fmt: skip

_DIVERGED = "has no Schur form by iteration: it did not converge"


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


def _no_root(spec: DeclaredSpec, where: str, code: int, index: tuple[int, ...]) -> LibraryError:
    """Tell a matrix without a root, by the place of an eigenvalue in its Schur form, from the others."""
    trouble = f"has no square root: eigenvalue {code} is zero to rounding, and has too few eigenvectors"
    if code < 0:
        trouble = "holds a NaN or an infinity" if code == -1 else _DIVERGED
    return LinAlgError(f"sqrtm: {where} {trouble}", library="solver", code=code, index=index)


@operation(
    {
        "real": "a(..., n, n) -> t(..., n, n), z(..., n, n)",
        "complex": "a(..., n, n) -> t: complex(..., n, n), z: complex(..., n, n)",
    },
    by="output",
    actor=SolverActor,
    status=_DIVERGED,
    reply=SchurResult,
)
async def schur(a: Operand, output: Literal["real", "complex"] = "real") -> SchurResult:
    """Schur decomposition ``a = Z @ T @ Z^H``, as `scipy.linalg.schur` (LAPACK ``gees``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        output: ``"complex"`` for matrices T that are triangular also where `a` is real.

    Returns:
        T and Z, of the shape of `a`, in its dtype or the complex one of the same precision.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity, or its iteration did not converge;
            `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


@overload
def hessenberg(a: Operand, calc_q: Literal[False] = False) -> Call[AccelRef]: ...
@overload
def hessenberg(a: Operand, calc_q: Literal[True]) -> Call[HessenbergResult]: ...
@operation(
    {
        False: "a(..., n, n) -> h(..., n, n)",
        True: "a(..., n, n) -> h(..., n, n), q(..., n, n)",
    },
    by="calc_q",
    actor=SolverActor,
    status="holds a NaN or an infinity",
    reply=HessenbergResult,
)
async def hessenberg(a: Operand, calc_q: bool = False) -> HessenbergResult | AccelRef:
    """Hessenberg form ``a = Q @ H @ Q^H``, as `scipy.linalg.hessenberg` (LAPACK ``gehrd``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.
        calc_q: Whether to compute Q.

    Returns:
        H, or H and Q, of the shape and dtype of `a`.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity; `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


@operation(
    "a(..., n, n) -> lu(..., n, n), d(..., n, n), perm: int32(..., n)",
    actor=SolverActor,
    status="holds a NaN or an infinity",
    reply=LDLResult,
)
async def ldl(a: Operand, lower: bool = True, hermitian: bool = True) -> LDLResult:
    """Factors ``a = lu @ d @ lu^H`` of Hermitian matrices, as `scipy.linalg.ldl` (LAPACK ``hetrf``).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128; one triangle is read.
        lower: Whether the lower triangle is read, instead of the upper one.
        hermitian: Whether complex matrices count as Hermitian, instead of symmetric: then
            ``a = lu @ d @ lu^T``.

    Returns:
        The factors, of the shape and dtype of `a`, and the order of rows that makes ``lu`` triangular.

    Raises:
        LinAlgError: A matrix holds a NaN or an infinity; `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


@operation("a(..., n, n) -> out: complex(..., n, n)", actor=SolverActor, status=_no_root)
async def sqrtm(a: Operand) -> AccelRef:
    """Principal square root of matrices, as `scipy.linalg.sqrtm`: by `schur` (Björck, Hammarling 1983).

    Args:
        a: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The square roots, of the shape of `a`. They are complex, also where all imaginary parts are zero: a
        dtype is known before the values are.

    Raises:
        LinAlgError: A singular matrix has no square root, where SciPy gives infinities and warns. Or a matrix
            holds a NaN or an infinity, or its iteration did not converge; `LinAlgError.index` says which one.
        NotSupportedError: The CUDA backend has no such operation.
    """
    ...


Hessenberg: Callable[..., Operation[SolverActor, HessenbergResult | AccelRef]] = message_of(hessenberg)
Ldl: Final = ldl.message
Schur: Final = schur.message
Sqrtm: Final = sqrtm.message
