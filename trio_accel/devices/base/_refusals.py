"""Errors for synchronous use. Operations on a device are awaited, and the errors explain how."""

from __future__ import annotations

import inspect
import numbers
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, cast

import numpy as np
import trio.lowlevel

from ...actors import Silenced, silence
from ...backends.base import DType, Ints
from ...backends.base.contract.foreign_names import counterpart, instead_of_attribute

__all__ = [
    "IS_DERIVED",
    "bounded_integer",
    "bounded_integers",
    "clamped",
    "for_blocking_code",
    "integer",
    "is_several",
    "real",
    "refuse_dtypes",
    "said",
    "shown",
    "what_to_do",
]

IS_DERIVED: ContextVar[bool] = ContextVar("IS_DERIVED", default=False)
"""Whether a function that gets gradients is running. It awaits nothing, so that gradients in it are calls."""

_AWAITED = "; it was not awaited: write `await` before the call that makes it"

# NumPy's functions that read no elements.
_OF_LAYOUT = frozenset({"ndim", "shape", "size"})
# Names without an underscore that other modules of this package use.
_INTERNAL = frozenset(
    (
        *("args", "block", "first", "fresh", "function", "kept", "layouts", "named", "noun", "refuse"),
        *("refuse_numpy", "send", "silence", "spent", "throw"),
    )
)
_MIN_SSIZE = -sys.maxsize - 1


def what_to_do(value: object, *, is_array: bool = True) -> str:
    """Return the advice for an object of the wrong kind, such as an array; empty if there is none."""
    silence(value)
    if advice := getattr(value, "what_to_do", None):  # of a `NotAwaited`, or a blocking namespace's array
        return f"; {advice}"
    if inspect.isawaitable(value):
        return _AWAITED
    if isinstance(value, (type, FunctionType)):
        is_class = isinstance(value, type)
        advice = "it is a class: make a message of it:" if is_class else "call it by itself: await"
        return f"; {advice} {value.__name__}(...)"
    if is_array and isinstance(value, np.ndarray):
        return "; copy it to the device first: await device.put(array)"
    if is_array and isinstance(value, (list, tuple, numbers.Number)):
        parts = () if isinstance(value, numbers.Number) else cast("Sequence[object]", value)
        has_arrays = any(isinstance(item, OnDevice) for item in parts)
        one_of_all = "one array of its arrays: await ta.arrays.stack(value)"
        return f"; make {one_of_all if has_arrays else 'it one: np.asarray(value)'}"
    return ""


def for_blocking_code(text: str) -> str:
    """Return an error's text, with other advice than `await` where a program cannot write it.

    These are code outside of a Trio run, and functions that get gradients.
    """
    if "await " in text and IS_DERIVED.get():
        if "write await " in text:
            return text.replace("write await ", "write ")
        return (
            f"{text.partition('; ')[0]}; leave it out, because a function that gets gradients awaits nothing"
        )
    if "await " not in text or "b.get(" in text or trio.lowlevel.in_trio_run():
        return text
    return f"{text}; in blocking code use b.get(...) or b.wait(...) in place of await"


def refuse_dtypes(name: str, dtypes: Mapping[str, DType], hosts: Collection[str]) -> NoReturn:
    """Refuse operands with different dtypes, with advice on their conversion.

    Args:
        name: The operation.
        dtypes: The dtypes by argument.
        hosts: The arguments that are NumPy arrays.

    Raises:
        TypeError: Always.
    """
    # An array on the device stays unchanged, unless a conversion to its dtype would lose information.
    best = max(
        dtypes,
        key=lambda argument: (
            dtypes[argument].kind == "complex",
            dtypes[argument].is_inexact,
            argument not in hosts,
        ),
    )
    mismatched = [argument for argument in dtypes if dtypes[argument] is not dtypes[best]]
    verbs = [
        f"{argument}.astype" if argument in hosts else f"await {argument}.cast" for argument in mismatched
    ]
    conversions = [f"{verb}('{dtypes[best]}')" for verb in verbs]
    got = ", ".join(f"{argument} {dtype}" for argument, dtype in dtypes.items())
    raise TypeError(f"{name}: operands must share a dtype, got {got}; write {' and '.join(conversions)}")


