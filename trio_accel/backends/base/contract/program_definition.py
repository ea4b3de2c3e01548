"""Definitions of programs, as text that another process reads; and the trees of their arguments.

A tree is nested dicts, lists and tuples of arrays and plain values, as text and a list of the arrays.
"""

from __future__ import annotations

import base64
import json
import marshal
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ....actors import Backoff, Intensity
from .ops import ArraySpec

Tree: TypeAlias = Any
"""Plain values stand for themselves; a list begins with a tag that names its kind."""

_PLAIN = frozenset({type(None), bool, int, float, str})
_MOST_DEPTH = 32
_ARRAY, _LIST, _TUPLE, _DICT, _COMPLEX, _BYTES, _PACKED = "altdcbp"
_SEQUENCES = {list: _LIST, tuple: _TUPLE}
# The exact types that `marshal` writes and reads as they are.
_VALUES = _PLAIN | {complex, bytes}
_NESTED = frozenset({list, tuple, dict})
# Walking over this number of values takes no longer than checking them.
_SCANNED_LENGTH = 16


def flatten(
    label: str,
    value: object,
    leaf: Callable[[str, Any], int | None],
    packed: list[object] | None = None,
    *,
    depth: int = 0,
) -> Tree:
    """Make a tree of a value.

    Args:
        label: Its name in errors, such as ``"encode: batch['ids']"``.
        value: None, numbers, strings, bytes; arrays; mappings with keys of strings, which become dicts, lists
            and tuples of these.
        leaf: Called with place and value for arrays and all other types; returns the number of the array, or
            None if it is not an array.
        packed: Gets collections with many values and no arrays, because C can walk over these. None to put
            all values into the tree.
        depth: Its depth of nesting; -1 to pack its values one by one.

    Raises:
        TypeError: It holds something else.
        ValueError: It is nested too deeply.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > _MOST_DEPTH:
        raise ValueError(f"{label[:200]}: nested more than {_MOST_DEPTH} deep")
    if packed is not None and depth >= 0 and kind in _NESTED and _is_packed(label, value):
        packed.append(value)
        return [_PACKED, len(packed) - 1]
    if kind in _SEQUENCES:
        items = enumerate(cast("Sequence[object]", value))
        nested = [flatten(f"{label}[{index}]", item, leaf, packed, depth=depth + 1) for index, item in items]
        return [_SEQUENCES[cast("type[list[object]]", kind)], *nested]
    if isinstance(value, Mapping):
        return [_DICT, *_items(label, cast("Mapping[object, object]", value), leaf, packed, depth)]
    number = leaf(label, value)
    return _tagged(label, value) if number is None else [_ARRAY, number]


def _is_packed(label: str, value: Any) -> bool:
    """Return whether a collection has many values, all of which `marshal` writes.

    The walk has no Python step for each value.

    Raises:
        ValueError: There are more values than any call takes.
    """
    level, count = [value], 0
    for _ in range(_MOST_DEPTH):
        kinds = frozenset(map(type, level))
        if kinds <= _VALUES:
            return count > _SCANNED_LENGTH
        if not kinds <= _VALUES | _NESTED:
            return False
        if dict in kinds:
            dicts: list[dict[Any, Any]] = [item for item in level if type(item) is dict]
            if not {str}.issuperset(map(type, chain.from_iterable(dicts))):
                return False
            level = [item for item in level if type(item) is not dict] + [item.values() for item in dicts]
            kinds = frozenset(map(type, level))
        if kinds & _VALUES:
            level = [item for item in level if type(item) not in _VALUES]
        count += sum(map(len, level))
        if count > MOST_PACKED:
            problem = f"more than {MOST_PACKED} values; hand large values over as arrays"
            raise ValueError(f"{label[:200]}: {problem}")
        level = list(chain.from_iterable(level))
    return False


def _tagged(label: str, value: object) -> Tree:
    """Return the tree of a plain value that JSON does not have."""
    if isinstance(value, (complex, np.complexfloating)):
        number = complex(cast("complex", value))
        return [_COMPLEX, number.real, number.imag]
    if isinstance(value, (bytes, bytearray)):
        return [_BYTES, base64.b64encode(value).decode()]
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return cast("Any", value).item()
    raise TypeError(
        f"{label} must be an array, None, a number, a string, bytes, or a dict, list or tuple of these, "
        f"got {type(value).__name__}" + ("; write `await` before it" if hasattr(value, "__await__") else "")
    )


def _items(
    label: str,
    value: Mapping[object, object],
    leaf: Callable[[str, Any], int | None],
    packed: list[object] | None,
    depth: int,
) -> list[Tree]:
    items: list[Tree] = []
    for key, item in value.items():
        if type(key) is not str:
            raise TypeError(f"{label}: the keys of a dict must be strings, got {key!r}")
        items.append([key, flatten(f"{label}[{key!r}]", item, leaf, packed, depth=depth + 1)])
    return items


def build(tree: Tree, arrays: Sequence[object], packed: Sequence[object] = ()) -> Any:
    """Make the value of a tree.

    Args:
        tree: From `flatten`.
        arrays: The arrays by their numbers.
        packed: The packed collections, likewise.
    """
    if type(tree) is not list:
        return tree
    tag, *items = cast("Sequence[Any]", tree)
    if tag in (_ARRAY, _PACKED):
        return (arrays if tag == _ARRAY else packed)[items[0]]
    if tag == _DICT:
        return {key: item if type(item) is not list else build(item, arrays, packed) for key, item in items}
    if tag == _COMPLEX:
        return complex(*items)
    if tag == _BYTES:
        return base64.b64decode(items[0])
    # Most are plain values, for which a call each would take most of the time.
    values = [item if type(item) is not list else build(item, arrays, packed) for item in items]
    return values if tag == _LIST else tuple(values)


def text_of(tree: Tree) -> str:
    """Return a tree as text; NaN and infinities too."""
    return _encode(tree)


def tree_of(text: str) -> Tree:
    """Return the tree of `text_of`; nothing of it is to be changed, as calls with the same text share it."""
    return _cached_loads(text) if len(text) <= _MOST_KNOWN else json.loads(text)


def packed_of(values: list[object]) -> bytes:
    """Return packed values as bytes: an application writes them, and a worker reads them."""
    # The older version keeps no track of objects in several places, and writes each again.
    return marshal.dumps(values, 2) if values else b""


def values_of(packed: bytes) -> list[object]:
    """Return the values of `packed_of`; other ones at each call."""
    return cast("list[object]", marshal.loads(packed)) if packed else []  # noqa: S302  # of the application


# Longer ones are not kept to be read once only.
_MOST_KNOWN = 1 << 12
_cached_loads = lru_cache(1024)(json.loads)
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


MOST_TEXT = 1 << 20
"""The most characters of a definition, and of the arguments of a call."""

MOST_PACKED = 1 << 23
"""The most bytes, and values, of packed arguments of a call."""


@attrs.frozen(kw_only=True)
class ProgramDefinition:
    """Definition of a program.

    Attributes:
        name: Its name in the tree.
        number: Distinguishes successive programs of the same name.
        target: Import path of its class or function, ``"package.module:Class"``.
        arguments: Tree of the constructor's arguments: a tuple and a dict. None for a function.
        arrays: The arrays among them.
        updated: Numbers of the arrays that a method may change.
        intensity: The number of restarts allowed; None for the device's.
        backoff: Waiting before a restart; None for the device's.
        refuses_all: Whether each error of a call only concerns its caller, and restarts nothing.
    """

    name: str
    number: int
    target: str
    arguments: Tree
    arrays: tuple[ArraySpec, ...]
    updated: frozenset[int]
    intensity: Intensity | None
    backoff: Backoff | None
    refuses_all: bool = False

    def encode(self) -> str:
        """Encode it as a text: its name, a space, and the rest.

        Raises:
            ValueError: It is too long.
        """
        text = text_of(self.arguments)
        if len(text) > MOST_TEXT:
            raise ValueError(
                f"program {self.name!r}: its arguments are {len(text)} characters as text, at most "
                f"{MOST_TEXT} are allowed; hand large values over as arrays"
            )
        rest = pickle.dumps(attrs.evolve(self, arguments=None), protocol=5)
        return f"{self.name} {base64.b85encode(rest).decode('ascii')} {text}"

    @classmethod
    def decode(cls, text: str) -> ProgramDefinition:
        """Read what `encode` made."""
        _, rest, arguments = text.split(" ", 2)
        definition: ProgramDefinition = pickle.loads(base64.b85decode(rest))  # noqa: S301  # the application's own
        return attrs.evolve(definition, arguments=tree_of(arguments))
