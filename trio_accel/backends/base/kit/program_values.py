"""Values that code of the user's returns and holds, as programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast


def check_written(where: str, returned: object, out: object, outputs: Sequence[object]) -> None:
    """Refuse a value that a method returned although it had to write to `out`: the value would be lost."""
    own = {id(output) for output in outputs}
    if returned is not None and returned is not out and not all(id(item) in own for item in _items(returned)):
        raise TypeError(
            f"{where}: it was to write its result to out, and returned {shortened(returned)}; return out or "
            "None, or take no argument out: then what is returned is copied"
        )


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    return list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else [value]


def shortened(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return f"an object of type {type(value).__name__}"


def leaves_of(value: object, module: str = "") -> Iterator[object]:
    """Yield the contents of nested collections, and the attributes of objects with a module's classes."""
    left, seen = [value], set[int]()
    while left:
        one: Any = left.pop()
        is_own = type(one).__module__ == module and hasattr(one, "__dict__")
        if not (is_own or issubclass(type(one), (dict, list, tuple))):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            inner = cast("Any", vars(one) if is_own else one)
            inside = inner.values() if isinstance(inner, dict) else inner  # pyright: ignore[reportUnknownVariableType]
            left += list(inside)  # pyright: ignore[reportUnknownArgumentType]