class OnDevice(Silenced):
    """The base of array placeholders on a device, because Python cannot read their elements.

    Attributes:
        noun: The name in errors.
        first: The expression before ``.to_host()`` in advice.
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
        raise TypeError(for_blocking_code(text))

    def refuse_numpy(self, package: str, name: str) -> NoReturn:
        """Refuse a NumPy function, and name the function that computes on the device; see `counterpart`."""
        path = ".".join(filter(None, ("np", package, name)))
        self.refuse(f"{path} of {self.noun}: {counterpart(package, name, self.first)}")

    def __dir__(self) -> list[str]:
        """Return the names for programs, without those that only this package uses."""
        names = set(super().__dir__()) - _INTERNAL
        return sorted(name for name in names if name[0] != "_" or name.endswith("__"))

    if TYPE_CHECKING:  # `_REFUSED` defines them

        def __bool__(self) -> bool: ...
        def __iter__(self) -> NoReturn: ...
    else:  # so that type checkers report their use
        # With `__array__`, a type checker would accept the object as an operand of NumPy's operators.

        def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Any:
            if function.__name__ in _OF_LAYOUT and len(args) == 1 and not kwargs:
                return getattr(self, function.__name__)
            silence(*args)
            return self.refuse_numpy(function.__module__.partition(".")[2], function.__name__)

        def __format__(self, spec: str) -> str:
            if spec:
                hint = f"it is on the device; use await {self.first}.item()"
                self.refuse(f"format {spec!r} of {self.noun}: {hint}")
            return str(self)

        def __getattr__(self, name: str) -> NoReturn:
            # Libraries probe private names, and work without them.
            hint = ""
            if not name.startswith("_"):
                self.silence()
                hint = instead_of_attribute(name)
            message = for_blocking_code(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
            raise AttributeError(message, name=name, obj=self)


_ASSIGNED = (
    "{noun} is not assigned to, because an operation on a device is awaited; "
    "await {first}[index].assign(value) writes an array or a number into a part, and "
    "{first}.at[index].set(value) into a copy"
)
_DIVIDED = "divmod() of {noun}: write await ta.gather(x1 // x2, x1 % x2)"
_ENTERED = "{noun} is not a context manager; async with ref.lease() holds the array of a ref"
_ITERATED = "{noun} is not iterable: its elements are on the device; use await {first}.to_host()"
_REFUSED = {
    "array": "{noun} is not a host array; use await {first}.to_host(), or in blocking code b.get({first})",
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
"""The texts of errors by special method."""


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(self: OnDevice, *args: object, **_: object) -> NoReturn:
        silence(*args)
        self.refuse(text.format(noun=self.noun, first=self.first))

    return refuse


for _special, _text in _REFUSED.items():
    setattr(OnDevice, f"__{_special}__", _refusing(_text))


def integer(name: str, argument: str, value: object, allowed: str = "an integer") -> int:
    """Return an integer of any size, from Python or NumPy; see `bounded_integer`."""
    # Nearly all values are ints, and Python 3.11 takes tens of microseconds to check a protocol.
    if type(value) is int:
        return value
    try:
        # NumPy arrays have an index only if they contain a single integer.
        return operator.index(cast("SupportsIndex", None if isinstance(value, bool) else value))
    except TypeError:
        raise TypeError(f"{name}: {argument} must be {allowed}, got {shown(value)}") from None


def clamped(name: str, argument: str, value: object) -> int:
    """Return an integer, such as an offset, clamped to 64 bits; see `bounded_integer`."""
    return max(_MIN_SSIZE, min(integer(name, argument, value), sys.maxsize))


def bounded_integer(name: str, argument: str, value: object, allowed: str = "an integer") -> int:
    """Return an integer, from Python or NumPy, that fits into 64 signed bits.

    Args:
        name: The name of the operation.
        argument: The name of the argument.
        value: The number.
        allowed: The required kind of number, for the error.

    Raises:
        TypeError: It is not an integer.
        ValueError: It does not fit.
    """
    value = integer(name, argument, value, allowed)
    if not _MIN_SSIZE <= value <= sys.maxsize:
        # Python refuses to print numbers of thousands of digits.
        bits = value.bit_length()
        raise ValueError(f"{name}: {argument} must be from -2**63 to 2**63 - 1, got a number of {bits} bits")
    return value


def is_several(value: object) -> bool:
    """Return whether a value is a sequence or an array with axes, and not a single element."""
    is_text = isinstance(value, (str, bytes))
    return (isinstance(value, Sequence) and not is_text) or (isinstance(value, np.ndarray) and value.ndim > 0)


def bounded_integers(
    name: str,
    argument: str,
    value: object,
    allowed: str = "an integer",
    take: Callable[..., int] = bounded_integer,
) -> Ints:
    """Return integers, from a sequence or a single integer; `take` converts each. See `bounded_integer`.

    Raises:
        TypeError: It is neither.
        ValueError: An integer does not fit.
    """
    values: Any = value if is_several(value) else (value,)
    return tuple([take(name, argument, item, allowed) for item in values])


def real(name: str, argument: str, value: Any) -> Any:
    """Return a real number, from Python or NumPy; a bool is refused.

    Raises:
        TypeError: It is not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} must be a real number, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """Show a value for an error, in one line."""
    silence(value)
    untyped: Any = value
    if isinstance(value, np.ndarray) and untyped.ndim:
        return f"an array of {untyped.dtype} and of shape {untyped.shape}"
    if isinstance(value, int) and value.bit_length() > 64:
        # Python refuses to print numbers of thousands of digits.
        return f"a number of {value.bit_length()} bits"
    try:
        text = value.__name__ if isinstance(value, type) else repr(untyped)
    except ValueError:
        # A sequence may contain such a number.
        return f"an object of {type(untyped).__name__}"
    return text if len(text) <= 100 and " at 0x" not in text else f"an object of {type(untyped).__name__}"


def said(operation: str, error: Exception) -> Exception:
    """Copy a NumPy error with its place; `ValueError` for a number that does not fit NumPy's types."""
    kind = ValueError if isinstance(error, OverflowError) else type(error)
    return kind(f"{operation}: {error}")
