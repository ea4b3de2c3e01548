"""The CUDA backend: NVIDIA's GPUs, by cuda-python and nvmath-python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..base import (
    AccelBackend,
    BackendReport,
    ChunkKeeper,
    CollectiveLibrary,
    DeviceInfo,
    DeviceLink,
    DeviceReport,
    DriverError,
    NotSupportedError,
    OutOfMemoryError,
    Software,
    Strs,
)
from ..base.contract.device_info import choose
from ..base.kit.modules import import_ahead
from ._installed import Installed, installed
from ._links import find_links
from ._probe import DeviceFacts, ProbeResult, probe, taken
from .manifest import LIBRARIES, NCCL

if TYPE_CHECKING:
    from ._device import CudaDevice


class CudaBackend(AccelBackend):
    """Computes with NVIDIA's libraries. Nothing of CUDA is imported before a device is opened."""

    def __init__(self) -> None:
        self._is_worker = False

    @property
    def name(self) -> str:
        """``"cuda"``."""
        return "cuda"

    @property
    def preload(self) -> Strs:
        """Modules that take most of a worker's start to import."""
        # D70: the launcher imports them and then forks. They must not call the driver, because an initialised
        # driver does not survive a fork.
        return (
            "trio_accel.backends.cuda._device",
            *(f"{__package__}{library.module}" for library in LIBRARIES.values()),
            "trio_accel.backends.cuda._loaded",
            "cuda.core.utils",
        )

    @property
    def collectives(self) -> CollectiveLibrary:
        """NCCL."""
        return NCCL

    @property
    def driver_check(self) -> str:
        """A file that asks whether CUDA was initialised."""
        return str(Path(__file__).with_name("_probe_process.py"))

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Describe the usable GPUs; child processes query the driver and look for libraries."""
        return tuple(device.info for device in self._detect()[1] if device.problem is None)

    def unavailable_reason(self, index: int | None = None) -> str | None:
        """Return why there is no usable GPU, or why the given one is not usable, with the remedy."""
        findings, devices, libraries = self._detect()
        if index is not None:
            return next((device.problem for device in devices if device.info.index == index), None)
        if findings.reason is not None or libraries is None:
            return findings.reason
        if any(device.problem is None for device in devices):
            return None
        return libraries.reason or devices[0].problem

    def describe(self) -> BackendReport:
        """Describe the GPUs, the driver and CUDA's libraries."""
        findings, devices, libraries = self._detect()
        driver = Software(
            name="NVIDIA driver",
            version=findings.driver,
            source=None if findings.version is None else "system",
            problem=None if findings.devices else findings.reason,
        )
        software = () if libraries is None else libraries.software
        problem = self.unavailable_reason()
        return BackendReport(name=self.name, devices=devices, software=(driver, *software), problem=problem)

    def links(self) -> tuple[DeviceLink, ...]:
        """Return the links between GPUs and to the processor; a child process queries the driver."""
        return find_links([facts.info for facts in self._detect()[0].devices])

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> CudaDevice:
        """Open a device; see `AccelBackend.open_device`.

        Raises:
            ValueError: No device has that index, or the limit is negative.
            NotSupportedError: There is a keeper, and the device cannot export memory; or another process
                has the device for itself.
            OutOfMemoryError: There is not enough memory left for a context.
        """
        info, limit = choose(self.list_devices(), self.name, index, memory_limit)
        findings, _, libraries = self._detect()
        facts = findings.devices[index]
        assert libraries is not None  # there is a device that can be used
        if keeper is not None and not facts.keeps_memory:
            raise NotSupportedError(
                f"{facts.info.description} cannot export memory to other processes; use isolation='inline'",
                backend=self.name,
                device=info.name,
            )
        if keeper is None:
            import_ahead(self.preload)
        return _open(info, limit, facts, libraries, keeper)

    def prepare_worker(self) -> None:
        """Ask the driver in this process."""
        self._is_worker = True

    def _detect(self) -> tuple[ProbeResult, tuple[DeviceReport, ...], Installed | None]:
        """Find the devices; libraries are looked for where a device could use them."""
        findings = probe(is_worker=self._is_worker)
        libraries = None
        if findings.version is not None and findings.devices:
            libraries = installed(findings.version, is_worker=self._is_worker)
        devices = tuple(_report(facts, libraries) for facts in findings.devices)
        return findings, devices, libraries


def _report(facts: DeviceFacts, libraries: Installed | None) -> DeviceReport:
    problem = facts.why_not
    if problem is None and libraries is not None:
        problem = libraries.reason or libraries.refusal(facts.info.description, facts.capability)
    major, minor = facts.capability
    return DeviceReport(
        info=facts.info,
        libraries=() if problem is not None or libraries is None else libraries.libraries,
        properties=(("compute capability", f"{major}.{minor}"), ("compute mode", facts.mode)),
        problem=problem,
    )


def _open(
    info: DeviceInfo, limit: int, facts: DeviceFacts, libraries: Installed, keeper: ChunkKeeper | None
) -> CudaDevice:
    from ._device import CudaDevice
    from .runtime._context import CudaMemoryError

    try:
        return CudaDevice(info, limit, facts.architecture, libraries, keeper)
    except DriverError as error:
        # Another process was quicker, in a mode that allows one.
        if error.code != "CUDA_ERROR_DEVICE_UNAVAILABLE":
            raise
        raise NotSupportedError(taken(facts.info.description), backend="cuda", device=info.name) from error
    except CudaMemoryError as error:
        raise OutOfMemoryError(
            "too little memory is free for a context; `nvidia-smi` shows which processes use it",
            device=info.name,
            requested=0,
            free=0,
            total=info.total_memory,
        ) from error
