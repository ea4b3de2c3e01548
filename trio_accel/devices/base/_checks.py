"""Validators of options: each says what a value must be, and refuses all else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from ...actors import is_number

__all__ = ["above_zero", "is_above_zero", "must", "one_of", "whole"]

Validator: TypeAlias = "Callable[[object, attrs.Attribute[Any], Any], None]"


def must(said: str, is_right: Callable[[Any], bool], error: type[Exception] = ValueError) -> Validator:
    """Make the validator of a field.

    Args:
        said: The requirement, such as ``"be True or False"``.
        is_right: Whether it does.
        error: Class of the error.
    """

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not is_right(value):
            raise error(f"{type(instance).__name__}: {attribute.name} must {said}, got {value!r}")

    return check


def whole(least: int) -> Validator:
    """Require a whole number, which a truth value is not."""
    return must(
        f"be a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def one_of(said: str, *kinds: type[object]) -> Validator:
    """Require an instance of one of these classes."""
    return must(said, lambda value: isinstance(value, kinds), TypeError)


def is_above_zero(value: object) -> bool:
    """Tell whether a value is a finite number above 0."""
    return is_number(value, 0.0, sys.float_info.max) and value > 0


above_zero = must("be seconds above 0", is_above_zero)
"""Requires seconds."""
