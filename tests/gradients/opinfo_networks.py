"""Counterparts of PyTorch's functions of networks."""

# the names and the order of PyTorch's arguments

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from opinfo_base import Function, a, first, host, m, n, need

import trio_accel as ta

# Networks.


def normalize(x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    if not x.ndim:
        return normalize(x.reshape((1,)), p, dim, eps).reshape(())
    if p == 2:
        return n.normalize(x, axis=dim, eps=eps)
    return x / a.maximum(m.vector_norm(x, axis=dim, ord=p, keepdims=True), eps)


def cosine_similarity(x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    if not x.ndim:
        x, y = x.reshape((1,)), y.reshape((1,))
    return a.cosine_similarity(x, y, axis=dim, eps=eps)


def pairwise_distance(x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    if p == 2:
        return n.pairwise_distance(x, y, eps=eps, keepdims=keepdim)
    return m.vector_norm(x - y + eps, axis=-1, ord=p, keepdims=keepdim)


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return a.where(x * beta > threshold, x, n.softplus(x, beta))


def prelu(x: Any, weight: Any) -> Any:
    if weight.ndim and x.ndim > 1:
        weight = weight.reshape((-1,) + (1,) * (x.ndim - 2))
    elif not x.ndim:
        weight = weight.reshape(())
    return n.prelu(x, weight)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    need(weight.ndim == 2, "a vector of weights")
    return n.linear(x, weight, bias)


def rrelu(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Any:
    need(not training, "random slopes")
    return n.leaky_relu(x, (lower + upper) / 2)


def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    over = tuple(range(-len(shape), 0))
    return a.layer_norm(x, 1 if weight is None else weight, 0 if bias is None else bias, axis=over, eps=eps)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    over = tuple(range(-len(shape), 0))
    return a.rms_norm(
        x, 1 if weight is None else weight, axis=over, eps=np.finfo("float64").eps if eps is None else eps
    )


def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    need(eps >= 0, "a negative eps")
    return n.group_norm(x, groups, 1 if weight is None else weight, 0 if bias is None else bias, eps=eps)


def native_group_norm(x: Any, w: Any, b: Any, _n: int, _c: int, _size: int, groups: int, eps: float) -> Any:
    return group_norm(x, groups, w, b, eps), None, None


def native_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return layer_norm(x, shape, weight, bias, eps), None, None


def batch_norm(
    x: Any,
    mean: Any,
    var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    need(x.ndim > 1, "a batch without channels")
    weight, bias = 1 if weight is None else weight, 0 if bias is None else bias
    if training:
        return n.batch_norm_training(x, weight, bias, eps=eps)[0]
    return n.batch_norm(x, mean, var, weight, bias, eps=eps)


def native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    return batch_norm(x, mean, var, weight, bias, training, momentum, eps), None, None


def native_batch_norm_legit(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    mean, var = (None, None) if isinstance(rest[0], bool) else rest[:2]
    training, momentum, eps = rest[-3:]
    return native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)


def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    return *native_batch_norm(x, weight, bias, mean, var, True, momentum, eps), None


def instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    need(use_input_stats, "statistics of before")
    return n.instance_norm(x, 1 if weight is None else weight, 0 if bias is None else bias, eps=eps)


def local_response_norm(x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    padded = a.pad(x * x, ((0, 0), (size // 2, (size - 1) // 2), *((0, 0),) * (x.ndim - 2)))
    means = a.mean(a.sliding_window_view(padded, size, axis=1), axis=-1)
    return x / (k + alpha * means) ** beta


def pad(x: Any, pads: Any, mode: str = "constant", value: Any = None) -> Any:
    pairs = [tuple(pads[k : k + 2]) for k in range(0, len(pads), 2)][::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode == "circular":
        # Crop first, because the remaining elements are the period.
        x, pairs = cropped(x, pairs), [(max(low, 0), max(high, 0)) for low, high in pairs]
    modes = {"replicate": "edge", "circular": "wrap"}
    added = [(max(low, 0), max(high, 0)) for low, high in pairs]
    made = a.pad(x, added, mode=modes.get(mode, mode), constant_values=0 if value is None else value)
    return cropped(made, pairs)


def cropped(x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    if all(low >= 0 and high >= 0 for low, high in pairs):
        return x
    ends = zip(pairs, x.shape, strict=True)
    return x[tuple(slice(max(-low, 0), size - max(-high, 0)) for (low, high), size in ends)]


def constant_pad(x: Any, pads: Any, value: Any = 0) -> Any:
    return pad(x, pads, "constant", value)


def max_pool(function: Function) -> Function:
    def run(x: Any, *args: Any, return_indices: bool = False, **named: Any) -> Any:
        made = function(x, *args, return_indices=return_indices, **named)
        return tuple(made) if return_indices else made

    return run


def avg_pool(function: Function) -> Function:
    def run(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Any:
        need(divisor_override is None or divisor_override > 0, "a negative divisor")
        padding = padding[0] if isinstance(padding, tuple) and len(padding) == 1 else padding
        more = () if divisor_override is None else (divisor_override,)
        return function(x, kernel_size, stride or None, padding, ceil_mode, count_include_pad, *more)

    return run


def adaptive(function: Function) -> Function:
    def run(x: Any, size: Any, return_indices: bool = False) -> Any:
        if not return_indices:
            return function(x, size)
        return tuple(function(x, size, return_indices=True))

    return run


def max_unpool(
    x: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
) -> Any:
    count = len(indices.shape) - 2
    need(output_size is not None and count > 0, "a size that the kernel decides")
    sizes = tuple(output_size)[-count:]
    flat = np.asarray(host(indices)).reshape(*indices.shape[:2], -1)
    zeros = a.zeros_like(
        a.broadcast_to(x.reshape((*x.shape[:2], -1))[..., :1], (*x.shape[:2], math.prod(sizes)))
    )
    i, j = np.indices(flat.shape)[:2]
    made = zeros.at[i, j, flat].set(x.reshape((*x.shape[:2], -1)))
    return made.reshape((*x.shape[:2], *sizes))


def pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    r, (*lead, c, h, w) = upscale_factor, x.shape
    k = len(lead)
    moved = a.permute_dims(
        x.reshape((*lead, c // r**2, r, r, h, w)), (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    )
    return a.reshape(moved, (*lead, c // r**2, h * r, w * r))


def pixel_unshuffle(x: Any, downscale_factor: int) -> Any:
    r, (*lead, c, h, w) = downscale_factor, x.shape
    k = len(lead)
    moved = a.permute_dims(
        x.reshape((*lead, c, h // r, r, w // r, r)), (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    )
    return a.reshape(moved, (*lead, c * r**2, h // r, w // r))


def channel_shuffle(x: Any, groups: int) -> Any:
    batch, c, *rest = x.shape
    moved = a.swapaxes(x.reshape((batch, groups, c // groups, *rest)), 1, 2)
    return a.reshape(moved, x.shape)


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def unfold_images(x: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = map(pair, (kernel_size, dilation, padding, stride))
    x = a.pad(x, (*((0, 0),) * (x.ndim - 2), (ph, ph), (pw, pw)))
    windows = a.sliding_window_view(x, (dh * (kh - 1) + 1, dw * (kw - 1) + 1), axis=(-2, -1))
    windows = windows[..., ::sh, ::sw, ::dh, ::dw]
    *lead, c, rows, columns, _, _ = windows.shape
    k = len(lead)
    moved = a.permute_dims(windows, (*range(k), k, k + 3, k + 4, k + 1, k + 2))
    return a.reshape(moved, (*lead, c * kh * kw, rows * columns))


def output_sizes(x: Any, size: Any, scale_factor: Any) -> tuple[int, ...]:
    count = x.ndim - 2
    if size is not None:
        return (size,) * count if isinstance(size, int) else tuple(size)
    scales = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * count
    return tuple(math.floor(k * s) for k, s in zip(x.shape[2:], scales, strict=True))


def interpolate(
    x: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
) -> Any:
    """Resize images by the means of areas, the nearest elements, or linearly.

    Without `recompute_scale_factor`, PyTorch computes coordinates from the factor instead of the lengths.
    """
    sizes = output_sizes(x, size, scale_factor)
    if mode == "area":
        return getattr(n, f"adaptive_avg_pool{x.ndim - 2}d")(x, sizes)
    is_exact = size is not None or recompute_scale_factor
    if mode.startswith("nearest"):
        half = 0.5 if mode == "nearest-exact" else 0.0
        for k, length in enumerate(sizes):
            step = x.shape[k + 2] / length if is_exact else 1 / scale_factor
            index = np.floor((np.arange(length) + half) * step).astype("int64")
            x = a.take(x, np.minimum(index, x.shape[k + 2] - 1), axis=k + 2)
        return x
    need(mode.endswith("linear"), "cubic interpolation with PyTorch's kernel")
    need(is_exact or align_corners, "coordinates by a factor that is not the ratio of the lengths")
    ratios = (1, 1, *[s / k for s, k in zip(sizes, x.shape[2:], strict=True)])
    return ta.ndimage.zoom(x, ratios, order=1, mode="nearest", grid_mode=not align_corners)


def upsample(mode: str, align: Any = None) -> Function:
    return lambda x, size=None, scale_factor=None: interpolate(x, size, scale_factor, mode, align)


def grid_sample(
    x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Any:
    need(mode == "bilinear" and padding_mode == "border", "other modes of interpolation")
    rows = []
    for k in range(x.shape[0]):
        places = []
        for axis, size in enumerate(x.shape[2:]):
            at = grid[k][..., len(x.shape[2:]) - 1 - axis]
            places.append((at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2)
        coordinates = a.stack(places, axis=0)
        channels = [
            ta.ndimage.map_coordinates(x[k][c], coordinates, order=1, mode="nearest")
            for c in range(x.shape[1])
        ]
        rows.append(a.stack(channels, axis=0))
    return a.stack(rows, axis=0)


def rows_of(weight: Any, index: Any, padding_idx: Any = None, **named: Any) -> Any:
    need(not named, "rows with another norm")
    return n.embedding(index, weight, padding_idx)


def weighted_loss(function: Function, by_class: bool = False) -> Function:
    def run(x: Any, target: Any, weight: Any = None, **named: Any) -> Any:
        if by_class:
            need(
                isinstance(target, np.ndarray) and target.dtype.kind == "i", "targets that are probabilities"
            )
            return function(x, target, weight, **named)
        weight = 1 if weight is None else weight
        return function(x, target, weight, **{k: 1 if v is None else v for k, v in named.items()})

    return run


def loss_of_three(x: Any, y: Any, z: Any, margin: float = 1.0, reduction: str = "mean", **named: Any) -> Any:
    need(not named.get("swap"), "the nearer of two distances")
    need(named.get("p", 2) == 2, "another distance")
    return n.triplet_margin_loss(x, y, z, margin=margin, reduction=reduction)


def linear_cross_entropy(
    x: Any,
    matrix: Any,
    target: Any,
    /,
    linear_bias: Any = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **named: Any,
) -> Any:
    need(matrix.ndim == 2, "several rows of logits for each sample")
    need(isinstance(target, np.ndarray) and target.dtype.kind == "i", "targets that are probabilities")
    named.pop("options", None)
    weights = named.pop("weight", None)
    return n.cross_entropy(
        n.linear(x, matrix, linear_bias),
        target,
        weights,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def multilabel_soft_margin_loss(x: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Any:
    each = a.mean(
        n.binary_cross_entropy_with_logits(x, target, 1 if weight is None else weight, reduction="none"),
        axis=-1,
    )
    return each if reduction == "none" else getattr(a, reduction)(each)


def multi_margin_loss(
    x: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"
) -> Any:
    need(x.ndim, "one class")
    x = x if x.ndim > 1 else x.reshape((1, -1))
    target = np.asarray(host(target)).reshape(-1)
    picked = a.take_along_axis(x, target[:, None], axis=1)
    each = a.maximum(margin - picked + x, 0) ** p
    each = each if weight is None else each * weight[target][:, None]
    is_other = np.arange(x.shape[1]) != target[:, None]
    made = a.sum(a.where(is_other, each, 0.0), axis=1) / x.shape[1]
    return made if reduction == "none" else getattr(a, reduction)(made)


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    need(not dropout_p, "attention with dropout")
    return n.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa)


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    need(not training or p in (0, 0.0, 1, 1.0), "random numbers")
    return first(x) if not training or not p else a.zeros_like(x)


def dropout_backward(grad: Any, mask: Any, scale: float) -> Any:
    need(scale > 0, "no share of the elements")
    return n.dropout_grad(grad, mask, 1 - 1 / scale)


def one_hot(x: Any, num_classes: int = -1) -> Any:
    need(num_classes > 0, "a number of classes that the elements decide")
    return a.one_hot(x, num_classes, dtype="int64")


def bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    made = m.einsum("...i,kij,...j->...k", x, weight, y)
    return made if bias is None else made + bias
