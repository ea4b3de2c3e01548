"""The gradients of operations, one line for each: of a call with its arguments by name, and of a slope."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from .. import arrays as _arrays
from .. import linalg as _linalg
from .. import nn as _nn

__all__ = ["CONSTANT", "ELEMENTS", "RULES", "summed_to"]

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays
linalg: Any = _linalg
nn: Any = _nn

Rule: TypeAlias = Callable[[Any, Any], Any]
Rules: TypeAlias = Mapping[str, Mapping[str, Rule]]
where: Any = arrays.where

# The results do not change with small changes of the arguments.
CONSTANT = frozenset({
    f"arrays.{name}"
    for name in (
        *("all", "any", "argmax", "argmin", "argsort", "ceil", "count_nonzero", "equal", "floor"),
        *("full_like", "greater", "greater_equal", "heaviside", "isclose", "isfinite", "isinf", "isnan", "less"),
        *("less_equal", "logical_and", "logical_not", "logical_or", "logical_xor", "not_equal", "one_hot"),
        *("ones_like", "round", "searchsorted", "sign", "signbit", "trunc", "zeros_like"),
    )
})  # fmt: skip


def _of_first(function: str) -> dict[str, Rule]:
    """Take the gradient for the first argument that `nn` has, with the arguments of the function."""

    def rule(s: Any, g: Any) -> Any:
        return getattr(nn, f"{function}_grad")(
            g, **{name: s.given[name] for name in s.given if name != "out"}
        )

    return dict.fromkeys(("x", "logits", "x1"), rule)


def _half(s: Any, is_more: Any, g: Any) -> Any:
    """Share a slope out where both are the same."""
    return where(s.x1 == s.x2, 0.5 * g, where(is_more, g, 0))


def _one_less(exponent: Any) -> Any:
    if isinstance(exponent, (int, float)):
        return exponent - 1 if exponent else 1
    return where(exponent == 0, 1, exponent - 1)


def summed_to(g: Any, shape: Sequence[int], to: Sequence[int]) -> Any:
    """Sum over the axes along which an array was broadcast.

    Args:
        g: The gradient.
        shape: Its shape.
        to: The shape of the array.
    """
    ahead = len(shape) - len(to)
    axes = tuple(axis for axis in range(len(shape)) if axis < ahead or to[axis - ahead] < shape[axis])
    return arrays.reshape(arrays.sum(g, axis=axes), tuple(to)) if axes else g


_ROOT_OF_PI = math.sqrt(math.pi)
_OF_ONE: dict[str, Rule] = {
    "abs": lambda s, g: g * arrays.sign(s.x),
    "acos": lambda s, g: -g * arrays.rsqrt(1 - s.x * s.x),
    "acosh": lambda s, g: g * arrays.rsqrt(s.x * s.x - 1),
    "asin": lambda s, g: g * arrays.rsqrt(1 - s.x * s.x),
    "asinh": lambda s, g: g * arrays.rsqrt(s.x * s.x + 1),
    "atan": lambda s, g: g / (1 + s.x * s.x),
    "atanh": lambda s, g: g / (1 - s.x * s.x),
    "cbrt": lambda s, g: g / (3 * s.call * s.call),
    "clip": lambda s, g: where(s.x == s.call, g, 0),
    "cos": lambda s, g: -g * arrays.sin(s.x),
    "cosh": lambda s, g: g * arrays.sinh(s.x),
    "degrees": lambda s, g: g * (180 / math.pi),
    "erf": lambda s, g: g * (2 / _ROOT_OF_PI) * arrays.exp(-s.x * s.x),
    "erfc": lambda s, g: g * (-2 / _ROOT_OF_PI) * arrays.exp(-s.x * s.x),
    "exp": lambda s, g: g * s.call,
    "exp2": lambda s, g: g * s.call * math.log(2),
    "expit": lambda s, g: g * s.call * (1 - s.call),
    "expm1": lambda s, g: g * (s.call + 1),
    "gammaln": lambda s, g: g * arrays.digamma(s.x),
    "log": lambda s, g: g / s.x,
    "log10": lambda s, g: g / (s.x * math.log(10)),
    "log1p": lambda s, g: g / (1 + s.x),
    "log2": lambda s, g: g / (s.x * math.log(2)),
    "log_expit": lambda s, g: g * arrays.expit(-s.x),
    "logit": lambda s, g: g / (s.x * (1 - s.x)),
    "negative": lambda s, g: -g,
    "positive": lambda s, g: g,
    "radians": lambda s, g: g * (math.pi / 180),
    "reciprocal": lambda s, g: -g * s.call * s.call,
    "rsqrt": lambda s, g: -0.5 * g * s.call / s.x,
    "sin": lambda s, g: g * arrays.cos(s.x),
    "sinh": lambda s, g: g * arrays.cosh(s.x),
    "sqrt": lambda s, g: 0.5 * g / s.call,
    "square": lambda s, g: 2 * g * s.x,
    "tan": lambda s, g: g * (1 + s.call * s.call),
    "tanh": lambda s, g: g * (1 - s.call * s.call),
}
_OF_TWO: dict[str, tuple[Rule, Rule]] = {
    "add": (lambda s, g: g, lambda s, g: g),
    "atan2": (
        lambda s, g: g * s.x2 / (s.x1 * s.x1 + s.x2 * s.x2),
        lambda s, g: -g * s.x1 / (s.x1 * s.x1 + s.x2 * s.x2),
    ),
    "divide": (lambda s, g: g / s.x2, lambda s, g: -g * s.call / s.x2),
    "fmax": (lambda s, g: _half(s, s.x1 > s.x2, g), lambda s, g: _half(s, s.x1 < s.x2, g)),
    "fmin": (lambda s, g: _half(s, s.x1 < s.x2, g), lambda s, g: _half(s, s.x1 > s.x2, g)),
    "hypot": (lambda s, g: g * s.x1 / s.call, lambda s, g: g * s.x2 / s.call),
    "logaddexp": (
        lambda s, g: g * arrays.exp(s.x1 - s.call),
        lambda s, g: g * arrays.exp(s.x2 - s.call),
    ),
    "maximum": (lambda s, g: _half(s, s.x1 > s.x2, g), lambda s, g: _half(s, s.x1 < s.x2, g)),
    "minimum": (lambda s, g: _half(s, s.x1 < s.x2, g), lambda s, g: _half(s, s.x1 > s.x2, g)),
    "multiply": (lambda s, g: g * s.x2, lambda s, g: g * s.x1),
    # Neither 0 to a power below 0 nor the logarithm of 0 counts where its factor is 0.
    "pow": (
        lambda s, g: g * s.x2 * s.x1 ** _one_less(s.x2),
        lambda s, g: g * s.call * arrays.log(where(s.x1 == 0, 1, s.x1)),
    ),
    "subtract": (lambda s, g: g, lambda s, g: -g),
}
ELEMENTS: Rules = {
    **{f"arrays.{name}": {"x": rule} for name, rule in _OF_ONE.items()},
    **{f"arrays.{name}": {"x1": first, "x2": second} for name, (first, second) in _OF_TWO.items()},
    "arrays.lerp": {
        "x1": lambda s, g: g * (1 - s.weight),
        "x2": lambda s, g: g * s.weight,
        "weight": lambda s, g: g * (s.x2 - s.x1),
    },
    "arrays.where": {
        "x1": lambda s, g: where(s.condition, g, 0),
        "x2": lambda s, g: where(s.condition, 0, g),
    },
    "nn.prelu": {
        "x": lambda s, g: nn.prelu_grad(g, s.x, s.weight),
        "weight": lambda s, g: g * arrays.minimum(s.x, 0),
    },
    **{
        f"nn.{name}": _of_first(name)
        for name in (
            *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
            *("log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink"),
            *("softsign", "tanhshrink", "threshold"),
        )
    },
}


def _axes(s: Any) -> tuple[int, ...]:
    """The axes of a reduction."""
    ndim = len(s.x.shape)
    return tuple(range(ndim)) if s.axis is None else tuple(int(axis) % ndim for axis in np.atleast_1d(s.axis))


def _spread(s: Any, g: Any) -> Any:
    """Give each element that was reduced the slope of the result."""
    kept = tuple(1 if axis in _axes(s) else extent for axis, extent in enumerate(s.x.shape))
    return arrays.broadcast_to(arrays.reshape(g, kept), s.x.shape)


def _count(s: Any) -> int:
    return math.prod(s.x.shape[axis] for axis in _axes(s))


def _extremes(s: Any, g: Any) -> Any:
    """Share a slope out among all elements that are the largest, or the smallest."""
    chosen = arrays.where(s.x == _spread(s, s.call), 1.0, 0.0)
    return _spread(s, g / arrays.sum(chosen, axis=_axes(s), keepdims=s.keepdims)) * chosen


def _deviations(s: Any, g: Any) -> Any:
    off = s.x - arrays.mean(s.x, axis=_axes(s), keepdims=True)
    return _spread(s, g) * off * (1 / (_count(s) - s.correction))


def _accumulated(s: Any, g: Any) -> Any:
    if s.include_initial:
        s.refuse("with include_initial has no gradient")
    axis = 0 if s.axis is None else s.axis
    return arrays.flip(arrays.cumulative_sum(arrays.flip(g, axis=axis), axis=axis), axis=axis)


def _length(s: Any, g: Any) -> Any:
    if s.ord != 2:
        s.refuse(f"with ord={s.ord!r} has no gradient")
    return s.x * _spread(s, where(s.call == 0, 0, g / s.call))


def _turned(s: Any, g: Any) -> Any:
    """Turn axes back: where each of them has gone, NumPy tells."""
    name = s.name.rpartition(".")[2]
    tags = np.empty(tuple(range(2, 2 + len(s.x.shape))), np.int8)
    rest = {one: given for one, given in s.given.items() if one not in ("x", "rest")}
    if name in ("T", "mT", "matrix_transpose"):
        turned = tags.T if name == "T" else tags.swapaxes(-1, -2)
    elif name == "transpose":
        turned = tags.transpose(*s.rest)
    else:
        turned = {"permute_dims": np.transpose}.get(name, getattr(np, name))(tags, *rest.values())
    return arrays.permute_dims(g, tuple(turned.shape.index(extent) for extent in tags.shape))


def _taken(s: Any, g: Any) -> Any:
    """Put a part by numbers and slices back, with zeros around it."""
    shape, (key,) = s.x.shape, s.rest
    keys = [one for one in (key if isinstance(key, tuple) else (key,)) if one is not None]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    keys += [slice(None)] * (len(shape) - len(keys))
    widths, kept = list[tuple[int, int]](), list[int]()
    for one, extent in zip(keys, shape, strict=True):
        part = slice(one % extent, one % extent + 1) if isinstance(one, int) else one
        if not isinstance(part, slice) or part.step not in (None, 1):
            s.refuse("has a gradient by numbers and slices of step 1 alone")
        first, stop, _ = part.indices(extent)
        widths.append((first, extent - max(first, stop)))
        kept.append(max(stop - first, 0))
    return arrays.pad(arrays.reshape(g, tuple(kept)), widths)


def _unpadded(s: Any, g: Any) -> Any:
    if s.mode != "constant":
        s.refuse(f"with mode={s.mode!r} has no gradient")
    widths = np.broadcast_to(s.pad_width, (len(s.x.shape), 2))
    return g[
        tuple(
            slice(int(first), int(first) + extent)
            for (first, _), extent in zip(widths, s.x.shape, strict=True)
        )
    ]


def _along(s: Any, key: object, ndim: int) -> tuple[Any, ...]:
    return (slice(None),) * (s.axis % ndim) + (key,)


def _of_joined(s: Any, g: Any) -> Any:
    ndim = len(s.shape)
    extents = [one.shape[s.axis] for one in s.arrays]
    first = sum(extents[: s.place])
    return g[_along(s, slice(first, first + extents[s.place]), ndim)]


def _of_parts(s: Any, g: Mapping[int, Any]) -> Any:
    """Join the slopes of parts; those that nothing depends on are zeros."""
    parts = [
        g[place] if place in g else arrays.zeros_like(s.call.part(place))
        for place in range(len(s.call.ahead))
    ]
    joined = arrays.stack if s.name == "arrays.unstack" else arrays.concat
    return joined(parts, axis=s.axis)


def _of_rows(s: Any, g: Any) -> Any:
    """Add slopes up where their elements were taken from, along one axis."""
    shape, indices = s.x.shape, s.indices
    axis = 0 if s.axis is None else s.axis % len(shape)
    count, ndim = shape[axis], len(indices.shape)
    ahead = arrays.moveaxis(g, tuple(range(axis, axis + ndim)), tuple(range(ndim))) if axis else g
    rest = shape[:axis] + shape[axis + 1 :]
    rows = arrays.reshape(ahead, (*indices.shape, math.prod(rest)))
    made = nn.embedding_grad(rows, where(indices < 0, indices + count, indices), count)
    made = arrays.reshape(made, (count, *rest))
    return arrays.moveaxis(made, 0, axis) if axis else made


def _as_matrix(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of a factor of a product, where a vector is a matrix with an axis of 1."""
    return tuple(shape) if len(shape) > 1 else tuple(np.expand_dims(np.empty(shape), axis).shape)


