"""Steps of optimizers, which change parameters and the state of earlier steps in place.

Each is one launch for each parameter: every array is read and written once. Steps are computed in float32 at
least. The state may have a wider dtype than the parameter. Arrays are damaged if the operation fails.

`lr`, and the number of a step, may be 0-d arrays on the device, so that a captured graph takes another step
at each replay. The factors that follow from them are computed in float64 in the same launch, as they are from
numbers. So steps of float64 differ by a few units in the last place from those with numbers, and steps of
float32 only if that changes a rounding. The values of these arrays are not checked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..actors import arguments_of
from ..backends.base import DType, Strs
from ..devices import AccelRef, Operand, bounded_integer, composed, what_to_do
from ..expressions import Elementwise, Out, Reduction, check_array
from ._library import check_range

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "clip_grad_norm",
    "lion",
    "radam",
    "rmsprop",
    "sgd",
]

Rate: TypeAlias = "float | AccelRef"
"""A number, or a 0-d array."""
StepNumber: TypeAlias = "int | AccelRef"
"""The same, of integers."""

# A step has the names of the states that it changes besides the parameter. It makes ``p`` from the
# parameter, and ``a`` and ``b`` from the states.
_DECAYED = "g = grad + weight_decay * param"
_MEAN, _MEAN_SQUARE = "a = exp_avg + share * (g - exp_avg)", "b = beta * exp_avg_sq + other * g * g"
_ADAM = f"{_MEAN}; {_MEAN_SQUARE}; p = shrink * param - lr * a / (sqrt(b) / root + eps)"
_RMSPROP = f"{_DECAYED}; a = alpha * square_avg + (1 - alpha) * g * g"
_STEPS: dict[str, tuple[str, str]] = {
    "adadelta": (
        "square_avg acc_delta",
        (
            f"{_DECAYED}; a = rho * square_avg + (1 - rho) * g * g;"
            "d = g * (sqrt(acc_delta + eps) / sqrt(a + eps)); b = rho * acc_delta + (1 - rho) * d * d;"
            "p = param - lr * d"
        ),
    ),
    "adagrad": ("state_sum", f"{_DECAYED}; a = state_sum + g * g; p = param - lr * g / (sqrt(a) + eps)"),
    "adam": ("exp_avg exp_avg_sq", f"{_DECAYED}; {_ADAM}"),
    "adamax": (
        "exp_avg exp_inf",
        f"{_DECAYED}; {_MEAN}; b = maximum(beta * exp_inf, abs(g) + eps); p = param - lr * a / b",
    ),
    "adamw": ("exp_avg exp_avg_sq", f"g = +grad; {_ADAM}"),
    "lion": (
        "exp_avg",
        "d = grad - exp_avg; a = exp_avg + other * d; p = shrink * param - lr * sign(exp_avg + share * d)",
    ),
    "radam": (
        "exp_avg exp_avg_sq",
        f"{_DECAYED}; {_MEAN}; {_MEAN_SQUARE}; p = param - lr * a * (plain + root / (sqrt(b) + eps))",
    ),
    "rmsprop": ("square_avg", f"{_RMSPROP}; p = param - lr * g / (sqrt(a) + eps)"),
    "rmsprop_momentum": (
        "square_avg momentum_buffer",
        f"{_RMSPROP}; b = momentum * momentum_buffer + g / (sqrt(a) + eps); p = param - lr * b",
    ),
    "sgd": ("", f"{_DECAYED}; p = param - lr * g"),
    "sgd_momentum": (
        "momentum_buffer",
        f"{_DECAYED}; a = kept * momentum_buffer + share * g; p = param - lr * (ahead * g + behind * a)",
    ),
}
# A step reads these names of the table, where `rate` or `number` are arrays; each is made of these.
_FROM_RATE = {"lr": "rate"}
_OF_ADAM = {
    "lr": "rate / -expm1(number * log_first)",
    "root": "sqrt(-expm1(number * log_second))",
    "shrink": "1 - rate * decay",
}
_LENGTH = "(most - 2 * number * exp(number * log_second) / -expm1(number * log_second))"
_FROM_ARRAYS: dict[str, dict[str, str]] = {
    "adagrad": {"lr": "rate / (1 + (number - 1) * lr_decay)"},
    "adam": _OF_ADAM,
    "adamax": _OF_ADAM,
    "adamw": _OF_ADAM,
    "lion": {"lr": "rate", "shrink": "1 - rate * decay"},
    "radam": {
        "lr": _OF_ADAM["lr"],
        "plain": f"float64({_LENGTH} <= 5)",
        # It is not read where the square root of the rest is none.
        "root": (
            f"where({_LENGTH} > 5, {_OF_ADAM['root']} * sqrt(maximum(({_LENGTH} - 4) * ({_LENGTH} - 2), 0)"
            f" * most / ((most - 4) * (most - 2) * {_LENGTH})), 0)"
        ),
    },
}


async def _step(step: str, param: AccelRef, grad: Operand, *states: AccelRef, **numbers: Rate) -> AccelRef:
    """Take a step of the table: one launch, with the numbers that it reads.

    Args:
        step: Its name.
        param: The parameter.
        grad: Its gradient.
        *states: Arrays that it changes.
        **numbers: Numbers that it reads; with `rate`, they are made of that and `number`.
    """
    arrays = dict(zip(_STEPS[step][0].split(), states, strict=True))
    expression, names = _step_expression(step)
    _check(expression.operation, grad, param=param, **arrays)
    if "rate" in numbers:
        dtypes = {DType.of(array.dtype) for array in (param, grad, *states)}
        expression, names = _step_expression(step, "float64" if DType.float64 in dtypes else "float32")
    arguments: dict[str, Any] = {
        name: value if isinstance(value, AccelRef) else float(value) for name, value in numbers.items()
    }
    arguments |= {"param": param, "grad": grad, **arrays}
    await expression(*map(arguments.__getitem__, names), out=(param, *states))
    return param


@functools.cache
def _step_expression(step: str, from_arrays: str | None = None) -> tuple[Elementwise[Any], Strs]:
    """Make the expression of a step; its arguments are found by these names.

    Args:
        step: Its name.
        from_arrays: The dtype of the factors, if they are computed from arrays.
    """
    states, text = _STEPS[step]
    outputs = ("p", "a", "b")[: 1 + len(states.split())]
    operation = f"nn.{step.removesuffix('_momentum')}"
    if from_arrays is not None:
        read = _step_expression(step)[1]
        made_of = {
            name: formula for name, formula in _FROM_ARRAYS.get(step, _FROM_RATE).items() if name in read
        }
        lines = [f"{name} = {from_arrays}({formula})" for name, formula in made_of.items()]
        first = [
            f"{name} = float64({name})"
            for name in ("rate", "number")
            if any(name in formula for formula in made_of.values())
        ]
        text = "; ".join([*first, *lines, text])
    expression = Elementwise[Any](text, outputs=outputs, operation=operation, precision="float32")
    return expression, expression.inputs


_SQUARES, _ROOT = [
    Reduction(text, "sum", post=post, inputs=["x"], operation="nn.clip_grad_norm")
    for text, post in (("float64(x) * float64(x)", None), ("x", "sqrt(a)"))
]


@functools.cache
def _clipping(dtype: str) -> Elementwise[Any]:
    return Elementwise[Any](
        f"y = x * {dtype}(minimum(max_norm / (norm + 1e-6), 1.0))",
        inputs=["x", "norm", "max_norm"],
        outputs=["y"],
        operation="nn.clip_grad_norm",
        precision="float32",
    )


@composed
async def clip_grad_norm(grads: AccelRef | Sequence[AccelRef], max_norm: float) -> AccelRef:
    """Scale gradients with a too large total norm, in place, as `torch.nn.utils.clip_grad_norm_`.

    They are multiplied by ``max_norm / (norm + 1e-6)``, if that is below 1. The host reads nothing, so it can
    be part of a captured graph. Each array is two launches, and all together one more. So one flat array of
    all gradients is the fastest.

    Args:
        grads: The gradients, one array or several, of floating dtypes.
        max_norm: The largest norm, the root of the sum of their squares.

    Returns:
        Their length before, an array of float64 without axes. It is computed in float64. If it is not finite,
        the gradients become NaN or 0.

    Raises:
        TypeError: An argument is not an array on a device, or not a number, or an array does not have
            floating numbers.
        ValueError: There are no arrays, or a number is negative or not finite.
        NotSupportedError: float8.
    """
    name = "nn.clip_grad_norm"
    check_range(name, 0, math.inf, max_norm=max_norm)
    several = [grads] if isinstance(grads, AccelRef) else list(grads)
    if not several:
        raise ValueError(f"{name}: grads must have at least one array")
    for grad in several:
        _check_state(name, "grads", grad)
        _check_floating(name, "grads", grad)
    sums = await several[0].device.empty((len(several),), "float64")
    for number, grad in enumerate(several):
        await _SQUARES(grad, out=sums[number])
    norm = await _ROOT(sums)
    for grad in several:
        clip = _clipping("float64" if grad.dtype == DType.float64 else "float32")
        await clip(grad, norm, max_norm, out=(grad,))
    return norm


@composed
async def sgd(
    param: AccelRef,
    grad: Operand,
    momentum_buffer: Out = None,
    *,
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    is_first: bool = False,
) -> AccelRef:
    """Take a step of gradient descent, as `torch.optim.SGD`: one launch.

    Args:
        param: The parameter.
        grad: Its gradient, of the same shape.
        momentum_buffer: The state of earlier steps, zeros at the beginning; only with `momentum`.
        lr: The length of the step; a number, or a 0-d array.
        momentum: Share of the earlier steps that is kept.
        dampening: Share of the gradient that is not added to the buffer, from 0 to 1.
        weight_decay: Factor of the parameter that is added to the gradient.
        nesterov: Whether to apply the momentum in advance (Nesterov, 1983); needs momentum, and no dampening.
        is_first: Whether the buffer becomes the gradient, without `dampening`, as in PyTorch's first step.

    Returns:
        `param`.

    Raises:
        TypeError: An argument is not an array, or not a number, or an array does not have floating numbers.
        ValueError: The shapes differ, a number is negative or not finite, `momentum` has no buffer or a
            buffer no `momentum`, `nesterov` has no momentum or has dampening, or arrays share memory.
        NotSupportedError: float8.
    """
    name = "nn.sgd"
    numbers = {**_rated(name, lr), "weight_decay": weight_decay}
    check_range(name, 0, math.inf, momentum=momentum, weight_decay=weight_decay)
    check_range(name, 0, 1, is_closed=True, dampening=dampening)
    _check_momentum(name, momentum, momentum_buffer)
    if nesterov and (momentum <= 0 or dampening):
        raise ValueError(
            f"{name}: nesterov needs momentum and no dampening, got {momentum!r} and {dampening!r}"
        )
    if momentum_buffer is None:
        return await _step("sgd", param, grad, **numbers)
    numbers |= {"kept": 0.0, "share": 1.0} if is_first else {"kept": momentum, "share": 1.0 - dampening}
    numbers |= {"ahead": 1.0, "behind": momentum} if nesterov else {"ahead": 0.0, "behind": 1.0}
    return await _step("sgd_momentum", param, grad, momentum_buffer, **numbers)


@composed
async def adam(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_avg_sq: AccelRef,
    step: StepNumber,
    *,
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adam (Kingma and Ba, 2015), as `torch.optim.Adam`: one launch.

    Args:
        param: The parameter.
        grad: Its gradient, of the same shape.
        exp_avg: Mean of the gradients, zeros at the beginning.
        exp_avg_sq: Mean of their squares, zeros at the beginning.
        step: Number of this step, from 1; the means are corrected by it. It is a number, or a 0-d array.
        lr: The length of the step; a number, or a 0-d array.
        betas: Shares of both means that are kept, from 0 and below 1.
        eps: Added to the divisor.
        weight_decay: Factor of the parameter that is added to the gradient.

    Returns:
        `param`.

    Raises:
        TypeError: An argument is not an array, or no number, or an array is not of floating numbers.
        ValueError: Other shapes, a number out of its range, or arrays that share memory.
        NotSupportedError: float8.
    """
    numbers = _numbers("nn.adam", step, lr, betas, eps, weight_decay)
    numbers |= _shrinking(0.0, 0.0)
    return await _step("adam", param, grad, exp_avg, exp_avg_sq, **numbers)


