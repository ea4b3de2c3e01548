"""Steps of optimizers, which change parameters and what is kept of earlier steps in place.

Each is one launch for each parameter: every array is read and written once. Steps are computed in float32 at
least. What is kept may be of a wider dtype than the parameter. Arrays are damaged if the operation fails.
"""

from __future__ import annotations

import math
from typing import Any

from ..backends.base import DType
from ..devices import AccelRef, Operand
from ..devices.base._refusals import what_to_do, whole
from ..expressions import Elementwise
from ._library import LIBRARY, check_array, check_range

__all__ = ["adam", "adamw", "sgd"]


def _stepping(name: str, text: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Elementwise[Any]:
    return Elementwise(
        text, inputs=inputs, outputs=outputs, operation=name, library=LIBRARY, precision="float32"
    )


_PLAIN = _stepping(
    "nn.sgd",
    "p = param - lr * (grad + weight_decay * param)",
    ("param", "grad", "lr", "weight_decay"),
    ("p",),
)
_HEAVY = _stepping(
    "nn.sgd",
    "g = grad + weight_decay * param; b = kept * momentum_buffer + share * g;"
    "p = param - lr * (ahead * g + behind * b)",
    ("param", "grad", "momentum_buffer", "lr", "weight_decay", "kept", "share", "ahead", "behind"),
    ("p", "b"),
)
_ADAM = (
    "m = exp_avg + share * (g - exp_avg); v = beta * exp_avg_sq + other * g * g;"
    "p = shrink * param - rate * m / (sqrt(v) / root + eps)"
)
_MOMENTS = (
    *("param", "grad", "exp_avg", "exp_avg_sq", "share", "beta", "other", "rate", "root", "eps"),
    "shrink",
)
_COUPLED = _stepping(
    "nn.adam", f"g = grad + weight_decay * param; {_ADAM}", (*_MOMENTS, "weight_decay"), ("p", "m", "v")
)
_DECOUPLED = _stepping("nn.adamw", f"g = +grad; {_ADAM}", _MOMENTS, ("p", "m", "v"))


async def sgd(
    param: AccelRef,
    grad: Operand,
    momentum_buffer: AccelRef | None = None,
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
    if (momentum > 0) != (momentum_buffer is not None):
        raise ValueError(f"{name}: momentum and momentum_buffer go together, got momentum {momentum!r}")
    if nesterov and (momentum <= 0 or dampening):
        raise ValueError(
            f"{name}: nesterov needs momentum and no dampening, got {momentum!r} and {dampening!r}"
        )
    if momentum_buffer is None:
        _check(name, grad, param=param)
        await _PLAIN(param, grad, float(lr), float(weight_decay), out=(param,))
        return param
    _check(name, grad, param=param, momentum_buffer=momentum_buffer)
    kept, share = (0.0, 1.0) if is_first else (float(momentum), 1.0 - dampening)
    ahead, behind = (1.0, float(momentum)) if nesterov else (0.0, 1.0)
    states = param, momentum_buffer
    await _HEAVY(
        param, grad, momentum_buffer, float(lr), float(weight_decay), kept, share, ahead, behind, out=states
    )
    return param


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
    numbers = _numbers("nn.adam", step, lr, betas, eps, weight_decay)
    _check("nn.adam", grad, param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    states = param, exp_avg, exp_avg_sq
    await _COUPLED(param, grad, exp_avg, exp_avg_sq, *numbers, 1.0, float(weight_decay), out=states)
    return param


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
    numbers = _numbers("nn.adamw", step, lr, betas, eps, weight_decay)
    _check("nn.adamw", grad, param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    states, shrink = (param, exp_avg, exp_avg_sq), 1.0 - lr * weight_decay
    await _DECOUPLED(param, grad, exp_avg, exp_avg_sq, *numbers, shrink, out=states)
    return param


def _numbers(
    name: str, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[float, ...]:
    """Check the numbers of a step, and compute those of its formula, which are the same for all elements."""
    if whole(name, "step", step) < 1:
        raise ValueError(f"{name}: step must be at least 1, got {step}")
    given: object = betas
    if not isinstance(given, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}")
    check_range(name, 0, math.inf, lr=lr, eps=eps, weight_decay=weight_decay)
    first, second = betas
    check_range(name, 0, 1, betas=first)
    check_range(name, 0, 1, betas=second)
    # 1 - beta**step, without a loss of digits.
    corrections = [-math.expm1(step * math.log(beta)) if beta else 1.0 for beta in (first, second)]
    rate, root = lr / corrections[0], math.sqrt(corrections[1])
    return 1.0 - first, float(second), 1.0 - second, float(rate), root, float(eps)


def _check(name: str, grad: Operand, **arrays: AccelRef) -> None:
    """Require arrays of floating numbers of one shape, on a device but for the gradient."""
    check_array(name, grad=grad)
    shape = arrays["param"].shape if isinstance(arrays["param"], AccelRef) else None
    for argument, array in {**arrays, "grad": grad}.items():
        if argument != "grad" and not isinstance(array, AccelRef):
            told = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"{name}: {argument} must be an AccelRef, which is changed, got {told}")
        if DType.of(array.dtype).kind != "float":
            raise TypeError(f"{name}: {argument} must be of floating numbers, got {array.dtype}")
        if array.shape != shape:
            raise ValueError(f"{name}: {argument} must have the shape {shape} of param, got {array.shape}")