def _of_factor(s: Any, g: Any) -> tuple[Any, Any]:
    """Return the gradients of both factors of a product: what makes them."""
    a, b = _as_matrix(s.a.shape, 0), _as_matrix(s.b.shape, 1)
    stacks = np.broadcast_shapes(a[:-2], b[:-2])

    def slope() -> Any:
        return arrays.reshape(g, (*stacks, a[-2], b[-1]))

    def of_a() -> Any:
        made = slope() @ arrays.reshape(s.b, b).mT
        return arrays.reshape(summed_to(made, (*stacks, *a[-2:]), a), s.a.shape)

    def of_b() -> Any:
        made = arrays.reshape(s.a, a).mT @ slope()
        return arrays.reshape(summed_to(made, (*stacks, *b[-2:]), b), s.b.shape)

    return of_a, of_b


def _einsum(s: Any, g: Any) -> Any:
    """Contract the slope with all other operands; what is summed in one alone is spread."""
    names, _, result = s.subscripts.replace(" ", "").partition("->")
    inputs = names.split(",")
    if "->" not in s.subscripts:
        result = "".join(sorted(one for one in {*names} - {","} if names.count(one) == 1))
    own = inputs[s.place]
    if "." in s.subscripts or len({*own}) < len(own):
        s.refuse("with an ellipsis, or an index twice in one operand, has no gradient")
    others = [
        (one, array)
        for place, (one, array) in enumerate(zip(inputs, s.operands, strict=True))
        if place != s.place
    ]
    known = {*result, *"".join(one for one, _ in others)}
    made = "".join(one for one in own if one in known)
    text = ",".join([result, *[one for one, _ in others]]) + "->" + made
    shape = s.operands[s.place].shape
    kept = tuple(extent if one in known else 1 for one, extent in zip(own, shape, strict=True))
    found = linalg.einsum(text, g, *[array for _, array in others])
    return arrays.broadcast_to(arrays.reshape(found, kept), shape) if kept != shape else found


