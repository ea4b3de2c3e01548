"""Functions refuse arrays of unsupported dtypes by their own names, and mention nothing internal."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

arrays: Any = ta.arrays
FUNCTIONS = [name for name in arrays.__all__ if hasattr(getattr(arrays, name), "asked")]
DTYPES = ("bool", "int64", "uint64", "float64", "complex128", "float8_e4m3fn")
# Integers, and sequences of arrays.
NUMBERS = (
    "k", "n_rows", "num", "num_classes", "repeats", "repetitions", "shape", "start", "stop", "fill_value",
    "source", "destination", "window_shape", "pad_width", "sections", "shift", "axis", "axes", "axis1",
    "axis2",
)  # fmt: skip
SEVERAL = ("arrays", "keys", "conditions", "choices")


def _argument(name: str, device: ta.Device, x: Any, first: Any) -> Any:
    if name == "device":
        return device
    return [x, first] if name in SEVERAL else 1 if name in NUMBERS else x


def _needed(function: Any) -> list[str]:
    given = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in given if each.default is each.empty and each.kind in kinds]


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_an_error_names_the_function_and_no_inner_expression(device: ta.Device, name: str) -> None:
    function = getattr(arrays, name)
    first, *others = _needed(function)
    host = np.array([1, 0, 1])
    made = {dtype: await device.put(host.astype(ta.DType(dtype).dtype)) for dtype in DTYPES}
    names = rf"^arrays\.{name}\b"
    for dtype in DTYPES:
        for other in dict.fromkeys((dtype, "complex128", "int64", "bool")):
            given = [_argument(each, device, made[other], made[dtype]) for each in others]
            try:
                await function(_argument(first, device, made[dtype], made[other]), *given)
            except (TypeError, ValueError, ta.NotSupportedError) as error:
                told = str(error)
                if "backend has no " in told or "needs the package" in told:
                    # The error for a missing function of a backend is about its kernels.
                    continue
                assert re.search(names, told), told
                assert ", in line " not in told, told
            except ta.AccelError:
                # Numbers out of range; the error is not about dtypes.
                continue
