"""Schemas made at random, and whether an answer is JSON by one."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """A schema with short texts."""
    kinds = ["integer", "string", "pattern", "enum", "boolean", "null", "number", "const"]
    kinds += ["object", "array", "any", "reference"] * (depth > 0)
    kind = str(rng.choice(kinds)) if depth < 2 else "object"
    low = int(rng.integers(-1000, 1000))
    made: dict[str, Any] = {
        "integer": {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(1, 5000))},
        "string": {"type": "string", "maxLength": int(rng.integers(0, 9))},
        "pattern": {"type": "string", "pattern": f"^[a-f]{{{rng.integers(1, 4)}}}-[0-9]+(x|yz)?$"},
        "enum": {"enum": [None, 1.5, "é", "a b", {"a": [1]}, True][: int(rng.integers(1, 7))]},
        "boolean": {"type": "boolean"},
        "null": {"type": ["null", "boolean"]},
        "number": {"type": "number", "minimum": low, "maximum": low + 9},
        "const": {"const": {"k": [low, '"\\', None]}},
    }.get(kind, {})
    if kind == "object":
        names = [f"{'abcdé'[place]}{rng.integers(10)}" for place in range(int(rng.integers(1, 5)))]
        made = {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    elif kind == "array":
        made = {"type": "array", "items": random_schema(rng, depth - 1)}
        made |= {"minItems": int(rng.integers(0, 2)), "maxItems": int(rng.integers(1, 4))}
    elif kind == "any":
        made = {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    elif kind == "reference":
        made = {"$ref": "#/$defs/shared"}
    if depth == 2:
        made["$defs"] = {"shared": {"type": "integer", "minimum": 0, "maximum": 99}}
    return made


def check_answer(text: str, schema: dict[str, Any]) -> None:
    """Refuse a text by a schema if it is not JSON, or has spaces between its parts."""
    import jsonschema

    found = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(found)
    assert not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"', "", text))
