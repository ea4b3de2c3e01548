"""Kinds of devices, and the device that a name means.

Each kind has a folder; `base` is their common part. Other distributions add kinds by entry points of the
group ``trio_accel.backends``. Only their names are read until a program names one of them.
"""

from __future__ import annotations

import functools
import os
import re

from . import _plug_ins
from .base import AccelBackend, BackendReport, DeviceInfo, NotSupportedError, Topology

__all__ = [
    "candidates",
    "describe",
    "driver_checks",
    "list_devices",
    "members",
    "path_of",
    "register",
    "resolve",
    "resolve_for_worker",
    "topology",
]

_VARIABLE = "TRIO_ACCEL_BACKEND"

# The best first. Loaded on use, because a backend may need a heavy library or a driver.
_BACKENDS = {
    "cuda": "trio_accel.backends.cuda:CudaBackend",
    "cpu": "trio_accel.backends.cpu:CpuBackend",
}

_BUNDLED_BACKENDS = tuple(_BACKENDS)

# Backends of other distributions by name: the imported ones, and the reasons why others cannot be used.
_LOADED: dict[str, AccelBackend] = {}
_PROBLEMS: dict[str, str] = {}

_SPEC = re.compile(r"(?P<backend>[a-z]+)(?::(?P<index>[0-9]{1,6}))?")


def register(name: str, path: str) -> None:
    """Make a backend of another package known, in this process and in the workers that it starts.

    An installed distribution has an entry point of the group ``trio_accel.backends`` instead, with the
    backend's name and import path. Nothing is imported until a program names a device, or lists all devices.
    The devices come after the package's own, and `open_device` without a name never chooses one of them.

    Args:
        name: First part of a device's name: small letters, such as ``"rocm"`` for ``"rocm:0"``.
        path: Import path of a class that implements `AccelBackend`, ``"package.module:Class"``.

    Raises:
        ValueError: The name is not valid, or belongs to another backend.
    """
    if not _is_name(name):
        raise ValueError(f"name: {name!r} is not a name of a backend; it has small letters only")
    if _backend_paths().setdefault(name, path) != path:
        raise ValueError(f"name: there is a backend {name!r} already, {_BACKENDS[name]}")


def path_of(name: str) -> str:
    """Return the import path of a known backend, for the import in a worker."""
    return _BACKENDS[name]


def list_devices() -> tuple[DeviceInfo, ...]:
    """Find the devices of all backends, the best first. Blocks; never needs a driver."""
    return tuple(info for name in _backend_paths() for info in _load(name).list_devices())


def topology() -> Topology:
    """Find the links between the devices of the machine. Blocks; opens no device.

    On CUDA the driver reports them, in a process of its own. A link counts as NVLink if the driver has native
    atomics over it, because NVIDIA's GPUs have these over NVLink only.
    """
    return Topology.of(list_devices(), [link for name in _backend_paths() for link in _load(name).links()])


def describe() -> tuple[BackendReport, ...]:
    """Return the findings of every backend on this machine, the best first. Blocks; opens no device.

    A backend of another distribution that cannot be used has a report with the problem.
    """
    reports = [_load(name).describe() for name in _backend_paths()]
    refused = [name for name in _PROBLEMS if name in _BUNDLED_BACKENDS or name not in _BACKENDS]
    return (*reports, *[BackendReport(name=name, problem=_PROBLEMS[name]) for name in refused])


def driver_checks() -> tuple[str, ...]:
    """Return files that check whether a process has initialised a driver; see `AccelBackend.driver_check`."""
    backends = [_load(name) for name in _BUNDLED_BACKENDS] + list(_LOADED.values())
    return tuple([path for backend in backends if (path := backend.driver_check) is not None])


def candidates(spec: str | None) -> tuple[tuple[AccelBackend, DeviceInfo], ...]:
    """Find the devices that may be opened for a name, the best first. Blocks.

    Args:
        spec: ``"cpu"``, ``"cpu:0"``, ``"cuda"``, ``"cuda:1"``, ...; None for the environment variable
            ``TRIO_ACCEL_BACKEND``.

    Returns:
        The named device. Without a name, and with the variable unset or empty: all devices of the package's
        own backends, always including a CPU.

    Raises:
        ValueError: The name is not valid, or the device does not exist.
        NotSupportedError: The backend cannot run on this machine.
    """
    if spec is not None:
        return (_find(spec, f"{spec!r}"),)
    named = os.environ.get(_VARIABLE)
    if named:
        return (_find(named, f"{named!r} (from the environment variable {_VARIABLE})"),)
    return tuple([(_load(name), info) for name in _BUNDLED_BACKENDS for info in _load(name).list_devices()])


