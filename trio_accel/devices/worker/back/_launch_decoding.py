"""Reads launches as the application has written them."""

from __future__ import annotations

import enum
import functools
import importlib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import ArraySpec, Descriptor, OperationSpec
from ...arrays._blocks import Block
from ...base._waits import Arrival
from ...operations._faults import FaultHit, FaultPlan, Faults
from ...operations._operation import Launch
from ..transport._launch_format import ARRAY, COMPLEX, DTYPES, HOST, TUPLE, Wire, decode_fault
from ._remote_copies import RemoteArray

__all__ = ["HostDecoder", "decode_array", "decode_launch", "decode_spec", "no_host"]

HostDecoder: TypeAlias = Callable[[Any], npt.NDArray[Any]]
"""Called with what was sent for a host array; returns the array."""

T = TypeVar("T")


def decode_launch(
    data: Any,
    number: int,
    blocks: Mapping[int, Block],
    shared: Callable[..., npt.NDArray[Any]],
    results: list[npt.NDArray[Any]],
) -> Launch:
    """Make a launch of what the application made of it.

    Args:
        data: The launch as plain values.
        number: Number of the request.
        blocks: The blocks by their ids.
        shared: Makes an array over memory of the application's, and adds what must be over before it is used.
        results: Takes the host arrays that are sent with the reply.

    Raises:
        ImportError: This process does not have the specification's module.
    """
    name, library, spec, allocations, staged, outputs, uses, fault = data
    arrivals: list[Arrival] = []

    def host(plain: Any) -> npt.NDArray[Any]:
        kind, *rest = plain
        if kind == "value":
            return decode_array(rest[0])
        if kind == "copy":
            return cast("npt.NDArray[Any]", RemoteArray(number, rest[0]))
        if kind == "shared":
            return shared(arrivals, *rest)
        results.append(_empty(*rest))
        return results[-1]

    main = decode_spec(spec, host)
    copies: Any = tuple([decode_spec(copy, host) for copy in staged]) if staged else ()
    reads, writes = main.blocks()
    for copy in copies:
        reads |= copy.blocks()[0]
    return Launch(
        name,
        main,
        reads,
        writes,
        allocations,
        copies,
        [blocks[output] for output in outputs],
        [(argument, blocks[used]) for argument, used in uses],
        [],
        library,
        None if fault is None else FaultHit(FaultPlan(name, decode_fault(fault), 1), Faults()),
        number,
        arrivals,
    )


def _empty(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.empty(shape, DType(dtype).dtype)


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
        elif plain[0] == ARRAY:
            _, block, (offset, dtype, shape, strides) = plain
            values.append(ArraySpec(block, offset, DTYPES[dtype], shape, strides))
        else:
            values.append(_decode_value(plain, host))
    spec: OperationSpec = _descriptor_at(path).make(values)
    return spec


@functools.cache
def _descriptor_at(path: str) -> Descriptor:
    return _resolve(path, OperationSpec).descriptor()


def _decode_value(data: Wire, host: HostDecoder) -> object:
    """Make the value that a tuple stands for."""
    tag, *values = cast("tuple[Any, ...]", data)
    if tag == ARRAY:
        block, (offset, dtype, shape, strides) = values
        return ArraySpec(block, offset, DTYPES[dtype], shape, strides)
    if tag == COMPLEX:
        return complex(*values)
    if tag == HOST:
        return host(values[0])
    items = [_decode_value(cast("Wire", value), host) if type(value) is tuple else value for value in values]
    if tag == TUPLE:
        return tuple(items)
    path, value = items
    return _enum_at(path)(value)


@functools.cache
def _enum_at(path: str) -> Callable[[object], enum.Enum]:
    return _resolve(path, enum.Enum)


def _resolve(path: str, base: type[T]) -> type[T]:
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


def decode_array(data: Wire) -> npt.NDArray[Any]:
    """Make a writable array, contiguous in C order, of what `encode_array` made of it."""
    dtype, shape, content = cast("tuple[str, tuple[int, ...], bytes]", data)
    return np.ndarray(shape, DTYPES[dtype].dtype, bytearray(content))


def no_host(array: Any) -> NoReturn:
    """For specifications without host arrays."""
    raise TypeError(f"a host array where there is none: {reprlib.repr(array)}")
