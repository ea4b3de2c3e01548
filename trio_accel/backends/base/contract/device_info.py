"""Descriptions of devices, of backends and their software, and of the links between devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs

from .dtypes import Strs

__all__ = [
    "BackendReport",
    "DeviceInfo",
    "DeviceLink",
    "DeviceReport",
    "Isolation",
    "LinkKind",
    "Software",
    "Topology",
]

LinkKind = Literal["nvlink", "pcie", "host"]

_KINDS = {"nvlink": "NVLink", "pcie": "PCIe", "host": "host"}


@attrs.frozen(kw_only=True)
class DeviceLink:
    """The link between two devices. ``str()`` is its kind, such as ``"NVLink"``.

    Attributes:
        devices: Names of both devices, in the order of `Topology.devices`.
        kind: How data is transferred: ``"nvlink"``; ``"pcie"``, without a stop in host memory; or ``"host"``,
            by copies in host memory.
        has_peer_access: Whether each device can access the memory of the other on its own.
        rank: The driver's rank of the link among the links of the machine, 0 for the fastest; None without a
            rank.
    """

    devices: tuple[str, str]
    kind: LinkKind
    has_peer_access: bool = False
    rank: int | None = None

    def __str__(self) -> str:
        return _KINDS[self.kind]


@attrs.frozen(kw_only=True)
class Topology:
    """The devices of a machine, and the ways between them. ``str()`` is a table of the ways.

    Attributes:
        devices: The devices that can be opened, the best first.
        links: One for each pair, in the order of the devices.
    """

    devices: tuple[DeviceInfo, ...]
    links: tuple[DeviceLink, ...]

    @classmethod
    def of(cls, devices: Iterable[DeviceInfo], links: Iterable[DeviceLink]) -> Topology:
        """Make a topology of the links that backends report; other pairs are linked by host memory.

        Args:
            devices: The devices.
            links: Links, with the devices of each in any order. Links of other devices are left out.
        """
        devices = tuple(devices)
        link_by_pair = {frozenset(link.devices): link for link in links}
        all_links: list[DeviceLink] = []
        for position, first in enumerate(devices):
            for second in devices[position + 1 :]:
                ends = (first.name, second.name)
                link = link_by_pair.get(frozenset(ends), DeviceLink(devices=ends, kind="host"))
                all_links.append(attrs.evolve(link, devices=ends))
        return cls(devices=devices, links=tuple(all_links))

    def link(self, a: str, b: str) -> DeviceLink:
        """Return the link between two devices.

        Args:
            a: Name of the first device, such as ``"cuda:0"``, or ``device.name`` of an open device.
            b: Name of the second device.

        Raises:
            ValueError: A device does not exist, or both names are equal.
        """
        names = [info.name for info in self.devices]
        for argument, name in (("a", a), ("b", b)):
            if name not in names:
                raise ValueError(f"link: {argument} must be one of {', '.join(names)}, got {name!r}")
        if a == b:
            raise ValueError(f"link: a and b must be two devices, got {a!r} twice")
        return next(link for link in self.links if {a, b} == set(link.devices))

    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Divide the devices into groups whose members all have peer access to one another.

        Each device is in one group, by itself if it reaches no other device. The largest group is chosen
        first, then the largest group of the remaining devices, and so on. Of groups of equal size, the group
        with the earliest devices is chosen.

        Returns:
            Names of the devices in each group, the largest group first.
        """
        names = [info.name for info in self.devices]
        pairs = {link.devices for link in self.links if link.has_peer_access}

        def reach(first: str, second: str) -> bool:
            return (first, second) in pairs

        groups: list[Strs] = []
        while names:
            groups.append(_largest(names, reach))
            names = [name for name in names if name not in groups[-1]]
        return tuple(groups)

    def table(self) -> tuple[tuple[str, ...], ...]:
        """Return the ways as short texts: a row and a column for each device, with ``"-"`` for itself."""
        names = [info.name for info in self.devices]
        cells = {link.devices: str(link) for link in self.links}
        cells |= {(second, first): cell for (first, second), cell in cells.items()}
        return tuple(tuple(cells.get((first, second), "-") for second in names) for first in names)

    def __str__(self) -> str:
        names = [info.name for info in self.devices]
        rows = [("", *names), *((name, *row) for name, row in zip(names, self.table(), strict=True))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _largest(names: Sequence[str], reach: Callable[[str, str], bool]) -> Strs:
    """Return the first of the largest groups in which each device reaches all later ones."""
    best: Strs = ()

    def extend(group: Strs, candidates: Sequence[str]) -> None:
        nonlocal best
        if len(group) > len(best):
            best = group
        for position, name in enumerate(candidates):
            # The remaining devices cannot make it larger than the best one.
            if len(group) + len(candidates) - position <= len(best):
                return
            extend(
                (*group, name),
                [candidate for candidate in candidates[position + 1 :] if reach(name, candidate)],
            )

    extend((), names)
    return best


Isolation = Literal["inline", "process"]


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
        completion: How the engine notices completions best: ``"callback"``, the stream notifies it;
            ``"adaptive"``, it polls events for a short while first, because that costs less.
        is_exclusive: Whether it takes one context at a time.
        is_accelerator: Whether it differs from the processor that runs the program.
        keeps_memory: Whether the memory of a worker outlives the worker, so that its arrays survive a lost
            context. If not, arrays are lost with the worker, as they are inline with the context.
        runs_kernels: Whether `jit.Kernel` runs there, which compiles the program's own kernels.
        uuid: The hardware's name in other tools, such as ``"GPU-..."`` in NVIDIA's; None without a name. A
            part of a GPU (MIG) has the name of the GPU.
    """

    backend: str
    index: int
    description: str
    total_memory: int
    compute_units: int
    isolations: tuple[Isolation, ...]
    completion: Literal["callback", "adaptive"] = "callback"
    is_exclusive: bool = False
    is_accelerator: bool = True
    keeps_memory: bool = True
    runs_kernels: bool = True
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
        version: Its version; None if it is missing, or reports no version.
        source: How it was installed, such as ``"wheel"`` or ``"system"``; None if it is missing.
        path: The file; None if it is missing, or part of the system.
        needed_by: Libraries of the backend that need it; empty if every device needs it.
        problem: Why it cannot be used, and the remedy, as a text that follows its name; None if it can be
            used.
    """

    name: str
    version: str | None = None
    source: str | None = None
    path: str | None = None
    needed_by: Strs = ()
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
    libraries: Strs = ()
    properties: tuple[tuple[str, str], ...] = ()
    problem: str | None = None


@attrs.frozen(kw_only=True)
class BackendReport:
    """A kind of device.

    Attributes:
        name: Name of the backend.
        devices: The devices by number.
        software: Software that the backend needs and does not contain.
        problem: Why the backend lacks a usable device, and the remedy; None if it has a device.
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
        devices: The devices that can be opened.
        backend: Name of the backend.
        index: Number of the device.
        memory_limit: The requested limit; None for all memory.

    Raises:
        ValueError: No device has that index, or the limit is negative.
    """
    by_index = {info.index: info for info in devices}
    if index not in by_index:
        names = ", ".join(info.name for info in by_index.values()) or "none"
        raise ValueError(f"index: there is no device {backend}:{index}; there is {names}")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit: {memory_limit} is negative")
    return by_index[index], by_index[index].total_memory if memory_limit is None else memory_limit
