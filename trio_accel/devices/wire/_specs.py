"""Specifications as plain values, and back, for workers and journals."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import numpy as np

from ...backends.base import DType, HostArray, Ints
from ...backends.base.contract.ops import ArraySpec, Descriptor, OperationSpec
from ..base._library_paths import why_not_found
from ._messages import SHORT_REPR
from ._protocol import ARRAY, COMPLEX, DTYPES, ENUM, HOST, TUPLE, Message

HostEncoder: TypeAlias = Callable[[HostArray], object]
"""Called with each host array; returns the plain values to send instead."""

HostDecoder: TypeAlias = Callable[[Any], HostArray]
"""Called with the plain values of a host array; returns the array."""

T = TypeVar("T")

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Values of these types are sent unchanged."""

_NAMES = {id(member): member.value for member in DType}
# The attribute of a class with its import path, because a table would keep the class.
_PATH = "_trio_accel_path"


def encode_spec(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None = None) -> Message:
    """Encode a specification as plain values.

    Args:
        spec: An instance of any attrs class that another process can import.
        host: Called with each host array; returns the plain values to send instead.
        status: The same for status words; `host` by default.

    Raises:
        TypeError: Another process cannot import the class, or a field contains a value that cannot be encoded
            (the message names it).
    """
    cls = type(spec)
    values: list[object] = [vars(cls).get(_PATH) or _path_of(cls)]
    described = cls.described
    if described.has_status:
        host = _by_field(spec, host, status)
    for field in described.values(spec):
        try:
            values.append(_encode_value(field, host))
        except _CannotCrossError as error:
            name = described.fields[len(values) - 1].name
            raise TypeError(
                "a specification that crosses to a worker holds numbers, strings, bytes, None, dtypes, "
                "members of enums, ArraySpec, host arrays and tuples of these; "
                f"{cls.__qualname__}.{name} is {SHORT_REPR.repr(field)}{error}"
            ) from None
    return tuple(values)


def _by_field(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None) -> HostEncoder:
    """Return an encoder that treats status words and other host arrays separately."""
    if status is None:
        return host
    fields = spec.descriptor().fields
    words = {id(getattr(spec, field.name)) for field in fields if field.role.kind == "status"}
    return lambda array: status(array) if id(array) in words else host(array)


def _path_of(cls: type[OperationSpec]) -> str:
    """Return the import path of a specification class.

    Raises:
        TypeError: It cannot be imported, or is not an attrs class.
    """
    try:
        path = _class_path(cls)
    except _CannotCrossError as error:
        raise TypeError(
            f"a specification that crosses to a worker is of a class that another process can import{error}"
        ) from None
    if not attrs.has(cast("type[object]", cls)):
        raise TypeError(
            f"a specification that crosses to a worker is an attrs class; {cls.__qualname__} is not"
        )
    setattr(cls, _PATH, path)
    return path


class _CannotCrossError(Exception):
    """The value cannot be encoded. The text adds details, or is empty."""


def _encode_value(value: object, host: HostEncoder) -> object:
    """Encode one value as plain values.

    Raises:
        _CannotCrossError: It cannot be encoded.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is ArraySpec:
        array = cast("ArraySpec", value)
        return ARRAY, int(array.block), _layout_of(array.offset, id(array.dtype), array.shape, array.strides)
    if kind is tuple:
        return TUPLE, *[_encode_value(item, host) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, enum.Enum):
        return ENUM, _class_path(kind), _encode_value(value.value, host)
    if kind is complex or issubclass(kind, np.generic):
        return _encode_number(value)
    if isinstance(value, np.ndarray):
        return HOST, host(cast("HostArray", value))
    raise _CannotCrossError


@functools.lru_cache(1024)
def _layout_of(offset: int, dtype: int, shape: Ints, strides: Ints) -> Message:
    """Return an array without its block; cached, because a pickle stores a repeated object only once.

    Args:
        offset: The offset in the block.
        dtype: The `id` of the dtype, because its hash takes longer than all the rest.
        shape: The extents.
        strides: The steps.
    """
    # Conversion to int, because NumPy would pickle extents and steps of its own types.
    return int(offset), _NAMES[dtype], tuple(map(int, shape)), tuple(map(int, strides))


def _encode_number(value: Any) -> object:
    plain: object = value if type(value) is complex else value.item()
    if type(plain) is complex:
        # The pickler would call Python code for these.
        return COMPLEX, plain.real, plain.imag
    if type(plain) not in PLAIN:
        raise _CannotCrossError(f", a {type(value).__name__}")
    return plain


def _class_path(cls: type[object]) -> str:
    """Return the import path of a class.

    Raises:
        _CannotCrossError: Another process cannot import it.
    """
    reason = why_not_found(cls)
    if reason is not None:
        raise _CannotCrossError(f": {cls.__module__}.{cls.__qualname__} {reason}")
    return f"{cls.__module__}:{cls.__qualname__}"


def encode_array(array: HostArray) -> Message:
    """Encode a small host array as plain values: dtype, shape and bytes in C order.

    Raises:
        TypeError: Devices do not have this dtype.
    """
    return DType.of(array.dtype).value, array.shape, array.tobytes()


def result_of(host: HostArray) -> Message:
    """Encode a host array to fill from a worker's reply."""
    return "result", DType.of(host.dtype).value, host.shape


def decode_spec(data: Message, host: HostDecoder) -> OperationSpec:
    """Decode a specification from the result of `encode_spec`.

    Args:
        data: The result of `encode_spec`.
        host: Called with the encoder's plain values; returns the host array.

    Raises:
        ImportError: This process lacks the module.
    """
    path, *fields = cast("tuple[Any, ...]", data)
    spec: OperationSpec = _descriptor_at(path).make([_decode_value(field, host) for field in fields])
    return spec


@functools.cache
def _descriptor_at(path: str) -> Descriptor:
    return resolve(path, OperationSpec).descriptor()


def _decode_value(data: object, host: HostDecoder) -> object:
    """Decode a value. Everything except tuples is unchanged."""
    kind = type(data)
    if kind is not tuple:
        return data
    tag, *values = cast("tuple[Any, ...]", data)
    if tag == ARRAY:
        block, (offset, dtype, shape, strides) = values
        return ArraySpec(block, offset, DTYPES[dtype], shape, strides)
    if tag in (COMPLEX, HOST):
        return complex(*values) if tag == COMPLEX else host(values[0])
    items = [_decode_value(value, host) for value in values]
    if tag == TUPLE:
        return tuple(items)
    path, value = items
    return _enum_at(path)(value)


@functools.cache
def _enum_at(path: str) -> Callable[[object], enum.Enum]:
    return resolve(path, enum.Enum)


def resolve(path: str, base: type[T]) -> type[T]:
    """Return the class with an import path.

    Raises:
        ImportError: This process lacks the module.
        TypeError: It is not a subclass of `base`.
    """
    module, _, name = path.partition(":")
    attribute: object = importlib.import_module(module)
    for part in name.split("."):
        attribute = getattr(attribute, part)
    if not (isinstance(attribute, type) and issubclass(attribute, base)):
        raise TypeError(f"{path} is not a subclass of {base.__name__}")
    return attribute


def decode_array(data: Message) -> HostArray:
    """Decode a writable array, contiguous in C order, from the result of `encode_array`."""
    dtype, shape, content = cast("tuple[str, tuple[int, ...], bytes]", data)
    return np.ndarray(shape, DTYPES[dtype].dtype, bytearray(content))
