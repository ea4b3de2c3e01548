"""Convolutions along one to three axes, transposed ones, and their gradients.

All are planned by hand: no line of shapes says extents that follow from strides and paddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs

from ..backends.base.ops import (
    ArraySpec,
    ConvolutionInputGradSpec,
    ConvolutionSpec,
    ConvolutionWeightGradSpec,
)
from ..devices import AccelRef, Operand, Planned, Planner, operation
from ..expressions import Reduction
from ._actor import DnnActor
from ._windows import at_least, check_axes, check_dtypes, pairs, shape_of, sizes

__all__ = [
    "Conv1d", "Conv2d", "Conv3d", "ConvInputGrad", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "ConvWeightGrad", "conv1d", "conv2d", "conv3d", "conv_bias_grad", "conv_input_grad",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_weight_grad",
]  # fmt: skip

_Sizes: TypeAlias = int | Sequence[int]
_Padding: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]
_NamedPadding: TypeAlias = _Padding | Literal["same", "valid"]
_Plan: TypeAlias = Callable[[Any, Planner], Planned[AccelRef]]

_summed = Reduction(
    "x", "sum", inputs=["x"], operation="nn.conv_bias_grad", library="trio_accel.arrays:ArraysActor"
)


@attrs.frozen
class _Geometry:
    """Checked sizes of a convolution, along each spatial axis.

    Attributes:
        stride: Steps from window to window.
        before: Zeros before the first element.
        behind: Zeros behind the last one.
        dilation: Steps between the elements of a window.
        reach: From the first element of a window to the last one.
    """

    stride: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    dilation: tuple[int, ...]
    reach: tuple[int, ...]

    @classmethod
    def of(cls, name: str, message: Any, window: tuple[int, ...]) -> _Geometry:
        """Check those of a message, for windows of so many elements."""
        dims, padding = len(window), message.padding
        stride = sizes(name, "stride", message.stride, dims, 1)
        dilation = sizes(name, "dilation", message.dilation, dims, 1)
        if min(window) < 1:
            raise ValueError(f"{name}: weight must have at least one element along each axis, got {window}")
        reach = tuple([step * (extent - 1) for step, extent in zip(dilation, window, strict=True)])
        if not isinstance(padding, str):
            before, behind = pairs(name, padding, dims)
        elif padding == "same":
            if max(stride) > 1:
                raise ValueError(f"{name}: padding 'same' needs a stride of 1, got {message.stride!r}")
            before = tuple([extent // 2 for extent in reach])
            behind = tuple([extent - first for extent, first in zip(reach, before, strict=True)])
        elif padding == "valid":
            before = behind = (0,) * dims
        else:
            raise ValueError(f"{name}: padding must be numbers, 'same' or 'valid', got {padding!r}")
        return cls(stride, before, behind, dilation, reach)

    def windows(self, name: str, argument: str, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """Count the windows along each axis."""
        padded = tuple([sum(three) for three in zip(spatial, self.before, self.behind, strict=True)])
        if any(reach >= extent for extent, reach in zip(padded, self.reach, strict=True)):
            raise ValueError(
                f"{name}: windows must fit into the padded {argument}: they have "
                f"{tuple(one + 1 for one in self.reach)} elements with their gaps, and it has {padded}"
            )
        sizes = zip(padded, self.reach, self.stride, strict=True)
        return tuple([(extent - reach - 1) // stride + 1 for extent, reach, stride in sizes])

    def spread(self, name: str, windows: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
        """Find the extents that so many windows cover, without the paddings, and with `more` elements."""
        covered = tuple(
            [
                (count - 1) * stride + reach + 1 - before - behind + extra
                for count, stride, reach, before, behind, extra in zip(
                    windows, self.stride, self.reach, self.before, self.behind, more, strict=True
                )
            ]
        )
        if min(covered) < 1 or min(windows) < 1:
            raise ValueError(
                f"{name}: padding must leave an element along each axis, got {covered} for input of {windows}"
            )
        return covered


def _check_channels(
    name: str, weight: tuple[int, ...], groups: object, bias: ArraySpec | None, **channels: int
) -> int:
    """Require channels that groups divide; returns the count of groups.

    Args:
        name: Name of the operation.
        weight: Shape of the weights.
        groups: The argument.
        bias: The argument, if there is one.
        **channels: Of the array that the first axis of the weights belongs to, by the name of the array, then
            of the other one; -1 where they follow from the weights.
    """
    count = at_least(name, "groups", groups, 1)
    (first, rows), (second, columns) = channels.items()
    if weight[0] % count:
        raise ValueError(
            f"{name}: groups must divide the channels: {weight[0]} of weight are not {count} groups"
        )
    for argument, given, wanted in ((first, rows, weight[0]), (second, columns, weight[1] * count)):
        if given not in (-1, wanted):
            raise ValueError(
                f"{name}: {argument} must have {wanted} channels for weight of shape {weight} and "
                f"{count} groups, got {given}"
            )
    made = weight[0] if rows == -1 else weight[1] * count
    if bias is not None and bias.shape != (made,):
        raise ValueError(f"{name}: bias must have shape {(made,)}, got {bias.shape}")
    return count


def _read(
    planner: Planner, message: Any, dims: int
) -> tuple[ArraySpec, ArraySpec, ArraySpec | None, tuple[int, ...]]:
    """Take the arrays of a convolution; also returns the shape of the windows."""
    name = planner.name
    x, weight = planner.read("input", message.input), planner.read("weight", message.weight)
    bias = None if message.bias is None else planner.read("bias", message.bias)
    check_dtypes(planner, input=x, weight=weight, bias=bias)
    check_axes(name, "input", x, dims)
    if weight.ndim != dims + 2:
        raise ValueError(f"{name}: weight must have {dims + 2} axes, got shape {weight.shape}")
    return x, weight, bias, weight.shape[2:]


def _convolves(dims: int) -> _Plan:
    """Return the plan of a convolution along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        name = planner.name
        x, weight, bias, window = _read(planner, message, dims)
        groups = _check_channels(
            name, weight.shape, message.groups, bias, result=-1, input=x.shape[-dims - 1]
        )
        sizes = _Geometry.of(name, message, window)
        windows = sizes.windows(name, "input", x.shape[-dims:])
        shape = (*x.shape[: -dims - 1], weight.shape[0], *windows)
        out = _output(planner, message, shape, x, input=x, weight=weight, bias=bias)
        spec = ConvolutionSpec(sizes.stride, sizes.before, sizes.dilation, groups, x, weight, bias, out.spec)
        return Planned(spec, out, is_checked=True)

    return plan


