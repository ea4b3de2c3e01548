"""Rules for the keywords of a schema that the grammar compiler would not enforce.

`llguidance` reads numbers as float64, so it would enforce another number than the schema's. With some bounds
it accepts the bound itself, and with others it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, TypeAlias, cast

__all__ = ["BOUNDS", "fault_of", "fault_of_bounds", "fault_of_multiples", "subschemas"]

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""The keywords with a bound for numbers."""
_ALL_BOUNDS = frozenset(BOUNDS)
_BASES = frozenset(("$id", "$schema", "id"))
_Schema: TypeAlias = Mapping[str, Any]
# The values of these keywords are data, or schemas by name.
_DATA = frozenset(("const", "enum", "default", "examples"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# The compiler writes lengths into regular expressions, where 32 bits must hold them, and counts in 64 bits.
_COUNTS = {
    **dict.fromkeys(("minLength", "maxLength"), 1 << 32),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), 1 << 64),
}
_CHECKED = frozenset(("const", "enum", *_COUNTS))
# All integers up to `_MAX_FLOAT` are float64. An integer of `-_MAX_INTEGER` ends the process.
_MAX_FLOAT, _MAX_INTEGER = 1 << 53, 1 << 63
# The compiler parses a number as an integer times a power of ten, and rounds twice if either is inexact.
_MAX_EXPONENT = 22
# The compiler tries all remainders of a multiple next to bounds. Above 330, this may exceed the limits of
# `constraints.py` at any digit. Several multiples, also of alternatives, have as many remainders as their
# least common multiple: 991 and 983 took 15 s.
_MAX_MULTIPLE, _MAX_BOUNDED = 1000, 256


def subschemas(schema: _Schema, target: Callable[[Any, _Schema], Any]) -> Iterator[_Schema]:
    """Yield a schema and its subschemas, once each: no data, but each target of a reference.

    Args:
        schema: The schema.
        target: Returns the target of a reference in a schema.
    """
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    seen = set[int]()
    for value, is_map in waiting:
        if isinstance(value, list):
            waiting += [(one, False) for one in cast("list[dict[str, Any]]", value)]
        if not isinstance(value, dict) or (id(cast("Any", value)) in seen and not is_map):
            continue
        node = cast("dict[str, Any]", value)
        if is_map:
            waiting += [(one, False) for one in node.values()]
            continue
        seen.add(id(node))
        yield node
        waiting += [(one, name in _MAPS) for name, one in node.items() if name not in _DATA]
        if "$ref" in node:
            waiting.append((target(node["$ref"], schema), False))


def fault_of(node: _Schema, root: _Schema) -> str | None:
    """Return why a subschema cannot be enforced; None if this module knows no reason.

    Args:
        node: The subschema.
        root: The schema that contains it.
    """
    for name in node.keys() & _CHECKED:
        value = node[name]
        if name in _COUNTS:
            if not (_is_integer(value) and 0 <= value < _COUNTS[name]):
                return f"{name} must be an integer from 0 to {_COUNTS[name] - 1}, got {_shown(value)}"
        elif inexact := next((one for one in _numbers(value) if not _is_exact(one)), None):
            return _out_of_range(name, inexact)
    return _fault_of_reference(node, root) or fault_of_bounds([node])


def _fault_of_reference(node: _Schema, root: _Schema) -> str | None:
    """Return why the reference of a subschema cannot be followed, or why it changes other references."""
    reference = node.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        shown, kind = _shown(reference), "anchors" if reference.startswith("#") else "addresses"
        what = f"$ref {shown} is not present in the schema, because {kind} are not supported"
        return f"{what}: write the path of the definition, such as #/$defs/name"
    if node is root or not (found := node.keys() & _BASES):
        return None
    draft = root.get("$schema")
    is_old = isinstance(draft, str) and ("draft-03" in draft or "draft-04" in draft)
    name = min(found)
    if name == "id" and not is_old:
        return None
    return f"{name} must be at the beginning of the schema, because it changes each $ref below: leave it out"


def fault_of_bounds(nodes: Sequence[_Schema]) -> str | None:
    """Return why the bounds of a number cannot be enforced; None if they can.

    Args:
        nodes: The schemas that the number must match at once.
    """
    nodes = [node for node in nodes if node.keys() & _ALL_BOUNDS]
    if not nodes:
        return None
    for node in nodes:
        for name in BOUNDS[:-1]:
            if _is_number(value := node.get(name)) and not _is_bound(name, value, node):
                return _out_of_range(name, value)
    multiples = [node["multipleOf"] for node in nodes if "multipleOf" in node]
    for one in multiples:
        if not (_is_integer(one) and 1 <= one <= _MAX_MULTIPLE):
            return f"multipleOf must be an integer up to {_MAX_MULTIPLE}, and at least 1, got {_shown(one)}"
    return _fault_of_interval(nodes)


