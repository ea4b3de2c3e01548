"""The libraries of the CPU backend, and the module of each."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping

from ..base.kernels import kernels_of, load_module_kernels
from .kit._library import Kernels

__all__ = ["LIBRARIES", "is_loaded", "load_kernels"]

BACKEND = "cpu"

# Imported with the library, because SciPy is slow to import.
LIBRARIES: Mapping[str, str] = {
    "blas": ".libraries.blas",
    "fft": ".libraries.fft",
    "memory": ".libraries.memory",
    "random": ".libraries.random",
    "sparse": ".libraries.sparse",
}
"""By the names that library actors have for them."""


def is_loaded(name: str) -> bool:
    """Whether a library's kernels are imported."""
    return importlib.util.resolve_name(LIBRARIES.get(name, name), __package__) in sys.modules


def load_kernels(name: str, device: str = "cpu:0") -> Kernels:
    """Import a library's kernels; blocks.

    Raises:
        NotSupportedError: It is neither one of these nor a module that has kernels for this backend.
    """
    if name in LIBRARIES:
        kernels = kernels_of(vars(importlib.import_module(LIBRARIES[name], __package__)), BACKEND)
    else:
        kernels = load_module_kernels(name, BACKEND, LIBRARIES, device)
    return {spec: kernel.function for spec, kernel in kernels.items()}
