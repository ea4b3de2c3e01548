"""What a backend found on this machine: told by `trio-accel info`, and nowhere needed to compute."""

from __future__ import annotations

import attrs

from .device_info import DeviceInfo

__all__ = ["BackendReport", "DeviceReport", "Software"]


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
        info: What it is.
        libraries: Names of the libraries that it has, sorted.
        properties: What else is known of it, as pairs of names and values.
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
        software: What it computes with, that does not come with it.
        problem: Why it has no device that can be used, and what to do about it; None if it has one.
    """

    name: str
    devices: tuple[DeviceReport, ...] = ()
    software: tuple[Software, ...] = ()
    problem: str | None = None
