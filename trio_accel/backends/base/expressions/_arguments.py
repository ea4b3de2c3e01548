"""Arguments of expressions: their types as texts, and numbers as bytes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ..contract.dtypes import DType
from ._reduction import WIDER
from ._steps import ArgumentType, Weak

__all__ = ["SCALAR_BYTES", "WIDE", "Argument", "pack_scalars", "unpack_scalars"]

SCALAR_BYTES = 16
"""Bytes of each scalar: the size of the longest one."""

_FLOAT = struct.Struct("=d8x")
# The prefixes of argument kinds in an encoded program.
_ARRAY, _SCALAR, _WEAK = "[]", "", "python "


@attrs.frozen
class Argument:
    """The form in which an expression gets one argument.

    Attributes:
        kind: Its type.
        is_array: Whether it is an array; otherwise it is a number that is passed with the launch.
    """

    kind: ArgumentType
    is_array: bool

    @property
    def dtype(self) -> DType:
        """The dtype of the argument's values."""
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


_FLOAT_OF_INTEGERS = {dtype.value: DType.float64 for dtype in DType if dtype.kind in ("bool", "int", "uint")}

# The keys are names, because the hash of a low-precision dtype imports ml_dtypes.
WIDE: Mapping[str, Mapping[str, DType]] = {
    "float32": {**_FLOAT_OF_INTEGERS, "float16": DType.float32, "bfloat16": DType.float32},
    "float64": {**_FLOAT_OF_INTEGERS, **WIDER},
}
"""The dtypes that arrays are converted to, for each least precision."""
