"""Files for the tests, written without the code that they test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import trio_accel as ta

# The format's words for element types, from its documentation.
WORDS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def encoded(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, array in arrays.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = entry(WORDS[array.dtype.name], list(array.shape), begin, len(data))
    return raw(header, data)


def noise(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Any bits that the dtype may have, NaN and infinities among them."""
    element = dtype_of(dtype)
    count = int(np.prod(shape)) * element.itemsize
    bits = np.random.default_rng(count).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return bits.view(element).reshape(shape)


async def used(device: ta.Device) -> tuple[int, int]:
    """Bytes and blocks that the device holds when everything is over."""
    await device.synchronize()
    memory = (await device.statistics()).memory
    return memory.used, memory.blocks
