"""Checks of the numbers and words that patterns are made with."""

from __future__ import annotations

import math
from numbers import Real

__all__ = ["must_be_count", "must_be_number", "must_be_one_of", "must_be_positive", "must_be_share"]


def must_be_positive(
    what: str,
    value: object,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    allows_zero: bool = False,
) -> float:
    """Return a finite number above 0; 0 itself only where that is allowed.

    Args:
        what: Its name in the error.
        value: The number.
        minimum: The least that is allowed, where that is above 0.
        maximum: The most that is allowed.
        allows_zero: Whether 0 is allowed, where there is no `minimum`.

    Raises:
        ValueError: It is zero, negative, NaN, infinite or out of range.
        TypeError: It is no number.
    """
    number = must_be_number(what, value)
    is_above = number > 0 or (allows_zero and number == 0)
    if not (is_above and number < math.inf and minimum <= number <= maximum):
        least = f"of at least {minimum:g}" if minimum or allows_zero else "above 0"
        most = f" and at most {maximum:g}" if maximum < math.inf else ""
        raise ValueError(f"{what} must be a finite number {least}{most}, got {value!r}")
    return number


def must_be_share(what: str, value: object, *, allows_zero: bool = False) -> float:
    """Return a number from 0 to 1; 0 itself only where that is allowed.

    Raises:
        ValueError: It is out of range or NaN.
        TypeError: It is no number.
    """
    number = must_be_number(what, value)
    if not (0 < number <= 1 or (allows_zero and number == 0)):
        least = "from 0" if allows_zero else "above 0"
        raise ValueError(f"{what} must be a share {least} and at most 1, got {value!r}")
    return number


def must_be_count(what: str, value: object, *, least: int = 1, most: float = math.inf) -> int:
    """Return a whole number of at least `least`, and at most `most`.

    Raises:
        ValueError: It is out of range.
        TypeError: It is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    if not least <= value <= most:
        above = f" and at most {most}" if most < math.inf else ""
        raise ValueError(f"{what} must be at least {least}{above}, got {value!r}")
    return value


def must_be_number(what: str, value: object) -> float:
    """Return a number as a float, NaN and infinity included.

    Raises:
        TypeError: It is no number.
        ValueError: It is a whole number that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{what} is too large for a float") from error


def must_be_one_of(what: str, value: object, words: tuple[object, ...]) -> None:
    """Refuse all but some words.

    Raises:
        ValueError: It is another.
    """
    if value not in words:
        raise ValueError(f"{what} must be one of {words}, got {value!r}")
