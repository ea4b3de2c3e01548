"""Checks of values against annotations at run time, and the words for annotations in error messages.

Type checkers use the annotations of options and arguments statically. `_options` uses them at run time, so
that a wrong value is refused where it is passed and not where it is used.
"""

from __future__ import annotations

import collections.abc
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

_CALLABLE: Any = collections.abc.Callable
_NAMES: Mapping[object, str] = {
    None: "None",
    type(None): "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    _CALLABLE: "a function",
    collections.abc.Mapping: "a mapping",
    os.PathLike: "a path",
}


def as_plain(value: Any) -> Any:
    """Return a NumPy scalar or 0-d array as a Python value, and any other value unchanged."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_scalar and hasattr(value, "item") else value


def fits(hint: Any, value: object) -> bool:
    """Return whether a value, including its elements, has an annotation's type.

    A boolean is not a number, an integer is a float, and a string is not a sequence. A protocol accepts an
    instance with all of its public members and its `__call__`, and a type variable accepts every value.
    """
    inner = get_args(hint)
    origin: Any = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        return any(fits(member, value) for member in inner)
    if origin is Literal:
        return any(type(value) is type(literal) and value == literal for literal in inner)
    if origin in (Any, object, None, type(None)) or isinstance(origin, TypeVar):
        return origin not in (None, type(None)) or value is None
    if origin in (int, float):
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    if getattr(origin, "_is_protocol", False):
        names = cast("dict[str, object]", vars(origin))
        members = [name for name in names if name[0] != "_" or name == "__call__"]
        return not isinstance(value, type) and all(hasattr(value, name) for name in members)
    is_text = isinstance(value, (str, bytes)) and origin not in (str, bytes)
    return isinstance(value, origin) and not is_text and _elements_fit(origin, inner, value)


def _elements_fit(origin: Any, inner: tuple[Any, ...], value: Any) -> bool:
    if not inner or origin is _CALLABLE or not isinstance(value, collections.abc.Collection):
        return True
    if isinstance(value, collections.abc.Mapping):
        entries = cast("Iterable[tuple[object, object]]", value.items())
        return all(fits(inner[0], name) and fits(inner[1], item) for name, item in entries)
    elements = list(cast("Iterable[object]", value))
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(elements) == len(inner) and all(map(fits, inner, elements))
    return all(fits(inner[0], element) for element in elements)


def is_kind_of(hint: Any, value: object) -> bool:
    """Return whether a value has an annotation's class, regardless of its elements.

    If the annotation allows a number, a string or a literal, every value passes, because the caller checks
    these types together with the ranges.
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = [get_origin(member) or member for member in (get_args(hint) if is_union else (hint,))]
    return not {int, float, str, Literal}.isdisjoint(kinds) or any(fits(kind, value) for kind in kinds)


def described(hint: Any) -> str:
    """Describe an annotation for an error message, such as ``"'inline', 'process' or None"``."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(map(described, inner))
    if origin is Literal:
        return _either(map(repr, inner))
    if origin is tuple:
        # "an integer" becomes "integers".
        return f"a tuple of {described(inner[0]).partition(' ')[2]}s" if inner else "a tuple"
    name = getattr(origin, "__name__", str(origin))
    return _NAMES.get(origin, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _either(words: Iterable[str]) -> str:
    *first, last_word = words
    return f"{', '.join(first)} or {last_word}" if first else last_word


def types_of(declared: object) -> Mapping[str, Any]:
    """Return the evaluated annotations of a class's fields, or of a function's parameters.

    Raises:
        NameError: An annotation names something that its module does not define.
    """
    return typing.get_type_hints(declared)
