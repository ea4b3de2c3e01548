"""Operation specifications as plain tuples: what a worker process is asked to do."""

from __future__ import annotations

import enum
import functools
import importlib
import reprlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import ArraySpec, Descriptor, OperationSpec, array_key, arrays_of, value_key

__all__ = [
    "Wire",
    "decode_array",
    "decode_spec",
    "encode_array",
    "encode_spec",
    "no_host",
    "spec_key",
]

Wire: TypeAlias = tuple[object, ...]
"""Real numbers, strings, bytes, None and tuples of these: what the pickler writes without calling Python."""

HostEncoder: TypeAlias = Callable[[npt.NDArray[Any]], object]
HostDecoder: TypeAlias = Callable[[Any], npt.NDArray[Any]]

T = TypeVar("T")

# First item of every tuple that stands for a value; values of these types stand for themselves.
_TUPLE, _ARRAY, _COMPLEX, _ENUM, _HOST = range(5)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 100
_DTYPES = {member.value: member for member in DType}
_NAMES = {id(member): member.value for member in DType}


def encode_spec(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None = None) -> Wire:
    """Make plain values of a specification.

    Args:
        spec: Any attrs class that another process can import.
        host: Called with each host array; what it returns (plain values) is sent instead.
        status: The same for status words; `host` if there is none.

    Raises:
        TypeError: The class cannot be imported elsewhere, or a field holds something that cannot
            cross (the message names it).
    """
    cls = type(spec)
    values: list[object] = [_PATHS.get(cls) or _path_of(cls)]
    described = cls.descriptor()
    if described.has_status:
        host = _by_field(spec, host, status)
    array: Any
    field: object
    for field in described.values(spec):
        kind = type(field)
        if kind is ArraySpec:
            # As `_encode` does it, without a call for each.
            array = field
            layout = _layout(array.offset, id(array.dtype), array.shape, array.strides)
            values.append((_ARRAY, int(array.block), layout))
        elif kind in _PLAIN:
            values.append(field)
        else:
            try:
                values.append(_encode(field, host))
            except _CannotCrossError as error:
                name = described.fields[len(values) - 1].name
                raise TypeError(
                    "a specification that crosses to a worker holds numbers, strings, bytes, None, dtypes, "
                    "members of enums, ArraySpec, host arrays and tuples of these; "
                    f"{cls.__qualname__}.{name} is {_SHORT.repr(field)}{error}"
                ) from None
    return tuple(values)


def _by_field(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None) -> HostEncoder:
    """Encode status words by one function, and other host arrays by another."""
    if status is None:
        return host
    fields = spec.descriptor().fields
    words = {id(getattr(spec, field.name)) for field in fields if field.role.kind == "status"}
    return lambda array: status(array) if id(array) in words else host(array)


def decode_spec(data: Wire, host: HostDecoder) -> OperationSpec:
    """Make a specification of what `encode_spec` made of it.

    Args:
        data: From `encode_spec`.
        host: Called with what its counterpart returned; returns the host array.

    Raises:
        ImportError: This process has no such module.
    """
    path: Any = data[0]
    values: list[object] = []
    plain: Any
    for field in data[1:]:
        plain = field
        kind = type(field)
        if kind is not tuple:
            values.append(field)
        elif plain[0] == _ARRAY:
            _, block, (offset, dtype, shape, strides) = plain
            values.append(ArraySpec(block, offset, _DTYPES[dtype], shape, strides))
        else:
            values.append(_decode(plain, host))
    spec: OperationSpec = _descriptor_at(path).make(values)
    return spec


def spec_key(
    spec: OperationSpec, address: Callable[[npt.NDArray[Any]], Wire | None]
) -> tuple[list[Any], list[int]] | None:
    """All of a specification but its blocks, and these: what is equal there is the same once it is encoded.

    None where it holds status words, or a value that cannot be told from others.

    Args:
        spec: The specification.
        address: Tells of a host array where it lies; None where that is not all that is to be said of it.
    """
    described = spec.descriptor()
    if described.keywords or described.has_status:
        return None
    key: list[Any] = [described.cls]
    blocks: list[int] = []
    array: Any
    told: tuple[object, ...] | None
    value: object
    for value in described.values(spec):
        kind = type(value)
        if kind is ArraySpec:
            array = value
            blocks.append(array.block)
            # As `array_key` does it, without a call for each.
            key += array.offset, id(array.dtype), array.shape, array.strides
        elif kind is tuple and (arrays := arrays_of(value)):
            blocks += [array.block for array in arrays]
            key += len(arrays), *[array_key(array) for array in arrays]
        else:
            told = address(cast("npt.NDArray[Any]", value)) if kind is np.ndarray else value_key(value)
            if told is None:
                return None
            key += told
    return key, blocks


