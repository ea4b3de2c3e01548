"""Convolutions and transposed convolutions along one to three axes, and their gradients.

Their plans check channels, groups and windows, and compute the shape of the result. They are functions and
not declared shapes, which cannot express extents that depend on strides and paddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs

from ..backends.base import Ints
from ..backends.base.contract.ops import ConvolutionInputGradSpec, ConvolutionSpec, ConvolutionWeightGradSpec
from ..devices import AccelRef, Operand, Planned, Planner, composed, operation, operation_like
from ..expressions import Reduction
from ._library import DnnActor, Windows, at_least, check_axes, check_dtypes, check_shape, shape_of, sizes

__all__ = [
    "Conv1d",
    "Conv2d",
    "ConvInputGrad",
    "ConvWeightGrad",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_bias_grad",
    "conv_input_grad",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_weight_grad",
]

_Sizes: TypeAlias = int | Sequence[int]
_Padding: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]
_NamedPadding: TypeAlias = _Padding | Literal["same", "valid"]

_summed = Reduction("x", "sum", inputs=["x"], operation="nn.conv_bias_grad")


def _windows_of(name: str, message: Any, window: Ints) -> Windows:
    """Check the window, stride, dilation and padding of a convolution, whose padding may have a name."""
    if min(window) < 1:
        raise ValueError(f"{name}: weight must have at least one element along each axis, got {window}")
    if not isinstance(message.padding, str):
        return Windows.of(name, message, window, message.padding)
    windows = Windows.of(name, message, window, 0)
    if message.padding == "valid":
        return windows
    if message.padding != "same":
        raise ValueError(f"{name}: padding must be numbers, 'same' or 'valid', got {message.padding!r}")
    if max(windows.stride) > 1:
        raise ValueError(f"{name}: padding 'same' needs a stride of 1, got {message.stride!r}")
    padding_before = tuple([(reach - 1) // 2 for reach in windows.reach])
    return attrs.evolve(
        windows, padding_before=padding_before, padding_after=tuple([reach // 2 for reach in windows.reach])
    )


def _count(name: str, message: Any, windows: Windows, spatial: Ints) -> Ints:
    """Count the windows along each spatial axis of the input. `message` is unused; see `_spread`."""
    padded = tuple(
        [sum(extents) for extents in zip(spatial, windows.padding_before, windows.padding_after, strict=True)]
    )
    axes = tuple(zip(padded, windows.reach, windows.stride, strict=True))
    if any(reach > extent for extent, reach, _ in axes):
        raise ValueError(
            f"{name}: windows must fit into the padded input: they have {windows.reach} elements with their "
            f"gaps, and it has {padded}"
        )
    return tuple([(extent - reach) // stride + 1 for extent, reach, stride in axes])


def _spread(name: str, message: Any, windows: Windows, counts: Ints) -> Ints:
    """Return the extents of a transposed convolution's result.

    The windows cover them and the paddings; `output_padding` adds elements at the end.
    """
    output_padding = sizes(name, "output_padding", message.output_padding, len(counts), 0)
    for extra, stride, dilation in zip(output_padding, windows.stride, windows.dilation, strict=True):
        if extra >= max(stride, dilation):
            raise ValueError(
                f"{name}: output_padding must be below the stride or the dilation, got {extra} for "
                f"stride {stride} and dilation {dilation}"
            )
    axes = zip(
        counts,
        windows.stride,
        windows.reach,
        windows.padding_before,
        windows.padding_after,
        output_padding,
        strict=True,
    )
    covered = [
        (count - 1) * stride + reach - padding_before - padding_after + extra
        for count, stride, reach, padding_before, padding_after, extra in axes
    ]
    if min(covered) < 1 or min(counts) < 1:
        raise ValueError(
            f"{name}: padding must leave an element along each axis, got {covered} for input of {counts}"
        )
    return tuple(covered)


def _check_channels(name: str, weight: Ints, groups: object, **channels: int) -> int:
    """Require that groups divide the channels; return the number of groups.

    Args:
        name: Name of the operation.
        weight: Shape of the weights.
        groups: The argument.
        **channels: The channels of two arrays, by their names: first of the array whose channels the first
            axis of the weights has, then of the other array. -1 if the channels follow from the weights.
    """
    count = at_least(name, "groups", groups, 1)
    if weight[0] % count:
        raise ValueError(
            f"{name}: groups must divide the channels: {weight[0]} of weight are not {count} groups"
        )
    for (argument, channel_count), expected in zip(
        channels.items(), (weight[0], weight[1] * count), strict=True
    ):
        if channel_count not in (-1, expected):
            raise ValueError(
                f"{name}: {argument} must have {expected} channels for weight of shape {weight} and "
                f"{count} groups, got {channel_count}"
            )
    return count


def _plan_convolution(
    dims: int, *, is_transposed: bool = False
) -> Callable[[Any, Planner], Planned[AccelRef]]:
    """Return the planning function of a convolution along `dims` axes, or of a transposed convolution."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        name = planner.name
        x, weight = planner.read("input", message.input), planner.read("weight", message.weight)
        bias = None if message.bias is None else planner.read("bias", message.bias)
        check_dtypes(planner, input=x, weight=weight, bias=bias)
        check_axes(name, "input", x.shape, dims)
        if weight.ndim != dims + 2:
            raise ValueError(f"{name}: weight must have {dims + 2} axes, got shape {weight.shape}")
        in_channels = x.shape[-dims - 1]
        names = (
            {"input": in_channels, "result": -1} if is_transposed else {"result": -1, "input": in_channels}
        )
        groups = _check_channels(name, weight.shape, message.groups, **names)
        if is_transposed and isinstance(message.padding, str):
            raise ValueError(f"{name}: padding must be numbers, got {message.padding!r}")
        windows = _windows_of(name, message, weight.shape[2:])
        spatial = (_spread if is_transposed else _count)(name, message, windows, x.shape[-dims:])
        out_channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
        if bias is not None:
            check_shape(name, "bias", bias, (out_channels,))
        out = planner.output((*x.shape[: -dims - 1], out_channels, *spatial), x.dtype, message.out)
        if message.out is not None:
            optional_inputs = {} if bias is None else {"bias": bias}
            planner.distinct("out", out.spec, input=x, weight=weight, **optional_inputs)
        cls = ConvolutionInputGradSpec if is_transposed else ConvolutionSpec
        numbers = windows.stride, windows.padding_before, windows.dilation
        return Planned(cls(*numbers, groups, x, weight, bias, out.spec), out, is_checked=True)

    return plan


