"""Rules of layers for a batch, added to `BATCH_RULES`.

Layers have an axis of images already, which takes the batch axis in (`_merged`). If weights differ between
examples, the channels of all examples follow one another, in as many groups (`_convolution`).
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..backends.base import ArraySpec
from ..devices import gather
from ._batched import BATCH_RULES, Batch, BatchRule, layouts_of, refuse_batch, remade

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
nn = later("trio_accel.nn")


def _shaped(batch: Batch, step: Any, result: Any) -> Any:
    """Return the results of a call in the shapes of the examples' results."""
    layouts = layouts_of(step)
    if isinstance(layouts, ArraySpec):
        return arrays.reshape(result, (batch.size, *layouts.shape))
    return [arrays.reshape(result[k], (batch.size, *layout.shape)) for k, layout in enumerate(layouts)]


def _merged(names: Sequence[str], dims: int, batch: Batch, step: Any) -> Any:
    """Call a layer again, with the examples among its images.

    Args:
        names: The arrays of images; others must be the same for all examples.
        dims: The number of their axes after the channels; an array with a single image may lack its axis.
        batch: The batch.
        step: The call.
    """
    args = batch.args(step)
    if extra := [key for key, value in args.items() if key not in names and batch.has(value)]:
        raise refuse_batch(step.function.name, f"{extra[0]} differs between examples")
    for key in names:
        images, example = batch.spread(args[key]), args[key].shape
        if len(example) == dims + 2:
            images = arrays.reshape(images, (batch.size * example[0], *example[1:]))
        args[key] = images
    if "input_size" in args:
        count, *rest = (1, *args["input_size"])[-2 - dims :]
        args["input_size"] = (batch.size * count, *rest)
    return _shaped(batch, step, remade(step, args))


def _merged_sized(names: Sequence[str], batch: Batch, step: Any) -> Any:
    """Call the gradient of a layer again, which gets the shape of its input."""
    return _merged(names, len(batch.args(step)["input_size"]) - 2, batch, step)


def _or_composition(rule: BatchRule, names: Sequence[str], compose: Callable[..., Any]) -> BatchRule:
    """Use a rule if only these arrays differ between examples, or else a composition for one example."""

    def choose(batch: Batch, step: Any) -> Any:
        args = batch.args(step)
        is_usual = not any(batch.has(value) for key, value in args.items() if key not in names)
        return rule(batch, step) if is_usual else batch.run_as(step, compose(**args))

    return choose


# Convolutions.


def _side_by_side(batch: Batch, images: Any) -> Any:
    """Return images with the channels of all examples."""
    _, count, channels, *rest = images.shape
    return arrays.reshape(arrays.moveaxis(images, 0, 1), (count, batch.size * channels, *rest))


