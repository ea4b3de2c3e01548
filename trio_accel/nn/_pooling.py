"""Pooling along one to three axes, adaptive pooling, and their gradients.

All except `lp_pool` are planned by hand, because no line of shapes expresses the number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, overload

import attrs

from ..actors import arguments_of
from ..backends.base import DType, Ints
from ..backends.base.contract.ops import ArraySpec, AvgPoolGradSpec, AvgPoolSpec, MaxPoolGradSpec, MaxPoolSpec
from ..devices import (
    AccelRef,
    Call,
    Operand,
    Operation,
    Planned,
    Planner,
    composed,
    message_of,
    operation,
    operation_like,
)
from ..expressions import Elementwise, check_array
from ._library import (
    FLOATS,
    DnnActor,
    Windows,
    at_least,
    check_axes,
    check_dtypes,
    check_float,
    check_shape,
    is_several,
    shape_of,
    sizes,
)

__all__ = [
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool2d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxPoolResult",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_avg_pool_grad",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "avg_pool_grad",
    "lp_pool1d",
    "lp_pool2d",
    "lp_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool_grad",
]

_Means: TypeAlias = tuple[Ints, Ints, Ints, Ints, int, bool]


class MaxPoolResult(NamedTuple):
    """The greatest elements of windows, and where they were; see `max_pool2d`."""

    output: AccelRef
    """The elements."""
    indices: AccelRef
    """Their places in the input, counted over its spatial axes in C order: int64."""


def _windows(name: str, message: Any, spatial: Ints) -> tuple[Ints, Windows]:
    """Check the sizes of a pooling: how many windows there are, and which. Adaptive ones are zeros."""
    dims = len(spatial)
    if not hasattr(message, "kernel_size"):
        return _targets(name, message, spatial), Windows(*((0,) * dims,) * 5)
    window = sizes(name, "kernel_size", message.kernel_size, dims, 1)
    windows = Windows.of(name, message, window, message.padding)
    axes = zip(spatial, *attrs.astuple(windows, recurse=False), strict=True)
    return tuple([_count(name, message, *numbers) for numbers in axes]), windows


def _count(
    name: str,
    message: Any,
    extent: int,
    window: int,
    stride: int,
    padding_before: int,
    padding_after: int,
    dilation: int,
) -> int:
    """Count the windows along an axis."""
    reach = dilation * (window - 1) + 1
    if max(padding_before, padding_after) > reach // 2:
        raise ValueError(
            f"{name}: padding must be at most half of a window, got "
            f"{message.padding!r} for windows of {reach}"
        )
    free = extent + padding_before + padding_after - reach
    if free < 0 or not extent:
        raise ValueError(
            f"{name}: windows must fit into the padded input: they have {reach} elements along an axis "
            f"of {extent}, with padding {message.padding!r}"
        )
    count = (-(-free // stride) if message.ceil_mode else free // stride) + 1
    if message.ceil_mode and (count - 1) * stride >= extent + padding_before:
        # The last window begins in the input, or before it.
        count -= 1
    # The first element of each window at or after the begin of the input. It repeats after this number of
    # windows.
    different = dilation // math.gcd(stride, dilation) if dilation > extent else 0
    for start in range(-padding_before, 0, stride)[:different]:
        if start % dilation >= extent:
            raise ValueError(f"{name}: each window must have an element, got {message.padding!r} for padding")
    return count


def _targets(name: str, message: Any, spatial: Ints) -> Ints:
    """Take the sizes of an adaptive pooling's result; None keeps a size."""
    output_size: Any = message.output_size
    if not is_several(output_size):
        output_size = (output_size,) * len(spatial)
    result_sizes = [
        extent if size is None else size for size, extent in zip(output_size, spatial, strict=False)
    ]
    if len(output_size) != len(spatial):
        raise ValueError(
            f"{name}: output_size must have a number for each of {len(spatial)} axes, got {output_size!r}"
        )
    if 0 in spatial:
        raise ValueError(f"{name}: input must have an element along each spatial axis, got {spatial}")
    return sizes(name, "output_size", result_sizes, len(spatial), 1)


