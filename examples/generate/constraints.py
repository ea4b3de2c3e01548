"""Texts of a required form, such as JSON by a schema: the tokens that may come next.

`llguidance` decides that (Microsoft, 2025). A schema comes from a stranger, so what it may cost is bounded.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt
from text import Loaded

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["MAX_SCHEMA", "OBJECT", "Constraint", "ConstraintError", "Grammar", "Grammars", "checked_schema"]

MAX_SCHEMA = 1 << 14
"""The most letters of a schema, or of all schemas of a request."""
OBJECT = {"type": "object"}
"""The schema of any JSON object."""
_MAX_DEPTH, _MAX_MULTIPLE, _MAX_KEPT = 64, 1000, 64
# To compile takes a time that is exponential in the patterns that are joined for one text, as by `allOf`, and
# quadratic in those of `patternProperties`. No limit of `llguidance` bounds this.
_MAX_JOINED, _MAX_PATTERN_PROPERTIES = 6, 16
# Digits of an index in a JSON pointer; a longer one is out of range.
_MAX_DIGITS = 6
# Tokens that are tried before a grammar is accepted: some are too large only behind their first letters.
_TRIED = 4
# 0.05 s for a grammar at most, and 0.01 s for a token; a state of the lexer has 2 kB.
_LIMITS: Any = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 5_000,
    "max_lexer_states": 10_000,
}
# A small model would write spaces for ever. All are given, because a schema may have options of its own.
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


class ConstraintError(Exception):
    """A schema cannot be used; the text says why."""


class Constraint:
    """The form of one text. It consumes each token once, in order.

    Args:
        matcher: An `LLMatcher` of its own.
        words: Tokens that there are.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words, self._seen = matcher, words, 0

    def mask(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a bit for each token, 32 in a number: 1 if it may come next.

        Args:
            tokens: The text so far: what the last call had, and perhaps more.

        Raises:
            ConstraintError: The grammar has become too large.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        self._matcher.consume_tokens(list(tokens[self._seen :]))
        self._seen = len(tokens)
        mask = allocate_token_bitmask(1, self._words)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher))
        row: npt.NDArray[np.int32] = mask[0]
        return row


@attrs.frozen(eq=False)
class Grammar:
    """A form of texts, compiled."""

    _matcher: LLMatcher
    _words: int

    def begin(self) -> Constraint:
        """Begin a text."""
        return Constraint(self._matcher.deep_copy(), self._words)


class Grammars:
    """Compiles grammars for a model, and keeps the last ones. To make it takes half a second.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: Loaded) -> None:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        self._matcher = LLMatcher
        self._limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        self._words = loaded.config.words
        self._tokenizer = LLTokenizer(
            loaded.text.tokenizer.to_str(),
            n_vocab=self._words,
            eos_token=list(loaded.text.ends),
            slices=LLTokenizer.json_slices(),
        )
        self._kept = OrderedDict[str, Grammar]()
        self._lock = Lock()

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of JSON by a schema, without spaces between its tokens. Blocking.

        Raises:
            ConstraintError: The schema is wrong, too large, has no end, or has something unknown.
        """
        source = checked_schema(schema)
        try:
            grammar = self._matcher.grammar_from_json_schema(source, overrides=_OPTIONS)
        except ValueError as error:  # such as an integer that no float holds
            raise ConstraintError(f"{error!s:.200}") from None
        return self.compiled(grammar)

    def lark(self, source: str) -> Grammar:
        """Return a grammar that `llguidance` has as a text; each `%json` in it is a `checked_schema`."""
        return self.compiled(self._matcher.grammar_from_lark(source))

    def compiled(self, source: str) -> Grammar:
        """Compile a grammar, unless it is one of the last. Blocking."""
        with self._lock:
            if found := self._kept.get(source):
                self._kept.move_to_end(source)
                return found
        matcher = self._matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ConstraintError(_reason(matcher))
        made = Grammar(matcher, self._words)
        self._try(made)
        with self._lock:
            self._kept[source] = made
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _try(self, grammar: Grammar) -> None:
        constraint, tokens = grammar.begin(), list[int]()
        while len(tokens) < _TRIED:
            allowed = np.unpackbits(constraint.mask(tokens).view(np.uint8), bitorder="little")
            token = int(allowed.argmax())
            if token in self._tokenizer.eos_tokens:
                return
            tokens.append(token)


