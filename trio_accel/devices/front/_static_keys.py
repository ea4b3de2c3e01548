"""Keys for objects of the program in the structure of a step.

Equality is too coarse for a key: 0.0 equals -0.0, 1 equals True and 1.0, and two objects with such fields are
equal. A step that is traced for the first must not serve the second. Equality is also too fine, because NaN
does not equal itself. So the key of an object consists of its state, as `copy` and `pickle` see it, down to
the types and bits of its numbers. An object without equality of its own is its own key, and so is an object
that does not reveal its state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from struct import pack
from typing import Any, cast

import attrs
import numpy as np

_PLAIN = frozenset({bool, int, str, bytes, type(...)})
_IN_ORDER = frozenset({tuple, list})
_SETS = frozenset({set, frozenset})


class _Same:
    """An unhashable object, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, same: object) -> bool:
        return isinstance(same, _Same) and self.value is same.value

    def __hash__(self) -> int:
        return id(self.value)


def static_key(value: Any, _path: tuple[int, ...] = ()) -> tuple[object, ...]:
    """Return a hashable key of an object that it shares only with objects of the same types and bits.

    Args:
        value: The object.
        _path: The ids of the objects that contain it.
    """
    instance: object = value
    kind = type(instance)
    bits = _bits(kind, value)
    if bits is not None:
        return kind, bits
    if id(value) in _path:
        return kind, "outer", _path.index(id(value))
    path = (*_path, id(value))
    if kind in _SETS:
        return kind, frozenset([static_key(item, path) for item in value])
    if kind in _IN_ORDER:
        parts: Iterable[Any] = value
    elif kind is dict:
        parts = [part for item in value.items() for part in item]
    else:
        try:
            parts = list(_state(value))
        except Exception:  # noqa: BLE001  # of the program's own methods; equality remains
            return kind, _hashable(value)
    return kind, *[static_key(part, path) for part in parts]


def _bits(kind: type[Any], value: Any) -> object:
    """Return the bits of a value without parts, or an object that only it equals; None for other objects."""
    if kind is float:
        return pack("=d", value)
    if kind is complex:
        return pack("=2d", value.real, value.imag)
    if issubclass(kind, np.generic) or (kind is np.ndarray and not value.dtype.hasobject):
        return value.dtype, value.shape, value.tobytes()
    if value is None:
        return False
    is_itself = kind in _PLAIN or cast("Any", kind).__eq__ is object.__eq__ or isinstance(value, type)
    return value if is_itself else None


def _state(value: object) -> Iterator[Any]:
    """Yield the parts of an object, without the fields that its class excludes from equality.

    Raises:
        Exception: The object does not reveal its state.
    """
    kind = type(value)
    compared: dict[str, bool] = {}
    if dataclasses.is_dataclass(kind):
        compared = {field.name: field.compare for field in dataclasses.fields(kind)}
    elif attrs.has(kind):
        compared = {field.name: bool(field.eq) for field in attrs.fields(kind)}
    if not compared:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            raise TypeError("it is global")
        function, args, *rest = reduced
        yield from (function, args)
        for part in rest:
            yield [*part] if isinstance(part, Iterator) else part
        return
    for name, is_compared in compared.items():
        if is_compared:
            yield from (name, getattr(value, name))
    for name, part in getattr(value, "__dict__", {}).items():
        if name not in compared:
            yield from (name, part)


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return value
