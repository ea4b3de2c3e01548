"""Gradients of functions of own operations: the calls that a function makes are its tape."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, cast

import numpy as np

from .. import arrays as _arrays
from .. import nn as _nn
from ..backends.base import NotSupportedError
from ..devices import AccelRef, Call, Chain, Function, arguments_of, called

__all__ = ["grad", "value_and_grad"]

# The types of functions tell what calls become when they are awaited.
arrays: Any = _arrays
nn: Any = _nn

Nested: TypeAlias = "AccelRef | Mapping[str, Nested] | Sequence[Nested]"
"""An array, or a dict or list of these."""
Rule: TypeAlias = "tuple[Any, Callable[[], Any]]"
"""An argument of a call, and what makes its gradient: nothing is made that nobody wants."""

# Functions whose gradient `nn` has, for the first argument.
_OF_FIRST = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "cross_entropy", "elu",
    "gaussian_nll_loss", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "leaky_relu", "log_sigmoid", "log_softmax",
    "mish", "mse_loss", "poisson_nll_loss", "relu", "relu6", "selu", "sigmoid", "silu", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softplus", "softshrink", "softsign", "tanhshrink", "threshold",
})  # fmt: skip
# The types of numbers of the host; type checkers would ask of which dtype.
_NUMBERS: Any = (int, float, np.generic)


def _slope_of_base(g: Any, a: Any, b: Any, y: Any) -> Any:
    # An exponent of 0 would multiply 0 by an infinite power of 0.
    if isinstance(b, _NUMBERS):
        return g * float(b) * a ** (float(b) - 1) if b != 0 else arrays.zeros_like(y)
    return g * arrays.where(b == 0, 0, b * a ** (b - 1))


def _slope_of_exponent(g: Any, a: Any, b: Any, y: Any) -> Any:
    if isinstance(a, _NUMBERS):
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = y * float(np.log(float(a)))
        return g * (arrays.where(b >= 0, 0, slope) if a == 0 else slope)
    # A power of 0 stays 0 if its exponent changes, and the logarithm of 0 is infinite.
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = y * (np if type(a) is np.ndarray else arrays).log(a)
    return g * arrays.where((a == 0) & (b >= 0), 0, slope)


# Functions whose results do not change with small changes of their arguments.
_STEPS = frozenset({
    "all", "any", "argmax", "argmin", "ceil", "equal", "floor", "floor_divide", "greater", "greater_equal",
    "isfinite", "isinf", "isnan", "less", "less_equal", "logical_and", "logical_not", "logical_or",
    "not_equal", "round", "sign", "signbit", "trunc",
})  # fmt: skip
# Derivatives of functions of one array: of the gradient g, the array x, and the result y.
_OF_ONE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "abs": lambda g, x, y: g * arrays.sign(x),
    "acos": lambda g, x, y: -g * arrays.rsqrt(1 - x * x),
    "asin": lambda g, x, y: g * arrays.rsqrt(1 - x * x),
    "atan": lambda g, x, y: g / (1 + x * x),
    "cos": lambda g, x, y: -g * arrays.sin(x),
    "cosh": lambda g, x, y: g * arrays.sinh(x),
    "erf": lambda g, x, y: g * (2 / math.sqrt(math.pi)) * arrays.exp(-x * x),
    "exp": lambda g, x, y: g * y,
    "exp2": lambda g, x, y: g * y * math.log(2),
    "expit": lambda g, x, y: g * y * (1 - y),
    "expm1": lambda g, x, y: g * (y + 1),
    "log": lambda g, x, y: g / x,
    "log10": lambda g, x, y: g / (x * math.log(10)),
    "log1p": lambda g, x, y: g / (1 + x),
    "log2": lambda g, x, y: g / (x * math.log(2)),
    "negative": lambda g, x, y: -g,
    "positive": lambda g, x, y: g,
    "reciprocal": lambda g, x, y: -g * y * y,
    "rsqrt": lambda g, x, y: -0.5 * g * y / x,
    "sin": lambda g, x, y: g * arrays.cos(x),
    "sinh": lambda g, x, y: g * arrays.cosh(x),
    "sqrt": lambda g, x, y: 0.5 * g / y,
    "square": lambda g, x, y: 2 * g * x,
    "tan": lambda g, x, y: g * (1 + y * y),
    "tanh": lambda g, x, y: g * (1 - y * y),
}
# Derivatives of functions of two arrays, for each of them; they are summed over what was broadcast.
_OF_TWO: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], ...]] = {
    "add": (lambda g, a, b, y: g, lambda g, a, b, y: g),
    "subtract": (lambda g, a, b, y: g, lambda g, a, b, y: -g),
    "multiply": (lambda g, a, b, y: g * b, lambda g, a, b, y: g * a),
    "divide": (lambda g, a, b, y: g / b, lambda g, a, b, y: -g * y / b),
    "maximum": (
        lambda g, a, b, y: arrays.where(a >= b, g, 0),
        lambda g, a, b, y: arrays.where(a >= b, 0, g),
    ),
    "minimum": (
        lambda g, a, b, y: arrays.where(a <= b, g, 0),
        lambda g, a, b, y: arrays.where(a <= b, 0, g),
    ),
    "pow": (_slope_of_base, _slope_of_exponent),
    "remainder": (lambda g, a, b, y: g, lambda g, a, b, y: -g * arrays.floor(a / b)),
    "prelu": (lambda g, a, b, y: nn.prelu_grad(g, a, b), lambda g, a, b, y: arrays.where(a < 0, g * a, 0)),
}


def value_and_grad(
    f: Callable[..., Any],
) -> Callable[..., Awaitable[tuple[AccelRef, Any]]]:
    """Make a function of the value and the gradients of a function of own operations.

    `f` is called once. It composes calls, awaits none, and returns one without axes. Value and gradients are
    computed as one request. Floating arrays of the first argument get gradients; those that the value does
    not depend on get zeros.

    Args:
        f: Called with the parameters and the other arguments: ``f(parameters, *arguments)``. The parameters
            are an array on a device, or dicts and lists of these; in `f` they are calls, so views of them
            are, too.

    Returns:
        An async function with the same arguments. It returns the value, an array without axes, and the
        gradients, nested as the parameters are. All are views of one array, if they have one dtype.

    Raises:
        NotSupportedError: `f` has asked for an operation that has no gradient here: nothing was launched.
        ValueError: The value has axes, or depends on no parameter.
        TypeError: `f` returns no call.
    """

    async def run(parameters: Nested, *args: Any, **kwargs: Any) -> tuple[AccelRef, Any]:
        return await value_and_scaled_grad(f, 1.0, parameters, *args, **kwargs)

    return run


async def value_and_scaled_grad(
    f: Callable[..., Any], scale: float, parameters: Nested, *args: Any, **kwargs: Any
) -> tuple[AccelRef, Any]:
    """Compute the value of a function, and the gradients of `scale` times the value; see `value_and_grad`."""
    made: list[Any] = []
    try:
        leaves: list[Any] = []
        made.append(f(_with(parameters, lambda ref: _leaf(ref, leaves, made)), *args, **kwargs))
        out: AccelRef = await _joined(made, leaves, scale)
    finally:
        # Those that were not awaited end without a warning: an error is enough, the program has not made
        # the calls of gradients, and a rule may not need the gradient of its result.
        for call in made:
            if type(call) is Call:
                call.close()
    place = 1

    def taken(ref: AccelRef) -> AccelRef:
        nonlocal place
        place += ref.size
        return out[place - ref.size : place].reshape(ref.shape)

    return out[:1].reshape(()), _with(parameters, taken)


def grad(f: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Make a function of the gradients alone; see `value_and_grad`."""
    both = value_and_grad(f)

    async def run(parameters: Nested, *args: Any, **kwargs: Any) -> Any:
        return (await both(parameters, *args, **kwargs))[1]

    return run


