"""Functions of the array API standard that the packages have not as it wants them; questions about dtypes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import attrs
import numpy as np

from .. import arrays, jit
from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Device

__all__ = [
    "DEFAULTS",
    "STANDARD",
    "FloatInfo",
    "Functions",
    "IntegerInfo",
    "Typed",
    "adapted",
    "can_cast",
    "finfo",
    "iinfo",
    "isdtype",
    "result_type",
    "run",
]


class HasDType(Protocol):
    """An array."""

    @property
    def dtype(self) -> DType:
        """Element type."""
        ...


Typed: TypeAlias = "HasDType | DTypeLike"

KINDS = {
    "bool": ("bool",),
    "signed integer": ("int",),
    "unsigned integer": ("uint",),
    "integral": ("int", "uint"),
    "real floating": ("float",),
    "complex floating": ("complex",),
    "numeric": ("int", "uint", "float", "complex"),
}
"""Kinds of dtypes as the standard names them, and as `DType.kind` does."""
STANDARD = tuple(dtype for dtype in DType if dtype.kind != "float" or dtype in (DType.float32, DType.float64))
"""The dtypes that the standard has."""
DEFAULTS = {
    "real floating": DType.float64,
    "complex floating": DType.complex128,
    "integral": DType.int64,
    "indexing": DType.int64,
}
"""The dtypes of what is made without one."""
_SCALARS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint", "float", "complex"),
    float: ("float", "complex"),
    complex: ("float", "complex"),
}
"""Kinds of the dtypes that a Python number goes with."""


@attrs.frozen(kw_only=True)
class FloatInfo:
    """Limits of a floating dtype; for a complex one, those of its parts.

    Attributes:
        bits: Bits of one number.
        eps: Distance from 1 to the next larger number.
        max: The largest number.
        min: The smallest number, a negative one.
        smallest_normal: The smallest positive number with full precision.
        dtype: The dtype.
    """

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@attrs.frozen(kw_only=True)
class IntegerInfo:
    """Limits of an integer dtype.

    Attributes:
        bits: Bits of one number.
        max: The largest number.
        min: The smallest number.
        dtype: The dtype.
    """

    bits: int
    max: int
    min: int
    dtype: DType


def dtype_of(given: Typed) -> DType:
    """Return the dtype of an array, or the dtype."""
    # NumPy's dtypes and classes have an attribute of that name, too.
    if isinstance(given, (DType, str, type, np.dtype)):
        return DType.of(given)
    return DType.of(given.dtype)


def finfo(type: Typed, /) -> FloatInfo:  # noqa: A002  # the standard's name
    """Return the limits of a floating or complex dtype.

    Raises:
        TypeError: It is another one.
    """
    import ml_dtypes

    dtype = dtype_of(type)
    if not dtype.is_inexact:
        raise TypeError(f"finfo: type must be floating or complex, got {dtype}")
    part = {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(dtype, dtype)
    # It knows those that NumPy has not, too.
    find: Any = ml_dtypes.finfo
    limits: Any = find(part.dtype)
    return FloatInfo(
        bits=limits.bits,
        eps=float(limits.eps),
        max=float(limits.max),
        min=float(limits.min),
        smallest_normal=float(limits.smallest_normal),
        dtype=part,
    )


def iinfo(type: Typed, /) -> IntegerInfo:  # noqa: A002  # the standard's name
    """Return the limits of an integer dtype.

    Raises:
        TypeError: It is another one.
    """
    dtype = dtype_of(type)
    if dtype.kind not in KINDS["integral"]:
        raise TypeError(f"iinfo: type must be an integer dtype, got {dtype}")
    limits = np.iinfo(dtype.dtype)
    return IntegerInfo(bits=limits.bits, max=int(limits.max), min=int(limits.min), dtype=dtype)


def isdtype(dtype: DTypeLike, kind: DTypeLike | Sequence[DTypeLike]) -> bool:
    """Tell whether a dtype is of a kind, of one of several, or another dtype.

    Raises:
        ValueError: There is no such kind.
    """
    if isinstance(kind, (tuple, list)):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(f"isdtype: kind must be one of {', '.join(KINDS)}, or a dtype; got {kind!r}")
        return DType.of(dtype).kind in KINDS[kind]
    return DType.of(dtype) is DType.of(cast("DTypeLike", kind))


def result_type(*arrays_and_dtypes: Typed | complex) -> DType:
    """Return the dtype of the result of arrays, dtypes and Python numbers together.

    Raises:
        TypeError: The standard has no promotion of them, or there is no array and no dtype.
    """
    numbers = [type(one) for one in arrays_and_dtypes if type(one) in _SCALARS]
    dtypes = [dtype_of(cast("Typed", one)) for one in arrays_and_dtypes if type(one) not in _SCALARS]
    kinds = {dtype.kind for dtype in dtypes}
    fits = (
        len(kinds) == 1
        or kinds == {"float", "complex"}
        or (kinds == {"int", "uint"} and DType.uint64 not in dtypes)
    )
    if not fits or any(not kinds & set(_SCALARS[number]) for number in numbers):
        told = ", ".join([*map(str, dtypes), *(f"a Python {number.__name__}" for number in numbers)])
        raise TypeError(
            f"result_type: the array API standard does not promote {told or 'nothing'} to one dtype"
        )
    # A complex number makes a real floating dtype complex.
    return DType.of(np.result_type(*(dtype.dtype for dtype in dtypes), *[1j] * (complex in numbers)))


def can_cast(from_: Typed, to: DTypeLike, /) -> bool:
    """Tell whether a dtype becomes another by promotion."""
    try:
        return result_type(dtype_of(from_), to) is DType.of(to)
    except TypeError:
        return False


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
