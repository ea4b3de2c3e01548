"""Errors of functions composed from other functions: with their own names, and never Python's own texts."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from numbers import Complex, Integral, Real
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import numpy as np
import numpy.typing as npt

from ..._names import export
from ...actors import bind_arguments
from ...backends.base import AccelError, NotSupportedError
from ...backends.base.contract.foreign_names import tells_of_missing
from ..base._refusals import shown, what_to_do
from ._calls import Call, called
from ._chain import ArrayFunction
from ._ref import AccelRef

_HEAD = re.compile(r"[a-z_]+(?:\.\w+){1,2}|Generator(?:\.\w+)?")
# The function that copies a host array to the device.
_PUT = re.compile(r"^(?:devices\.Put|put): host: ")
_PLAIN = (TypeError, ValueError, IndexError, np.exceptions.AxisError, np.linalg.LinAlgError)
# An AttributeError for a valid argument is a defect of this package.
_HEADLESS = (*_PLAIN, ArithmeticError, AttributeError, NotSupportedError)
_ARGUMENT = re.compile(r"[\w.]+: (\w\d?)(?=:| (?:must|has|have|is|holds) )")
_NUMBERS: dict[Any, type] = {int: Integral, float: Real, complex: Complex, inspect.Parameter.empty: object}
_BITS: dict[Any, int] = {Integral: 63, Real: 1023, Complex: 1023}
_ANNOTATION_NAMES = {
    "np": np,
    "npt": npt,
    "AccelRef": AccelRef,
    "Call": Call,
    "Any": Any,
    "Sequence": Sequence,
}
_NAME = re.compile(r"\b(?<!')[A-Za-z_]\w*")
_SEVERAL = (list, tuple, range, np.ndarray)
_WORDS = {
    NoneType: "None",
    bool: "True or False",
    Integral: "an integer",
    Real: "a real number",
    Complex: "a number",
    np.generic: "a number",
    str: "a text",
    np.ndarray: "a NumPy array",
    AccelRef: "an AccelRef",
}


class RangeError(ValueError, OverflowError):
    """A number that no dtype or float64 can hold. NumPy raises `OverflowError` for it."""


def export_operations(package: str, *, instead: str = "") -> None:
    """Export the names that a package of operations has imported, and make its errors helpful.

    Its functions make calls, and their errors carry the outer function's name. Declared operations and
    expressions do so themselves. The error for a missing name explains where that name is. Type checkers do
    not see the ``__getattr__`` set here, because with it they would accept any name.

    Args:
        package: Name of the package.
        instead: What to write if a program calls the package; see `export`.
    """
    export(package, instead=instead)
    module = sys.modules[package]
    _name(package.rpartition(".")[2], module, module.__all__)
    module.__dict__["__getattr__"] = tells_of_missing(package)


def named_methods(prefix: str, cls: type[Any]) -> None:
    """Do the same for the public methods of a class, with names that begin with a prefix."""
    for base in cls.__mro__[:-1]:
        _name(prefix, base, [name for name in vars(base) if name[0] != "_"])


def _name(prefix: str, owner: Any, names: Sequence[str]) -> None:
    for name in names:
        function: object = owner.__dict__[name]
        if isinstance(function, FunctionType) and not hasattr(function, "asked"):
            wrapper = _naming(f"{prefix}.{name}", function)
            if isinstance(owner, ModuleType):
                # The module that exports it, because a function is pickled by its module and name.
                wrapper.__module__ = owner.__name__
            setattr(owner, name, wrapper)


def _naming(name: str, function: Any) -> Any:
    def refuse(error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = bind_arguments(name, inspect.signature(function), args, dict(kwargs)).arguments
        refuse_as(name, function, error, arguments)

    if inspect.iscoroutinefunction(function):
        return wraps(function)(called(ArrayFunction(name, function, "awaitable", refuse=refuse)))

    viewed = ArrayFunction(name, function, "value")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if Call in map(type, args):
            # A view of an unfinished result is a step of the chain.
            step: Call[Any] = Call(viewed, args, kwargs or None)
            return step
        try:
            return function(*args, **kwargs)
        except Exception as error:
            refuse(error, args, kwargs)
            raise

    return call


def refuse_as(name: str, function: Any, error: Exception, arguments: Mapping[str, Any]) -> None:
    """Raise the error of a function's caller in place of an inner error, if the texts differ.

    Errors from elsewhere, such as from a callback, are not changed.

    Args:
        name: The function's name, with its package.
        function: The function, for its signature.
        error: The inner error.
        arguments: The arguments by name.

    Raises:
        Exception: An error of the same type, or `TypeError` or `ValueError` in place of one from Python or
            NumPy itself.
    """
    signature = inspect.signature(function)
    said = error.message if isinstance(error, AccelError) else str(error)
    text = _named_text(name, said, signature, arguments)
    if not text and isinstance(error, _HEADLESS):
        _check_kinds(name, function, signature, arguments)
        if isinstance(error, OverflowError):
            huge = [argument for argument, value in arguments.items() if _is_huge(value)]
            said = " and ".join(huge) + " must have numbers that float64 holds" if huge else said
        if not any(map(callable, arguments.values())):
            text = f"{name}: {said}"
    if isinstance(error, AccelError):
        error.message = text or said
    elif text not in ("", said):
        if type(error) in _PLAIN:
            raise type(error)(text) from None
        # Python's own arithmetic errors, and NumPy's error classes with special constructors.
        for error_class, of in (
            (RangeError, OverflowError),
            (ValueError, ArithmeticError),
            (TypeError, TypeError),
        ):
            if isinstance(error, of):
                raise error_class(text) from None


def _is_huge(value: object) -> bool:
    """Return whether a value contains an integer too large for float64."""
    contents: Any = value
    if isinstance(value, int):
        return value.bit_length() > _BITS[Real]
    if isinstance(value, np.ndarray):
        contents = contents.ravel().tolist() if contents.dtype == object else []
    return isinstance(contents, (list, tuple)) and any(map(_is_huge, cast("list[object]", contents)))


def _named_text(name: str, said: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    """Rewrite an error's text with the names of the function and its arguments; empty if it is unrelated."""
    head, colon, rest = _PUT.sub("", said).partition(": ")
    parameters = signature.parameters
    if colon and (_HEAD.fullmatch(head) or head == name.partition(".")[2]):
        # The name is an inner function's, or the class of the function's own message.
        text = f"{name}: {rest}"
    elif head.partition(" ")[0].partition("[")[0].rstrip(":") in parameters:
        text = f"{name}: {said}"
    elif head == "dtype":
        matches = [
            argument
            for argument, value in arguments.items()
            if str(getattr(value, "dtype", "")) == rest.split()[0]
        ]
        text = ": ".join([name, *matches[:1], head, rest])
    else:
        return ""
    # A pair has both names: `c_and_lower`.
    notes = {
        parameter.name.partition("_and_")[0]: str(parameter.annotation) for parameter in parameters.values()
    }
    arrays = [
        argument for argument, note in notes.items() if note in ("Operand", "AccelRef") or "tuple[Op" in note
    ]
    arrays = arrays or [argument for argument, note in notes.items() if note == "Operand | None"]
    is_first = len(arrays) == 1 or not parameters.keys() >= {*arrays[:1]}
    inner = _ARGUMENT.match(text)
    if inner and inner[1] not in notes and (is_first or f"{inner[1]}1" in parameters):
        # An argument of the inner function.
        outer_name = arrays[0] if is_first else f"{inner[1]}1"
        text = re.sub(rf"(?<=: ){inner[1]}\b|(?<=await ){inner[1]}(?=\.)", outer_name, text)
    for parameter_name in parameters:
        # The inputs of an expression, for a sequence of arrays.
        text = re.sub(rf"\b{parameter_name.removesuffix('s')}s?_(\d+)\b", rf"{parameter_name}[\1]", text)
    return text


