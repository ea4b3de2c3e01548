"""Import paths of library actors: ``"package.module:Class"``, or ``"package.module:Class?argument"``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

__all__ = ["argument_of", "by_title", "is_actor_of", "title_of"]

T = TypeVar("T")


def argument_of(path: str) -> str | None:
    """What is behind the question mark; None where there is none."""
    _, separator, argument = path.partition("?")
    return argument if separator else None


@lru_cache(1024)
def title_of(path: str) -> str:
    """What people are told of: the name that an argument begins with; the path where there is no argument."""
    argument = argument_of(path)
    return path if argument is None else argument.partition(" ")[0]


def by_title(counts: Mapping[str, T]) -> dict[str, T]:
    """What is known of each library, by its title."""
    return {title_of(path): count for path, count in counts.items()}


def is_actor_of(path: str, actor_class: str, library: str) -> bool:
    """Whether this actor serves a library.

    Args:
        path: Its path in the tree.
        actor_class: Name of its class.
        library: Import path of the library.
    """
    if library.partition("?")[0].rpartition(":")[2] != actor_class:
        return False
    # One with an argument has a supervisor with the name.
    return argument_of(library) is None or path.split("/")[-2] == title_of(library)
