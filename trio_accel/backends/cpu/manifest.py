"""The libraries of the CPU backend, and the module of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ..base.kit.kernels import KernelEntry, kernels_of, load_module_kernels
from ..base.kit.library import ComputingDevice, LibraryEntry
from .kit._library import CpuLibrary

BACKEND = "cpu"
# Libraries without a state of their own, which consist only of kernels.
_OF_KERNELS = ("arrays", "blas", "blaslt", "dnn", "fft", "jit", "random", "solver", "sparse", "tensor")

# Imported with the library, because SciPy is slow to import.
LIBRARIES: Mapping[str, LibraryEntry] = {
    **{name: LibraryEntry(f".libraries.{name}") for name in _OF_KERNELS},
    "graphs": LibraryEntry(".libraries.graphs", "CpuGraphLibrary"),
    "memory": LibraryEntry(".libraries.memory", "CpuMemoryLibrary"),
    "program": LibraryEntry(".libraries.program", "CpuProgramLibrary"),
}
"""By the names that library actors have for them."""


def open_library(name: str, device: ComputingDevice) -> CpuLibrary:
    """Open a library of a device; blocks.

    Args:
        name: One of `LIBRARIES`, or the import path of a kernel module. A program's name has an argument:
            ``"program?..."``.
        device: The device.

    Raises:
        NotSupportedError: The library does not exist.
    """
    key, separator, argument = name.partition("?")
    if key not in LIBRARIES:
        return CpuLibrary(name, device, load_module_kernels(name, BACKEND, LIBRARIES, device.info.name))
    module, kernels = load_library(key)
    entry = LIBRARIES[key]
    cls = getattr(module, entry.cls) if entry.cls else CpuLibrary
    library: CpuLibrary = cls(key, device, kernels, *([argument] if separator else []))
    return library


def load_library(name: str) -> tuple[ModuleType, Mapping[str, KernelEntry]]:
    """Import a library of the backend; blocks.

    Returns:
        Its module, and the kernels in it.

    Raises:
        ImportError: The module, or one that it needs, cannot be imported.
    """
    module = LIBRARIES[name].load(__package__)
    return module, kernels_of(vars(module), BACKEND)
