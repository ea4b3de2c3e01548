"""Plans of pooling, by hand: no line of shapes says how many windows there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import attrs

from ..backends.base import DType
from ..backends.base.contract.ops import ArraySpec, AvgPoolSpec, MaxPoolSpec
from ..devices import AccelRef, Planned, Planner
from ._windows import Windows, at_least, check_axes, check_dtypes, is_several, sizes

_Sizes: TypeAlias = tuple[int, ...]
_Means: TypeAlias = tuple[_Sizes, _Sizes, _Sizes, _Sizes, int, bool]


class MaxPoolResult(NamedTuple):
    """The greatest elements of windows, and where they were; see `max_pool2d`."""

    output: AccelRef
    """The elements."""
    indices: AccelRef
    """Their places in the input, counted over its spatial axes in C order: int64."""


def _windows(name: str, message: Any, spatial: _Sizes) -> tuple[_Sizes, Windows]:
    """Check the sizes of a pooling: how many windows there are, and which. Adaptive ones are zeros."""
    dims = len(spatial)
    if not hasattr(message, "kernel_size"):
        return _targets(name, message, spatial), Windows(*((0,) * dims,) * 5)
    window = sizes(name, "kernel_size", message.kernel_size, dims, 1)
    windows = Windows.of(name, message, window, message.padding)
    each = zip(spatial, *attrs.astuple(windows, recurse=False), strict=True)
    return tuple([_count(name, message, *numbers) for numbers in each]), windows


def _count(
    name: str, message: Any, extent: int, window: int, stride: int, before: int, behind: int, dilation: int
) -> int:
    """Count the windows along an axis."""
    reach = dilation * (window - 1) + 1
    if max(before, behind) > reach // 2:
        raise ValueError(
            f"{name}: padding must be at most half of a window, got "
            f"{message.padding!r} for windows of {reach}"
        )
    free = extent + before + behind - reach
    if free < 0 or not extent:
        raise ValueError(
            f"{name}: windows must fit into the padded input: they have {reach} elements along an axis "
            f"of {extent}, with padding {message.padding!r}"
        )
    count = (-(-free // stride) if message.ceil_mode else free // stride) + 1
    if message.ceil_mode and (count - 1) * stride >= extent + before:
        # The last window begins in the input, or before it.
        count -= 1
    # The first element of a window that is not before the input. After so many windows it is the same again.
    different = dilation // math.gcd(stride, dilation) if dilation > extent else 0
    for start in range(-before, 0, stride)[:different]:
        if start % dilation >= extent:
            raise ValueError(f"{name}: each window must have an element, got {message.padding!r} for padding")
    return count


def _targets(name: str, message: Any, spatial: _Sizes) -> _Sizes:
    """Take the sizes of the result of an adaptive pooling; None keeps one."""
    given: Any = message.output_size
    if not is_several(given):
        given = (given,) * len(spatial)
    wanted = [extent if one is None else one for one, extent in zip(given, spatial, strict=False)]
    if len(given) != len(spatial):
        raise ValueError(
            f"{name}: output_size must have a number for each of {len(spatial)} axes, got {given!r}"
        )
    if 0 in spatial:
        raise ValueError(f"{name}: input must have an element along each spatial axis, got {spatial}")
    return sizes(name, "output_size", wanted, len(spatial), 1)


def _read(planner: Planner, message: Any, dims: int) -> ArraySpec:
    x = planner.read("input", message.input)
    check_dtypes(planner, input=x)
    check_axes(planner.name, "input", x.shape, dims)
    return x


def max_pools(dims: int) -> Callable[[Any, Planner], Planned[Any]]:
    """Return the plan of a pooling by maxima along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        x = _read(planner, message, dims)
        counts, windows = _windows(planner.name, message, x.shape[-dims:])
        shape = (*x.shape[:-dims], *counts)
        out = planner.output(shape, x.dtype)
        indices = planner.output(shape, DType.int64) if message.return_indices else None
        numbers = windows.window, windows.stride, windows.before, windows.dilation
        spec = MaxPoolSpec(*numbers, x, out.spec, None if indices is None else indices.spec)
        return Planned(spec, out if indices is None else MaxPoolResult(out, indices), is_checked=True)

    return plan


def avg_pools(dims: int) -> Callable[[Any, Planner], Planned[AccelRef]]:
    """Return the plan of a pooling by means along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        x = _read(planner, message, dims)
        counts, numbers = means(planner.name, message, x.shape[-dims:])
        out = planner.output((*x.shape[:-dims], *counts), x.dtype, message.out)
        if message.out is not None:
            planner.distinct("out", out.spec, input=x)
        return Planned(AvgPoolSpec(*numbers, x, out.spec), out, is_checked=True)

    return plan


def means(name: str, message: Any, spatial: _Sizes) -> tuple[_Sizes, _Means]:
    """Check the sizes of a pooling by means: how many windows there are, and fields of `AvgPoolSpec`."""
    counts, windows = _windows(name, message, spatial)
    divisor = getattr(message, "divisor_override", None)
    divisor = 0 if divisor is None else at_least(name, "divisor_override", divisor, 1)
    has_padding = bool(getattr(message, "count_include_pad", False))
    return counts, (windows.window, windows.stride, windows.before, windows.behind, divisor, has_padding)


def check_images(name: str, shape: tuple[int, ...], grad: ArraySpec) -> tuple[int, ...]:
    """Require the same images of gradients and of an input; returns the spatial extents of the input.

    Without an axis for a batch nothing would say how many axes are spatial.
    """
    if not 3 <= len(shape) <= 5 or 0 in shape[2:]:
        raise ValueError(f"{name}: input_size must be (n, c, ...) with one to three axes behind, got {shape}")
    if grad.ndim != len(shape) or grad.shape[:2] != shape[:2]:
        raise ValueError(
            f"{name}: grad_output must have shape {shape[:2]} and then as many axes as input_size, "
            f"got {grad.shape}"
        )
    return shape[2:]
