"""Gradients of functions of matrices, and of transforms."""

# Operands are calls and arrays, whose results are known when they are awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import fft as _fft
from .. import linalg as _linalg
from ..devices import Function, called
from ._backward import RULES, bound, refuse
from ._elementwise import Rule, summed_to
from ._rules import composition, conjugate

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays
fft: Any = _fft
linalg: Any = _linalg


def _matmul(call: Any, g: Any) -> Iterator[Rule]:
    a, b = call.args[:2]
    of_rows = (1, *a.shape)[-max(2, len(a.shape)) :]
    of_columns = (*b.shape, 1)[: max(2, len(b.shape))]
    shape = (*np.broadcast_shapes(of_rows[:-2], of_columns[:-2]), of_rows[-2], of_columns[-1])
    # One of the operands may be an array of the host.
    rows = cache(lambda: conjugate(a.reshape(of_rows) if len(a.shape) == 1 else a))
    columns = cache(lambda: conjugate(b.reshape(of_columns) if len(b.shape) == 1 else b))
    slope = cache(lambda: arrays.reshape(g, shape))
    yield a, lambda: arrays.reshape(summed_to(slope() @ columns().mT, of_rows), a.shape)
    yield b, lambda: arrays.reshape(summed_to(rows().mT @ slope(), of_columns), b.shape)


def _adjoint(a: Any) -> Any:
    return conjugate(a).mT


def _solved(call: Any, g: Any, a: Any, b: Any, slope: Any) -> Iterator[Rule]:
    """Yield the gradients of a solution: `slope` is that of the right side."""
    is_vector = len(b.shape) == 1

    def of_matrix() -> Any:
        if is_vector:
            made = arrays.expand_dims(slope(), axis=-1) * arrays.expand_dims(conjugate(call), axis=-2)
        else:
            made = slope() @ _adjoint(call)
        return summed_to(-made, a.shape)

    yield b, lambda: summed_to(slope(), b.shape)
    yield a, of_matrix


