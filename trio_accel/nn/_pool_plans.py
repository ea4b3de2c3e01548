"""Plans of pooling, by hand: no line of shapes says how many windows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from ..backends.base import DType
from ..backends.base.ops import ArraySpec, AvgPoolSpec, MaxPoolSpec
from ..devices import AccelRef, Planned, Planner
from ._windows import at_least, check_axes, check_dtypes, is_several, pairs, sizes

__all__ = ["MaxPoolResult", "avg_pools", "check_images", "max_pools", "means"]


class MaxPoolResult(NamedTuple):
    """The greatest elements of windows, and where they were; see `max_pool2d`."""

    output: AccelRef
    """The elements."""
    indices: AccelRef
    """Their places in the input, counted over its spatial axes in C order: int64."""


@attrs.frozen
class _Pool:
    """Checked sizes of a pooling, along each spatial axis.

    Attributes:
        window: Elements of a window.
        stride: Steps from window to window.
        before: Elements before the first one, that are not there.
        behind: Those behind the last one.
        dilation: Steps between the elements of a window.
        counts: How many windows there are.
    """

    window: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    dilation: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, name: str, message: Any, spatial: tuple[int, ...]) -> _Pool:
        """Check those of a message, for arrays of these extents."""
        dims = len(spatial)
        window = sizes(name, "kernel_size", message.kernel_size, dims, 1)
        stride = window if message.stride is None else sizes(name, "stride", message.stride, dims, 1)
        before, behind = pairs(name, message.padding, dims)
        dilation = sizes(name, "dilation", getattr(message, "dilation", 1), dims, 1)
        if message.ceil_mode not in (False, True):
            raise ValueError(f"{name}: ceil_mode must be False or True, got {message.ceil_mode!r}")
        of = zip(spatial, window, stride, before, behind, dilation, strict=True)
        counts = tuple([_count(name, message, *numbers) for numbers in of])
        return cls(window, stride, before, behind, dilation, counts)


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
    for start in range(-before, 0, stride):
        if start + -(start // dilation) * dilation >= extent:
            raise ValueError(f"{name}: each window must have an element, got {message.padding!r} for padding")
    return count


def _read(planner: Planner, message: Any, dims: int) -> ArraySpec:
    x = planner.read("input", message.input)
    check_dtypes(planner, input=x)
    check_axes(planner.name, "input", x, dims)
    return x


def max_pools(dims: int, *, is_adaptive: bool = False) -> Callable[[Any, Planner], Planned[Any]]:
    """Return the plan of a pooling by maxima along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[Any]:
        x = _read(planner, message, dims)
        if message.return_indices not in (False, True):
            raise ValueError(
                f"{planner.name}: return_indices must be False or True, got {message.return_indices!r}"
            )
        numbers: tuple[tuple[int, ...], ...] = ((0,) * dims,) * 4
        if is_adaptive:
            counts = _targets(planner.name, message, x.shape[-dims:])
        else:
            pool = _Pool.of(planner.name, message, x.shape[-dims:])
            counts, numbers = pool.counts, (pool.window, pool.stride, pool.before, pool.dilation)
        shape = (*x.shape[:-dims], *counts)
        out = planner.output(shape, x.dtype)
        indices = planner.output(shape, DType.int64) if message.return_indices else None
        window, stride, before, dilation = numbers
        spec = MaxPoolSpec(
            window, stride, before, dilation, x, out.spec, None if indices is None else indices.spec
        )
        return Planned(spec, out if indices is None else MaxPoolResult(out, indices), is_checked=True)

    return plan


def _targets(name: str, message: Any, spatial: tuple[int, ...]) -> tuple[int, ...]:
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


def avg_pools(dims: int, *, is_adaptive: bool = False) -> Callable[[Any, Planner], Planned[AccelRef]]:
    """Return the plan of a pooling by means along so many axes."""

    def plan(message: Any, planner: Planner) -> Planned[AccelRef]:
        x = _read(planner, message, dims)
        if is_adaptive:
            counts = _targets(planner.name, message, x.shape[-dims:])
            numbers: tuple[Any, ...] = (*((0,) * dims,) * 4, 0, False)
        else:
            counts, numbers = means(planner.name, message, x.shape[-dims:])
        out = planner.output((*x.shape[:-dims], *counts), x.dtype, message.out)
        if message.out is not None:
            planner.distinct("out", out.spec, input=x)
        window, stride, before, behind, divisor, counts_pad = numbers
        spec = AvgPoolSpec(window, stride, before, behind, divisor, counts_pad, x, out.spec)
        return Planned(spec, out, is_checked=True)

    return plan


def means(name: str, message: Any, spatial: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Check the sizes of a pooling by means: how many windows there are, and fields of `AvgPoolSpec`."""
    pool = _Pool.of(name, message, spatial)
    if message.count_include_pad not in (False, True):
        raise ValueError(
            f"{name}: count_include_pad must be False or True, got {message.count_include_pad!r}"
        )
    divisor = getattr(message, "divisor_override", None)
    divisor = 0 if divisor is None else at_least(name, "divisor_override", divisor, 1)
    return pool.counts, (
        pool.window, pool.stride, pool.before, pool.behind, divisor, bool(message.count_include_pad)
    )  # fmt: skip


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
