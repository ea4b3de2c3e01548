"""Counterparts of PyTorch's functions of elements, axes and shapes."""

# ruff: noqa: A002  # the names and the order of PyTorch's arguments

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from opinfo_base import Function, a, axes, first, host, index_along, m, need, with_axis

# Arithmetic.


def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return a.add(x, y if alpha == 1 else y * alpha)


def subtract(x: Any, y: Any, alpha: Any = 1) -> Any:
    return a.subtract(x, y if alpha == 1 else y * alpha)


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc":
        return a.trunc(a.divide(x, y))
    return a.floor_divide(x, y) if rounding_mode else a.divide(x, y)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    for bound in (min, max):
        need(not isinstance(bound, np.ndarray) or bound.dtype.kind == "f", "a bound of another dtype")
    return a.clip(x, min, max)


def logit(x: Any, eps: float | None = None) -> Any:
    need(eps is None or eps <= 0.5, "bounds in descending order")
    return a.logit(x if eps is None else a.clip(x, eps, 1 - eps))


def rounded(x: Any, decimals: int = 0) -> Any:
    factor = 10.0 ** abs(decimals)
    return a.round(x * factor) / factor if decimals > 0 else a.round(x / factor) * factor


def mvlgamma(x: Any, p: int) -> Any:
    total: Any = p * (p - 1) / 4 * math.log(math.pi)
    for j in range(p):
        total = total + a.gammaln(x - j / 2)
    return total


def scaled(beta: Any, x: Any) -> Any:
    """PyTorch ignores NaN where the factor is 0."""
    return beta * x if beta else a.zeros_like(x)


def mixed_product(x: Any, p: Any, q: Any, beta: Any, alpha: Any) -> Any:
    made = m.matmul(p, q) if alpha == 1 else alpha * m.matmul(p, q)
    return scaled(beta, x) + made


