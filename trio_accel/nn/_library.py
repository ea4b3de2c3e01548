"""The actor that serves the functions which are expressions, and checks that several of them share."""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator
from contextlib import contextmanager

from ..backends.base import DType, OutOfRangeError
from ..devices.base._refusals import real, shown
from ..devices.operations._plan_source import refuse_value
from ..expressions import ExpressionArgument, Reduction


def check_real(name: str, **given: ExpressionArgument) -> None:
    """Refuse complex arrays and numbers: the formulas are those of real ones.

    Raises:
        TypeError: One is complex.
    """
    for argument, value in given.items():
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


def check_range(name: str, least: float, below: float, *, is_closed: bool = False, **numbers: float) -> None:
    """Require real numbers from `least` on, and below another one, or up to it.

    Raises:
        TypeError: One is no real number.
        ValueError: One is outside, or NaN.
    """
    for argument, value in numbers.items():
        real(name, argument, value)
        if not (least <= value < below or (is_closed and value == below)):
            told = f"up to {below}" if is_closed else f"below {below}"
            raise ValueError(f"{name}: {argument} must be from {least} {told}, got {value!r}")


@functools.cache
def summing(name: str) -> Reduction:
    """Make the sum along axes, by the name of the operation that it is a part of."""
    return Reduction("x", "sum", inputs=["x"], operation=name)


@contextmanager
def naming(name: str, what: str, length: int) -> Generator[None]:
    """Have an error of an index tell of the number that was given.

    Args:
        name: Name of the operation.
        what: What the index is.
        length: How many there are. A number below 0 was moved down by it.
    """
    try:
        yield
    except OutOfRangeError as error:
        error.index += length if error.index < 0 else 0
        error.message = f"{name}: {what} {error.index} is not from 0 to {length - 1}"
        raise
