"""Requests whose cost could grow faster than their size: each field of a service, in many forms and sizes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs

__all__ = ["FORMS", "SIZES", "Bomb", "Place", "body_bombs", "head_bombs", "places_of", "post"]

SIZES = (1 << 10, 1 << 16, (1 << 20) - 1000)
"""Bytes of the value of a field; services take bodies of at most 1 MiB."""
_HEAD_BYTES = 15_500
_TOKEN_LETTERS = 0xE000


@attrs.frozen
class Bomb:
    """A request.

    Attributes:
        name: Field, form and size.
        data: The bytes that are sent.
    """

    name: str
    data: bytes


@attrs.frozen
class Place:
    """A field of a request, which may be inside of others.

    Attributes:
        name: The names of the fields, with dots in between.
        before: The JSON text of a request up to the value of the field.
        after: The text behind it.
    """

    name: str
    before: str
    after: str = "}"


def _repeated(element: str) -> Callable[[int], str]:
    return lambda size: "[" + ",".join([element] * max(1, size // (len(element.encode()) + 1))) + "]"


def _text(letters: str) -> Callable[[int], str]:
    return lambda size: '"' + letters * max(1, size // len(letters.encode())) + '"'


def _nested(begin: str, middle: str, end: str, most: int) -> Callable[[int], str]:
    def make(size: int) -> str:
        depth = min(most, size // len(begin + end))
        return begin * depth + middle + end * depth

    return make


def _fields(size: int) -> str:
    return "{" + ",".join(f'"{number:06}":1' for number in range(max(1, size // 11))) + "}"


def _all_letters(size: int) -> str:
    last = min(_TOKEN_LETTERS + size // 3, 0x110000)
    letters = "".join(map(chr, range(_TOKEN_LETTERS, last))).encode()[:size]
    return json.dumps(letters.decode(errors="ignore"), ensure_ascii=False)


FORMS: Mapping[str, Callable[[int], str]] = {
    "digits": lambda size: "9" * size,
    "negative": lambda size: "-" + "1" * min(size, 4299),
    "fraction": lambda size: "0." + "9" * size,
    "exponent": lambda size: "1e" + "9" * min(size, 4299),
    "not a number": lambda size: "NaN",
    "true": lambda size: "true",
    "empty text": lambda size: '""',
    "one long word": _text("a"),
    "words": _text("ab "),
    "digits in a text": _text("1"),
    "spaces": _text(" "),
    "signs": _text("!?"),
    "control tokens": _text("<|im_end|>"),
    "beginnings of control tokens": _text("<|"),
    "braces of templates": _text("{{{%"),
    "all letters": _all_letters,
    "escapes": _text("\\u00e9"),
    "surrogates": _text("\\ud83d\\udc4d"),
    "lone surrogates": _text("\\ud83d"),
    "list of numbers": _repeated("1"),
    "list of long numbers": _repeated("9" * 4299),
    "list of texts": _repeated('""'),
    "list of nulls": _repeated("null"),
    "list of lists": _repeated("[]"),
    "list of objects": _repeated("{}"),
    "list of parts": _repeated('{"type":"text","text":""}'),
    "list of messages": _repeated('{"role":"user","content":""}'),
    "many fields": _fields,
    "one field again and again": lambda size: "{" + ",".join(['"a":1'] * max(1, size // 6)) + "}",
    "deep list": _nested("[", "", "]", 600),
    "too deep list": _nested("[", "", "]", 1 << 20),
    "deep object": _nested('{"a":', "1", "}", 300),
}
"""The JSON text of a value of about so many bytes, by the name of its form."""


def places_of(cls: Any, **given: Any) -> list[Place]:
    """Return each declared field of a Pydantic model, those of models inside of it, and an unknown one.

    Args:
        cls: The class of the model.
        given: Values of fields, beside those that are required.
    """
    whole = json.dumps({**_example(cls), **given})[:-1]
    nested = [
        Place(f"{name}.{place.name}", f'{whole},"{name}":[{place.before}', f"{place.after}]}}")
        for name, field in cls.model_fields.items()
        for inner in _models_in(field.annotation)
        for place in places_of(inner)
    ]
    names = [*cls.model_fields, "unknown"]
    return [*(Place(name, f'{whole},"{name}":') for name in names), *nested]


def _models_in(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _example(model: Any) -> dict[str, Any]:
    return {
        name: _value_of(field.annotation) for name, field in model.model_fields.items() if field.is_required()
    }


def _value_of(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    if hasattr(annotation, "model_fields"):
        return _example(annotation)
    if get_origin(annotation) is list:
        return [_value_of(get_args(annotation)[0])]
    return "random"


def post(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a request that posts a body and ends its connection."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{''.join(lines)}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def body_bombs(
    path: str, places: Sequence[Place], sizes: Sequence[int] = SIZES, headers: Mapping[str, str] = {}
) -> Iterator[tuple[str, Callable[[], Bomb]]]:
    """Yield the names of all bombs in the body of a request, each with a function that makes it."""
    for place, form, size in itertools.product(places, FORMS, sizes):
        name = f"{path} {place.name}: {form}, {size} bytes"

        def make(place: Place = place, form: str = form, size: int = size, name: str = name) -> Bomb:
            room = max(1, size - len(place.before) - len(place.after))
            text = place.before + FORMS[form](room) + place.after
            return Bomb(name, post(path, text.encode(), headers))

        yield name, make


def head_bombs(
    path: str, method: str = "GET", fields: Sequence[str] = ("host", "cookie", "x-unknown")
) -> Iterator[tuple[str, Callable[[], Bomb]]]:
    """Yield the names of bombs in the headers, the path and the form of a body, as `body_bombs` does.

    Args:
        path: Where they are sent.
        method: Of the request.
        fields: Names of headers that the service reads.
    """
    begin = f"{method} {path} HTTP/1.1\r\n".encode()
    host = b"Host: 127.0.0.1\r\nConnection: close\r\n"
    many = _HEAD_BYTES
    made = {
        "many headers": begin + host + b"a:b\r\n" * (many // 5) + b"\r\n",
        "folded headers": begin + host + b"a:b\r\n" + b" c\r\n" * (many // 4) + b"\r\n",
        "folded spaces": begin + host + b"a:\r\n" + b" \r\n" * (many // 3) + b" \0\r\n\r\n",
        "long path": f"{method} /".encode() + b"a/" * (many // 2) + b" HTTP/1.1\r\n" + host + b"\r\n",
        "escaped path": f"{method} /".encode() + b"%41" * (many // 3) + b" HTTP/1.1\r\n" + host + b"\r\n",
        "query of fields": begin.replace(b" HTTP", b"?" + b"a&" * (many // 2) + b" HTTP", 1) + host + b"\r\n",
        "query of values": begin.replace(b" HTTP", b"?" + b"a=[&" * (many // 4) + b" HTTP", 1)
        + host
        + b"\r\n",
        "empty lines": b"\r\n" * (many // 2),
        "pipelined": (begin + b"Host: 127.0.0.1\r\n\r\n") * 500,
        "no end of a line": begin + b"x" * (1 << 20),
    }
    chunked = begin.replace(method.encode(), b"POST", 1) + host + b"Transfer-Encoding: chunked\r\n\r\n"
    made |= {
        "chunks of a byte": chunked + b"1\r\nx\r\n" * 170_000 + b"0\r\n\r\n",
        "chunks with extensions": chunked + (b"1;" + b"x" * 1000 + b"\r\nx\r\n") * 1000 + b"0\r\n\r\n",
        "trailers": chunked + b"0\r\n" + b"a:b\r\n" * (many // 5) + b"\r\n",
        "spaces in a trailer": chunked + b"0\r\nx:" + b" " * many + b"\0\r\n\r\n",
    }
    values = {"letters": b"a" * many, "digits": b"9" * many, "commas": b"a," * (many // 2)}
    values |= {"spaces": b" " * many + b"\0", "spaces at its end": b"a" + b" " * many + b"\0"}
    for field, (form, value) in itertools.product(fields, values.items()):
        made[f"{field}: {form}"] = begin + host + field.encode() + b":" + value + b"\r\n\r\n"
    for name, data in made.items():

        def make(name: str = f"{method} {path} {name}", data: bytes = data) -> Bomb:
            return Bomb(name, data)

        yield f"{method} {path} {name}", make
