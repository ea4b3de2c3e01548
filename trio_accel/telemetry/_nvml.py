"""GPUs as NVIDIA's management library (NVML) tells of them. All of it blocks, and may hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import attrs

from ..backends.base import NotSupportedError
from ..backends.base.modules import import_extra

__all__ = ["GpuProcess", "GpuReading", "XidEvent", "XidEvents", "nvml_library", "read_all"]

_TEMPERATURE_OF_GPU = 0
_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_DRIVER = 0
_XID = 8  # nvmlEventTypeXidCriticalError
_MOST_EVENTS = 100
_ADVICE = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": (
        "there is no NVIDIA driver here (libnvidia-ml.so.1 was not found); it is installed with the system, "
        "and not by pip; a container gets it from its host (docker run --gpus all)"
    ),
    "NVML_ERROR_DRIVER_NOT_LOADED": "the kernel module of the NVIDIA driver is not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "the NVIDIA driver's libraries and its kernel module differ in version, as after an update: reboot"
    ),
}


@attrs.frozen(kw_only=True)
class GpuProcess:
    """A process that has a context on a GPU.

    Attributes:
        pid: Its number, as the driver tells it.
        memory: Bytes of the GPU's memory that it takes; None if the driver does not tell.
        is_ours: Whether it is this program, or a worker of the system that was given.
    """

    pid: int
    memory: int | None
    is_ours: bool = False


@attrs.frozen(kw_only=True)
class XidEvent:
    """An error of a GPU that the driver has reported.

    Attributes:
        time: When it was noticed, in seconds since the epoch.
        number: Which error, as NVIDIA's list of Xid errors has it.
    """

    time: float
    number: int


@attrs.frozen(kw_only=True)
class GpuReading:
    """One GPU at one moment. What the hardware or the driver does not tell is None.

    Attributes:
        time: When it was read, in seconds since the epoch.
        index: Number of the GPU among all of the machine. ``CUDA_VISIBLE_DEVICES`` does not change it.
        uuid: What it is known by, such as ``"GPU-..."``.
        pci_bus_id: Where it is plugged in, such as ``"00000000:17:00.0"``.
        name: The product.
        memory_used: Bytes that are taken, by all processes and the driver.
        memory_total: Bytes that there are.
        utilization: Share of the last moments in which a kernel ran, in percent.
        memory_utilization: Share of them in which memory was read or written, in percent.
        power: Watts that it draws.
        power_limit: Watts that it may draw.
        temperature: Degrees Celsius.
        ecc_corrected: Errors of memory that were corrected, since the driver was loaded.
        ecc_uncorrected: Errors that were not.
        is_mig: Whether it is divided into instances (MIG). The reading is of the whole GPU nevertheless.
        processes: Processes with a context on it.
        devices: Paths of the system's open devices on it; None without a system.
        xids: The last errors that the driver reported while it was watched, the oldest first.
        error: Why nothing more is known, such as ``"GPU is lost"``.
    """

    time: float
    index: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    memory_utilization: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    is_mig: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None
    devices: tuple[str, ...] | None = None
    xids: tuple[XidEvent, ...] | None = None
    error: str | None = None


@contextmanager
def nvml_library() -> Generator[Any, None, None]:
    """The module `pynvml`, with the library ready. It counts who uses it, so this may be nested.

    Raises:
        NotSupportedError: The package or the driver is missing, or the library as a whole does not answer.
    """
    nvml: Any = import_extra("pynvml", "nvml")
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NotSupportedError(_why_not(nvml, error)) from error


def _why_not(nvml: Any, error: Any) -> str:
    for name, advice in _ADVICE.items():
        if error.value == getattr(nvml, name, None):
            return advice
    return f"the NVIDIA driver does not answer ({error}); see what `nvidia-smi` and the system's log say"


@attrs.define(eq=False)
class _Gpu:
    """Asks one GPU, until it is lost."""

    nvml: Any
    handle: Any
    error: str | None = None

    def ask(self, function: str, *args: object) -> Any:
        """What a function of NVML returns; None if that is not to be had."""
        if self.error is not None:
            return None
        try:
            return getattr(self.nvml, function)(self.handle, *args)
        except self.nvml.NVMLError as error:
            # Of what else may be wrong, such as a missing permission, this value alone suffers.
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                self.error = str(error)
        except (AttributeError, self.nvml.NVMLLibraryMismatchError):
            pass  # the package or the driver is too old for it
        return None


def read_all() -> tuple[GpuReading, ...]:
    """Read all GPUs of the machine, in the order of their numbers.

    Raises:
        NotSupportedError: As of `nvml_library`.
    """
    with nvml_library() as nvml:
        return tuple([_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])


def _read(nvml: Any, index: int) -> GpuReading:
    now = time.time()
    try:
        gpu = _Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError as error:
        return GpuReading(time=now, index=index, error=str(error))
    pci = gpu.ask("nvmlDeviceGetPciInfo")
    memory = gpu.ask("nvmlDeviceGetMemoryInfo")
    shares = gpu.ask("nvmlDeviceGetUtilizationRates")
    mode = gpu.ask("nvmlDeviceGetMigMode")
    processes = gpu.ask("nvmlDeviceGetComputeRunningProcesses")
    reading = GpuReading(
        time=now,
        index=index,
        uuid=gpu.ask("nvmlDeviceGetUUID"),
        pci_bus_id=pci and pci.busId,
        name=gpu.ask("nvmlDeviceGetName"),
        memory_used=memory and memory.used,
        memory_total=memory and memory.total,
        utilization=shares and shares.gpu,
        memory_utilization=shares and shares.memory,
        power=_watts(gpu.ask("nvmlDeviceGetPowerUsage")),
        power_limit=_watts(gpu.ask("nvmlDeviceGetEnforcedPowerLimit")),
        temperature=gpu.ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
        ecc_corrected=gpu.ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_DRIVER),
        ecc_uncorrected=gpu.ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_DRIVER),
        is_mig=None if mode is None else bool(mode[0]),
        processes=None if processes is None else tuple([_process(process) for process in processes]),
    )
    return attrs.evolve(reading, error=gpu.error)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _process(process: Any) -> GpuProcess:
    return GpuProcess(pid=process.pid, memory=process.usedGpuMemory)


@attrs.define(eq=False)
class XidEvents:
    """Errors that the driver reports of all GPUs, from the moment in which this is opened.

    Each GPU has an event set of its own: the sets queue, so no call has to wait for events.
    """

    report: Callable[[int, XidEvent], None]
    _nvml: Any = attrs.field(init=False)
    _sets: dict[int, Any] = attrs.field(init=False, factory=dict[int, Any])

    def open(self, nvml: Any) -> frozenset[int]:
        """Begin; returns the numbers of the GPUs that report."""
        self._nvml = nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                events = nvml.nvmlEventSetCreate()
            except nvml.NVMLError:
                continue
            try:
                nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), _XID, events)
            except nvml.NVMLError:
                self._free(events)
            else:
                self._sets[index] = events
        return frozenset(self._sets)

    def poll(self) -> None:
        """Report what has come."""
        for index, events in self._sets.items():
            for _ in range(_MOST_EVENTS):
                try:
                    data = self._nvml.nvmlEventSetWait_v2(events, 1)
                except self._nvml.NVMLError:  # there are no more, or the GPU is lost
                    break
                if data.eventType == _XID:
                    self.report(index, XidEvent(time=time.time(), number=int(data.eventData)))

    def close(self) -> None:
        """Give the event sets back."""
        for events in self._sets.values():
            self._free(events)
        self._sets.clear()

    def _free(self, events: Any) -> None:
        with suppress(self._nvml.NVMLError):  # it may have gone with its GPU
            self._nvml.nvmlEventSetFree(events)