def _convolves_transposed(dims: int) -> _Plan:
    """Return the plan of a transposed convolution along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        name = planner.name
        x, weight, bias, window = _read(planner, message, dims)
        groups = _check_channels(
            name, weight.shape, message.groups, bias, input=x.shape[-dims - 1], result=-1
        )
        if type(message.padding) is str:
            raise ValueError(f"{name}: padding must be numbers, got {message.padding!r}")
        geometry = _Geometry.of(name, message, window)
        more = sizes(name, "output_padding", message.output_padding, dims, 0)
        for extra, stride, dilation in zip(more, geometry.stride, geometry.dilation, strict=True):
            if extra >= max(stride, dilation):
                raise ValueError(
                    f"{name}: output_padding must be below the stride or the dilation, got {extra} for "
                    f"stride {stride} and dilation {dilation}"
                )
        spatial = geometry.spread(name, x.shape[-dims:], more)
        shape = (*x.shape[: -dims - 1], weight.shape[1] * groups, *spatial)
        out = _output(planner, message, shape, x, input=x, weight=weight, bias=bias)
        spec = ConvolutionInputGradSpec(
            geometry.stride, geometry.before, geometry.dilation, groups, x, weight, bias, out.spec
        )
        return Planned(spec, out, is_checked=True)

    return plan


def _output(
    planner: Planner, message: Any, shape: tuple[int, ...], like: ArraySpec, **others: ArraySpec | None
) -> AccelRef:
    out = planner.output(shape, like.dtype, message.out)
    if message.out is not None:
        given = {name: array for name, array in others.items() if array is not None}
        planner.distinct("out", out.spec, **given)
    return out


@operation(actor=DnnActor, plan=_convolves(1))
async def conv1d(
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
    """Convolve sequences of shape (n, c, length), as `torch.nn.functional.conv1d`; see `conv2d`."""
    ...


@operation(actor=DnnActor, plan=_convolves(2))
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
    """Convolve images with weights, as `torch.nn.functional.conv2d`: a cross-correlation.

    float16 and bfloat16 are computed in float32 and rounded once. The CPU backend copies windows to a matrix
    and multiplies it (BLAS ``gemm``), for as many images at a time as some megabytes hold. Its results are
    the same bits in each run. CUDA has cuDNN's kernels, and for float64 one of its own by definition.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), of float16, bfloat16, float32 or
            float64.
        weight: Array of shape (o, c / groups, rows, columns), of the same dtype.
        bias: Array of shape (o,), which is added to each element of a channel.
        stride: Steps from window to window: a number, or one for each axis.
        padding: Zeros on both sides: a number, or one for each axis; or for each axis a pair, as
            `numpy.pad` has it. ``"valid"``: none. ``"same"``: as many as keep the extents; an odd one is
            behind.
        dilation: Steps between the elements of a window.
        groups: Groups of channels, each of which makes as many of the result by itself.
        out: Array to write to.

    Returns:
        The result, of shape (n, o, windows, windows).

    Raises:
        TypeError: Dtypes differ, or are not among these; or an argument is no whole number.
        ValueError: Shapes or channels that do not fit, groups that do not divide the channels, a stride or
            dilation of 0, a negative padding, a window that is larger than the padded input, ``"same"`` with
            a stride; or `out` has another shape or dtype, or shares memory with an argument.
    """
    ...


@operation(actor=DnnActor, plan=_convolves(3))
async def conv3d(
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
    """Convolve volumes of shape (n, c, d, h, w), as `torch.nn.functional.conv3d`; see `conv2d`."""
    ...


@operation(actor=DnnActor, plan=_convolves_transposed(1))
async def conv_transpose1d(
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
    """Convolve sequences transposed, as `torch.nn.functional.conv_transpose1d`; see `conv_transpose2d`."""
    ...


@operation(actor=DnnActor, plan=_convolves_transposed(2))
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

    Its own gradients are `conv2d` of the gradient with the same weight, and `conv_weight_grad` with the
    gradient as `input` and the input as `grad_output`.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width).
        weight: Array of shape (c, o / groups, rows, columns), of the same dtype.
        bias: Array of shape (o,), which is added to each element of a channel.
        stride: Steps from window to window in the result.
        padding: How many elements are cut off on both sides, as `conv2d` takes it; without names.
        output_padding: Elements that are added behind: below the stride or the dilation.
        groups: Groups of channels.
        dilation: Steps between the elements of a window.
        out: Array to write to.

    Returns:
        The result: of shape (n, o, ...) with ``(windows - 1) * stride - 2 * padding + dilation * (rows - 1) +
        output_padding + 1`` elements along an axis.

    Raises:
        TypeError, ValueError: As of `conv2d`; or `output_padding` is too large, or
            `padding` leaves no element.
    """
    ...


