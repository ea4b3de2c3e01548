"""Counterparts of PyTorch's functions of indices and masks, and of its constructors."""

# ruff: noqa: A002  # the names and the order of PyTorch's arguments

from __future__ import annotations

from typing import Any

import numpy as np
from opinfo_base import DEVICE, Function, a, axes, host, index_along, m, need
from opinfo_networks import normalize

# Indices.


def grid_of(index: Any, dim: int) -> tuple[Any, ...]:
    """Return the indices of all axes for PyTorch's index along one axis."""
    grid = list(np.indices(index.shape))
    grid[dim] = index
    return tuple(grid)


def with_axes(x: Any, index: Any, function: Function) -> Any:
    """Call a function of an array and an index, both with an axis at least."""
    index = np.asarray(host(index)).astype("int64")
    if x.ndim:
        return function(x, index)
    return function(x.reshape((1,)), index.reshape(-1)).reshape(())


def gather(x: Any, dim: int, index: Any) -> Any:
    index = np.asarray(host(index)).astype("int64")
    if not x.ndim:
        made = a.take(x.reshape((1,)), index.reshape(-1))
        return made.reshape(index.shape)
    if not index.ndim:
        return a.take(x, index.reshape(1), axis=0).reshape(())
    need(index.ndim == x.ndim, "no indices, with other axes")
    part = tuple(slice(None if k == dim % x.ndim else size) for k, size in enumerate(index.shape))
    return a.take_along_axis(x[part], index, axis=dim)


METHODS = {
    "sum": "add",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
    "add": "add",
    "multiply": "multiply",
}
IDENTITIES = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -np.inf, "amin": np.inf}


def source_for(index: Any, source: Any) -> Any:
    if not hasattr(source, "ndim"):
        return source
    if not source.ndim and index.ndim:
        return source.reshape((1,) * index.ndim)
    return source[tuple(slice(size) for size in index.shape)]


def combined(x: Any, grid: Any, source: Any, reduce: str, include_self: bool) -> Any:
    """Combine values at indices with the elements there, or only with each other."""
    if not include_self:
        x = x.at[grid].set(IDENTITIES[reduce])
    if reduce != "mean":
        return getattr(x.at[grid], METHODS[reduce])(source)
    counts = np.full(x.shape, float(include_self))
    np.add.at(counts, grid, 1.0)
    return x.at[grid].add(source) / np.maximum(counts, 1.0)


def scatter(x: Any, dim: int, index: Any, source: Any, reduce: str | None = None) -> Any:
    def run(x: Any, index: Any) -> Any:
        grid = grid_of(index, dim)
        part = x.at[grid]
        kept = source_for(index, source)
        return getattr(part, METHODS[reduce])(kept) if reduce else part.set(kept)

    return with_axes(x, index, run)


def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return scatter(x, dim, index, source, "add")


def scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    return with_axes(
        x,
        index,
        lambda x, index: combined(x, grid_of(index, dim), source_for(index, source), reduce, include_self),
    )


def row_key(x: Any, dim: int, index: Any) -> Any:
    return index_along(x, dim, index)


def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    return with_axes(
        x,
        index,
        lambda x, index: x.at[row_key(x, dim, index)].add(
            alpha * source if source.ndim else alpha * source.reshape((1,))
        ),
    )


def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return with_axes(
        x,
        index,
        lambda x, index: x.at[row_key(x, dim, index)].set(source if source.ndim else source.reshape((1,))),
    )


def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    return with_axes(x, index, lambda x, index: x.at[row_key(x, dim, index)].set(value))


def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    def run(x: Any, index: Any) -> Any:
        if not source.ndim:
            return combined(x, grid_of(index, 0), source.reshape((1,)), reduce, include_self)
        moved = np.moveaxis(
            np.broadcast_to(index, (*np.delete(source.shape, dim % x.ndim), index.size)), -1, dim
        )
        return combined(x, grid_of(moved, dim % x.ndim), source, reduce, include_self)

    return with_axes(x, index, run)


def index_select(x: Any, dim: int, index: Any) -> Any:
    if not x.ndim:
        return a.take(x.reshape((1,)), index).reshape(())
    return a.take(x, index, axis=dim)


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    need(
        not any(np.asarray(k).dtype == bool for k in indices),
        "values for the true elements of a mask, in order",
    )
    part = x.at[tuple(indices)]
    return part.add(values) if accumulate else part.set(values)


def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    part = x.reshape((-1,)).at[index.reshape(-1)]
    source = source.reshape((-1,))
    return (part.add(source) if accumulate else part.set(source)).reshape(x.shape)


def take(x: Any, index: Any) -> Any:
    return a.take(x.reshape((-1,)), index)


def take_along(x: Any, index: Any, dim: int | None = None) -> Any:
    if dim is None:
        return a.take_along_axis(x.reshape((-1,)), index.reshape(-1), axis=0)
    shape = np.broadcast_shapes(*[np.delete(one.shape, dim).tolist() for one in (x, index)])
    sizes = [tuple(np.insert(shape, dim % x.ndim, one.shape[dim])) for one in (x, index)]
    return a.take_along_axis(a.broadcast_to(x, sizes[0]), np.broadcast_to(index, sizes[1]), axis=dim)


def getitem(x: Any, key: Any) -> Any:
    key = np.asarray(key) if isinstance(key, list) else key
    key = tuple(np.asarray(k) if isinstance(k, list) else k for k in key) if isinstance(key, tuple) else key
    arrays = [k for k in (key if isinstance(key, tuple) else (key,)) if isinstance(k, np.ndarray)]
    return x.at[key].get() if arrays else x[key]


