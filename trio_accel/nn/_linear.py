"""Layers of linear maps, by the library of fused products."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple

import attrs

from ..backends.base.contract.ops import (
    NO_ARRAYS,
    ArraySpec,
    FusedDtypes,
    FusedEpilogue,
    FusedMatmulSpec,
    fused_dtypes,
)
from ..devices import AccelRef, Operand, Planned, Planner, operation
from ..devices.base._views import NoViewError, reshaped
from ..devices.operations._plan_source import refuse_value

__all__ = [
    "Linear", "LinearInputGrad", "LinearWeightGrad", "LinearWeightGrads", "linear", "linear_input_grad",
    "linear_weight_grad",
]  # fmt: skip

_LIBRARY = "trio_accel.linalg:BlasLtActor"
_ACTIVATIONS = (None, "relu", "gelu")


class LinearWeightGrads(NamedTuple):
    """Gradients of the parameters of `linear`."""

    weight: AccelRef
    """Of the weights, of shape (n, k)."""
    bias: AccelRef
    """Of the bias, of shape (n,)."""


def _plan_linear(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by hand: the weights are seen transposed, and the arguments may be one vector."""
    name, activation = planner.name, message.activation
    if activation not in _ACTIVATIONS:
        refuse_value(name, "activation", _ACTIVATIONS, activation)
    x, weight = planner.read("x", message.x), planner.read("weight", message.weight)
    bias = None if message.bias is None else planner.read("bias", message.bias)
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"{name}: x must have shape (..., k) and weight (n, k), got {x.shape} and {weight.shape}"
        )
    given = {} if bias is None else {"bias": bias}
    out, _ = _output(planner, message, (*x.shape[:-1], weight.shape[0]), x=x, weight=weight, **given)
    spec = _product(name, activation or "none", _rows(x), _turned(weight), _rows(out.spec), **given)
    return Planned(spec, out, is_checked=True)


