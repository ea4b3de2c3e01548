"""Values as plain ones, and back: what specifications hold that go to a worker process.

`front/_launches.py` makes plain values of whole specifications, and `back/_launches.py` reads them.
"""

from __future__ import annotations

import enum
import functools
import importlib
import reprlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import ArraySpec

__all__ = [
    "ARRAY",
    "DTYPES",
    "PLAIN",
    "CannotCrossError",
    "HostDecoder",
    "HostEncoder",
    "Wire",
    "class_path",
    "decode_array",
    "decode_value",
    "encode_array",
    "encode_value",
    "layout_of",
    "no_host",
    "resolve",
    "shortened",
]

Wire: TypeAlias = tuple[object, ...]
"""Real numbers, strings, bytes, None and tuples of these: what the pickler writes without calling Python."""

HostEncoder: TypeAlias = Callable[[npt.NDArray[Any]], object]
"""Called with each host array; what it returns (plain values) is sent instead."""

HostDecoder: TypeAlias = Callable[[Any], npt.NDArray[Any]]
"""Called with what its counterpart returned; returns the host array."""

T = TypeVar("T")

# First item of every tuple that stands for a value.
_TUPLE, ARRAY, _COMPLEX, _ENUM, _HOST = range(5)

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Values of these types stand for themselves."""

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 100
shortened = _SHORT.repr

DTYPES = {member.value: member for member in DType}
"""The dtypes by their names."""

_NAMES = {id(member): member.value for member in DType}


def no_host(array: Any) -> NoReturn:
    """For specifications without host arrays."""
    raise TypeError(f"a host array where there is none: {shortened(array)}")


def encode_array(array: npt.NDArray[Any]) -> Wire:
    """Make plain values of a small host array: dtype, shape and bytes in C order.

    Raises:
        TypeError: Devices have no such dtype.
    """
    return DType.of(array.dtype).value, array.shape, array.tobytes()


def decode_array(data: Wire) -> npt.NDArray[Any]:
    """Make a writable array, contiguous in C order, of what `encode_array` made of it."""
    dtype, shape, content = cast("tuple[str, tuple[int, ...], bytes]", data)
    return np.ndarray(shape, DTYPES[dtype].dtype, bytearray(content))


class CannotCrossError(Exception):
    """Of the value that is being encoded; says more than the value does, or nothing."""


def encode_value(value: object, host: HostEncoder) -> object:
    """Make plain values of one.

    Raises:
        CannotCrossError: It cannot cross.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is ArraySpec:
        return _encode_array_spec(cast("ArraySpec", value))
    if kind is tuple:
        return _TUPLE, *[encode_value(item, host) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, enum.Enum):
        return _ENUM, class_path(kind), encode_value(value.value, host)
    if kind is complex or issubclass(kind, np.generic):
        return _encode_number(value)
    if isinstance(value, np.ndarray):
        return _HOST, host(cast("npt.NDArray[Any]", value))
    raise CannotCrossError


def _encode_array_spec(spec: ArraySpec) -> object:
    return ARRAY, int(spec.block), layout_of(spec.offset, id(spec.dtype), spec.shape, spec.strides)


@functools.lru_cache(1024)
def layout_of(offset: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Wire:
    """All of an array but its block; a pickle has one that occurs again only once.

    Args:
        offset: Offset in the block.
        dtype: Identity of the dtype: its hash takes longer than all the rest.
        shape: Extents.
        strides: Steps.
    """
    # As exact integers: extents and steps that came from NumPy would be pickled by NumPy.
    return int(offset), _NAMES[dtype], tuple(map(int, shape)), tuple(map(int, strides))


def _encode_number(value: Any) -> object:
    plain: object = value if type(value) is complex else value.item()
    if type(plain) is complex:
        # The pickler calls Python for these.
        return _COMPLEX, plain.real, plain.imag
    if type(plain) not in PLAIN:
        raise CannotCrossError(f", a {type(value).__name__}")
    return plain


def decode_value(data: Wire, host: HostDecoder) -> object:
    """Make what `encode_value` has made a tuple of."""
    tag, *values = cast("tuple[Any, ...]", data)
    if tag == ARRAY:
        block, (offset, dtype, shape, strides) = values
        return ArraySpec(block, offset, DTYPES[dtype], shape, strides)
    if tag == _COMPLEX:
        return complex(*values)
    if tag == _HOST:
        return host(values[0])
    items = [decode_value(cast("Wire", value), host) if type(value) is tuple else value for value in values]
    if tag == _TUPLE:
        return tuple(items)
    path, value = items
    return _enum_at(path)(value)


@functools.cache
def _enum_at(path: str) -> Callable[[object], enum.Enum]:
    return resolve(path, enum.Enum)


def class_path(cls: type[object]) -> str:
    """Where another process finds a class.

    Raises:
        CannotCrossError: It does not.
    """
    module, name = cls.__module__, cls.__qualname__
    if module == "__main__":
        _refuse(cls, "is defined in __main__; move it to a module")
    if "<locals>" in name:
        _refuse(cls, "is defined in a function; move it to the level of its module")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        _refuse(cls, "is not what its module has under this name")
    return f"{module}:{name}"


def _refuse(cls: type[object], reason: str) -> NoReturn:
    raise CannotCrossError(f": {cls.__module__}.{cls.__qualname__} {reason}")


def resolve(path: str, base: type[T]) -> type[T]:
    """Find the class of a path.

    Raises:
        ImportError: This process has no such module.
        TypeError: It is no subclass of `base`.
    """
    module, _, name = path.partition(":")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{path} is no {base.__name__}")
    return found
