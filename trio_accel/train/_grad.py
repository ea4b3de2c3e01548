"""Gradients of functions of own operations: the calls that a function makes are its tape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from .. import arrays as _arrays
from .. import nn as _nn
from ..backends.base import NotSupportedError
from ..devices import AccelRef, Call

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
# Functions whose results do not change with small changes of their arguments.
_STEPS = frozenset({
    "all", "any", "argmax", "argmin", "ceil", "equal", "floor", "greater", "greater_equal", "isfinite",
    "isinf", "isnan", "less", "less_equal", "logical_and", "logical_not", "logical_or", "not_equal",
    "round", "sign", "signbit", "trunc",
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
    "pow": (lambda g, a, b, y: g * b * a ** (b - 1), lambda g, a, b, y: g * y * arrays.log(a)),
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
        leaves: list[Any] = []
        try:
            value = f(_with(parameters, lambda ref: _leaf(ref, leaves)), *args, **kwargs)
        except BaseException:
            for leaf in leaves:
                # They are of no use to anybody now, and no fault of the caller's.
                leaf.is_told = True
            raise
        out: AccelRef = await _Tape(value, leaves).joined()
        place = 1

        def taken(ref: AccelRef) -> AccelRef:
            nonlocal place
            place += ref.size
            return out[place - ref.size : place].reshape(ref.shape)

        return out[:1].reshape(()), _with(parameters, taken)

    return run


def grad(f: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Make a function of the gradients alone; see `value_and_grad`."""
    both = value_and_grad(f)

    async def run(parameters: Nested, *args: Any, **kwargs: Any) -> Any:
        return (await both(parameters, *args, **kwargs))[1]

    return run


def _leaf(ref: AccelRef, leaves: list[Any]) -> Any:
    """Return a parameter as a call: views of an array are arrays, and nothing would know what they are of."""
    if not isinstance(ref, AccelRef):
        raise TypeError(
            f"parameters must be arrays on a device, in dicts and lists, got {type(ref).__name__}"
        )
    leaves.append(arrays.reshape(ref, ref.shape))
    return leaves[-1]


def _with(nested: Any, change: Callable[[AccelRef], Any]) -> Any:
    """Return nested arrays with each of them changed."""
    if isinstance(nested, Mapping):
        return {name: _with(one, change) for name, one in cast("Mapping[str, Any]", nested).items()}
    if isinstance(nested, (list, tuple)):
        return [_with(one, change) for one in cast("list[Any]", nested)]
    return change(nested)


class _Tape:
    """The calls of a value, and the calls of its gradients.

    Args:
        given: The call of the value.
        leaves: Calls of the parameters.
    """

    def __init__(self, given: object, leaves: Sequence[Any]) -> None:
        if not isinstance(given, Call):
            raise TypeError(f"value_and_grad: the function must return a call, got {type(given).__name__}")
        value = cast("Any", given)
        if value.shape:
            raise ValueError(f"value_and_grad: the value must have no axes, got shape {value.shape}")
        self._value, self._leaves = value, leaves
        self._order: list[Any] = []
        self._visit(value)
        self._depends = set(map(id, leaves))
        for call in self._order:
            is_step = call.function.name.removeprefix("arrays.") in _STEPS
            if not is_step and any(id(one) in self._depends for one in _operands(call)):
                self._depends.add(id(call))
        if id(value) not in self._depends:
            raise ValueError("value_and_grad: the value depends on no parameter")
        self._slopes: dict[int, Any] = {}

    def _visit(self, value: Any) -> None:
        """Put the calls in an order in which each comes behind its operands."""
        done, stack = set[int](), [value]
        while stack:
            call = stack[-1]
            calls: list[Any] = [one for one in _operands(call) if isinstance(one, Call)]
            missing = [one for one in calls if id(one) not in done]
            if missing and id(call) not in done:
                stack += missing
                continue
            stack.pop()
            if id(call) not in done:
                done.add(id(call))
                self._order.append(call)

    def joined(self) -> Any:
        """Return one call of the value and all gradients, each flat, behind one another."""
        self._slopes[id(self._value)] = arrays.ones_like(self._value)
        leaves, found = set(map(id, self._leaves)), dict[int, Any]()
        for call in reversed(self._order):
            slope = self._slopes.pop(id(call), None)
            if slope is None or id(call) not in self._depends:
                continue
            if id(call) in leaves:
                found[id(call)] = slope
                continue
            # An operand may be there twice.
            missing = Counter[int](id(one) for one in _operands(call) if id(one) in self._depends)
            for operand, make in gradients(call, slope):
                missing[id(operand)] -= 1
                if id(operand) in self._depends:
                    before, one = self._slopes.get(id(operand)), make()
                    self._slopes[id(operand)] = one if before is None else before + one
            if any(count > 0 for count in missing.values()):
                raise NotSupportedError(
                    f"value_and_grad: {call.function.name} has no gradient for an argument"
                )
        dtype = self._value.dtype
        parts = [arrays.reshape(self._value, (1,))]
        for leaf in self._leaves:
            slope = found.get(id(leaf))
            part = arrays.zeros_like(leaf) if slope is None else slope
            parts.append(arrays.reshape(part if part.dtype == dtype else part.cast(dtype), (-1,)))
        return arrays.concat(parts)