def fault_of_multiples(nodes: Sequence[_Schema]) -> str | None:
    """Return why the work for multiples would exceed the compiler's limits; None if it does not.

    Args:
        nodes: The schemas for one number: it must match all, or some are alternatives.
    """
    values: list[Any] = [node.get("multipleOf") for node in nodes]
    multiples: list[int] = [value for value in values if _is_integer(value) and value >= 1]
    is_bounded = any(name in node for node in nodes for name in BOUNDS[:-1])
    joined, limit = lcm(*multiples), _MAX_BOUNDED if is_bounded else _MAX_MULTIPLE
    if joined <= limit:
        return None
    bounded = " next to a minimum or maximum" * is_bounded
    if len(set(multiples)) == 1:
        return f"multipleOf{bounded} must be at most {limit}, got {joined}"
    return f"the least common multiple of joined multipleOf{bounded} must be at most {limit}"


def _fault_of_interval(nodes: Sequence[_Schema]) -> str | None:
    """Return why joined bounds cannot be enforced: the compiler accepts an integer that bounds a fraction."""
    least = _tightest(nodes, "minimum", "exclusiveMinimum", 1)
    most = _tightest(nodes, "maximum", "exclusiveMaximum", -1)
    if least is None or most is None:
        return None
    (low, is_above), (high, is_below) = least, most
    if is_above and low >= 0 and low.denominator == 1 and low < high < low + 1:
        return f"exclusiveMinimum {low} is not enforced with a maximum below {low + 1}: use minimum"
    if is_below and high <= 0 and high.denominator == 1 and high - 1 < low < high:
        return f"exclusiveMaximum {high} is not enforced with a minimum above {high - 1}: use maximum"
    return None


def _tightest(nodes: Sequence[_Schema], name: str, exclusive: str, sign: int) -> tuple[Fraction, bool] | None:
    """Return the tightest bound on one side, and whether it is exclusive; None if there is none.

    Args:
        nodes: The schemas with the bounds.
        name: The keyword of a bound.
        exclusive: The keyword of an exclusive bound. In old schemas, true makes the other bound exclusive.
        sign: 1 if larger bounds are tighter, or -1.
    """
    found = list[tuple[Fraction, bool]]()
    for node in nodes:
        inner, outer = node.get(name), node.get(exclusive)
        outer = inner if outer is True else outer
        found += [
            (sign * Fraction(cast("float", one)), is_exclusive)
            for one, is_exclusive in ((inner, False), (outer, True))
            if _is_number(one)
        ]
    best = max(found, default=None)
    return None if best is None else (sign * best[0], best[1])


def _is_bound(name: str, value: Any, node: _Schema) -> bool:
    """Return whether the compiler enforces a bound."""
    is_integer = node.get("type") == "integer"
    # It cuts a maximum to int64, and no larger integer matches.
    if name == "maximum" and is_integer and _MAX_INTEGER - 1 <= value < 2 * _MAX_INTEGER:
        return node.get("exclusiveMaximum") is not True
    if not _is_exact(value):
        return False
    # It adds 1 to an exclusive bound of integers, or subtracts 1.
    if name.startswith("exclusive") or node.get(f"exclusive{name.capitalize()}") is True:
        return bool(abs(value) < _MAX_FLOAT)
    # It compares digits, and writes a large float64 with the fewest digits that are read back.
    is_written = is_integer or value % 1 != 0 or Fraction(repr(float(value))) == value
    return bool(is_written and abs(value) < _MAX_INTEGER)


def _is_exact(value: Any) -> bool:
    """Return whether the compiler reads and writes a number without a change."""
    if isinstance(value, int):
        return abs(value) < _MAX_INTEGER and float(value) == value
    digits, _, exponent = repr(value).partition("e")
    whole, _, part = digits.partition(".")
    coefficient = int(whole + part)
    return float(coefficient) == coefficient and abs(int(exponent or 0) - len(part)) <= _MAX_EXPONENT


def _out_of_range(name: str, value: Any) -> str:
    what = f"{name} has a number out of range, {_shown(value)}, which would be rounded"
    return f"{what}: use an integer up to 2**53, a number with up to 15 digits, or a string"


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers in data."""
    waiting: list[Any] = [value]
    for one in waiting:
        if _is_number(one):
            yield one
        if isinstance(one, dict):
            waiting += cast("dict[str, Any]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[dict[str, Any]]", one)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
