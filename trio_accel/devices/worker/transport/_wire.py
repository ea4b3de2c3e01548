"""Operation specifications as plain tuples: what a worker process is asked to do."""

from __future__ import annotations

import enum
import functools
import importlib
import reprlib
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import ArraySpec, OperationSpec

__all__ = [
    "Wire",
    "decode_array",
    "decode_spec",
    "encode_array",
    "encode_spec",
    "no_host",
    "spec_fields",
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
_INT = {int}
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 100
_DTYPES = {member.value: member for member in DType}
_NAMES = {id(member): member.value for member in DType}


def encode_spec(spec: OperationSpec, host: HostEncoder) -> Wire:
    """Make plain values of a specification.

    Args:
        spec: Any attrs class that another process can import.
        host: Called with each host array; what it returns (plain values) is sent instead.

    Raises:
        TypeError: The class cannot be imported elsewhere, or a field holds something that cannot
            cross (the message names it).
    """
    cls = type(spec)
    codec = _CODECS.get(cls) or _codec(cls)
    values: list[object] = [codec.path]
    array: Any
    for field in codec.values(spec):
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
                name = codec.names[len(values) - 1]
                raise TypeError(
                    "a specification that crosses to a worker holds numbers, strings, bytes, None, dtypes, "
                    "members of enums, ArraySpec, host arrays and tuples of these; "
                    f"{cls.__qualname__}.{name} is {_SHORT.repr(field)}{error}"
                ) from None
    return tuple(values)


def decode_spec(data: Wire, host: HostDecoder) -> OperationSpec:
    """Make a specification of what `encode_spec` made of it.

    Args:
        data: From `encode_spec`.
        host: Called with what its counterpart returned; returns the host array.

    Raises:
        ImportError: This process has no such module.
    """
    path: Any = data[0]
    codec = _codec_at(path)
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
    if not codec.keywords:
        return codec.cls(*values)
    count = len(values) - len(codec.keywords)
    return codec.cls(*values[:count], **dict(zip(codec.keywords, values[count:], strict=True)))


def spec_key(
    spec: OperationSpec, address: Callable[[npt.NDArray[Any]], Wire | None]
) -> tuple[list[Any], list[int]] | None:
    """All of a specification but its blocks, and these: what is equal there is the same once it is encoded.

    None where it holds anything else than arrays, numbers, strings, bytes, None and tuples of integers.

    Args:
        spec: The specification.
        address: Tells of a host array where it lies; None where that is not all that is to be said of it.
    """
    cls = type(spec)
    codec = _CODECS.get(cls) or _codec(cls)
    if codec.keywords:
        return None
    key: list[Any] = [cls]
    blocks: list[int] = []
    array: Any
    for field in codec.values(spec):
        kind = type(field)
        if kind is ArraySpec:
            array = field
            blocks.append(array.block)
            # A dtype by its identity, as its hash takes longer than all the rest.
            key += array.offset, id(array.dtype), array.shape, array.strides
        elif kind is float:
            # As zeros of both signs are equal, and no number that is none equals itself.
            key += kind, repr(field)
        elif kind in _PLAIN or (kind is tuple and set(map(type, cast("tuple[object, ...]", field))) <= _INT):
            key += kind, field
        elif kind is np.ndarray:
            array = field
            where = address(array)
            if where is None:
                return None
            key.append(where)
        else:
            return None
    return key, blocks


def spec_fields(spec: OperationSpec) -> list[Any]:
    """What a specification holds."""
    cls = type(spec)
    return list((_CODECS.get(cls) or _codec(cls)).values(spec))


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


@attrs.frozen
class _Codec:
    """How specifications of one class are sent: the path of the class, then its fields.

    Attributes:
        names: Names of the fields that make one, those that are only keywords last.
        keywords: How the initializer calls the latter.
        values: Gets the fields.
    """

    cls: Callable[..., OperationSpec]
    path: str
    names: tuple[str, ...]
    keywords: tuple[str, ...]
    values: Callable[[OperationSpec], Iterable[object]]


_CODECS: dict[type[OperationSpec], _Codec] = {}


def _codec(cls: type[OperationSpec]) -> _Codec:
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
    fields = [field for field in attrs.fields(cast("Any", cls)) if field.init]
    positional = [field.name for field in fields if not field.kw_only]
    keywords = [field for field in fields if field.kw_only]
    names = (*positional, *(field.name for field in keywords))
    codec = _Codec(cls, path, names, tuple(str(field.alias) for field in keywords), _getter(names))
    _CODECS[cls] = codec
    return codec


def _getter(names: tuple[str, ...]) -> Callable[[OperationSpec], Iterable[object]]:
    if len(names) > 1:
        return attrgetter(*names)
    # Of one name, `attrgetter` makes no tuple.
    return lambda spec: [getattr(spec, name) for name in names]


@functools.cache
def _codec_at(path: str) -> _Codec:
    cls = _resolve(path, OperationSpec)
    return _CODECS.get(cls) or _codec(cls)


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
