"""Programs on the CPU backend: methods get NumPy arrays over the device's memory, in the stream's thread."""

from __future__ import annotations

from collections.abc import Mapping

from ...base import ops
from ...base.kit.kernels import KernelCall, KernelEntry, kernel
from ...base.kit.library import ComputingDevice
from ...base.kit.programs import HostProgramArrays, ProgramHost
from ..kit._library import CpuLibrary


class CpuProgramLibrary(CpuLibrary):
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
        self._host = ProgramHost(argument, HostProgramArrays(device))
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