def checked_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema as a text, with the options of `Grammars.json`.

    Raises:
        ConstraintError: It is too large or too deep, or no text that it describes has an end.
    """
    try:
        whole = {**schema, "x-guidance": _OPTIONS}
        source = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        source.encode()
    except RecursionError:
        raise ConstraintError(f"it is nested deeper than {_MAX_DEPTH}") from None
    except ValueError as error:
        raise ConstraintError(f"it is no JSON: {error!s:.100}") from None
    if len(source) > MAX_SCHEMA:
        raise ConstraintError(f"it must have at most {MAX_SCHEMA} letters, got {len(source)}")
    patterns, joints, properties = 0, 0, 0
    for node, depth in _nodes(schema):
        patterns += sum(isinstance(node.get(name), str) for name in ("pattern", "format"))
        joints += max(_count_joined(node) - 1, 0)
        properties += len(_fields(node.get("patternProperties")))
        if depth > _MAX_DEPTH:
            raise ConstraintError(f"it is nested deeper than {_MAX_DEPTH}")
        multiple = node.get("multipleOf", 1)
        if not isinstance(multiple, dict) and (not isinstance(multiple, int) or multiple > _MAX_MULTIPLE):
            raise ConstraintError(f"multipleOf must be an integer up to {_MAX_MULTIPLE}")
    # Each joint adds at most one pattern to a text.
    if min(patterns + properties, joints + 1) > _MAX_JOINED:
        what = (
            f"it joins more than {_MAX_JOINED} patterns or formats, by allOf or beside $ref, anyOf or oneOf"
        )
        raise ConstraintError(f"{what}; write them as one pattern")
    if properties > _MAX_PATTERN_PROPERTIES:
        what = f"it must have at most {_MAX_PATTERN_PROPERTIES} patternProperties, got {properties}"
        raise ConstraintError(what)
    if not _has_end(schema):
        raise ConstraintError("it has no end: it requires itself")
    return source


def _nodes(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the objects in a schema, outer ones first, and how deep each is."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    for value, depth in waiting:
        inner = _listed(value) or list(_fields(value).values())
        if depth <= _MAX_DEPTH:
            waiting += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
        if isinstance(value, dict):
            yield _fields(value), depth


def _count_joined(node: Mapping[str, Any]) -> int:
    """Count the schemas that a text of this one must fit at once."""
    own = any(
        isinstance(node.get(name), kind)
        for kind, names in ((str, ("pattern", "format")), (dict, _INNER), (list, ("items", "prefixItems")))
        for name in names
    )
    others = [isinstance(node.get("$ref"), str), *(bool(_listed(node.get(n))) for n in ("anyOf", "oneOf"))]
    return own + sum(others) + len(_listed(node.get("allOf")))


_INNER = ("properties", "patternProperties", "additionalProperties", "items")


def _has_end(schema: Mapping[str, Any]) -> bool:
    """Return whether there is a text of a schema at all: one that requires itself has none."""
    ends, open_ = set[int](), [node for node, _ in reversed(list(_nodes(schema)))]
    # Those whose end depends on another one, by that.
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
    """Return whether a schema has an end, if those in `ends` have one; if not, it waits for others."""

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
    """Return what a reference in a schema points to; None if it is somewhere else."""
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        place = int(name) if name.isdecimal() and len(name) < _MAX_DIGITS else MAX_SCHEMA
        found = _fields(found).get(name) or next(iter(_listed(found)[place : place + 1]), None)
        if found is None:
            break
    return found


def _reason(matcher: LLMatcher) -> str:
    """Return why a matcher cannot go on, without the grammar that it shows behind that."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:200]
