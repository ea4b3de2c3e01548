"""The actor of convolutions, pooling and attention, and checks that several functions share."""

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
        TypeError: One is complex.
    """
    for argument, value in arguments.items():
        dtype = getattr(value, "dtype", None)
        if isinstance(value, complex) or (dtype is not None and DType.of(dtype).kind == "complex"):
            raise TypeError(f"{name}: {argument} must be real, got {shown(value)}")


def check_choice(name: str, argument: str, value: object, choices: Collection[str]) -> None:
    """Require one of several texts.

    Raises:
        ValueError: It is another one.
    """
    if not isinstance(value, str) or value not in choices:
        refuse_value(name, argument, tuple(choices), value)


def check_range(
    name: str, minimum: float, below: float, *, is_closed: bool = False, **numbers: float
) -> None:
    """Require real numbers from `minimum` on, and below another one, or up to it.

    Raises:
        TypeError: One is not a real number.
        ValueError: One is outside, or NaN.
    """
    for argument, value in numbers.items():
        real(name, argument, value)
        if not (minimum <= value < below or (is_closed and value == below)):
            bound = f"up to {below}" if is_closed else f"below {below}"
            raise ValueError(f"{name}: {argument} must be from {minimum} {bound}, got {value!r}")


@functools.cache
def summing(name: str) -> Reduction:
    """Make the sum along axes, by the name of the operation that it is a part of."""
    return Reduction("x", "sum", inputs=["x"], operation=name)


@contextmanager
def naming(name: str, label: str, length: int) -> Generator[None]:
    """Convert the error of an index, so that it names the caller's number.

    Args:
        name: Name of the operation.
        label: The name for the index in the message.
        length: The number of valid indices. A number below 0 was moved down by it.
    """
    try:
        yield
    except OutOfRangeError as error:
        error.index += length if error.index < 0 else 0
        error.message = f"{name}: {label} {error.index} is not from 0 to {length - 1}"
        raise


class DnnActor(LibraryActor):
    """Serves convolutions, pooling and attention, on a stream of its own.

    CPU backend: NumPy's BLAS on windows of strides. CUDA: cuDNN, where it is installed and has kernels. All
    else are products of cuBLAS, and kernels of the backend's own.
    """

    library = "dnn"


FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
"""Dtypes of the arrays; half precision is computed in float32 and rounded once."""

MAX_INT32 = (1 << 31) - 1
"""The most elements from one place to another: libraries have words of 32 bits, whose sums fit into 64."""


def check_dtypes(planner: Planner, **arrays: ArraySpec | None) -> None:
    """Require one floating dtype of all arrays.

    Raises:
        TypeError: They differ, or are of another dtype.
    """
    present_arrays = {name: array for name, array in arrays.items() if array is not None}
    if len({array.dtype for array in present_arrays.values()}) > 1:
        planner.refuse_dtypes(**present_arrays)
    for name, array in present_arrays.items():
        check_float(planner.name, name, array.dtype)


def check_float(name: str, argument: str, dtype: DType) -> None:
    """Require a floating dtype.

    Raises:
        TypeError: It is another one.
    """
    if dtype not in FLOATS:
        allowed = ", ".join(map(str, FLOATS))
        raise TypeError(f"{name}: {argument} has dtype {dtype}; allowed: {allowed} (use cast())")


def check_shape(name: str, argument: str, array: ArraySpec, shape: Ints) -> None:
    """Require a shape.

    Raises:
        ValueError: It is another one.
    """
    if array.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape}, got {array.shape}")


def check_axes(name: str, argument: str, shape: Ints, dims: int) -> None:
    """Require spatial axes, one for channels, and perhaps one for a batch before it.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(shape) not in (dims + 1, dims + 2):
        raise ValueError(
            f"{name}: {argument} must have {dims + 2} axes, or {dims + 1} without a batch, got shape {shape}"
        )


def at_least(name: str, argument: str, value: object, minimum: int) -> int:
    """Take an integer of at least a minimum.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small.
    """
    number = bounded_integer(name, argument, value)
    if number < minimum:
        raise ValueError(f"{name}: {argument} must be at least {minimum}, got {value!r}")
    return number


def is_several(value: object) -> bool:
    """Return whether an argument is several numbers, and not one."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def sizes(name: str, argument: str, value: object, dims: int, minimum: int) -> Ints:
    """Take an integer for each spatial axis, or one for all.

    Raises:
        TypeError: Not integers.
        ValueError: Another count of numbers, or one is too small or too large.
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
    """Take paddings: a number for all sides, one for each axis, or for each axis a pair.

    Returns:
        Paddings before and after the axes.

    Raises:
        TypeError: Not integers.
        ValueError: Another count of numbers, or a negative one.
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
    """Take a shape.

    Raises:
        TypeError: No sequence of integers.
        ValueError: A negative number.
    """
    extents: Any = value
    if not is_several(value):
        raise TypeError(f"{name}: {argument} must be a shape, got {value!r}")
    return tuple([at_least(name, argument, extent, 0) for extent in extents])


@attrs.frozen
class Windows:
    """Checked sizes of windows, along each spatial axis.

    Attributes:
        window: Elements of a window.
        stride: Steps from window to window.
        padding_before: Zeros, or places, before the first element.
        padding_after: Elements after the last one.
        dilation: Steps between the elements of a window.
    """

    window: Ints
    stride: Ints
    padding_before: Ints
    padding_after: Ints
    dilation: Ints

    @classmethod
    def of(cls, name: str, message: Any, window: Ints, padding: object) -> Windows:
        """Check the arguments of a message, for windows with these elements along each axis.

        Raises:
            TypeError: Not integers.
            ValueError: Too small numbers, or another count of them.
        """
        dims = len(window)
        stride = window if message.stride is None else sizes(name, "stride", message.stride, dims, 1)
        dilation = sizes(name, "dilation", getattr(message, "dilation", 1), dims, 1)
        return cls(window, stride, *pairs(name, padding, dims), dilation)

    @property
    def reach(self) -> Ints:
        """The number of elements from the first to the last one of a window."""
        both = zip(self.dilation, self.window, strict=True)
        return tuple([step * (extent - 1) + 1 for step, extent in both])
