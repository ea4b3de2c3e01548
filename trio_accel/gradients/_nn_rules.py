"""Gradients of layers, losses, norms and pools; most of them are functions of `nn`."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import nn as _nn
from ..nn._losses import LOSSES
from ..nn._slopes import FIRST
from ._backward import RULES, Make, bound, is_operand
from ._elementwise import Rule, slopes_of
from ._factor_rules import added
from ._rules import composition, part, spread
from ._scatter import added_at, is_ordered

__all__ = ["class_axis", "labelled"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
nn: Any = _nn


def _bound(call: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of an `nn` function, and its arguments with their defaults, except `out`."""
    return call.function.name.removeprefix("nn."), bound(call)


def _first(call: Any, g: Any) -> Iterator[Rule]:
    """The gradient of the first argument is a function of `nn`, of the same arguments."""
    at = bound(call)
    slope = getattr(nn, f"{call.function.name.partition('.')[2]}_grad")
    yield next(iter(at.values())), partial(slope, g, **at)
    yield from _by_others(call, g, 1)


def _by_others(call: Any, g: Any, first: int) -> Iterator[Rule]:
    """The gradients of a loss by its later inputs, such as the target, are derived from its expression."""
    at = bound(call)
    if call.function.name not in LOSSES:
        return
    own = LOSSES[call.function.name](**at)
    names = [name for name in own.inputs if is_operand(at[name])]

    def slopes() -> list[Rule]:
        each, x = own.each(**at), at[own.inputs[0]]
        # It is not computed, unless its derivatives are made of it.
        each.silence()
        counts = {"mean": x.size, "batchmean": x.shape[0] if x.shape else 1}
        found = slopes_of(each, g / counts.get(at["reduction"], 1), is_exact=False)
        assert found is not None  # it is a call of an expression
        return list(found)

    made = cache(slopes)
    for place, name in enumerate(names):
        if name in own.inputs[first:]:
            yield at[name], partial(_of_rule, made, place)


def _of_rule(made: Callable[[], list[Rule]], place: int) -> Any:
    return made()[place][1]()


