"""Functions of the array API standard that the packages have not with its signature, made of theirs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import arrays, jit
from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Device
from ._array_api_dtypes import result_type

__all__ = ["Functions", "adapted", "run"]

# Names are looked up when they are called: what is not there is not there by that name.
_arrays: Any = arrays
_PROMOTED = ("cross", "matmul", "outer", "solve", "tensordot", "vecdot")
"""Functions that take arrays of one dtype, and arrays of two in the standard."""


async def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and wait for its result if it is an async one: those of views are not."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def adapted(name: str, function: Callable[..., Any], default: Device) -> Callable[..., Any]:
    """Return a function with what the standard wants of its arguments.

    Args:
        name: Its name.
        function: The function. Those that make arrays have the device as their first argument.
        default: The device where none is given.
    """
    if name in _PROMOTED:
        return _promoting(function)
    parameters = list(inspect.signature(function).parameters.values())
    is_like = name.endswith("_like")
    if not is_like and parameters[0].name != "device":
        return function

    async def make(*args: Any, device: Device | None = None, **kwargs: Any) -> AccelRef:
        # An array without axes is a number here, and None is what a keyword has that is not given.
        numbers = [await one.item() if isinstance(one, AccelRef) else one for one in args[is_like:]]
        given = {key: value for key, value in kwargs.items() if value is not None}
        made: AccelRef = await function(args[0] if is_like else device or default, *numbers, **given)
        return made if device in (None, made.device) else await made.copy_to(device)

    keyword = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None)
    named: Any = functools.update_wrapper(make, function)
    named.__signature__ = inspect.Signature([*parameters[not is_like :], keyword])
    return make


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def promote(x1: AccelRef, x2: AccelRef, /, **options: Any) -> Any:
        dtype = result_type(x1, x2)
        return await function(*[x if x.dtype is dtype else await x.cast(dtype) for x in (x1, x2)], **options)

    return promote


class Functions:
    """Functions on a device: those of the namespace itself.

    Args:
        device: Where arrays are made, unless another one is given.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    async def astype(
        self, x: AccelRef, dtype: DTypeLike, /, *, copy: bool = True, device: Device | None = None
    ) -> AccelRef:
        """Convert the elements; a copy unless nothing is to be converted and `copy` is False."""
        if device not in (None, x.device):
            x, copy = await x.copy_to(device), False
        return x if not copy and DType.of(dtype) is x.dtype else await x.cast(dtype)

    async def repeat(self, x: AccelRef, repeats: int | AccelRef, /, *, axis: int | None = None) -> AccelRef:
        """Repeat each element; an array of `repeats` is read on the host."""
        if not isinstance(repeats, AccelRef):
            return await arrays.repeat(x, repeats, axis=axis)
        flat = x if axis is not None else await arrays.reshape(x, (-1,))
        length = flat.shape[axis or 0]
        places = np.repeat(np.arange(length), np.broadcast_to(await repeats.to_host(), length))
        return await arrays.take(flat, places, axis=axis or 0)

    async def searchsorted(
        self,
        x1: AccelRef,
        x2: AccelRef | complex,
        /,
        *,
        side: str = "left",
        sorter: AccelRef | None = None,
    ) -> AccelRef:
        """Find places for `x2`, which may be a number, in the sorted `x1`."""
        wanted = x2 if isinstance(x2, AccelRef) else await arrays.asarray(x1.device, x2, dtype=x1.dtype)
        found: AccelRef = await _arrays.searchsorted(x1, wanted, side=side, sorter=sorter)
        return found

    async def isin(
        self, x1: AccelRef | complex, x2: AccelRef | complex, /, *, invert: bool = False
    ) -> AccelRef:
        """Tell of each element of `x1` whether `x2` has it; with `invert`, whether it has not."""
        dtype = result_type(x1, x2)
        x, among = [await arrays.asarray(self._device, one, dtype=dtype) for one in (x1, x2)]
        text, reduce = ("x != among", "all") if invert else ("x == among", "any")
        compare = jit.reduction(text, reduce, inputs=("x", "among"))
        return await compare(x[..., None], await arrays.reshape(among, (-1,)), axis=-1)