def members(spec: str | None) -> tuple[tuple[AccelBackend, DeviceInfo], ...]:
    """Find the devices of a group: all of a backend that is named without a number. Blocks.

    Raises:
        ValueError, NotSupportedError: As `candidates`.
    """
    devices = candidates(spec)
    named = os.environ.get(_VARIABLE) if spec is None else spec
    if not named or ":" in named:
        return devices
    backend = devices[0][0]
    return tuple([(backend, info) for info in backend.list_devices()])


def resolve(spec: str | None) -> tuple[AccelBackend, DeviceInfo]:
    """Find the best of `candidates`, which raises. Blocks."""
    return candidates(spec)[0]


def resolve_for_worker(spec: str, path: str) -> tuple[AccelBackend, DeviceInfo]:
    """Find the device of that name, in a process that serves it and nothing else; see `candidates`.

    Args:
        spec: Name of the device.
        path: Import path of its backend, as the application has found it.
    """
    name = spec.partition(":")[0]
    if name not in _BUNDLED_BACKENDS:
        # The application has already queried all of its properties, which may take long.
        _BACKENDS[name] = path
        _LOADED[name] = _plug_ins.imported(path)
    return _find(spec, f"{spec!r}", is_worker=True)


def _find(spec: str, label: str, *, is_worker: bool = False) -> tuple[AccelBackend, DeviceInfo]:
    match = _SPEC.fullmatch(spec)
    name = "" if match is None else match["backend"]
    # The package's own devices are found without a look at other distributions, because that takes time.
    if match is None or (name not in _BACKENDS and name not in _backend_paths()):
        names = [form for backend in _backend_paths() for form in (backend, f"{backend}:<number>")]
        raise ValueError(f"spec: {label} names no device; allowed: {', '.join(names)}")
    backend = _load(name)
    if is_worker:
        backend.prepare_worker()
    index = int(match["index"] or 0)
    for asked in (None, index):
        reason = backend.unavailable_reason(asked)
        if reason is not None:
            raise NotSupportedError(f"{label}: {reason}; available: {_available(name)}", backend=name)
        for info in backend.list_devices():
            if info.index == index:
                return backend, info
    raise ValueError(f"spec: {label}: the device does not exist; available: {_available(name)}")


def _available(name: str) -> str:
    """Return the device names for the package's own backends and the requested one."""
    asked = dict.fromkeys((*_BUNDLED_BACKENDS, name))
    return ", ".join([info.name for backend in asked for info in _load(backend).list_devices()])


def _is_name(name: str) -> bool:
    return ":" not in name and _SPEC.fullmatch(name) is not None


@functools.cache
def _backend_paths() -> dict[str, str]:
    """Add the backends of other distributions to the package's own, once."""
    for name, values in _plug_ins.entries().items():
        paths = sorted(values)
        by = " and ".join([f"{values[path]} ({path})" for path in paths])
        if not _is_name(name):
            _PROBLEMS[name] = f"{by}: {name!r} is not a name of a backend; it has small letters only"
        elif name in _BUNDLED_BACKENDS:
            _PROBLEMS[name] = f"{by}: the package has a backend {name!r} of its own; uninstall this one"
        elif len(paths) > 1:
            _PROBLEMS[name] = f"two backends have the name {name!r}: {by}; uninstall one of them"
        if _is_name(name):
            _BACKENDS.setdefault(name, paths[0])
    return _BACKENDS


def _load(name: str) -> AccelBackend:
    if name in _BUNDLED_BACKENDS:
        return _load_own(name)
    if name not in _LOADED:
        problem = _PROBLEMS.get(name)
        backend = _plug_ins.Unusable(name, problem) if problem else _plug_ins.load(name, _BACKENDS[name])
        _LOADED.setdefault(name, backend)
    return _LOADED[name]


@functools.cache
def _load_own(name: str) -> AccelBackend:
    return _plug_ins.imported(_BACKENDS[name])
