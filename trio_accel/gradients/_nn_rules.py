"""Gradients of layers, losses, norms and pools; most of them are functions of `nn`."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from .. import arrays as _arrays
from .._names import later
from ._backward import RULES, Make, bound, is_operand, refuse
from ._elementwise import Rule, slopes_of
from ._factor_rules import added
from ._rows import of_real
from ._rules import composition, spread
from ._scatter import added_at, is_ordered

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
nn = later("trio_accel.nn")
nn_losses = later("trio_accel.nn._losses")


def _bound(call: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of an `nn` function, and its arguments with their defaults, except `out`."""
    return call.function.name.removeprefix("nn."), bound(call)


def _first(call: Any, g: Any) -> Iterator[Rule]:
    """The gradient of the first argument is a function of `nn`, of the same arguments."""
    args = bound(call)
    slope = getattr(nn, f"{call.function.name.partition('.')[2]}_grad")
    yield next(iter(args.values())), partial(slope, g, **args)
    yield from _by_others(call, g, 1)


def _by_others(call: Any, g: Any, first: int) -> Iterator[Rule]:
    """The gradients of a loss by its later inputs, such as the target, are derived from its expression."""
    args = bound(call)
    if call.function.name not in nn_losses.LOSSES:
        return
    loss = nn_losses.LOSSES[call.function.name](**args)
    names = [name for name in loss.inputs if is_operand(args[name])]

    def slopes() -> list[Rule]:
        losses, x = loss.elementwise(**args), args[loss.inputs[0]]
        # It is not computed, unless its derivatives are made of it.
        losses.silence()
        counts = {"mean": x.size, "batchmean": x.shape[0] if x.shape else 1}
        rules = slopes_of(losses, g / counts.get(args["reduction"], 1), is_exact=False)
        assert rules is not None  # it is a call of an expression
        return list(rules)

    cached_slopes = cache(slopes)
    for index, name in enumerate(names):
        if name in loss.inputs[first:]:
            yield args[name], partial(_of_rule, cached_slopes, index)


def _of_rule(make: Callable[[], list[Rule]], index: int) -> Any:
    return make()[index][1]()


