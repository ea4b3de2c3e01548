"""Steps of optimizers, which change parameters and what is kept of earlier steps in place.

Each is one launch for each parameter: every array is read and written once. Steps are computed in float32 at
least. What is kept may be of a wider dtype than the parameter. Arrays are damaged if the operation fails.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ..actors import arguments_of
from ..backends.base import DType
from ..devices import AccelRef, Operand
from ..devices.base._refusals import what_to_do, whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, Out, check_array
from ._library import check_range

__all__ = ["adadelta", "adagrad", "adam", "adamax", "adamw", "lion", "radam", "rmsprop", "sgd"]


# A step has the names of the states that it changes beside the parameter. It makes ``p`` of the parameter,
# and ``a`` and ``b`` of the states.
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


async def _step(step: str, param: AccelRef, grad: Operand, *states: AccelRef, **numbers: float) -> AccelRef:
    """Take a step of the table: one launch, with those of the numbers that it reads."""
    made, names = _made(step)
    arrays = dict(zip(_STEPS[step][0].split(), states, strict=True))
    _check(made.operation, grad, param=param, **arrays)
    given: dict[str, Any] = dict(zip(numbers, map(float, numbers.values()), strict=True))
    given |= {"param": param, "grad": grad, **arrays}
    await made(*map(given.__getitem__, names), out=(param, *states))
    return param


@functools.cache
def _made(step: str) -> tuple[Elementwise[Any], tuple[str, ...]]:
    """Make the expression of a step; its arguments are found by these names."""
    states, text = _STEPS[step]
    outputs = ("p", "a", "b")[: 1 + len(states.split())]
    operation = f"nn.{step.removesuffix('_momentum')}"
    made = Elementwise[Any](text, outputs=outputs, operation=operation, precision="float32")
    return made, made.inputs


@composed
async def sgd(
    param: AccelRef,
    grad: Operand,
    momentum_buffer: Out = None,
    *,
    lr: float = 1e-3,
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
        momentum_buffer: What is kept of earlier steps, zeros at the beginning; only with `momentum`.
        lr: The length of the step.
        momentum: Share of the earlier steps that goes on.
        dampening: Share of the gradient that does not go into the buffer, from 0 to 1.
        weight_decay: Factor of the parameter that is added to the gradient.
        nesterov: Whether to step ahead by the momentum (Nesterov, 1983); needs momentum, and no dampening.
        is_first: Whether the buffer becomes the gradient, without `dampening`, as in PyTorch's first step.

    Returns:
        `param`.

    Raises:
        TypeError: An argument is no array, or no number, or an array is not of floating numbers.
        ValueError: Other shapes, a number that is negative or not finite, `momentum` without a buffer or the
            other way round, `nesterov` without momentum or with dampening, or arrays that share memory.
        NotSupportedError: float8.
    """
    name = "nn.sgd"
    check_range(name, 0, math.inf, lr=lr, momentum=momentum, weight_decay=weight_decay)
    check_range(name, 0, 1, is_closed=True, dampening=dampening)
    _check_momentum(name, momentum, momentum_buffer)
    if nesterov and (momentum <= 0 or dampening):
        raise ValueError(
            f"{name}: nesterov needs momentum and no dampening, got {momentum!r} and {dampening!r}"
        )
    given = {"lr": lr, "weight_decay": weight_decay}
    if momentum_buffer is None:
        return await _step("sgd", param, grad, **given)
    given |= {"kept": 0.0, "share": 1.0} if is_first else {"kept": momentum, "share": 1.0 - dampening}
    given |= {"ahead": 1.0, "behind": momentum} if nesterov else {"ahead": 0.0, "behind": 1.0}
    return await _step("sgd_momentum", param, grad, momentum_buffer, **given)


