"""Which libraries the CPU backend has, and the module of each."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import cast

from .kit._library import Kernels

__all__ = ["is_loaded", "library_names", "load_kernels"]

# Module of each library; imported with the library, because SciPy is slow to import.
_MODULES = {
    "blas": ".libraries.blas",
    "fft": ".libraries.fft",
    "memory": ".libraries.memory",
    "random": ".libraries.random",
    "sparse": ".libraries.sparse",
}


def library_names() -> tuple[str, ...]:
    """Names of the libraries, sorted."""
    return tuple(sorted(_MODULES))


def is_loaded(name: str) -> bool:
    """Whether a library's kernels are imported."""
    module = _MODULES.get(name)
    return module is not None and importlib.util.resolve_name(module, __package__) in sys.modules


def load_kernels(name: str) -> Kernels:
    """Import a library's kernels."""
    module = importlib.import_module(_MODULES[name], __package__)
    return cast("Kernels", module.KERNELS)
