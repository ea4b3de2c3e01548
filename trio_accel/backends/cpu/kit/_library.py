"""A kernel library of the CPU backend: a table of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ...base import AccelError, AccelStream, NotSupportedError
from ...base.ops import OperationSpec, Peers
from ..runtime._memory import CpuMemory
from ..runtime._stream import CpuStream, Work

__all__ = ["CpuLibrary", "Kernel", "Kernels"]

Kernel: TypeAlias = Callable[[Any, CpuMemory], Work]
"""Prepares an operation in the event loop's thread, quickly: ``kernel(spec, memory)``.

It takes views of the arrays by `CpuMemory.view`, refuses what it cannot do (`NotSupportedError`,
`LibraryError`), and returns the work: a callable without arguments for the stream's thread. The work fills
the outputs, and the status words if the specification has any.
"""

Kernels: TypeAlias = Mapping[type[OperationSpec], Kernel]
"""What a library has: its operations, each with its kernel."""


class CpuLibrary:
    """One library of an open device."""

    def __init__(self, name: str, kernels: Kernels, memory: CpuMemory, device: str) -> None:
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

    def prepare(self, spec: OperationSpec) -> None:
        """Nothing: what an operation plans, it plans on its stream."""

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"stream: the CPU backend enqueues on its own streams, not on {stream!r}")
        kernel = self._kernels.get(spec.operation)
        if kernel is None:
            raise NotSupportedError(
                f"the CPU backend's library {self._name!r} has no {type(spec).__name__}",
                backend="cpu",
                device=self._device,
            )
        try:
            work = kernel(spec, self._memory)
            if not callable(work):
                raise TypeError(
                    f"the kernel {getattr(kernel, '__qualname__', kernel)} of library {self._name!r} must "
                    f"return its work, a callable without arguments, got {type(work).__name__}"
                )
        except AccelError as error:
            error.device = self._device
            raise
        described = spec.descriptor()
        if described.peers:
            work = partial(_run_with_peers, getattr(spec, described.peers), work)
        judged = spec if described.has_status else None
        stream.enqueue(partial(_run, work, self._memory, judged))

    def close(self) -> None:
        """Give handles back: there are none."""


def _run_with_peers(peers: Peers, work: Work) -> None:
    """Run a part of an operation that spans devices, unless another part has failed."""
    if peers.failure is None:
        work()


def _run(work: Work, memory: CpuMemory, judged: OperationSpec | None) -> None:
    """Run an operation, and look at its status words if it has any."""
    try:
        work()
        if judged is not None:
            judged.check_status()
    except MemoryError as error:
        # What a kernel needs for itself: NumPy tells how much, others do not.
        shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
        requested = math.prod(shape) * dtype.itemsize if isinstance(dtype, np.dtype) else 0
        raise memory.exhausted(requested) from error
