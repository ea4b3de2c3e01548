"""Attention in the types and sizes that vendors have kernels for, against the formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dnn_references import NUMPYS, attended, check, numbers, results

import trio_accel as ta
from trio_accel import nn

attention: Any = nn.scaled_dot_product_attention
attention_grad: Any = nn.scaled_dot_product_attention_grad

RNG = np.random.default_rng(7)
ROWS, COLUMNS = 33, 72
LENGTHS = {"query_lengths": np.array([33, 0, 17]), "key_lengths": np.array([72, 72, 0], np.int32)}
SOME = {"key_lengths": np.array([70, 1, 40])}
HIDDEN = RNG.random((1, 1, ROWS, COLUMNS)) < 0.7
HIDDEN[..., 3, :] = False
LOWER = {"causal_alignment": "lower_right"}

# Options, and rows and columns.
CASES: list[tuple[dict[str, Any], int, int]] = [
    ({}, ROWS, COLUMNS),
    ({}, 1, COLUMNS),
    ({}, 128, 64),
    ({"is_causal": True}, ROWS, COLUMNS),
    ({"is_causal": True}, 64, 64),
    ({"is_causal": True, **LOWER}, ROWS, COLUMNS),
    # The first queries see no key.
    ({"is_causal": True, **LOWER}, COLUMNS, ROWS),
    ({"window_size": (5, -1), "is_causal": True}, ROWS, COLUMNS),
    ({"window_size": (5, 3)}, ROWS, COLUMNS),
    # The last ones see none.
    ({"window_size": (5, -1)}, COLUMNS, ROWS),
    ({"window_size": (-1, 4), **LOWER}, ROWS, COLUMNS),
    (LENGTHS, ROWS, COLUMNS),
    (SOME, ROWS, COLUMNS),
    ({"query_lengths": np.array([3, 0, 33])}, ROWS, COLUMNS),
    ({"is_causal": True, **LENGTHS}, ROWS, COLUMNS),
    ({"is_causal": True, **LOWER, **SOME}, ROWS, COLUMNS),
    ({"is_causal": True, "window_size": (9, 0), **LOWER, **SOME}, ROWS, COLUMNS),
    ({"attn_mask": HIDDEN}, ROWS, COLUMNS),
    ({"attn_mask": HIDDEN[0, 0, :1, :71]}, ROWS, 71),
    ({"attn_mask": RNG.normal(size=(3, 1, 1, 71))}, ROWS, 71),
    ({"attn_mask": RNG.normal(size=(4, ROWS, 1)), "is_causal": True}, ROWS, COLUMNS),
    ({"attn_mask": np.where(HIDDEN, 0.5, -np.inf), **SOME}, ROWS, COLUMNS),
    ({"scale": -0.7}, ROWS, COLUMNS),
    # Exponentials of sums that float32 does not hold.
    ({"scale": 40.0}, ROWS, 64),
]


def formula_of(options: dict[str, Any]) -> dict[str, Any]:
    left, right = options.get("window_size", (-1, -1))
    return {
        "mask": options.get("attn_mask"),
        "scale": options.get("scale"),
        "left": left,
        "right": 0 if options.get("is_causal") else right,
        "is_lower_right": "causal_alignment" in options,
        "query_lengths": options.get("query_lengths"),
        "key_lengths": options.get("key_lengths"),
    }


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
async def test_each_option(device: ta.Device, dtype: str) -> None:
    for number, (given, rows, columns) in enumerate(CASES):
        options = dict(given)
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype != bool:
            options["attn_mask"] = mask.astype(NUMPYS[dtype])
        query, grad = numbers((3, 4, rows, 16), dtype, number), numbers((3, 4, rows, 24), dtype, number + 1)
        key, value = numbers((3, 2, columns, 16), dtype, 50), numbers((3, 2, columns, 24), dtype, 99)
        formula = formula_of(options)
        # No element excluded by lengths is read.
        for name, arrays in (("query_lengths", (query, grad)), ("key_lengths", (key, value))):
            for n, length in enumerate(options.get(name, ())):
                for array in arrays:
                    array[n, :, length:] = np.nan
        expected, logs, gradients = results(query, key, value, grad, formula)
        # A weight near 1 has the error of its score.
        terms = 16 if formula["scale"] is None else 1600
        try:
            ref = await device.put(query)
            made = await attention(ref, key, value, enable_gqa=True, return_lse=True, **options)
            check(await made.output.to_host(), expected, dtype, terms)
            found = await made.logsumexp.to_host()
            np.testing.assert_array_equal(np.isneginf(found), np.isneginf(logs))
            check(np.nan_to_num(found, neginf=0), np.nan_to_num(logs, neginf=0), "float32", terms=16)
            if not number % 6:
                alone = await attention(ref, key, value, enable_gqa=True, **options)
                check(await alone.to_host(), expected, dtype, terms)
            back = await attention_grad(grad, ref, key, value, *made, enable_gqa=True, **options)
            for one, right in zip(back, gradients, strict=True):
                check(await one.to_host(), right, dtype, terms)
        except BaseException as error:
            error.add_note(f"case {number}: {given}, {rows} rows, {columns} columns")
            raise


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_heads_after_rows(device: ta.Device, dtype: str) -> None:
    # As a layer makes them: the projections of a row side by side, one head after the other.
    made = numbers((2, 40, 3, 4, 32), dtype)
    ref = await device.put(made)
    arrays = [ref[:, :, number].transpose(0, 2, 1, 3) for number in range(3)]
    hosts = [np.ascontiguousarray(made[:, :, number].swapaxes(1, 2)) for number in range(3)]
    out = await device.zeros((2, 40, 4, 32), dtype)
    expected, _ = attended(*hosts, right=0)
    await attention(*arrays, is_causal=True, out=out.transpose(0, 2, 1, 3))
    check((await out.to_host()).swapaxes(1, 2), expected, dtype, terms=16)
    # Not where several elements can be read at once.
    odd = await device.put(np.concatenate([made[..., :1], made], -1))
    arrays = [odd[:, :, number, :, 1:].transpose(0, 2, 1, 3) for number in range(3)]
    found = await attention(*arrays, is_causal=True, return_lse=True)
    check(await found.output.to_host(), expected, dtype, terms=16)
    grad = numbers(expected.shape, dtype, 3)
    back = await attention_grad(grad, *arrays, *found, is_causal=True)
    formula = formula_of({"is_causal": True})
    for one, right in zip(back, results(*hosts, grad, formula)[2], strict=True):
        check(await one.to_host(), right, dtype, terms=16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_keys_in_blocks_of_a_vendors_size(device: ta.Device, dtype: str) -> None:
    size, lengths = 16, np.array([50, 16, 0, 33])
    query = numbers((4, 8, 5, 32), dtype)
    keys, values = numbers((12, 2, size, 32), dtype, 1), numbers((12, 2, size, 32), dtype, 2)
    table = np.random.default_rng(3).permutation(12)[:10].tolist()
    tables = np.full((4, 4), -1, np.int32)
    for n, length in enumerate(lengths):
        for place in range(-(-int(length) // size)):
            tables[n, place] = table.pop()
        if length % size:
            keys[tables[n, length // size], :, length % size :] = np.nan
            values[tables[n, length // size], :, length % size :] = np.nan
    made = await nn.paged_attention(await device.put(query), keys, values, tables, lengths)
    found = await made.to_host()
    for n, length in enumerate(lengths):
        used = tables[n][: -(-int(length) // size)]
        key, value = (one[used].swapaxes(0, 1).reshape(2, -1, 32)[None, :, :length] for one in (keys, values))
        expected, _ = attended(query[n : n + 1], key, value, right=0, is_lower_right=True)
        check(found[n : n + 1], expected, dtype, terms=16)
