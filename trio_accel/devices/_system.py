"""A system of actors that can open devices."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import trio
from trio.lowlevel import enable_ki_protection

from .. import actors
from ..actors import SystemOptions
from ..backends import candidates
from ..backends.base import AccelBackend, DeviceInfo, NotSupportedError
from ._device import Device
from ._options import DeviceOptions

__all__ = ["DeviceOpening", "System", "open_system"]

_logger = logging.getLogger("trio_accel.devices")


class DeviceOpening:
    """A device being opened: await it, or use it in ``async with``, which closes the device at the end."""

    __slots__ = ("_device", "_options", "_spec", "_system")

    def __init__(self, system: System, spec: str | None, options: DeviceOptions) -> None:
        self._system = system
        self._spec = spec
        self._options = options
        self._device: Device | None = None

    def __await__(self) -> Generator[Any, Any, Device]:
        return _open(self._system, self._spec, self._options).__await__()

    @enable_ki_protection
    async def __aenter__(self) -> Device:
        self._device = await self
        return self._device

    @enable_ki_protection
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._device is not None:
            await self._device.close()  # noqa: ASYNC102  # it shields itself


class System(actors.System):
    """A tree of actors, devices among them. Made by `open_system`.

    Attributes:
        opening: Names of devices that are being opened.
    """

    def __init__(self, name: str, options: SystemOptions, nursery: trio.Nursery) -> None:
        super().__init__(name, options, nursery)
        self.opening: set[str] = set()

    def open_device(self, spec: str | None = None, *, options: DeviceOptions | None = None) -> DeviceOpening:
        """Open a device: ``await system.open_device("cpu")``, or ``async with``, which closes it.

        Args:
            spec: Name of a backend or device, such as ``"cpu"`` or ``"cuda:1"``. None takes what the
                environment variable ``TRIO_ACCEL_BACKEND`` names, else the best device that can be opened.
            options: How it is opened and supervised.

        Raises:
            ValueError: There is no such backend or device.
            TypeError: No name, or no options.
            NotSupportedError: The backend is not available, or does not have an option.
            RuntimeError: It is awaited in another thread or Trio run than the system's.
        """
        if spec is not None and not isinstance(spec, str):
            raise TypeError(
                f"open_device: spec must be the name of a device such as 'cpu' or None, got {spec!r}"
            )
        if options is not None and not isinstance(options, DeviceOptions):
            raise TypeError(f"open_device: options must be DeviceOptions, got {options!r}")
        return DeviceOpening(self, spec, DeviceOptions() if options is None else options)


@asynccontextmanager
@enable_ki_protection
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[System, None]:
    """Open a system of actors and devices: the body of the ``async with`` runs beside them.

    When the body ends, by itself or by an exception, devices and actors are stopped in reverse
    start order; on exit none is alive. That holds too when the body is cancelled.

    Raises:
        ExceptionGroup: What the body raised, and what a failed actor escalated to the top.
    """
    actors.check_name(name)
    async with System.open(name, options) as system:
        yield system


@enable_ki_protection
async def _open(system: System, spec: str | None, options: DeviceOptions) -> Device:
    system.check_run("open_device")
    *others, last = await trio.to_thread.run_sync(candidates, spec)
    for backend, info in others:
        device, name = _make(system, backend, info, options)
        # Nobody has named it: another will do. What is wrong with the options was told by now.
        try:
            return await _start(system, device, name)
        except NotSupportedError as error:
            _logger.warning("%s was found, but cannot be opened: %s", info.name, error.message)
    return await _start(system, *_make(system, *last, options))


def _make(
    system: System, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions
) -> tuple[Device, str]:
    """A device that is not started yet, and the name of its actor.

    Raises:
        NotSupportedError: It does not have an option.
    """
    if options.isolation is not None and options.isolation not in info.isolations:
        allowed = ", ".join(repr(isolation) for isolation in info.isolations)
        raise NotSupportedError(
            f"isolation={options.isolation!r} is not there for this device; it has {allowed}",
            device=info.name,
            backend=info.backend,
        )
    if options.spares and (options.isolation or info.isolations[0]) == "inline":
        raise NotSupportedError(
            f"spares={options.spares}: spares are worker processes, and the context of {info.name} is in "
            "this process; open it with isolation='process', or with spares=0",
            device=info.name,
            backend=info.backend,
        )
    # Others may be on their way to the tree.
    taken = {child.name for child in system.tree().children} | system.opening
    names = itertools.chain([info.name], (f"{info.name}#{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    return Device(backend, info, options, f"{system.name}/{name}", system), name


async def _start(system: System, device: Device, name: str) -> Device:
    system.opening.add(name)
    try:
        await device.start(name)
    finally:
        system.opening.discard(name)
    return device
