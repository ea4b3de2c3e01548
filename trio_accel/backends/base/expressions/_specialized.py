"""Expressions and their types as texts, which specifications hold, and their scalars as bytes."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ..contract.dtypes import DType
from ._expression import Expression, parse
from ._reduction import Reduction, TypedReduction, typed_reduction
from ._typing import ArgumentType, TypedExpression, Weak, typed

__all__ = [
    "SCALAR_BYTES",
    "Argument",
    "SpecializedExpression",
    "SpecializedReduction",
    "pack_scalars",
    "unpack_scalars",
]

SCALAR_BYTES = 16
"""Bytes of each scalar: as many as the longest has."""

_FLOAT = struct.Struct("=d8x")
# First letter of a kind of argument in a text.
_ARRAY, _SCALAR, _WEAK = "[]", "", "python "


@attrs.frozen
class Argument:
    """How an expression gets one argument.

    Attributes:
        kind: Its type.
        is_array: Whether it is an array; otherwise it is a number that is handed over with the launch.
    """

    kind: ArgumentType
    is_array: bool

    @property
    def dtype(self) -> DType:
        """The dtype that it comes in."""
        return self.kind.carrier if isinstance(self.kind, Weak) else self.kind

    def encode(self) -> str:
        """It as a text."""
        if isinstance(self.kind, Weak):
            return f"{_WEAK}{self.kind.value}"
        return f"{self.kind.value}{_ARRAY if self.is_array else _SCALAR}"

    @staticmethod
    @functools.cache
    def decode(text: str) -> Argument:
        """Decode a text of `encode`; there are three texts for each dtype at most."""
        if text.startswith(_WEAK):
            return Argument(Weak(text.removeprefix(_WEAK)), False)
        return Argument(DType(text.removesuffix(_ARRAY)), text.endswith(_ARRAY))


@attrs.frozen
class SpecializedExpression:
    """An expression for arguments of certain types.

    Attributes:
        expression: The expression.
        arguments: How it gets its inputs.
        dtypes: Types that the results are converted to; None for no conversion.
        is_checked: Whether an index outside of an array fails the operation.
    """

    expression: Expression
    arguments: tuple[Argument, ...]
    dtypes: tuple[DType | None, ...]
    is_checked: bool = False

    @functools.cached_property
    def typed(self) -> TypedExpression:
        """Its steps."""
        found = typed(self.expression, tuple(each.kind for each in self.arguments), self.dtypes)
        return attrs.evolve(found, checked=self.expression.inputs) if self.is_checked else found

    def encode(self) -> str:
        """It as a text; what is equal has equal texts."""
        return _encode_elementwise(self)

    @staticmethod
    @functools.lru_cache(1024)
    def decode(text: str) -> SpecializedExpression:
        """Decode a text of `encode`."""
        expression, kinds, names, is_checked = json.loads(text)
        dtypes = tuple(map(_dtype, names))
        return SpecializedExpression(_expression(expression), _arguments(kinds), dtypes, is_checked)


@attrs.frozen
class SpecializedReduction:
    """A reduction for arguments of certain types.

    Attributes:
        reduction: The reduction.
        arguments: How it gets its inputs.
        dtype: Type that values are converted to before they are combined; None for NumPy's choice.
        result: Type that the result is converted to; None for no conversion.
    """

    reduction: Reduction
    arguments: tuple[Argument, ...]
    dtype: DType | None
    result: DType | None

    @functools.cached_property
    def typed(self) -> TypedReduction:
        """Its steps."""
        kinds = tuple(each.kind for each in self.arguments)
        return typed_reduction(self.reduction, kinds, self.dtype, self.result)

    def encode(self) -> str:
        """It as a text; what is equal has equal texts."""
        return _encode_reduction(self)

    @staticmethod
    @functools.lru_cache(1024)
    def decode(text: str) -> SpecializedReduction:
        """Decode a text of `encode`."""
        mapped, name, parts, identity, kinds, dtype, result = json.loads(text)
        combine, post = (None if part is None else _expression(part) for part in parts)
        value = None if identity is None else _number(identity)
        reduction = Reduction(_expression(mapped), name, combine, value, post)
        return SpecializedReduction(reduction, _arguments(kinds), _dtype(dtype), _dtype(result))


@functools.lru_cache(1024)
def _encode_elementwise(specialized: SpecializedExpression) -> str:
    dtypes = [_name(each) for each in specialized.dtypes]
    return json.dumps([_plain(specialized.expression), _kinds(specialized), dtypes, specialized.is_checked])


@functools.lru_cache(1024)
def _encode_reduction(specialized: SpecializedReduction) -> str:
    reduction = specialized.reduction
    parts = [None if part is None else _plain(part) for part in (reduction.combine, reduction.post)]
    # A complex identity is two numbers.
    identity = None if reduction.identity is None else repr(reduction.identity)
    plain = [_plain(reduction.map), reduction.name, parts, identity, _kinds(specialized)]
    return json.dumps([*plain, _name(specialized.dtype), _name(specialized.result)])


def _plain(expression: Expression) -> list[Any]:
    return [expression.text, expression.inputs, expression.outputs]


def _expression(plain: list[Any]) -> Expression:
    text, inputs, outputs = plain
    return parse(text, tuple(inputs), tuple(outputs))


def _kinds(specialized: SpecializedExpression | SpecializedReduction) -> list[str]:
    return [each.encode() for each in specialized.arguments]


def _arguments(kinds: list[str]) -> tuple[Argument, ...]:
    return tuple(map(Argument.decode, kinds))


def _name(dtype: DType | None) -> str | None:
    return None if dtype is None else dtype.value


def _dtype(name: str | None) -> DType | None:
    return None if name is None else DType(name)


def _number(text: str) -> complex:
    named = {"True": True, "False": False}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return complex(text)


def pack_scalars(values: Sequence[complex], dtypes: Sequence[DType]) -> bytes:
    """Return the numbers as bytes, each of its own type."""
    return b"".join([_packed(value, dtype) for value, dtype in zip(values, dtypes, strict=True)])


def _packed(value: complex, dtype: DType) -> bytes:
    if dtype is DType.float64:
        return _FLOAT.pack(value)
    return np.array(value, dtype.dtype).tobytes().ljust(SCALAR_BYTES, b"\0")


def unpack_scalars(data: bytes, dtypes: Sequence[DType]) -> list[Any]:
    """Return the numbers that `pack_scalars` made bytes of, as NumPy's."""
    return [
        np.frombuffer(data, dtype.dtype, 1, number * SCALAR_BYTES)[0] for number, dtype in enumerate(dtypes)
    ]