def _solve(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    a, b = at["a"], at["b"]
    yield from _solved(call, g, a, b, cache(lambda: linalg.solve(_adjoint(a), g)))


def _inv(call: Any, g: Any) -> Iterator[Rule]:
    yield bound(call)["a"], lambda: -(_adjoint(call) @ g @ _adjoint(call))


def _det(call: Any, g: Any) -> Iterator[Rule]:
    a = bound(call)["a"]
    yield a, lambda: arrays.reshape(g * conjugate(call), (*g.shape, 1, 1)) * _adjoint(linalg.inv(a))


def _cholesky(call: Any, g: Any) -> Iterator[Rule]:
    """Murray, Differentiation of the Cholesky decomposition (2016): the gradient is symmetric."""
    at = bound(call)
    lower, grad = (_adjoint(call), _adjoint(g)) if at["upper"] else (call, g)

    def slope() -> Any:
        root = linalg.inv(lower)
        product = arrays.tril(_adjoint(lower) @ grad)
        halved = product - 0.5 * (product - arrays.tril(product, k=-1))
        whole = _adjoint(root) @ halved @ root
        return 0.5 * (whole + _adjoint(whole))

    yield at["a"], slope


def _matrix_power(x: Any, n: int) -> Any:
    base = linalg.inv(x) if n < 0 else x
    if n == 0:
        return x * 0 + np.eye(x.shape[-1], dtype=x.dtype.dtype)
    total: Any = None
    for bit in f"{abs(n):b}":
        total = total @ total if total is not None else None
        if bit == "1":
            total = base if total is None else total @ base
    return total


def _pinv(call: Any, g: Any) -> Iterator[Rule]:
    """Golub and Pereyra, The differentiation of pseudo-inverses (1973): the rank must not change."""
    x, inverse = bound(call)["x"], call

    def slope() -> Any:
        back, turned = _adjoint(inverse), _adjoint(g)
        first = back @ g @ back
        left = turned @ inverse @ back
        right = back @ inverse @ turned
        return -first + left - x @ (inverse @ left) + right - (right @ inverse) @ x

    yield x, slope


def _expm(call: Any, g: Any) -> Iterator[Rule]:
    """The gradient is a block of the exponential of a matrix twice as large."""
    x = bound(call)["x"]
    n = x.shape[-1]

    def slope() -> Any:
        back = _adjoint(x)
        above = arrays.concat([back, g], axis=-1)
        below = arrays.concat([arrays.zeros_like(back), back], axis=-1)
        return linalg.expm(arrays.concat([above, below], axis=-2))[..., :n, n:]

    yield x, slope


def _einsum(call: Any, g: Any) -> Iterator[Rule]:
    text, *operands = call.args
    if isinstance(operands, list) and len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    yield from _contracted(call.function.name, text, operands, g)


def _contracted(name: str, text: str, operands: Sequence[Any], g: Any) -> Iterator[Rule]:
    ins, arrow, out = text.replace(" ", "").partition("->")
    terms = ins.split(",")
    if "." in text:
        raise refuse(name, "an ellipsis has no rule; name the axes")
    if not arrow:
        out = "".join(sorted(one for one in set(ins) - {","} if ins.count(one) == 1))
    for number, operand in enumerate(operands):
        own = terms[number]
        if len(set(own)) < len(own):
            raise refuse(name, f"{own!r} takes a diagonal; take it by ta.arrays.diagonal")
        others = [conjugate(one) for k, one in enumerate(operands) if k != number]
        names = [term for k, term in enumerate(terms) if k != number]
        yield operand, partial(_contract, own, operand.shape, out, g, names, others)


def _contract(
    own: str, shape: Sequence[int], out: str, g: Any, names: Sequence[str], others: Sequence[Any]
) -> Any:
    known = set("".join([out, *names]))
    # An axis that only this operand has was summed, so the gradient is the same along it.
    there = "".join(one for one in own if one in known)
    made = linalg.einsum(f"{','.join([out, *names])}->{there}", g, *others)
    if there == own:
        return made
    wide = tuple(extent if one in known else 1 for one, extent in zip(own, shape, strict=True))
    return arrays.broadcast_to(arrays.reshape(made, wide), tuple(shape))


def _tensordot(x1: Any, x2: Any, axes: Any) -> Any:
    first, second = len(x1.shape), len(x2.shape)
    if isinstance(axes, int):
        axes = list(range(first - axes, first)), list(range(axes))
    left, right = (
        [int(one) % n for one in np.atleast_1d(each)] for each, n in zip(axes, (first, second), strict=True)
    )
    kept = [one for one in range(first) if one not in left]
    others = [one for one in range(second) if one not in right]
    many = math.prod(x1.shape[one] for one in left)
    a = arrays.reshape(arrays.permute_dims(x1, (*kept, *left)), (-1, many))
    b = arrays.reshape(arrays.permute_dims(x2, (*right, *others)), (many, -1))
    shape = (*(x1.shape[one] for one in kept), *(x2.shape[one] for one in others))
    return arrays.reshape(a @ b, shape)


def _kron(a: Any, b: Any) -> Any:
    count = max(len(a.shape), len(b.shape))
    left = (1,) * (count - len(a.shape)) + tuple(a.shape)
    right = (1,) * (count - len(b.shape)) + tuple(b.shape)
    apart = arrays.reshape(a, tuple(n for one in left for n in (one, 1)))
    beside = arrays.reshape(b, tuple(n for one in right for n in (1, one)))
    return arrays.reshape(apart * beside, tuple(n * m for n, m in zip(left, right, strict=True)))


def _cross(x1: Any, x2: Any, axis: int) -> Any:
    shape = np.broadcast_shapes(x1.shape, x2.shape)
    at = axis % len(shape)

    def turned(one: Any, by: int) -> Any:
        return arrays.roll(arrays.broadcast_to(one, shape), -by, axis=at)

    return turned(x1, 1) * turned(x2, 2) - turned(x1, 2) * turned(x2, 1)


def _outer(x1: Any, x2: Any) -> Any:
    return arrays.reshape(x1, (-1, 1)) * arrays.reshape(x2, (1, -1))


def _trace(x: Any, offset: int, dtype: Any) -> Any:
    made = arrays.sum(arrays.diagonal(x, offset=offset), axis=-1)
    return made if dtype is None else made.cast(dtype)


def _vecdot(x1: Any, x2: Any, axis: int) -> Any:
    return arrays.sum(conjugate(x1) * x2, axis=axis)


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
    if ord == 2:
        # The norm of zeros has the gradient 0, as in PyTorch.
        total = arrays.sum(sizes * sizes, **how)
        return arrays.where(total == 0, 0, arrays.sqrt(arrays.where(total == 0, 1, total)))
    return arrays.sum(sizes**ord, **how) ** (1 / ord)


def _matrix_norm(x: Any, keepdims: bool, ord: Any) -> Any:  # noqa: A002  # the names of the arguments
    if ord == "fro":
        return _norm(x, (-2, -1), keepdims, 2)
    if ord in (1, -1, math.inf, -math.inf):
        axis, other = (-2, -1) if abs(ord) == 1 else (-1, -2)
        sums = arrays.sum(arrays.abs(x), axis=axis, keepdims=True)
        made = (arrays.max if ord > 0 else arrays.min)(sums, axis=other, keepdims=True)
    else:
        values = linalg.svdvals(x)
        made = arrays.sum(values, axis=-1) if ord == "nuc" else values[..., 0 if ord == 2 else -1]
        made = arrays.reshape(made, (*x.shape[:-2], 1, 1))
    return made if keepdims else arrays.reshape(made, x.shape[:-2])


async def _make_slope_of_svdvals(g: Any, x: Any) -> Any:
    u, _, vh = await linalg.svd(x, full_matrices=False)
    return await ((u * arrays.expand_dims(g, axis=-2)) @ vh)


async def _make_slope_of_eigvalsh(g: Any, a: Any, triangle: str) -> Any:
    _, vectors = await linalg.eigh(a, triangle)
    return await ((vectors * arrays.expand_dims(g, axis=-2)) @ _adjoint(vectors))


_slope_of_svdvals = called(Function("gradients.svdvals", _make_slope_of_svdvals, "awaitable"))
_slope_of_eigvalsh = called(Function("gradients.eigvalsh", _make_slope_of_eigvalsh, "awaitable"))


def _svdvals(call: Any, g: Any) -> Iterator[Rule]:
    x = bound(call)["x"]
    yield x, lambda: _slope_of_svdvals(g, x)


def _eigvalsh(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    if at["b"] is not None:
        raise refuse(call.function.name, "the generalised problem has no rule")
    yield at["a"], lambda: _slope_of_eigvalsh(g, at["a"], at["UPLO"])


def _solve_tridiagonal(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    low, middle, up, b = (at[name] for name in ("dl", "d", "du", "b"))

    def slope() -> Any:
        # The diagonals of the transposed matrix: the element outside of each is not read.
        return linalg.solve_tridiagonal(arrays.roll(up, 1, axis=-1), middle, arrays.roll(low, -1, axis=-1), g)

    solved = cache(slope)

    def product(shift: int) -> Any:
        x = call if not shift else arrays.roll(call, shift, axis=-1 if is_vector else -2)
        made = solved() * x
        made = made if is_vector else arrays.sum(made, axis=-1)
        first = slice(1, None) if shift > 0 else slice(0, -1)
        if shift:
            widths = [(0, 0)] * (len(made.shape) - 1) + [(1, 0) if shift > 0 else (0, 1)]
            made = arrays.pad(made[..., first], widths)
        return -made

    is_vector = len(b.shape) == len(middle.shape)
    yield b, solved
    yield middle, lambda: product(0)
    yield low, lambda: product(1)
    yield up, lambda: product(-1)


# Transforms. The adjoint of a transform is its inverse without a factor: by the other norm.
_OTHER = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _fitted(g: Any, extent: int, axis: int) -> Any:
    """Return a gradient that is cut, or has zeros behind it, along an axis."""
    there = g.shape[axis]
    if there > extent:
        return g[(slice(None),) * axis + (slice(0, extent),)]
    widths = [(0, extent - there if one == axis else 0) for one in range(len(g.shape))]
    return arrays.pad(g, widths) if there < extent else g


def _complex_transforms(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, name = at["a"], call.function.name.partition(".")[2]
    is_inverse = name.startswith("i")
    back = fft.fft if is_inverse else fft.ifft

    def slope() -> Any:
        made = g
        for axis in _axes(at, x):
            made = _fitted(back(made, axis=axis, norm=_OTHER[at["norm"]]), x.shape[axis], axis)
        return made

    yield x, slope


def _axes(at: dict[str, Any], x: Any) -> list[int]:
    count = len(x.shape)
    if "axis" in at:
        return [at["axis"] % count]
    axes, sizes = at["axes"], at["s"]
    if axes is None:
        axes = range(count) if sizes is None else range(count - len(np.atleast_1d(sizes)), count)
    return [int(one) % count for one in np.atleast_1d(axes)]


def _rfft_back(g: Any, length: int, axis: int, norm: Any) -> Any:
    wide = _fitted(g, length, axis)
    return fft.ifft(wide, axis=axis, norm=_OTHER[norm])


def _irfft_back(g: Any, length: int, axis: int, norm: Any) -> Any:
    """The middle frequencies stand for two of the whole spectrum."""
    half = length // 2 + 1
    weights = np.full(half, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    line = weights.reshape([-1 if one == axis else 1 for one in range(len(g.shape))])
    return fft.rfft(g, axis=axis, norm=_OTHER[norm]) * line.astype(
        np.float32 if g.dtype == "float32" else float
    )


def _real_transforms(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, name, norm = at["a"], call.function.name.partition(".")[2], at["norm"]
    *others, last = _axes(at, x)
    sizes = at.get("s") if "axis" not in at else None
    own = at.get("n") if "axis" in at else None if sizes is None else int(np.atleast_1d(sizes)[-1])

    def forwards() -> Any:
        made = g
        for axis in others:
            made = _fitted(fft.ifft(made, axis=axis, norm=_OTHER[norm]), x.shape[axis], axis)
        length = x.shape[last] if own is None else own
        return _fitted(arrays.real(_rfft_back(made, length, last, norm)), x.shape[last], last)

    def inverse() -> Any:
        made = _fitted(_irfft_back(g, g.shape[last], last, norm), x.shape[last], last)
        for axis in others:
            made = _fitted(fft.fft(made, axis=axis, norm=_OTHER[norm]), x.shape[axis], axis)
        return made

    yield x, inverse if name.startswith("i") else forwards


def _hfft(a: Any, n: int | None, axis: int, norm: Any) -> Any:
    return fft.irfft(arrays.conj(a), n, axis, _OTHER[norm])


def _ihfft(a: Any, n: int | None, axis: int, norm: Any) -> Any:
    return arrays.conj(fft.rfft(a, n, axis, _OTHER[norm]))


def _cosine_factors(length: int, kind: int, norm: Any, *, is_sine: bool) -> Any:
    """Return the factors of a transform: of type 2 behind the orthogonal one, and of type 3 ahead of it."""
    if norm == "ortho":
        return np.ones(length)
    factors = np.full(length, np.sqrt(2.0 * length))
    factors[-1 if is_sine else 0] = np.sqrt((4.0 if kind == 2 else 1.0) * length)
    return factors / (2 * length) if norm == "forward" else factors


def _cosines(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, name, norm = at["a"], call.function.name.partition(".")[2], at["norm"]
    kind = {2: 3, 3: 2}.get(at["type"], at["type"]) if name.startswith("i") else at["type"]
    if kind not in (2, 3) or at["orthogonalize"] is not None:
        raise refuse(call.function.name, "only the types 2 and 3 without orthogonalize have rules")
    if name.startswith("i"):
        norm = _OTHER[norm]
    is_sine = "s" in name.removeprefix("i")[:2]

    def slope() -> Any:
        made = g
        for axis in _axes(at, x):
            made = _fitted(_cosine_back(made, axis, kind, norm, is_sine), x.shape[axis], axis)
        return made

    yield x, slope


def _cosine_back(g: Any, axis: int, kind: int, norm: Any, is_sine: bool) -> Any:
    transform = partial(fft.dst if is_sine else fft.dct, axis=axis, norm="ortho")
    line = [-1 if one == axis else 1 for one in range(len(g.shape))]
    factors = _cosine_factors(g.shape[axis], kind, norm, is_sine=is_sine).reshape(line).astype(g.dtype.dtype)
    return transform(g * factors, 3) if kind == 2 else transform(g, 2) * factors


def _shifted(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    back = fft.fftshift if "ifft" in call.function.name else fft.ifftshift
    yield at["x"], lambda: back(g, axes=at["axes"])


def _convolved(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    a, b, mode = at["in1"], at["in2"], at["mode"]
    name = call.function.name.partition(".")[2]
    if at.get("axes") is not None:
        raise refuse(call.function.name, "axes have no rule")
    is_correlation = name == "correlate"
    count = len(a.shape)
    full = [n + m - 1 for n, m in zip(a.shape, b.shape, strict=True)]
    starts = [0 if mode == "full" else (wide - kept) // 2 if mode == "same" else min(n, m) - 1
              for wide, kept, n, m in zip(full, g.shape, a.shape, b.shape, strict=True)]  # fmt: skip
    widths = [(start, wide - start - kept) for start, wide, kept in zip(starts, full, g.shape, strict=True)]
    axes = tuple(range(count))
    whole = cache(lambda: arrays.pad(g, widths))

    def by(one: Any, extent: Sequence[int]) -> Any:
        # A correlation with the other factor: what is left of it in the middle.
        turned = arrays.flip(conjugate(one), axis=axes)
        made = fft.fftconvolve(whole(), turned)
        first = [n - 1 for n in one.shape]
        return made[tuple(slice(start, start + n) for start, n in zip(first, extent, strict=True))]

    yield a, lambda: by(arrays.flip(conjugate(b), axis=axes) if is_correlation else b, a.shape)

    def of_second() -> Any:
        made = by(a, b.shape)
        return conjugate(arrays.flip(made, axis=axes)) if is_correlation else made

    yield b, of_second


RULES.update({
    "linalg.cholesky": _cholesky, "linalg.cross": composition(_cross), "linalg.det": _det,
    "linalg.dot": composition(lambda x, y: arrays.sum(x * y)),
    "linalg.asum": composition(lambda x: arrays.sum(arrays.abs(x))),
    "linalg.nrm2": composition(lambda x: _norm(x, None, False, 2)),
    "linalg.eigvalsh": _eigvalsh, "linalg.einsum": _einsum, "linalg.expm": _expm, "linalg.inv": _inv,
    "linalg.kron": composition(_kron), "linalg.matmul": _matmul,
    "linalg.matrix_norm": composition(_matrix_norm), "linalg.matrix_power": composition(_matrix_power),
    "linalg.outer": composition(_outer), "linalg.pinv": _pinv, "linalg.solve": _solve,
    "linalg.solve_tridiagonal": _solve_tridiagonal,
    "linalg.svdvals": _svdvals, "linalg.tensordot": composition(_tensordot),
    "linalg.trace": composition(_trace), "linalg.vecdot": composition(_vecdot),
    "linalg.vector_norm": composition(_norm), "tensor.einsum": _einsum,
    **{f"fft.{back}fft{kind}": _complex_transforms for back in ("", "i") for kind in ("", "2", "n")},
    **{f"fft.{back}rfft{kind}": _real_transforms for back in ("", "i") for kind in ("", "2", "n")},
    "fft.hfft": composition(_hfft), "fft.ihfft": composition(_ihfft),
    **{f"fft.{name}": _cosines for name in ("dct", "dctn", "idct", "idctn", "dst", "dstn", "idst", "idstn")},
    "fft.fftshift": _shifted, "fft.ifftshift": _shifted,
    **{f"fft.{name}": _convolved for name in ("convolve", "correlate", "fftconvolve", "oaconvolve")},
})  # fmt: skip
