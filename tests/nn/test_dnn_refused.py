"""Convolutions, pooling and attention refuse wrong arguments by name, before anything is launched."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import nn

X = np.ones((2, 4, 8, 8), np.float32)
W = np.ones((6, 4, 3, 3), np.float32)
GRAD = np.ones((2, 6, 6, 6), np.float32)
Q, K = np.ones((2, 4, 5, 3), np.float32), np.ones((2, 2, 7, 3), np.float32)
BLOCKS, TABLE, LENGTHS = np.ones((6, 2, 4, 3), np.float32), np.zeros((2, 3), np.int32), np.zeros(2, np.int64)

# The call, the error, and a part of its text.
CASES: list[tuple[Any, type[Exception], str]] = [
    (lambda x: nn.conv2d(x, W, stride=0), ValueError, "nn.conv2d: stride must be at least 1, got 0"),
    (lambda x: nn.conv2d(x, W, stride=(1, 0)), ValueError, "stride must be at least 1, got 0"),
    (lambda x: nn.conv2d(x, W, stride=(1, 1, 1)), ValueError, "stride must have a number for each of 2 axes"),
    (lambda x: nn.conv2d(x, W, stride=1.5), TypeError, "stride must be an integer, got 1.5"),
    (lambda x: nn.conv2d(x, W, stride=True), TypeError, "stride must be an integer, got True"),
    (lambda x: nn.conv2d(x, W, dilation=0), ValueError, "dilation must be at least 1, got 0"),
    (lambda x: nn.conv2d(x, W, padding=-1), ValueError, "padding must be at least 0, got -1"),
    (lambda x: nn.conv2d(x, W, padding=[(1, 1)]), ValueError, "padding must have a pair for each of 2 axes"),
    (
        lambda x: nn.conv2d(x, W, padding="full"),
        ValueError,
        "padding must be numbers, 'same' or 'valid', got 'full'",
    ),
    (lambda x: nn.conv2d(x, W, padding="same", stride=2), ValueError, "padding 'same' needs a stride of 1"),
    (
        lambda x: nn.conv2d(x, W, dilation=4),
        ValueError,
        "windows must fit into the padded input: they have (9, 9)",
    ),
    (
        lambda x: nn.conv2d(x, W[:, :2]),
        ValueError,
        "input must have 2 channels for weight of shape (6, 2, 3, 3)",
    ),
    (lambda x: nn.conv2d(x, W, groups=4), ValueError, "groups must divide the channels: 6 of weight"),
    (lambda x: nn.conv2d(x, W, groups=3), ValueError, "input must have 12 channels"),
    (lambda x: nn.conv2d(x, W, groups=0), ValueError, "groups must be at least 1, got 0"),
    (lambda x: nn.conv2d(x, W, np.ones(4, np.float32)), ValueError, "bias must have shape (6,), got (4,)"),
    (lambda x: nn.conv2d(x, W[0]), ValueError, "weight must have 4 axes, got shape (4, 3, 3)"),
    (lambda x: nn.conv1d(x, W), ValueError, "nn.conv1d: input must have 3 axes, or 2 without a batch"),
    (
        lambda x: nn.conv2d(x, W[:, :, :0]),
        ValueError,
        "weight must have at least one element along each axis",
    ),
    (lambda x: nn.conv2d(x, W.astype(float)), TypeError, "float64"),
    (lambda x: nn.conv2d(x, W, out=x), ValueError, "out must have shape (2, 6, 6, 6)"),
    (lambda x: nn.conv2d(x, W[:4, :, :1, :1], out=x), ValueError, "out must not share memory with input"),
    (lambda x: nn.conv2d(x, W, colour=1), TypeError, "colour"),
    (
        lambda x: nn.conv_transpose2d(x, W, groups=4),
        ValueError,
        "groups must divide the channels: 6 of weight",
    ),
    (lambda x: nn.conv_transpose2d(x, W), ValueError, "input must have 6 channels"),
    (
        lambda x: nn.conv_transpose2d(x, W[:4], padding="same"),
        ValueError,
        "padding must be numbers, got 'same'",
    ),
    (lambda x: nn.conv_transpose2d(x, W[:4], padding=5), ValueError, "padding must leave an element"),
    (
        lambda x: nn.conv_transpose2d(x, W[:4], output_padding=1),
        ValueError,
        "output_padding must be below the stride",
    ),
    (lambda x: nn.conv_input_grad((2, 4, 8, 9), W, GRAD), TypeError, "no operand is on a device"),
    (lambda x: nn.conv_input_grad((2, 6, 8, 8), W, x), ValueError, "input_size must have 4 channels"),
    (
        lambda x: nn.conv_input_grad((2, 4, 8, 8), W, x),
        ValueError,
        "grad_output must have shape (2, 6, 6, 6)",
    ),
    (lambda x: nn.conv_input_grad(8, W, x), TypeError, "input_size must be a shape, got 8"),
    (
        lambda x: nn.conv_input_grad((4, 8), W, x),
        ValueError,
        "input_size must have 4 axes, or 3 without a batch, got shape (4, 8)",
    ),
    (
        lambda x: nn.conv_weight_grad(x, (6, 4, 3, -3), GRAD),
        ValueError,
        "weight_size must be at least 0, got -3",
    ),
    (
        lambda x: nn.conv_weight_grad(x, (6, 4, 2, 3), GRAD),
        ValueError,
        "grad_output must have shape (2, 6, 7, 6)",
    ),
    (lambda x: nn.conv_weight_grad(x, (6, 4), GRAD), ValueError, "weight_size must have 1 to 3 axes"),
    (lambda x: nn.conv_bias_grad(x[0, 0]), ValueError, "grad_output must have shape (n, o, ...), got (8, 8)"),
    (lambda x: nn.max_pool2d(x, 0), ValueError, "kernel_size must be at least 1, got 0"),
    (
        lambda x: nn.max_pool2d(x, 9),
        ValueError,
        "windows must fit into the padded input: they have 9 elements",
    ),
    (lambda x: nn.max_pool2d(x, 3, padding=2), ValueError, "padding must be at most half of a window, got 2"),
    (lambda x: nn.max_pool2d(x, 3, 0), ValueError, "stride must be at least 1, got 0"),
    (lambda x: nn.max_pool2d(x, 3, dilation=0), ValueError, "dilation must be at least 1, got 0"),
    (lambda x: nn.max_pool2d(x[..., :3], 2, 1, 5, 10), ValueError, "each window must have an element"),
    (lambda x: nn.max_pool2d(x, 2, ceil_mode=2), ValueError, "ceil_mode must be False or True, got 2"),
    (lambda x: nn.max_pool2d(x, 2, return_indices="yes"), ValueError, "return_indices must be False or True"),
    (lambda x: nn.max_pool3d(x[0, 0], 2), ValueError, "input must have 5 axes, or 4 without a batch"),
    (
        lambda x: nn.avg_pool2d(x, 2, padding=[(2, 0), (0, 0)]),
        ValueError,
        "padding must be at most half of a window",
    ),
    (
        lambda x: nn.avg_pool2d(x, 2, divisor_override=0),
        ValueError,
        "divisor_override must be at least 1, got 0",
    ),
    (
        lambda x: nn.avg_pool2d(x, 2, count_include_pad=3),
        ValueError,
        "count_include_pad must be False or True",
    ),
    (lambda x: nn.avg_pool2d(x, 1, out=x), ValueError, "out must not share memory with input"),
    (lambda x: nn.adaptive_avg_pool2d(x, 0), ValueError, "output_size must be at least 1, got 0"),
    (
        lambda x: nn.adaptive_avg_pool2d(x, (1, 2, 3)),
        ValueError,
        "output_size must have a number for each of 2",
    ),
    (lambda x: nn.adaptive_max_pool2d(x[..., :0], 2), ValueError, "input must have an element along each"),
    (lambda x: nn.lp_pool2d(x, 0, 2), ValueError, "nn.lp_pool2d: norm_type must be a number above 0, got 0"),
    (
        lambda x: nn.max_pool_grad(x, TABLE, (2, 4, 9, 9)),
        ValueError,
        "grad_output and indices must have the same shape",
    ),
    (
        lambda x: nn.max_pool_grad(x, X, (2, 4, 9, 9)),
        TypeError,
        "indices must be int32 or int64, got float32",
    ),
    (
        lambda x: nn.max_pool_grad(x, X.astype(int), (2, 3, 9, 9)),
        ValueError,
        "grad_output must have shape (2, 3) and",
    ),
    (lambda x: nn.max_pool_grad(x, X.astype(int), (2, 4)), ValueError, "input_size must be (n, c, ...)"),
    (lambda x: nn.avg_pool_grad(x, (2, 4, 8, 8), 2), ValueError, "grad_output must have shape (2, 4, 4, 4)"),
    (
        lambda x: nn.adaptive_avg_pool_grad(x[..., :0], X.shape),
        ValueError,
        "grad_output must have an element",
    ),
    (lambda x: nn.max_pool1d(np.ones((1, 2, 3), int), 2), TypeError, "no operand is on a device"),
]
ATTENTION: list[tuple[Any, type[Exception], str]] = [
    (
        lambda q: nn.scaled_dot_product_attention(q, K, K),
        ValueError,
        "enable_gqa=True shares the heads of key",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q[:, :3], K, K, enable_gqa=True),
        ValueError,
        "must divide those",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, K[..., :2], K, enable_gqa=True),
        ValueError,
        "same last axis",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, K, K[:, :, :5], enable_gqa=True),
        ValueError,
        "key and value must",
    ),
    (lambda q: nn.scaled_dot_product_attention(q, K[:1], K[:1], enable_gqa=True), ValueError, "leading axes"),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, np.ones((4, 5), bool)),
        ValueError,
        "broadcast to (2, 4, 5, 5)",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, np.ones((1, 2, 4, 5, 5), bool)),
        ValueError,
        "attn_mask must",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, np.ones((5, 5), int)),
        TypeError,
        "attn_mask must be bool or",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, dropout_p=0.5),
        ta.NotSupportedError,
        "dropout_p must be 0",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, scale=np.inf),
        ValueError,
        "scale must be a finite number",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, is_causal=2),
        ValueError,
        "is_causal must be False or True",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, window_size=3),
        ValueError,
        "window_size must be two integers",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, window_size=(-2, 1)),
        ValueError,
        "window_size must be two",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, causal_alignment="left"),
        ValueError,
        "causal_alignment must be 'upper_left' or 'lower_right', got 'left'",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, key_lengths=TABLE),
        ValueError,
        "key_lengths must have shape (2,)",
    ),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, query_lengths=X[:, 0, 0, 0]),
        TypeError,
        "query_lengths must be int32",
    ),
    (lambda q: nn.scaled_dot_product_attention(q, Q, Q.astype(float)), TypeError, "float64"),
    (lambda q: nn.scaled_dot_product_attention([1.0], q, q), TypeError, "query must be"),
    (
        lambda q: nn.scaled_dot_product_attention(q, Q, Q, out=q),
        ValueError,
        "out must not share memory with query",
    ),
    (
        lambda q: nn.scaled_dot_product_attention_grad(q, Q, Q, Q, Q, Q),
        ValueError,
        "logsumexp must have shape (2, 4, 5)",
    ),
    (
        lambda q: nn.scaled_dot_product_attention_grad(q, Q, Q, Q, Q, np.ones((2, 4, 5))),
        TypeError,
        "logsumexp must have dtype float32, got float64",
    ),
    (
        lambda q: nn.scaled_dot_product_attention_grad(q[..., :2], Q, Q, Q, Q, Q[..., 0]),
        ValueError,
        "grad_output must have shape (2, 4, 5, 3)",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS[0], BLOCKS, TABLE, LENGTHS),
        ValueError,
        "query must be (n, heads, rows, e)",
    ),
    (lambda q: nn.paged_attention(q, BLOCKS[..., :2], BLOCKS, TABLE, LENGTHS), ValueError, "same last axis"),
    (
        lambda q: nn.paged_attention(q[:, :3], BLOCKS, BLOCKS, TABLE, LENGTHS),
        ValueError,
        "must divide those of query",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS, BLOCKS, TABLE[:1], LENGTHS),
        ValueError,
        "block_table must have shape (2, most)",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS, BLOCKS, LENGTHS, LENGTHS),
        ValueError,
        "block_table must have shape (2, most)",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS, BLOCKS, TABLE * 1.0, LENGTHS),
        TypeError,
        "block_table must be int32 or",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS, BLOCKS, TABLE, None),
        TypeError,
        "key_lengths must be an AccelRef or a NumPy array, got NoneType",
    ),
    (
        lambda q: nn.paged_attention(q, BLOCKS, BLOCKS, TABLE, LENGTHS[:1]),
        ValueError,
        "key_lengths must have shape (2,)",
    ),
]


async def test_arrays_without_elements(device: ta.Device) -> None:
    x, q = await device.put(X), await device.put(Q)
    for empty in (x[:0], x[:, :0]):
        weight = W[:, : empty.shape[1]]
        made = await nn.conv2d(empty, weight, np.ones(6, np.float32))
        np.testing.assert_array_equal(await made.to_host(), np.ones((len(empty), 6, 6, 6)))
        back = await nn.conv_weight_grad(empty, weight.shape, GRAD[: len(empty)])
        np.testing.assert_array_equal(await back.to_host(), np.zeros(weight.shape))
        found = await nn.max_pool2d(empty, 2, return_indices=True)
        assert found.indices.shape == (*empty.shape[:2], 4, 4)
        back = await nn.max_pool_grad(found.output, found.indices, empty.shape)
        assert back.shape == (await nn.avg_pool2d(empty, 1)).shape == empty.shape
    for rows, keys in ((q[:, :, :0], K), (q[:, :0], K[:, :0]), (q, K[:, :, :0]), (q, K)):
        values = keys[..., :0] if keys is K else keys
        found = await nn.scaled_dot_product_attention(rows, keys, values, enable_gqa=True, return_lse=True)
        assert found.output.shape == (*rows.shape[:3], values.shape[3])
        np.testing.assert_array_equal(await found.output.to_host(), np.zeros(found.output.shape))
        grad = await nn.scaled_dot_product_attention_grad(
            found.output, rows, keys, values, *found, enable_gqa=True
        )
        np.testing.assert_array_equal(await grad.key.to_host(), np.zeros(keys.shape))


async def test_wrong_arguments(device: ta.Device) -> None:
    for host, cases in ((X, CASES), (Q, ATTENTION)):
        ref = await device.put(host)
        for call, error, text in cases:
            with pytest.raises(error, match=re.escape(text)):
                await call(ref)
        # Nothing was launched that could have changed it.
        np.testing.assert_array_equal(await ref.to_host(), host)


async def test_float8_and_whole_numbers_are_refused(device: ta.Device) -> None:
    for dtype in ("int32", "complex64", "float8_e5m2"):
        x = await device.zeros((1, 1, 4, 4), dtype)
        for call in (nn.conv2d(x, x), nn.max_pool2d(x, 2), nn.avg_pool2d(x, 2), nn.lp_pool2d(x, 2, 2)):
            with pytest.raises(
                TypeError, match=f"input has dtype {dtype}; allowed: float16, bfloat16, float32"
            ):
                await call
        with pytest.raises(TypeError, match=f"query has dtype {dtype}; allowed: float16"):
            await nn.scaled_dot_product_attention(x, x, x)
