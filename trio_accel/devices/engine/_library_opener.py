"""Starting the actors of libraries on first use."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable

import attrs
import trio

from ...actors import Actor, Ref, Request, handles
from .._options import DeviceOptions
from ._engine import Engine
from ._library import LibraryActor
from ._recovery import recovery_policy

__all__ = ["LibraryOpener", "OpenLibrary", "load_library"]


@attrs.frozen
class OpenLibrary(Request["LibraryOpener", Ref[LibraryActor]]):
    """Start a library's actor, unless it runs already.

    Attributes:
        library: Import path, ``"package.module:Class"``.
        named_by: Operation or option that has the path, for errors.
    """

    library: str
    named_by: str


class LibraryOpener(Actor):
    """Supervises the library actors of one context: the part of its actor that is asked to start one.

    Args:
        options: Options of the device.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self._options = options
        # Both when the context is open.
        self._engine: Engine
        self._libraries: dict[str, Ref[LibraryActor]]

    @handles(OpenLibrary, ki_protected=True)
    async def open_library(self, message: OpenLibrary) -> Ref[LibraryActor]:
        """Start a library actor on first use."""
        libraries = self._libraries
        running = libraries.get(message.library)
        if running is not None and not running.is_terminated:
            return running
        if message.library.partition(":")[0] in sys.modules:
            actor_class = load_library(message.library, message.named_by)
        else:
            actor_class = await trio.to_thread.run_sync(load_library, message.library, message.named_by)
        options = self._options
        library = await self.context.spawn(
            actor_class,
            self._engine,
            name=_name_of(actor_class, message.library, libraries.values()),
            policy=recovery_policy(options, grace=options.close_grace),
        )
        libraries[message.library] = library
        return library


def _name_of(actor_class: type[LibraryActor], path: str, others: Iterable[Ref[LibraryActor]]) -> str:
    """The name of a library's actor in the tree.

    The actors of this package have the names of their libraries, whatever was opened before. One of a
    program's own has its import path, also where it launches with a library that has an actor here.
    """
    package = __name__.partition(".")[0]
    name = actor_class.library if actor_class.__module__.partition(".")[0] == package else path
    names = {ref.path.rpartition("/")[2] for ref in others if not ref.is_terminated}
    # An actor may be named by several import paths.
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in names)


def load_library(path: str, named_by: str) -> type[LibraryActor]:
    """Find the class of a library actor.

    Args:
        path: Its import path.
        named_by: Operation or option that has the path.

    Raises:
        ValueError: No import path, or one of __main__.
        TypeError: No such class.
        ImportError: No such module.
    """
    module, separator, name = path.partition(":")
    if not separator or module == "__main__":
        raise ValueError(
            f"{named_by}: library: {path!r} must be an import path 'package.module:Class' that any "
            "process can import, so no class of __main__"
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        text = f"{named_by}: library: {path!r} cannot be imported: {error}"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
    if not (isinstance(found, type) and issubclass(found, LibraryActor)):
        raise TypeError(f"{named_by}: library: {path!r} names no subclass of LibraryActor")
    return found
