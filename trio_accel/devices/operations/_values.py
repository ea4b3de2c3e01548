"""Numbers and arrays of a specification, checked in the caller's task before anything is launched."""

from __future__ import annotations

import cmath
import functools
import numbers
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from ...backends.base import DType
from ...backends.base.ops import ArraySpec, NumberRole, OperationSpec, SpecField

__all__ = ["check_conversion", "check_spec", "element", "factor", "in_range"]

# The largest number of the smallest floating type.
_ALWAYS_HELD = 448

_Test: TypeAlias = Callable[[OperationSpec], bool]


def in_range(name: str, argument: str, value: complex, dtype: DType) -> None:
    """Require that a finite value stays finite as a floating or complex dtype.

    Raises:
        ValueError: It is too large.
    """
    if abs(value) <= _ALWAYS_HELD:
        return
    with np.errstate(all="ignore"):
        try:
            is_held = bool(np.isfinite(np.array(value, dtype.dtype))) or not cmath.isfinite(value)
        except OverflowError:
            is_held = False
    if not is_held:
        raise ValueError(f"{name}: {argument} {reprlib.repr(value)} is outside the range of {dtype}")


def factor(name: str, argument: str, value: object, dtype: DType) -> complex:
    """Require a number that a floating or complex dtype can hold as a factor.

    Raises:
        TypeError: No number; or a complex one, and the arrays are real; or arrays of whole numbers.
        ValueError: It is too large.
    """
    if not dtype.is_inexact:
        raise TypeError(f"{name}: the arrays must have a floating or complex dtype, got {dtype}; use cast()")
    if isinstance(value, bool) or not isinstance(value, numbers.Complex):
        raise TypeError(f"{name}: {argument} must be a number, got {type(value).__name__}")
    if dtype.kind != "complex" and not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} {value!r} is complex, the arrays are {dtype}")
    try:
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    except OverflowError:
        raise ValueError(
            f"{name}: {argument} {reprlib.repr(value)} is outside the range of {dtype}"
        ) from None
    # Half precision is computed in single precision, and the factor with it.
    in_range(name, argument, number, DType.float32 if dtype.itemsize < 4 else dtype)
    return number


def element(name: str, argument: str, value: object, dtype: DType) -> complex:
    """Require a number that an array of a dtype can hold as it is; returns it as a Python number.

    Raises:
        TypeError: No number; or a complex one, and the array is not.
        ValueError: It is too large, or no whole number where the array holds these.
    """
    number = _plain(value)
    if not isinstance(number, (bool, int, float, complex)):
        raise TypeError(f"{name}: {argument} must be a number, got {value!r}")
    if isinstance(number, complex) and dtype.kind != "complex":
        raise TypeError(f"{name}: {argument} {value!r} is complex, the array is {dtype}")
    if dtype.is_inexact:
        in_range(name, argument, number, dtype)
        return number
    if isinstance(number, complex):
        raise TypeError(f"{name}: {argument} {value!r} is complex, the array is {dtype}")
    if dtype.kind in ("int", "uint"):
        if isinstance(number, float) and not number.is_integer():
            raise ValueError(f"{name}: {argument} {value!r} is no whole number, the array is {dtype}")
        limits = np.iinfo(dtype.dtype)
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{name}: {argument} {value!r} is outside {limits.min} to {limits.max}, the array is {dtype}"
            )
        return int(number)
    return number


def check_conversion(name: str, argument: str, source: DType, dtype: DType) -> None:
    """Refuse a conversion that would drop imaginary parts.

    Raises:
        TypeError: Complex to real.
    """
    if source.kind == "complex" and dtype.kind not in ("complex", "bool"):
        raise TypeError(
            f"{name}: {argument}: {source} to {dtype} would drop the imaginary parts; a complex dtype keeps "
            "them; to have the real parts alone, take them on the host: "
            "await device.put((await ref.to_host()).real)"
        )


def check_spec(name: str, spec: OperationSpec) -> None:
    """Refuse fields of a specification that a library could only fail over.

    Raises:
        TypeError: An array field without an `ArraySpec`, or no number where there is to be one.
        ValueError: A number that the arrays cannot hold, or shapes that do not fit each other.
    """
    if not _test(type(spec))(spec):  # type: ignore[arg-type]  # mypy takes no class for hashable
        for field in spec.descriptor().fields:
            _check_field(name, spec, field)
    spec.check_shapes(name)


def _check_field(name: str, spec: OperationSpec, field: SpecField) -> None:
    """Refuse what is no array, no status array or no number."""
    where, value, role = f"{type(spec).__name__}.{field.name}", getattr(spec, field.name), field.role
    if field.is_array and not _is_of(role.count, value):
        what = {"one": "an ArraySpec", "optional": "an ArraySpec or None", "many": "a tuple of ArraySpec"}
        raise TypeError(
            f"{name}: {where} must be {what[role.count]}, got {_type_of(value)}; "
            "planner.read() and planner.update() return one, and planner.output() a reference that has "
            "it as .spec"
        )
    if role.kind == "status" and not _is_status(value):
        raise TypeError(f"{name}: {where} must be an array of planner.status(), got {_type_of(value)}")
    if role.number is not None:
        check = factor if role.number is NumberRole.FACTOR else element
        check(name, where, value, getattr(spec, role.of).dtype)


def _is_of(count: str, value: Any) -> bool:
    """Whether a field of arrays holds as many as it may."""
    if count == "many":
        return type(value) is tuple and all(
            isinstance(item, ArraySpec) for item in cast("tuple[object, ...]", value)
        )
    return isinstance(value, ArraySpec) or (count == "optional" and value is None)


def _is_status(value: Any) -> bool:
    """Whether a field holds status words, which have a layout of their own."""
    return type(value) is np.ndarray and bool(value.dtype == np.int32 and value.flags.c_contiguous)


def _type_of(value: Any) -> str:
    name = type(value).__name__
    items = cast("tuple[object, ...]", value) if type(value) is tuple else ()
    return f"a tuple with {type(items[0]).__name__}" if items else name


@functools.cache
def _test(cls: type[OperationSpec]) -> _Test:
    """What tells of nearly all specifications that they are in order.

    Written out for each class, because most are checked at each launch.
    """
    tests: list[str] = []
    for field in cls.descriptor().fields:
        value, role = f"spec.{field.name}", field.role
        if field.is_array and role.count == "one":
            tests.append(f"type({value}) is ArraySpec")
        elif field.is_array:
            tests.append(f"is_of({role.count!r}, {value})")
        elif role.kind == "status":
            tests.append(f"is_status({value})")
        elif role.number is not None:
            # Others are looked at more closely: large ones, complex ones, elements of whole-number arrays.
            tests.append(f"type({value}) in plain and -{_ALWAYS_HELD} <= {value} <= {_ALWAYS_HELD}")
            tests.append(f"spec.{role.of}.dtype.is_inexact")
    names: dict[str, Any] = {
        "ArraySpec": ArraySpec, "plain": (int, float), "is_of": _is_of, "is_status": _is_status
    }  # fmt: skip
    test: _Test = eval(f"lambda spec: {' and '.join(tests) or True}", names)  # noqa: S307  # of names of attributes
    return test


def _plain(value: object) -> object:
    """A NumPy scalar as a Python one."""
    return np.asarray(value).item() if issubclass(type(value), np.generic) else value
