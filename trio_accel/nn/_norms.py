"""Normalizations for images and groups of channels, and the gradients of all normalizations.

Arrays have channels along axis 1: shape (N, C, ...). Everything is computed in float64, and rounded once.
Integers become float64. The counts of launches hold for float32 and float64: intermediate results of float16
and bfloat16 are arrays of float32, which are made first. See `ta.arrays.softmax` for few long rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backends.base import DType, Ints
from ..devices import AccelRef, Operand, bounded_integer, composed, device_of
from ..expressions import (
    Axis,
    Elementwise,
    ExpressionArgument,
    Out,
    Reduction,
    axes_of,
    check_array,
    reduced,
    scaled,
)
from ._library import check_range, check_real, summing

__all__ = [
    "BatchNormResult",
    "NormGradients",
    "RMSNormGradients",
    "batch_norm",
    "batch_norm_training",
    "batch_norm_training_grad",
    "group_norm",
    "group_norm_grad",
    "instance_norm",
    "instance_norm_grad",
    "layer_norm_grad",
    "rms_norm_grad",
]


class BatchNormResult(NamedTuple):
    """A normalized batch, and its statistics; see `batch_norm_training`."""

    y: AccelRef
    """The elements."""
    mean: AccelRef
    """Means of the channels, of float32 at least."""
    var: AccelRef
    """Variances of the channels: sums of squares, divided by the count."""


class NormGradients(NamedTuple):
    """Gradients of a normalization."""

    x: AccelRef
    """Of the array, with its shape."""
    weight: AccelRef
    """Of the factors."""
    bias: AccelRef
    """Of what is added after them."""


class RMSNormGradients(NamedTuple):
    """Gradients of `ta.arrays.rms_norm`."""

    x: AccelRef
    """Of the array, with its shape."""
    weight: AccelRef
    """Of the factors."""


# Ioffe and Szegedy, Batch Normalization (2015); Ba, Kiros and Hinton, Layer Normalization (2016).
# The inverse of the deviation, and its name for the elements before they were scaled.
_CENTRED = "d = x - mean(x); r = 1 / sqrt(mean(d * d) + eps)", "r"
_ROOT = "d = +x; r = 1 / sqrt(mean(d * d) + eps)", "r"
_SCALED = scaled("x", "u", "k", raises=False)
_SCALED_RMS = "r = 1 / sqrt(mean(d * d) + eps * k * k)", "(r * k)"
_WIDE_CENTRED = f"{_SCALED} d = u - mean(u); {_SCALED_RMS[0]}", _SCALED_RMS[1]
_WIDE_ROOT = f"{_SCALED} d = +u; {_SCALED_RMS[0]}", _SCALED_RMS[1]


def _parts(centred: tuple[str, str], root: tuple[str, str]) -> dict[str, str]:
    def slope(first: str, factor: str) -> str:
        return f"{first}; g = grad * weight; y = (g - mean(g) - d * r * (mean(g * d) * r)) * {factor}"

    return {
        "y": f"{centred[0]}; y = d * r * weight + bias",
        "mean": "y = mean(x)",
        "var": "d = x - mean(x); y = mean(d * d)",
        "x": slope(*centred),
        "rms x": slope(*root).replace(" - mean(g) -", " -"),
        "product": f"{centred[0]}; y = grad * (d * r)",
        "rms product": f"{root[0]}; y = grad * (d * r)",
        "weight": f"{centred[0]}; y = sum(grad * d) * r",
    }


_PARTS, _WIDE_PARTS = _parts(_CENTRED, _ROOT), _parts(_WIDE_CENTRED, _WIDE_ROOT)
_INPUTS = {
    "y": ("x", "weight", "bias", "eps"),
    "mean": ("x",),
    "var": ("x",),
    "x": ("grad", "x", "weight", "eps"),
    "product": ("grad", "x", "eps"),
    "weight": ("grad", "x", "eps"),
}


@functools.cache
def _part(name: str, part: str) -> Reduction:
    inputs = _INPUTS[part.removeprefix("rms ")]
    text, wide = _PARTS[part], _WIDE_PARTS[part]
    return Reduction(text, inputs=inputs, precision="float64", operation=name, wide=wide)


async def _compute_part(
    name: str, part: str, *operands: ExpressionArgument, axis: Axis, out: Out = None
) -> AccelRef:
    rows = _part(name, part)
    return await rows.ask(rows.compute(*operands, axis=axis, out=out))


_normalizing = Elementwise[AccelRef](
    "y = (x - running_mean) / sqrt(running_var + eps) * weight + bias",
    inputs=("x", "running_mean", "running_var", "weight", "bias", "eps"),
    operation="nn.batch_norm",
    precision="float64",
)
_moving = Elementwise[Any](
    "new_mean = running_mean + momentum * (mean - running_mean);"
    "new_var = running_var + momentum * (var * scale - running_var)",
    inputs=("running_mean", "running_var", "mean", "var", "scale", "momentum"),
    outputs=("new_mean", "new_var"),
    operation="nn.batch_norm_training",
)


@composed
async def batch_norm(
    x: Operand,
    running_mean: Operand,
    running_var: Operand,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    eps: float = 1e-5,
    out: Out = None,
) -> AccelRef:
    """Normalize channels by given statistics, as `torch.nn.functional.batch_norm` without training.

    That is ``(x - running_mean) / sqrt(running_var + eps) * weight + bias``: one launch.

    Args:
        x: Array of shape (N, C, ...).
        running_mean: Means of the channels, of shape (C,).
        running_var: Variances of the channels, of shape (C,).
        weight: Factors, of shape (C,), or one for all.
        bias: Added after that, of shape (C,), or one for all.
        eps: Added to the variances.
        out: Array to write to; it may be `x`.

    Returns:
        An array with the shape of `x`, of the dtype that all are promoted to, at least a floating one.

    Raises:
        TypeError: `x` is not an array, an argument is complex, or the result does not convert to the dtype of
            `out`.
        ValueError: `x` has fewer than two axes, another array does not have shape (C,), or `out` has another
            shape or shares memory with an argument that is not the same array.
        NotSupportedError: float8.
    """
    name = "nn.batch_norm"
    check_array(name, running_mean=running_mean, running_var=running_var)
    channel_arrays = _by_channel(
        name, x, 2, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    check_range(name, 0, math.inf, eps=eps)
    return await _normalizing(x, *channel_arrays, float(eps), out=out)


@composed
async def batch_norm_training(
    x: Operand,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    running_mean: Out = None,
    running_var: Out = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> BatchNormResult:
    """Normalize channels by their own mean and variance, as `torch.nn.functional.batch_norm` with training.

    It is one launch for each of the three results, and one for the running statistics.

    Args:
        x: Array of shape (N, C, ...).
        weight: Factors, of shape (C,), or one for all.
        bias: Added after that, of shape (C,), or one for all.
        running_mean: Array of shape (C,) that is changed in place, to
            ``(1 - momentum) * running_mean + momentum * mean``; None for none.
        running_var: Likewise, by the variance of a sample: divided by the count minus 1.
        momentum: Share of this batch.
        eps: Added to the variances.

    Returns:
        The elements as of `batch_norm`, and the statistics that they were normalized by.

    Raises:
        TypeError, NotSupportedError: See `batch_norm`.
        ValueError: See `batch_norm`; a channel has less than two elements; or only one running array.
    """
    name = "nn.batch_norm_training"
    check_range(name, 0, math.inf, eps=eps)
    check_range(name, 0, 1, is_closed=True, momentum=momentum)
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{name}: running_mean and running_var must be given together, or not at all")
    factors = _by_channel(name, x, 2, weight=weight, bias=bias)
    axes, count = _non_channel_axes(x.shape), x.size // max(x.shape[1], 1)
    if count < 2:
        raise ValueError(f"{name}: a channel must have two elements at least, got x of shape {x.shape}")
    if running_mean is not None and running_var is not None:
        check_array(name, running_mean=running_mean, running_var=running_var)
        _by_channel(name, x, 2, running_mean=running_mean, running_var=running_var)
    y = await _compute_part(name, "y", x, *factors, float(eps), axis=axes)
    mean, var = [
        await _compute_part(name, part, x, axis=axes, out=await _wide(name, x, x.shape[1:2], x, *factors))
        for part in ("mean", "var")
    ]
    if running_mean is not None and running_var is not None:
        moved = running_mean, running_var
        await _moving(*moved, mean, var, count / (count - 1), float(momentum), out=moved)
    return BatchNormResult(y, mean, var)


@composed
async def batch_norm_training_grad(
    grad: Operand, x: Operand, weight: ExpressionArgument = 1, *, eps: float = 1e-5
) -> NormGradients:
    """Compute the gradients of `batch_norm_training`: one launch each.

    Args:
        grad: Gradient of the returned elements.
        x: The array before the normalization.
        weight: The factors.
        eps: See the normalization.

    Returns:
        The gradients of `x`, and of `weight` and `bias`, of shape (C,).

    Raises:
        TypeError, ValueError, NotSupportedError: As of `batch_norm`; or `grad` has another shape than `x`.
    """
    name = "nn.batch_norm_training_grad"
    _check_grad(name, grad, x, eps)
    (factors,) = _by_channel(name, x, 2, weight=weight)
    axes = _non_channel_axes(x.shape)
    return NormGradients(
        await _compute_part(name, "x", grad, x, factors, float(eps), axis=axes),
        await _compute_part(name, "weight", grad, x, float(eps), axis=axes),
        await summing(name)(grad, axis=axes),
    )


@composed
async def instance_norm(
    x: Operand,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    eps: float = 1e-5,
    out: Out = None,
) -> AccelRef:
    """Normalize each channel of each image by itself, as `torch.nn.functional.instance_norm`: one launch.

    Args:
        x: Array of shape (N, C, ...), of three axes at least.
        weight: Factors, of shape (C,), or one for all.
        bias: Added after that, of shape (C,), or one for all.
        eps: Added to the variances.
        out: Array to write to; it may be `x`.

    Returns:
        See `batch_norm`.

    Raises:
        TypeError, ValueError, NotSupportedError: See `batch_norm`.
    """
    name = "nn.instance_norm"
    factors = _by_channel(name, x, 3, weight=weight, bias=bias)
    check_range(name, 0, math.inf, eps=eps)
    return await _compute_part(name, "y", x, *factors, float(eps), axis=range(2, x.ndim), out=out)


@composed
async def instance_norm_grad(
    grad: Operand, x: Operand, weight: ExpressionArgument = 1, *, eps: float = 1e-5
) -> NormGradients:
    """Compute the gradients of `instance_norm`: four launches.

    See `batch_norm_training_grad` for arguments, results and errors.
    """
    name = "nn.instance_norm_grad"
    _check_grad(name, grad, x, eps)
    (factors,) = _by_channel(name, x, 3, weight=weight)
    return await _gradients(
        name, grad, x, factors, eps, range(2, x.ndim), _non_channel_axes(x.shape), x.shape[1:2]
    )


@composed
async def group_norm(
    x: Operand,
    num_groups: int,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    eps: float = 1e-5,
    out: Out = None,
) -> AccelRef:
    """Normalize groups of channels in each image, as `torch.nn.functional.group_norm`: one launch.

    Args:
        x: Array of shape (N, C, ...).
        num_groups: Number of groups, which divides C.
        weight: Factors, of shape (C,), or one for all.
        bias: Added after that, of shape (C,), or one for all.
        eps: Added to the variances.
        out: Array to write to; it may be `x`.

    Returns:
        See `batch_norm`.

    Raises:
        TypeError: See `batch_norm`; or `num_groups` is not an integer.
        ValueError: See `batch_norm`; or `num_groups` does not divide C.
        NotSupportedError: float8.
    """
    name = "nn.group_norm"
    _by_channel(name, x, 2, weight=weight, bias=bias)
    check_range(name, 0, math.inf, eps=eps)
    apart, factors = (
        _apart(name, x, num_groups),
        [_in_groups(x, num_groups, factor) for factor in (weight, bias)],
    )
    if out is not None and out.shape != x.shape:
        raise ValueError(f"{name}: out must have shape {x.shape}, got shape {out.shape}")
    result = await _compute_part(
        name,
        "y",
        x.reshape(apart),
        *factors,
        float(eps),
        axis=range(2, len(apart)),
        out=None if out is None else out.reshape(apart),
    )
    return result.reshape(x.shape) if out is None else out


@composed
async def group_norm_grad(
    grad: Operand, x: Operand, num_groups: int, weight: ExpressionArgument = 1, *, eps: float = 1e-5
) -> NormGradients:
    """Compute the gradients of `group_norm`: four launches.

    Args:
        grad: Gradient of its result.
        x: The array before the normalization.
        num_groups: See `group_norm`.
        weight: The factors.
        eps: See `group_norm`.

    Returns:
        The gradients of `x`, and of `weight` and `bias`, of shape (C,).

    Raises:
        TypeError, ValueError, NotSupportedError: As of `group_norm`; or `grad` has another shape than `x`.
    """
    name = "nn.group_norm_grad"
    _check_grad(name, grad, x, eps)
    _by_channel(name, x, 2, weight=weight)
    apart = _apart(name, x, num_groups)
    operands = grad.reshape(apart), x.reshape(apart), _in_groups(x, num_groups, weight)
    axes, sum_axes = range(2, len(apart)), (0, *range(3, len(apart)))
    gradients = await _gradients(name, *operands, eps, axes, sum_axes, x.shape[1:2])
    return gradients._replace(x=gradients.x.reshape(x.shape))


@composed
async def layer_norm_grad(
    grad: Operand, x: Operand, weight: ExpressionArgument = 1, *, axis: Axis = -1, eps: float = 1e-5
) -> NormGradients:
    """Compute the gradients of `ta.arrays.layer_norm`: four launches.

    Args:
        grad: Gradient of its result, with the shape of `x`.
        x: The array before the normalization.
        weight: The factors: an array that broadcasts to `x`, or one for all.
        axis: See `ta.arrays.layer_norm`.
        eps: See `ta.arrays.layer_norm`.

    Returns:
        The gradients of `x`, `weight` and `bias`; the latter have the shape of `weight`. If it is a number,
        they are for factors of each element along the axes.

    Raises:
        TypeError: An argument is not an array where it must be one, or complex.
        ValueError: Shapes that do not fit, or an axis out of range.
        NotSupportedError: float8.
    """
    name = "nn.layer_norm_grad"
    axes, sum_axes, shape = _of_layer(name, grad, x, weight, axis, eps)
    return await _gradients(name, grad, x, weight, eps, axes, sum_axes, shape)


@composed
async def rms_norm_grad(
    grad: Operand, x: Operand, weight: ExpressionArgument = 1, *, axis: Axis = -1, eps: float = 1e-6
) -> RMSNormGradients:
    """Compute the gradients of `ta.arrays.rms_norm`: three launches.

    See `layer_norm_grad` for arguments and errors, and so are the results, without a bias.
    """
    name = "nn.rms_norm_grad"
    axes, sum_axes, shape = _of_layer(name, grad, x, weight, axis, eps)
    x_grad = await _compute_part(name, "rms x", grad, x, weight, float(eps), axis=axes)
    product = await _product(name, "rms product", grad, x, eps, axes)
    summed = await summing(name)(product, axis=sum_axes, out=await _narrow(name, product, x, sum_axes))
    return RMSNormGradients(x_grad, summed.reshape(shape))


def _of_layer(
    name: str, grad: Operand, x: Operand, weight: ExpressionArgument, axis: Axis, eps: float
) -> tuple[Ints, Ints, Ints]:
    """Check the arguments; return the axes, the axes to sum gradients of the factors along, and a shape."""
    _check_grad(name, grad, x, eps)
    check_real(name, weight=weight)
    axes = axes_of(name, x.shape, axis)
    if not isinstance(weight, (AccelRef, np.ndarray)):
        sum_axes = tuple(dim for dim in range(x.ndim) if dim not in axes)
        return axes, sum_axes, reduced(x.shape, sum_axes)
    extents = (1,) * (x.ndim - weight.ndim) + weight.shape
    if len(extents) != x.ndim or any(
        extent not in (1, x_extent) for extent, x_extent in zip(extents, x.shape, strict=True)
    ):
        raise ValueError(f"{name}: weight of shape {weight.shape} does not broadcast to x of shape {x.shape}")
    return axes, tuple(dim for dim, extent in enumerate(extents) if extent == 1), weight.shape


async def _gradients(
    name: str,
    grad: Operand,
    x: Operand,
    weight: ExpressionArgument,
    eps: float,
    axes: Sequence[int],
    sum_axes: Sequence[int],
    shape: Ints,
) -> NormGradients:
    """Compute all gradients; gradients of the factors are summed along `sum_axes`, and get a shape."""
    x_grad = await _compute_part(name, "x", grad, x, weight, float(eps), axis=axes)
    product = await _product(name, "product", grad, x, eps, axes)
    weights = await summing(name)(product, axis=sum_axes, out=await _narrow(name, product, x, sum_axes))
    biases = await summing(name)(grad, axis=sum_axes)
    return NormGradients(x_grad, weights.reshape(shape), biases.reshape(shape))


async def _product(
    name: str, part: str, grad: Operand, x: Operand, eps: float, axes: Sequence[int]
) -> AccelRef:
    """Multiply by the normalized array, in float32 at least, so that sums are rounded once."""
    out = await _wide(name, x, x.shape, grad)
    return await _compute_part(name, part, grad, x, float(eps), axis=axes, out=out)


async def _narrow(name: str, product: AccelRef, x: Operand, sum_axes: Sequence[int]) -> Out:
    """Make an array for a sum, with the dtype of `x`; None where the sum has that by itself."""
    dtype = DType.of(x.dtype)
    if dtype is product.dtype or not dtype.is_inexact:
        return None
    return await device_of(name, product).empty(reduced(x.shape, sum_axes), dtype)


async def _wide(name: str, x: Operand, shape: Ints, *operands: object) -> Out:
    """Make an array of float32 for an intermediate result; None if its dtype has as many digits."""
    dtype = DType.of(x.dtype)
    if not dtype.is_inexact or dtype.itemsize >= DType.float32.itemsize:
        return None
    return await device_of(name, x, *operands).empty(shape, DType.float32)


def _check_grad(name: str, grad: Operand, x: Operand, eps: float) -> None:
    check_array(name, grad=grad, x=x)
    check_real(name, grad=grad, x=x)
    check_range(name, 0, math.inf, eps=eps)
    if grad.shape != x.shape:
        raise ValueError(f"{name}: grad must have the shape {x.shape} of x, got shape {grad.shape}")


def _non_channel_axes(shape: Ints) -> Ints:
    """Return all axes except the channels'."""
    return (0, *range(2, len(shape)))


