"""Matrix functions composed of products, solutions and singular values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base import DType, Ints
from ..backends.base.contract.ops import real_of
from ..devices import AccelRef, Operand, composed, device_of, real
from ..expressions import Elementwise, check_operands, intermediates, on_device
from ._blas import Matmul, matmul
from ._norms import MatrixOrder, matrix_norm
from ._spectra import SVDResult, svd, svdvals
from ._systems import inv, slogdet, solve
from ._views import check_matrices, matrix_transpose

__all__ = ["PolarResult", "cond", "expm", "multi_dot", "null_space", "orth", "polar"]

_Side: TypeAlias = Literal["right", "left"]
# The largest norms for which Padé approximants of these degrees are as accurate as the dtype: N. J. Higham,
# "The scaling and squaring method for the matrix exponential revisited", 2005, table 2.3, and the same rule
# for single precision, as in other libraries.
_DEGREES = {
    DType.float64: {
        3: 1.495585217958292e-2,
        5: 2.539398330063230e-1,
        7: 9.504178996162932e-1,
        9: 2.097847961257068,
        13: 5.371920351148152,
    },
    DType.float32: {3: 4.258730016922831e-1, 5: 1.880152677804762, 7: 3.925724783138660},
}


_ORDERS: tuple[MatrixOrder, ...] = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)


class PolarResult(NamedTuple):
    """A polar decomposition; see `polar`."""

    u: AccelRef
    """Matrices of orthonormal columns, or rows."""
    p: AccelRef
    """Hermitian matrices that are positive semidefinite."""


@composed
async def expm(x: Operand, /) -> AccelRef:
    """Exponential of matrices, as `scipy.linalg.expm`, by scaling and squaring (Higham 2005).

    The norms of the matrices cross to the host, which finds the degree for the stack, and for each matrix how
    often it is halved. Products and one solution make the approximant; squarings undo the halvings.

    Args:
        x: Array of shape (..., n, n), of float32, float64, complex64 or complex128.

    Returns:
        The exponentials, with the shape and dtype of `x`. The exponential of a matrix with a NaN or an
        infinity is NaN; elements outside the range of the dtype are infinite or NaN.

    Raises:
        numpy.linalg.LinAlgError: `x` is not a stack of square matrices.
        TypeError: It is not on a device, or of another dtype.
    """
    name = "expm"
    dtype = check_matrices(name, x, square=True)
    real = real_of(dtype)
    if real not in _DEGREES:
        raise TypeError(
            f"{name}: x must be float32, float64, complex64 or complex128, got {dtype}; use cast()"
        )
    if 0 in x.shape:
        return await on_device(x).copy()
    norms = await matrix_norm(x, ord=1)
    size: npt.NDArray[np.float64] = (await norms.to_host()).astype(float)
    norms.release()
    largest = float(np.where(np.isfinite(size), size, 0).max())
    degree, max_norm = next((pair for pair in _DEGREES[real].items() if largest <= pair[1]), (0, 0.0))
    if not degree:
        degree, max_norm = max(_DEGREES[real].items())
    with np.errstate(all="ignore"):
        halvings = np.where(np.isfinite(size) & (size > max_norm), np.ceil(np.log2(size / max_norm)), 0)
    counts = np.atleast_1d(halvings)[..., None, None].reshape(*x.shape[:-2], 1, 1)
    with intermediates() as track:
        scaled = track(await _SCALED(x, np.exp2(-counts).astype(real.dtype)))
        upper, lower = await _approximants(scaled, degree, track)
        result = await solve(lower, upper)
    for step in range(int(halvings.max())):
        with intermediates() as old:
            base = old(result)
            result = await matmul(base, base)
            is_done = step >= counts
            if is_done.any():
                await _CHOSEN(base, is_done, result, out=result)
    return result


async def _approximants(
    x: AccelRef, degree: int, track: Callable[[AccelRef], AccelRef]
) -> tuple[AccelRef, AccelRef]:
    """Make numerator and denominator of a Padé approximant: sums of even and odd powers."""
    m, factorial = degree, math.factorial
    factors = [
        factorial(2 * m - k) * factorial(m) / (factorial(2 * m) * factorial(m - k) * factorial(k))
        for k in range(m + 1)
    ]
    powers = [track(await matmul(x, x))]
    for _ in range(2 if m == 13 else m // 2 - 1):
        powers.append(track(await matmul(powers[-1], powers[0])))
    sums: list[AccelRef] = []
    for parity in (1, 0):
        chosen = factors[parity::2]
        total = track(await _polynomial(len(powers), x.dtype)(chosen[0], *_pairs(chosen[1:], powers)))
        if m == 13:
            # The powers above the sixth are those below it, times the sixth.
            high = track(await _polynomial(len(powers), x.dtype)(0.0, *_pairs(chosen[4:], powers)))
            total = track(await _ADDED(total, track(await matmul(powers[2], high))))
        sums.append(total)
    odd = track(await matmul(x, sums[0]))
    return track(await _ADDED(sums[1], odd)), track(await _SUBTRACTED(sums[1], odd))


def _pairs(factors: Sequence[float], powers: Sequence[AccelRef]) -> list[float | AccelRef]:
    return [term for pair in zip(factors, powers, strict=False) for term in pair]


@composed
async def polar(a: Operand, side: _Side = "right") -> PolarResult:
    """Polar decomposition, as `scipy.linalg.polar`: by `svd`.

    Args:
        a: Array of shape (..., m, n), of float32, float64, complex64 or complex128.
        side: ``"right"`` for ``a = u @ p``, ``"left"`` for ``a = p @ u``.

    Returns:
        u, with the shape of `a`, and p, of shape (..., n, n), or (..., m, m) with ``"left"``.

    Raises:
        ValueError: Another side.
        LinAlgError: See `svd`.
    """
    check_operands("polar", a=a)
    if side not in ("right", "left"):
        raise ValueError(f"polar: side must be 'right' or 'left', got {side!r}")
    with intermediates() as track:
        w, s, vh = map(track, await svd(a, full_matrices=False))
        # Rows are vectors, and columns their conjugates: of the left ones it is the other way about.
        vectors = vh if side == "right" else matrix_transpose(w)
        conjugates = track(await _CONJUGATE(vectors)) if vectors.dtype.kind == "complex" else vectors
        rows, columns = (vectors, conjugates) if side == "right" else (conjugates, vectors)
        p = await matmul(matrix_transpose(columns), track(await _SCALED(rows, s[..., None])))
        return PolarResult(await matmul(w, vh), p)


@composed
async def orth(A: Operand, rcond: float | None = None) -> AccelRef:  # noqa: N803  # SciPy's name
    """Return an orthonormal basis of a matrix's range, as `scipy.linalg.orth`: by `svd`.

    The singular values cross to the host, which finds the rank.

    Args:
        A: Matrix of shape (m, n), of float32, float64, complex64 or complex128.
        rcond: Singular values up to `rcond` times the largest one count as zero. None: as many roundings of
            the dtype as the longer side has elements.

    Returns:
        The basis, as columns: a view of shape (m, rank), which keeps all left singular vectors.

    Raises:
        numpy.linalg.LinAlgError: `A` is not a matrix; stacks are refused, because their ranks may differ.
        LinAlgError: See `svd`.
    """
    decomposed, rank = await _ranked("orth", A, rcond, full=False)
    return decomposed.U[:, :rank]


@composed
async def null_space(A: Operand, rcond: float | None = None) -> AccelRef:  # noqa: N803  # SciPy's name
    """Return an orthonormal basis of a matrix's null space, as `scipy.linalg.null_space`: by `svd`.

    See `orth` for arguments and errors.

    Returns:
        The basis, as columns: an array or a view of shape (n, n - rank).
    """
    decomposed, rank = await _ranked("null_space", A, rcond, full=True)
    rows = decomposed.Vh[rank:]
    return matrix_transpose(await _CONJUGATE(rows) if rows.dtype.kind == "complex" else rows)


async def _ranked(name: str, a: Operand, rcond: float | None, *, full: bool) -> tuple[SVDResult, int]:
    """Decompose a matrix, and find its rank as SciPy does."""
    dtype = check_operands(name, A=a)
    if len(a.shape) != 2:
        raise np.linalg.LinAlgError(f"{name}: A must have shape (m, n), got shape {a.shape}")
    tolerance = np.finfo(dtype.dtype).eps * max(a.shape) if rcond is None else real(name, "rcond", rcond)
    rtol = float(tolerance)
    decomposed = await svd(a, full_matrices=full)
    values: npt.NDArray[np.float64] = (await decomposed.S.to_host()).astype(float)
    return decomposed, int((values > values.max(initial=0) * rtol).sum())


@composed
async def cond(x: Operand, p: MatrixOrder | None = None) -> AccelRef:
    """Condition number of matrices, as `numpy.linalg.cond`.

    Args:
        x: Array of shape (..., m, n), of float32, float64, complex64 or complex128; square except for 2 and
            -2.
        p: Order of the norm, as in `matrix_norm`. None and 2: the largest singular value divided by the
            least; -2: the least divided by the largest. Other orders: the norm of `x` times the norm of its
            inverse.

    Returns:
        The condition numbers, of shape (...) and the real dtype; infinite where a matrix is singular.

    Raises:
        ValueError: No elements, or another `p`.
        LinAlgError: See `svd`.
    """
    if p is not None and p not in _ORDERS:
        raise ValueError(f"cond: p must be None, {', '.join(map(repr, _ORDERS))}, got {p!r}")
    check_matrices("cond", x, square=p not in (None, 2, -2))
    if 0 in x.shape[-2:]:
        raise ValueError(f"cond: x must have elements, got shape {x.shape}")
    with intermediates() as track:
        if p in (None, 2, -2):
            s = track(await svdvals(x))
            ends = (s[..., -1], s[..., 0]) if p == -2 else (s[..., 0], s[..., -1])
            return await _DIVIDED(*ends)
        assert p is not None
        # The sign of a determinant is zero if the inverse does not exist.
        sign, _ = map(track, await slogdet(x))
        filled = track(await _FILLED(x, sign[..., None, None]))
        norms = [track(await matrix_norm(matrix, ord=p)) for matrix in (x, track(await inv(filled)))]
        return await _MULTIPLIED(*norms, sign)


@composed
async def multi_dot(arrays: Sequence[Operand]) -> AccelRef:
    """Product of several matrices in the order that takes the fewest steps, as `numpy.linalg.multi_dot`.

    Args:
        arrays: Two or more matrices of one dtype that `matmul` takes. The first one may be a vector, which is
            a row, and the last one, which is a column.

    Returns:
        The product: without axes if both ends are vectors.

    Raises:
        TypeError: No array is on a device, or dtypes differ.
        ValueError: Less than two arrays, or shapes that do not fit.
    """
    operands = list(arrays)
    if len(operands) < 2:
        raise ValueError(f"multi_dot: arrays must be at least two, got {len(operands)}")
    check_operands("multi_dot", **{f"array_{number}": array for number, array in enumerate(operands)})
    shapes: list[Ints] = [tuple(array.shape) for array in operands]
    ends = [len(shape) for shape in (shapes[0], shapes[-1])]
    rows: list[Ints] = [
        shape if len(shape) != 1 or number else (1, *shape) for number, shape in enumerate(shapes)
    ]
    rows[-1] = (*rows[-1], 1) if ends[1] == 1 else rows[-1]
    if any(len(shape) != 2 for shape in rows) or any(
        lhs[1] != rhs[0] for lhs, rhs in itertools.pairwise(rows)
    ):
        raise ValueError(
            f"multi_dot: arrays must be matrices that fit, with vectors at the ends, got shapes {shapes}"
        )
    order = _order((*[shape[0] for shape in rows], rows[-1][1]))
    with intermediates() as track:

        async def product(start: int, end: int) -> Operand:
            if start == end:
                return operands[start].reshape(rows[start])
            split = order[start][end]
            lhs, rhs = await product(start, split), await product(split + 1, end)
            result = await device_of("multi_dot", *operands).ask(Matmul(lhs, rhs))
            return result if (start, end) == (0, len(operands) - 1) else track(result)

        result = on_device(await product(0, len(operands) - 1))
    return result.reshape(
        tuple([extent for extent, axes in zip(result.shape, ends, strict=True) if axes == 2])
    )


def _order(extents: Sequence[int]) -> list[list[int]]:
    """Find for each chain of matrices the last product, by the steps of all (dynamic programming)."""
    count = len(extents) - 1
    steps = [[0] * count for _ in range(count)]
    order = [[0] * count for _ in range(count)]
    for length in range(1, count):
        for start in range(count - length):
            end = start + length
            steps[start][end], order[start][end] = min(
                (
                    steps[start][split]
                    + steps[split + 1][end]
                    + extents[start] * extents[split + 1] * extents[end + 1],
                    split,
                )
                for split in range(start, end)
            )
    return order


def _elementwise(text: str, name: str, inputs: str | None = None) -> Elementwise[AccelRef]:
    return Elementwise(text, inputs=inputs, operation=f"linalg.{name}")


@functools.cache
def _polynomial(count: int, dtype: DType) -> Elementwise[AccelRef]:
    """Make a sum of `count` powers with factors, and the identity."""
    terms = [f"c{number} * x{number}" for number in range(1, count + 1)]
    text = " + ".join(["(c0 if i(-1) == i(-2) else 0)", *terms])
    return Elementwise(text, dtypes=dtype, operation="linalg.expm")


_ADDED, _SUBTRACTED = _elementwise("x + y", "expm"), _elementwise("x - y", "expm")
_SCALED, _CHOSEN = _elementwise("x * s", "expm"), _elementwise("x if done else y", "expm")
_CONJUGATE = _elementwise("conj(x)", "null_space")
# Zero by zero, and quotients outside the range, are infinite. NaN stays NaN.
_DIVIDED = _elementwise("where(y == 0, inf, x / y)", "cond", "xy")
_MULTIPLIED = _elementwise(
    "where(d == 0, inf, where(x == x, where(x * y == x * y, x * y, inf), x))", "cond", "xyd"
)
_FILLED = _elementwise("where(d == 0, i(-1) == i(-2), x)", "cond", "xd")
