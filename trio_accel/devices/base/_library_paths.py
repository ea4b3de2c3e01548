"""Import paths: of objects for another process, and of library actors with the libraries that a device uses.

The path of a library actor may have an argument, ``"package.module:Class?argument"``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


def why_not_found(target: Any) -> str | None:
    """Return why another process cannot find a class or function by name; None if it can."""
    module, name = target.__module__, target.__qualname__
    if module == "__main__":
        return "is defined in __main__, where it cannot be found by name; move it to a module that you import"
    if "<locals>" in name or "<lambda>" in name:
        return "is defined in a function; move it to the level of its module"
    resolved: object = sys.modules.get(module)
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    return None if resolved is target else "is not what its module has under this name"


def argument_of(path: str) -> str | None:
    """Return the text after the question mark; None without one."""
    _, separator, argument = path.partition("?")
    return argument if separator else None


@lru_cache(1024)
def title_of(path: str) -> str:
    """Return the title for people: the name at the beginning of the argument, or the path without one."""
    argument = argument_of(path)
    return path if argument is None else argument.partition(" ")[0]


def by_title(counts: Mapping[str, T]) -> dict[str, T]:
    """Key the values of libraries by their titles."""
    return {title_of(path): count for path, count in counts.items()}


def is_actor_of(path: str, actor_class: str, library: str) -> bool:
    """Return whether this actor serves a library.

    Args:
        path: Its path in the tree.
        actor_class: The name of its class.
        library: The import path of the library.
    """
    if library.partition("?")[0].rpartition(":")[2] != actor_class:
        return False
    # With an argument, its supervisor has this name.
    return argument_of(library) is None or path.split("/")[-2] == title_of(library)


class LibrariesInUse:
    """The libraries that completed an operation in one generation. The next generation opens them in advance.

    So a library that could not be opened, or ended its process, is not opened in advance.
    """

    def __init__(self) -> None:
        # In the order of their first operations, in which they are opened.
        self._now: dict[str, None] = {}
        self._before: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The import paths for this generation; until then, the previous generation's paths."""
        return tuple(self._now) or self._before

    def add(self, path: str) -> None:
        """Record that a library has completed an operation."""
        self._now[path] = None

    def discard(self, path: str) -> None:
        """Forget a closed library."""
        self._now.pop(path, None)
        self._before = tuple(library for library in self._before if library != path)

    def begin(self) -> None:
        """Begin a generation."""
        self._before = tuple(self._now)
        self._now = {}

    def keep(self) -> None:
        """Let the next generation open the same libraries as this one, if this one has used none."""
        self._now = self._now or dict.fromkeys(self._before)

    def clear(self) -> None:
        """Forget all, because a context failed while opening them, perhaps because of one library."""
        self._before, self._now = (), {}
