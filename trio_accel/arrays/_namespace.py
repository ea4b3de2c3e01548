"""The namespace of the array API standard over calls."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..backends.base import DType, DTypeLike, NotSupportedError
from ..devices.operations._calls import Call
from ..devices.operations._chain import METHODS
from ._updates import updated

PRODUCTS = ("matmul", "tensordot", "vecdot")
"""Functions of `ta.linalg` that the standard has among those of arrays."""


class _MissingNameError(NotSupportedError, AttributeError):
    """A name that the namespace has not; an `AttributeError`, as `hasattr` wants it."""


class Namespace:
    """Functions of the array API standard, which make calls of references and calls.

    They are the functions of `ta.arrays` that need no device, and the products of `ta.linalg`; also dtypes
    and constants. Operators of references and calls use it.

    Args:
        find: Finds a function by its name.
    """

    __array_api_version__: str = "2025.12"
    e: float = math.e
    inf: float = math.inf
    nan: float = math.nan
    newaxis: None = None
    pi: float = math.pi

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        attribute: Any = DType.__members__.get(name)
        if attribute is None:
            attribute = None if name.startswith("_") else self._find(name)
            if not isinstance(attribute, FunctionType):
                raise _MissingNameError(f"the namespace of calls does not provide {name}")
            if next(iter(inspect.signature(attribute).parameters)) == "device":
                reason = f"it makes arrays on a device: ta.arrays.{name}(device, ...)"
                raise _MissingNameError(f"the namespace of calls does not provide {name}: {reason}")
        # Operators look for it each time.
        setattr(self, name, attribute)
        return attribute

    def __dir__(self) -> list[str]:
        names = {*sys.modules[__name__.rpartition(".")[0]].__all__, *PRODUCTS, *DType.__members__}
        return sorted({*super().__dir__(), *[name for name in names if hasattr(self, name)]})

    def updated(self, x: Any, key: Any, method: str, values: Any) -> Any:
        """Return an updated copy of an array, for `x.at[key]`; see `IndexUpdate`."""
        return updated(self, x, key, method, values)

    def astype(self, x: Any, dtype: DTypeLike, /, *, copy: bool = True) -> Any:
        """Convert the elements; a copy unless nothing is to be converted and `copy` is False."""
        to = DType.of(dtype)
        return x if not copy and x.dtype is to else Call[Any](METHODS["copy"], (x, to))