def _flat(s: Any, array: Any, columns: int) -> Any:
    """Return the slope or the argument of `linear` as a matrix."""
    if s.activation is not None:
        s.refuse("with an activation has no gradient: call that by itself")
    return arrays.reshape(array, (-1, columns))


def _attention(s: Any, g: Any) -> Any:
    """Compute the three gradients of an attention, whose logarithms are computed again."""

    def make() -> Any:
        options = {name: one for name, one in s.given.items() if name not in ("query", "key", "value", "out")}
        given = s.query, s.key, s.value
        again = nn.scaled_dot_product_attention(*given, **options | {"return_lse": True})
        del options["dropout_p"], options["return_lse"]
        return nn.scaled_dot_product_attention_grad(g, *given, again.part(0), again.part(1), **options)

    if s.return_lse:
        s.refuse("with return_lse has no gradient")
    return s.shared(make)


def _normed(function: str, *options: str) -> dict[str, Rule]:
    """Take the gradients of a norm that `nn` has."""

    def make(s: Any, g: Any) -> Any:
        if isinstance(g, dict):
            if g.keys() != {0}:
                s.refuse("has no gradient by the means and variances")
            g = g[0]
        given = {name: s.given[name] for name in options}
        return s.shared(lambda: getattr(nn, f"{function}_grad")(g, s.x, weight=s.weight, eps=s.eps, **given))

    def of_bias(s: Any, g: Any) -> Any:
        """Sum the slope: the bias need not have the shape of the factors."""
        if function != "layer_norm":
            return make(s, g).part("bias")
        return summed_to(g, s.shape, s.bias.shape)

    rules: dict[str, Rule] = {
        "x": lambda s, g: make(s, g).part("x"),
        "weight": lambda s, g: make(s, g).part("weight"),
    }
    return rules if function == "rms_norm" else {**rules, "bias": of_bias}


