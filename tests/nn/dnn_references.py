"""Convolutions, pooling and attention in float64, by loops over elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
NUMPYS: dict[str, Any] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in TOLERANCE}


def numbers(shape: Sequence[int], dtype: str = "float64", seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=tuple(shape)).astype(NUMPYS[dtype])


def check(found: Array, expected: Array, dtype: str = "float64", terms: int = 1) -> None:
    """Compare relative to the largest element, times the square root of the summands' number."""
    assert found.shape == expected.shape
    assert found.dtype == NUMPYS[dtype]
    scale = max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0)), 1e-300)
    tolerance = TOLERANCE[dtype] * math.sqrt(max(terms, 1)) * scale
    np.testing.assert_allclose(found.astype(float), expected, rtol=0, atol=tolerance)


def tap(starts: Sequence[int], places: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    return tuple(s + d * k for s, d, k in zip(starts, dilation, places, strict=True))


def is_inside(place: Sequence[int], shape: Sequence[int]) -> bool:
    return all(0 <= one < extent for one, extent in zip(place, shape, strict=True))


def convolved(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
) -> Array:
    """For each element of the result a sum over the window, element by element."""
    x, weight = x.astype(float), weight.astype(float)
    count = [
        (extent + sum(pair) - d * (k - 1) - 1) // s + 1
        for extent, pair, d, k, s in zip(
            x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    out = np.zeros((len(x), len(weight), *count))
    inputs, outputs = x.shape[1] // groups, len(weight) // groups
    for n, o, *window in np.ndindex(*out.shape):
        first = o // outputs * inputs
        starts = [i * s - pair[0] for i, s, pair in zip(window, stride, padding, strict=True)]
        for c, *places in np.ndindex(*weight.shape[1:]):
            place = tap(starts, places, dilation)
            if is_inside(place, x.shape[2:]):
                out[(n, o, *window)] += x[(n, first + c, *place)] * weight[(o, c, *places)]
    return out if bias is None else out + bias.astype(float).reshape(-1, *(1,) * len(count))


def spread(
    x: Array,
    weight: Array,
    spatial: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Array:
    """Each element of an array times the weights, added to its window in the result, element by element."""
    out = np.zeros((len(x), weight.shape[1] * groups, *spatial))
    inputs, outputs = x.shape[1] // groups, weight.shape[1]
    for n, c, *window in np.ndindex(*x.shape):
        starts = [i * s - before for i, s, before in zip(window, stride, padding, strict=True)]
        for o, *places in np.ndindex(*weight.shape[1:]):
            place = tap(starts, places, dilation)
            if is_inside(place, spatial):
                channel = c // inputs * outputs + o
                out[(n, channel, *place)] += x[(n, c, *window)] * weight[(c, o, *places)]
    return out


def slope(function: Callable[[Array], Array], x: Array, grad: Array, step: float) -> Array:
    """The gradient of ``sum(function(x) * grad)`` by central differences."""
    found = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[place] = step
        found[place] = ((function(x + moved) - function(x - moved)) * grad).sum() / (2 * step)
    return found


def pool_windows(
    shape: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    *,
    is_ceil: bool,
) -> list[list[list[int]]]:
    """Along each axis the places of each window, also outside of the array and its padding."""
    made: list[list[list[int]]] = []
    for extent, k, s, (before, behind), d in zip(shape, window, stride, padding, dilation, strict=True):
        starts: list[int] = []
        start = -before
        # As long as a window fits; rounded up, as long as it begins in the array or before it.
        while start + d * (k - 1) < extent + behind or (
            is_ceil and start < extent and (start - s) + d * (k - 1) + 1 < extent + behind
        ):
            starts.append(start)
            start += s
        made.append([[one + d * number for number in range(k)] for one in starts])
    return made


def shares(shape: Sequence[int], counts: Sequence[int]) -> list[list[list[int]]]:
    """Along each axis the places of each window in an adaptive pooling."""
    return [
        [
            list(range(math.floor(i * extent / count), math.ceil((i + 1) * extent / count)))
            for i in range(count)
        ]
        for extent, count in zip(shape, counts, strict=True)
    ]


def pooled(
    x: Array, windows: list[list[list[int]]], combine: Callable[[Array, list[tuple[int, ...]]], Any]
) -> Array:
    """Combine the existing elements of each window, with all its places."""
    out = np.zeros((*x.shape[:2], *[len(one) for one in windows]))
    for n, c, *index in np.ndindex(*out.shape):
        lists = [one[i] for one, i in zip(windows, index, strict=True)]
        places = list(itertools.product(*lists))
        there = [place for place in places if is_inside(place, x.shape[2:])]
        out[(n, c, *index)] = combine(np.array([x[(n, c, *place)] for place in there]), there)
    return out


def attended(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    is_lower_right: bool = False,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
) -> tuple[Array, Array]:
    """The formula, for one row after the other; the result, and logarithms of sums. Of shape (n, h, ...)."""
    query, key, value = query.astype(float), key.astype(float), value.astype(float)
    n, heads, rows, e = query.shape
    shared = heads // key.shape[1]
    out, lse = np.zeros((n, heads, rows, value.shape[-1])), np.full((n, heads, rows), -np.inf)
    for b, h in np.ndindex(n, heads):
        count = rows if query_lengths is None else int(query_lengths[b])
        columns = key.shape[2] if key_lengths is None else int(key_lengths[b])
        for row in range(count):
            own = row + (columns - count if is_lower_right else 0)
            seen = [
                j for j in range(columns) if (left < 0 or j >= own - left) and (right < 0 or j <= own + right)
            ]
            scores = np.array([query[b, h, row] @ key[b, h // shared, j] for j in seen])
            scores = scores * (e**-0.5 if scale is None else scale)
            if mask is not None and seen:
                here = np.broadcast_to(mask, (n, heads, rows, key.shape[2]))[b, h, row, seen]
                scores = (
                    np.where(here, scores, -np.inf) if here.dtype == bool else scores + here.astype(float)
                )
            if not len(scores) or np.isneginf(scores).all():
                continue
            weights = np.exp(scores - scores.max())
            lse[b, h, row] = scores.max() + np.log(weights.sum())
            out[b, h, row] = weights / weights.sum() @ value[b, h // shared, seen]
    return out, lse


def results(
    query: Array,
    key: Array,
    value: Array,
    grad: Array,
    formula: dict[str, Any],
    *,
    is_bare: bool = False,
) -> tuple[Array, Array, list[Array]]:
    """The formula with all scores at once: the result, logarithms of sums, and the three gradients.

    Infinite and NaN elements count as zero; unless bare, where weights of zero are multiplied by them.
    """
    query, key, value, grad = (one.astype(float) for one in (query, key, value, grad))
    if not is_bare:
        query, key, value, grad = (np.nan_to_num(one) for one in (query, key, value, grad))
    (n, heads, rows, e), (_, served, columns, _) = query.shape, key.shape
    keys, values = (np.repeat(one, heads // served, 1) for one in (key, value))
    own, places = np.arange(rows)[:, None], np.arange(columns)
    lengths = [formula["query_lengths"], formula["key_lengths"]]
    lengths = [
        np.full(n, most) if one is None else one for one, most in zip(lengths, (rows, columns), strict=True)
    ]
    stops, ends = (np.asarray(one, int).reshape(-1, 1, 1, 1) for one in lengths)
    steps = places - own - (ends - stops if formula["is_lower_right"] else 0)
    is_seen = (own < stops) & (places < ends)
    if formula["left"] >= 0:
        is_seen = is_seen & (steps >= -formula["left"])
    if formula["right"] >= 0:
        is_seen = is_seen & (steps <= formula["right"])
    scale = e**-0.5 if formula["scale"] is None else formula["scale"]
    scores = query @ keys.swapaxes(-1, -2) * scale
    mask = formula["mask"]
    if mask is not None and mask.dtype == bool:
        is_seen = is_seen & mask
    elif mask is not None:
        scores = scores + mask.astype(float)
    scores = np.where(is_seen, scores, -np.inf)
    most = np.nan_to_num(scores.max(-1, keepdims=True), neginf=0)
    with np.errstate(divide="ignore"):
        logs = most + np.log(np.exp(scores - most).sum(-1, keepdims=True))
    weights = np.exp(scores - np.where(np.isneginf(logs), 0, logs))
    slopes = grad @ values.swapaxes(-1, -2)
    slopes = weights * (slopes - (slopes * weights).sum(-1, keepdims=True)) * scale

    def by_head(array: Array) -> Array:
        return array.reshape(n, served, heads // served, *array.shape[2:]).sum(2)

    gradients = [
        slopes @ keys,
        by_head(slopes.swapaxes(-1, -2) @ query),
        by_head(weights.swapaxes(-1, -2) @ grad),
    ]
    return weights @ values, logs[..., 0], gradients
