"""Import paths: of what another process is to find, and of library actors, with those that a device uses.

Those of library actors may have an argument, ``"package.module:Class?argument"``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


def why_not_found(target: Any) -> str | None:
    """Say why another process does not find a class or function by its module and name; None if it does."""
    module, name = target.__module__, target.__qualname__
    if module == "__main__":
        return "is defined in __main__, where it cannot be found by name; move it to a module that you import"
    if "<locals>" in name or "<lambda>" in name:
        return "is defined in a function; move it to the level of its module"
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return None if found is target else "is not what its module has under this name"


def argument_of(path: str) -> str | None:
    """Return the text behind the question mark; None without one."""
    _, separator, argument = path.partition("?")
    return argument if separator else None


@lru_cache(1024)
def title_of(path: str) -> str:
    """Return the title for people: the name that an argument begins with; the path without an argument."""
    argument = argument_of(path)
    return path if argument is None else argument.partition(" ")[0]


def by_title(counts: Mapping[str, T]) -> dict[str, T]:
    """Key values of libraries by their titles."""
    return {title_of(path): count for path, count in counts.items()}


def is_actor_of(path: str, actor_class: str, library: str) -> bool:
    """Tell whether this actor serves a library.

    Args:
        path: Its path in the tree.
        actor_class: Name of its class.
        library: Import path of the library.
    """
    if library.partition("?")[0].rpartition(":")[2] != actor_class:
        return False
    # One with an argument has a supervisor with the name.
    return argument_of(library) is None or path.split("/")[-2] == title_of(library)


class LibrariesInUse:
    """The libraries that completed an operation in one generation: the next one opens them ahead.

    So none is opened ahead that was asked for and could not be opened, or that ended its process.
    """

    def __init__(self) -> None:
        # The order is that of their first operations, in which they are opened.
        self._now: dict[str, None] = {}
        self._before: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Import paths of those of this generation; of the one before, until there are any."""
        return tuple(self._now) or self._before

    def add(self, path: str) -> None:
        """Note that a library has completed an operation."""
        self._now[path] = None

    def discard(self, path: str) -> None:
        """Forget a library that was closed."""
        self._now.pop(path, None)
        self._before = tuple(other for other in self._before if other != path)

    def begin(self) -> None:
        """Begin a generation."""
        self._before = tuple(self._now)
        self._now = {}

    def keep(self) -> None:
        """Have the next generation open what this one has opened ahead, where it has used nothing."""
        self._now = self._now or dict.fromkeys(self._before)

    def clear(self) -> None:
        """Forget all: a context that was to open them did not come up, perhaps because of one of them."""
        self._before, self._now = (), {}
