"""Which package has left behind what an import leaves behind, and what can be imported without it.

Loaded by the launcher with the first module that is tried. It must import nothing but the standard library.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Self

_SELF = "/proc/self"


class Watch:
    """Watches imports while it is entered: who imports whom, and after which import something is new."""

    def __init__(self) -> None:
        self._import = builtins.__import__
        self._import_module = importlib.import_module
        self._before = set(sys.modules)
        self._first = _things()
        # By what is left behind: the package whose code had run when it was first seen.
        self._blamed: dict[str, str] = {}
        # By package: those that it imports.
        self._needs: dict[str, set[str]] = {}

    def __enter__(self) -> Self:
        builtins.__import__ = self._watched
        importlib.import_module = self._watched_module
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        builtins.__import__ = self._import
        importlib.import_module = self._import_module

    def culprit(self, module: str, reason: str) -> str:
        """Name the package that is to blame for what is new; the module itself, if no other is."""
        kind = "task" if "thread" in reason else "fd"
        left = sorted(_things() - self._first)
        blamed = [self._blamed[thing] for thing in left if thing.startswith(kind) and thing in self._blamed]
        return blamed[0] if blamed else module

    def pieces(self, module: str, culprit: str) -> list[str]:
        """List what was imported, in order, without the module, the culprit and all that import it."""
        spoiled = {_top(culprit), _top(module)}
        while more := {name for name, needs in self._needs.items() if needs & spoiled} - spoiled:
            spoiled |= more
        left_out = spoiled | sys.stdlib_module_names
        return [
            name
            for name, found in tuple(sys.modules.items())
            if name not in self._before
            and _top(name) not in left_out
            and getattr(found, "__spec__", None) is not None
        ]

    def _watched(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  # as it is called
        locals: Mapping[str, Any] | None = None,  # noqa: A002  # the same
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = _top((globals or {}).get("__name__") or "")
        imported = _top(name) if level == 0 else importer
        with self._noted(importer, imported, name):
            return self._import(name, globals, locals, fromlist, level)

    def _watched_module(self, name: str, package: str | None = None) -> ModuleType:
        importer = _top(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        with self._noted(importer, _top(name) or _top(package or ""), name):
            return self._import_module(name, package)

    @contextmanager
    def _noted(self, importer: str, imported: str, name: str) -> Generator[None, None, None]:
        if importer != imported:
            self._needs.setdefault(importer, set()).add(imported)
        known = len(sys.modules)
        if name not in sys.modules:
            self._look(importer)
        try:
            yield
        finally:
            if len(sys.modules) != known:
                self._look(imported)

    def _look(self, package: str) -> None:
        for thing in _things() - self._first:
            self._blamed.setdefault(thing, package)


def _things() -> set[str]:
    """Threads and descriptors of this process, by number."""
    return {f"{kind} {name}" for kind in ("task", "fd") for name in os.listdir(f"{_SELF}/{kind}")}


def _top(name: str) -> str:
    return name.partition(".")[0]
