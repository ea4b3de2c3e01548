"""Products of matrices: the third level of the BLAS."""

from __future__ import annotations

from typing import Any, Final

from ..backends.base.contract.ops import MatmulSpec, Side, Transpose, product_shape
from ..devices import AccelRef, Operand, Planned, Planner, operation, operation_like
from ._actor import BlasActor

__all__ = [
    "Gemm", "Matmul", "Symm", "Syr2k", "Syrk", "Trmm", "Trsm", "gemm", "matmul", "symm", "syr2k", "syrk",
    "trmm", "trsm",
]  # fmt: skip


def _plan_matmul(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by the rules of `numpy.matmul`, which drops axes; and it is what is asked most."""
    given: AccelRef | None = message.out
    is_matrix = isinstance(given, AccelRef) and given.ndim == 2 and given.dtype.is_inexact
    if given is not None and is_matrix and not given.spec.is_contiguous:
        # It writes by strides, where a stack of products has none for its result.
        return gemm.message(1.0, message.a, message.b, 0.0, given).plan(planner)
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

    Operands of more than two axes are stacks of matrices and broadcast against each other; one
    with a single axis is a row (`a`) or column (`b`), whose axis is dropped from the result.

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

    The order of the arguments is that of `scipy.linalg.blas.dgemm`.

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

    Arguments and result are those of `syrk`, but `b` has the shape and dtype of `a`. With `hermitian`, the
    second product has the conjugate of `alpha`, which may be complex.
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
        b: Matrix of the same dtype; or a stack, which broadcasts against that of `a`.
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

    Arguments and result are those of `trmm`; with `side` ``"R"``, it is ``x @ op(a) = alpha * b``. A zero on
    the diagonal makes infinities and NaN; it is no error.
    """


Matmul: Final = matmul.message
Gemm: Final = gemm.message
Symm: Final = symm.message
Syrk: Final = syrk.message
Syr2k: Final = syr2k.message
Trmm: Final = trmm.message
Trsm: Final = trsm.message
