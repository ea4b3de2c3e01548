"""Refusals of synchronous use: operations on a device are awaited; the errors name the way."""

from __future__ import annotations

import inspect
import numbers
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, cast

import numpy as np

from ...actors import NotAwaited, Silenced, silence
from ...backends.base import DType, Ints
from ...backends.base.contract.foreign_names import counterpart, instead_of

__all__ = [
    "clamped",
    "integer",
    "is_several",
    "real",
    "refuse_dtypes",
    "said",
    "shown",
    "what_to_do",
    "whole",
    "wholes",
]

_AWAITED = "; it was not awaited: write `await` before the call that makes it"

# Functions of NumPy's that read no element.
_OF_LAYOUT = frozenset({"ndim", "shape", "size"})
_LEAST = -sys.maxsize - 1


def what_to_do(value: object, *, is_array: bool = True) -> str:
    """Return the advice for an object that is not what it must be, such as an array; empty without one."""
    silence(value)
    if isinstance(value, NotAwaited):
        return f"; {value.what_to_do}"
    if inspect.isawaitable(value):
        return _AWAITED
    if isinstance(value, (type, FunctionType)):
        is_class = isinstance(value, type)
        told = "it is a class: make a message of it:" if is_class else "call it by itself: await"
        return f"; {told} {value.__name__}(...)"
    if is_array and isinstance(value, np.ndarray):
        return "; copy it to the device first: await device.put(array)"
    if is_array and isinstance(value, (list, tuple, numbers.Number)):
        parts = () if isinstance(value, numbers.Number) else cast("Sequence[object]", value)
        has_arrays = any(isinstance(one, OnDevice) for one in parts)
        one_of_all = "one array of its arrays: await ta.arrays.stack(value)"
        return f"; make {one_of_all if has_arrays else 'it one: np.asarray(value)'}"
    return ""


def refuse_dtypes(name: str, given: Mapping[str, DType], hosts: Collection[str]) -> NoReturn:
    """Refuse operands that differ in dtype, and say how to convert them.

    Args:
        name: The operation.
        given: The dtypes by argument.
        hosts: Arguments that are NumPy arrays.

    Raises:
        TypeError: Always.
    """
    # An array on the device stays as it is, unless it would lose parts of the values.
    best = max(given, key=lambda one: (given[one].kind == "complex", given[one].is_inexact, one not in hosts))
    others = [one for one in given if given[one] is not given[best]]
    verbs = [f"{one}.astype" if one in hosts else f"await {one}.cast" for one in others]
    told = [f"{verb}('{given[best]}')" for verb in verbs]
    got = ", ".join(f"{one} {dtype}" for one, dtype in given.items())
    raise TypeError(f"{name}: operands must share a dtype, got {got}; write {' and '.join(told)}")


class OnDevice(Silenced):
    """Base of what stands for an array on a device: Python cannot look at its elements.

    Attributes:
        noun: How errors call it.
        first: What comes ahead of ``.to_host()`` in advice.
    """

    __slots__ = ()
    noun: ClassVar[str]
    first: ClassVar[str]

    def refuse(self, text: str) -> NoReturn:
        """Refuse a use.

        Raises:
            TypeError: Always.
        """
        self.silence()
        raise TypeError(text)

    def refuse_numpy(self, package: str, name: str) -> NoReturn:
        """Refuse a function of NumPy's, and name the one that computes on the device; see `counterpart`."""
        path = ".".join(filter(None, ("np", package, name)))
        self.refuse(f"{path} of {self.noun}: {counterpart(package, name, self.first)}")

    if TYPE_CHECKING:  # `_REFUSED` has them

        def __bool__(self) -> bool: ...
        def __iter__(self) -> NoReturn: ...
    else:  # a type checker reports these where there is none
        # A checker would take what has `__array__` for an operand of NumPy's operators.

        def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Any:
            if function.__name__ in _OF_LAYOUT and len(args) == 1 and not kwargs:
                return getattr(self, function.__name__)
            silence(*args)
            return self.refuse_numpy(function.__module__.partition(".")[2], function.__name__)

        def __format__(self, given: str) -> str:
            if given:
                told = f"it is on the device; use await {self.first}.item()"
                self.refuse(f"format {given!r} of {self.noun}: {told}")
            return str(self)

        def __getattr__(self, name: str) -> NoReturn:
            # Libraries look for private names, and go on without them.
            if not name.startswith("_"):
                self.silence()
            message = f"{type(self).__name__!r} object has no attribute {name!r}{instead_of(name)}"
            raise AttributeError(message, name=name, obj=self)