def _operands(call: Any) -> list[Any]:
    """List the arrays and calls among the arguments of a call."""
    found: list[Any] = []
    values: list[Any] = [*call.args, *_named(call).values()]
    for one in values:
        found += one if isinstance(one, (list, tuple)) else [one]
    return found


def gradients(call: Any, g: Any) -> Iterator[Rule]:
    """Yield arguments of a call, with their gradients by that of its result.

    Raises:
        NotSupportedError: The function has none here.
    """
    name, args, named = call.function.name, call.args, _named(call)
    room, _, base = name.partition(".")
    if room == "arrays" and base in _OF_ONE:
        yield args[0], partial(_OF_ONE[base], g, args[0], call)
    elif room == "arrays" and base in _OF_TWO:
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
    rows = arrays.expand_dims(a, axis=0) if len(a.shape) == 1 else a
    columns = arrays.expand_dims(b, axis=1) if len(b.shape) == 1 else b
    slope = arrays.reshape(
        g, (*np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2]), rows.shape[-2], columns.shape[-1])
    )
    yield a, lambda: arrays.reshape(_summed_to(slope @ columns.mT, rows.shape), a.shape)
    yield b, lambda: arrays.reshape(_summed_to(rows.mT @ slope, columns.shape), b.shape)


def _linear(call: Any, g: Any) -> Iterator[Rule]:
    x, weight, bias = call.args[0], call.args[1], _option(call, 2, "bias")
    if _option(call, 3, "activation") is not None:
        raise NotSupportedError("value_and_grad: nn.linear with an activation has no gradient; call it apart")
    flat = arrays.reshape(g, (-1, weight.shape[0]))
    yield x, lambda: g @ weight
    yield weight, lambda: flat.mT @ arrays.reshape(x, (-1, weight.shape[1]))
    yield bias, lambda: arrays.sum(flat, axis=0)


def _rms_norm(call: Any, g: Any) -> Iterator[Rule]:
    x, weight = call.args[0], _option(call, 1, "weight", 1)
    axis, eps = _option(call, 2, "axis", -1), _option(call, 3, "eps", 1e-6)
    root = arrays.rsqrt(arrays.mean(x * x, axis=axis, keepdims=True) + eps)
    scaled = g * weight
    yield x, lambda: root * (scaled - x * root * root * arrays.mean(scaled * x, axis=axis, keepdims=True))
    yield weight, lambda: _summed_to(g * x * root, np.shape(weight))


def _layer_norm(call: Any, g: Any) -> Iterator[Rule]:
    x, weight, bias = call.args[0], _option(call, 1, "weight", 1), _option(call, 2, "bias", 0)
    axis, eps = _option(call, 3, "axis", -1), _option(call, 4, "eps", 1e-5)
    off = x - arrays.mean(x, axis=axis, keepdims=True)
    root = arrays.rsqrt(arrays.mean(off * off, axis=axis, keepdims=True) + eps)
    normal, scaled = off * root, g * weight
    mean = arrays.mean(scaled, axis=axis, keepdims=True)
    yield x, lambda: root * (scaled - mean - normal * arrays.mean(scaled * normal, axis=axis, keepdims=True))
    yield weight, lambda: _summed_to(g * normal, np.shape(weight))
    yield bias, lambda: _summed_to(g, np.shape(bias))


def _reshaped(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: arrays.reshape(g, call.args[0].shape)


def _turned(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of what turns axes about: where each of them has gone, NumPy tells."""
    x, name = call.args[0], call.function.name.rpartition(".")[2]
    tags = np.empty(tuple(range(2, 2 + len(x.shape))), np.int8)
    turned = (
        tags.T
        if name == "T"
        else tags.mT
        if name in ("mT", "matrix_transpose")
        else getattr(np, name)(tags, *call.args[1:], **_named(call))
    )
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
        if isinstance(one, int):
            part = slice(one % extent, one % extent + 1)
        first, stop, _ = part.indices(extent)
        widths.append((first, extent - max(first, stop)))
        kept.append(max(stop - first, 0))
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
_RULES: dict[str, Callable[[Any, Any], Iterator[Rule]]] = {
    "AccelRef.__getitem__": _taken, "AccelRef.copy": _cast, "AccelRef.reshape": _reshaped,
    "arrays.broadcast_to": _broadcast, "arrays.concat": _concat, "arrays.expand_dims": _reshaped,
    "arrays.layer_norm": _layer_norm, "arrays.logsumexp": _logsumexp, "arrays.mean": _mean,
    "arrays.reshape": _reshaped, "arrays.rms_norm": _rms_norm, "arrays.squeeze": _reshaped,
    "arrays.stack": _stack, "arrays.sum": _sum, "arrays.where": _where, "linalg.matmul": _matmul,
    "nn.embedding": _embedding, "nn.linear": _linear, **dict.fromkeys(_TURNED, _turned),
}  # fmt: skip
