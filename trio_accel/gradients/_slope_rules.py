"""Second derivatives of layers: the rules for the gradient functions of `nn`, added to `RULES`.

There are two kinds of rules:

* If the function is linear in its arrays, the rule calls another function, for example a convolution.
* A `composition` computes the same result by calls that have rules themselves.

In the rules, `g` is the gradient of the function's result. In the compositions, `grad` is the gradient of the
layer's result.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..devices import gather
from ._backward import RULES, bound
from ._elementwise import Rule
from ._rules import composition

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
nn = later("trio_accel.nn")

_OPTIONS = ("stride", "padding", "dilation", "groups")


def _conv_input(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    weight, grad, options = args["weight"], args["grad_output"], {name: args[name] for name in _OPTIONS}
    yield grad, lambda: _convolve(g, weight, options)
    yield weight, lambda: nn.conv_weight_grad(g, weight.shape, grad, **options)


def _conv_weight(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, grad, options = args["input"], args["grad_output"], {name: args[name] for name in _OPTIONS}
    yield grad, lambda: _convolve(x, g, options)
    yield x, lambda: nn.conv_input_grad(x.shape, g, grad, **options)


def _convolve(x: Any, weight: Any, options: dict[str, Any]) -> Any:
    return getattr(nn, f"conv{len(weight.shape) - 2}d")(x, weight, **options)


def _pool(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    grad, size = args.pop("grad_output"), args.pop("input_size")
    dims = len(size) - 2
    if "adaptive" in call.function.name:
        yield grad, lambda: getattr(nn, f"adaptive_avg_pool{dims}d")(g, grad.shape[2:])
    else:
        yield grad, lambda: getattr(nn, f"avg_pool{dims}d")(g, **args)


def _max_pool(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    grad = args["grad_output"]
    leading_shape = grad.shape[:2]

    def slope() -> Any:
        indices = args["indices"].reshape((*leading_shape, -1))
        return arrays.reshape(
            arrays.take_along_axis(arrays.reshape(g, (*leading_shape, -1)), indices), grad.shape
        )

    yield grad, slope


def _embedding(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    indices, padding = args["indices"], args["padding_idx"]

    def slope() -> Any:
        rows = nn.embedding(indices, g)
        if padding is None:
            return rows
        return arrays.where((indices == padding % args["num_embeddings"])[..., None], 0, rows)

    yield args["grad"], slope


def _linear_weight(grad: Any, x: Any) -> Any:
    flat = arrays.reshape(grad, (-1, grad.shape[-1]))
    return gather(flat.mT @ arrays.reshape(x, (-1, x.shape[-1])), arrays.sum(flat, axis=0))


def _attention(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_alignment: str,
    window_size: Sequence[int],
    query_lengths: Any,
    key_lengths: Any,
) -> Any:
    """Compose the gradients of an attention by query, key and value, with all scores in memory at once."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    key_heads = key.shape[-3] if enable_gqa and len(key.shape) > 2 else 0
    group_size = query.shape[-3] // key_heads if key_heads else 1
    keys, values = [
        arrays.repeat(operand, group_size, axis=-3) if group_size > 1 else operand for operand in (key, value)
    ]
    scores = factor * (query @ keys.mT)
    window = window_size[0], 0 if is_causal else window_size[1]
    mask = _attention_mask(scores, window, causal_alignment, query_lengths, key_lengths)
    if attn_mask is not None and str(attn_mask.dtype) == "bool":
        mask = arrays.logical_and(mask, attn_mask)
    elif attn_mask is not None:
        scores = scores + attn_mask
        mask = arrays.logical_and(mask, attn_mask > -math.inf)
    # In a row that sees no key, all weights are 0, because the softmax of -inf alone would be NaN.
    has_key, zeros = arrays.any(mask, axis=-1, keepdims=True), arrays.zeros_like(scores)
    masked_scores = arrays.where(mask, scores, arrays.where(has_key, zeros - math.inf, zeros))
    weights = arrays.where(mask, arrays.softmax(masked_scores, axis=-1), 0.0)
    inner = grad_output @ values.mT
    of_scores = weights * (inner - arrays.sum(weights * inner, axis=-1, keepdims=True))
    slopes = [factor * (of_scores.mT @ query), weights.mT @ grad_output]
    if group_size > 1:
        apart = [(*slope.shape[:-3], key_heads, group_size, *slope.shape[-2:]) for slope in slopes]
        slopes = [
            arrays.sum(arrays.reshape(slope, shape), axis=-3)
            for slope, shape in zip(slopes, apart, strict=True)
        ]
    return gather(factor * (of_scores @ keys), *slopes)


def _attention_mask(
    scores: Any, window: Sequence[int], alignment: str, query_lengths: Any, key_lengths: Any
) -> Any:
    """Return which keys each query sees, by the window and the lengths; see `ops.AttentionSpec`."""
    shape = scores.shape
    rows, columns = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    lengths = [
        count if length is None else length.reshape((*length.shape, *(1,) * min(len(shape), 3)))
        for length, count in zip((query_lengths, key_lengths), shape[-2:], strict=True)
    ]
    offsets = columns - rows
    if alignment == "lower_right":
        offsets = offsets + (lengths[0] - lengths[1])
    window_left, window_right = window
    bounds = [offsets >= -window_left] if window_left >= 0 else []
    bounds += [offsets <= window_right] if window_right >= 0 else []
    bounds += [rows < lengths[0]] if query_lengths is not None else []
    bounds += [columns < lengths[1]] if key_lengths is not None else []
    mask = arrays.zeros_like(scores) == 0
    for condition in bounds:
        mask = arrays.logical_and(mask, condition)
    return mask


RULES.update(
    {
        "nn.adaptive_avg_pool_grad": _pool,
        "nn.avg_pool_grad": _pool,
        "nn.conv_input_grad": _conv_input,
        "nn.conv_weight_grad": _conv_weight,
        "nn.embedding_grad": _embedding,
        "nn.linear_input_grad": composition(lambda grad, weight: grad @ weight),
        "nn.linear_weight_grad": composition(_linear_weight),
        "nn.max_pool_grad": _max_pool,
        "nn.scaled_dot_product_attention_grad": composition(_attention, without=("output", "logsumexp")),
    }
)
