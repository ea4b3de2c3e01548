"""Kernels that lose the context, for tests of what happens then."""

from __future__ import annotations

import struct

from cuda.bindings import driver

from ._context import CudaContext
from ._kernels import Kernels

__all__ = ["CudaFaults"]

_ARGUMENTS = struct.Struct("<Qqq")
# Mapped nowhere.
_ILLEGAL = 16


class CudaFaults:
    """Launches a fault on a stream of its own."""

    def __init__(self, context: CudaContext, kernels: Kernels) -> None:
        self._context = context
        self._kernels = kernels

    def launch(self, name: str) -> None:
        """Launch ``fault_illegal_address``, ``fault_trap`` or ``fault_assert``; compiles it, which blocks."""
        function = self._kernels.function("faults", name, _ARGUMENTS.size)
        with self._context:
            stream = int(self._context.check(driver.cuStreamCreate(1)))
            with function as arguments:
                _ARGUMENTS.pack_into(arguments, 0, _ILLEGAL, 0, 0)
                function.launch(stream, 1)
