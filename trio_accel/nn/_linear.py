"""Layers of linear maps, by the library of fused products."""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs

from ..backends.base.ops import NO_ARRAYS, ArraySpec, FusedMatmulSpec, fused_dtypes
from ..devices import AccelRef, Operand, Planned, Planner, operation
from ..devices.operations._plan_source import refuse_value

__all__ = ["Linear", "linear"]

_ACTIVATIONS = (None, "relu", "gelu")


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
    dtypes = fused_dtypes(name, x.dtype, weight.dtype, getattr(message.out, "dtype", None))
    out = planner.output((*x.shape[:-1], weight.shape[0]), dtypes.out, message.out)
    given = {} if bias is None else {"bias": bias}
    if message.out is not None:
        planner.distinct("out", out.spec, x=x, weight=weight, **given)
    turned = attrs.evolve(weight, shape=weight.shape[::-1], strides=weight.strides[::-1])
    arrays = {**NO_ARRAYS, **given}
    spec = FusedMatmulSpec(
        activation or "none", "ieee", 0, 1.0, 0.0, _rows(x), turned, out=_rows(out.spec), **arrays
    )
    spec.check_shapes(name)
    return Planned(spec, out, is_checked=True)


def _rows(array: ArraySpec) -> ArraySpec:
    """See a vector as a matrix of one row."""
    if array.ndim > 1:
        return array
    return attrs.evolve(array, shape=(1, *array.shape), strides=(array.strides[0], *array.strides))


@operation(actor="trio_accel.linalg:BlasLtActor", plan=_plan_linear)
async def linear(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: Literal["relu", "gelu"] | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Compute ``activation(x @ weight.T + bias)``, as `torch.nn.functional.linear`; one launch.

    `ta.linalg.fused_matmul` has more options, and what gradients need.

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


Linear: Final = linear.message
