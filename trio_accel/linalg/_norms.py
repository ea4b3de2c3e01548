"""Norms, ranks and pseudo-inverses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from ..backends.base import DType
from ..backends.base.contract.ops import common_shape
from ..devices import AccelRef, Operand, bounded_integer, composed, real
from ..expressions import Elementwise, Out, Reduction, check_operands, intermediates, on_device
from ._blas import matmul
from ._spectra import svd, svdvals
from ._systems import inv
from ._views import check_matrices, matrix_transpose, real_dtype

__all__ = ["matrix_norm", "matrix_power", "matrix_rank", "pinv", "vector_norm"]

MatrixOrder: TypeAlias = float | Literal["fro", "nuc"]
"""Order of a norm of matrices: 1, 2, infinity, or minus one of these; or a name."""

# Norms by sums of columns or rows: the axis to add along.
_SUMS: dict[object, int] = {1: -2, -1: -2, math.inf: -1, -math.inf: -1}
# Norms by singular values: the norm of these.
_SPECTRAL: dict[object, float] = {2: math.inf, -2: -math.inf, "nuc": 1}


@composed
async def vector_norm(
    x: Operand,
    /,
    *,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    ord: float = 2,  # noqa: A002  # the standard's name
    out: Out = None,
) -> AccelRef:
    """Norm of vectors, as `numpy.linalg.vector_norm`, in one launch or three.

    Powers are computed and added in float64, and the norm is rounded once. If powers could overflow or
    underflow, the largest absolute value is found first: for float64 and complex128, and orders other than 0,
    1, 2 and the infinite ones.

    Args:
        x: Array of a floating or complex dtype.
        axis: Axis or axes of the vectors; None for all, as one vector.
        keepdims: Whether these axes stay, with one element.
        ord: 2; infinity or minus infinity for the largest or the least absolute value; 0 for the number of
            nonzero elements; any other p for ``sum(abs(x) ** p) ** (1 / p)``.
        out: Array to write to, with the same kind of dtype: the result is converted to it.

    Returns:
        The norms, of the real dtype. No elements have 0, but by a negative `ord` above minus infinity.

    Raises:
        TypeError: `x` is of another dtype, or `ord` is not a number.
        ValueError: An axis out of range, or the least of no elements.
    """
    dtype = check_operands("vector_norm", x=x)
    real = real_dtype("vector_norm", dtype)
    if not isinstance(ord, (int, float)):
        raise TypeError(f"vector_norm: ord must be a number, such as 1, 2 or math.inf, got {ord!r}")
    is_complex = dtype.kind == "complex"
    return await _measure("vector_norm", ord, is_complex, real.value, x, axis, keepdims=keepdims, out=out)


@composed
async def matrix_norm(
    x: Operand,
    /,
    *,
    keepdims: bool = False,
    ord: MatrixOrder = "fro",  # noqa: A002  # the standard's name
) -> AccelRef:
    """Norm of matrices, as `numpy.linalg.matrix_norm`.

    The Frobenius norm is a `vector_norm`, sums of rows or columns are two launches, and the others are
    `svdvals` and one.

    Args:
        x: Array of shape (..., m, n) and a floating or complex dtype; for 2, -2 and ``"nuc"`` a dtype that
            `svd` takes.
        keepdims: Whether the last two axes stay, with one element.
        ord: ``"fro"``; ``"nuc"`` for the sum of the singular values; 2 or -2 for the largest or the least of
            these; 1 or -1 for the largest or the least column sum of absolute values, infinity or minus
            infinity for row sums.

    Returns:
        The norms, of shape (...), or (..., 1, 1), and the real dtype; 0 of matrices without elements.

    Raises:
        TypeError: Another dtype.
        ValueError: Another `ord`, or the least of no elements.
        numpy.linalg.LinAlgError: `x` has less than two axes.
        LinAlgError: For 2, -2 and ``"nuc"``, as `svd`.
    """
    name = "matrix_norm"
    dtype = check_matrices(name, x)
    real = real_dtype(name, dtype).value
    norm = functools.partial(_norm, name, is_complex=dtype.kind == "complex", real=real)
    if ord == "fro":
        return await _measure(name, 2, dtype.kind == "complex", real, x, (-2, -1), keepdims=keepdims)
    with intermediates() as track:
        if ord in _SPECTRAL:
            values = track(await svdvals(x))
            result = await _norm(name, _SPECTRAL[ord], False, real)(values, axis=-1)
            return result[..., None, None] if keepdims else result
        if ord not in _SUMS:
            raise ValueError(f"{name}: ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}")
        sums = track(await norm(1)(x, axis=_SUMS[ord], keepdims=True))
        order = math.copysign(math.inf, float(ord))
        return await _norm(name, order, False, real)(sums, axis=(-2, -1), keepdims=keepdims)


@composed
async def matrix_rank(x: Operand, /, *, rtol: float | Operand | None = None) -> AccelRef:
    """Rank of matrices, as `numpy.linalg.matrix_rank`: how many singular values count.

    Args:
        x: Array of shape (..., m, n), of float32, float64, complex64 or complex128.
        rtol: Singular values up to `rtol` times the largest one count as zero: a number, or an array of shape
            (...). None: as many roundings of the dtype as the longer side has elements.

    Returns:
        The ranks, of shape (...) and int64.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
        LinAlgError: See `svd`.
    """
    dtype = check_matrices("matrix_rank", x)
    tolerance = _tolerance("matrix_rank", dtype, x.shape, rtol, 1)
    with intermediates() as track:
        values = track(await svdvals(x))
        return await _COUNT_ABOVE(values, values[..., :1], tolerance, axis=-1)


@composed
async def pinv(x: Operand, /, *, rtol: float | Operand | None = None) -> AccelRef:
    """Pseudo-inverse of matrices, as `numpy.linalg.pinv`, by `svd`.

    Args:
        x: Array of shape (..., m, n), of float32, float64, complex64 or complex128.
        rtol: See `matrix_rank`.

    Returns:
        The pseudo-inverses, of shape (..., n, m) and the dtype of `x`: a view with transposed strides.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
        LinAlgError: See `svd`.
    """
    dtype = check_matrices("pinv", x)
    tolerance = _tolerance("pinv", dtype, x.shape, rtol, 2)
    with intermediates() as track:
        u, values, vh = map(track, await svd(x, full_matrices=False))
        rows = values[..., None, :]
        await _DIVIDED(u, rows, rows[..., :1], tolerance, out=u)
        # The conjugate transpose of the result.
        product = await matmul(u, vh)
        if dtype.kind == "complex":
            product = await _CONJUGATE(track(product))
    return matrix_transpose(product)


@composed
async def matrix_power(x: Operand, n: int, /) -> AccelRef:
    """Power of square matrices, as `numpy.linalg.matrix_power`, by repeated squaring.

    Args:
        x: Array of shape (..., m, m), of a dtype that `matmul` takes; for a negative `n`, that `inv` takes.
        n: Exponent, an integer. 0 makes matrices of ones on the diagonal.

    Returns:
        The powers, with the shape and dtype of `x`.

    Raises:
        TypeError: `n` is not an integer.
        numpy.linalg.LinAlgError: `x` is not a stack of square matrices.
        LinAlgError: `n` is negative, and a matrix is singular.
    """
    name = "matrix_power"
    dtype = check_matrices(name, x, square=True)
    n = bounded_integer(name, "n", n)
    if n == 0:
        return await _identity(dtype.value)(x)
    if n == 1:
        return await on_device(x).copy()
    if n == -1:
        return await inv(x)
    with intermediates() as track:
        base = x if n > 0 else track(await inv(x))
        result = base
        # The loop starts at the second bit of the exponent: each squares, and a 1 multiplies once more.
        for step in f"{abs(int(n)):b}"[1:].replace("0", "s").replace("1", "sm"):
            with intermediates() as old:
                power = result if result is base else old(on_device(result))
                result = await matmul(power, power if step == "s" else base)
    return on_device(result)


_COUNT_ABOVE = Reduction("s > t * r", "sum", operation="linalg.matrix_rank")
_DIVIDED = Elementwise[AccelRef]("where(s > t * r, u / s, 0)", inputs="ustr", operation="linalg.pinv")
_CONJUGATE = Elementwise[AccelRef]("conj(x)", operation="linalg.pinv")


@functools.cache
def _identity(dtype: str) -> Elementwise[AccelRef]:
    """Make matrices of ones on the diagonal."""
    # The operand determines the device and the shape, also while a gradient is derived.
    text = "where(x == x, i(-1) == i(-2), i(-1) == i(-2))"
    return Elementwise(text, inputs=("x",), dtypes=dtype, operation="linalg.matrix_power")


def _tolerance(
    name: str, dtype: DType, shape: Sequence[int], rtol: float | Operand | None, axes: int
) -> float | Operand:
    """Bring a tolerance into the shape of singular values, with additional axes after the stack."""
    if rtol is None:
        return max(shape[-2:]) * float(np.finfo(dtype.dtype).eps)
    if not isinstance(rtol, (AccelRef, np.ndarray)):
        return float(real(name, "rtol", rtol))
    stack = tuple(shape[:-2])
    if common_shape(rtol.shape, stack) != stack:
        raise ValueError(f"rtol must have the shape of the stack, {stack}, got shape {rtol.shape}")
    return rtol[(..., *(None,) * axes)]


@functools.lru_cache(256)
def _norm(name: str, order: float, is_complex: bool, real: str) -> Reduction:
    """Make a norm of vectors with a result of the dtype `real`."""
    make = functools.partial(Reduction, operation=f"linalg.{name}")
    if math.isinf(order):
        # An expression has a result even of no elements.
        return make("abs(x)", "maximum(a, b)", identity=0) if order > 0 else make("abs(x)", "min")
    final = functools.partial(make, dtype="float64")
    if order == 0:
        return final("x != 0", "sum", post=f"{real}(a)")
    if order == 1:
        return final("abs(x)", "sum", post=f"{real}(a)")
    if order == 2:
        parts = ("real(x)", "imag(x)") if is_complex else ("x",)
        return final(" + ".join(f"square(float64({part}))" for part in parts), "sum", post=f"{real}(sqrt(a))")
    return final(f"float64(abs(x)) ** ({float(order)!r})", "sum", post=f"{real}(a ** ({1 / order!r}))")


async def _measure(
    name: str,
    order: float,
    is_complex: bool,
    real: str,
    x: Operand,
    axis: int | Sequence[int] | None,
    *,
    keepdims: bool,
    out: Out = None,
) -> AccelRef:
    """Compute a norm of vectors, which are scaled first where their powers may leave the range of float64."""
    norm = functools.partial(_norm, name, is_complex=is_complex, real=real)
    if order in (0, 1) or math.isinf(order) or (order == 2 and real != "float64") or 0 in x.shape:
        return await norm(order)(x, axis=axis, keepdims=keepdims, out=out)
    with intermediates() as track:
        ends = track(await norm(math.copysign(math.inf, order))(x, axis=axis, keepdims=True))
        scaled, rescale = _scaled_norm(name, order, is_complex, real)
        total = track(await scaled(x, ends, axis=axis, keepdims=keepdims))
        return await rescale(total, ends.reshape(total.shape), out=out)


# From here on, and down to their inverse, squares of float64 and their sums keep all digits.
_RESCALE_ABOVE, _STEP = 2.0**480, 2.0**600


@functools.lru_cache(256)
def _scaled_norm(
    name: str, order: float, is_complex: bool, real: str
) -> tuple[Reduction, Elementwise[AccelRef]]:
    """Make the norm of vectors ``x`` that are divided by about ``m`` first, and the norm multiplied after."""
    operation = f"linalg.{name}"
    if order == 2:
        # A power of two rounds nothing.
        unit = (
            f"where(m > {_RESCALE_ABOVE!r}, {_STEP!r}, where(m < {1 / _RESCALE_ABOVE!r}, {1 / _STEP!r}, 1.0))"
        )
        parts = ("real(x)", "imag(x)") if is_complex else ("x",)
        text, post = " + ".join(f"square({part} / {unit})" for part in parts), "sqrt(a)"
    else:
        unit = f"where(m > 0, where(m <= {float(np.finfo(np.float64).max)!r}, float64(m), 1.0), 1.0)"
        text, post = f"(float64(abs(x)) / {unit}) ** ({float(order)!r})", f"a ** ({1 / order!r})"
    make = functools.partial(Reduction, operation=operation, dtype="float64")
    rescale = Elementwise[AccelRef](f"{real}(a * {unit})", inputs=("a", "m"), operation=operation)
    return make(text, "sum", inputs=("x", "m"), post=post), rescale
