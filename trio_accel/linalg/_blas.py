"""The three levels of the BLAS: operations on vectors, on a matrix and vectors, and products of matrices.

To the second level a vector is a matrix of one column: its operations are some of the third one, for which
the backends call the routine of the second one where there is one.
"""

from __future__ import annotations

from typing import Any, Final

from ..backends.base.contract.ops import (
    ArraySpec,
    MatmulSpec,
    OperationSpec,
    Side,
    Transpose,
    column,
    product_shape,
)
from ..backends.base.kit.checks import INEXACT
from ..devices import AccelRef, Operand, Planned, Planner, operation, operation_like
from ..expressions import Out
from ._actor import BlasActor

__all__ = [
    "Axpy",
    "Dot",
    "Gemm",
    "Gemv",
    "Iamax",
    "Matmul",
    "Nrm2",
    "Scal",
    "Swap",
    "asum",
    "axpy",
    "dot",
    "gemm",
    "gemv",
    "ger",
    "iamax",
    "matmul",
    "nrm2",
    "rot",
    "scal",
    "swap",
    "symm",
    "symv",
    "syr",
    "syr2",
    "syr2k",
    "syrk",
    "trmm",
    "trmv",
    "trsm",
    "trsv",
]


def _plan_matmul(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by the rules of `numpy.matmul`, which drops axes; it is the most frequent operation."""
    requested_out: AccelRef | None = message.out
    is_matrix = (
        isinstance(requested_out, AccelRef) and requested_out.ndim == 2 and requested_out.dtype.is_inexact
    )
    if requested_out is not None and is_matrix and not requested_out.spec.is_contiguous:
        # It writes by strides, but a stack of products has none for its result.
        return gemm.message(1.0, message.a, message.b, 0.0, requested_out).plan(planner)
    a = planner.read("a", message.a)
    b = planner.read("b", message.b)
    if a.dtype is not b.dtype:
        planner.refuse_dtypes(a=a, b=b)
    out = planner.output(product_shape(planner.name, a.shape, b.shape), a.dtype, message.out)
    if message.out is not None:
        planner.distinct("out", out.spec, a=a, b=b)
    return Planned(MatmulSpec(a, b, out.spec), out, is_checked=True)


@operation(actor=BlasActor, plan=_plan_matmul)
async def matmul(a: Operand, b: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Matrix product of two arrays on a device, as `numpy.matmul` (cuBLAS ``gemm``).

    Operands of more than two axes are stacks of matrices and broadcast against each other. An operand with a
    single axis is a row (`a`) or column (`b`), and its axis is dropped from the result.

    Args:
        a: Array of shape (..., m, k) or (k,).
        b: Array of shape (..., k, n) or (k,), of the same dtype.
        out: Array of the result's shape and dtype to write to, of any strides; by default a new one.

    Returns:
        The product, of shape (..., m, n) and the dtype of the operands.
    """
    ...


@operation("a^trans_a(m, k), b^trans_b(k, n) -> c(m, n)", actor=BlasActor)
async def gemm(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex = 0.0,
    c: AccelRef | None = None,
    trans_a: Transpose = "N",
    trans_b: Transpose = "N",
) -> AccelRef:
    """Matrix product with factors: ``alpha * op(a) @ op(b) + beta * c`` (BLAS and cuBLAS ``gemm``).

    The order of the arguments follows `scipy.linalg.blas.dgemm`.

    Args:
        alpha: Factor of the product; real unless the matrices are complex.
        a: Matrix with op(a) of shape (m, k), of a floating or complex dtype.
        b: Matrix with op(b) of shape (k, n), of the same dtype.
        beta: Factor of `c`; where it is 0, `c` is only written, whatever it holds.
        c: Matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        trans_a: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.
        trans_b: The same for `b`.

    Returns:
        The reference `c`, or a new one.
    """
    ...


_TRIANGULAR = {
    "L": "a(..., m, m), b(..., m, n) -> out(..., m, n)",
    "R": "a(..., n, n), b(..., m, n) -> out(..., m, n)",
}


def _check_syrk(name: str, spec: Any) -> None:
    """Refuse letters and factors that the BLAS has not for these elements."""
    is_complex = spec.c.dtype.kind == "complex"
    letters = ("N", "C" if spec.hermitian else "T") if is_complex else ("N", "T", "C")
    if spec.trans not in letters:
        raise ValueError(f"{name}: trans must be one of {letters}, got {spec.trans!r}")
    if spec.hermitian and (spec.beta.imag or (spec.operation == "linalg.syrk" and spec.alpha.imag)):
        raise ValueError(
            f"{name}: with hermitian, factors must be real, got alpha {spec.alpha} and beta {spec.beta}"
        )


@operation(
    {"L": "a(m, m), b(m, n) -> c(m, n)", "R": "a(n, n), b(m, n) -> c(m, n)"},
    by="side",
    actor=BlasActor,
)
async def symm(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex = 0.0,
    c: AccelRef | None = None,
    side: Side = "L",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``alpha * a @ b + beta * c`` for a symmetric or Hermitian ``a`` (BLAS ``symm``, ``hemm``).

    Args:
        alpha: Factor of the product; real unless the matrices are complex.
        a: Square matrix of float32, float64, complex64 or complex128, of which one triangle is read.
        b: Matrix of shape (m, n), of the same dtype.
        beta: Factor of `c`; where it is 0, `c` is only written.
        c: Matrix of shape (m, n), which is changed; by default a new one, with a `beta` of 0.
        side: ``"L"``: `a` is on the left; ``"R"``: on the right, ``alpha * b @ a + beta * c``.
        lower: Whether the lower triangle is read, instead of the upper one.
        hermitian: Whether `a` is Hermitian; then its diagonal counts as real.

    Returns:
        The reference `c`, or a new one.
    """
    ...


@operation("a^trans(n, k), c(n, n) -> c", actor=BlasActor, check=_check_syrk)
async def syrk(
    alpha: complex,
    a: Operand,
    beta: complex,
    c: AccelRef,
    trans: Transpose = "N",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``c = alpha * a @ a.T + beta * c`` in one triangle of c (BLAS ``syrk``, ``herk``).

    Args:
        alpha: Factor of the product; real unless the matrices are complex and not Hermitian.
        a: Matrix of shape (n, k), of float32, float64, complex64 or complex128.
        beta: Factor of `c`, like `alpha`; where it is 0, the triangle is only written.
        c: Matrix of shape (n, n), of which one triangle is changed.
        trans: ``"T"``: ``a.T @ a`` for `a` of shape (k, n). ``"T"`` of complex matrices is for symmetric
            ones, ``"C"`` for Hermitian ones.
        lower: Whether it is the lower triangle, instead of the upper one.
        hermitian: Whether the transpose is conjugated; then the diagonal of `c` becomes real.

    Returns:
        The reference `c`.
    """
    ...


@operation("a^trans(n, k), b^trans(n, k), c(n, n) -> c", actor=BlasActor, check=_check_syrk)
async def syr2k(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex,
    c: AccelRef,
    trans: Transpose = "N",
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``c = alpha * a @ b.T + alpha * b @ a.T + beta * c`` in one triangle (BLAS ``syr2k``, ``her2k``).

    See `syrk` for arguments and result, but `b` has the shape and dtype of `a`. With `hermitian`, the second
    product has the conjugate of `alpha`, which may be complex.
    """
    ...


@operation(_TRIANGULAR, by="side", actor=BlasActor, alias={"out": "b"})
async def trmm(
    alpha: complex,
    a: Operand,
    b: Operand,
    side: Side = "L",
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """``alpha * op(a) @ b`` for a triangular ``a`` (BLAS ``trmm``).

    Args:
        alpha: Factor; real unless the matrices are complex.
        a: Square matrix of float32, float64, complex64 or complex128, of which one triangle is read. It may
            be a stack of shape (..., n, n).
        b: Matrix of the same dtype; or a stack, which broadcasts against the stack of `a`.
        side: ``"L"``: op(a) is on the left; ``"R"``: on the right.
        trans: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.
        lower: Whether the lower triangle is read, instead of the upper one.
        unit_diagonal: Whether the diagonal of `a` counts as ones, and is not read.
        out: Array to write to, which may be `b` itself; by default a new one.

    Returns:
        The reference `out`, or a new one.
    """
    ...


@operation_like(trmm, _TRIANGULAR, by="side", alias={"out": "b"})
def trsm() -> None:
    """The solution x of ``op(a) @ x = alpha * b`` for a triangular ``a`` (BLAS ``trsm``).

    See `trmm` for arguments and result; with `side` ``"R"``, it is ``x @ op(a) = alpha * b``. A zero on the
    diagonal makes infinities and NaN, but no error.
    """


@operation("x(*), y(*) -> y", actor=BlasActor)
async def axpy(alpha: complex, x: Operand, y: AccelRef) -> AccelRef:
    """Add a multiple of one array to another in place: ``y = alpha * x + y`` (BLAS ``axpy``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Array of any shape and a floating or complex dtype.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The reference `y`.
    """
    ...


@operation("x(*) -> x", actor=BlasActor)
async def scal(alpha: complex, x: AccelRef) -> AccelRef:
    """Multiply an array by a number in place: ``x = alpha * x`` (BLAS ``scal``).

    Args:
        alpha: Factor; real unless the array is complex.
        x: Array of any shape and a floating or complex dtype, which is changed.

    Returns:
        The reference `x`.
    """
    ...


@operation("x(n), y(n) -> out()", actor=BlasActor)
async def dot(x: Operand, y: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Sum the products of two vectors, without conjugation (BLAS ``dot``, ``dotu``).

    Args:
        x: Vector of shape (n,).
        y: Vector of the same shape and dtype.
        out: Array without axes to write to; by default a new one.

    Returns:
        An array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation("x(n) -> out: real()", actor=BlasActor, dtypes=INEXACT)
async def nrm2(x: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Euclidean norm of a vector, without needless overflow or underflow (BLAS ``nrm2``).

    Args:
        x: Vector of shape (n,) and a floating or complex dtype.
        out: Array without axes, of the real dtype, to write to; by default a new one.

    Returns:
        A real array of shape () on the device; ``await result.item()`` is the number.
    """
    ...


@operation_like(nrm2, "x(n) -> out: real()", dtypes=INEXACT)
def asum() -> None:
    """Sum of ``abs(x.real) + abs(x.imag)`` over a vector (BLAS ``asum``).

    See `nrm2` for arguments and result; `x` is of float32, float64, complex64 or complex128.
    """


@operation_like(nrm2, "x(n>0) -> out: int64()", dtypes=INEXACT)
def iamax() -> None:
    """Index of the first element with the largest ``abs(x.real) + abs(x.imag)``, from 0 (BLAS ``iamax``).

    See `asum` for arguments and result, but `x` must not be empty, and the result is of int64. If `x` holds a
    NaN, the result is any index.
    """


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def swap(x: AccelRef, y: AccelRef) -> tuple[AccelRef, AccelRef]:
    """Exchange the elements of two arrays (BLAS ``swap``).

    Args:
        x: Array of any shape and dtype, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.

    Returns:
        The references `x` and `y`.
    """
    ...


@operation("x(*), y(*) -> x, y", actor=BlasActor)
async def rot(x: AccelRef, y: AccelRef, c: float, s: complex) -> tuple[AccelRef, AccelRef]:
    """Rotate points in a plane: ``x, y = c * x + s * y, c * y - conj(s) * x`` in place (BLAS ``rot``).

    Args:
        x: Array of any shape, of float32, float64, complex64 or complex128, which is changed.
        y: Array of the same shape and dtype, which is changed; it must not share memory with `x`.
        c: Cosine of the angle, or any real number.
        s: Sine of the angle, or any number; real unless the arrays are complex.

    Returns:
        The references `x` and `y`.
    """
    ...


def _gemv(
    alpha: complex, beta: complex, trans: Transpose, a: ArraySpec, x: ArraySpec, y: ArraySpec
) -> OperationSpec:
    return gemm.spec(alpha, a, column(x), beta, trans, "N", column(y))


def _symv(
    lower: bool, hermitian: bool, alpha: complex, beta: complex, a: ArraySpec, x: ArraySpec, y: ArraySpec
) -> OperationSpec:
    return symm.spec(alpha, a, column(x), beta, "L", lower, hermitian, column(y))


def _ger(alpha: complex, x: ArraySpec, y: ArraySpec, a: ArraySpec, conjugate: bool) -> OperationSpec:
    return gemm.spec(alpha, column(x), column(y), 1.0, "N", "C" if conjugate else "T", a)


def _syr(alpha: complex, x: ArraySpec, a: ArraySpec, lower: bool, hermitian: bool) -> OperationSpec:
    return syrk.spec(alpha, column(x), 1.0, a, "N", lower, hermitian)


def _syr2(
    alpha: complex, x: ArraySpec, y: ArraySpec, a: ArraySpec, lower: bool, hermitian: bool
) -> OperationSpec:
    return syr2k.spec(alpha, column(x), column(y), 1.0, a, "N", lower, hermitian)


def _trmv(
    lower: bool, trans: Transpose, unit_diagonal: bool, a: ArraySpec, x: ArraySpec, out: ArraySpec
) -> OperationSpec:
    return trmm.spec(1.0, a, column(x), "L", trans, lower, unit_diagonal, column(out))


def _trsv(
    lower: bool, trans: Transpose, unit_diagonal: bool, a: ArraySpec, x: ArraySpec, out: ArraySpec
) -> OperationSpec:
    return trsm.spec(1.0, a, column(x), "L", trans, lower, unit_diagonal, column(out))


@operation("a^trans(m, n), x(n) -> y(m)", actor=BlasActor, spec=_gemv)
async def gemv(
    alpha: complex, a: Operand, x: Operand, beta: complex = 0.0, y: Out = None, trans: Transpose = "N"
) -> AccelRef:
    """``alpha * op(a) @ x + beta * y`` (BLAS ``gemv``).

    Args:
        alpha: Factor of the product; real unless the arrays are complex.
        a: Matrix with op(a) of shape (m, n), of a floating or complex dtype.
        x: Vector of shape (n,), of the same dtype.
        beta: Factor of `y`; where it is 0, `y` is only written.
        y: Vector of shape (m,), which is changed; by default a new one, with a `beta` of 0.
        trans: ``"N"``: op(a) is `a`; ``"T"``: its transpose; ``"C"``: its conjugate transpose.

    Returns:
        The reference `y`, or a new one.
    """
    ...


@operation("a(n, n), x(n) -> y(n)", actor=BlasActor, spec=_symv)
async def symv(
    alpha: complex,
    a: Operand,
    x: Operand,
    beta: complex = 0.0,
    y: AccelRef | None = None,
    lower: bool = False,
    hermitian: bool = False,
) -> AccelRef:
    """``alpha * a @ x + beta * y`` for a symmetric or Hermitian ``a`` (BLAS ``symv``, ``hemv``).

    See `symm` for arguments and result, but `x` and `y` are vectors of shape (n,).
    """
    ...


@operation("x(m), y(n), a(m, n) -> a", actor=BlasActor, spec=_ger)
async def ger(alpha: complex, x: Operand, y: Operand, a: AccelRef, conjugate: bool = False) -> AccelRef:
    """``a = alpha * outer(x, y) + a`` in place (BLAS ``ger``, ``geru``, ``gerc``).

    Args:
        alpha: Factor; real unless the arrays are complex.
        x: Vector of shape (m,), of a floating or complex dtype.
        y: Vector of shape (n,), of the same dtype.
        a: Matrix of shape (m, n), which is changed.
        conjugate: Whether `y` is conjugated.

    Returns:
        The reference `a`.
    """
    ...


@operation("x(n), a(n, n) -> a", actor=BlasActor, spec=_syr)
async def syr(
    alpha: complex, x: Operand, a: AccelRef, lower: bool = False, hermitian: bool = False
) -> AccelRef:
    """``a = alpha * outer(x, x) + a`` in one triangle of ``a`` (BLAS ``syr``, ``her``).

    Args:
        alpha: Factor; real unless the arrays are complex and `a` is symmetric.
        x: Vector of shape (n,), of float32, float64, complex64 or complex128.
        a: Matrix of shape (n, n), of which one triangle is changed.
        lower: Whether it is the lower triangle, instead of the upper one.
        hermitian: Whether the second `x` is conjugated; then the diagonal of `a` becomes real.

    Returns:
        The reference `a`.
    """
    ...


@operation("x(n), y(n), a(n, n) -> a", actor=BlasActor, spec=_syr2)
async def syr2(
    alpha: complex, x: Operand, y: Operand, a: AccelRef, lower: bool = False, hermitian: bool = False
) -> AccelRef:
    """``a = alpha * outer(x, y) + alpha * outer(y, x) + a`` in one triangle (BLAS ``syr2``, ``her2``).

    See `syr` for arguments and result, but `y` has the shape and dtype of `x`. With `hermitian`, the second
    product has the conjugate of `alpha`, which may be complex.
    """
    ...


@operation("a(n, n), x(n) -> out(n)", actor=BlasActor, spec=_trmv, alias={"out": "x"})
async def trmv(
    a: Operand,
    x: Operand,
    trans: Transpose = "N",
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """``op(a) @ x`` for a triangular ``a`` (BLAS ``trmv``).

    See `trmm` for arguments and result, but `a` is one matrix, and `x` a vector of shape (n,).
    """
    ...


@operation_like(trmv, "a(n, n), x(n) -> out(n)", spec=_trsv, alias={"out": "x"})
def trsv() -> None:
    """The solution of ``op(a) @ result = x`` for a triangular ``a`` (BLAS ``trsv``).

    See `trmv` for arguments. A zero on the diagonal makes infinities and NaN, but no error.
    """


Matmul: Final = matmul.message
Gemm: Final = gemm.message
Axpy: Final = axpy.message
Scal: Final = scal.message
Dot: Final = dot.message
Nrm2: Final = nrm2.message
Iamax: Final = iamax.message
Swap: Final = swap.message
Gemv: Final = gemv.message
