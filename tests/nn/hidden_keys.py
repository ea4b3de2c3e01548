"""Ways to hide keys with infinity and NaN, and the attention over only the pairs that see each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dnn_references import NUMPYS, Array, check, numbers

import trio_accel as ta
from trio_accel import nn

attention: Any = nn.scaled_dot_product_attention
attention_grad: Any = nn.scaled_dot_product_attention_grad

_KEYS = np.arange(6)
_QUERIES = _KEYS[:, None]
_NEAR = abs(_QUERIES - _KEYS) < 2
# Ways to hide keys of 6 from queries of 6: whether each query sees each key, and the options for it.
_HIDING: dict[str, tuple[Array, dict[str, Any]]] = {
    "truth": (np.tile(_KEYS != 3, (6, 1)), {"attn_mask": _KEYS != 3}),
    "truth of pairs": (_QUERIES + _KEYS != 5, {"attn_mask": _QUERIES + _KEYS != 5}),
    "added": (_QUERIES - _KEYS > -2, {"attn_mask": np.where(_QUERIES - _KEYS > -2, 0.5, -np.inf)}),
    "causal": (_QUERIES >= _KEYS, {"is_causal": True}),
    "window": (_NEAR, {"window_size": (1, 1)}),
    "before": (_QUERIES - _KEYS < 2, {"window_size": (1, -1)}),
    "lower right": (_QUERIES >= _KEYS, {"is_causal": True, "causal_alignment": "lower_right"}),
    "lengths": (
        (_KEYS < 4) & (_QUERIES < 5),
        {"key_lengths": np.array([4, 4]), "query_lengths": np.array([5, 5])},
    ),
    "all": (
        _NEAR & (_KEYS != 2) & (_KEYS < 5),
        {"attn_mask": _KEYS != 2, "window_size": (1, 1), "key_lengths": np.array([5, 5])},
    ),
}


def _of_seen(
    seen: Array, query: Array, key: Array, value: Array, grad: Array
) -> tuple[Array, Array, Array, Array]:
    """The attention of one head over only the pairs that see each other, and its gradients, pair by pair."""
    scale = 1 / math.sqrt(query.shape[1])
    out, grads = np.zeros(grad.shape), [np.zeros(one.shape) for one in (query, key, value)]
    for row, sees in enumerate(seen):
        columns = np.flatnonzero(sees)
        if not columns.size:
            continue
        scores = key[columns] @ query[row] * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[row] = weights @ value[columns]
        for column, weight in zip(columns, weights, strict=True):
            slope = weight * (grad[row] @ value[column] - grad[row] @ out[row]) * scale
            grads[0][row] += slope * key[column]
            grads[1][column] += slope * query[row]
            grads[2][column] += weight * grad[row]
    return out, grads[0], grads[1], grads[2]


async def check_hidden_keys(device: ta.Device, dtype: str) -> None:
    """Hide infinity and NaN in each way; the results and gradients belong to the seen pairs."""
    for hiding, (seen, given_options) in _HIDING.items():
        options, mask = given_options | {"enable_gqa": True}, given_options.get("attn_mask")
        if mask is not None and mask.dtype != np.bool_:
            options["attn_mask"] = mask.astype(NUMPYS[dtype])
        widths = {"query": 16, "key": 16, "value": 24, "grad": 24}
        query, key, value, grad = (
            numbers((2, 4 if name in ("query", "grad") else 2, 6, width), dtype, seed)
            for seed, (name, width) in enumerate(widths.items())
        )
        # A key that few queries see, with its value; and a query that sees few keys, with its gradient.
        column, row = int(seen.sum(0).argmin()), int(seen.sum(1).argmin())
        key[0, :, column], value[0, 0, column], value[0, 1, column, 1] = np.nan, np.inf, -np.inf
        query[1, :, row, 1], grad[1, :, row] = np.nan, np.inf
        arrays = [await device.put(one) for one in (query, key, value)]
        made = await attention(*arrays, **options, return_lse=True)
        found = await attention_grad(grad, *arrays, *made, **options)
        got = [(await one.to_host()).astype(float) for one in (made.output, *found)]
        wide = [one.astype(float) for one in (query, key, value, grad)]
        for n, served in np.ndindex(2, 2):
            heads = [2 * served, 2 * served + 1]
            with np.errstate(invalid="ignore"):
                of_heads = [
                    _of_seen(seen, wide[0][n, head], wide[1][n, served], wide[2][n, served], wide[3][n, head])
                    for head in heads
                ]
                expected = [np.stack([one[each] for one in of_heads]) for each in range(4)]
                expected[2:] = [one.sum(0) for one in expected[2:]]
            parts = [got[0][n, heads], got[1][n, heads], got[2][n, served], got[3][n, served]]
            for part, right in zip(parts, expected, strict=True):
                check_finite(part, right, dtype, hiding)


async def check_hidden_blocks(device: ta.Device, dtype: str) -> None:
    """Hide the last key of each sequence from all queries but the last, and the keys after its length."""
    query, table, lengths = numbers((2, 4, 3, 16), dtype), np.array([[3, 1], [4, 0]]), (7, 5)
    keys, values = numbers((5, 2, 4, 16), dtype, 1), numbers((5, 2, 4, 24), dtype, 2)
    for n, length in enumerate(lengths):
        keys[table[n, 1], :, (length - 1) % 4 :] = np.nan
        values[table[n, 1], :, (length - 1) % 4 :] = np.inf
    made = await nn.paged_attention(await device.put(query), keys, values, table, np.array(lengths))
    got = (await made.to_host()).astype(float)
    for n, head in np.ndindex(2, 4):
        key, value = (
            one[table[n], head // 2].astype(float).reshape(8, -1)[: lengths[n]] for one in (keys, values)
        )
        seen = np.arange(lengths[n]) <= lengths[n] - 3 + np.arange(3)[:, None]
        with np.errstate(invalid="ignore"):
            right = _of_seen(seen, query[n, head].astype(float), key, value, np.zeros((3, 24)))[0]
        check_finite(got[n, head], right, dtype, "blocks")


def check_finite(found: Array, expected: Array, dtype: str, hiding: str) -> None:
    """Check which numbers are finite, and these."""
    known = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), known, hiding)
    check(found[known].astype(NUMPYS[dtype]), expected[known], dtype, terms=16)
