"""Refusals of synchronous use: operations on a device are awaited; the errors name the way."""

from __future__ import annotations

import inspect
import numbers
import operator
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np

from ...backends.base import DType
from ...backends.base.contract.foreign_names import instead_of

P = ParamSpec("P")
T = TypeVar("T")
_Opens: TypeAlias = Callable[P, AbstractAsyncContextManager[T, bool | None]]

_AWAITED = "; it was not awaited: write `await` before the call that makes it"

_TO_HOST = "await ref.to_host() gives a NumPy array"
_INSTEAD = {
    "@": "use await linalg.matmul(a, b)",
    "+": f"await linalg.axpy(1.0, x, y) adds x to y in place, and {_TO_HOST}",
    "-": f"await linalg.axpy(-1.0, x, y) subtracts x from y in place, and {_TO_HOST}",
    "*": f"await linalg.scal(alpha, x) multiplies by a number in place, and {_TO_HOST}",
    "/": f"await linalg.scal(1 / alpha, x) divides by a number in place, and {_TO_HOST}",
}
_COMPARED = (
    "compare what is on the host, np.array_equal(await a.to_host(), await b.to_host()); `a is b` asks "
    "whether two references are one"
)

# Names of special methods; those of two operands have one with an `r` in front.
_OF_TWO = {
    "matmul": "@",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "divmod": "divmod",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_OF_ONE = {"neg": "-", "pos": "+", "abs": "abs", "invert": "~"}
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_NUMBERS = ("float", "int", "complex", "round")
_ELEMENTS = (np.ndarray, np.generic, numbers.Number, list, tuple)
_LEAST = -sys.maxsize - 1
_UFUNCS = {"matmul": "@", "add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


class NotAwaited:
    """Base of objects that stand for a later result. Errors of their wrong use tell the right one.

    Attributes:
        what_to_do: The right use.
    """

    __slots__ = ()
    what_to_do: str

    if not TYPE_CHECKING:  # a type checker finds it without, and would find every attribute with it

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {self.what_to_do}"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError(f"a plain `with` does not do; {self.what_to_do}")

        # Python looks for it before it enters.
        __exit__ = __enter__


class Opening(NotAwaited):
    """A context manager that is there for ``async with`` alone."""

    def __init__(self, manager: AbstractAsyncContextManager[Any, bool | None], what_to_do: str) -> None:
        self._manager = manager
        self.what_to_do = what_to_do

    def __aenter__(self) -> Any:
        return self._manager.__aenter__()

    def __aexit__(self, *error: Any) -> Any:
        return self._manager.__aexit__(*error)

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise TypeError(self.what_to_do)


def opens(text: str) -> Callable[[Callable[P, AsyncGenerator[T]]], _Opens[P, T]]:
    """Make a context manager of an async generator, as `asynccontextmanager` does; wrong use says what to do.

    Args:
        text: What that is.
    """

    def decorate(function: Callable[P, AsyncGenerator[T]]) -> _Opens[P, T]:
        manager: Any = asynccontextmanager(function)
        made = wraps(function)(lambda *args, **kwargs: Opening(manager(*args, **kwargs), text))
        return cast("_Opens[P, T]", made)

    return decorate


def what_to_do(value: object, *, is_array: bool = True) -> str:
    """Return the advice for an object that is not what it must be, such as an array; empty without one."""
    if inspect.iscoroutine(value):
        return _AWAITED
    if isinstance(value, NotAwaited):
        return f"; {value.what_to_do}"
    if isinstance(value, (type, FunctionType)):
        is_class = isinstance(value, type)
        told = "it is a class: make a message of it:" if is_class else "call it by itself: await"
        return f"; {told} {value.__name__}(...)"
    if is_array and isinstance(value, np.ndarray):
        return "; copy it to the device first: await device.put(array)"
    if is_array and isinstance(value, (list, tuple, numbers.Number)):
        return "; make it one: np.asarray(value)"
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
    raise TypeError(f"{name}: operands must have one dtype, got {got}; write {' and '.join(told)}")


class NoOperators:
    """Base of references to arrays: Python's operators cannot be awaited, so each is refused.

    Equality, too: it would have to be that of the elements, and an answer that looks at the references alone
    would be taken for it. It is refused with anything that has elements, or is one; all else is unequal.
    The hash is that of the object, and containers look for the object itself first. So references may be
    members of sets and keys of dictionaries; ``ref in [a, b]`` is refused where it is not the first.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker reports the operators where there is none of these

        def __eq__(self, other: object) -> bool:
            if self is other:
                return True
            if isinstance(other, (NoOperators, *_ELEMENTS)):
                raise _refused("==", self, other, _COMPARED)
            return NotImplemented

        def __ne__(self, other: object) -> bool:
            if isinstance(other, (NoOperators, *_ELEMENTS)) and self is not other:
                raise _refused("!=", self, other, _COMPARED)
            return False if self is other else NotImplemented

        def __format__(self, given: str) -> str:
            if given:
                raise TypeError(f"format {given!r} of an AccelRef: it is on the device; use await ref.item()")
            return str(self)

        __hash__ = object.__hash__

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}{instead_of(name)}"
            raise AttributeError(message, name=name, obj=self)

        def __array_ufunc__(
            self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object
        ) -> NoReturn:
            symbol = _UFUNCS.get(ufunc.__name__) if method == "__call__" else None
            raise TypeError(
                f"np.{ufunc.__name__}: NumPy does not compute with an AccelRef, whose elements are on the "
                f"device; {_INSTEAD.get(symbol, _TO_HOST)}"
            )

        def __setitem__(self, index: object, value: object) -> NoReturn:
            raise TypeError(
                "an AccelRef is not assigned to, because an operation on a device is awaited; "
                "await ref[index].assign(value) writes an array or a number into a part"
            )

        def __contains__(self, value: object) -> NoReturn:
            raise TypeError(f"an AccelRef is not searched: its elements are on the device; {_TO_HOST}")


def _refused(symbol: str, left: object, right: object, instead: str) -> TypeError:
    hint = _AWAITED if inspect.iscoroutine(left) or inspect.iscoroutine(right) else ""
    return TypeError(
        f"{type(left).__name__} {symbol} {type(right).__name__}: an AccelRef has no operators, because an "
        f"operation on a device is awaited; {instead}{hint}"
    )


def _add_operators() -> None:
    """Give the class the methods that differ by a name alone."""

    def of_two(symbol: str, *, is_reflected: bool = False) -> Any:
        def refuse(self: object, other: object, *modulus: object) -> NoReturn:
            left, right = (other, self) if is_reflected else (self, other)
            raise _refused(symbol, left, right, _INSTEAD.get(symbol, _TO_HOST))

        return refuse

    def of_one(symbol: str) -> Any:
        def refuse(self: object) -> NoReturn:
            instead = "await linalg.scal(-1.0, x) does that in place" if symbol == "-" else _TO_HOST
            raise TypeError(
                f"{symbol} AccelRef: an AccelRef has no operators, because an operation on a device is "
                f"awaited; {instead}"
            )

        return refuse

    def number(kind: str) -> Any:
        def refuse(self: object, *digits: object) -> NoReturn:
            raise TypeError(
                f"{kind}() of an AccelRef: its element is on the device; use {kind}(await ref.item())"
            )

        return refuse

    methods: dict[str, Any] = {f"__{name}__": of_two(symbol) for name, symbol in (_OF_TWO | _ORDER).items()}
    methods |= {f"__r{name}__": of_two(symbol, is_reflected=True) for name, symbol in _OF_TWO.items()}
    methods |= {f"__{name}__": of_one(symbol) for name, symbol in _OF_ONE.items()}
    methods |= {f"__{name}__": number(name) for name in _NUMBERS}
    for name, method in methods.items():
        setattr(NoOperators, name, method)


_add_operators()


def whole(name: str, argument: str, value: object, allowed: str = "a whole number") -> int:
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
    # Nearly all are, and Python 3.11 takes tens of microseconds to look at a protocol.
    if type(value) is not int:
        try:
            # Arrays of NumPy have an index only where they are one whole number.
            value = operator.index(cast("SupportsIndex", None if isinstance(value, bool) else value))
        except TypeError:
            raise TypeError(f"{name}: {argument} must be {allowed}, got {shown(value)}") from None
    if not _LEAST <= value <= sys.maxsize:
        # Python writes no number of thousands of digits.
        bits = value.bit_length()
        raise ValueError(f"{name}: {argument} must be from -2**63 to 2**63 - 1, got a number of {bits} bits")
    return value


def real(name: str, argument: str, value: Any) -> Any:
    """Take a real number, of Python or NumPy; a truth value is none.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} must be a real number, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """Show a value that was given, in one line."""
    given: Any = value
    if isinstance(value, np.ndarray) and given.ndim:
        return f"an array of {given.dtype} and of shape {given.shape}"
    if isinstance(value, int) and value.bit_length() > 64:
        # Python writes no number of thousands of digits.
        return f"a number of {value.bit_length()} bits"
    text = value.__name__ if isinstance(value, type) else repr(given)
    return text if len(text) <= 100 and " at 0x" not in text else f"an object of {type(given).__name__}"


def said(where: str, error: Exception) -> Exception:
    """Make an error of NumPy again that says where; `ValueError` of a number that it has no type for."""
    kind = ValueError if isinstance(error, OverflowError) else type(error)
    return kind(f"{where}: {error}")
