"""Imports of optional modules, in advance of their use, and in other processes."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import ModuleType

from ..contract.errors import NotSupportedError

# Modules of SciPy import one another in circles, which two threads must not enter at different ends.
_importing = threading.Lock()


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of a package that an extra brings.

    Raises:
        NotSupportedError: It is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise NotSupportedError(
            f"the package {package} cannot be imported ({error}); pip install '.[{extra}]' in a checkout"
        ) from error


def deferred_extra(module: str, extra: str) -> Callable[[], ModuleType]:
    """Return a function that imports a module of an extra, so that a thread does it at the first use.

    Raises:
        NotSupportedError: It is not installed; the error names the extra.
    """
    if importlib.util.find_spec(module) is None:
        # This raises the error, because nothing can be imported.
        import_extra(module, extra)
    return partial(import_extra, module, extra)


def import_alone(module: str, package: str | None = None) -> ModuleType:
    """Import a module while no other thread imports one by this function; blocks."""
    with _importing:
        return importlib.import_module(module, package)


def import_ahead(modules: Iterable[str]) -> None:
    """Import the modules of libraries when a device is opened, before their first operations; blocks.

    Such an import holds the interpreter's lock for many milliseconds, in any thread, and a program with an
    open device serves others meanwhile. A worker is the fork of a process that has done these imports, or has
    nobody else to serve.
    """
    for module in modules:
        # A failed import is not an error until a program asks for the library.
        with suppress(ImportError):
            import_alone(module)


def search_path() -> list[str]:
    """Return `sys.path` for a process that this one starts.

    A path object becomes a string; entries that are not paths are left out. Entries that depend on the
    working directory, including "", come last, because that directory may have changed, and its files must
    never be taken for modules of the standard library or of an installed package.
    """
    entries = [text for entry in sys.path if (text := _as_text(entry)) is not None]
    return sorted(entries, key=lambda entry: not os.path.isabs(entry))


def _as_text(entry: object) -> str | None:
    try:
        # The type of `sys.path` allows strings only, but programs put other objects in.
        return os.fsdecode(entry)  # type: ignore[arg-type]
    except TypeError:
        return None