_ASSIGNED = (
    "{noun} is not assigned to, because an operation on a device is awaited; "
    "await {first}[index].assign(value) writes an array or a number into a part"
)
_DIVIDED = "divmod() of {noun}: write await ta.gather(x1 // x2, x1 % x2)"
_ENTERED = "{noun} is not a context manager; async with ref.lease() holds the array of a ref"
_ITERATED = "{noun} is not iterable: its elements are on the device; use await {first}.to_host()"
_REFUSED = {
    "array": "{noun} is not a host array; use await {first}.to_host()",
    "aiter": _ITERATED,
    "bool": "{noun} cannot be a truth value: its elements are on the device; use await {first}.item(), or "
    "ask whether there is one: {first} is not None",
    "contains": "{noun} is not searched: its elements are on the device; use await {first}.to_host()",
    "delitem": _ASSIGNED,
    "divmod": _DIVIDED,
    "index": "{noun} is not an index: its element is on the device; use int(await {first}.item())",
    "iter": _ITERATED,
    "rdivmod": _DIVIDED,
    "reduce": "{noun} is bound to its device and can be neither pickled nor copied by the copy module; use "
    "await {first}.copy(), or await {first}.to_host() to take its contents elsewhere",
    "reversed": _ITERATED,
    "setitem": _ASSIGNED,
    **dict.fromkeys(("aenter", "aexit", "enter", "exit"), _ENTERED),
} | {
    kind: f"{kind}() of {{noun}}: its element is on the device; use {kind}(await {{first}}.item())"
    for kind in ("float", "int", "complex", "round", "trunc")
}
"""Texts of errors of special methods."""


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(self: OnDevice, *given: object, **_: object) -> NoReturn:
        silence(*given)
        self.refuse(text.format(noun=self.noun, first=self.first))

    return refuse


for _special, _text in _REFUSED.items():
    setattr(OnDevice, f"__{_special}__", _refusing(_text))


def integer(name: str, argument: str, value: object, allowed: str = "an integer") -> int:
    """Take an integer of any size, of Python or NumPy; `whole` says more."""
    # Nearly all are, and Python 3.11 takes tens of microseconds to look at a protocol.
    if type(value) is int:
        return value
    try:
        # Arrays of NumPy have an index only where they are one whole number.
        return operator.index(cast("SupportsIndex", None if isinstance(value, bool) else value))
    except TypeError:
        raise TypeError(f"{name}: {argument} must be {allowed}, got {shown(value)}") from None


def clamped(name: str, argument: str, value: object) -> int:
    """Take an integer, such as an offset, of which the nearest one of 64 bits means the same; see `whole`."""
    return max(_LEAST, min(integer(name, argument, value), sys.maxsize))


def whole(name: str, argument: str, value: object, allowed: str = "an integer") -> int:
    """Take a whole number, of Python or NumPy, that fits into a signed one of 64 bits.

    Args:
        name: Name of the operation.
        argument: Name of the argument.
        value: The number.
        allowed: The kind of number that it must be, for the error.

    Raises:
        TypeError: It is none.
        ValueError: It does not fit.
    """
    value = integer(name, argument, value, allowed)
    if not _LEAST <= value <= sys.maxsize:
        # Python writes no number of thousands of digits.
        bits = value.bit_length()
        raise ValueError(f"{name}: {argument} must be from -2**63 to 2**63 - 1, got a number of {bits} bits")
    return value


def is_several(value: object) -> bool:
    """Return whether a value is a sequence, or an array with axes, and not a single element."""
    is_text = isinstance(value, (str, bytes))
    return (isinstance(value, Sequence) and not is_text) or (isinstance(value, np.ndarray) and value.ndim > 0)


def wholes(
    name: str, argument: str, value: object, allowed: str = "an integer", take: Callable[..., int] = whole
) -> Ints:
    """Take whole numbers: a sequence of them, or one by itself; `take` takes each. See `whole`.

    Raises:
        TypeError: It is neither.
        ValueError: One does not fit.
    """
    given: Any = value if is_several(value) else (value,)
    return tuple([take(name, argument, one, allowed) for one in given])


def real(name: str, argument: str, value: Any) -> Any:
    """Take a real number, of Python or NumPy; a truth value is none.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} must be a real number, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """Show a value that an error names, in one line."""
    silence(value)
    given: Any = value
    if isinstance(value, np.ndarray) and given.ndim:
        return f"an array of {given.dtype} and of shape {given.shape}"
    if isinstance(value, int) and value.bit_length() > 64:
        # Python writes no number of thousands of digits.
        return f"a number of {value.bit_length()} bits"
    try:
        text = value.__name__ if isinstance(value, type) else repr(given)
    except ValueError:
        # A sequence may hold such a number.
        return f"an object of {type(given).__name__}"
    return text if len(text) <= 100 and " at 0x" not in text else f"an object of {type(given).__name__}"


def said(where: str, error: Exception) -> Exception:
    """Make an error of NumPy again that says where; `ValueError` of a number that it has no type for."""
    kind = ValueError if isinstance(error, OverflowError) else type(error)
    return kind(f"{where}: {error}")