def _leaf(ref: AccelRef, leaves: list[Any], made: list[Any]) -> Any:
    """Return a parameter as a call: views of an array are arrays, and nothing would know what they are of."""
    if not isinstance(ref, AccelRef):
        raise TypeError(
            f"parameters must be arrays on a device, in dicts and lists, got {type(ref).__name__}"
        )
    leaves.append(arrays.reshape(ref, ref.shape))
    made.append(leaves[-1])
    return leaves[-1]


def _with(nested: Any, change: Callable[[AccelRef], Any]) -> Any:
    """Return nested arrays with each of them changed."""
    if isinstance(nested, Mapping):
        return {name: _with(one, change) for name, one in cast("Mapping[str, Any]", nested).items()}
    if isinstance(nested, (list, tuple)):
        return [_with(one, change) for one in cast("list[Any]", nested)]
    return change(nested)


def _joined(made: list[Any], leaves: Sequence[Any], scale: float) -> Any:
    """Return one call of a value and of all its gradients, each flat, behind one another.

    Args:
        made: Ends with the call of the value; the calls of gradients are added to it.
        leaves: Calls of the parameters.
        scale: Factor of the value whose gradients are computed.
    """
    given: object = made[-1]
    if not isinstance(given, Call):
        raise TypeError(f"value_and_grad: the function must return a call, got {type(given).__name__}")
    value = cast("Any", given)
    if value.shape:
        raise ValueError(f"value_and_grad: the value must have no axes, got shape {value.shape}")
    order, depends = _order(value, leaves)
    if id(value) not in depends:
        raise ValueError("value_and_grad: the value depends on no parameter")
    made.append(arrays.full_like(value, scale))
    slopes: dict[int, Any] = {id(value): made[-1]}
    for call in reversed(order):
        if id(call) not in slopes:
            # Only what has no gradient uses it.
            continue
        # An operand may be there twice.
        missing = Counter[int](id(one) for one in arguments_of(call) if id(one) in depends)
        for operand, make in gradients(call, slopes.pop(id(call))):
            missing[id(operand)] -= 1
            if id(operand) in depends:
                before, one = slopes.get(id(operand)), make()
                made.append(one if before is None else before + one)
                slopes[id(operand)] = made[-1]
        if any(count > 0 for count in missing.values()):
            raise NotSupportedError(f"value_and_grad: {call.function.name} has no gradient for an argument")
    parts = [slopes[id(leaf)] if id(leaf) in slopes else arrays.zeros_like(leaf) for leaf in leaves]
    narrow = [part if part.dtype == value.dtype else part.cast(value.dtype) for part in parts]
    return arrays.concat([value, *narrow], axis=None)


