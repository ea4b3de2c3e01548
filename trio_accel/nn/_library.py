"""The actor of convolutions, pooling and attention, and checks that several functions of `nn` share.

The first argument of a check is the name of the operation, and then often the name of the argument, for the
error.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from ..backends.base import ArraySpec, DType, Ints, OutOfRangeError
from ..devices import LibraryActor, Planner, bounded_integer, real, refuse_value, shown
from ..expressions import ExpressionArgument, Reduction

__all__ = ["DnnActor"]


def check_real(name: str, **arguments: ExpressionArgument) -> None:
    """Refuse complex arrays and numbers, because the formulas are for real ones.

    Raises:
        TypeError: An argument is complex.
    """
    for argument, value in arguments.items():
        dtype = getattr(value, "dtype", None)
        if isinstance(value, complex) or (dtype is not None and DType.of(dtype).kind == "complex"):
            raise TypeError(f"{name}: {argument} must be real, got {shown(value)}")


def check_choice(name: str, argument: str, value: object, choices: Collection[str]) -> None:
    """Require one of several strings.

    Raises:
        ValueError: The value is not among them.
    """
    if not isinstance(value, str) or value not in choices:
        refuse_value(name, argument, tuple(choices), value)


def check_range(
    name: str, minimum: float, below: float, *, is_closed: bool = False, **numbers: float
) -> None:
    """Require real numbers that are at least `minimum`, and less than `below`.

    Args:
        name: Name of the operation.
        minimum: The smallest valid number.
        below: The upper limit.
        is_closed: Whether `below` itself is valid.
        **numbers: The numbers, by the names of their arguments.

    Raises:
        TypeError: An argument is not a real number.
        ValueError: A number is outside, or NaN.
    """
    for argument, value in numbers.items():
        real(name, argument, value)
        if not (minimum <= value < below or (is_closed and value == below)):
            bound = f"up to {below}" if is_closed else f"below {below}"
            raise ValueError(f"{name}: {argument} must be from {minimum} {bound}, got {value!r}")


@functools.cache
def summing(name: str) -> Reduction:
    """Return the reduction that sums along axes, for an operation with this name."""
    return Reduction("x", "sum", inputs=["x"], operation=name)


@contextmanager
def naming(name: str, label: str, length: int) -> Generator[None]:
    """Reword an `OutOfRangeError` of the body, so that it names the caller's index.

    Args:
        name: Name of the operation.
        label: The name for the index in the message.
        length: The number of valid indices. It was subtracted from negative indices, so it is added again.
    """
    try:
        yield
    except OutOfRangeError as error:
        error.index += length if error.index < 0 else 0
        error.message = f"{name}: {label} {error.index} is not from 0 to {length - 1}"
        raise


class DnnActor(LibraryActor):
    """Serves convolutions, pooling and attention, on a stream of its own.

    The CPU backend uses NumPy's BLAS on strided windows. The CUDA backend uses cuDNN if it is installed and
    has a kernel, otherwise products of cuBLAS and its own kernels.
    """

    library = "dnn"


FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
"""Dtypes of the arrays; half precision is computed in float32 and rounded once."""

MAX_INT32 = (1 << 31) - 1
"""The maximum distance in elements, because libraries have 32-bit words, whose sums fit into 64 bits."""


def check_dtypes(planner: Planner, **arrays: ArraySpec | None) -> None:
    """Require the same floating dtype of all arrays; an argument may be None.

    Raises:
        TypeError: The dtypes differ, or are not in `FLOATS`.
    """
    present_arrays = {name: array for name, array in arrays.items() if array is not None}
    if len({array.dtype for array in present_arrays.values()}) > 1:
        planner.refuse_dtypes(**present_arrays)
    for name, array in present_arrays.items():
        check_float(planner.name, name, array.dtype)


def check_float(name: str, argument: str, dtype: DType) -> None:
    """Require a floating dtype.

    Raises:
        TypeError: The dtype is not in `FLOATS`.
    """
    if dtype not in FLOATS:
        allowed = ", ".join(map(str, FLOATS))
        raise TypeError(f"{name}: {argument} has dtype {dtype}; allowed: {allowed} (use cast())")


def check_shape(name: str, argument: str, array: ArraySpec, shape: Ints) -> None:
    """Require a shape.

    Raises:
        ValueError: The array has another shape.
    """
    if array.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape}, got {array.shape}")


def check_axes(name: str, argument: str, shape: Ints, dims: int) -> None:
    """Require a shape with `dims` spatial axes after the channels, and optionally a batch axis before these.

    Raises:
        ValueError: The shape has more or fewer axes.
    """
    if len(shape) not in (dims + 1, dims + 2):
        raise ValueError(
            f"{name}: {argument} must have {dims + 2} axes, or {dims + 1} without a batch, got shape {shape}"
        )


def at_least(name: str, argument: str, value: object, minimum: int) -> int:
    """Return an integer of at least a minimum, as a Python integer.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small.
    """
    number = bounded_integer(name, argument, value)
    if number < minimum:
        raise ValueError(f"{name}: {argument} must be at least {minimum}, got {value!r}")
    return number


def is_several(value: object) -> bool:
    """Return whether an argument is a sequence of numbers, and not a number."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def sizes(name: str, argument: str, value: object, dims: int, minimum: int) -> Ints:
    """Return an integer for each spatial axis, from a sequence or from a single integer for all.

    Raises:
        TypeError: A value is not an integer.
        ValueError: The sequence has another length, or an integer is below `minimum` or above `MAX_INT32`.
    """
    values: Any = value if is_several(value) else (value,)
    numbers = tuple([at_least(name, argument, number, minimum) for number in values])
    if max(numbers, default=0) > MAX_INT32:
        raise ValueError(f"{name}: {argument} must be at most {MAX_INT32}, got {value!r}")
    if len(numbers) == 1:
        return numbers * dims
    if len(numbers) != dims:
        raise ValueError(f"{name}: {argument} must have a number for each of {dims} axes, got {value!r}")
    return numbers