def _activated(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    output = nn.linear(x, weight, bias)
    return nn.relu(output) if activation == "relu" else nn.gelu(output, "tanh")


def _linear(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, weight, bias = args["x"], args["weight"], args["bias"]
    if args["activation"] is not None:
        yield from composition(_activated)(call, g)
        return
    flat = cache(lambda: arrays.reshape(g, (-1, weight.shape[0])))
    yield x, lambda: g @ weight
    yield weight, lambda: flat().mT @ arrays.reshape(x, (-1, weight.shape[1]))
    yield bias, lambda: arrays.sum(flat(), axis=0)


def _attention(call: Any, g: Any) -> Iterator[Rule]:
    name, args = _bound(call)
    inputs = [args.pop(parameter) for parameter in ("query", "key", "value")]
    of_output, of_sums = g if args.pop("return_lse") else (g, None)
    if of_sums is not None:
        raise refuse(call.function.name, "the sums of return_lse have no rule")
    del args["dropout_p"]

    def slopes() -> Any:
        output, lse = getattr(nn, name)(*inputs, **args, return_lse=True)
        return getattr(nn, f"{name}_grad")(of_output, *inputs, output, lse, **args)

    yield from _slope_pairs(cache(slopes), *inputs)


def _slope_pairs(make: Callable[[], Any], *arguments: Any) -> Iterator[Rule]:
    """Yield arguments with their gradients, which are the results of one call."""
    for index, argument in enumerate(arguments):
        yield argument, partial(_result, make, index)


def _result(make: Callable[[], Any], index: int) -> Any:
    return make()[index]


def _convolution(call: Any, g: Any) -> Iterator[Rule]:
    name, args = _bound(call)
    x, weight = args["input"], args["weight"]
    how = {option: args[option] for option in ("stride", "padding", "dilation", "groups")}
    if "transpose" in name:
        # A padding of the output by the stride or more leaves room for further elements of the input: they
        # are 0.
        back = cache(lambda: getattr(nn, name.replace("_transpose", ""))(g, weight, **how))
        yield x, lambda: back()[tuple(map(slice, x.shape))]

        def of_weight() -> Any:
            widths = [(0, wide - extent) for wide, extent in zip(back().shape, x.shape, strict=True)]
            padded = arrays.pad(x, widths) if any(after for _, after in widths) else x
            # Only its shape is used.
            back().silence()
            return nn.conv_weight_grad(g, weight.shape, padded, **how)

        yield weight, of_weight
    else:
        yield x, partial(nn.conv_input_grad, x.shape, weight, g, **how)
        yield weight, partial(nn.conv_weight_grad, x, weight.shape, g, **how)
    yield args["bias"], lambda: nn.conv_bias_grad(_images(name, g))


def _images(name: str, array: Any) -> Any:
    """Return an array as several images; the function's name contains the number of their axes."""
    return arrays.reshape(array, (1, *array.shape)[-2 - int(name[-2]) :])


def _pool(call: Any, g: Any) -> Iterator[Rule]:
    name, args = _bound(call)
    x = args.pop("input")
    # The other result are indices.
    several: Any = g
    of_result = several[0] if isinstance(g, list) else several
    shape = (1, *x.shape)[-2 - int(name[-2]) :]

    def slope() -> Any:
        if "max" in name:
            pooled = getattr(nn, name)(arrays.reshape(x, shape), **args | {"return_indices": True})
            return nn.max_pool_grad(_images(name, of_result), pooled[1], shape)
        if "adaptive" in name:
            return nn.adaptive_avg_pool_grad(_images(name, of_result), shape)
        return nn.avg_pool_grad(_images(name, of_result), shape, **args)

    yield x, lambda: arrays.reshape(slope(), x.shape)


def _batch_norm_training(call: Any, g: Any) -> Iterator[Rule]:
    """The statistics also depend on the elements. Running statistics are not operands."""
    args = bound(call)
    x, (of_y, of_mean, of_var) = args["x"], g
    axes = tuple(axis for axis in range(len(x.shape)) if axis != 1)
    share = x.shape[1] / math.prod(x.shape)
    slopes = cache(lambda: nn.batch_norm_training_grad(of_y, x, args["weight"], eps=args["eps"]))

    def slope() -> Any:
        total: Any = None if of_y is None else slopes()[0]
        if of_mean is not None:
            total = added(total, spread(of_mean * share, x, axes))
        if of_var is not None:
            total = added(total, spread(of_var * (2 * share), x, axes) * (x - spread(call[1], x, axes)))
        return total if total.dtype == x.dtype else total.cast(x.dtype)

    yield x, slope
    yield args["weight"], lambda: None if of_y is None else slopes()[1]
    yield args["bias"], lambda: None if of_y is None else slopes()[2]


def _dropout(call: Any, g: Any) -> Iterator[Rule]:
    """The mask is a result of the call, which draws it once."""
    args = bound(call)
    yield args["x"], lambda: nn.dropout_grad(g[0], call[1], args["p"])


def _embedding(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    weight, indices, padding = args["weight"], args["indices"], args["padding_idx"]

    def slope() -> Any:
        if is_ordered(g):
            return nn.embedding_grad(g, indices, weight.shape[0], padding)
        masked = g
        if padding is not None:
            masked = arrays.where((indices == padding % weight.shape[0])[..., None], 0, g)
        return added_at(weight, [indices], masked)

    yield weight, slope


def _lp_pool(name: str) -> Make:
    def compose(input: Any, norm_type: float, ceil_mode: bool, **named: Any) -> Any:  # noqa: A002  # PyTorch's
        pool = getattr(nn, name.replace("lp", "avg"))
        sums = pool(arrays.abs(input) ** norm_type, ceil_mode=ceil_mode, divisor_override=1, **named)
        return sums ** (1 / norm_type)

    return composition(compose)


# Their slopes by hand also hold at zeros and infinities; the slope of `glu` is a single launch.
_FIRST = (
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "glu",
    "huber_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
)
_POOLS = ("adaptive_avg", "adaptive_max", "avg", "max")
RULES.update({
    **{f"nn.{name}": _first for name in _FIRST},
    "arrays.softmax": of_real(_first), "arrays.log_softmax": of_real(_first),
    "nn.batch_norm_training": _batch_norm_training, "nn.dropout": _dropout,
    "nn.embedding": _embedding,
    **{f"nn.lp_pool{n}d": _lp_pool(f"lp_pool{n}d") for n in (1, 2, 3)},
    "nn.linear": _linear,
    "nn.scaled_dot_product_attention": _attention,
    **{f"nn.conv{kind}{n}d": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
    **{f"nn.{kind}_pool{n}d": _pool for kind in _POOLS for n in (1, 2, 3)},
})  # fmt: skip