def _read(planner: Planner, message: Any, dims: int) -> ArraySpec:
    x = planner.read("input", message.input)
    check_dtypes(planner, input=x)
    check_axes(planner.name, "input", x.shape, dims)
    return x


def max_pools(dims: int) -> Callable[[Any, Planner], Planned[Any]]:
    """Return the plan of a pooling by maxima along `dims` axes."""

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        x = _read(planner, message, dims)
        counts, windows = _windows(planner.name, message, x.shape[-dims:])
        shape = (*x.shape[:-dims], *counts)
        out = planner.output(shape, x.dtype)
        indices = planner.output(shape, DType.int64) if message.return_indices else None
        numbers = windows.window, windows.stride, windows.padding_before, windows.dilation
        spec = MaxPoolSpec(*numbers, x, out.spec, None if indices is None else indices.spec)
        return Planned(spec, out if indices is None else MaxPoolResult(out, indices), is_checked=True)

    return plan


def avg_pools(dims: int) -> Callable[[Any, Planner], Planned[AccelRef]]:
    """Return the plan of a pooling by means along `dims` axes."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        x = _read(planner, message, dims)
        counts, numbers = means(planner.name, message, x.shape[-dims:])
        out = planner.output((*x.shape[:-dims], *counts), x.dtype, message.out)
        if message.out is not None:
            planner.distinct("out", out.spec, input=x)
        return Planned(AvgPoolSpec(*numbers, x, out.spec), out, is_checked=True)

    return plan


def means(name: str, message: Any, spatial: Ints) -> tuple[Ints, _Means]:
    """Check the sizes of a pooling by means: how many windows there are, and fields of `AvgPoolSpec`."""
    counts, windows = _windows(name, message, spatial)
    divisor = getattr(message, "divisor_override", None)
    divisor = 0 if divisor is None else at_least(name, "divisor_override", divisor, 1)
    has_padding = bool(getattr(message, "count_include_pad", False))
    return counts, (
        windows.window,
        windows.stride,
        windows.padding_before,
        windows.padding_after,
        divisor,
        has_padding,
    )


def check_images(name: str, shape: Ints, grad: ArraySpec) -> Ints:
    """Require the same images of gradients and an input; return the input's spatial extents.

    Without an axis for a batch, the number of spatial axes would be ambiguous.
    """
    if not 3 <= len(shape) <= 5 or 0 in shape[2:]:
        raise ValueError(f"{name}: input_size must be (n, c, ...) with one to three axes behind, got {shape}")
    if grad.ndim != len(shape) or grad.shape[:2] != shape[:2]:
        raise ValueError(
            f"{name}: grad_output must have shape {shape[:2]} and then as many axes as input_size, "
            f"got {grad.shape}"
        )
    return shape[2:]


_Sizes: TypeAlias = int | Sequence[int]
_Padding: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]


@overload
def max_pool2d(
    input: Operand,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Padding = 0,
    dilation: _Sizes = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Call[AccelRef]: ...
@overload
def max_pool2d(
    input: Operand,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Padding = 0,
    dilation: _Sizes = 1,
    ceil_mode: bool = False,
    *,
    return_indices: Literal[True],
) -> Call[MaxPoolResult]: ...
@operation(actor=DnnActor, plan=max_pools(2))
async def max_pool2d(
    input: Operand,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Padding = 0,
    dilation: _Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> AccelRef | MaxPoolResult:
    """Find the greatest element of each window, as `torch.nn.functional.max_pool2d`.

    NaN counts as greater than every number. The first of several is taken.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), of float16, bfloat16, float32 or
            float64.
        kernel_size: Elements of a window: a number, or one for each axis.
        stride: Steps from window to window; None for `kernel_size`.
        padding: Places on both sides that count as less than every number: a number, one for each axis, or a
            pair for each axis.
        dilation: Steps between the elements of a window.
        ceil_mode: Whether to count a window that reaches outside of the padding, unless it begins there.
        return_indices: Whether to return the places of the elements, for `max_pool_grad`.

    Returns:
        The elements, of shape (n, c, windows, windows); with `return_indices` a `MaxPoolResult`.

    Raises:
        TypeError: The dtype is not supported, or an argument is not an integer.
        ValueError: The number of axes is wrong, a stride or dilation is 0, a padding exceeds half of a
            window, or a window is larger than the padded input.
    """
    ...


@operation_like(max_pool2d, plan=max_pools(1))
def max_pool1d() -> None:
    """Find maxima of windows in sequences, as `torch.nn.functional.max_pool1d`; see `max_pool2d`."""


@operation_like(max_pool2d, plan=max_pools(3))
def max_pool3d() -> None:
    """Find maxima of windows in volumes, as `torch.nn.functional.max_pool3d`; see `max_pool2d`."""


@operation(actor=DnnActor, plan=avg_pools(2))
async def avg_pool2d(
    input: Operand,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Compute the mean of each window, as `torch.nn.functional.avg_pool2d`.

    It is made in float32 at least, and rounded once.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), of float16, bfloat16, float32 or
            float64.
        kernel_size: See `max_pool2d` for this and the next three.
        stride: Steps from window to window; None for `kernel_size`.
        padding: Zeros on both sides.
        ceil_mode: Whether to count a window that reaches outside of the padding.
        count_include_pad: Whether the zeros of the padding count as elements.
        divisor_override: The divisor of sums; None for the number of elements.
        out: Array to write to.

    Returns:
        The means, of shape (n, c, windows, windows).

    Raises:
        TypeError, ValueError: As of `max_pool2d`; a divisor below 1; or `out` has another
            shape or dtype, or shares memory with `input`.
    """
    ...