def _apart(batch: Batch, images: Any) -> Any:
    """Return the images of each example from images with the channels of all."""
    count, channels, *rest = images.shape
    split = arrays.reshape(images, (count, batch.size, channels // max(batch.size, 1), *rest))
    return arrays.moveaxis(split, 1, 0)


def _rows(batch: Batch, weight: Any) -> Any:
    """Return the weights of all examples along the first axis."""
    wide = batch.spread(weight)
    return arrays.reshape(wide, (batch.size * weight.shape[0], *weight.shape[1:]))


def _convolution(dims: int, batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    weight, bias = args["weight"], args["bias"]
    if batch.has(bias) or (bias is not None and batch.has(weight)):
        line = (-1, *(1,) * dims)
        return batch.run(remade(step, args | {"bias": None}) + arrays.reshape(bias, line))
    if not batch.has(weight):
        return _merged(("input",), dims, batch, step)
    images = _side_by_side(batch, batch.spread(args["input"], dims + 2))
    changed = {"input": images, "weight": _rows(batch, weight), "groups": batch.size * args["groups"]}
    return _shaped(batch, step, _apart(batch, remade(step, args | changed)))


def _convolution_input(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    # A single image may lack the axis of images.
    count, channels, *rest = (1, *args["input_size"])[-len(args["weight"].shape) :]
    if not batch.has(args["weight"]):
        return _merged(("grad_output",), len(rest), batch, step)
    changed = {
        "input_size": (count, batch.size * channels, *rest),
        "weight": _rows(batch, args["weight"]),
        "grad_output": _side_by_side(batch, batch.spread(args["grad_output"], len(rest) + 2)),
        "groups": batch.size * args["groups"],
    }
    return _shaped(batch, step, _apart(batch, remade(step, args | changed)))


def _convolution_weight(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    count, *rest = args["weight_size"]
    ndim = len(rest) + 1
    changed = {
        "input": _side_by_side(batch, batch.spread(args["input"], ndim)),
        "weight_size": (batch.size * count, *rest),
        "grad_output": _side_by_side(batch, batch.spread(args["grad_output"], ndim)),
        "groups": batch.size * args["groups"],
    }
    return _shaped(batch, step, remade(step, args | changed))


# Norms.


def _merged_norm(batch: Batch, step: Any) -> Any:
    return _merged(_NORMALIZED, len(batch.args(step)["x"].shape) - 2, batch, step)


def _line(factors: Any, x: Any) -> Any:
    """Return factors of channels in a shape that broadcasts to `x`; a number stays a number."""
    return arrays.reshape(factors, (-1, *(1,) * (len(x.shape) - 2))) if np.shape(factors) else factors


def _scaled(x: Any, axes: Sequence[int], eps: float) -> Any:
    centred = x - arrays.mean(x, axis=tuple(axes), keepdims=True)
    return centred * arrays.rsqrt(arrays.mean(centred * centred, axis=tuple(axes), keepdims=True) + eps)


def _batch_norm(x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, eps: float) -> Any:
    root = arrays.rsqrt(_line(running_var, x) + eps)
    return (x - _line(running_mean, x)) * root * _line(weight, x) + _line(bias, x)


def _batch_norm_training(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    if running_mean is not None or running_var is not None:
        raise refuse_batch("nn.batch_norm_training", "it changes running statistics")
    axes = (0, *range(2, len(x.shape)))
    normal = _scaled(x, axes, eps) * _line(weight, x) + _line(bias, x)
    return gather(normal, arrays.mean(x, axis=axes), arrays.var(x, axis=axes))


def _instance_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _scaled(x, range(2, len(x.shape)), eps) * _line(weight, x) + _line(bias, x)


def _group_norm(x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    shape = (x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])
    normal = _scaled(arrays.reshape(x, shape), range(2, len(shape)), eps)
    return arrays.reshape(normal, x.shape) * _line(weight, x) + _line(bias, x)


# Other layers.


def _linear(x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    product = x @ arrays.matrix_transpose(weight)
    output = product if bias is None else product + bias
    if activation is None:
        return output
    return nn.relu(output) if activation == "relu" else nn.gelu(output, "tanh")


def _with_leading(name: str, batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    return remade(step, args | {name: batch.value(args[name])})


def _embedding(indices: Any, weight: Any, padding_idx: int | None) -> Any:
    return arrays.take(weight, indices, axis=0)


def _attention(batch: Batch, step: Any) -> Any:
    """Put the batch axis before the heads; matrices get one head."""
    args = batch.args(step)
    ndim = max(len(args["query"].shape), 3)
    arrays_of_heads = ("grad_output", "query", "key", "value", "output")
    args |= {key: batch.spread(args[key], ndim) for key in arrays_of_heads if key in args}
    if "logsumexp" in args:
        args["logsumexp"] = batch.spread(args["logsumexp"], ndim - 1)
    args["attn_mask"] = batch.aligned(args["attn_mask"], ndim)
    args |= {key: batch.spread(args[key]) for key in ("query_lengths", "key_lengths")}
    return _shaped(batch, step, remade(step, args))


_POOLS = ("adaptive_avg", "adaptive_max", "avg", "max")
_NORMALIZED = ("x",)
BATCH_RULES.update(
    {
        **{f"nn.conv{kind}{k}d": partial(_convolution, k) for kind in ("", "_transpose") for k in (1, 2, 3)},
        **{f"nn.{kind}_pool{k}d": partial(_merged, ("input",), k) for kind in _POOLS for k in (1, 2, 3)},
        **{
            f"nn.{name}_pool_grad": partial(_merged_sized, ("grad_output",))
            for name in ("adaptive_avg", "avg")
        },
        "nn.batch_norm": _or_composition(_merged_norm, _NORMALIZED, _batch_norm),
        "nn.batch_norm_training": _or_composition(_merged_norm, (), _batch_norm_training),
        "nn.conv_input_grad": _convolution_input,
        "nn.conv_weight_grad": _convolution_weight,
        "nn.embedding": _or_composition(partial(_with_leading, "indices"), ("indices",), _embedding),
        "nn.group_norm": _or_composition(_merged_norm, _NORMALIZED, _group_norm),
        "nn.instance_norm": _or_composition(_merged_norm, _NORMALIZED, _instance_norm),
        "nn.linear": _or_composition(partial(_with_leading, "x"), ("x",), _linear),
        "nn.max_pool_grad": partial(_merged_sized, ("grad_output", "indices")),
        "nn.scaled_dot_product_attention": _attention,
        "nn.scaled_dot_product_attention_grad": _attention,
    }
)
