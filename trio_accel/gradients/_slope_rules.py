"""Second derivatives of layers: the rules for the gradient functions of `nn`, added to `RULES`.

There are three kinds of rules:

* If the function is linear in its arrays, the rule calls another function, for example a convolution.
* A `composition` computes the same result by calls that have rules themselves.
* If the function is an expression, it is derived like every other expression (`_expressed`).

In the rules, `g` is the gradient of the function's result. In the compositions, `grad` is the gradient of the
layer's result.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import nn as _nn
from ..devices import gather
from ..nn._losses import SLOPES
from ._backward import RULES, Make, bound
from ._elementwise import Rule, slopes_of, summed_to
from ._nn_rules import class_axis, labelled
from ._rules import axes_of, composition, part

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
nn: Any = _nn

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


def _conv_bias(grad_output: Any) -> Any:
    return arrays.sum(grad_output, axis=_non_channel_axes(grad_output))


def _non_channel_axes(x: Any) -> tuple[int, ...]:
    """Return all axes except the channel axis."""
    return (0, *range(2, len(x.shape)))


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


def _dropout(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["grad"], lambda: nn.dropout_grad(g, args["mask"], args["p"])


def _linear_weight(grad: Any, x: Any) -> Any:
    flat = arrays.reshape(grad, (-1, grad.shape[-1]))
    return gather(flat.mT @ arrays.reshape(x, (-1, x.shape[-1])), arrays.sum(flat, axis=0))


def _norm_gradients(
    grad: Any, x: Any, weight: Any, eps: float, axes: Sequence[int], *, is_centred: bool = True
) -> tuple[Any, Any]:
    """Return the input's gradient of a norm along axes, and `grad` times the normalized input.

    Args:
        grad: The gradient of the layer's result.
        x: The input of the layer.
        weight: The factors of the normalized input, which broadcast to `x`.
        eps: The number added to the variance.
        axes: The axes of the mean and the variance.
        is_centred: Whether the mean is subtracted.
    """
    mean = partial(arrays.mean, axis=tuple(axes), keepdims=True)
    centred = x - mean(x) if is_centred else x
    root = arrays.rsqrt(mean(centred * centred) + eps)
    normal, scaled = centred * root, grad * weight
    projected = scaled - normal * mean(scaled * normal)
    return root * (projected - mean(scaled) if is_centred else projected), grad * normal


def _by_channel(weight: Any, x: Any) -> Any:
    """Return factors of channels in a shape that broadcasts to `x`; a number stays a number."""
    return weight.reshape((-1, *(1,) * (len(x.shape) - 2))) if np.shape(weight) else weight


def _channel_norm(grad: Any, x: Any, weight: Any, eps: float, axes: Sequence[int]) -> Any:
    """Return the gradients of a norm with factors of channels: by the input, the factors and the bias."""
    of_x, product = _norm_gradients(grad, x, _by_channel(weight, x), eps, axes)
    return gather(of_x, *[arrays.sum(slope, axis=_non_channel_axes(x)) for slope in (product, grad)])


def _batch_norm(grad: Any, x: Any, weight: Any, eps: float) -> Any:
    return _channel_norm(grad, x, weight, eps, _non_channel_axes(x))


def _instance_norm(grad: Any, x: Any, weight: Any, eps: float) -> Any:
    return _channel_norm(grad, x, weight, eps, range(2, len(x.shape)))


def _group_norm(grad: Any, x: Any, num_groups: int, weight: Any, eps: float) -> Any:
    apart = (x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])
    if np.shape(weight):
        weight = weight.reshape((num_groups, -1, *(1,) * (len(x.shape) - 2)))
    grad_groups, x_groups = arrays.reshape(grad, apart), arrays.reshape(x, apart)
    of_x, product = _norm_gradients(grad_groups, x_groups, weight, eps, range(2, len(apart)))
    shaped = arrays.reshape(product, x.shape)
    return gather(
        arrays.reshape(of_x, x.shape),
        *[arrays.sum(slope, axis=_non_channel_axes(x)) for slope in (shaped, grad)],
    )


def _layer_norm(grad: Any, x: Any, weight: Any, axis: Any, eps: float) -> Any:
    axes = axes_of(axis, x)
    of_x, product = _norm_gradients(grad, x, weight, eps, axes)
    return gather(of_x, *[_of_factors(slope, weight, axes) for slope in (product, grad)])


def _rms_norm(grad: Any, x: Any, weight: Any, axis: Any, eps: float) -> Any:
    axes = axes_of(axis, x)
    of_x, product = _norm_gradients(grad, x, weight, eps, axes, is_centred=False)
    return gather(of_x, _of_factors(product, weight, axes))


def _of_factors(slope: Any, weight: Any, axes: Sequence[int]) -> Any:
    """Sum a gradient to the shape of the factors; for a number, to the shape of the normalized axes."""
    if np.shape(weight):
        return summed_to(slope, weight.shape)
    batch_axes = tuple(axis for axis in range(len(slope.shape)) if axis not in axes)
    return arrays.sum(slope, axis=batch_axes) if batch_axes else slope


def _gelu(grad: Any, x: Any, approximate: str) -> Any:
    if approximate == "none":
        return grad * (arrays.ndtr(x) + x * arrays.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    factor, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = arrays.tanh(factor * (x + cubic * x * x * x))
    inner = factor * (1 + 3 * cubic * x * x)
    return grad * 0.5 * (1 + tanh + x * (1 - tanh * tanh) * inner)


def _glu(grad: Any, x: Any, axis: int) -> Any:
    dim, count = axis % len(x.shape), x.shape[axis] // 2
    first, share = part(x, dim, slice(0, count)), arrays.expit(part(x, dim, slice(count, None)))
    return arrays.concat([grad * share, grad * first * share * (1 - share)], axis=dim)


def _expressed(slope: Callable[..., Any]) -> Make:
    """Make a rule for an expression by deriving it."""

    def rule(call: Any, g: Any) -> Iterator[Rule]:
        expressed = slope(**bound(call))
        # The call is computed only if a gradient reads its result, so suppress the warning otherwise.
        expressed.silence()
        rules = slopes_of(expressed, g, is_exact=False)
        assert rules is not None
        return rules

    return rule


def _cross_entropy(
    grad: Any,
    logits: Any,
    labels: Any,
    weight: Any,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Any:
    """Compose the gradient from the softmax, because `nn.cross_entropy_grad` is not a single expression."""
    axis, classes = class_axis(logits), logits.shape[class_axis(logits)]
    is_used, class_indices, factors = labelled(logits, labels, weight, ignore_index)
    line = (classes, *(1,) * (len(logits.shape) - axis - 1))
    share = arrays.softmax(logits, axis=axis)
    is_label = _expanded(class_indices, axis) == np.reshape(np.arange(classes), line)
    slope = _expanded(factors, axis) * arrays.where(is_label, share - 1, share)
    if label_smoothing:
        class_weights, weight_sum = (
            (1, classes) if weight is None else (weight.reshape(line), _library(weight).sum(weight))
        )
        smooth = arrays.where(_expanded(is_used, axis), share * weight_sum - class_weights, 0)
        slope = slope * (1 - label_smoothing) + smooth * (label_smoothing / classes)
    if reduction == "mean":
        return grad / arrays.sum(factors) * slope
    return slope * (_expanded(grad, axis) if reduction == "none" and np.shape(grad) else grad)


def _library(array: object) -> Any:
    """Return the namespace of functions for an array: NumPy on the host, otherwise `arrays`."""
    return np if isinstance(array, (np.ndarray, np.generic)) else arrays


def _expanded(array: Any, axis: int) -> Any:
    return _library(array).expand_dims(array, axis=axis)


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
        **{name: _expressed(slope) for name, slope in SLOPES.items()},
        "nn.adaptive_avg_pool_grad": _pool,
        "nn.avg_pool_grad": _pool,
        "nn.batch_norm_training_grad": composition(_batch_norm),
        "nn.conv_bias_grad": composition(_conv_bias),
        "nn.conv_input_grad": _conv_input,
        "nn.conv_weight_grad": _conv_weight,
        "nn.cross_entropy_grad": composition(_cross_entropy),
        "nn.dropout_grad": _dropout,
        "nn.embedding_grad": _embedding,
        "nn.gelu_grad": composition(_gelu),
        "nn.glu_grad": composition(_glu),
        "nn.group_norm_grad": composition(_group_norm),
        "nn.instance_norm_grad": composition(_instance_norm),
        "nn.layer_norm_grad": composition(_layer_norm),
        "nn.linear_input_grad": composition(lambda grad, weight: grad @ weight),
        "nn.linear_weight_grad": composition(_linear_weight),
        "nn.max_pool_grad": _max_pool,
        "nn.rms_norm_grad": composition(_rms_norm),
        "nn.scaled_dot_product_attention_grad": composition(_attention, without=("output", "logsumexp")),
    }
)