def addmm(x: Any, p: Any, q: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return mixed_product(x, p, q, beta, alpha)


def addbmm(x: Any, p: Any, q: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return scaled(beta, x) + alpha * a.sum(m.matmul(p, q), axis=0)


def addr(x: Any, p: Any, q: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return scaled(beta, x) + alpha * m.outer(p, q)


def inner(x: Any, y: Any) -> Any:
    return x * y if not x.ndim or not y.ndim else m.tensordot(x, y, axes=((-1,), (-1,)))


def cross(x: Any, y: Any, dim: int | None = None) -> Any:
    shape = np.broadcast_shapes(x.shape, y.shape)
    return m.cross(x, y, axis=shape.index(3) if dim is None else dim)


def tensordot(x: Any, y: Any, dims: Any = 2) -> Any:
    if isinstance(dims, int):
        return m.tensordot(x, y, axes=dims)
    p, q = map(tuple, dims)
    need([x.shape[k] for k in p] == [y.shape[k] for k in q], "an axis of one element that is repeated")
    return m.tensordot(x, y, axes=(p, q))


def einsum(operands: Any, text: str) -> Any:
    need(
        "..." not in text or "->" not in text or "..." in text.partition("->")[2], "sums over the axes of ..."
    )
    return m.einsum(text, *operands)


def block_diag(*blocks: Any) -> Any:
    blocks = tuple(x.reshape((1,) * (2 - x.ndim) + x.shape) for x in blocks)
    width, left, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(a.pad(x, ((0, 0), (left, width - left - x.shape[1]))))
        left += x.shape[1]
    return a.concat(rows, axis=0)


def cartesian_prod(*xs: Any) -> Any:
    if len(xs) == 1:
        return first(xs[0])
    return a.stack([a.reshape(x, (-1,)) for x in a.meshgrid(*xs, indexing="ij")], axis=-1)


def combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    choose: Any = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    index = np.array(list(choose(range(x.shape[0]), r)), "int64").reshape(-1, r)
    return a.take(x, index)


# Reductions.


def spread(function: Function) -> Function:
    """Make PyTorch's `var` or `std`. Their second argument is `dim` or `unbiased`."""

    def run(
        x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        return function(x, axis=axes(x, dim), keepdims=keepdim, correction=correction)

    return run


def spread_and_mean(function: Function) -> Function:
    def run(x: Any, dim: Any = None, *args: Any, **named: Any) -> Any:
        over = None if isinstance(dim, bool) else dim
        mean = a.mean(x, axis=axes(x, over), keepdims=named.get("keepdim", False))
        return spread(function)(x, dim, *args, **named), mean

    return run


def extreme(function: Function, place: Function) -> Function:
    """Make `max` or `min`, which return indices if there is a `dim`."""

    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        made = function(x, axis=axes(x, dim), keepdims=keepdim)
        return made if dim is None else (made, place(x, axis=axes(x, dim), keepdims=keepdim))

    return run


def cumulative(function: Function) -> Function:
    return lambda x, dim: (with_axis(x, lambda x: function(x, axis=dim)), None)


def median(function: Function) -> Function:
    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        made = function(x, 0.5, axis=axes(x, dim), keepdims=keepdim, method="lower")
        return made if dim is None else (made, None)

    return run


def quantile(function: Function) -> Function:
    def run(x: Any, q: Any, dim: Any = None, keepdim: bool = False, interpolation: str = "linear") -> Any:
        shares = host(q) if isinstance(q, float) else np.asarray(host(q)).tolist()
        keep = keepdim and x.ndim > 0
        return function(x, shares, axis=axes(x, dim), keepdims=keep, method=interpolation)

    return run


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return first(x), None
    made = a.sort(x, axis=dim)[index_along(x, dim, slice(k - 1, k) if keepdim else k - 1)]
    return made, None


def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    return with_axis(x, lambda x: a.sort(x, axis=dim, descending=descending)), None


def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    need(stable, "an order of equal elements that is not defined")
    return with_axis(x, lambda x: a.argsort(x, axis=dim, descending=descending))


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        need(k, "no element of an array without axes")
        return first(x), None
    return a.top_k(x, k, axis=dim, largest=largest)[0], None


def aminmax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    kept = axes(x, dim)
    return a.min(x, axis=kept, keepdims=keepdim), a.max(x, axis=kept, keepdims=keepdim)


def covariance(x: Any, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    need(fweights is None and aweights is None, "weights of observations")
    need(x.ndim == 1 or x.shape[0] > 1, "a result without axes of one variable")
    return a.cov(x, correction=correction)


def correlations(x: Any) -> Any:
    need(x.ndim > 1 and x.shape[0] > 1, "a result without axes of one variable")
    return a.corrcoef(x)


def trapezoid(y: Any, x: Any = None, dim: int = -1, dx: float = 1.0) -> Any:
    x = a.broadcast_to(x, y.shape) if x is not None and x.ndim > 1 else x
    return a.trapezoid(y, x, dx=dx, axis=dim)


def cumulative_trapezoid(y: Any, x: Any = None, dim: int = -1, dx: float = 1.0) -> Any:
    left, right = index_along(y, dim, slice(None, -1)), index_along(y, dim, slice(1, None))
    if x is not None:
        x = x if x.ndim > 1 or y.ndim == 1 else x.reshape((-1,) + (1,) * (-1 - dim))
        dx = a.diff(x, axis=dim)
    return a.cumulative_sum((y[left] + y[right]) * dx / 2, axis=dim)


def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    return a.diff(x, n=n, axis=dim, prepend=prepend, append=append)


def gradient(x: Any, dim: Any = None, spacing: Any = None, edge_order: int = 1) -> Any:
    need(edge_order == 1, "edge_order=2")
    spaces = [1.0] if spacing is None else spacing
    need(not isinstance(spaces, (list, tuple)) or all(np.ndim(s) == 0 for s in spaces), "coordinates")
    over = range(x.ndim) if dim is None else dim if isinstance(dim, Sequence) else [dim]
    spaces = spaces if isinstance(spaces, (list, tuple)) else [spaces] * len(over)
    spaces = list(spaces) * (len(over) if len(spaces) == 1 else 1)
    return tuple(a.gradient(x, space, axis=k) for k, space in zip(over, spaces, strict=True))


def renorm(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    over = tuple(k for k in range(x.ndim) if k != dim % x.ndim)
    norm = m.vector_norm(x, axis=over, ord=p, keepdims=True)
    return x * a.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


# Shapes.


def expand(x: Any, *shape: Any) -> Any:
    shape = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
    sizes = (1,) * (len(shape) - x.ndim) + x.shape
    return a.broadcast_to(x, tuple(s if k == -1 else k for k, s in zip(shape, sizes, strict=True)))


def parts(x: Any, lengths: Sequence[int], dim: int) -> Any:
    return tuple(a.split(x, np.cumsum(lengths)[:-1].tolist(), axis=dim))


def split(x: Any, size: Any, dim: int = 0) -> Any:
    length = x.shape[dim]
    if isinstance(size, int):
        size = [min(size, length - k) for k in range(0, length, size)]
    return parts(x, size, dim)


def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    return split(x, -(-x.shape[dim] // chunks), dim)


def tensor_split(x: Any, where: Any, dim: int = 0) -> Any:
    where = np.asarray(host(where)).tolist()
    if isinstance(where, int):
        where = [len(one) for one in np.array_split(np.zeros(x.shape[dim]), where)]
        return parts(x, where, dim)
    return tuple(x[index_along(x, dim, slice(*ends))] for ends in itertools.pairwise([0, *where, None]))


def sum_to_size(x: Any, *shape: Any) -> Any:
    shape = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
    lead = x.ndim - len(shape)
    over = [*range(lead), *[k + lead for k, s in enumerate(shape) if s == 1]]
    return a.sum(x, axis=tuple(over)).reshape(shape) if over else first(x)


def at_least(count: int) -> Function:
    def one(x: Any) -> Any:
        if x.ndim >= count:
            return first(x)
        if count == 3 and x.ndim == 2:
            return x.reshape((*x.shape, 1))
        return x.reshape((1,) * (count - 1 - (count == 3)) + (-1,) + (1,) * (count == 3))

    return lambda *xs: (
        one(xs[0])
        if len(xs) == 1 and not isinstance(xs[0], list | tuple)
        else tuple(map(one, xs if len(xs) > 1 else xs[0]))
    )


def stacked(axis: int, count: int) -> Function:
    return lambda xs: a.concat([at_least(count)(x) for x in xs], axis=axis)


def hstack(xs: Any) -> Any:
    xs = [at_least(1)(x) for x in xs]
    return a.concat(xs, axis=0 if xs[0].ndim == 1 else 1)


def column_stack(xs: Any) -> Any:
    return a.concat([x if x.ndim > 1 else x.reshape((-1, 1)) for x in xs], axis=1)


def concat(xs: Any, dim: int = 0) -> Any:
    kept = [x for x in xs if x.shape != (0,)] or xs
    return a.concat(kept, axis=dim)


def axis_pair(x: Any, offset: int, dims: tuple[int, int]) -> Any:
    return a.diagonal(a.moveaxis(x, dims, (-2, -1)), offset=offset)


def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return axis_pair(x, offset, (dim1, dim2))


def diagonal_of_matrices(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return m.diagonal(a.moveaxis(x, (dim1, dim2), (-2, -1)), offset=offset)


def diagonal_places(rows: int, columns: int, offset: int) -> tuple[Any, Any]:
    i, j = np.nonzero(np.eye(rows, columns, k=offset))
    return i, j


def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return a.moveaxis(a.diag(x, k=offset), (-2, -1), (dim1, dim2))


def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    moved = a.moveaxis(x, (dim1, dim2), (-2, -1))
    i, j = diagonal_places(*moved.shape[-2:], offset)
    return a.moveaxis(moved.at[..., i, j].set(source), (-2, -1), (dim1, dim2))


def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not x.ndim:
        return x.reshape((1,))
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return a.reshape(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def unflatten(x: Any, dim: int, sizes: Any) -> Any:
    dim %= x.ndim
    return a.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def reshape(x: Any, *shape: Any) -> Any:
    return a.reshape(x, tuple(shape[0]) if isinstance(shape[0], Sequence) else shape)


def squeeze(x: Any, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else dim if isinstance(dim, Sequence) else (dim,)
    over = tuple(sorted({k % x.ndim for k in dims if x.ndim and x.shape[k] == 1}))
    return a.squeeze(x, over) if over else first(x)


def slices(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[index_along(x, dim, slice(start, end, step))]


def slice_scatter(x: Any, y: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x.at[index_along(x, dim, slice(start, end, step))].set(y)


def narrow(x: Any, dim: int, start: Any, length: int) -> Any:
    start = int(host(start)) % max(x.shape[dim], 1)
    return x[index_along(x, dim, slice(start, start + length))]


def repeat(x: Any, *sizes: Any) -> Any:
    return a.tile(x, tuple(sizes[0]) if sizes and isinstance(sizes[0], Sequence) else sizes)


def repeat_interleave(x: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Any:
    repeats = np.asarray(host(repeats))
    counts = int(repeats) if not repeats.ndim else repeats
    if dim is None:
        x = x.reshape((-1,))
        dim = 0
    return a.repeat(x, counts, axis=dim)


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return x.reshape((1,))[: size or 0]
    need(size, "windows without elements")
    made = a.sliding_window_view(x, size, axis=dim)
    dim %= x.ndim
    return made[index_along(x, dim, slice(None, None, step))]


def meshgrid(*xs: Any, indexing: str = "ij") -> Any:
    xs = tuple(xs[0]) if isinstance(xs[0], list | tuple) else xs
    return tuple(a.meshgrid(*[at_least(1)(x) for x in xs], indexing=indexing))


def roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    if not x.ndim:
        return first(x)
    return a.roll(x, shifts, axis=None if dims in (None, ()) else dims)


def rot90(x: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    return a.rot90(x, k, tuple(dims))


def transposed(x: Any) -> Any:
    return first(x) if x.ndim < 2 else x.T
