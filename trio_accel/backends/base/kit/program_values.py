"""Values that code of the user's returns and holds, as programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast


def check_written(label: str, returned: object, out: object, outputs: Sequence[object]) -> None:
    """Refuse a value that a method returned although it had to write to `out`: the value would be lost."""
    output_ids = {id(output) for output in outputs}
    if (
        returned is not None
        and returned is not out
        and not all(id(item) in output_ids for item in _items(returned))
    ):
        raise TypeError(
            f"{label}: it was to write its result to out, and returned {shortened(returned)}; return out or "
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
    stack, visited = [value], set[int]()
    while stack:
        item: Any = stack.pop()
        is_own = type(item).__module__ == module and hasattr(item, "__dict__")
        if not (is_own or issubclass(type(item), (dict, list, tuple))):
            yield item
        elif id(item) not in visited:
            visited.add(id(item))
            inner = cast("Any", vars(item) if is_own else item)
            inside = inner.values() if isinstance(inner, dict) else inner  # pyright: ignore[reportUnknownVariableType]
            stack += list(inside)  # pyright: ignore[reportUnknownArgumentType]
