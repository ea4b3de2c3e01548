"""Gradients of matrix functions."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from string import ascii_letters
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..devices import ArrayFunction, Call, gather
from ..expressions import Elementwise
from ._backward import RULES, bound, hosts_on_device, pulled
from ._elementwise import Rule, summed_to
from ._factor_rules import added, column, row
from ._rules import adjoint, axes_of, composition, conjugate, products_before, spread

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
fft = later("trio_accel.fft")
linalg = later("trio_accel.linalg")


def _matmul(call: Any, g: Any) -> Iterator[Rule]:
    a, b = hosts_on_device(call, call.args[:2])
    of_rows = (1, *a.shape)[-max(2, len(a.shape)) :]
    of_columns = (*b.shape, 1)[: max(2, len(b.shape))]
    shape = (*np.broadcast_shapes(of_rows[:-2], of_columns[:-2]), of_rows[-2], of_columns[-1])
    rows = cache(lambda: conjugate(a.reshape(of_rows) if len(a.shape) == 1 else a))
    columns = cache(lambda: conjugate(b.reshape(of_columns) if len(b.shape) == 1 else b))
    slope = cache(lambda: arrays.reshape(g, shape))
    yield a, lambda: arrays.reshape(summed_to(slope() @ columns().mT, of_rows), a.shape)
    yield b, lambda: arrays.reshape(summed_to(rows().mT @ slope(), of_columns), b.shape)


def _solved(call: Any, g: Any, a: Any, b: Any, slope: Any) -> Iterator[Rule]:
    """Yield the gradients of a solution; `slope` is the gradient of the right side."""
    is_vector = len(b.shape) == 1

    def of_matrix() -> Any:
        if is_vector:
            product = arrays.expand_dims(slope(), axis=-1) * arrays.expand_dims(conjugate(call), axis=-2)
        else:
            product = slope() @ adjoint(call)
        return summed_to(-product, a.shape)

    yield b, lambda: summed_to(slope(), b.shape)
    yield a, of_matrix


def _solve(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    a, b = args["a"], args["b"]
    yield from _solved(call, g, a, b, cache(lambda: linalg.solve(adjoint(a), g)))


def _inv(call: Any, g: Any) -> Iterator[Rule]:
    yield bound(call)["a"], lambda: -(adjoint(call) @ g @ adjoint(call))


def _det(call: Any, g: Any) -> Iterator[Rule]:
    (a, *_) = bound(call).values()
    yield a, lambda: arrays.reshape(g, (*g.shape, 1, 1)) * _cofactors(a)


def _cofactors(a: Any) -> Any:
    """Return the conjugates of all cofactors, which a singular matrix has as well."""
    n = a.shape[-1]
    if n < 2:
        return arrays.ones_like(a)
    if n == 2:
        return arrays.flip(conjugate(a), axis=(-2, -1)) * np.array([[1.0, -1.0], [-1.0, 1.0]], a.dtype.dtype)
    if n == 3:
        second, third = (arrays.roll(conjugate(a), -by, axis=-2) for by in (1, 2))
        return linalg.cross(second, third)
    u, s, vh = linalg.svd(a, full_matrices=False)
    axis = len(s.shape) - 1
    after = arrays.flip(products_before(arrays.flip(s, axis=axis), axis), axis=axis)
    products = (products_before(s, axis) * after).cast(a.dtype)
    phase = arrays.reshape(conjugate(linalg.det(u) * linalg.det(vh)), (*a.shape[:-2], 1, 1))
    matrix = phase * ((u * arrays.expand_dims(products, axis=-2)) @ vh)
    return Call(_COFACTORS, (matrix, a))


def _first(result: Any, _: object) -> Any:
    return result


def _of_cofactors(call: Any, g: Any) -> Iterator[Rule]:
    """Derive the cofactors by the inverse, because equal singular values have no derivatives."""
    matrix, a = call.args

    def compose(a: Any) -> Any:
        return arrays.reshape(conjugate(linalg.det(a)), (*a.shape[:-2], 1, 1)) * adjoint(linalg.inv(a))

    yield matrix, lambda: None
    yield a, lambda: pulled(compose, [a], g)[0]


_COFACTORS = ArrayFunction("gradients.cofactors", _first, "value", rule=_of_cofactors)


def _cholesky(call: Any, g: Any) -> Iterator[Rule]:
    """Murray, Differentiation of the Cholesky decomposition (2016): the gradient is symmetric."""
    args = bound(call)
    lower, grad = (adjoint(call), adjoint(g)) if args["upper"] else (call, g)

    def slope() -> Any:
        root = linalg.inv(lower)
        product = arrays.tril(adjoint(lower) @ grad)
        halved = product - 0.5 * (product - arrays.tril(product, k=-1))
        full = adjoint(root) @ halved @ root
        return 0.5 * (full + adjoint(full))

    yield args["a"], slope


def _pinv(call: Any, g: Any) -> Iterator[Rule]:
    """Golub and Pereyra, The differentiation of pseudo-inverses (1973): the rank must not change."""
    x, inverse = bound(call)["x"], call

    def slope() -> Any:
        back, turned = adjoint(inverse), adjoint(g)
        first = back @ g @ back
        left_term = turned @ inverse @ back
        right_term = back @ inverse @ turned
        return -first + left_term - x @ (inverse @ left_term) + right_term - (right_term @ inverse) @ x

    yield x, slope


def _block(call: Any, g: Any) -> Iterator[Rule]:
    """Compute a matrix function's gradient: a block of that function, applied to a matrix twice as large."""
    f, (x, *_) = getattr(linalg, call.function.name.partition(".")[2]), bound(call).values()
    n = x.shape[-1]

    def slope() -> Any:
        back = adjoint(x) + arrays.zeros_like(g)
        # The block is linear in the gradient, and a large one would cost digits, because `expm` squares more
        # often for matrices of a larger norm.
        scale = _power_of_two(g) if g.size else 1.0
        above = arrays.concat([back, g / scale], axis=-1)
        below = arrays.concat([arrays.zeros_like(back), back], axis=-1)
        block = f(arrays.concat([above, below], axis=-2))[..., :n, n:] * scale
        return arrays.real(block) if x.dtype.kind == "float" and block.dtype.kind == "complex" else block

    yield x, slope


