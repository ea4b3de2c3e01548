"""Checks of numbers and words, for named arguments and for the fields of options."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias, TypeGuard

import attrs

from ._hints import as_plain

__all__ = [
    "Validator",
    "is_number",
    "must_be_count",
    "must_be_number",
    "must_be_one_of",
    "must_be_positive",
    "must_be_whole",
    "validator",
]

Validator: TypeAlias = Callable[[object, "attrs.Attribute[Any]", Any], None]


def is_number(value: object, minimum: float = -math.inf, maximum: float = math.inf) -> TypeGuard[float]:
    """Return whether a value is a number in a range, excluding booleans and integers too large for a float.

    Such an integer would pass all comparisons, but adding it to a float raises `OverflowError`.
    """
    value = as_plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def validator(said: str, is_right: Callable[[Any], bool], error: type[Exception] = ValueError) -> Validator:
    """Make a field validator.

    Args:
        said: The requirement, such as ``"be True or False"``.
        is_right: Whether a value meets it.
        error: Class of the error.
    """

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        try:
            is_met = is_right(value)
        except ValueError:
            # Comparing an array with a word gives an array without a truth value.
            is_met = False
        if not is_met:
            raise error(f"{type(instance).__name__}: {attribute.name} must {said}, got {value!r}")

    return check


def must_be_whole(minimum: int) -> Validator:
    """Require an integer, excluding booleans."""
    return validator(
        f"be an integer of at least {minimum}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= minimum,
    )


def must_be_positive(
    label: str,
    value: object,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    allows_zero: bool = False,
) -> float:
    """Return a finite number above 0, or 0 if `allows_zero`.

    Args:
        label: The number's name in the error.
        value: The number.
        minimum: The minimum, if above 0.
        maximum: The maximum.
        allows_zero: Whether to allow 0 if `minimum` is 0.

    Raises:
        ValueError: The number is zero, negative, NaN, infinite or out of range.
        TypeError: The value is not a number.
    """
    number = must_be_number(label, value)
    is_above = number > 0 or (allows_zero and number == 0)
    if not (is_above and number < math.inf and minimum <= number <= maximum):
        lower = f"of at least {minimum:g}" if minimum or allows_zero else "above 0"
        upper = f" and at most {maximum:g}" if maximum < math.inf else ""
        raise ValueError(f"{label} must be a finite number {lower}{upper}, got {value!r}")
    return number


def must_be_count(label: str, value: object, *, minimum: int = 1, maximum: float = math.inf) -> int:
    """Return an integer from `minimum` to `maximum`.

    Raises:
        ValueError: The integer is out of range.
        TypeError: The value is not an integer.
    """
    value = as_plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{label} must be an integer, got {value!r}")
    if not minimum <= value <= maximum:
        above = f" and at most {maximum}" if maximum < math.inf else ""
        raise ValueError(f"{label} must be at least {minimum}{above}, got {value!r}")
    return value


def must_be_number(label: str, value: object) -> float:
    """Return a number as a float, including NaN and infinity.

    Raises:
        TypeError: The value is not a number.
        ValueError: The integer is too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{label} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{label} is too large for a float") from error


def must_be_one_of(label: str, value: object, words: tuple[object, ...]) -> None:
    """Check that a value is one of several words.

    Raises:
        ValueError: The value is a different word.
    """
    if value not in words:
        raise ValueError(f"{label} must be one of {words}, got {value!r}")
