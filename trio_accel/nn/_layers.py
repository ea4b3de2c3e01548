"""Layers: linear maps by the library of fused products, rows of a table, and elements left out at random."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any, Final, Literal, NamedTuple, Protocol

import attrs

from ..backends.base import DType, Ints
from ..backends.base.contract.ops import (
    NO_ARRAYS,
    ArraySpec,
    FusedDtypes,
    FusedEpilogue,
    FusedMatmulSpec,
    differ_in_dtype,
    fused_dtypes,
)
from ..devices import (
    AccelRef,
    Operand,
    Planned,
    Planner,
    bounded_integer,
    composed,
    device_of,
    operation,
    refuse_value,
)
from ..devices.base._views import NoViewError, reshaped
from ..expressions import Elementwise, Out, Scatter, check_array
from ._library import check_range, naming

__all__ = [
    "DropoutResult",
    "Linear",
    "LinearWeightGrads",
    "dropout",
    "dropout_grad",
    "embedding",
    "embedding_grad",
    "linear",
    "linear_input_grad",
    "linear_weight_grad",
]

_LIBRARY = "trio_accel.linalg:BlasLtActor"
_ACTIVATIONS = (None, "relu", "gelu")


class LinearWeightGrads(NamedTuple):
    """Gradients of `linear`'s parameters."""

    weight: AccelRef
    """Gradient of the weights, of shape (n, k)."""
    bias: AccelRef
    """Gradient of the bias, of shape (n,)."""


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
    optional_arrays = {} if bias is None else {"bias": bias}
    out, _ = _output(
        planner, message, (*x.shape[:-1], weight.shape[0]), x=x, weight=weight, **optional_arrays
    )
    spec = _product(name, activation or "none", _rows(x), _turned(weight), _rows(out.spec), **optional_arrays)
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
    first, second = (_merged(planner.name, *named_array) for named_array in (("grad", grad), ("x", x)))
    spec = _product(planner.name, "sum_a", _turned(first), second, out.spec, sums=bias.spec)
    return Planned(spec, LinearWeightGrads(out, bias), is_checked=True)


def _output(planner: Planner, message: Any, shape: Ints, **read: ArraySpec) -> tuple[AccelRef, FusedDtypes]:
    """Take or make the array of the result; the first two arrays that it reads are multiplied."""
    a, b, *_ = read.values()
    if differ_in_dtype(a.dtype, b.dtype):
        planner.refuse_dtypes(**read)
    dtypes = fused_dtypes(planner.name, a.dtype, b.dtype, getattr(message.out, "dtype", None))
    out = planner.output(shape, dtypes.out, message.out)
    if message.out is not None:
        planner.distinct("out", out.spec, **read)
    return out, dtypes