def _power_of_two(g: Any) -> Any:
    """Return a power of two near the largest element of each matrix, as a constant."""
    size = arrays.max(arrays.abs(g), axis=(-2, -1), keepdims=True)
    return arrays.exp2(arrays.floor(arrays.log2(arrays.maximum(size, float(np.finfo(str(g.dtype)).tiny)))))


def _einsum(call: Any, g: Any) -> Iterator[Rule]:
    text, *operands = call.args
    if isinstance(operands, list) and len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    yield from _contracted(text, hosts_on_device(call, operands), g)


def _contracted(text: str, operands: Sequence[Any], g: Any) -> Iterator[Rule]:
    terms, out = _subscripts(text, [len(operand.shape) for operand in operands])
    terms = [_apart(term, operand.shape) for term, operand in zip(terms, operands, strict=True)]
    for number, operand in enumerate(operands):
        numbers = [*range(number), *range(number + 1, len(operands))]
        names, factors = [terms[k] for k in numbers], [operands[k] for k in numbers]
        yield operand, partial(_contract, terms[number], operand.shape, out, g, names, factors)


def _subscripts(text: str, counts: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with letters for the axes of an ellipsis."""
    ins, arrow, out = text.replace(" ", "").partition("->")
    terms = ins.split(",")
    letters = [letter for letter in ascii_letters if letter not in text]
    lengths = [
        count - (len(term) - 3) if "..." in term else 0 for term, count in zip(terms, counts, strict=True)
    ]
    # The last axes of several ellipses are the same.
    wide = "".join(letters[: max(lengths)])
    if not arrow:
        used = ins.replace("...", "").replace(",", "")
        out = ("..." if "..." in ins else "") + "".join(sorted(x for x in set(used) if used.count(x) == 1))
    narrow = [wide[len(wide) - length :] for length in lengths]
    return [term.replace("...", axes) for term, axes in zip(terms, narrow, strict=True)], out.replace(
        "...", wide
    )


def _apart(term: str, shape: Sequence[int]) -> str:
    """Give a repeated letter's axis with one element a letter of its own, because it has no diagonal."""
    unused = iter(sorted(set(ascii_letters) - set(term)))
    wide = {letter for letter, extent in zip(term, shape, strict=True) if extent != 1}
    return "".join(
        next(unused) if extent == 1 and letter in wide else letter
        for letter, extent in zip(term, shape, strict=True)
    )


def _contract(
    subscript: str, shape: Sequence[int], out: str, g: Any, names: Sequence[str], factors: Sequence[Any]
) -> Any:
    extents = dict(zip(subscript, shape, strict=True))
    letters = set("".join([out, *names]))
    # An operand with a single element along an axis is the same for all elements of the others, so its
    # gradient is their sum. An axis that only this operand has was summed, so the gradient is the same along
    # it.
    widths = dict.fromkeys(letters, 1)
    for term, array in ((out, g), *zip(names, factors, strict=True)):
        widths |= {letter: extent for letter, extent in zip(term, array.shape, strict=True) if extent != 1}
    there = "".join(
        letter for letter in extents if letter in letters and (extents[letter] != 1 or widths[letter] == 1)
    )
    conjugates = [conjugate(factor) for factor in factors]
    result = linalg.einsum(f"{','.join([out, *names])}->{there}", g, *conjugates)
    if there == subscript and tuple(result.shape) == tuple(shape):
        return result
    # A repeated letter takes a diagonal: the gradient is 0 beside it.
    first = {letter: subscript.index(letter) for letter in extents}
    result_extents = dict(zip(there, result.shape, strict=True))
    wide = [result_extents.get(letter, 1) if first[letter] == n else 1 for n, letter in enumerate(subscript)]
    result = arrays.broadcast_to(arrays.reshape(result, tuple(wide)), tuple(shape))
    for n, letter in enumerate(subscript):
        if first[letter] != n:
            grid = [shape[n] if k in (first[letter], n) else 1 for k in range(len(shape))]
            result = arrays.where(np.eye(shape[n], dtype=bool).reshape(grid), result, 0)
    return result


def _norm(x: Any, axis: Any, keepdims: bool, ord: float) -> Any:  # noqa: A002  # the names of the arguments
    how = {"axis": tuple(axis) if isinstance(axis, list) else axis, "keepdims": keepdims}
    sizes = arrays.abs(x)
    if ord == math.inf:
        return arrays.max(sizes, **how)
    if ord == -math.inf:
        return arrays.min(sizes, **how)
    if ord == 0:
        return arrays.sum(sizes * 0, **how)
    if ord == 1:
        return arrays.sum(sizes, **how)
    raise AssertionError(ord)  # `_power_norm` has the others


# In their second derivatives, g is the gradient of the slope. The norm of zeros has the gradient 0, as in
# PyTorch, but no second derivative.
_OF_TWO = Elementwise[Any](
    "s = where(n == 0, 0, k * x / n)",
    inputs=("k", "x", "n"),
    operation="gradients.norm",
    slopes={
        "k": "d = where(n == 0, 0, g * x / n)",
        "x": "d = where(n == 0, nan, g * k / n)",
        "n": "d = where(n == 0, nan, -g * k * x / n / n)",
    },
)
_OF_POWER = Elementwise[Any](
    "s = where(n == 0, 0, k * sign(x) * (abs(x) / n) ** (p - 1))",
    inputs=("k", "x", "n", "p"),
    operation="gradients.norm",
)


def _power_norm(call: Any, g: Any, axis: Any, order: float) -> Iterator[Rule]:
    """Yield the gradient of a p-norm, from the norm itself, because powers may overflow."""
    x = next(iter(bound(call).values()))
    axes = axes_of(axis, x)

    def slope() -> Any:
        k, n = spread(g, x, axes), spread(call, x, axes)
        return _OF_TWO(k, x, n) if order == 2 else _OF_POWER(k, x, n, float(order))

    yield x, slope


def _vector_norm(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    if args["ord"] in (0, 1, math.inf, -math.inf):
        return composition(_norm)(call, g)
    return _power_norm(call, g, args["axis"], args["ord"])


def _nrm2(call: Any, g: Any) -> Iterator[Rule]:
    return _power_norm(call, g, None, 2)


def _frobenius(call: Any, g: Any) -> Iterator[Rule]:
    if bound(call)["ord"] != "fro":
        return composition(_matrix_norm)(call, g)
    return _power_norm(call, g, (-2, -1), 2)


def _asum(x: Any) -> Any:
    """BLAS adds the magnitudes of real and imaginary parts."""
    if x.dtype.kind != "complex":
        return arrays.sum(arrays.abs(x))
    return arrays.sum(arrays.abs(arrays.real(x)) + arrays.abs(arrays.imag(x)))


def _matrix_norm(x: Any, keepdims: bool, ord: Any) -> Any:  # noqa: A002  # the names of the arguments
    if ord == "fro":
        return linalg.matrix_norm(x, keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        axis, extremum_axis = (-2, -1) if abs(ord) == 1 else (-1, -2)
        sums = arrays.sum(arrays.abs(x), axis=axis, keepdims=True)
        norms = (arrays.max if ord > 0 else arrays.min)(sums, axis=extremum_axis, keepdims=True)
    else:
        values = linalg.svdvals(x)
        norms = arrays.sum(values, axis=-1) if ord == "nuc" else values[..., 0 if ord == 2 else -1]
        norms = arrays.reshape(norms, (*x.shape[:-2], 1, 1))
    return norms if keepdims else arrays.reshape(norms, x.shape[:-2])


def _solve_tridiagonal(dl: Any, d: Any, du: Any, b: Any) -> Any:
    return linalg.solve_banded((1, 1), arrays.stack([_moved(du, -1), d, _moved(dl, 1)], axis=-2), b)


def _solve_toeplitz(c_or_cr: Any, b: Any) -> Any:
    pair: Any = c_or_cr if isinstance(c_or_cr, list) else (c_or_cr, conjugate(c_or_cr))
    column, row = pair
    n = column.shape[-1]
    diagonals = arrays.concat([arrays.flip(row[..., 1:], axis=-1), column], axis=-1)
    indices = np.arange(n)[:, None] - np.arange(n) + n - 1
    return linalg.solve(arrays.take(diagonals, indices, axis=-1), b)


def _moved(x: Any, by: int) -> Any:
    return arrays.roll(x, -by, axis=-1) if by else x


def _rows(ab: Any) -> list[Any]:
    return [ab[..., row, :] for row in range(ab.shape[-2])]


def _solve_banded(call: Any, g: Any) -> Iterator[Rule]:
    """A row is a diagonal: transposing shifts it, and elements outside of its ends are not read."""
    args = bound(call)
    (low, up), ab, b = args["l_and_u"], args["ab"], args["b"]
    is_vector = len(b.shape) == len(ab.shape) - 1
    count, n = low + up + 1, ab.shape[-1]

    def slope() -> Any:
        turned = [_moved(row, number - low) for number, row in enumerate(_rows(conjugate(ab))[::-1])]
        return linalg.solve_banded((up, low), arrays.stack(turned, axis=-2), g)

    solved = cache(slope)

    def of_matrix() -> Any:
        z, x = (operand if is_vector else operand.mT for operand in (solved(), conjugate(call)))
        products = [_moved(z, number - up) * x for number in range(count)]
        sums = products if is_vector else [arrays.sum(product, axis=-2) for product in products]
        ends = np.arange(n) + np.arange(count)[:, None] - up
        return arrays.where((ends >= 0) & (ends < n), -arrays.stack(sums, axis=-2), 0)

    yield b, solved
    yield ab, of_matrix


def _solveh_banded(ab: Any, b: Any, lower: bool) -> Any:
    rows, wide = _rows(ab), ab.shape[-2] - 1
    below = rows[1:] if lower else [_moved(conjugate(rows[wide - k]), k) for k in range(1, wide + 1)]
    above = [_moved(conjugate(rows[k]), -k) for k in range(wide, 0, -1)] if lower else rows[:-1]
    diagonals = arrays.stack([*above, rows[0 if lower else -1], *below], axis=-2)
    return linalg.solve_banded((wide, wide), diagonals, b)


def _cond(x: Any, p: Any) -> Any:
    if p in (None, 2, -2):
        values = linalg.svdvals(x)
        numerator, denominator = (-1, 0) if p == -2 else (0, -1)
        return values[..., numerator] / values[..., denominator]
    return _matrix_norm(x, False, p) * _matrix_norm(linalg.inv(x), False, p)


def _polar(call: Any, g: Any) -> Iterator[Rule]:
    """The equation of Sylvester that the rotation solves: sums of singular values divide, and no gaps.

    The Hermitian factor is ``adjoint(u) @ a``, or ``a @ adjoint(u)``.
    """
    args = bound(call)
    a, is_right = args["a"], args["side"] == "right"
    of_u, of_p = g

    def slope() -> Any:
        factors = linalg.svd(a, full_matrices=False)
        w, s, vh = factors[0], factors[1], factors[2]
        total, direct = of_u, None
        if of_p is not None:
            u = call[0]
            direct = u @ of_p if is_right else of_p @ u
            total = added(of_u, a @ adjoint(of_p) if is_right else adjoint(of_p) @ a)
        turned = adjoint(w) @ total @ adjoint(vh)
        result = w @ ((turned - adjoint(turned)) / (column(s) + row(s))) @ vh
        if a.shape[-2] > a.shape[-1]:
            outside = (total @ adjoint(vh)) / row(s)
            result = result + (outside - w @ (adjoint(w) @ outside)) @ vh
        elif a.shape[-2] < a.shape[-1]:
            outside = (adjoint(w) @ total) / column(s)
            result = result + w @ (outside - (outside @ adjoint(vh)) @ vh)
        return added(result, direct)

    yield a, slope


def _lstsq(call: Any, g: Any) -> Iterator[Rule]:
    """The rank must not change; only full rank has residuals."""

    def compose(a: Any, b: Any, rcond: float | None) -> Any:
        rows, columns = a.shape
        epsilon = float(np.finfo(a.dtype.dtype).eps)
        rtol = epsilon * max(a.shape) if rcond is None else rcond if 0 < rcond < 1 else epsilon
        x, values = linalg.pinv(a, rtol=rtol) @ b, linalg.svdvals(a)
        if rows > columns and 0 not in values.shape:
            sums = arrays.reshape(arrays.sum(arrays.abs(b - a @ x) ** 2, axis=0), (-1,))
            residuals = arrays.where(values[-1] > rtol * values[0], sums, 0)
        else:
            residuals = arrays.reshape(x, (-1,))[:0]
        return gather(x, residuals, values)

    of_x, of_residuals, _, of_values = g
    yield from composition(compose)(call, [of_x, of_residuals, of_values])


RULES.update({
    "linalg.cholesky": _cholesky, "linalg.det": _det,
    "linalg.dot": composition(lambda x, y: arrays.sum(x * y)),
    "linalg.asum": composition(_asum),
    "linalg.nrm2": _nrm2,
    "linalg.einsum": _einsum, "linalg.expm": _block,
    "linalg.sqrtm": _block, "linalg.inv": _inv,
    "linalg.matmul": _matmul,
    "linalg.matrix_norm": _frobenius, "linalg.pinv": _pinv, "linalg.solve": _solve,
    "linalg.solve_tridiagonal": composition(_solve_tridiagonal),
    "linalg.vector_norm": _vector_norm, "tensor.einsum": _einsum,
    "linalg.cond": composition(_cond),
    "linalg.lstsq": _lstsq, "linalg.polar": _polar,
    "linalg.solve_banded": _solve_banded,
    "linalg.solveh_banded": composition(_solveh_banded),
    "linalg.solve_toeplitz": composition(_solve_toeplitz),
})  # fmt: skip
