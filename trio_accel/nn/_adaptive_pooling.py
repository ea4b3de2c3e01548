"""Adaptive pooling: so many windows, whatever the sizes of the input are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, overload

from ..devices import AccelRef, Call, Operand, Operation, message_of, operation, operation_like
from ._actor import DnnActor
from ._pool_plans import MaxPoolResult, avg_pools, max_pools

__all__ = [
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d", "AdaptiveMaxPool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
]  # fmt: skip

_Targets: TypeAlias = int | Sequence[int | None] | None


@operation(actor=DnnActor, plan=avg_pools(2))
async def adaptive_avg_pool2d(
    input: Operand, output_size: _Targets, *, out: AccelRef | None = None
) -> AccelRef:
    """Compute means of so many windows, as `torch.nn.functional.adaptive_avg_pool2d`.

    Window i of n takes the elements from ``i * length // n`` to below ``ceil((i + 1) * length / n)``.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width).
        output_size: How many windows there are: a number, or one for each axis; None for as many as elements.
        out: Array to write to.

    Returns:
        The means, of shape (n, c, *output_size).

    Raises:
        TypeError, ValueError: As of `avg_pool2d`; or the input has no elements.
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
    """Find the greatest element of so many windows, as `torch.nn.functional.adaptive_max_pool2d`.

    The windows are those of `adaptive_avg_pool2d`, and the order of elements that of `max_pool2d`.

    Args:
        input: Array of shape (n, c, height, width), or (c, height, width).
        output_size: How many windows there are: a number, or one for each axis; None for as many as elements.
        return_indices: Whether to tell where the elements were.

    Returns:
        The elements, of shape (n, c, *output_size); with `return_indices` a `MaxPoolResult`.

    Raises:
        TypeError, ValueError: As of `max_pool2d`; or the input has no elements.
    """
    ...


@operation_like(adaptive_max_pool2d, plan=max_pools(1))
def adaptive_max_pool1d() -> None:
    """Find maxima of sequences, as `torch.nn.functional.adaptive_max_pool1d`; see `adaptive_max_pool2d`."""


@operation_like(adaptive_max_pool2d, plan=max_pools(3))
def adaptive_max_pool3d() -> None:
    """Find maxima of volumes, as `torch.nn.functional.adaptive_max_pool3d`; see `adaptive_max_pool2d`."""


AdaptiveAvgPool1d: Final = adaptive_avg_pool1d.message
AdaptiveAvgPool2d: Final = adaptive_avg_pool2d.message
AdaptiveAvgPool3d: Final = adaptive_avg_pool3d.message
AdaptiveMaxPool1d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(
    adaptive_max_pool1d
)
AdaptiveMaxPool2d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(
    adaptive_max_pool2d
)
AdaptiveMaxPool3d: Callable[..., Operation[DnnActor, AccelRef | MaxPoolResult]] = message_of(
    adaptive_max_pool3d
)
