"""Reading GPUs without their workers, by NVIDIA's management library (NVML).

All calls of the library block, and may hang: they are made in a thread, and the loop does not wait for it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import System, running_beside
from ..backends.base import NotSupportedError
from ..backends.base.kit.modules import import_extra
from ..devices import System as DeviceSystem
from ._snapshot import check_interval

__all__ = ["GpuProcess", "GpuReading", "GpuWatch", "XidEvent", "read_gpus", "watch_gpus"]

T = TypeVar("T")

_KEPT = 50
# Seconds for which the end waits for a library that may hang.
_PATIENCE = 0.5
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
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("the one call of NVML at a time")


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
    """One GPU at one moment. Values that the hardware or the driver does not tell are None.

    Attributes:
        time: When it was read, in seconds since the epoch.
        index: Number of the GPU among all of the machine. ``CUDA_VISIBLE_DEVICES`` does not change it.
        uuid: Its id in NVIDIA's tools, such as ``"GPU-..."``.
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


async def read_gpus(system: System | None = None) -> tuple[GpuReading, ...]:
    """Read memory, utilization, power, temperature and errors of all NVIDIA GPUs of the machine.

    Needs the extra ``nvml``. The figures come from the driver, by NVIDIA's management library (NVML), and not
    from a worker: they are to be had while a worker is dead or hangs. The library is called in a thread, one
    call at a time, so the loop goes on. If it hangs, this waits, and can be cancelled; the program can end.

    NVML knows nothing of ``CUDA_VISIBLE_DEVICES``. Open devices are matched with GPUs by their UUID.

    Args:
        system: Whose devices and worker processes are named in the readings.

    Returns:
        One reading for each GPU, in the order of NVML's numbers.

    Raises:
        NotSupportedError: The package or the driver is missing; the error says which.
    """
    readings = await _call(_read_all)
    return tuple(_placed(readings, system))


class GpuWatch:
    """Reads GPUs again and again. Made by `watch_gpus`.

    Attributes:
        interval: Seconds between two readings.
        failure: Why the last attempt gave no readings; None if it did.
    """

    def __init__(self, interval: float, system: System | None) -> None:
        self.interval: float = interval
        self._system = system
        self._latest: tuple[GpuReading, ...] = ()
        self._read_at = time.monotonic()
        self.failure: str | None = None
        # The rest belongs to the one call of the library.
        self._held = ExitStack()
        self._events = _XidEvents()
        self._has_ended = False

    @property
    def latest(self) -> tuple[GpuReading, ...]:
        """The last readings, one for each GPU; never empty if there are GPUs."""
        seen = {index: tuple(events.copy()) for index, events in self._events.seen.items()}
        return tuple([attrs.evolve(one, xids=seen.get(one.index)) for one in self._latest])

    @property
    def age(self) -> float:
        """Seconds since the last readings. It grows if the library hangs, or fails."""
        return time.monotonic() - self._read_at

    async def begin(self) -> None:
        """Begin to see errors, and read for the first time."""
        await _call(self._open)
        await self.read()

    async def read(self) -> None:
        """Read once."""
        readings = await _call(self._read)
        self._latest = tuple(_placed(readings, self._system))
        self._read_at, self.failure = time.monotonic(), None

    @enable_ki_protection
    async def sample(self) -> None:
        """Read for ever."""
        while True:
            await trio.sleep(self.interval)
            try:
                await self.read()
            except Exception as error:  # noqa: BLE001  # the next attempt may do better
                self.failure = str(error) or type(error).__name__

    async def end(self) -> None:
        """Let the library go; not now, if it hangs."""
        self._has_ended = True
        with trio.move_on_after(_PATIENCE, shield=True):
            await _call(self._held.close)

    def _open(self) -> None:
        nvml = self._held.enter_context(_nvml_library())
        self._held.callback(self._events.close)
        self._events.open(nvml)
        self._close_if_ended()

    def _read(self) -> tuple[GpuReading, ...]:
        try:
            self._events.poll()
            return _read_all()
        finally:
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        # This call was cancelled, and its caller does not wait for it any more.
        if self._has_ended:
            self._held.close()


