"""Programs on the CPU backend: methods get NumPy arrays over the device's memory, in the stream's thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from ...base import DType
from ...base.ops import ArraySpec, ProgramCall, ProgramFetch, ProgramResult, ProgramReturn
from ...base.programs import ProgramHost
from ..kit._library import CpuLibrary, Kernel, Kernels
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work

__all__ = ["ProgramLibrary"]


class ProgramLibrary(CpuLibrary):
    """One program of an open device; blocks while its module is imported and its constructor runs.

    Args:
        name: Name of the library.
        argument: Text of its definition.
        memory: Memory of the device.
        device: Name of the device.
    """

    def __init__(self, name: str, argument: str, memory: CpuMemory, device: str) -> None:
        self._arrays = _Arrays(memory)
        self._host = ProgramHost(argument, self._arrays)
        call: Kernel = self._call
        kernels: Kernels = {
            ProgramCall: call,
            ProgramReturn: call,
            ProgramResult: self._tell,
            ProgramFetch: self._fetch,
        }
        super().__init__(name, kernels, memory, device)

    def close(self) -> None:
        """Let go of the program."""
        self._host.close()

    def _call(self, spec: ProgramCall, memory: CpuMemory) -> Work:
        view = self._arrays.view
        inputs = [view(array, write=False) for array in spec.read]
        updated = [view(array, write=True) for array in spec.updated]
        outputs = [view(array, write=True) for array in spec.written]
        return partial(self._host.call, spec, inputs, updated, outputs)

    def _tell(self, spec: ProgramResult, memory: CpuMemory) -> Work:
        return partial(self._host.tell, spec)

    def _fetch(self, spec: ProgramFetch, memory: CpuMemory) -> Work:
        outputs = [self._arrays.view(array, write=True) for array in spec.written]
        return partial(self._host.fetch, spec, outputs)


class _Arrays:
    """See `ProgramArrays`."""

    def __init__(self, memory: CpuMemory) -> None:
        self._memory = memory

    def view(self, array: ArraySpec, *, write: bool) -> HostArray:
        view = self._memory.view(array)
        view.flags.writeable = write
        return view

    def found(self, value: object) -> tuple[str, tuple[int, ...]] | None:
        if not (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")):
            return None
        array = _host(value)
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("a masked array; fill it first: array.filled(value)")
        return DType.of(array.dtype).value, array.shape

    def keep(self, value: object) -> HostArray:
        return np.array(_host(value))

    def copy(self, source: object, out: object) -> None:
        np.copyto(cast("HostArray", out), _host(source))

    def end(self, views: Sequence[object]) -> None:
        # A program may keep them, and their memory is another array's when this one is released.
        for view in cast("Sequence[HostArray]", views):
            view.flags.writeable = False


def _host(value: Any) -> HostArray:
    return cast("HostArray", value if isinstance(value, np.ndarray) else np.from_dlpack(value))