def _plan_input_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan by hand: the gradient may be one vector."""
    grad, weight = planner.read("grad", message.grad), planner.read("weight", message.weight)
    if weight.ndim != 2 or grad.shape[-1:] != weight.shape[:1]:
        raise ValueError(
            f"{planner.name}: grad must have shape (..., n) and weight (n, k), got {grad.shape} and "
            f"{weight.shape}"
        )
    out, _ = _output(planner, message, (*grad.shape[:-1], weight.shape[1]), grad=grad, weight=weight)
    spec = _product(planner.name, "none", _rows(grad), weight, _rows(out.spec))
    return Planned(spec, out, is_checked=True)


def _plan_weight_grad(message: Any, planner: Planner) -> Planned[LinearWeightGrads]:
    """Plan by hand: all axes but the last one are added along, as one."""
    grad, x = planner.read("grad", message.grad), planner.read("x", message.x)
    if not grad.ndim or grad.ndim != x.ndim or grad.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{planner.name}: grad must have shape (..., n) and x (..., k), got {grad.shape} and {x.shape}"
        )
    out, dtypes = _output(planner, message, (grad.shape[-1], x.shape[-1]), grad=grad, x=x)
    bias = planner.output(grad.shape[-1:], dtypes.bias)
    first, second = (_merged(planner.name, *one) for one in (("grad", grad), ("x", x)))
    spec = _product(planner.name, "sum_a", _turned(first), second, out.spec, sums=bias.spec)
    return Planned(spec, LinearWeightGrads(out, bias), is_checked=True)


def _output(
    planner: Planner, message: Any, shape: tuple[int, ...], **read: ArraySpec
) -> tuple[AccelRef, FusedDtypes]:
    """Take or make the array of the result; of what is read, the first two arrays are multiplied."""
    a, b, *_ = read.values()
    dtypes = fused_dtypes(planner.name, a.dtype, b.dtype, getattr(message.out, "dtype", None))
    out = planner.output(shape, dtypes.out, message.out)
    if message.out is not None:
        planner.distinct("out", out.spec, **read)
    return out, dtypes


def _product(
    name: str, epilogue: FusedEpilogue, a: ArraySpec, b: ArraySpec, out: ArraySpec, **given: ArraySpec
) -> FusedMatmulSpec:
    """Specify a product, and check it."""
    arrays: dict[str, Any] = {**NO_ARRAYS, **given}
    spec = FusedMatmulSpec(epilogue, "ieee", 0, 1.0, 0.0, a, b, out=out, **arrays)
    spec.check_shapes(name)
    return spec


def _merged(name: str, argument: str, array: ArraySpec) -> ArraySpec:
    """See all axes but the last one as one."""
    try:
        return reshaped(array, (math.prod(array.shape[:-1]), array.shape[-1]))
    except NoViewError:
        raise ValueError(
            f"{name}: the axes of {argument} but the last one must be one where they lie, got shape "
            f"{array.shape} with strides {array.strides}; use a copy: await {argument}.copy()"
        ) from None


def _turned(matrix: ArraySpec) -> ArraySpec:
    """See a matrix transposed."""
    return attrs.evolve(matrix, shape=matrix.shape[::-1], strides=matrix.strides[::-1])


def _rows(array: ArraySpec) -> ArraySpec:
    """See a vector as a matrix of one row."""
    if array.ndim > 1:
        return array
    return attrs.evolve(array, shape=(1, *array.shape), strides=(array.strides[0], *array.strides))


@operation(actor=_LIBRARY, plan=_plan_linear)
async def linear(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: Literal["relu", "gelu"] | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Compute ``activation(x @ weight.T + bias)``, as `torch.nn.functional.linear`; one launch.

    Its gradients are `linear_input_grad` and `linear_weight_grad`. `ta.linalg.fused_matmul` has more options,
    and what the gradient of an activation in the same launch needs.

    Args:
        x: Array of shape (..., k), of a dtype of `ta.linalg.fused_matmul`.
        weight: Matrix of shape (n, k), of the same dtype.
        bias: Vector of shape (n,), of the dtype of the result.
        activation: ``"relu"``, or ``"gelu"`` by the hyperbolic tangent: `gelu` with ``approximate="tanh"``.
        out: Array to write to; by default a new one.

    Returns:
        The result, of shape (..., n) and the dtype of `x`; bfloat16 of float8, int32 of int8.

    Raises:
        TypeError: Dtypes without such products.
        ValueError: Shapes that do not fit, or another activation.
        NotSupportedError: The library or the card has no such product.
    """
    ...


@operation(actor=_LIBRARY, plan=_plan_input_grad)
async def linear_input_grad(grad: Operand, weight: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Gradient of `linear` by `x`: ``grad @ weight``; one launch.

    Args:
        grad: Gradient of the loss by the result, before an activation: array of shape (..., n).
        weight: The one given to `linear`: matrix of shape (n, k), of the dtype of `grad`.
        out: Array to write to; by default a new one.

    Returns:
        The gradient, of shape (..., k).

    Raises:
        TypeError, ValueError, NotSupportedError: As of `linear`.
    """
    ...


@operation(actor=_LIBRARY, plan=_plan_weight_grad)
async def linear_weight_grad(grad: Operand, x: Operand, *, out: AccelRef | None = None) -> LinearWeightGrads:
    """Gradients of `linear` by its weights and its bias: ``grad.T @ x``, and sums of `grad`; one launch.

    Args:
        grad: Gradient of the loss by the result, before an activation: array of shape (..., n). All axes but
            the last one are added along as one, so they have to be one where they lie, as for
            `AccelRef.reshape`.
        x: The one given to `linear`: array of shape (..., k), of the dtype of `grad`; likewise.
        out: Array of shape (n, k) to write the gradient of the weights to; by default a new one.

    Returns:
        The gradient of the weights, and that of the bias.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `linear`.
    """
    ...


Linear: Final = linear.message
LinearInputGrad: Final = linear_input_grad.message
LinearWeightGrad: Final = linear_weight_grad.message
