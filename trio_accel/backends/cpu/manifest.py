"""The libraries of the CPU backend, and the module of each."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping

from ..base.kernels import kernels_of, load_module_kernels
from .kit._library import CpuLibrary, Kernels
from .runtime._memory import CpuMemory

__all__ = ["LIBRARIES", "load_kernels", "open_library"]

BACKEND = "cpu"

# Imported with the library, because SciPy is slow to import.
LIBRARIES: Mapping[str, str] = {
    "arrays": ".libraries.arrays",
    "blas": ".libraries.blas",
    "fft": ".libraries.fft",
    "graphs": "._graphs",
    "jit": ".libraries.jit",
    "memory": ".libraries.memory",
    "program": ".libraries.program",
    "random": ".libraries.random",
    "solver": ".libraries.solver",
    "sparse": ".libraries.sparse",
}
"""By the names that library actors have for them."""

# Modules of SciPy import one another in circles, which two threads must not enter at different ends.
_importing = threading.Lock()


def open_library(name: str, memory: CpuMemory, device: str) -> CpuLibrary:
    """Open a library of a device; blocks.

    Args:
        name: One of `LIBRARIES`, or the import path of a module of kernels. A program has an argument behind
            it: ``"program?..."``.
        memory: Memory of the device.
        device: Name of the device.

    Raises:
        NotSupportedError: There is no such library.
    """
    library, separator, argument = name.partition("?")
    if not separator:
        return CpuLibrary(name, load_kernels(name, device), memory, device)
    module = importlib.import_module(LIBRARIES[library], __package__)
    opened: CpuLibrary = module.ProgramLibrary(library, argument, memory, device)
    return opened


def load_kernels(name: str, device: str = "cpu:0") -> Kernels:
    """Import a library's kernels; blocks.

    Raises:
        NotSupportedError: It is neither one of these nor a module that has kernels for this backend.
    """
    if name in LIBRARIES:
        with _importing:
            module = importlib.import_module(LIBRARIES[name], __package__)
        kernels = kernels_of(vars(module), BACKEND)
    else:
        kernels = load_module_kernels(name, BACKEND, LIBRARIES, device)
    return {spec: kernel.function for spec, kernel in kernels.items()}