def pairs(name: str, value: object, dims: int) -> tuple[Ints, Ints]:
    """Return paddings, from a number for all sides, a number for each axis, or a pair for each axis.

    Returns:
        The paddings before the elements of each axis, and after them.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A sequence has another length, or a number is negative or too large.
    """
    paddings: Any = value
    if is_several(value) and any(map(is_several, paddings)):
        both = [sizes(name, "padding", pair, 2, 0) for pair in paddings]
        if len(both) != dims:
            raise ValueError(f"{name}: padding must have a pair for each of {dims} axes, got {value!r}")
        return tuple([first for first, _ in both]), tuple([second for _, second in both])
    numbers = sizes(name, "padding", value, dims, 0)
    return numbers, numbers


def shape_of(name: str, argument: str, value: object) -> Ints:
    """Return a shape as a tuple of Python integers.

    Raises:
        TypeError: The value is not a sequence of integers.
        ValueError: An extent is negative.
    """
    extents: Any = value
    if not is_several(value):
        raise TypeError(f"{name}: {argument} must be a shape, got {value!r}")
    return tuple([at_least(name, argument, extent, 0) for extent in extents])


@attrs.frozen
class Windows:
    """Checked sizes of windows, in elements along each spatial axis.

    Attributes:
        window: The elements that a window reads.
        stride: The distance from one window to the next.
        padding_before: The padding before the first element.
        padding_after: The padding after the last element.
        dilation: The distance between neighbours in a window.
    """

    window: Ints
    stride: Ints
    padding_before: Ints
    padding_after: Ints
    dilation: Ints

    @classmethod
    def of(cls, name: str, message: Any, window: Ints, padding: object) -> Windows:
        """Check the arguments of a message for windows of this size.

        Args:
            name: Name of the operation.
            message: The message, with `stride` (None for the window) and optionally `dilation`.
            window: The elements that a window reads along each axis.
            padding: The padding; see `pairs`.

        Raises:
            TypeError: A value is not an integer.
            ValueError: A number is too small or too large, or a sequence has another length.
        """
        dims = len(window)
        stride = window if message.stride is None else sizes(name, "stride", message.stride, dims, 1)
        dilation = sizes(name, "dilation", getattr(message, "dilation", 1), dims, 1)
        return cls(window, stride, *pairs(name, padding, dims), dilation)

    @property
    def reach(self) -> Ints:
        """The number of elements that a window spans, including its gaps."""
        both = zip(self.dilation, self.window, strict=True)
        return tuple([step * (extent - 1) + 1 for step, extent in both])