@composed
async def adam(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_avg_sq: AccelRef,
    step: int,
    *,
    lr: float = 1e-3,
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
        step: Number of this step, from 1; the means are corrected by it.
        lr: The length of the step.
        betas: Shares of both means that go on, from 0 and below 1.
        eps: Added to what is divided by.
        weight_decay: Factor of the parameter that is added to the gradient.

    Returns:
        `param`.

    Raises:
        TypeError: An argument is no array, or no number, or an array is not of floating numbers.
        ValueError: Other shapes, a number out of its range, or arrays that share memory.
        NotSupportedError: float8.
    """
    given = _numbers("nn.adam", step, lr, betas, eps, weight_decay)
    return await _step("adam", param, grad, exp_avg, exp_avg_sq, shrink=1.0, **given)


@composed
async def adamw(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_avg_sq: AccelRef,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> AccelRef:
    """Take a step of Adam with decay apart from the gradient, as `torch.optim.AdamW`: one launch.

    The parameter is multiplied by ``1 - lr * weight_decay`` first (Loshchilov and Hutter, 2019). Arguments
    and errors are those of `adam`.
    """
    given = _numbers("nn.adamw", step, lr, betas, eps, weight_decay)
    return await _step("adamw", param, grad, exp_avg, exp_avg_sq, shrink=1.0 - lr * weight_decay, **given)


@composed
async def adadelta(
    param: AccelRef,
    grad: Operand,
    square_avg: AccelRef,
    acc_delta: AccelRef,
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adadelta (Zeiler, 2012), as `torch.optim.Adadelta`: one launch.

    `square_avg` and `acc_delta` are means of squares of gradients and of steps, zeros at the beginning, and
    `rho` is the share of them that goes on. Other arguments and errors are those of `adam`.
    """
    name = "nn.adadelta"
    check_range(name, 0, math.inf, lr=lr, eps=eps, weight_decay=weight_decay)
    check_range(name, 0, 1, is_closed=True, rho=rho)
    states = square_avg, acc_delta
    return await _step("adadelta", param, grad, *states, weight_decay=weight_decay, lr=lr, rho=rho, eps=eps)


@composed
async def adagrad(
    param: AccelRef,
    grad: Operand,
    state_sum: AccelRef,
    step: int,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adagrad (Duchi et al., 2011), as `torch.optim.Adagrad`: one launch.

    `state_sum` is the sum of squares of gradients, zeros at the beginning. The length of the step is
    ``lr / (1 + (step - 1) * lr_decay)``. Other arguments and errors are those of `adam`.
    """
    name = "nn.adagrad"
    check_range(name, 0, math.inf, lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)
    rate = lr / (1 + (_number(name, step) - 1) * lr_decay)
    return await _step("adagrad", param, grad, state_sum, weight_decay=weight_decay, lr=rate, eps=eps)


@composed
async def adamax(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    exp_inf: AccelRef,
    step: int,
    *,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Adamax (Kingma and Ba, 2015), as `torch.optim.Adamax`: one launch.

    `exp_inf` is the largest size of the gradients, which fades, and zeros at the beginning. Other arguments
    and errors are those of `adam`.
    """
    given = _numbers("nn.adamax", step, lr, betas, eps, weight_decay)
    return await _step("adamax", param, grad, exp_avg, exp_inf, **given)


@composed
async def lion(
    param: AccelRef,
    grad: Operand,
    exp_avg: AccelRef,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> AccelRef:
    """Take a step of Lion (Chen et al., 2023), by the sign of a mean of gradients: one launch.

    `exp_avg` is zeros at the beginning. The step goes by a mean with the first of `betas`, and the second one
    is the share that goes on. The parameter is multiplied by ``1 - lr * weight_decay`` first. Other arguments
    and errors are those of `adam`.
    """
    given = _numbers("nn.lion", 1, lr, betas, 0.0, weight_decay)
    given |= {"shrink": 1.0 - lr * weight_decay, "lr": lr}
    return await _step("lion", param, grad, exp_avg, **given)


async def _radam(
    param: AccelRef, grad: Operand, exp_avg: AccelRef, exp_avg_sq: AccelRef, **numbers: Any
) -> AccelRef:
    given, step = _numbers("nn.radam", **numbers), numbers["step"]
    beta, root = given["beta"], given["root"]
    most = 2 / (1 - beta) - 1
    length = most - 2 * step * beta**step / root**2
    is_plain = length <= 5
    if not is_plain:
        root *= math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
    given |= {"plain": float(is_plain), "root": 0.0 if is_plain else root}
    return await _step("radam", param, grad, exp_avg, exp_avg_sq, **given)


@arguments_of(adam, _radam)
def radam() -> None:
    """Take a step of rectified Adam (Liu et al., 2020), as `torch.optim.RAdam`: one launch.

    The first steps go by the mean of the gradients alone. Arguments and errors are those of `adam`.
    """


@composed
async def rmsprop(
    param: AccelRef,
    grad: Operand,
    square_avg: AccelRef,
    momentum_buffer: Out = None,
    *,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> AccelRef:
    """Take a step of RMSprop, as `torch.optim.RMSprop` without `centered`: one launch.

    `square_avg` is the mean of squares of gradients, of which `alpha` is the share that goes on. It and
    `momentum_buffer` are zeros at the beginning. Other arguments and errors are those of `sgd`.
    """
    name = "nn.rmsprop"
    check_range(name, 0, math.inf, lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_range(name, 0, 1, is_closed=True, alpha=alpha)
    _check_momentum(name, momentum, momentum_buffer)
    given = {"weight_decay": weight_decay, "lr": lr, "alpha": alpha, "eps": eps}
    if momentum_buffer is None:
        return await _step("rmsprop", param, grad, square_avg, **given)
    states = square_avg, momentum_buffer
    return await _step("rmsprop_momentum", param, grad, *states, momentum=momentum, **given)


def _check_momentum(name: str, momentum: float, momentum_buffer: Out) -> None:
    if (momentum > 0) != (momentum_buffer is not None):
        raise ValueError(f"{name}: momentum and momentum_buffer go together, got momentum {momentum!r}")


def _number(name: str, step: int) -> int:
    """Require the number of a step."""
    if whole(name, "step", step) < 1:
        raise ValueError(f"{name}: step must be at least 1, got {step}")
    return step


def _numbers(
    name: str, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, float]:
    """Check the numbers of a step, and compute those of its formula, which are the same for all elements."""
    _number(name, step)
    given: object = betas
    if not isinstance(given, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}")
    check_range(name, 0, math.inf, lr=lr, eps=eps, weight_decay=weight_decay)
    first, second = betas
    check_range(name, 0, 1, betas=first)
    check_range(name, 0, 1, betas=second)
    # 1 - beta**step, without a loss of digits.
    corrections = [-math.expm1(step * math.log(beta)) if beta else 1.0 for beta in (first, second)]
    shares = {"share": 1.0 - first, "beta": second, "other": 1.0 - second, "root": math.sqrt(corrections[1])}
    return {**shares, "lr": lr / corrections[0], "eps": eps, "weight_decay": weight_decay}


def _check(name: str, grad: Operand, **arrays: AccelRef) -> None:
    """Require arrays of floating numbers of one shape, on a device but for the gradient."""
    check_array(name, grad=grad)
    shape = arrays["param"].shape if isinstance(arrays["param"], AccelRef) else None
    for argument, array in {**arrays, "grad": grad}.items():
        if argument != "grad" and not isinstance(array, AccelRef):
            told = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"{name}: {argument} must be an AccelRef, which is changed, got {told}")
        dtype = array.dtype if isinstance(array, AccelRef) else DType.of(array.dtype)
        if dtype.kind != "float":
            raise TypeError(f"{name}: {argument} must be of floating numbers, got {dtype}")
        if array.shape != shape:
            raise ValueError(f"{name}: {argument} must have the shape {shape} of param, got {array.shape}")
