"""A kernel library of the CPU backend: a table of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from ..base import AccelStream, NotSupportedError
from ..base.ops import OperationSpec
from ._memory import CpuMemory
from ._stream import CpuStream, Work

__all__ = ["CpuLibrary", "Kernel", "library_names", "load_kernels"]

Kernel: TypeAlias = Callable[[Any, CpuMemory], Work]
"""Prepares an operation in the caller's thread: takes its specification, checks what it cannot
do (`NotSupportedError`, `LibraryError`), and returns the work for the stream's thread."""

# Module of each library; imported with the library, because SciPy is slow to import.
_MODULES = {"memory": ".kernels.memory"}


class CpuLibrary:
    """One library of an open device."""

    def __init__(
        self, name: str, kernels: Mapping[type[OperationSpec], Kernel], memory: CpuMemory, device: str
    ) -> None:
        self._name = name
        self._kernels = kernels
        self._memory = memory
        self._device = device

    @property
    def name(self) -> str:
        """Name of the library."""
        return self._name

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        """Specifications that `enqueue` takes."""
        return frozenset(self._kernels)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"stream: the CPU backend enqueues on its own streams, not on {stream!r}")
        kernel = self._kernels.get(type(spec))
        if kernel is None:
            raise self._not_supported(f"library {self._name!r} has no {type(spec).__name__}", spec)
        try:
            work = kernel(spec, self._memory)
        except NotSupportedError as error:
            error.device, error.operation = self._device, self._operation(spec)
            raise
        stream.enqueue(work)

    def close(self) -> None:
        """Give handles back: there are none."""

    def _operation(self, spec: OperationSpec) -> str:
        return f"{self._name}.{type(spec).__name__.removesuffix('Spec')}"

    def _not_supported(self, message: str, spec: OperationSpec) -> NotSupportedError:
        return NotSupportedError(
            f"the CPU backend's {message}",
            backend="cpu",
            device=self._device,
            operation=self._operation(spec),
        )


def library_names() -> tuple[str, ...]:
    """Names of the libraries, sorted."""
    return tuple(sorted(_MODULES))


def load_kernels(name: str) -> Mapping[type[OperationSpec], Kernel]:
    """Import a library's kernels."""
    module = importlib.import_module(_MODULES[name], __package__)
    return cast("Mapping[type[OperationSpec], Kernel]", module.KERNELS)
