"""Kinds of devices, and the device that a name means.

Each kind has a folder; `base` is their common part.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from typing import cast

from .base import AccelBackend, BackendReport, DeviceInfo, NotSupportedError, Topology

__all__ = [
    "candidates", "describe", "driver_checks", "list_devices", "members", "register", "resolve",
    "resolve_for_worker", "topology",
]  # fmt: skip

_VARIABLE = "TRIO_ACCEL_BACKEND"

# The best first. Loaded on use: a backend may have a heavy library or a driver behind it.
_BACKENDS = {
    "cuda": "trio_accel.backends.cuda:CudaBackend",
    "cpu": "trio_accel.backends.cpu:CpuBackend",
}

_SPEC = re.compile(r"(?P<backend>[a-z]+)(?::(?P<index>[0-9]{1,6}))?")


def register(name: str, path: str) -> None:
    """Make a backend of another package known, in this process; nothing of it is loaded yet.

    Its devices come behind those of the others. A worker is another process: only devices of the package's
    own backends can have one.

    Args:
        name: First part of a device's name: small letters, such as ``"rocm"`` for ``"rocm:0"``.
        path: Import path of a class that implements `AccelBackend`, ``"package.module:Class"``.

    Raises:
        ValueError: The name is not valid, or another backend has it.
    """
    if _SPEC.fullmatch(name) is None or ":" in name:
        raise ValueError(f"name: {name!r} is not a name of a backend; it has small letters only")
    if _BACKENDS.setdefault(name, path) != path:
        raise ValueError(f"name: there is a backend {name!r} already, {_BACKENDS[name]}")


def list_devices() -> tuple[DeviceInfo, ...]:
    """Find the devices of all backends, the best first. Blocks; never needs a driver."""
    return tuple(info for name in _BACKENDS for info in _load(name).list_devices())


def topology() -> Topology:
    """Find which devices of the machine reach one another, and by what. Blocks; opens no device.

    On CUDA the driver tells, in a process of its own. A link counts as NVLink where the driver has native
    atomics over it, which NVIDIA's GPUs have over NVLink alone.
    """
    return Topology.of(list_devices(), [link for name in _BACKENDS for link in _load(name).links()])


def describe() -> tuple[BackendReport, ...]:
    """Return the findings of every backend on this machine, the best first. Blocks; opens no device."""
    return tuple(_load(name).describe() for name in _BACKENDS)


def driver_checks() -> tuple[str, ...]:
    """Files that say whether a process has initialised a driver; see `AccelBackend.driver_check`."""
    return tuple([path for name in _BACKENDS if (path := _load(name).driver_check) is not None])


def candidates(spec: str | None) -> tuple[tuple[AccelBackend, DeviceInfo], ...]:
    """Find the devices that may be opened for a name, the best first. Blocks.

    Args:
        spec: ``"cpu"``, ``"cpu:0"``, ``"cuda"``, ``"cuda:1"``, ...; None for the environment variable
            ``TRIO_ACCEL_BACKEND``.

    Returns:
        The named device. Without a name, and with the variable unset or empty: all devices, and always one of
        the CPU.

    Raises:
        ValueError: The name is not valid, or there is no such device.
        NotSupportedError: The backend cannot run on this machine.
    """
    if spec is not None:
        return (_find(spec, f"{spec!r}"),)
    named = os.environ.get(_VARIABLE)
    if named:
        return (_find(named, f"{named!r} (from the environment variable {_VARIABLE})"),)
    return tuple([(_load(info.backend), info) for info in list_devices()])


def members(spec: str | None) -> tuple[tuple[AccelBackend, DeviceInfo], ...]:
    """Find the devices of a group: all of a backend that is named without a number. Blocks.

    Raises:
        ValueError, NotSupportedError: As `candidates`.
    """
    found = candidates(spec)
    named = os.environ.get(_VARIABLE) if spec is None else spec
    if not named or ":" in named:
        return found
    backend = found[0][0]
    return tuple([(backend, info) for info in backend.list_devices()])


def resolve(spec: str | None) -> tuple[AccelBackend, DeviceInfo]:
    """Find the best of `candidates`, which raises. Blocks."""
    return candidates(spec)[0]


def resolve_for_worker(spec: str) -> tuple[AccelBackend, DeviceInfo]:
    """Find the device of that name, in a process that serves it and nothing else; see `candidates`."""
    return _find(spec, f"{spec!r}", is_worker=True)


def _find(spec: str, given: str, *, is_worker: bool = False) -> tuple[AccelBackend, DeviceInfo]:
    match = _SPEC.fullmatch(spec)
    if match is None or match["backend"] not in _BACKENDS:
        names = [name for backend in _BACKENDS for name in (backend, f"{backend}:<number>")]
        raise ValueError(f"spec: {given} names no device; allowed: {', '.join(names)}")
    name = match["backend"]
    backend = _load(name)
    if is_worker:
        backend.prepare_worker()
    reason = backend.unavailable_reason()
    if reason is not None:
        raise NotSupportedError(f"{given}: {reason}; available: {_available()}", backend=name)
    index = int(match["index"] or 0)
    for info in backend.list_devices():
        if info.index == index:
            return backend, info
    reason = backend.unavailable_reason(index)
    if reason is not None:
        raise NotSupportedError(f"{given}: {reason}; available: {_available()}", backend=name)
    raise ValueError(f"spec: {given}: there is no such device; available: {_available()}")


def _available() -> str:
    return ", ".join(info.name for info in list_devices())


@functools.cache
def _load(name: str) -> AccelBackend:
    module, _, attribute = _BACKENDS[name].partition(":")
    return cast("AccelBackend", getattr(importlib.import_module(module), attribute)())
