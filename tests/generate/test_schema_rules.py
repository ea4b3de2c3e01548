"""`examples/generate/schema_rules.py`: a schema is enforced as it is written, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from running import TINY
from text import load_random

pytestmark = pytest.mark.examples
for name in ("tokenizers", "jinja2", "llguidance"):
    pytest.importorskip(name, reason="pip install '.[generate]'")
jsonschema = pytest.importorskip("jsonschema")
if BACKEND != "cpu":
    pytest.skip("schemas need no device", allow_module_level=True)

from constraints import ConstraintError, Grammar, Grammars  # noqa: E402  # which need the packages
from schemas import checked_schema  # noqa: E402

LOADED = load_random(TINY, 3)
GRAMMARS = Grammars(LOADED)
[END] = LOADED.text.ends
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def allowed(grammar: Grammar, tokens: list[int]) -> Any:
    return np.unpackbits(grammar.begin().mask(tokens).view(np.uint8), bitorder="little")


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    constraint, tokens = grammar.begin(), list[int]()
    for token in [*LOADED.text.encode(text), END]:
        if not np.unpackbits(constraint.mask(tokens).view(np.uint8), bitorder="little")[token]:
            return False
        tokens.append(token)
    return True


def only_text(grammar: Grammar) -> str:
    """The text of a grammar that allows a single one."""
    tokens = list[int]()
    while True:
        [token] = np.flatnonzero(allowed(grammar, tokens)).tolist()
        if token == END:
            return LOADED.text.tokenizer.decode(tokens)  # type: ignore[no-any-return]
        tokens.append(token)


MANY = (
    2**53 + 1,
    -(2**53) - 1,
    10**18 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    12345678901234567890,
    -(10**30),
)
FLOATS = (1e300, 1.7976931348623157e308, 5e-324, 1e23, 939044454.3351613, 0.10000027109612719, -1e-200)
OUT = "has a number out of range"


@pytest.mark.parametrize("number", [*MANY, *FLOATS])
def test_numbers_that_would_be_rounded_are_refused(number: float) -> None:
    inner: list[dict[str, Any]] = [{"const": number}, {"enum": [1, number]}, {"const": {"a": [number]}}]
    inner += [{"enum": [[{"a": number}]]}]
    inner += [{"type": "number", bound: number} for bound in BOUNDS if abs(number) > 2**53]
    for one in inner:
        for schema in (
            one,
            {"type": "array", "items": one},
            {"anyOf": [{"type": "null"}, one]},
            {"$defs": {"a": one}, "$ref": "#/$defs/a"},
            {"type": "object", "properties": {"const": one}},
            {"default": one, "$ref": "#/default"},
        ):
            with pytest.raises(ConstraintError, match=OUT):
                checked_schema(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "integer", "exclusiveMinimum": 2**53}, OUT),
        ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, OUT),
        ({"type": "integer", "maximum": 2**63 - 1, "exclusiveMaximum": True}, OUT),
        ({"type": "number", "maximum": 2**62 + 1024}, OUT),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e25}, OUT),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 is not enforced"),
        ({"type": "number", "exclusiveMinimum": 3.0, "exclusiveMaximum": 3.25}, "exclusiveMinimum 3 is not"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum 0 is not enforced"),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "exclusiveMinimum 1 is not enforced"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "exclusiveMinimum 0 is not enforced"),
        ({"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 5}]}, "is not enforced"),
        ({"allOf": [{"multipleOf": one} for one in (40, 41)]}, "joined multipleOf must be at most 1000"),
        ({"anyOf": [{"multipleOf": one} for one in (40, 41)]}, "joined multipleOf must be at most 1000"),
        (
            {"multipleOf": 999, "maximum": 3 * 10**6 + 1},
            "next to a minimum or maximum must be at most 256, g",
        ),
        ({"multipleOf": 477, "exclusiveMinimum": 10**15}, "multipleOf next to a minimum or maximum must be"),
        ({"allOf": [{"multipleOf": 16}, {"multipleOf": 17}, {"minimum": 0}]}, "joined multipleOf next to a"),
        ({"anyOf": [{"multipleOf": 86, "maximum": 10**15}, {"multipleOf": 97}]}, "joined multipleOf next to"),
        (
            {"minimum": 9, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 750}}},
            "multipleOf next to a minimum or maximum must be at most 256, got 750",
        ),
        (
            {"allOf": [{"properties": {"a": {"multipleOf": 750}}}, {"properties": {"a": {"maximum": 1}}}]},
            "multipleOf next to a minimum or maximum must be at most 256, got 750",
        ),
        ({"multipleOf": -3}, "multipleOf must be an integer up to 1000, and at least 1, got -3"),
        ({"multipleOf": True}, "multipleOf must be an integer"),
        ({"multipleOf": 0}, "multipleOf must be an integer"),
        ({"multipleOf": None}, "multipleOf must be an integer"),
        ({"multipleOf": [2]}, "multipleOf must be an integer"),
        ({"multipleOf": 2**53 + 1}, "multipleOf must be an integer"),
        (
            {"type": "string", "maxLength": 2**32},
            "maxLength must be an integer from 0 to 4294967295, got 429",
        ),
        ({"type": "string", "minLength": 2**53 + 1}, "minLength must be an integer"),
        ({"type": "string", "minLength": 1.5}, "minLength must be an integer"),
        ({"type": "array", "maxItems": 2**64}, "maxItems must be an integer"),
        ({"type": "array", "minItems": 10**30}, "minItems must be an integer"),
        ({"type": "object", "maxProperties": -1}, "maxProperties must be an integer"),
        ({"type": "object", "minProperties": "1"}, "minProperties must be an integer"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name", "type": "null"}}}, "anchors are not supported"),
        ({"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": {}}}, "addresses are not supp"),
        ({"$defs": {"a": {"$id": "http://x/y"}}, "$ref": "#/$defs/a"}, "must be at the beginning"),
        ({"type": "integer", "minimum": "é" * 80}, "^panic: end byte index 100 is not a char[^<]*$"),
    ],
    ids=str,
)
def test_schemas_that_would_not_be_enforced_are_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        GRAMMARS.json(schema)


@pytest.mark.parametrize(
    "number", [2**53, -(2**53), 2**60, 7, 1e22, 1e-7, 0.30000000000000004, 1e15, -0.5, 123456.789, 1.0]
)
def test_accepted_numbers_are_enforced(number: float) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        assert Fraction(only_text(GRAMMARS.json(schema))) == Fraction(repr(number))


def multiples(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Schemas with the largest multiples that are accepted, and bounds of all sizes."""
    yield {"type": "integer", "multipleOf": 997}
    yield {"allOf": [{"type": "number", "multipleOf": 20}, {"multipleOf": 45}]}
    yield {"anyOf": [{"multipleOf": 16, "maximum": 10**17}, {"multipleOf": 15, "minimum": -(10**17)}]}
    for digits in range(1, 16):
        low, high = -int(rng.integers(10**digits)), int(rng.integers(10**15, 2**53))
        names = (
            rng.permutation(["minimum", "exclusiveMinimum"]),
            rng.permutation(["maximum", "exclusiveMaximum"]),
        )
        bounds = {names[0][0]: low, names[1][0]: high if digits % 2 else 10**digits}
        yield {"type": "integer", "multipleOf": 256 - digits, **bounds}