@operation(actor=DnnActor, plan=_convolves_transposed(3))
async def conv_transpose3d(
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
    """Convolve volumes transposed, as `torch.nn.functional.conv_transpose3d`; see `conv_transpose2d`."""
    ...


def _spatial_axes(name: str, argument: str, shape: tuple[int, ...]) -> int:
    """Count the spatial axes of weights."""
    if not 3 <= len(shape) <= 5:
        raise ValueError(f"{name}: {argument} must have one to three axes behind its channels, got {shape}")
    return len(shape) - 2


def _check_gradient(
    name: str, geometry: _Geometry, argument: str, shape: tuple[int, ...], grad: ArraySpec, channels: int
) -> None:
    """Require the shape of the result of a convolution of arrays of a shape."""
    dims = len(geometry.stride)
    windows = geometry.windows(name, argument, shape[-dims:])
    wanted = (*shape[: -dims - 1], channels, *windows)
    if grad.shape != wanted:
        raise ValueError(f"{name}: grad_output must have shape {wanted}, got {grad.shape}")


def _plan_input_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, shape = planner.name, shape_of(planner.name, "input_size", message.input_size)
    weight, grad = planner.read("weight", message.weight), planner.read("grad_output", message.grad_output)
    check_dtypes(planner, weight=weight, grad_output=grad)
    dims = _spatial_axes(name, "weight", weight.shape)
    if len(shape) not in (dims + 1, dims + 2):
        raise ValueError(f"{name}: input_size must be the shape of an input of {dims} axes, got {shape}")
    groups = _check_channels(
        name, weight.shape, message.groups, None, grad_output=-1, input_size=shape[-dims - 1]
    )
    geometry = _Geometry.of(name, message, weight.shape[2:])
    _check_gradient(name, geometry, "input", shape, grad, weight.shape[0])
    out = planner.output(shape, grad.dtype)
    spec = ConvolutionInputGradSpec(
        geometry.stride, geometry.before, geometry.dilation, groups, grad, weight, None, out.spec
    )
    return Planned(spec, out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_input_grad)
async def conv_input_grad(
    input_size: Sequence[int],
    weight: Operand,
    grad_output: Operand,
    stride: _Sizes = 1,
    padding: _NamedPadding = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> AccelRef:
    """Compute the gradient of a convolution for its input, as `torch.nn.grad.conv2d_input`.

    The weights say whether it is one of `conv1d`, `conv2d` or `conv3d`.

    Args:
        input_size: Shape of the input.
        weight: The weights.
        grad_output: The gradient for the result, of its shape.
        stride: As of the convolution.
        padding: As of the convolution.
        dilation: As of the convolution.
        groups: As of the convolution.

    Returns:
        The gradient, of shape `input_size`.

    Raises:
        TypeError, ValueError: As of `conv2d`; or `grad_output` has another shape than the
            result.
    """
    ...


def _plan_weight_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, shape = planner.name, shape_of(planner.name, "weight_size", message.weight_size)
    x, grad = planner.read("input", message.input), planner.read("grad_output", message.grad_output)
    check_dtypes(planner, input=x, grad_output=grad)
    dims = _spatial_axes(name, "weight_size", shape)
    check_axes(name, "input", x, dims)
    groups = _check_channels(name, shape, message.groups, None, grad_output=-1, input=x.shape[-dims - 1])
    geometry = _Geometry.of(name, message, shape[2:])
    _check_gradient(name, geometry, "input", x.shape, grad, shape[0])
    out = planner.output(shape, x.dtype)
    spec = ConvolutionWeightGradSpec(
        geometry.stride, geometry.before, geometry.dilation, groups, x, grad, out.spec
    )
    return Planned(spec, out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_weight_grad)
async def conv_weight_grad(
    input: Operand,
    weight_size: Sequence[int],
    grad_output: Operand,
    stride: _Sizes = 1,
    padding: _NamedPadding = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> AccelRef:
    """Compute the gradient of a convolution for its weights, as `torch.nn.grad.conv2d_weight`.

    Args:
        input: The input.
        weight_size: Shape of the weights.
        grad_output: The gradient for the result, of its shape.
        stride: As of the convolution.
        padding: As of the convolution.
        dilation: As of the convolution.
        groups: As of the convolution.

    Returns:
        The gradient, of shape `weight_size`.

    Raises:
        TypeError, ValueError: As of `conv_input_grad`.
    """
    ...


async def conv_bias_grad(grad_output: Operand) -> AccelRef:
    """Compute the gradient of a convolution for its bias: the sum over all axes but that of the channels.

    Args:
        grad_output: The gradient for the result, of shape (n, o, ...).

    Returns:
        The gradient, of shape (o,).

    Raises:
        TypeError: `grad_output` is no array.
        ValueError: It has fewer than three axes.
    """
    if isinstance(getattr(grad_output, "ndim", None), int) and grad_output.ndim < 3:
        raise ValueError(
            f"nn.conv_bias_grad: grad_output must have shape (n, o, ...), got {grad_output.shape}"
        )
    return await _summed(grad_output, axis=(0, *range(2, getattr(grad_output, "ndim", 2))))


Conv1d: Final = conv1d.message
Conv2d: Final = conv2d.message
Conv3d: Final = conv3d.message
ConvInputGrad: Final = conv_input_grad.message
ConvTranspose1d: Final = conv_transpose1d.message
ConvTranspose2d: Final = conv_transpose2d.message
ConvTranspose3d: Final = conv_transpose3d.message
ConvWeightGrad: Final = conv_weight_grad.message
