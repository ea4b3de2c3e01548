"""Gradients of updated copies, which `x.at[key]` makes by writes in place.

Each call here returns its first or second operand, the written copy. The gradient is for the other operands,
from which the copy was made.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ._backward import RULES, hosts_on_device, itself, pulled
from ._elementwise import Rule
from ._scatter import added_at, flat_positions, nothing, numbers_below

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays


def _replaced(call: Any, g: Any) -> Iterator[Rule]:
    written, copied, x, values, index = call.args
    yield written, nothing
    yield copied, nothing
    yield x, lambda: g.at[index].set(0)
    yield values, lambda: g[index]


def _added(call: Any, g: Any) -> Iterator[Rule]:
    written, x, values, indices = call.args
    yield written, nothing
    yield x, partial(itself, g)
    yield values, partial(arrays.gather_nd, g, tuple(indices))


def _multiplied(call: Any, g: Any) -> Iterator[Rule]:
    written, x, values, indices = call.args
    # A kept plan would repeat what the product computes from indices on the host.
    indices = hosts_on_device(call, indices)
    operands = hosts_on_device(call, [x, _array_of(values, x)])
    slopes = cache(lambda: pulled(partial(_product, indices), operands, g))
    yield written, nothing
    yield x, lambda: slopes()[0]
    yield values, lambda: slopes()[1]


def _product(indices: Sequence[Any], x: Any, values: Any) -> Any:
    """Multiply elements by all of their values, in a composition without divisions, because a value may be 0.

    The values are sorted by element. A recurrence multiplies the values so far, and begins again with each
    element, so that its last result for an element is the product.
    """
    count, common = len(indices), np.broadcast_shapes(*[tuple(index.shape) for index in indices])
    rest, size = x.shape[count:], math.prod(common)
    line = (-1, *(1,) * len(rest))
    wide = arrays.broadcast_to(values, (*common, *rest))
    positions = flat_positions(indices, x.shape[:count], wide[(..., *(0,) * len(rest))])
    order = arrays.argsort(positions, stable=True)
    ordered = arrays.take(positions, order)
    rows = arrays.take(arrays.reshape(wide, (size, *rest)), order, axis=0)
    is_first = arrays.reshape(ordered != arrays.concat([ordered[:1] - 1, ordered[:-1]]), line)
    factors, starts = arrays.where(is_first, 0, rows), arrays.where(is_first, rows, 0)
    products = arrays.linear_recurrence(factors, starts, axis=0)
    numbers = numbers_below(math.prod(x.shape[:count]), ordered)
    ends = arrays.maximum(arrays.searchsorted(ordered, numbers, side="right") - 1, 0)
    is_there = arrays.reshape(arrays.take(ordered, ends) == numbers, line)
    return x * arrays.reshape(arrays.where(is_there, arrays.take(products, ends, axis=0), 1), x.shape)


def _extreme(call: Any, g: Any) -> Iterator[Rule]:
    """Equal elements and values share the gradient."""
    written, x, values, indices = call.args
    # Sums by sorted indices compute with them, so the same holds here.
    *indices, values_there = hosts_on_device(call, [*indices, _array_of(values, x)])
    take = partial(arrays.gather_nd, indices=tuple(indices))
    is_own = cache(lambda: (x == call) | arrays.isnan(x))
    is_value = cache(lambda: (values_there == take(call)) | arrays.isnan(values_there))

    @cache
    def share() -> Any:
        hits = arrays.where(is_own(), 1.0, 0.0)
        ties = hits + added_at(hits, indices, arrays.where(is_value(), 1.0, 0.0))
        return g / ties

    yield written, nothing
    yield x, lambda: arrays.where(is_own(), share(), 0)
    yield values, lambda: arrays.where(is_value(), take(share()), 0)


def _array_of(values: Any, x: Any) -> Any:
    """Return values as an array, because they may be a number."""
    is_number = isinstance(values, (int, float, complex))
    return arrays.full_like(x[(0,) * len(x.shape)], values) if is_number else values


RULES.update(
    {
        "AccelRef.at.add": _added,
        "AccelRef.at.max": _extreme,
        "AccelRef.at.min": _extreme,
        "AccelRef.at.multiply": _multiplied,
        "AccelRef.at.set": _replaced,
    }
)
