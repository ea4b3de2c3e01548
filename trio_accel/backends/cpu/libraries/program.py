"""Programs on the CPU backend: methods get NumPy arrays over the device's memory, in the stream's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from weakref import ref

import numpy as np

from ...base import DType, HostArray, Ints, ops
from ...base.kit.kernels import KernelCall, KernelEntry, kernel
from ...base.kit.lent import Lent
from ...base.kit.library import ComputingDevice
from ...base.kit.programs import ProgramHost
from ...base.kit.ranks import RoomRank
from ..kit._library import CpuLibrary


class ProgramLibrary(CpuLibrary):
    """One program of an open device; blocks while its module is imported and its constructor runs.

    Args:
        name: Name of the library.
        device: The device.
        kernels: None but its own.
        argument: Text of its definition.
    """

    def __init__(
        self, name: str, device: ComputingDevice, kernels: Mapping[str, KernelEntry], argument: str
    ) -> None:
        super().__init__(name, device, kernels)
        self._host = ProgramHost(argument, _Arrays(device))
        self.import_seconds: float = self._host.import_seconds

    def close(self) -> None:
        """Let go of the program."""
        self._host.close()

    @kernel(ops.ProgramCall, backend="cpu")
    @kernel(ops.ProgramReturn, backend="cpu")
    @kernel(ops.ProgramNext, backend="cpu")
    def _call(self, spec: ops.ProgramCall, call: KernelCall) -> None:
        self._host.call(spec)

    @kernel(ops.ProgramResult, backend="cpu")
    def _tell(self, spec: ops.ProgramResult, call: KernelCall) -> None:
        self._host.tell(spec)

    @kernel(ops.ProgramFetch, backend="cpu")
    def _fetch(self, spec: ops.ProgramFetch, call: KernelCall) -> None:
        self._host.fetch(spec)


class _Arrays:
    """See `ProgramArrays`."""

    def __init__(self, device: ComputingDevice) -> None:
        self._device = device

    def view(self, array: ops.ArraySpec, *, write: bool) -> HostArray:
        return self._device.host_view(array, write=write)

    def found(self, value: object) -> tuple[str, Ints] | None:
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

    def protect(self, views: Sequence[object], *, write: bool) -> None:
        for view in cast("Sequence[HostArray]", views):
            # A view of an argument that was lent for reading stays as it is.
            with suppress(ValueError):
                view.flags.writeable = write

    def end(self, views: Sequence[object]) -> Sequence[Lent]:
        # A program may keep them, and their memory is another array's when this one is released.
        self.protect(views, write=False)
        return [ref(view.base) for view in cast("Sequence[HostArray]", views)]

    def rank(self, meeting: Mapping[str, Any], asker: ops.Asker) -> RoomRank:
        return RoomRank(meeting, asker)

    def when_done(self, look: Callable[[], None]) -> None:
        look()


def _host(value: Any) -> HostArray:
    return cast("HostArray", value if isinstance(value, np.ndarray) else np.from_dlpack(value))