def _by_channel(
    name: str, x: Operand, min_ndim: int, **arguments: ExpressionArgument
) -> list[ExpressionArgument]:
    """Check arrays of one element for each channel, and spread them over the axes of `x` after these."""
    check_array(name, x=x)
    check_real(name, x=x, **arguments)
    if x.ndim < min_ndim:
        raise ValueError(f"{name}: x must have shape (N, C{', ...' * (min_ndim > 2)}), got shape {x.shape}")
    for argument, value in arguments.items():
        if isinstance(value, (AccelRef, np.ndarray)) and value.shape != (x.shape[1],):
            raise ValueError(
                f"{name}: {argument} must have shape {(x.shape[1],)}, one element for each channel of x, "
                f"got shape {value.shape}"
            )
    return [_spread(value, (x.shape[1], *(1,) * (x.ndim - 2))) for value in arguments.values()]


def _spread(value: ExpressionArgument, shape: Ints) -> ExpressionArgument:
    return value.reshape(shape) if isinstance(value, (AccelRef, np.ndarray)) else value


def _apart(name: str, x: Operand, groups: int) -> Ints:
    """Return the shape of `x` with its channels in groups."""
    channels, count = x.shape[1], bounded_integer(name, "num_groups", groups)
    if count < 1 or channels % count:
        raise ValueError(f"{name}: num_groups must divide the {channels} channels of x, got {groups}")
    return (x.shape[0], count, channels // count, *x.shape[2:])


def _in_groups(x: Operand, groups: int, value: ExpressionArgument) -> ExpressionArgument:
    return _spread(value, (groups, x.shape[1] // groups, *(1,) * (x.ndim - 2)))
