"""The public names of packages: each is written once, where it is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

# Parts of the package that programs import at first use, because they would be half of `import trio_accel`.
# While a device opens, a thread imports them all, so that no first use holds the loop.
LAZY_PARTS = (
    "linalg", "fft", "random", "graphs", "sparse", "jit", "nn", "signal", "ndimage", "spatial", "tables",
    "tensor", "gradients", "programs", "patterns", "weights", "collectives", "interop", "train", "telemetry",
    "http", "replay", "cluster", "agents", "testing",
)  # fmt: skip


class _Package(ModuleType):
    """A package whose `dir` has all public names, also those that are imported at their first use."""

    def __dir__(self) -> list[str]:
        names: list[str] = self.__dict__["__all__"]
        is_private = [name[0] == "_" and not name.endswith("__") for name in self.__dict__]
        there = [name for name, hidden in zip(self.__dict__, is_private, strict=True) if not hidden]
        return sorted({*names, *there})


class _RefusingPackage(_Package):
    """A package with a helpful error if a program calls it like a function."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"module {self.__name__!r} is not callable; {self.__dict__['_instead']}")


class _Later:
    """A module, imported at the first use of one of its names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


def later(module: str) -> Any:
    """Return an object with the names of a module, which it imports at the first use of one.

    A package takes the modules that only its functions need from here, so that its own import is short.
    """
    return _Later(module)


def export(package: str, *extra_names: str, instead: str = "") -> None:
    """Make all names that a package has imported so far its public names, except modules.

    Type checkers know them as they are: imported by ``*``, or by ``as`` the same name.

    Args:
        package: Name of the package.
        *extra_names: Other public names.
        instead: What to write if a program calls the package, because it has the name of a known function.
    """
    module = sys.modules[package]
    names = module.__dict__
    imported = [name for name, value in names.items() if name[0] != "_" and not isinstance(value, ModuleType)]
    names["__all__"] = sorted([*imported, *extra_names])
    names["_instead"] = instead
    # Completion in the interpreter adds a parenthesis to callable modules, so that few of them are.
    module.__class__ = _RefusingPackage if instead else _Package
