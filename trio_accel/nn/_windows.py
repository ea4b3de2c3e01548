"""Checks that convolutions, pooling and attention share: dtypes, and sizes along axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.contract.ops import ArraySpec
from ..devices import Planner
from ..devices.base._refusals import whole

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
"""Those of the arrays; the first two are computed in float32 and rounded once."""

MOST = (1 << 31) - 1
"""The most elements from one place to another: libraries have words of 32 bits, whose sums fit into 64."""


def check_dtypes(planner: Planner, **arrays: ArraySpec | None) -> None:
    """Require one floating dtype of all arrays.

    Raises:
        TypeError: They differ, or are of another dtype.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    if len({array.dtype for array in given.values()}) > 1:
        planner.refuse_dtypes(**given)
    for name, array in given.items():
        if array.dtype not in FLOATS:
            raise TypeError(
                f"{planner.name}: {name} has dtype {array.dtype}; allowed: {', '.join(map(str, FLOATS))} "
                "(use cast())"
            )


def check_axes(name: str, argument: str, shape: tuple[int, ...], dims: int) -> None:
    """Require spatial axes, one for channels, and perhaps one for a batch before it.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(shape) not in (dims + 1, dims + 2):
        raise ValueError(
            f"{name}: {argument} must have {dims + 2} axes, or {dims + 1} without a batch, got shape {shape}"
        )


def at_least(name: str, argument: str, value: object, least: int) -> int:
    """Take a whole number that is not too small.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    number = whole(name, argument, value)
    if number < least:
        raise ValueError(f"{name}: {argument} must be at least {least}, got {value!r}")
    return number


def is_several(value: object) -> bool:
    """Tell whether an argument is several numbers, and not one."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def sizes(name: str, argument: str, value: object, dims: int, least: int) -> tuple[int, ...]:
    """Take a whole number for each spatial axis, or one for all.

    Raises:
        TypeError: Not whole numbers.
        ValueError: Another count of numbers, or one is too small or too large.
    """
    given: Any = value if is_several(value) else (value,)
    numbers = tuple([at_least(name, argument, one, least) for one in given])
    if max(numbers, default=0) > MOST:
        raise ValueError(f"{name}: {argument} must be at most {MOST}, got {value!r}")
    if len(numbers) == 1:
        return numbers * dims
    if len(numbers) != dims:
        raise ValueError(f"{name}: {argument} must have a number for each of {dims} axes, got {value!r}")
    return numbers


def pairs(name: str, value: object, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Take paddings: a number for all sides, one for each axis, or for each axis a pair.

    Returns:
        Paddings before the axes, and those behind.

    Raises:
        TypeError: Not whole numbers.
        ValueError: Another count of numbers, or a negative one.
    """
    given: Any = value
    if is_several(value) and any(map(is_several, given)):
        both = [sizes(name, "padding", one, 2, 0) for one in given]
        if len(both) != dims:
            raise ValueError(f"{name}: padding must have a pair for each of {dims} axes, got {value!r}")
        return tuple([first for first, _ in both]), tuple([second for _, second in both])
    numbers = sizes(name, "padding", value, dims, 0)
    return numbers, numbers


def shape_of(name: str, argument: str, value: object) -> tuple[int, ...]:
    """Take a shape.

    Raises:
        TypeError: No sequence of whole numbers.
        ValueError: A negative number.
    """
    given: Any = value
    if not is_several(value):
        raise TypeError(f"{name}: {argument} must be a shape, got {value!r}")
    return tuple([at_least(name, argument, one, 0) for one in given])


@attrs.frozen
class Windows:
    """Checked sizes of windows, along each spatial axis.

    Attributes:
        window: Elements of a window.
        stride: Steps from window to window.
        before: Zeros, or places, before the first element.
        behind: Elements behind the last one.
        dilation: Steps between the elements of a window.
    """

    window: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, name: str, message: Any, window: tuple[int, ...], padding: object) -> Windows:
        """Check those of a message, for windows of so many elements.

        Raises:
            TypeError: Not whole numbers.
            ValueError: Too small numbers, or another count of them.
        """
        dims = len(window)
        stride = window if message.stride is None else sizes(name, "stride", message.stride, dims, 1)
        dilation = sizes(name, "dilation", getattr(message, "dilation", 1), dims, 1)
        return cls(window, stride, *pairs(name, padding, dims), dilation)

    @property
    def reach(self) -> tuple[int, ...]:
        """The elements from the first one of a window to behind the last one."""
        both = zip(self.dilation, self.window, strict=True)
        return tuple([step * (extent - 1) + 1 for step, extent in both])