def _windows(s: Any, *more: str) -> dict[str, Any]:
    return {name: s.given[name] for name in ("stride", "padding", *more)}


def _of_largest(s: Any, g: Any) -> Any:
    if s.return_indices:
        s.refuse("with return_indices has no gradient")
    again = getattr(nn, s.name.partition(".")[2])(
        s.input, s.kernel_size, return_indices=True, **_windows(s, "dilation", "ceil_mode")
    )
    return nn.max_pool_grad(g, again.part(1), s.input.shape)


def _spread_along(s: Any, g: Any, other: Any, own: Any) -> Any:
    """Give the gradient of one vector of products along an axis."""
    shape = np.broadcast_shapes(s.x1.shape, s.x2.shape)
    return summed_to(arrays.expand_dims(g, axis=s.axis) * other, shape, own.shape)


_CONVOLUTION: dict[str, Rule] = {
    "input": lambda s, g: nn.conv_input_grad(s.input.shape, s.weight, g, **_windows(s, "dilation", "groups")),
    "weight": lambda s, g: nn.conv_weight_grad(
        s.input, s.weight.shape, g, **_windows(s, "dilation", "groups")
    ),
    "bias": lambda s, g: arrays.sum(g, axis=(0, *range(2, len(s.shape)))),
}
_MEAN_OF_WINDOWS: dict[str, Rule] = {
    "input": lambda s, g: nn.avg_pool_grad(
        g, s.input.shape, s.kernel_size, **_windows(s, "ceil_mode", "count_include_pad", "divisor_override")
    )
}
_ADAPTED: dict[str, Rule] = {"input": lambda s, g: nn.adaptive_avg_pool_grad(g, s.input.shape)}
_TURNED: dict[str, Rule] = {"x": _turned}
_RANKING = _of_first("margin_ranking_loss")["x1"]
_RESHAPED: dict[str, Rule] = {"x": lambda s, g: arrays.reshape(g, s.x.shape)}
_EINSUM: dict[str, Rule] = {"operands": _einsum}