@operation_like(avg_pool2d, plan=avg_pools(1))
def avg_pool1d() -> None:
    """Compute means of windows in sequences, as `torch.nn.functional.avg_pool1d`; see `avg_pool2d`."""


@operation_like(avg_pool2d, plan=avg_pools(3))
def avg_pool3d() -> None:
    """Compute means of windows in volumes, as `torch.nn.functional.avg_pool3d`; see `avg_pool2d`."""


def _plan_max_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, shape = planner.name, shape_of(planner.name, "input_size", message.input_size)
    grad, indices = planner.read("grad_output", message.grad_output), planner.read("indices", message.indices)
    check_dtypes(planner, grad_output=grad)
    if indices.dtype not in (DType.int32, DType.int64):
        raise TypeError(f"{name}: indices must be int32 or int64, got {indices.dtype}")
    if indices.shape != grad.shape:
        raise ValueError(
            f"{name}: grad_output and indices must have the same shape, got {grad.shape} and {indices.shape}"
        )
    check_images(name, shape, grad)
    out = planner.output(shape, grad.dtype)
    return Planned(MaxPoolGradSpec(grad, indices, out.spec), out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_max_grad)
async def max_pool_grad(grad_output: Operand, indices: Operand, input_size: Sequence[int]) -> AccelRef:
    """Compute the gradient of `max_pool2d` and its like for the input; also of adaptive pooling.

    Args:
        grad_output: The gradient for the result, with its shape (n, c, ...), including an axis for the batch.
        indices: The places of the greatest elements, from `return_indices`: int32 or int64.
        input_size: Shape of the input.

    Returns:
        The gradient, of shape `input_size`.

    Raises:
        TypeError: Other dtypes.
        ValueError: Shapes that do not fit.
        OutOfRangeError: An index is outside of the input.
    """
    ...


def _plan_avg_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, shape = planner.name, shape_of(planner.name, "input_size", message.input_size)
    grad = planner.read("grad_output", message.grad_output)
    check_dtypes(planner, grad_output=grad)
    spatial = check_images(name, shape, grad)
    if hasattr(message, "kernel_size"):
        counts, numbers = means(name, message, spatial)
        check_shape(name, "grad_output", grad, (*shape[:2], *counts))
    else:
        zeros = (0,) * len(spatial)
        numbers = zeros, zeros, zeros, zeros, 0, False
        if 0 in grad.shape[2:]:
            raise ValueError(f"{name}: grad_output must have an element along each axis, got {grad.shape}")
    out = planner.output(shape, grad.dtype)
    return Planned(AvgPoolGradSpec(*numbers, grad, out.spec), out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_avg_grad)
