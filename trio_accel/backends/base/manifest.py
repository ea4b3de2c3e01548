"""What a backend says of each of its libraries, and how one is found by its name."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType

import attrs

__all__ = ["LibraryEntry"]

# Modules of SciPy import one another in circles, which two threads must not enter at different ends.
_importing = threading.Lock()


@attrs.frozen
class LibraryEntry:
    """A library of a backend.

    Attributes:
        module: Its module, below the backend's package.
        cls: Its class in that module; empty where the module's kernels are functions.
        needs: What the vendor must have installed for it, as the backend names it; empty for nothing.
    """

    module: str
    cls: str = ""
    needs: str = ""

    def load(self, package: str | None) -> ModuleType:
        """Import the module; blocks.

        Args:
            package: Of the backend.

        Raises:
            ImportError: It, or what it needs, cannot be imported.
        """
        with _importing:
            return importlib.import_module(self.module, package)