@composed
async def adamw(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_avg_sq: AccelRef,
    step: StepNumber,
    *,
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> AccelRef:
    """Take a step of Adam with decay apart from the gradient, as `torch.optim.AdamW`: one launch.

    The parameter is multiplied by ``1 - lr * weight_decay`` first (Loshchilov and Hutter, 2019). See `adam`
    for arguments and errors.
    """
    numbers = _numbers("nn.adamw", step, lr, betas, eps, weight_decay)
    numbers |= _shrinking(lr, weight_decay)
    return await _step("adamw", param, grad, exp_avg, exp_avg_sq, **numbers)


@composed
async def adadelta(
    param: AccelRef,
    grad: Operand,
    square_avg: AccelRef,
    acc_delta: AccelRef,
    *,
    lr: Rate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adadelta (Zeiler, 2012), as `torch.optim.Adadelta`: one launch.

    `square_avg` and `acc_delta` are means of squared gradients and squared steps, zeros at the beginning, and
    `rho` is the share of them that is kept. See `adam` for other arguments and errors.
    """
    name = "nn.adadelta"
    numbers = {**_rated(name, lr), "weight_decay": weight_decay, "rho": rho, "eps": eps}
    check_range(name, 0, math.inf, eps=eps, weight_decay=weight_decay)
    check_range(name, 0, 1, is_closed=True, rho=rho)
    return await _step("adadelta", param, grad, square_avg, acc_delta, **numbers)


@composed
async def adagrad(
    param: AccelRef,
    grad: Operand,
    state_sum: AccelRef,
    step: StepNumber,
    *,
    lr: Rate = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adagrad (Duchi et al., 2011), as `torch.optim.Adagrad`: one launch.

    `state_sum` is the sum of squared gradients, zeros at the beginning. The length of the step is
    ``lr / (1 + (step - 1) * lr_decay)``. See `adam` for other arguments and errors.
    """
    name = "nn.adagrad"
    check_range(name, 0, math.inf, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)
    numbers = {**_rated(name, lr, step), "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
    if not isinstance(lr, AccelRef) and not isinstance(step, AccelRef):
        numbers["lr"] = lr / (1 + (step - 1) * lr_decay)
    return await _step("adagrad", param, grad, state_sum, **numbers)


@composed
async def adamax(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_inf: AccelRef,
    step: StepNumber,
    *,
    lr: Rate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adamax (Kingma and Ba, 2015), as `torch.optim.Adamax`: one launch.

    `exp_inf` is the largest size of the gradients, which fades, and zeros at the beginning. See `adam`
    for other arguments and errors.
    """
    numbers = _numbers("nn.adamax", step, lr, betas, eps, weight_decay)
    return await _step("adamax", param, grad, exp_avg, exp_inf, **numbers)


@composed
async def lion(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    *,
    lr: Rate = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Lion (Chen et al., 2023), by the sign of the mean gradient: one launch.

    `exp_avg` is zeros at the beginning. The step uses a mean with the first of `betas`, and the second one is
    the share that is kept. The parameter is multiplied by ``1 - lr * weight_decay`` first. See `adam` for
    other arguments and errors.
    """
    numbers = _numbers("nn.lion", 1, lr, betas, 0.0, weight_decay)
    numbers |= {**_rated("nn.lion", lr), **_shrinking(lr, weight_decay)}
    return await _step("lion", param, grad, exp_avg, **numbers)


async def _radam(
    param: AccelRef, grad: Operand, exp_avg: AccelRef, exp_avg_sq: AccelRef, **numbers: Any
) -> AccelRef:
    factors, step = _numbers("nn.radam", **numbers), numbers["step"]
    max_length = 2 / factors["other"] - 1
    if "rate" in factors:
        return await _step("radam", param, grad, exp_avg, exp_avg_sq, most=max_length, **factors)
    beta, root = factors["beta"], factors["root"]
    length = max_length - 2 * step * beta**step / root**2
    is_plain = length <= 5
    if not is_plain:
        root *= math.sqrt(
            (length - 4) * (length - 2) * max_length / ((max_length - 4) * (max_length - 2) * length)
        )
    factors |= {"plain": float(is_plain), "root": 0.0 if is_plain else root}
    return await _step("radam", param, grad, exp_avg, exp_avg_sq, **factors)


@arguments_of(adam, _radam)
def radam() -> None:
    """Take a step of rectified Adam (Liu et al., 2020), as `torch.optim.RAdam`: one launch.

    The first steps only use the mean of the gradients. See `adam` for arguments and errors.
    """


@composed
async def rmsprop(
    param: AccelRef,
    grad: Operand,
    square_avg: AccelRef,
    momentum_buffer: Out = None,
    *,
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> AccelRef:
    """Take a step of RMSprop, as `torch.optim.RMSprop` without `centered`: one launch.

    `square_avg` is the mean of squared gradients, of which the share `alpha` is kept. It and
    `momentum_buffer` are zeros at the beginning. See `sgd` for other arguments and errors.
    """
    name = "nn.rmsprop"
    numbers = {**_rated(name, lr), "weight_decay": weight_decay, "alpha": alpha, "eps": eps}
    check_range(name, 0, math.inf, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_range(name, 0, 1, is_closed=True, alpha=alpha)
    _check_momentum(name, momentum, momentum_buffer)
    if momentum_buffer is None:
        return await _step("rmsprop", param, grad, square_avg, **numbers)
    states = square_avg, momentum_buffer
    return await _step("rmsprop_momentum", param, grad, *states, momentum=momentum, **numbers)


def _check_momentum(name: str, momentum: float, momentum_buffer: Out) -> None:
    if (momentum > 0) != (momentum_buffer is not None):
        raise ValueError(f"{name}: momentum and momentum_buffer go together, got momentum {momentum!r}")


def _rated(name: str, lr: Rate, step: StepNumber = 1) -> dict[str, Any]:
    """Check the rate and the number of a step; returns what a step reads of them, or makes it of."""
    for argument, value, kinds in (("lr", lr, ("float",)), ("step", step, ("int", "uint", "float"))):
        if isinstance(value, AccelRef):
            if value.shape or value.dtype.kind not in kinds:
                description = f"{value.dtype} and shape {value.shape}"
                raise (ValueError if value.shape else TypeError)(
                    f"{name}: {argument} must be a number, or an array of {kinds[0]} without axes, got "
                    f"{description}"
                )
        elif argument == "lr":
            check_range(name, 0, math.inf, lr=value)
        elif bounded_integer(name, "step", value) < 1:
            raise ValueError(f"{name}: step must be at least 1, got {value}")
    is_array = isinstance(lr, AccelRef) or isinstance(step, AccelRef)
    return {"rate": lr, "number": step} if is_array else {"lr": lr}


def _shrinking(lr: Rate, decay: float) -> dict[str, Any]:
    """Return what the decay of the parameter itself is, or is made of."""
    return {"decay": decay} if isinstance(lr, AccelRef) else {"decay": decay, "shrink": 1.0 - lr * decay}


def _numbers(
    name: str, step: StepNumber, lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Check the numbers of a step, and compute the factors of its formula, which all elements share."""
    rated = _rated(name, lr, step)
    candidate: object = betas
    if not isinstance(candidate, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}")
    check_range(name, 0, math.inf, eps=eps, weight_decay=weight_decay)
    first, second = betas
    check_range(name, 0, 1, betas=first)
    check_range(name, 0, 1, betas=second)
    shares = {"share": 1.0 - first, "beta": second, "other": 1.0 - second}
    common = {**shares, "eps": eps, "weight_decay": weight_decay}
    # 1 - beta**step, without a loss of digits.
    logs = [math.log(beta) if beta else -math.inf for beta in (first, second)]
    if isinstance(lr, AccelRef) or isinstance(step, AccelRef):
        return {**common, **rated, "log_first": logs[0], "log_second": logs[1]}
    corrections = [-math.expm1(step * log) for log in logs]
    return {**common, "root": math.sqrt(corrections[1]), "lr": lr / corrections[0]}


def _check_state(name: str, argument: str, array: object) -> None:
    """Require an array on a device."""
    if not isinstance(array, AccelRef):
        description = f"{type(array).__name__}{what_to_do(array)}"
        raise TypeError(f"{name}: {argument} must be an AccelRef, which is changed, got {description}")


def _check(name: str, grad: Operand, **arrays: AccelRef) -> None:
    """Require arrays of floating numbers with one shape, on a device except for the gradient."""
    check_array(name, grad=grad)
    shape = arrays["param"].shape if isinstance(arrays["param"], AccelRef) else None
    for argument, array in {**arrays, "grad": grad}.items():
        if argument != "grad":
            _check_state(name, argument, array)
        _check_floating(name, argument, array)
        if array.shape != shape:
            raise ValueError(f"{name}: {argument} must have the shape {shape} of param, got {array.shape}")


def _check_floating(name: str, argument: str, array: Operand) -> None:
    if DType.of(array.dtype).kind != "float":
        raise TypeError(f"{name}: {argument} must be of floating numbers, got {array.dtype}")