@operation(actor=DnnActor, plan=_plan_convolution(2))
async def conv2d(
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: _Sizes = 1,
    padding: _NamedPadding = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Convolve images with weights, as `torch.nn.functional.conv2d`; this is a cross-correlation.

    float16 and bfloat16 are computed in float32 and rounded once. The CPU backend copies windows to a matrix
    and multiplies it (BLAS ``gemm``), for as many images at a time as fit into some megabytes. Its results
    are the same bits in each run. The CUDA backend uses cuDNN, and for float64 its own direct kernel.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), of float16, bfloat16, float32 or
            float64.
        weight: Array of shape (o, c / groups, rows, columns), of the same dtype.
        bias: Array of shape (o,), whose elements are added to the channels.
        stride: The elements from one window to the next: a number, or a number for each axis.
        padding: The number of zeros on both sides: a number, a number for each axis, or a pair for each axis,
            as in `numpy.pad`. ``"valid"`` means 0. ``"same"`` means as many as keep the extents; if the total
            is odd, the additional zero is at the end.
        dilation: The elements from one element of a window to the next: a number, or a number for each axis.
        groups: The number of groups of channels. Each makes an equal part of the result from its own input.
        out: Array to write to.

    Returns:
        The result, of shape (n, o, ...), or (o, ...) without n, with ``(extent + padding on both sides -
        dilation * (window - 1) - 1) // stride + 1`` elements along each axis, for a window of the weights.

    Raises:
        TypeError: Dtypes differ, or are not supported; or an argument is not an integer.
        ValueError: Shapes or channels do not fit, groups do not divide the channels, a stride or dilation is
            0, a padding is negative, a window is larger than the padded input, or ``"same"`` has a stride; or
            `out` has another shape or dtype, or shares memory with an argument.
    """
    ...


@operation_like(conv2d, plan=_plan_convolution(1))
def conv1d() -> None:
    """Convolve sequences of shape (n, c, length), as `torch.nn.functional.conv1d`; see `conv2d`."""


@operation_like(conv2d, plan=_plan_convolution(3))
def conv3d() -> None:
    """Convolve volumes of shape (n, c, d, h, w), as `torch.nn.functional.conv3d`; see `conv2d`."""


@operation(actor=DnnActor, plan=_plan_convolution(2, is_transposed=True))
async def conv_transpose2d(
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: _Sizes = 1,
    padding: _Padding = 0,
    output_padding: _Sizes = 0,
    groups: int = 1,
    dilation: _Sizes = 1,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Spread images over windows, as `torch.nn.functional.conv_transpose2d`: the transposed map of `conv2d`.

    The gradient by the input is `conv2d` of the result's gradient with the same weight. The gradient by the
    weight is `conv_weight_grad`, with the result's gradient as `input` and the input as `grad_output`.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), with a dtype of `conv2d`.
        weight: Array of shape (c, o / groups, rows, columns), of the same dtype.
        bias: Array of shape (o,), whose elements are added to the channels.
        stride: The elements from one window to the next in the result.
        padding: The number of elements to cut off on both sides, as numbers in the forms of `conv2d`.
        output_padding: The number of elements to add at the end, which is below the stride or the dilation.
        groups: The number of groups of channels.
        dilation: The elements from one element of a window to the next.
        out: Array to write to.

    Returns:
        The result, of shape (n, o, ...), or (o, ...) without n, with ``(extent - 1) * stride - padding on
        both sides + dilation * (window - 1) + output_padding + 1`` elements along each axis.

    Raises:
        TypeError, ValueError: As `conv2d`; or `output_padding` is too large, or `padding` leaves no element.
    """
    ...