def _order(value: Any, leaves: Sequence[Any]) -> tuple[list[Any], set[int]]:
    """Return the calls that a value is made of and that depend on parameters, in order; and what depends."""
    depends, order = set(map(id, leaves)), list[Any]()
    for call in Chain(value, is_spent=False).steps:
        is_step = call.function.name.removeprefix("arrays.") in _STEPS
        if not (is_step or depends.isdisjoint(map(id, arguments_of(call)))):
            depends.add(id(call))
            order.append(call)
    return order, depends


def gradients(call: Any, g: Any) -> Iterator[Rule]:
    """Yield arguments of a call, with their gradients by that of its result.

    Raises:
        NotSupportedError: The function has none here.
    """
    name, args, named = call.function.name, call.args, _named(call)
    room, _, base = name.partition(".")
    if room == "arrays" and base in _OF_ONE:
        yield args[0], partial(_OF_ONE[base], g, args[0], call)
    elif room in ("arrays", "nn") and base in _OF_TWO:
        for one, rule in zip(args, _OF_TWO[base], strict=False):
            yield one, partial(_summed_from, rule, (g, *args[:2], call), np.shape(one))
    elif base in _OF_FIRST:
        named.pop("out", None)
        yield args[0], partial(getattr(nn, f"{base}_grad"), g, *args, **named)
    elif name in _RULES:
        yield from _RULES[name](call, g)
    else:
        raise NotSupportedError(f"value_and_grad: {name} has no gradient here")


def _summed_to(g: Any, shape: Sequence[int]) -> Any:
    """Sum over the axes along which an array of a shape was broadcast."""
    ahead = len(g.shape) - len(shape)
    axes = [axis for axis in range(len(g.shape)) if axis < ahead or shape[axis - ahead] < g.shape[axis]]
    return arrays.reshape(arrays.sum(g, axis=tuple(axes)), tuple(shape)) if axes else g


