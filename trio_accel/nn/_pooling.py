"""Pooling along one to three axes, and its gradients.

All but `lp_pool` are planned by hand: no line of shapes says how many windows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, overload

from ..actors import arguments_of
from ..backends.base import DType
from ..backends.base.contract.ops import AvgPoolGradSpec, MaxPoolGradSpec
from ..devices import (
    AccelRef,
    Call,
    Operand,
    Operation,
    Planned,
    Planner,
    message_of,
    operation,
    operation_like,
)
from ..devices.operations._calls import composed
from ..expressions import Elementwise, check_array
from ._actor import DnnActor
from ._pool_plans import MaxPoolResult, avg_pools, check_images, max_pools, means
from ._windows import FLOATS, check_dtypes, shape_of

__all__ = [
    "AdaptiveAvgPoolGrad", "AvgPool1d", "AvgPool2d", "AvgPool3d", "AvgPoolGrad", "MaxPool1d", "MaxPool2d",
    "MaxPool3d", "MaxPoolGrad", "MaxPoolResult", "adaptive_avg_pool_grad", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "avg_pool_grad", "lp_pool1d", "lp_pool2d", "lp_pool3d", "max_pool1d", "max_pool2d",
    "max_pool3d", "max_pool_grad",
]  # fmt: skip

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
        padding: Places on both sides that count as less than every number: a number, or one for each axis, or
            for each axis a pair.
        dilation: Steps between the elements of a window.
        ceil_mode: Whether a window counts that reaches beyond the padding, and does not begin there.
        return_indices: Whether to tell where the elements were: `max_pool_grad` needs that.

    Returns:
        The elements, of shape (n, c, windows, windows); with `return_indices` a `MaxPoolResult`.

    Raises:
        TypeError: Another dtype, or an argument is no whole number.
        ValueError: Another count of axes, a stride or dilation of 0, a padding of more than half of a window,
            or a window that is larger than the padded input.
    """
    ...


@operation_like(max_pool2d, plan=max_pools(1))
def max_pool1d() -> None:
    """Find maxima of windows of sequences, as `torch.nn.functional.max_pool1d`; see `max_pool2d`."""


@operation_like(max_pool2d, plan=max_pools(3))
def max_pool3d() -> None:
    """Find maxima of windows of volumes, as `torch.nn.functional.max_pool3d`; see `max_pool2d`."""


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
        ceil_mode: Whether a window counts that reaches beyond the padding.
        count_include_pad: Whether the zeros of the padding count as elements.
        divisor_override: What sums are divided by; None for the count of elements.
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
    """Compute means of windows of sequences, as `torch.nn.functional.avg_pool1d`; see `avg_pool2d`."""


@operation_like(avg_pool2d, plan=avg_pools(3))
def avg_pool3d() -> None:
    """Compute means of windows of volumes, as `torch.nn.functional.avg_pool3d`; see `avg_pool2d`."""


def _plan_max_grad(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, shape = planner.name, shape_of(planner.name, "input_size", message.input_size)
    grad, indices = planner.read("grad_output", message.grad_output), planner.read("indices", message.indices)
    check_dtypes(planner, grad_output=grad)
    if indices.dtype not in (DType.int32, DType.int64):
        raise TypeError(f"{name}: indices must be int32 or int64, got {indices.dtype}")
    if indices.shape != grad.shape:
        raise ValueError(
            f"{name}: grad_output and indices must have one shape, got {grad.shape} and {indices.shape}"
        )
    check_images(name, shape, grad)
    out = planner.output(shape, grad.dtype)
    return Planned(MaxPoolGradSpec(grad, indices, out.spec), out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_max_grad)
async def max_pool_grad(grad_output: Operand, indices: Operand, input_size: Sequence[int]) -> AccelRef:
    """Compute the gradient of `max_pool2d` and its like for the input; also of adaptive pooling.

    Args:
        grad_output: The gradient for the result, of its shape (n, c, ...); there is an axis for the batch.
        indices: Where the greatest elements were, as `return_indices` tells it: int32 or int64.
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
        if grad.shape[2:] != counts:
            raise ValueError(f"{name}: grad_output must have shape {(*shape[:2], *counts)}, got {grad.shape}")
    else:
        none = (0,) * len(spatial)
        numbers = none, none, none, none, 0, False
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
        grad_output: The gradient for the result, of its shape (n, c, ...); there is an axis for the batch.
        input_size: Shape of the input.
        kernel_size: The same as in the pooling, and so are all that follow.
        stride: Steps from window to window.
        padding: Zeros on both sides.
        ceil_mode: Whether a window counts that reaches beyond the padding.
        count_include_pad: Whether the zeros of the padding count as elements.
        divisor_override: What sums are divided by.

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
    if dtype not in FLOATS:
        raise TypeError(
            f"{name}: input has dtype {dtype}; allowed: {', '.join(map(str, FLOATS))} (use cast())"
        )
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
        ceil_mode: Whether a window counts that reaches beyond the padding.
        padding: Zeros on both sides.

    Returns:
        The norms, of shape (n, c, windows, windows).

    Raises:
        TypeError, ValueError: As of `max_pool2d`; or p is not above 0.
    """
    return await _lp_pool(2, input, norm_type, kernel_size, stride, ceil_mode, padding)


@arguments_of(lp_pool2d, _lp_pool, 1)
def lp_pool1d() -> None:
    """Compute the p-norm of each window of sequences, as `torch.nn.functional.lp_pool1d`; see `lp_pool2d`."""


@arguments_of(lp_pool2d, _lp_pool, 3)
def lp_pool3d() -> None:
    """Compute the p-norm of each window of volumes, as `torch.nn.functional.lp_pool3d`; see `lp_pool2d`."""


AdaptiveAvgPoolGrad: Final = adaptive_avg_pool_grad.message
AvgPool1d: Final = avg_pool1d.message
AvgPool2d: Final = avg_pool2d.message
AvgPool3d: Final = avg_pool3d.message
AvgPoolGrad: Final = avg_pool_grad.message
MaxPool1d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(max_pool1d)
MaxPool2d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(max_pool2d)
MaxPool3d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(max_pool3d)
MaxPoolGrad: Final = max_pool_grad.message