@operation_like(conv_transpose2d, plan=_plan_convolution(1, is_transposed=True))
def conv_transpose1d() -> None:
    """Spread sequences over windows, as `torch.nn.functional.conv_transpose1d`; see `conv_transpose2d`."""


@operation_like(conv_transpose2d, plan=_plan_convolution(3, is_transposed=True))
def conv_transpose3d() -> None:
    """Spread volumes over windows, as `torch.nn.functional.conv_transpose3d`; see `conv_transpose2d`."""


def _plan_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    """Plan the gradient by the weights or by the input, of which the message has only the shape."""
    name, is_of_weight = planner.name, hasattr(message, "weight_size")
    names = ("input", "weight_size") if is_of_weight else ("input_size", "weight")
    size_argument, array_argument = names[is_of_weight], names[not is_of_weight]
    result_shape = shape_of(name, size_argument, getattr(message, size_argument))
    operand = planner.read(array_argument, getattr(message, array_argument))
    grad = planner.read("grad_output", message.grad_output)
    check_dtypes(planner, **{array_argument: operand}, grad_output=grad)
    x, weight = (operand.shape, result_shape) if is_of_weight else (result_shape, operand.shape)
    if not 3 <= len(weight) <= 5:
        raise ValueError(f"{name}: {names[1]} must have 1 to 3 axes after its channels, got {weight}")
    dims = len(weight) - 2
    check_axes(name, names[0], x, dims)
    channels = {"grad_output": -1, names[0]: x[-dims - 1]}
    groups = _check_channels(name, weight, message.groups, **channels)
    windows = _windows_of(name, message, weight[2:])
    shape = (*x[: -dims - 1], weight[0], *_count(name, message, windows, x[-dims:]))
    check_shape(name, "grad_output", grad, shape)
    out = planner.output(result_shape, grad.dtype)
    numbers = windows.stride, windows.padding_before, windows.dilation, groups
    spec = (
        ConvolutionWeightGradSpec(*numbers, operand, grad, out.spec)
        if is_of_weight
        else ConvolutionInputGradSpec(*numbers, grad, operand, None, out.spec)
    )
    return Planned(spec, out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_grad)
async def conv_input_grad(
    input_size: Sequence[int],
    weight: Operand,
    grad_output: Operand,
    stride: _Sizes = 1,
    padding: _NamedPadding = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> AccelRef:
    """Compute the gradient of a convolution by its input, as `torch.nn.grad.conv2d_input`.

    The number of the weights' axes selects between `conv1d`, `conv2d` and `conv3d`.

    Args:
        input_size: Shape of the input.
        weight: The weights.
        grad_output: The gradient by the result, of the result's shape and the dtype of `weight`.
        stride: As in the convolution.
        padding: As in the convolution.
        dilation: As in the convolution.
        groups: As in the convolution.

    Returns:
        The gradient, of shape `input_size`.

    Raises:
        TypeError, ValueError: As `conv2d`; or `grad_output` has another shape than the result.
    """
    ...


@operation(actor=DnnActor, plan=_plan_grad)
async def conv_weight_grad(
    input: Operand,
    weight_size: Sequence[int],
    grad_output: Operand,
    stride: _Sizes = 1,
    padding: _NamedPadding = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> AccelRef:
    """Compute the gradient of a convolution by its weights, as `torch.nn.grad.conv2d_weight`.

    Args:
        input: The input.
        weight_size: Shape of the weights.
        grad_output: The gradient by the result, of the result's shape and the dtype of `input`.
        stride: As in the convolution.
        padding: As in the convolution.
        dilation: As in the convolution.
        groups: As in the convolution.

    Returns:
        The gradient, of shape `weight_size`.

    Raises:
        TypeError, ValueError: As `conv_input_grad`.
    """
    ...


@composed
async def conv_bias_grad(grad_output: Operand) -> AccelRef:
    """Compute the gradient of a convolution by its bias: the sum over all axes except the channels.

    Args:
        grad_output: The gradient by the result, of shape (n, o, ...). Without n, add that axis first.

    Returns:
        The gradient, of shape (o,).

    Raises:
        TypeError: `grad_output` is not an array.
        ValueError: It has fewer than three axes.
    """
    if isinstance(getattr(grad_output, "ndim", None), int) and grad_output.ndim < 3:
        raise ValueError(
            f"nn.conv_bias_grad: grad_output must have shape (n, o, ...), got {grad_output.shape}"
        )
    return await _summed(grad_output, axis=(0, *range(2, getattr(grad_output, "ndim", 2))))


Conv1d: Final = conv1d.message
Conv2d: Final = conv2d.message
ConvInputGrad: Final = conv_input_grad.message
ConvWeightGrad: Final = conv_weight_grad.message