def no_host(array: Any) -> NoReturn:
    """For specifications without host arrays."""
    raise TypeError(f"a host array where there is none: {_SHORT.repr(array)}")


def encode_array(array: npt.NDArray[Any]) -> Wire:
    """Make plain values of a small host array: dtype, shape and bytes in C order.

    Raises:
        TypeError: Devices have no such dtype.
    """
    return DType.of(array.dtype).value, array.shape, array.tobytes()


def decode_array(data: Wire) -> npt.NDArray[Any]:
    """Make a writable array, contiguous in C order, of what `encode_array` made of it."""
    dtype, shape, content = cast("tuple[str, tuple[int, ...], bytes]", data)
    return np.ndarray(shape, _DTYPES[dtype].dtype, bytearray(content))


class _CannotCrossError(Exception):
    """Of the value that is being encoded; says more than the value does, or nothing."""


_PATHS: dict[type[OperationSpec], str] = {}


def _path_of(cls: type[OperationSpec]) -> str:
    """Where another process finds a specification class.

    Raises:
        TypeError: It cannot, or the class is no attrs class.
    """
    try:
        path = _path(cls)
    except _CannotCrossError as error:
        raise TypeError(
            f"a specification that crosses to a worker is of a class that another process can import{error}"
        ) from None
    if not attrs.has(cast("type[object]", cls)):
        raise TypeError(
            f"a specification that crosses to a worker is an attrs class; {cls.__qualname__} is not"
        )
    _PATHS[cls] = path
    return path


@functools.cache
def _descriptor_at(path: str) -> Descriptor:
    return _resolve(path, OperationSpec).descriptor()


def _encode(value: object, host: HostEncoder) -> object:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is ArraySpec:
        return _encode_array_spec(cast("ArraySpec", value))
    if kind is tuple:
        return _TUPLE, *[_encode(item, host) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, enum.Enum):
        return _ENUM, _path(kind), _encode(value.value, host)
    if kind is complex or issubclass(kind, np.generic):
        return _encode_number(value)
    if isinstance(value, np.ndarray):
        return _HOST, host(cast("npt.NDArray[Any]", value))
    raise _CannotCrossError


def _encode_array_spec(spec: ArraySpec) -> object:
    return _ARRAY, int(spec.block), _layout(spec.offset, id(spec.dtype), spec.shape, spec.strides)


@functools.lru_cache(1024)
def _layout(offset: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Wire:
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
    if type(plain) not in _PLAIN:
        raise _CannotCrossError(f", a {type(value).__name__}")
    return plain


def _array_of(_: Any, block: Any, layout: Any) -> ArraySpec:
    offset, dtype, shape, strides = layout
    return ArraySpec(block, offset, _DTYPES[dtype], shape, strides)


def _decode(data: Wire, host: HostDecoder) -> object:
    tag, *values = cast("tuple[Any, ...]", data)
    if tag == _ARRAY:
        return _array_of(*cast("tuple[Any, ...]", data))
    if tag == _COMPLEX:
        return complex(*values)
    if tag == _HOST:
        return host(values[0])
    items = [_decode(cast("Wire", value), host) if type(value) is tuple else value for value in values]
    if tag == _TUPLE:
        return tuple(items)
    path, value = items
    return _enum_at(path)(value)


@functools.cache
def _enum_at(path: str) -> Callable[[object], enum.Enum]:
    return _resolve(path, enum.Enum)


def _path(cls: type[object]) -> str:
    """Where another process finds the class."""
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
    raise _CannotCrossError(f": {cls.__module__}.{cls.__qualname__} {reason}")


def _resolve(path: str, base: type[T]) -> type[T]:
    module, _, name = path.partition(":")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{path} is no {base.__name__}")
    return found