def test_multiples_are_enforced_in_texts_of_any_length() -> None:
    """Also after the first texts, because the texts of a grammar share the compiler's limits."""
    rng = np.random.default_rng(3)
    for schema in multiples(rng):
        grammar, checker = GRAMMARS.json(schema), jsonschema.Draft202012Validator(schema)
        for _ in range(3):
            text = random_text(grammar, rng)
            assert checker.is_valid(json.loads(text, parse_float=Fraction)), (schema, text)


def random_text(grammar: Grammar, rng: np.random.Generator) -> str:
    """A text by random tokens, which ends as soon as it may from the 30th token on."""
    constraint, tokens = grammar.begin(), list[int]()
    while True:
        bits = np.unpackbits(constraint.mask(tokens).view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token == END or (len(tokens) >= 30 and bits[END]):
            return LOADED.text.tokenizer.decode(tokens)  # type: ignore[no-any-return]
        tokens.append(token)


def test_schemas_with_large_numbers_without_effect_are_taken() -> None:
    large = 2**60 + 1
    for schema in (
        {"type": "integer", "default": large, "examples": [large, 1e300], "title": f"{large}"},
        {"type": "object", "properties": {"minimum": {"type": "null"}, "const": {"type": "null"}}},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        {"$id": "http://x/y", "$ref": "#/%24defs/a%20b", "$defs": {"a b": {"type": "null"}}},
        {"const": {"$id": "x", "$ref": "#y", "minimum": 1e15}},
    ):
        assert GRAMMARS.json(schema)


def test_references_are_counted_however_they_are_written() -> None:
    """Each definition joins two of the next, so the compiler's work doubles with each."""
    for prefix in ("#/%24defs", "#/$%64efs", "json-schema:///#/$defs"):
        joined = [{"allOf": [{"$ref": f"{prefix}/{n + 1}"}, {"properties": {"a": {}}}]} for n in range(20)]
        schema = {"$defs": {**{f"{n}": {"anyOf": [one, one]} for n, one in enumerate(joined)}, "20": {}}}
        with pytest.raises(ConstraintError, match=r"more than 1000 schemas by joining|not present"):
            checked_schema({**schema, "$ref": f"{prefix}/0"})


def matches(number: Fraction, schema: dict[str, Any]) -> bool:
    """The meaning of bounds, by exact fractions."""
    low, high, above, below = (None if name not in schema else exact(schema[name]) for name in BOUNDS)
    return (
        (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
        and (schema["type"] != "integer" or number.denominator == 1)
    )


def exact(number: float) -> Fraction:
    return Fraction(repr(number))


def decimal(number: Fraction) -> str:
    digits = f"{abs(int(number * 10**30)):031}"
    whole = f"{'-' * (number < 0)}{digits[:-30]}.{digits[-30:]}"
    return whole.rstrip("0").removesuffix(".")


def test_bounds_are_enforced_or_refused() -> None:
    rng = np.random.default_rng(5)
    values = (0, 1, -1, 0.5, -0.5, 1.5, -1.5, 9.99, -100, 1e-5, 1e15, 2**53, 2**60, -(2**60), 1e18, 123.456)
    taken = 0
    for _ in range(120):
        schema: dict[str, Any] = {"type": str(rng.choice(["integer", "number"]))}
        schema |= {name: values[rng.integers(len(values))] for name in BOUNDS if rng.random() < 0.45}
        parts = [{"type": schema["type"]}, {name: one for name, one in schema.items() if name != "type"}]
        try:
            grammar = GRAMMARS.json(schema if rng.random() < 0.7 else {"allOf": parts})
        except ConstraintError:
            continue
        taken += 1
        near = {exact(schema[name]) for name in BOUNDS if name in schema} | {Fraction(0)}
        for step in (0, 1, Fraction(1, 10**25)):
            for number in {one + sign * step for one in near for sign in (1, -1)}:
                text, is_right = decimal(number), matches(number, schema)
                assert not takes(grammar, text) or is_right, (schema, text)
                if number.denominator == 1 and is_right:
                    assert takes(grammar, text), (schema, text)
    assert taken > 40
    assert not takes(GRAMMARS.json({"type": "number", "exclusiveMaximum": 0}), "-0")