def _activated(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    made = nn.linear(x, weight, bias)
    return nn.relu(made) if activation == "relu" else nn.gelu(made, "tanh")


def _linear(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    x, weight, bias = at["x"], at["weight"], at["bias"]
    if at["activation"] is not None:
        yield from composition(_activated)(call, g)
        return
    flat = cache(lambda: arrays.reshape(g, (-1, weight.shape[0])))
    yield x, lambda: g @ weight
    yield weight, lambda: flat().mT @ arrays.reshape(x, (-1, weight.shape[1]))
    yield bias, lambda: arrays.sum(flat(), axis=0)


def _group_norm(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    x, weight, bias = at.pop("x"), at.pop("weight"), at.pop("bias")
    groups = [at.pop("num_groups")] if "num_groups" in at else []
    made = cache(lambda: getattr(nn, f"{name}_grad")(g, x, *groups, weight, **at))
    yield from _each(made, x, weight, bias)


def _attention(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    given = [at.pop(one) for one in ("query", "key", "value")]
    del at["dropout_p"], at["return_lse"]

    def slopes() -> Any:
        output, lse = getattr(nn, name)(*given, **at, return_lse=True)
        return getattr(nn, f"{name}_grad")(g, *given, output, lse, **at)

    yield from _each(cache(slopes), *given)


def _each(made: Callable[[], Any], *wanted: Any) -> Iterator[Rule]:
    """Yield arguments with their gradients, which are the results of one call."""
    for place, one in enumerate(wanted):
        yield one, partial(_result, made, place)


def _result(made: Callable[[], Any], place: int) -> Any:
    return made()[place]


def _convolution(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    x, weight = at["input"], at["weight"]
    how = {one: at[one] for one in ("stride", "padding", "dilation", "groups")}
    if "transpose" in name:
        yield x, partial(getattr(nn, name.replace("_transpose", "")), g, weight, **how)
        x, g_of_weight = g, x
    else:
        yield x, partial(nn.conv_input_grad, x.shape, weight, g, **how)
        g_of_weight = g
    yield weight, partial(nn.conv_weight_grad, x, weight.shape, g_of_weight, **how)
    yield at["bias"], lambda: nn.conv_bias_grad(_images(name, g))


def _images(name: str, array: Any) -> Any:
    """Return an array as several images; the function's name contains the number of their axes."""
    return arrays.reshape(array, (1, *array.shape)[-2 - int(name[-2]) :])


def _pool(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    x = at.pop("input")
    shape = (1, *x.shape)[-2 - int(name[-2]) :]

    def slope() -> Any:
        if "max" in name:
            made = getattr(nn, name)(arrays.reshape(x, shape), **at | {"return_indices": True})
            return nn.max_pool_grad(_images(name, g), made[1], shape)
        if "adaptive" in name:
            return nn.adaptive_avg_pool_grad(_images(name, g), shape)
        return nn.avg_pool_grad(_images(name, g), shape, **at)

    yield x, lambda: arrays.reshape(slope(), x.shape)


def _batch_norm(call: Any, g: Any) -> Iterator[Rule]:
    """Yield gradients of a norm by given statistics, which have no gradients."""
    at = _bound(call)[1]
    x, mean, var, weight = (at[name] for name in ("x", "running_mean", "running_var", "weight"))

    def spread(one: Any) -> Any:
        return one.reshape(-1, *(1,) * (len(x.shape) - 2)) if np.shape(one) else one

    root = cache(lambda: (spread(var) + at["eps"]) ** -0.5)
    others = tuple(axis for axis in range(len(x.shape)) if axis != 1)
    yield x, lambda: g * (root() * spread(weight))
    yield weight, lambda: arrays.sum(g * (x - spread(mean)) * root(), axis=others)
    yield at["bias"], lambda: arrays.sum(g, axis=others)


def _batch_norm_training(call: Any, g: Any) -> Iterator[Rule]:
    """The statistics also depend on the elements. Running statistics are not operands."""
    at = bound(call)
    x, (of_y, of_mean, of_var) = at["x"], g
    others = tuple(axis for axis in range(len(x.shape)) if axis != 1)
    share = x.shape[1] / math.prod(x.shape)
    made = cache(lambda: nn.batch_norm_training_grad(of_y, x, at["weight"], eps=at["eps"]))

    def slope() -> Any:
        total: Any = None if of_y is None else made()[0]
        if of_mean is not None:
            total = added(total, spread(of_mean * share, x, others))
        if of_var is not None:
            total = added(total, spread(of_var * (2 * share), x, others) * (x - spread(call[1], x, others)))
        return total if total.dtype == x.dtype else total.cast(x.dtype)

    yield x, slope
    yield at["weight"], lambda: None if of_y is None else made()[1]
    yield at["bias"], lambda: None if of_y is None else made()[2]


def _dropout(call: Any, g: Any) -> Iterator[Rule]:
    """The mask is a result of the call, which draws it once."""
    at = bound(call)
    yield at["x"], lambda: nn.dropout_grad(g[0], call[1], at["p"])


def _ranking(call: Any, g: Any) -> Iterator[Rule]:
    at = _bound(call)[1]
    yield at["x1"], lambda: nn.margin_ranking_loss_grad(g, **at)
    yield at["x2"], lambda: -nn.margin_ranking_loss_grad(g, **at)
    yield from _by_others(call, g, 2)


def _embedding(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    weight, indices, padding = at["weight"], at["indices"], at["padding_idx"]

    def slope() -> Any:
        if is_ordered(g):
            return nn.embedding_grad(g, indices, weight.shape[0], padding)
        kept = g
        if padding is not None:
            kept = arrays.where((indices == padding % weight.shape[0])[..., None], 0, g)
        return added_at(weight, [indices], kept)

    yield weight, slope


def _lengths(x: Any, axis: Any, keepdims: bool = False) -> Any:
    return arrays.sqrt(arrays.sum(x * x, axis=axis, keepdims=keepdims))


def _softmax_grad(grad: Any, x: Any, axis: Any) -> Any:
    made = arrays.softmax(x, axis=axis)
    return made * (grad - arrays.sum(grad * made, axis=axis, keepdims=True))


def _log_softmax_grad(grad: Any, x: Any, axis: Any) -> Any:
    return grad - arrays.softmax(x, axis=axis) * arrays.sum(grad, axis=axis, keepdims=True)


def _normalize(x: Any, axis: Any, eps: float) -> Any:
    return x / arrays.maximum(_lengths(x, axis, keepdims=True), eps)


def _distance(x1: Any, x2: Any, axis: Any, eps: float, keepdims: bool) -> Any:
    return _lengths(x1 - x2 + eps, axis, keepdims)


def _reduced(values: Any, reduction: str) -> Any:
    return values if reduction == "none" else getattr(arrays, reduction)(values)


def _cosine_embedding(x1: Any, x2: Any, target: Any, margin: float, reduction: str) -> Any:
    products = arrays.sum(x1 * x2, axis=-1)
    norms = arrays.sqrt((arrays.sum(x1 * x1, axis=-1) + 1e-12) * (arrays.sum(x2 * x2, axis=-1) + 1e-12))
    cosine = products / norms
    return _reduced(arrays.where(target == 1, 1 - cosine, arrays.maximum(cosine - margin, 0)), reduction)


def _triplet(anchor: Any, positive: Any, negative: Any, margin: float, eps: float, reduction: str) -> Any:
    near, far = (_distance(anchor, one, -1, eps, False) for one in (positive, negative))
    return _reduced(arrays.maximum(near - far + margin, 0), reduction)


def class_axis(logits: Any) -> int:
    return min(1, len(logits.shape) - 1)


def labelled(logits: Any, labels: Any, weight: Any, ignore_index: int) -> tuple[Any, Any, Any]:
    """Return which labels count, their classes, and the factors of these, which are 0 of other labels."""
    is_host = isinstance(labels, np.ndarray)
    lib: Any = np if is_host else arrays
    # The dtype of the labels may not hold `ignore_index`.
    own: Any = np.asarray(labels, "int64") if is_host else labels.cast("int64")
    is_used = own != ignore_index
    places = lib.where(is_used, own, 0)
    factors: Any = arrays.ones_like(part(logits, class_axis(logits), 0))
    if weight is not None:
        take: Any = np.take if is_host and isinstance(weight, np.ndarray) else arrays.take
        factors = factors * take(weight, places)
    return is_used, places, arrays.where(is_used, factors, 0)


def _nll_loss(log_probs: Any, labels: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    axis = class_axis(log_probs)
    _, places, factors = labelled(log_probs, labels, weight, ignore_index)
    lib: Any = np if isinstance(labels, np.ndarray) else arrays
    taken = arrays.take_along_axis(log_probs, lib.expand_dims(places, axis=axis), axis=axis)
    values = -factors * arrays.squeeze(taken, axis=axis)
    return arrays.sum(values) / arrays.sum(factors) if reduction == "mean" else _reduced(values, reduction)


def _lp_pool(name: str) -> Make:
    def compose(input: Any, norm_type: float, ceil_mode: bool, **at: Any) -> Any:  # noqa: A002  # PyTorch's
        pool = getattr(nn, name.replace("lp", "avg"))
        sums = pool(arrays.abs(input) ** norm_type, ceil_mode=ceil_mode, divisor_override=1, **at)
        return sums ** (1 / norm_type)

    return composition(compose)


_POOLS = ("adaptive_avg", "adaptive_max", "avg", "max")
RULES.update({
    **{f"nn.{name}": _first for name in (*FIRST, "cross_entropy", "glu")},
    "arrays.softmax": _first, "arrays.log_softmax": _first,
    "nn.batch_norm": _batch_norm, "nn.batch_norm_training": _batch_norm_training, "nn.dropout": _dropout,
    "nn.cosine_embedding_loss": composition(_cosine_embedding),
    "nn.embedding": _embedding, "nn.group_norm": _group_norm, "nn.instance_norm": _group_norm,
    "nn.softmax_grad": composition(_softmax_grad), "nn.log_softmax_grad": composition(_log_softmax_grad),
    **{f"nn.lp_pool{n}d": _lp_pool(f"lp_pool{n}d") for n in (1, 2, 3)},
    "nn.nll_loss": composition(_nll_loss),
    "nn.linear": _linear, "nn.margin_ranking_loss": _ranking, "nn.normalize": composition(_normalize),
    "nn.pairwise_distance": composition(_distance), "nn.scaled_dot_product_attention": _attention,
    "nn.softmin": composition(lambda x, axis: arrays.softmax(-x, axis=axis)),
    "nn.triplet_margin_loss": composition(_triplet),
    **{f"nn.conv{kind}{n}d": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
    **{f"nn.{kind}_pool{n}d": _pool for kind in _POOLS for n in (1, 2, 3)},
})  # fmt: skip
