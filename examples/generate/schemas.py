"""Checks of JSON schemas from strangers: their cost, and whether a text that matches can end.

Compiling a schema may take exponential time in its size, because each combination of alternatives is another
schema if a text must match several schemas at once. So these combinations are counted first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from schema_rules import BOUNDS, fault_of, fault_of_bounds, fault_of_multiples, subschemas

__all__ = ["MAX_SCHEMA", "OPTIONS", "ConstraintError", "checked_schema", "count_joined"]

MAX_SCHEMA = 1 << 14
"""The maximum number of letters in a schema, or in all schemas of a request."""
# Forbid extra spaces, because a small model would write them for ever. Set all options, because a schema may
# set some of them.
OPTIONS: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
_MAX_DEPTH = 64
# The time to compile is exponential in the number of patterns for a text, quadratic in `patternProperties`,
# and 20 µs for each schema joined from others.
_MAX_PATTERNS, _MAX_PATTERN_PROPERTIES, _MAX_JOINED, _MAX_ALTERNATIVES = 6, 16, 1000, 3000
# An index in a JSON pointer with this number of digits or more is out of range.
_MAX_DIGITS = 6
_INDEX = re.compile(r"\+?[0-9]+")
# The parts of a schema to join with other schemas' parts.
_TEXTS = ("pattern", "format")
_OWN = (*_TEXTS, *BOUNDS, "properties", "patternProperties", "additionalProperties", "items", "prefixItems")
_Schema: TypeAlias = Mapping[str, Any]


class ConstraintError(Exception):
    """A schema cannot be used; the message gives the reason."""


def checked_schema(schema: _Schema) -> str:
    """Return a schema as JSON, with the options of `Grammars.json`.

    Raises:
        ConstraintError: The schema is too large or too deep, any text that matches is endless, or the
            compiler would enforce another schema.
    """
    try:
        whole = {**schema, "x-guidance": OPTIONS}
        source = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        source.encode()
    except RecursionError:
        raise ConstraintError(f"it is nested deeper than {_MAX_DEPTH}") from None
    except ValueError as error:
        raise ConstraintError(f"it is not JSON: {error!s:.100}") from None
    if len(source) > MAX_SCHEMA:
        raise ConstraintError(f"it must have at most {MAX_SCHEMA} letters, got {len(source)}")
    properties = 0
    for node, depth in _nodes(schema):
        properties += len(_fields(node.get("patternProperties")))
        if depth > _MAX_DEPTH:
            raise ConstraintError(f"it is nested deeper than {_MAX_DEPTH}")
    for node in subschemas(schema, _target):
        if fault := fault_of(node, schema):
            raise ConstraintError(fault)
    if properties > _MAX_PATTERN_PROPERTIES:
        what = f"it must have at most {_MAX_PATTERN_PROPERTIES} patternProperties, got {properties}"
        raise ConstraintError(what)
    if not _has_end(schema):
        raise ConstraintError("it never ends, because it requires itself")
    count_joined(schema)
    return source


def count_joined(schema: _Schema) -> int:
    """Count the schemas that result from joining others, as by `allOf` or next to `anyOf` and `$ref`.

    Raises:
        ConstraintError: There are too many, or one of them has too many patterns, or bounds that cannot be
            enforced together.
    """
    counter = _Joined(schema)
    counter.count_all()
    return counter.count


class _Joined:
    """A count of joined schemas. It follows the work of the compiler, without making the joined schemas.

    Attributes:
        count: The joined schemas so far.
    """

    def __init__(self, root: _Schema) -> None:
        self.count, self._root = 0, root
        # Schemas that a text must match at once, and whether they are parts of joined schemas.
        self._waiting = list[tuple[Sequence[Any], bool]]()
        self._seen = set[int]()
        self._has_multiples = "multipleOf" in json.dumps(root)
        self._alternatives = 0
        self._begin([[root]], is_joined=False)

    def count_all(self) -> None:
        """Count all joined schemas.

        Raises:
            ConstraintError: See `count_joined`.
        """
        while self._waiting:
            nodes, is_joined = self._waiting.pop()
            known = [_fields(node) for node in nodes if isinstance(node, dict)]
            if len(known) > 1:
                self._join(known)
            elif known and (is_joined or id(known[0]) not in self._seen):
                self._seen.add(id(known[0]))
                self._add(is_joined)
                self._follow(known[0], is_joined)

    def _begin(self, groups: Iterable[Sequence[Any]], is_joined: bool) -> None:
        """Continue with the schemas of other texts: of the whole, a field or an element."""
        for group in groups:
            self._waiting.append((group, is_joined))
            if self._has_multiples and (fault := fault_of_multiples(list(self._of_one_text(group)))):
                raise ConstraintError(fault)

    def _of_one_text(self, nodes: Sequence[Any]) -> Iterator[_Schema]:
        """Yield all schemas that describe the same text as the given ones, with all alternatives."""
        waiting, seen = list(nodes), set[int]()
        for value in waiting:
            self._alternatives += isinstance(value, dict)
            if self._alternatives > _MAX_ALTERNATIVES:
                what = f"it has multipleOf and more than {_MAX_ALTERNATIVES} alternatives or references"
                raise ConstraintError(f"{what}: leave multipleOf out")
            if not isinstance(value, dict) or id(node := _fields(value)) in seen:
                continue
            seen.add(id(node))
            yield node
            waiting += [_target(node.get("$ref"), self._root), *_listed(node.get("allOf"))]
            waiting += [*_listed(node.get("anyOf")), *_listed(node.get("oneOf"))]

    def _add(self, count: int) -> None:
        self.count += count
        if self.count > _MAX_JOINED:
            what = f"it makes more than {_MAX_JOINED} schemas by joining others with allOf, $ref, anyOf"
            raise ConstraintError(f"{what} or oneOf; write them as one schema")

    def _follow(self, node: _Schema, is_joined: bool) -> None:
        """Continue with the schemas in a schema, and join them if there are several for the same text."""
        own, choices, others = _own(node), _choices(node), _listed(node.get("allOf"))
        target = _target(node.get("$ref"), self._root)
        if bool(own) + (target is not None) + len(choices) + len(others) > 1:
            self._join([node])
            return
        self._begin(_grouped([own]), is_joined)
        self._waiting += [([one], is_joined) for one in (*others, *(choices[0] if choices else ()))]
        # A definition is compiled once.
        self._waiting.append(([target], False))

    def _join(self, nodes: Sequence[_Schema]) -> None:
        """Continue with joined schemas, one for each combination of alternatives."""
        parts, choices, joined = list[_Schema](), list[list[Any]](), list(nodes)
        for node in joined:
            self._add(1)
            parts += [own] if (own := _own(node)) else []
            choices += _choices(node)
            others = [_target(node.get("$ref"), self._root), *_listed(node.get("allOf"))]
            joined += [other for other in others if isinstance(other, dict)]
        if fault := fault_of_bounds(joined):
            raise ConstraintError(fault)
        patterns = sum(isinstance(part.get(name), str) for part in parts for name in _TEXTS)
        if patterns > _MAX_PATTERNS:
            what = f"it joins more than {_MAX_PATTERNS} patterns or formats with allOf, $ref, anyOf"
            raise ConstraintError(f"{what} or oneOf; write them as one pattern")
        if choices:
            self._add(prod(map(len, choices)))
            self._waiting += [([*parts, *chosen], True) for chosen in product(*choices)]
        else:
            self._begin(_grouped(parts), is_joined=True)


def _own(node: _Schema) -> _Schema:
    """Return the parts of a schema to join with other schemas' parts."""
    return {name: node[name] for name in _OWN if name in node}