def _summed_from(rule: Callable[..., Any], given: Sequence[Any], shape: Sequence[int]) -> Any:
    return _summed_to(rule(*given), shape)


def _option(call: Any, place: int, name: str, default: Any = None) -> Any:
    """Return an argument that may be given by its place or by its name."""
    return call.args[place] if len(call.args) > place else _named(call).get(name, default)


def _named(call: Any) -> dict[str, Any]:
    return dict(call.named or {})


def _axes(call: Any) -> tuple[int, ...]:
    count, axis = len(call.args[0].shape), _option(call, 1, "axis")
    return tuple(range(count)) if axis is None else tuple(np.atleast_1d(axis) % count)


def _spread(call: Any, g: Any) -> Any:
    """Return the gradient of a reduction in the shape of its argument."""
    x = call.args[0]
    kept = tuple(1 if axis in _axes(call) else extent for axis, extent in enumerate(x.shape))
    return arrays.broadcast_to(arrays.reshape(g, kept), x.shape)


def _sum(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: _spread(call, g)


def _mean(call: Any, g: Any) -> Iterator[Rule]:
    count = math.prod(call.args[0].shape[axis] for axis in _axes(call))
    yield call.args[0], lambda: _spread(call, g) * (1 / count)


def _logsumexp(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: _spread(call, g) * arrays.softmax(call.args[0], axis=_axes(call))


def _where(call: Any, g: Any) -> Iterator[Rule]:
    condition, a, b = call.args[:3]
    yield a, lambda: _summed_to(arrays.where(condition, g, 0), np.shape(a))
    yield b, lambda: _summed_to(arrays.where(condition, 0, g), np.shape(b))


def _matmul(call: Any, g: Any) -> Iterator[Rule]:
    a, b = call.args[:2]
    of_rows = (1, *a.shape)[-max(2, len(a.shape)) :]
    of_columns = (*b.shape, 1)[: max(2, len(b.shape))]
    shape = (*np.broadcast_shapes(of_rows[:-2], of_columns[:-2]), of_rows[-2], of_columns[-1])
    # One of the operands may be an array of the host.
    rows = cache(lambda: a.reshape(of_rows) if len(a.shape) == 1 else a)
    columns = cache(lambda: b.reshape(of_columns) if len(b.shape) == 1 else b)
    slope = cache(lambda: arrays.reshape(g, shape))
    yield a, lambda: arrays.reshape(_summed_to(slope() @ columns().mT, of_rows), a.shape)
    yield b, lambda: arrays.reshape(_summed_to(rows().mT @ slope(), of_columns), b.shape)


def _linear(call: Any, g: Any) -> Iterator[Rule]:
    x, weight, bias = call.args[0], call.args[1], _option(call, 2, "bias")
    if _option(call, 3, "activation") is not None:
        raise NotSupportedError("value_and_grad: nn.linear with an activation has no gradient; call it apart")
    flat = cache(lambda: arrays.reshape(g, (-1, weight.shape[0])))
    yield x, lambda: g @ weight
    yield weight, lambda: flat().mT @ arrays.reshape(x, (-1, weight.shape[1]))
    yield bias, lambda: arrays.sum(flat(), axis=0)


def _normed(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a layer norm, or of an RMS norm, which takes no mean away and has no bias."""
    is_centred = call.function.name == "arrays.layer_norm"
    x, weight, bias = call.args[0], _option(call, 1, "weight", 1), _option(call, 2, "bias", 0)
    axis, eps = _named(call).get("axis", -1), _named(call).get("eps", 1e-5 if is_centred else 1e-6)
    mean = partial(arrays.mean, axis=axis, keepdims=True)
    off = cache(lambda: x - mean(x) if is_centred else x)
    root = cache(lambda: arrays.rsqrt(mean(off() * off()) + eps))
    normal, scaled = cache(lambda: off() * root()), cache(lambda: g * weight)
    less = cache(lambda: scaled() - normal() * mean(scaled() * normal()))
    yield x, lambda: root() * (less() - mean(scaled()) if is_centred else less())
    yield weight, lambda: _summed_to(g * normal(), np.shape(weight))
    yield bias, lambda: _summed_to(g, np.shape(bias))


async def _make_slopes(name: str, g: Any, *args: Any, **named: Any) -> Any:
    """Make all gradients of an attention or a norm, each flat, behind one another."""
    if "attention" in name:
        args += await getattr(nn, name)(*args, **named, return_lse=True)
    made = await getattr(nn, f"{name}_grad")(g, *args, **named)
    return await arrays.concat([arrays.reshape(one, (-1,)) for one in made])


async def _make_slope_of_maxima(name: str, g: Any, x: AccelRef, **named: Any) -> Any:
    """Make the gradient of maxima of windows, which are found again, with their places."""
    made = await getattr(nn, name)(x, **named | {"return_indices": True})
    return await nn.max_pool_grad(g, made.indices, x.shape)


_slopes = called(Function("train.slopes", _make_slopes, "awaitable"))
_slope_of_maxima = called(Function("train.slope_of_maxima", _make_slope_of_maxima, "awaitable"))


def _bound(call: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a function of `nn`, and its arguments with their defaults, but for `out`."""
    name = call.function.name.removeprefix("nn.")
    parameters = inspect.signature(getattr(nn, name)).parameters
    at = {one: parameter.default for one, parameter in parameters.items()}
    # An operation that is declared has all of its arguments by their places.
    at |= dict(zip(parameters, call.args, strict=False)) | _named(call)
    at.pop("out", None)
    return name, at


def _split(
    flat: Callable[[], Any], wanted: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Rule]:
    """Yield arguments with their gradients, which lie behind one another in one array."""
    stop = 0
    for one, shape in zip(wanted, shapes, strict=True):
        first, stop = stop, stop + math.prod(shape)
        yield one, partial(_shaped, flat, slice(first, stop), shape)


def _shaped(flat: Callable[[], Any], part: slice, shape: tuple[int, ...]) -> Any:
    return arrays.reshape(flat()[part], shape)


def _group_norm(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    x, weight, bias = at.pop("x"), at.pop("weight"), at.pop("bias")
    groups = [at.pop("num_groups")] if "num_groups" in at else []
    shapes = x.shape, (x.shape[1],), (x.shape[1],)
    flat = cache(lambda: _slopes(name, g, x, *groups, weight, **at))
    yield from _split(flat, (x, weight, bias), shapes)


def _attention(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    given = [at.pop(one) for one in ("query", "key", "value")]
    del at["dropout_p"], at["return_lse"]
    flat = cache(lambda: _slopes(name, g, *given, **at))
    yield from _split(flat, given, [one.shape for one in given])


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
    """Return an array as several images of so many axes as a function has in its name."""
    return arrays.reshape(array, (1, *array.shape)[-2 - int(name[-2]) :])


def _pool(call: Any, g: Any) -> Iterator[Rule]:
    name, at = _bound(call)
    x = at.pop("input")
    shape = (1, *x.shape)[-2 - int(name[-2]) :]

    def slope() -> Any:
        if "max" in name:
            return _slope_of_maxima(name, _images(name, g), arrays.reshape(x, shape), **at)
        if "adaptive" in name:
            return nn.adaptive_avg_pool_grad(_images(name, g), shape)
        return nn.avg_pool_grad(_images(name, g), shape, **at)

    yield x, lambda: arrays.reshape(slope(), x.shape)


def _batch_norm(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a norm by numbers that were found before: those of the numbers are not there."""
    at = _bound(call)[1]
    x, mean, var, weight = (at[name] for name in ("x", "running_mean", "running_var", "weight"))

    def spread(one: Any) -> Any:
        return one.reshape(-1, *(1,) * (len(x.shape) - 2)) if np.shape(one) else one

    root = cache(lambda: (spread(var) + at["eps"]) ** -0.5)
    others = tuple(axis for axis in range(len(x.shape)) if axis != 1)
    yield x, lambda: g * (root() * spread(weight))
    yield weight, lambda: arrays.sum(g * (x - spread(mean)) * root(), axis=others)
    yield at["bias"], lambda: arrays.sum(g, axis=others)


def _ranking(call: Any, g: Any) -> Iterator[Rule]:
    at = _bound(call)[1]
    yield at["x1"], lambda: nn.margin_ranking_loss_grad(g, **at)
    yield at["x2"], lambda: -nn.margin_ranking_loss_grad(g, **at)


def _reshaped(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: arrays.reshape(g, call.args[0].shape)


def _turned(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of what turns axes about: where each of them has gone, NumPy tells."""
    x, name = call.args[0], call.function.name.rpartition(".")[2]
    tags = np.empty(tuple(range(2, 2 + len(x.shape))), np.int8)
    is_property = name in ("T", "mT")
    turned = getattr(tags, name) if is_property else getattr(np, name)(tags, *call.args[1:], **_named(call))
    yield x, lambda: arrays.permute_dims(g, tuple(turned.shape.index(extent) for extent in tags.shape))


def _taken(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a part by numbers and slices: zeros around."""
    x, key = call.args
    keys: list[Any] = [one for one in np.index_exp[key] if one is not None]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = [slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [slice(None)] * (len(x.shape) - len(keys))
    widths, kept = list[tuple[int, int]](), list[int]()
    for one, extent in zip(keys, x.shape, strict=False):
        part: Any = one
        if not isinstance(one, (int, slice)) or getattr(part, "step", None) not in (None, 1):
            raise NotSupportedError(
                "value_and_grad: only indices by numbers, and slices of step 1, have gradients"
            )
        span = range(extent)[one if isinstance(one, slice) else slice(one % extent, one % extent + 1)]
        widths.append((span.start, extent - span.start - len(span)))
        kept.append(len(span))
    yield x, lambda: arrays.pad(arrays.reshape(g, tuple(kept)), widths)


def _broadcast(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: _summed_to(g, call.args[0].shape)


def _part(g: Any, axis: int, key: object) -> Any:
    return g[(slice(None),) * axis + (key,)]


def _concat(call: Any, g: Any) -> Iterator[Rule]:
    axis, first = _option(call, 1, "axis", 0) % len(g.shape), 0
    for one in call.args[0]:
        stop = first + one.shape[axis]
        yield one, partial(_part, g, axis, slice(first, stop))
        first = stop


def _stack(call: Any, g: Any) -> Iterator[Rule]:
    axis = _option(call, 1, "axis", 0) % len(g.shape)
    for number, one in enumerate(call.args[0]):
        yield one, partial(_part, g, axis, number)


def _embedding(call: Any, g: Any) -> Iterator[Rule]:
    indices, weight = call.args[:2]
    yield weight, lambda: nn.embedding_grad(g, indices, weight.shape[0], _option(call, 2, "padding_idx"))


def _cast(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: g if call.args[0].dtype == g.dtype else g.cast(call.args[0].dtype)


_TURNED = (
    "AccelRef.T", "AccelRef.mT", "arrays.matrix_transpose", "arrays.permute_dims", "arrays.moveaxis",
    "arrays.swapaxes",
)  # fmt: skip
_POOLS = ("adaptive_avg", "adaptive_max", "avg", "max")
_RULES: dict[str, Callable[[Any, Any], Iterator[Rule]]] = {
    "AccelRef.__getitem__": _taken, "AccelRef.copy": _cast, "AccelRef.reshape": _reshaped,
    "arrays.broadcast_to": _broadcast, "arrays.concat": _concat, "arrays.expand_dims": _reshaped,
    "arrays.layer_norm": _normed, "arrays.logsumexp": _logsumexp, "arrays.mean": _mean,
    "arrays.reshape": _reshaped, "arrays.rms_norm": _normed, "arrays.squeeze": _reshaped,
    "arrays.stack": _stack, "arrays.sum": _sum, "arrays.where": _where, "linalg.matmul": _matmul,
    "nn.batch_norm": _batch_norm, "nn.embedding": _embedding, "nn.group_norm": _group_norm,
    "nn.instance_norm": _group_norm, "nn.linear": _linear, "nn.margin_ranking_loss": _ranking,
    "nn.scaled_dot_product_attention": _attention, **dict.fromkeys(_TURNED, _turned),
    **{f"nn.conv{kind}{n}d": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
    **{f"nn.{kind}_pool{n}d": _pool for kind in _POOLS for n in (1, 2, 3)},
}  # fmt: skip