def _product(
    name: str, epilogue: FusedEpilogue, a: ArraySpec, b: ArraySpec, out: ArraySpec, **extra_arrays: ArraySpec
) -> FusedMatmulSpec:
    """Specify a product, and check it."""
    arrays: dict[str, Any] = {**NO_ARRAYS, **extra_arrays}
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
    and can also return the values for an activation's gradient.

    Args:
        x: Array of shape (..., k), with a dtype that `ta.linalg.fused_matmul` takes.
        weight: Matrix of shape (n, k), of the same dtype.
        bias: Vector of shape (n,), with the dtype of the result.
        activation: ``"relu"``, or ``"gelu"`` by the hyperbolic tangent: `gelu` with ``approximate="tanh"``.
        out: Array to write to; by default a new one.

    Returns:
        The result, of shape (..., n) and the dtype of `x`; bfloat16 of float8, int32 of int8.

    Raises:
        TypeError: Products of these dtypes are not supported.
        ValueError: The shapes do not fit, or the activation is unknown.
        NotSupportedError: The library or the card does not support the product.
    """
    ...


@operation(actor=_LIBRARY, plan=_plan_input_grad)
async def linear_input_grad(grad: Operand, weight: Operand, *, out: AccelRef | None = None) -> AccelRef:
    """Gradient of `linear` by `x`: ``grad @ weight``; one launch.

    Args:
        grad: Gradient of the loss by the result, before an activation: array of shape (..., n).
        weight: The one given to `linear`: matrix of shape (n, k), with the dtype of `grad`.
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
        x: The one given to `linear`: array of shape (..., k), with the dtype of `grad`; likewise.
        out: Array of shape (n, k) to write the gradient of the weights to; by default a new one.

    Returns:
        The gradients of weights and bias.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `linear`.
    """
    ...


# An index below 0 is moved down far enough that it cannot count from the end; `naming` restores it.
_ROW = "where(int64(indices) < 0, int64(indices) - length, int64(indices)), i(-1)"
_taking = Elementwise[AccelRef](
    f"weight[{_ROW}]", inputs=("indices", "weight", "length"), operation="nn.embedding", is_checked=True
)
_adding = Scatter(f"made[{_ROW}]", "add", inputs=("made", "indices", "length"), operation="nn.embedding_grad")


@composed
async def embedding(
    indices: Operand, weight: Operand, padding_idx: int | None = None, *, out: Out = None
) -> AccelRef:
    """Take rows of a table, as `torch.nn.functional.embedding`: one launch.

    The device checks indices before it uses them. `ta.arrays.take` also takes indices from the end.

    Args:
        indices: Integers from 0 to V - 1, of any shape.
        weight: Table of shape (V, D).
        padding_idx: Row that `embedding_grad` ignores; it is only checked here.
        out: Array to write to.

    Returns:
        The rows: the shape of `indices`, and then D.

    Raises:
        TypeError: An argument is not an array, or `indices` are not integers.
        ValueError: `weight` does not have two axes, there is no row `padding_idx`, or `out` has another shape
            or shares memory with an argument.
        OutOfRangeError: An index is not from 0 to V - 1. It is also an `IndexError`.
        NotSupportedError: float8.
    """
    name = "nn.embedding"
    check_array(name, indices=indices, weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight must have shape (V, D), got shape {weight.shape}")
    _check(name, indices, weight.shape[0], padding_idx)
    shape = (*indices.shape, weight.shape[1])
    with naming(name, "index", weight.shape[0]):
        return await _taking(indices[..., None], weight, weight.shape[0], shape=shape, out=out)


@composed
async def embedding_grad(
    grad: Operand, indices: Operand, num_embeddings: int, padding_idx: int | None = None
) -> AccelRef:
    """Compute the gradient of `embedding`'s table: the rows of `grad` are added up by their indices.

    float16 and bfloat16 are added in float32. Sums come in any order, so they may differ from call to call.
    It is two launches: one makes zeros.

    Args:
        grad: Gradient of the rows, with the shape of `indices`, followed by D.
        indices: The indices, which the device checks again.
        num_embeddings: V, the number of rows.
        padding_idx: Row with gradient 0; None for none.

    Returns:
        The gradient, of shape (V, D) and the dtype of `grad`.

    Raises:
        TypeError: An argument is not an array, or `indices` or the others are not integers.
        ValueError: `grad` has another shape, or there is no row `padding_idx`.
        OutOfRangeError: See `embedding`.
        NotSupportedError: float8.
    """
    name = "nn.embedding_grad"
    check_array(name, grad=grad, indices=indices)
    count = bounded_integer(name, "num_embeddings", num_embeddings)
    padding = _check(name, indices, count, padding_idx)
    if grad.ndim != indices.ndim + 1 or grad.shape[:-1] != indices.shape:
        raise ValueError(
            f"{name}: grad must have the shape {indices.shape} of indices and one axis more, "
            f"got shape {grad.shape}"
        )
    dtype = DType.of(grad.dtype)
    wide = DType.float32 if dtype in (DType.float16, DType.bfloat16) else dtype
    table_grad = await device_of(name, grad, indices).zeros((count, grad.shape[-1]), wide)
    with naming(name, "index", count):
        await _adding(table_grad, indices[..., None], count, grad, shape=grad.shape)
    if padding is not None:
        await table_grad[padding].fill(0)
    return table_grad if wide is dtype else await table_grad.cast(dtype)


def _check(name: str, indices: Operand, length: int, padding_idx: int | None) -> int | None:
    if DType.of(indices.dtype).kind not in ("int", "uint"):
        raise TypeError(f"{name}: indices must be integers, got {indices.dtype}")
    if padding_idx is None:
        return None
    row = bounded_integer(name, "padding_idx", padding_idx, "an integer or None")
    if not -length <= row < length:
        raise ValueError(f"{name}: padding_idx must be a row of {length}, got {padding_idx}")
    return row % length


class DropoutResult(NamedTuple):
    """The rest of an array; see `dropout`."""

    y: AccelRef
    """The elements, or 0."""
    mask: AccelRef
    """Truth values: which are left."""


class _Uniform(Protocol):
    """Draws numbers, as `ta.random.Generator` does."""

    def uniform(self, shape: Ints, dtype: str) -> Coroutine[Any, Any, AccelRef]: ...


# A draw is above 0 and up to 1: with p of 0 all are left, with p of 1 none.
_dropping = Elementwise[Any](
    "mask = drawn > p; y = where(mask, x * scale, 0)",
    inputs=("x", "drawn", "p", "scale"),
    outputs=("y", "mask"),
    operation="nn.dropout",
    promoted=("x", "scale"),
)
_slopes = Elementwise[AccelRef](
    "where(mask, grad * scale, 0)",
    inputs=("grad", "mask", "scale"),
    operation="nn.dropout_grad",
    promoted=("grad", "scale"),
    truths=("mask",),
)


@composed
async def dropout(x: Operand, p: float = 0.5, *, generator: _Uniform) -> DropoutResult:
    """Replace elements by 0 at random, and divide the others by ``1 - p``, as `torch.nn.functional.dropout`.

    It is two launches: one draws a number of float32 for each element. The same state of the generator makes
    the same mask on every backend. While a model is not trained, leave the call out.

    Args:
        x: The array, of floating numbers.
        p: Probability that an element is left out, from 0 to 1.
        generator: A `ta.random.Generator` of the device.

    Returns:
        The elements, with the shape and dtype of `x`; and the mask, which `dropout_grad` takes.

    Raises:
        TypeError: `x` is not an array of floating numbers, or `generator` no generator.
        ValueError: `p` is not from 0 to 1.
        NotSupportedError: float8.
    """
    check_array("nn.dropout", x=x)
    check_range("nn.dropout", 0, 1, is_closed=True, p=p)
    candidate: object = generator
    if not callable(getattr(candidate, "uniform", None)):
        raise TypeError(f"nn.dropout: generator must be a random.Generator, got {type(generator).__name__}")
    scale = _scale("nn.dropout: x", x, p)
    y, mask = await _dropping(x, await generator.uniform(x.shape, "float32"), float(p), scale)
    return DropoutResult(y, mask)


@composed
async def dropout_grad(grad: Operand, mask: Operand, p: float = 0.5) -> AccelRef:
    """Compute the gradient of `dropout`: one launch.

    Args:
        grad: Gradient of the elements.
        mask: The mask that it has returned.
        p: The same as there.

    Returns:
        The gradient, with the shape and dtype of `grad`.

    Raises:
        TypeError: `grad` is not an array of floating numbers, or `mask` none of truth values.
        ValueError: Different shapes, or `p` is not from 0 to 1.
        NotSupportedError: float8.
    """
    check_array("nn.dropout_grad", grad=grad, mask=mask)
    check_range("nn.dropout_grad", 0, 1, is_closed=True, p=p)
    if grad.shape != mask.shape:
        raise ValueError(
            f"nn.dropout_grad: grad and mask must have the same shape, got {grad.shape} and {mask.shape}"
        )
    return await _slopes(grad, mask, _scale("nn.dropout_grad: grad", grad, p))


def _scale(label: str, x: Operand, p: float) -> float:
    if not DType.of(x.dtype).is_inexact:
        raise TypeError(f"{label} must be of a floating dtype, got {x.dtype}; use cast()")
    return 1 / (1 - float(p)) if p < 1 else 0.0


Linear: Final = linear.message