def _choices(node: _Schema) -> list[list[Any]]:
    """Return a schema's lists of alternatives. A text must match an alternative from each list."""
    alike: list[Any] = [{}] * len(_listed(node.get("enum")))
    lists = (_listed(node.get("anyOf")), _listed(node.get("oneOf")), alike)
    return [found for found in lists if found]


def _grouped(parts: Sequence[_Schema]) -> Iterator[list[Any]]:
    """Yield the schemas of each field and element of joined schemas."""
    for key in ("properties", "patternProperties"):
        fields = [(_fields(part.get(key)), part.get("additionalProperties")) for part in parts]
        for name in dict.fromkeys(name for known, _ in fields for name in known):
            yield [known.get(name, other) for known, other in fields]
    first = [(_listed(part.get("prefixItems")), part.get("items")) for part in parts]
    for place in range(max((len(known) for known, _ in first), default=0)):
        yield [known[place] if place < len(known) else other for known, other in first]
    for key in ("additionalProperties", "items"):
        yield [part.get(key) for part in parts]


def _nodes(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the objects in a schema, outer objects first, and their depths."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    for value, depth in waiting:
        inner = _listed(value) or list(_fields(value).values())
        if depth <= _MAX_DEPTH:
            waiting += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
        if isinstance(value, dict):
            yield _fields(value), depth


def _has_end(schema: Mapping[str, Any]) -> bool:
    """Return whether any text matches a schema; a schema that requires itself is endless."""
    ends, open_ = set[int](), [node for node, _ in reversed(list(_nodes(schema)))]
    # Schemas with an end that depends on another schema, by that schema.
    waiting = dict[int, list[Mapping[str, Any]]]()
    while open_ and id(schema) not in ends:
        node = open_.pop()
        if id(node) not in ends and _ends(node, schema, ends, waiting):
            ends.add(id(node))
            open_ += waiting.pop(id(node), ())
    return id(schema) in ends


def _ends(
    node: Mapping[str, Any],
    root: Mapping[str, Any],
    ends: set[int],
    waiting: dict[int, list[Mapping[str, Any]]],
) -> bool:
    """Return whether a schema can end, if the schemas in `ends` can; if not, it waits for others."""

    def known(value: Any) -> bool:
        is_known = not isinstance(value, dict) or id(cast("Any", value)) in ends
        if not is_known:
            waiting.setdefault(id(cast("Any", value)), []).append(node)
        return is_known

    if not known(_target(node.get("$ref"), root)) or not all(map(known, _listed(node.get("allOf")))):
        return False
    if any((found := _listed(node.get(name))) and not any(map(known, found)) for name in ("anyOf", "oneOf")):
        return False
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else _listed(kinds)
    if not kinds or not {"object", "array"}.issuperset(map(str, kinds)):
        return True
    needed = {"object": _required(node), "array": _least(node)}
    return any(all(map(known, needed[kind])) for kind in kinds)


def _required(node: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the fields that an object must have."""
    known = _fields(node.get("properties"))
    other = node.get("additionalProperties")
    return [known.get(name, other) for name in _listed(node.get("required")) if isinstance(name, str)]


def _least(node: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the elements that a list must have."""
    least = node.get("minItems")
    count = least if isinstance(least, int) else 0
    first = _listed(node.get("prefixItems"))
    return [*first[:count], *([node.get("items")] if count > len(first) else [])]


def _listed(value: Any) -> list[Any]:
    return cast("list[dict[str, Any]]", value) if isinstance(value, list) else []


def _fields(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference in a schema; None if it is elsewhere."""
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    # Read the path as the compiler does, because it is the compiler's work that is counted.
    path = unquote(reference) if "%" in reference else reference
    for part in path.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            digits = (name.removeprefix("+").lstrip("0") or "0") if _INDEX.fullmatch(name) else ""
            place = int(digits) if 0 < len(digits) < _MAX_DIGITS else MAX_SCHEMA
            found = next(iter(_listed(found)[place : place + 1]), None)
        else:
            found = _fields(found).get(name)
        if found is None:
            break
    return found
