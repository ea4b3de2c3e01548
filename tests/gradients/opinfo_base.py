"""The parts that PyTorch's OpInfos and our counterparts share: axes, options without a counterpart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

import trio_accel as ta

a: Any = ta.arrays
m: Any = ta.linalg
n: Any = ta.nn
f: Any = ta.fft
Function = Callable[..., Any]
DEVICE: ContextVar[Any] = ContextVar("DEVICE")
"""The device that constructors of arrays ask."""


class NoCounterpartError(Exception):
    """PyTorch's function has an option, or takes a shape, that ours does not have."""


def need(condition: object, reason: str) -> None:
    """Leave out a sample with an option that no function of ours has."""
    if not condition:
        raise NoCounterpartError(reason)


def axes(x: Any, dim: Any) -> Any:
    """Convert PyTorch's `dim`: an empty one is all axes, and arrays without axes have an axis 0 there."""
    if dim is None or x.ndim == 0 or (isinstance(dim, Sequence) and not dim):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else dim


def reduced(function: Function) -> Function:
    def run(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return function(x, axis=axes(x, dim), keepdims=keepdim)

    return run


def with_axis(x: Any, function: Function) -> Any:
    """Call a function that needs an axis, also for an array without axes."""
    return function(x) if x.ndim else function(x.reshape((1,))).reshape(())


def along(function: Function) -> Function:
    """Make a function of an array and one axis."""
    return lambda x, dim, dtype=None: with_axis(x, lambda x: function(x, axis=dim))


def index_along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % x.ndim), index)


def swapped(function: Function) -> Function:
    return lambda x, y: function(y, x)


def first(x: Any) -> Any:
    return a.positive(x)


def host(x: Any) -> Any:
    """Return an argument that our function takes from the host."""
    need(
        isinstance(x, (int, float, np.ndarray, np.generic, list, tuple)),
        "an operand where ours takes a number",
    )
    return x