def _of_loss(function: str, *, is_even: bool = False) -> dict[str, Rule]:
    """Take the gradient that `nn` has; where only the difference counts, the target's has the other sign."""
    rules = _of_first(function)
    return {**rules, "target": lambda s, g: -rules["x"](s, g)} if is_even else rules


RULES: Rules = {
    "AccelRef.T": _TURNED,
    "AccelRef.__getitem__": {"x": _taken},
    "AccelRef.copy": {"x": lambda s, g: g},
    "AccelRef.mT": _TURNED,
    "AccelRef.reshape": _RESHAPED,
    "AccelRef.transpose": _TURNED,
    "arrays.broadcast_to": {"x": lambda s, g: summed_to(g, s.shape, s.x.shape)},
    "arrays.concat": {"arrays": _of_joined},
    "arrays.cumulative_sum": {"x": _accumulated},
    "arrays.expand_dims": _RESHAPED,
    "arrays.flip": {"x": lambda s, g: arrays.flip(g, axis=s.axis)},
    "arrays.layer_norm": _normed("layer_norm", "axis"),
    "arrays.log_softmax": {"x": lambda s, g: nn.log_softmax_grad(g, s.x, axis=s.axis)},
    "arrays.logsumexp": {"x": lambda s, g: _spread(s, g) * arrays.softmax(s.x, axis=_axes(s))},
    "arrays.matrix_transpose": _TURNED,
    "arrays.max": {"x": _extremes},
    "arrays.mean": {"x": lambda s, g: _spread(s, g) * (1 / _count(s))},
    "arrays.min": {"x": _extremes},
    "arrays.moveaxis": _TURNED,
    "arrays.pad": {"x": _unpadded},
    "arrays.permute_dims": _TURNED,
    "arrays.reshape": _RESHAPED,
    "arrays.rms_norm": _normed("rms_norm", "axis"),
    "arrays.roll": {"x": lambda s, g: arrays.roll(g, np.negative(s.shift).tolist(), axis=s.axis)},
    "arrays.softmax": {"x": lambda s, g: nn.softmax_grad(g, s.x, axis=s.axis)},
    "arrays.split": {"x": _of_parts},
    "arrays.squeeze": _RESHAPED,
    "arrays.stack": {"arrays": lambda s, g: g[_along(s, s.place, len(s.shape))]},
    "arrays.std": {"x": lambda s, g: _deviations(s, g / s.call)},
    "arrays.sum": {"x": lambda s, g: _spread(s, g)},
    "arrays.swapaxes": _TURNED,
    "arrays.take": {"x": _of_rows},
    "arrays.tril": {"x": lambda s, g: arrays.tril(g, k=s.k)},
    "arrays.triu": {"x": lambda s, g: arrays.triu(g, k=s.k)},
    "arrays.unstack": {"x": _of_parts},
    "arrays.var": {"x": lambda s, g: _deviations(s, 2 * g)},
    "linalg.dot": {"x": lambda s, g: g * s.y, "y": lambda s, g: g * s.x},
    "linalg.einsum": _EINSUM,
    "linalg.matmul": {"a": lambda s, g: _of_factor(s, g)[0](), "b": lambda s, g: _of_factor(s, g)[1]()},
    "linalg.matrix_transpose": _TURNED,
    "linalg.outer": {"x1": lambda s, g: g @ s.x2, "x2": lambda s, g: s.x1 @ g},
    "linalg.vecdot": {
        "x1": lambda s, g: _spread_along(s, g, s.x2, s.x1),
        "x2": lambda s, g: _spread_along(s, g, s.x1, s.x2),
    },
    "linalg.vector_norm": {"x": _length},
    "nn.adaptive_avg_pool1d": _ADAPTED,
    "nn.adaptive_avg_pool2d": _ADAPTED,
    "nn.adaptive_avg_pool3d": _ADAPTED,
    "nn.avg_pool1d": _MEAN_OF_WINDOWS,
    "nn.avg_pool2d": _MEAN_OF_WINDOWS,
    "nn.avg_pool3d": _MEAN_OF_WINDOWS,
    "nn.batch_norm_training": _normed("batch_norm_training"),
    "nn.binary_cross_entropy": _of_loss("binary_cross_entropy"),
    "nn.binary_cross_entropy_with_logits": _of_loss("binary_cross_entropy_with_logits"),
    "nn.conv1d": _CONVOLUTION,
    "nn.conv2d": _CONVOLUTION,
    "nn.conv3d": _CONVOLUTION,
    "nn.cross_entropy": _of_loss("cross_entropy"),
    "nn.embedding": {
        "weight": lambda s, g: nn.embedding_grad(g, s.indices, s.weight.shape[0], s.padding_idx)
    },
    "nn.gaussian_nll_loss": _of_loss("gaussian_nll_loss"),
    "nn.glu": {"x": lambda s, g: nn.glu_grad(g, s.x, axis=s.axis)},
    "nn.group_norm": _normed("group_norm", "num_groups"),
    "nn.hinge_embedding_loss": _of_loss("hinge_embedding_loss"),
    "nn.huber_loss": _of_loss("huber_loss", is_even=True),
    "nn.instance_norm": _normed("instance_norm"),
    "nn.kl_div": _of_loss("kl_div"),
    "nn.l1_loss": _of_loss("l1_loss", is_even=True),
    "nn.linear": {
        "x": lambda s, g: arrays.reshape(_flat(s, g, s.weight.shape[0]) @ s.weight, s.x.shape),
        "weight": lambda s, g: _flat(s, g, s.weight.shape[0]).mT @ _flat(s, s.x, s.weight.shape[1]),
        "bias": lambda s, g: arrays.sum(_flat(s, g, s.weight.shape[0]), axis=0),
    },
    "nn.margin_ranking_loss": {
        "x1": _RANKING,
        "x2": lambda s, g: -_RANKING(s, g),
    },
    "nn.max_pool1d": {"input": _of_largest},
    "nn.max_pool2d": {"input": _of_largest},
    "nn.max_pool3d": {"input": _of_largest},
    "nn.mse_loss": _of_loss("mse_loss", is_even=True),
    "nn.poisson_nll_loss": _of_loss("poisson_nll_loss"),
    "nn.scaled_dot_product_attention": {
        name: partial(lambda name, s, g: _attention(s, g).part(name), name)
        for name in ("query", "key", "value")
    },
    "nn.smooth_l1_loss": _of_loss("smooth_l1_loss", is_even=True),
    "nn.soft_margin_loss": _of_loss("soft_margin_loss"),
    "tensor.einsum": _EINSUM,
}
