"""The libraries of the backend, and the module of each."""

from __future__ import annotations

from collections.abc import Mapping

from trio_accel.backends.base.kit.library import LibraryEntry

BACKEND = "torch"
_FOLDER = f"{__package__}.libraries"
_OF_FUNCTIONS = ("arrays", "blas", "blaslt", "dnn", "fft", "jit", "random", "solver", "tensor")

LIBRARIES: Mapping[str, LibraryEntry] = {
    **{name: LibraryEntry(f"{_FOLDER}.{name}") for name in _OF_FUNCTIONS},
    "graphs": LibraryEntry(f"{_FOLDER}.graphs", "GraphLibrary"),
    "memory": LibraryEntry(f"{_FOLDER}.memory", "MemoryLibrary"),
    "program": LibraryEntry(f"{_FOLDER}.program", "ProgramLibrary"),
}
"""By the names that library actors have for them."""

MISSING = ("sparse",)
"""Libraries of the package's backends that this one lacks. A module of the same name is none of them."""