async def avg_pool_grad(
    grad_output: Operand,
    input_size: Sequence[int],
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> AccelRef:
    """Compute the gradient of `avg_pool2d` and its like for the input.

    Args:
        grad_output: The gradient for the result, with its shape (n, c, ...), including an axis for the batch.
        input_size: Shape of the input.
        kernel_size: The argument of the pooling, as are all that follow.
        stride: Steps from window to window.
        padding: Zeros on both sides.
        ceil_mode: Whether to count a window that reaches outside of the padding.
        count_include_pad: Whether the zeros of the padding count as elements.
        divisor_override: The divisor of sums.

    Returns:
        The gradient, of shape `input_size`.

    Raises:
        TypeError, ValueError: As of `avg_pool2d`; or `grad_output` has another shape than
            the result.
    """
    ...


@operation(actor=DnnActor, plan=_plan_avg_grad)
async def adaptive_avg_pool_grad(grad_output: Operand, input_size: Sequence[int]) -> AccelRef:
    """Compute the gradient of `adaptive_avg_pool2d` and its like for the input.

    Args:
        grad_output: The gradient for the result, of its shape (n, c, ...); there is an axis for the batch.
        input_size: Shape of the input.

    Returns:
        The gradient, of shape `input_size`.

    Raises:
        TypeError, ValueError: As of `avg_pool_grad`.
    """
    ...


# Elements and norms may fit where powers and their sums do not: those are of a wider dtype.
_powers, _roots = (
    {
        dtype: Elementwise[AccelRef](
            text,
            inputs=("x", "p"),
            dtypes=wide if is_power else dtype,
            operation="nn.lp_pool",
            precision=str(wide),
        )
        for dtype in FLOATS
        for wide in [DType.float32 if dtype is DType.float16 else DType.float64]
    }
    for text, is_power in (("y = abs(x) ** p", True), ("y = x ** (1 / p)", False))
)


async def _lp_pool(
    dims: int,
    input: Operand,
    norm_type: float,
    kernel_size: _Sizes,
    stride: _Sizes | None,
    ceil_mode: bool,
    padding: _Padding,
) -> AccelRef:
    """Pool powers, and take the roots."""
    name = f"nn.lp_pool{dims}d"
    if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not 0 < norm_type < math.inf:
        raise ValueError(f"{name}: norm_type must be a number above 0, got {norm_type!r}")
    check_array(name, input=input)
    dtype = DType.of(input.dtype)
    check_float(name, "input", dtype)
    pool = (avg_pool1d, avg_pool2d, avg_pool3d)[dims - 1]
    # The window is divided by 1, so that the mean is the sum.
    sums = await pool(
        await _powers[dtype](input, float(norm_type)), kernel_size, stride, padding, ceil_mode, True, 1
    )
    return await _roots[dtype](sums, float(norm_type))


@composed
async def lp_pool2d(
    input: Operand,
    norm_type: float,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    ceil_mode: bool = False,
    *,
    padding: _Padding = 0,
) -> AccelRef:
    """Compute the p-norm of each window, as `torch.nn.functional.lp_pool2d` (ONNX ``LpPool``).

    That is ``sum(abs(x) ** p) ** (1 / p)``. PyTorch leaves out the absolute values, so that odd powers of
    negative numbers differ. It is three operations: powers, `avg_pool2d`, and roots.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width), of float16, bfloat16, float32 or
            float64.
        norm_type: The p.
        kernel_size: See `max_pool2d` for this and the next two.
        stride: Steps from window to window; None for `kernel_size`.
        ceil_mode: Whether to count a window that reaches outside of the padding.
        padding: Zeros on both sides.

    Returns:
        The norms, of shape (n, c, windows, windows).

    Raises:
        TypeError, ValueError: As of `max_pool2d`; or p is not above 0.
    """
    return await _lp_pool(2, input, norm_type, kernel_size, stride, ceil_mode, padding)


@arguments_of(lp_pool2d, _lp_pool, 1)
def lp_pool1d() -> None:
    """Compute the p-norm of each window in sequences, as `torch.nn.functional.lp_pool1d`; see `lp_pool2d`."""


@arguments_of(lp_pool2d, _lp_pool, 3)
def lp_pool3d() -> None:
    """Compute the p-norm of each window in volumes, as `torch.nn.functional.lp_pool3d`; see `lp_pool2d`."""


_Targets: TypeAlias = int | Sequence[int | None] | None


@operation(actor=DnnActor, plan=avg_pools(2))
async def adaptive_avg_pool2d(
    input: Operand, output_size: _Targets, *, out: AccelRef | None = None
) -> AccelRef:
    """Compute the means of `output_size` windows, as `torch.nn.functional.adaptive_avg_pool2d`.

    Window i of n takes the elements from ``i * length // n`` to below ``ceil((i + 1) * length / n)``.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width).
        output_size: How many windows there are: a number, or one for each axis; None for as many as elements.
        out: Array to write to.

    Returns:
        The means, of shape (n, c, *output_size).

    Raises:
        TypeError, ValueError: See `avg_pool2d`; or the input has no elements.
    """
    ...


@operation_like(adaptive_avg_pool2d, plan=avg_pools(1))
def adaptive_avg_pool1d() -> None:
    """Compute means of sequences, as `torch.nn.functional.adaptive_avg_pool1d`; see `adaptive_avg_pool2d`."""


@operation_like(adaptive_avg_pool2d, plan=avg_pools(3))
def adaptive_avg_pool3d() -> None:
    """Compute means of volumes, as `torch.nn.functional.adaptive_avg_pool3d`; see `adaptive_avg_pool2d`."""


@overload
def adaptive_max_pool2d(
    input: Operand, output_size: _Targets, return_indices: Literal[False] = False
) -> Call[AccelRef]: ...
@overload
def adaptive_max_pool2d(
    input: Operand, output_size: _Targets, return_indices: Literal[True]
) -> Call[MaxPoolResult]: ...
@operation(actor=DnnActor, plan=max_pools(2))
async def adaptive_max_pool2d(
    input: Operand, output_size: _Targets, return_indices: bool = False
) -> AccelRef | MaxPoolResult:
    """Find the greatest elements of `output_size` windows, as `torch.nn.functional.adaptive_max_pool2d`.

    See `adaptive_avg_pool2d` for the windows, and `max_pool2d` for the order of elements.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width).
        output_size: The number of windows: a number, or one for each axis; None for the number of elements.
        return_indices: Whether to return the places of the elements.

    Returns:
        The elements, of shape (n, c, *output_size); with `return_indices` a `MaxPoolResult`.

    Raises:
        TypeError, ValueError: See `max_pool2d`; or the input has no elements.
    """
    ...


@operation_like(adaptive_max_pool2d, plan=max_pools(1))
def adaptive_max_pool1d() -> None:
    """Find maxima of sequences, as `torch.nn.functional.adaptive_max_pool1d`; see `adaptive_max_pool2d`."""


@operation_like(adaptive_max_pool2d, plan=max_pools(3))
def adaptive_max_pool3d() -> None:
    """Find maxima of volumes, as `torch.nn.functional.adaptive_max_pool3d`; see `adaptive_max_pool2d`."""


_MaxPool: TypeAlias = Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]]

AvgPool2d: Final = avg_pool2d.message
MaxPool1d: _MaxPool = message_of(max_pool1d)
MaxPool2d: _MaxPool = message_of(max_pool2d)
MaxPool3d: _MaxPool = message_of(max_pool3d)
AdaptiveMaxPool1d: _MaxPool = message_of(adaptive_max_pool1d)
AdaptiveMaxPool2d: _MaxPool = message_of(adaptive_max_pool2d)
AdaptiveMaxPool3d: _MaxPool = message_of(adaptive_max_pool3d)