def select_scatter(x: Any, y: Any, dim: int, index: int) -> Any:
    return x.at[index_along(x, dim, index)].set(y)


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return a.where(mask, value, x)


def masked_select(x: Any, mask: Any) -> Any:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    return a.compress(np.broadcast_to(mask, shape), a.broadcast_to(x, shape))


def put_masked_index(x: Any, mask: Any, indices: Any, fill: Any) -> Any:
    index = tuple(np.clip(k, 0, size - 1) for k, size in zip(indices, x.shape, strict=False))
    return a.where(mask, x.at[index].get(), fill)


# Masked reductions: masked elements count as the identity.


def masked(function: Function, identity: float) -> Function:
    def run(x: Any, dim: Any = None, *args: Any, mask: Any = None, **named: Any) -> Any:
        named.pop("dtype", None)
        x = x if mask is None else a.where(mask, x, identity)
        return function(x, dim, *args, **named)

    return run


def masked_ratio(function: Function) -> Function:
    """Make a function of the mean and the number of the elements that count."""

    def run(
        x: Any,
        dim: Any = None,
        unbiased: Any = None,
        *,
        correction: Any = None,
        keepdim: bool = False,
        mask: Any = None,
    ) -> Any:
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        over = axes(x, dim)
        keep = np.ones(x.shape) if mask is None else np.broadcast_to(mask, x.shape).astype(float)
        counts = keep.sum(over, keepdims=True)
        made = function(x, keep, counts, over, correction)
        return made if keepdim else made.reshape(np.zeros(x.shape).sum(over).shape)

    return run


def _mean(x: Any, keep: Any, counts: Any, over: Any, _correction: float = 0) -> Any:
    return a.sum(a.where(keep > 0, x, 0.0), axis=over, keepdims=True) / counts


def _variance(x: Any, keep: Any, counts: Any, over: Any, correction: float) -> Any:
    away = a.where(keep > 0, x - _mean(x, keep, counts, over), 0.0)
    count = np.maximum(counts - correction, 0)
    # PyTorch's variance of complex numbers has a complex dtype.
    squares = away * a.conj(away) if "complex" in str(x.dtype) else away * away
    return a.sum(squares, axis=over, keepdims=True) / count


def masked_norm(x: Any, ord: Any, dim: Any = None, keepdim: bool = False, mask: Any = None) -> Any:
    x = x if mask is None else a.where(mask, x, -np.inf if ord == -np.inf else np.inf if ord < 0 else 0.0)
    return m.vector_norm(x, axis=axes(x, dim), keepdims=keepdim and x.ndim > 0, ord=ord)


def masked_normalize(x: Any, ord: Any, dim: int, eps: float = 1e-12, mask: Any = None) -> Any:
    x = x if mask is None else a.where(mask, x, 0.0)
    return normalize(x, ord, dim, eps)


def masked_logaddexp(x: Any, y: Any, input_mask: Any = None, other_mask: Any = None) -> Any:
    x = x if input_mask is None else a.where(input_mask, x, -np.inf)
    return a.logaddexp(x, y if other_mask is None else a.where(other_mask, y, -np.inf))


# Constructors.


def named(dtype: Any) -> str:
    """Return the name of PyTorch's dtype."""
    return "float64" if dtype is None else str(dtype).removeprefix("torch.")


def filled(x: Any, value: Any) -> Any:
    return a.full_like(x, value)


def like(name: str) -> Function:
    return lambda x, *args, dtype=None, **_: getattr(a, name)(
        x, *args, dtype=None if dtype is None else named(dtype)
    )


def full_of(x: Any, shape: Any, value: Any, dtype: Any = None) -> Any:
    return a.full(DEVICE.get(), tuple(shape), value, dtype=str(x.dtype) if dtype is None else named(dtype))


def created(name: str) -> Function:
    return lambda *args, dtype=None, **_: getattr(a, name)(DEVICE.get(), *args, dtype=named(dtype))


def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **_: Any) -> Any:
    if end is None:
        start, end = 0, start
    return a.arange(DEVICE.get(), start, end, step, dtype="int64" if dtype is None else named(dtype))


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, dtype: Any = None, **_: Any) -> Any:
    return a.logspace(DEVICE.get(), start, end, steps, base=base, dtype=named(dtype))


def eye(rows: int, columns: int | None = None, dtype: Any = None, **_: Any) -> Any:
    return a.eye(DEVICE.get(), rows, columns, dtype=named(dtype))


def unravel_index(x: Any, shape: Any) -> Any:
    need(shape, "a shape without axes")
    return a.unravel_index(x, tuple(shape))


def searchsorted(
    x: Any, y: Any, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    need(x.ndim == 1, "a stack of sequences")
    return a.searchsorted(x, y, side=side or ("right" if right else "left"), sorter=sorter)


def bucketize(x: Any, bounds: Any, out_int32: bool = False, right: bool = False) -> Any:
    return a.searchsorted(bounds, x, side="right" if right else "left")


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    return a.bincount(x, weights, minlength=minlength)


def nonzero(x: Any, as_tuple: bool = False) -> Any:
    need(x.ndim, "places in an array without axes")
    return a.nonzero(x) if as_tuple else a.argwhere(x)


def unique(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Any:
    need(
        sorted and not return_inverse and not return_counts and dim is None,
        "counts and places of other order",
    )
    return a.unique_values(x)


def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    return a.histogram(x, bins, range=None if min == max == 0 else (min, max))[0].cast("float64")


def everywhere(function: Function) -> Function:
    return lambda x, dim=None, keepdim=False: function(x, axis=axes(x, dim), keepdims=keepdim)
