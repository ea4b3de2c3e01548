"""Parameters of a kernel, as it declares them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from ..backends.base import DType, DTypeLike
from ..backends.base.ops import ArraySpec, KernelLayout, KernelParameter, KernelRole, contiguous_strides
from ..backends.base.values import ALWAYS_HELD

__all__ = [
    "Parameter",
    "Scalars",
    "ShapeRule",
    "always_held",
    "check_array",
    "reads",
    "scalar",
    "updates",
    "writes",
]

ShapeRule: TypeAlias = Callable[..., "int | Sequence[int]"]
"""Tells the shape of a new array from arguments of the kernel, which it names as its own parameters."""

# Formats of `struct`; others are packed by NumPy.
_FORMATS = {
    DType.float64: "d",
    DType.float32: "f",
    DType.float16: "e",
    DType.int8: "b",
    DType.int16: "h",
    DType.int32: "i",
    DType.int64: "q",
    DType.uint8: "B",
    DType.uint16: "H",
    DType.uint32: "I",
    DType.uint64: "Q",
    DType.bool: "?",
}


@attrs.frozen
class Parameter:
    """One parameter: what the kernel does with it, and what it takes; made by `reads`, `scalar` and others.

    Attributes:
        role: What the kernel does with it.
        dtype: Element type; of a scalar, its type.
        ndim: How many axes the array has; None for any number.
        layout: Arrays that it takes.
        shape: Tells the shape of an output that is not given.
    """

    role: KernelRole
    dtype: DType
    ndim: int | None = None
    layout: KernelLayout = "contiguous"
    shape: ShapeRule | None = None

    def named(self, name: str) -> KernelParameter:
        """The same as a definition has it."""
        return KernelParameter(
            name=name, role=self.role, dtype=self.dtype, ndim=self.ndim, layout=self.layout
        )


def reads(dtype: DTypeLike, *, ndim: int | None = None, layout: KernelLayout = "contiguous") -> Parameter:
    """Declare an array that is only read. The kernel gets the address of its first element.

    Args:
        dtype: Element type; an array of another one is refused.
        ndim: How many axes it has; None for any number.
        layout: ``"contiguous"``: one that is not in C order without gaps is refused. ``"packed"``: it is
            copied so. ``"any"``: it is passed as it lies; give the kernel its strides as scalars.

    Raises:
        TypeError, ValueError: No such dtype or layout.
    """
    return _array("read", dtype, ndim, layout)


def updates(dtype: DTypeLike, *, ndim: int | None = None, layout: KernelLayout = "contiguous") -> Parameter:
    """Declare an array that is read and changed in place; see `reads`."""
    return _array("update", dtype, ndim, layout)


def writes(
    dtype: DTypeLike,
    *,
    ndim: int | None = None,
    layout: KernelLayout = "contiguous",
    shape: ShapeRule | None = None,
) -> Parameter:
    """Declare an array that is overwritten in full; see `reads`.

    Args:
        dtype: Element type.
        ndim: How many axes it has.
        layout: Arrays that it takes.
        shape: Tells the shape from other arguments, ``shape=lambda x: x.shape``; then the array may be left
            out at the launch, and is made.
    """
    if shape is not None and not callable(shape):
        raise TypeError(f"writes: shape must be a rule, such as lambda x: x.shape, got {shape!r}")
    return attrs.evolve(_array("write", dtype, ndim, layout), shape=shape)


def scalar(dtype: DTypeLike) -> Parameter:
    """Declare a number that is passed by value, as this type; one that it cannot hold is refused."""
    return Parameter("scalar", DType.of(dtype))


def _array(role: KernelRole, dtype: DTypeLike, ndim: int | None, layout: KernelLayout) -> Parameter:
    lies: object = layout
    if lies not in ("contiguous", "packed", "any"):
        raise ValueError(f"layout: must be 'contiguous', 'packed' or 'any', got {lies!r}")
    axes: object = ndim
    if axes is not None and (isinstance(axes, bool) or not isinstance(axes, int) or axes < 0):
        raise ValueError(f"ndim: must be a whole number of at least 0, or None, got {axes!r}")
    return Parameter(role, DType.of(dtype), ndim, layout)


def always_held(
    parameter: KernelParameter,
) -> tuple[frozenset[type[object]], float, float] | None:
    """Types of numbers, and the least and the most of them, that a scalar holds for sure; None for arrays."""
    if parameter.role != "scalar":
        return None
    dtype = parameter.dtype
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.dtype)
        return frozenset({int}), int(limits.min), int(limits.max)
    if dtype.kind == "float":
        return frozenset({int, float}), -ALWAYS_HELD, ALWAYS_HELD
    return frozenset(), 0, 0


def check_array(operation: str, parameter: KernelParameter, array: ArraySpec) -> None:
    """Refuse an array that the kernel would take for another.

    Raises:
        TypeError: Another dtype.
        ValueError: Other axes, or gaps.
    """
    name = parameter.name
    if array.dtype is not parameter.dtype:
        raise TypeError(
            f"{operation}: {name} must have dtype {parameter.dtype}, got {array.dtype}; use cast()"
        )
    if parameter.ndim is not None and array.ndim != parameter.ndim:
        raise ValueError(f"{operation}: {name} must have {parameter.ndim} axes, got shape {array.shape}")
    if (
        parameter.layout == "contiguous"
        and array.strides != contiguous_strides(array.shape, array.dtype.itemsize)
        and not array.is_contiguous
    ):
        raise ValueError(
            f"{operation}: {name} must be contiguous, got a view of shape {array.shape} with strides "
            f"{array.strides}; copy it (await {name}.copy()), or declare it with layout='packed'"
        )


class Scalars:
    """Packs the scalars of a kernel, each aligned to its size as in a C structure.

    Args:
        dtypes: Their types, in order.
        offsets: Where each lies.
    """

    def __init__(self, dtypes: Sequence[DType], offsets: Sequence[int]) -> None:
        self._dtypes = tuple(dtypes)
        # Those that NumPy makes bytes of.
        self._others = tuple(number for number, dtype in enumerate(dtypes) if dtype not in _FORMATS)
        code, end = "=", 0
        for dtype, offset in zip(dtypes, offsets, strict=True):
            code += "x" * (offset - end) + _FORMATS.get(dtype, f"{dtype.itemsize}s")
            end = offset + dtype.itemsize
        self._pack = struct.Struct(code).pack

    def pack(self, values: list[Any]) -> bytes:
        """The bytes of values that their types can hold."""
        for number in self._others:
            values[number] = np.array(values[number], self._dtypes[number].dtype).tobytes()
        return self._pack(*values)
