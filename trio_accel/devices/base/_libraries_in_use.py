"""Which libraries a device uses."""

from __future__ import annotations

__all__ = ["LibrariesInUse"]


class LibrariesInUse:
    """The libraries that completed an operation in one generation: the next one opens them ahead.

    So none is opened ahead that was asked for and could not be opened, or that ended its process.
    """

    def __init__(self) -> None:
        # In the order of their first operations, which is the order in which they are opened.
        self._now: dict[str, None] = {}
        self._before: tuple[str, ...] = ()

    def __contains__(self, path: str) -> bool:
        """Whether the library of an import path was used in this generation."""
        return path in self._now

    @property
    def paths(self) -> tuple[str, ...]:
        """Import paths of those of this generation; of the one before, until there are any."""
        return tuple(self._now) or self._before

    def add(self, path: str) -> None:
        """A library has completed an operation."""
        self._now[path] = None

    def discard(self, path: str) -> None:
        """A library was closed."""
        self._now.pop(path, None)
        self._before = tuple(other for other in self._before if other != path)

    def begin(self) -> None:
        """A generation begins."""
        self._before = tuple(self._now)
        self._now = {}

    def clear(self) -> None:
        """A context that was to open them did not come up, perhaps because of one of them."""
        self._before, self._now = (), {}
