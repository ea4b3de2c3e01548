"""Descriptions of devices without opening them, and findings of backends on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

__all__ = ["BackendReport", "DeviceInfo", "DeviceReport", "Isolation", "Software", "choose"]

Isolation = Literal["process", "inline"]


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """Description of a device that need not be open.

    Attributes:
        backend: Name of its backend, such as ``"cpu"``.
        index: Number of the device within its backend.
        description: The vendor's name of the product.
        total_memory: Bytes of memory, of all its users together.
        compute_units: Processor cores or multiprocessors.
        isolations: Where its context can live, the default first.
        completion: How completions are best learned of: ``"callback"``, the stream notifies;
            ``"adaptive"``, events are polled for a short while first, since that costs less.
        is_exclusive: Whether it takes one context at a time.
        uuid: The hardware's name in other tools, such as ``"GPU-..."`` with NVIDIA's; None if it has none.
            Of a part of a GPU (MIG), it is that of the GPU.
    """

    backend: str
    index: int
    description: str
    total_memory: int
    compute_units: int
    isolations: tuple[Isolation, ...]
    completion: Literal["callback", "adaptive"] = "callback"
    is_exclusive: bool = False
    uuid: str | None = None

    @property
    def name(self) -> str:
        """The name that `open_device` takes, such as ``"cpu:0"``."""
        return f"{self.backend}:{self.index}"


@attrs.frozen(kw_only=True)
class Software:
    """A driver or a vendor's library that a backend computes with.

    Attributes:
        name: The vendor's name of it, such as ``"cuFFT"``.
        version: Its version; None where it is not there, or does not tell.
        source: How it came here, such as ``"wheel"`` or ``"system"``; None where it is not there.
        path: The file; None where it is not there, or is part of the system.
        needed_by: Libraries of the backend that need it; empty if every device does.
        problem: Why it cannot be used, and what to do about it, as what follows its name; None if it can.
    """

    name: str
    version: str | None = None
    source: str | None = None
    path: str | None = None
    needed_by: tuple[str, ...] = ()
    problem: str | None = None


@attrs.frozen(kw_only=True)
class DeviceReport:
    """A device, whether it can be used or not.

    Attributes:
        info: Its description.
        libraries: Names of the libraries that it has, sorted.
        properties: Further facts, as pairs of names and values.
        problem: Why it cannot be used, and what to do about it; None if it can.
    """

    info: DeviceInfo
    libraries: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    problem: str | None = None


@attrs.frozen(kw_only=True)
class BackendReport:
    """A kind of device.

    Attributes:
        name: Name of the backend.
        devices: By their number.
        software: Software that it computes with and that does not come with it.
        problem: Why it has no device that can be used, and what to do about it; None if it has one.
    """

    name: str
    devices: tuple[DeviceReport, ...] = ()
    software: tuple[Software, ...] = ()
    problem: str | None = None


def choose(
    devices: Iterable[DeviceInfo], backend: str, index: int, memory_limit: int | None
) -> tuple[DeviceInfo, int]:
    """Find the device to open, and the most bytes that its blocks may take.

    Args:
        devices: Those that can be opened.
        backend: Name of the backend.
        index: Number of the device.
        memory_limit: The limit that was asked for; None for all memory.

    Raises:
        ValueError: No device has that index, or the limit is negative.
    """
    found = {info.index: info for info in devices}
    if index not in found:
        names = ", ".join(info.name for info in found.values()) or "none"
        raise ValueError(f"index: there is no device {backend}:{index}; there is {names}")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit: {memory_limit} is negative")
    return found[index], found[index].total_memory if memory_limit is None else memory_limit