def _check_kinds(
    name: str, function: Any, signature: inspect.Signature, arguments: Mapping[str, Any]
) -> None:
    """Refuse the first argument that does not fit the function's annotation."""
    for argument, value in arguments.items():
        parameter = signature.parameters[argument]
        kind = _Kind(parameter.annotation, vars(sys.modules[function.__module__]))
        for item in value if parameter.kind is parameter.VAR_POSITIONAL else (value,):
            if not kind.fits(item):
                expected = kind.describe()
                advice = what_to_do(item, is_array="AccelRef" in expected)
                raise TypeError(f"{name}: {argument} must be {expected}, got {shown(item)}{advice}") from None


class _Kind:
    """The values that an annotation allows.

    Args:
        note: The annotation, its text, or the text of an alias.
        space: The globals of its module. Names that exist only for type checkers allow everything.
    """

    def __init__(self, note: Any, space: dict[str, Any]) -> None:
        note = getattr(note, "__forward_arg__", note)
        while isinstance(note, str):
            # An alias may also be a text.
            text = _NAME.sub(
                lambda match: alias if type(alias := space.get(match[0])) is str else match[0], note
            )
            try:
                note = text if text != note else eval(note, {**_ANNOTATION_NAMES, **space})  # noqa: S307  # of ours
            except NameError:
                note = object
        origin = get_origin(note)
        # NumPy's `NDArray` is a type alias of Python 3.12's form.
        while hasattr(origin or note, "__value__"):
            note = (origin or note).__value__
            origin = get_origin(note)
        cls = object if note is Any or getattr(note, "_is_protocol", False) else origin or note
        self._cls: Any = _NUMBERS.get(note, NoneType if note is None else cls)
        self._choices = get_args(note) if origin is Literal else ()
        self._is_any = origin in (Union, UnionType)
        self._is_several = origin in (tuple, Sequence)
        parts = get_args(note) if self._is_any or self._is_several else ()
        # A call was already awaited.
        self._members = [
            _Kind(part, space) for part in parts if part is not ... and get_origin(part) is not Call
        ]

    def fits(self, value: object) -> bool:
        """Return whether a value is allowed."""
        if self._is_any:
            return any(member.fits(value) for member in self._members)
        if self._choices:
            return any(isinstance(value, type(choice)) and value == choice for choice in self._choices)
        if self._is_several:
            if not getattr(value, "ndim", 1) or not isinstance(value, _SEVERAL):
                return False
            # A few members suffice, because there may be millions.
            several: list[Any] = [*value[:64]]
            kinds = self._members * (len(several) if len(self._members) == 1 else 1)
            return len(kinds) == len(several) and all(map(_Kind.fits, kinds, several))
        if isinstance(value, int) and self._cls in _BITS:
            return value.bit_length() <= _BITS[self._cls] and not (self._cls is Integral and value is True)
        return not isinstance(self._cls, type) or isinstance(value, self._cls)

    def describe(self, *, is_plural: bool = False) -> str:
        """Describe the allowed values."""
        if self._choices:
            descriptions = list(map(repr, self._choices))
        elif self._is_several:
            descriptions = [member.describe(is_plural=len(self._members) == 1) for member in self._members]
            return f"a sequence of {' and '.join(dict.fromkeys(descriptions))}"
        elif self._is_any:
            descriptions = [member.describe(is_plural=is_plural) for member in self._members]
        else:
            word = _WORDS.get(self._cls, f"a {self._cls.__name__}")
            descriptions = [word.removeprefix("an ").removeprefix("a ") + "s" if is_plural else word]
        return " or ".join(", ".join(dict.fromkeys(descriptions)).rsplit(", ", 1))