@asynccontextmanager
@enable_ki_protection
async def watch_gpus(
    interval: float = 1.0, *, system: System | None = None
) -> AsyncGenerator[GpuWatch, None]:
    """Read all NVIDIA GPUs of the machine again and again, inside the ``async with``.

    As `read_gpus`, in the background; the first readings are there at the begin. Besides, errors that the
    driver reports (Xid) are seen from then on, and come with the readings. They are noticed with the next
    reading, and the last 50 of a GPU are kept. If the library hangs later, `GpuWatch.latest` stays as it is
    and `GpuWatch.age` grows; the end waits for at most half a second.

    Args:
        interval: Seconds between two readings, 0.1 to 60.
        system: Whose devices and worker processes are named in the readings.

    Raises:
        ValueError: The interval is no such number.
        NotSupportedError: The package or the driver is missing; the error says which.
    """
    watch = GpuWatch(check_interval(interval), system)
    try:
        await watch.begin()
        async with running_beside(watch.sample):
            yield watch
    finally:
        await watch.end()  # noqa: ASYNC102  # what it waits for is bounded


async def _call(function: Callable[[], T]) -> T:
    """Call what blocks, one at a time in this run; who is cancelled leaves it alone."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


def _placed(readings: tuple[GpuReading, ...], system: System | None) -> Iterator[GpuReading]:
    """Yield the readings, with facts of this program."""
    pids = {os.getpid()}
    devices: dict[str, list[str]] = {}
    if system is not None:
        pids |= {actor.pid for actor in system.tree().walk() if actor.pid is not None}
    if isinstance(system, DeviceSystem):
        for device in system.devices:
            if device.info.uuid is not None:
                devices.setdefault(device.info.uuid.lower(), []).append(device.path)
    for reading in readings:
        there = reading.processes
        marked = there and tuple([attrs.evolve(one, is_ours=one.pid in pids) for one in there])
        uuid = None if system is None else reading.uuid
        paths = None if uuid is None else tuple(devices.get(uuid.lower(), ()))
        yield attrs.evolve(reading, processes=marked, devices=paths)


@contextmanager
def _nvml_library() -> Generator[Any, None, None]:
    """Yield the module `pynvml`, with the library ready. It counts its users, so this may be nested.

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
        """Call a function of NVML; None if the driver does not have its value."""
        if self.error is not None:
            return None
        try:
            return getattr(self.nvml, function)(self.handle, *args)
        except self.nvml.NVMLError as error:
            # Other errors, such as a missing permission, cost this value alone.
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                self.error = str(error)
        except (AttributeError, self.nvml.NVMLLibraryMismatchError):
            pass  # the package or the driver is too old for it
        return None


def _read_all() -> tuple[GpuReading, ...]:
    """Read all GPUs of the machine, in the order of their numbers.

    Raises:
        NotSupportedError: See `_nvml_library`.
    """
    with _nvml_library() as nvml:
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
        processes=None
        if processes is None
        else tuple([GpuProcess(pid=one.pid, memory=one.usedGpuMemory) for one in processes]),
    )
    return attrs.evolve(reading, error=gpu.error)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


@attrs.define(eq=False)
class _XidEvents:
    """Errors that the driver reports of all GPUs, from the moment in which this is opened.

    Each GPU has an event set of its own: the sets queue, so no call has to wait for events.

    Attributes:
        seen: The last ones, by the numbers of the GPUs that report.
    """

    seen: dict[int, deque[XidEvent]] = attrs.field(init=False, factory=dict[int, "deque[XidEvent]"])
    _nvml: Any = attrs.field(init=False)
    _sets: dict[int, Any] = attrs.field(init=False, factory=dict[int, Any])

    def open(self, nvml: Any) -> None:
        """Begin."""
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
                self.seen[index] = deque(maxlen=_KEPT)

    def poll(self) -> None:
        """Report what has come."""
        for index, events in self._sets.items():
            for _ in range(_MOST_EVENTS):
                try:
                    data = self._nvml.nvmlEventSetWait_v2(events, 1)
                except self._nvml.NVMLError:  # there are no more, or the GPU is lost
                    break
                if data.eventType == _XID:
                    self.seen[index].append(XidEvent(time=time.time(), number=int(data.eventData)))

    def close(self) -> None:
        """Give the event sets back."""
        for events in self._sets.values():
            self._free(events)
        self._sets.clear()

    def _free(self, events: Any) -> None:
        with suppress(self._nvml.NVMLError):  # it may have gone with its GPU
            self._nvml.nvmlEventSetFree(events)
