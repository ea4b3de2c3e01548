"""A system of actors that can open devices, also with the arrays of one that was given up."""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack
from typing import Any, Never
from weakref import WeakValueDictionary

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ... import actors
from ...actors import SystemOptions
from ...backends import candidates
from ...backends.base import AccelBackend, DeviceInfo, DeviceLostError, NotSupportedError
from .._options import DeviceOptions
from ..arrays._ref import Device
from ..base._refusals import NotAwaited, opens
from ..worker import LeftMemory, WorkerDispatch, free_left_memory
from ._device import DeviceActor, OpenDevice, opened

__all__ = ["DeviceOpening", "System", "open_system"]

_logger = logging.getLogger("trio_accel.devices")


@attrs.define(eq=False)
class DeviceOpening(NotAwaited):
    """A device being opened: await it, or use it in ``async with``, which closes the device at the end."""

    what_to_do = (
        "the device is not open yet: device = await system.open_device(...), "
        "or async with system.open_device(...) as device"
    )

    _system: System
    _spec: str | None
    _options: DeviceOptions | None
    _adopt: Device | None
    _device: Device | None = attrs.field(default=None, init=False)

    def __await__(self) -> Generator[Any, Any, Device]:
        if self._adopt is not None:
            return _open_adopting(self._system, self._spec, self._options, opened(self._adopt)).__await__()
        return _open(self._system, self._spec, self._options or DeviceOptions()).__await__()

    @enable_ki_protection
    async def __aenter__(self) -> Device:
        self._device = await self
        return self._device

    @enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
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
        self._devices: WeakValueDictionary[str, OpenDevice] = WeakValueDictionary()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this system that are open, in the order in which they were opened."""
        return tuple(device for device in self._devices.values() if not device.state.availability.is_ended)

    async def start_device(self, device: OpenDevice, name: str) -> Device:
        """Start the actors of a device, which is one of the system's from now on."""
        # Systems in the order of their opening.
        self._devices.pop(device.path, None)
        self._devices[device.path] = device
        self.opening.add(name)
        try:
            await device.start(name)
        except BaseException:
            self._devices.pop(device.path, None)
            raise
        finally:
            self.opening.discard(name)
        return device

    def open_device(
        self,
        spec: str | None = None,
        *,
        options: DeviceOptions | None = None,
        adopt: Device | None = None,
        **_unknown: Never,
    ) -> DeviceOpening:
        """Open a device: ``await system.open_device("cpu")``, or ``async with``, which closes it.

        Open a device once and share the `Device`. Where it is open already, it gets a second context with
        memory of its own, and a number in its name in the tree (``cpu:0#2``); a `RuntimeWarning` says so.

        Args:
            spec: Name of a backend or device, such as ``"cpu"`` or ``"cuda:1"``. None takes what the
                environment variable ``TRIO_ACCEL_BACKEND`` names, else the best device that can be opened.
            options: How it is opened and supervised.
            adopt: A device of this system that was given up (its requests raise `DeviceLostError`), on the
                same hardware and with worker processes: the new device takes over its memory. All its arrays
                are arrays of the new device then, by the same references, with the same contents; those that
                were damaged stay so. Where nothing else is given, the new device is opened as that one was.
                If it cannot be opened, the arrays stay where they are, and can be adopted again.

        Raises:
            ValueError: There is no such backend or device; or the device to be adopted is another system's,
                is open, was closed or adopted already, is other hardware, takes more than `memory_limit`,
                or has an array that is leased.
            TypeError: No name, no options, or no device.
            NotSupportedError: The backend is not available, or does not have an option.
            RuntimeError: It is awaited in another thread or Trio run than the system's.
            DeviceLostError: The memory of the device to be adopted is lost: it was inline, or the hardware
                reported an uncorrectable error of its memory.
        """
        if _unknown:
            # Refuses what is no option there, either.
            DeviceOptions(**_unknown)
            given = ", ".join(f"{name}={_unknown[name]!r}" for name in _unknown)
            raise TypeError(f"open_device: give options in one: options=ta.DeviceOptions({given})")
        if spec is not None and not isinstance(spec, str):
            raise TypeError(
                f"open_device: spec must be the name of a device such as 'cpu' or None, got {spec!r}"
            )
        if options is not None and not isinstance(options, DeviceOptions):
            raise TypeError(f"open_device: options must be DeviceOptions, got {options!r}")
        if adopt is not None and not isinstance(adopt, Device):
            raise TypeError(f"open_device: adopt must be a Device that was given up, got {adopt!r}")
        return DeviceOpening(self, spec, options, adopt)


@opens("the system is not open yet: async with ta.open_system(...) as system")
@enable_ki_protection
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[System, None]:
    """Open a system of actors and devices: the body of the ``async with`` runs beside them.

    When the body ends, by itself or by an exception, devices and actors are stopped in reverse
    start order; on exit no actor is alive. That holds too when the body is cancelled.

    Raises:
        ExceptionGroup: The error of the body, and errors that failed actors escalated to the top.
    """
    actors.check_name(name)
    with ExitStack() as at_end:
        async with System.open(name, options) as system:
            at_end.callback(free_left_memory, system)
            yield system  # noqa: ASYNC119  # `opens` makes a context manager of it


@enable_ki_protection
async def _open(system: System, spec: str | None, options: DeviceOptions) -> Device:
    system.check_run("open_device")
    *others, last = await trio.to_thread.run_sync(candidates, spec)
    for backend, info in others:
        device, name = _make(system, backend, info, options)
        # The program has named no device, so another one will do. Errors of the options were raised by now.
        try:
            return await system.start_device(device, name)
        except NotSupportedError as error:
            _logger.warning("%s was found, but cannot be opened: %s", info.name, error.message)
    return await system.start_device(*_make(system, *last, options))


@enable_ki_protection
async def _open_adopting(
    system: System, spec: str | None, options: DeviceOptions | None, old: OpenDevice
) -> Device:
    """Open a device with the memory of one that was given up, which keeps it if that fails."""
    system.check_run("open_device")
    await _check_adoption(system, old)
    options = _options_of_heir(old, options)
    *_, (backend, info) = await trio.to_thread.run_sync(candidates, spec or old.name)
    _check_isolation(info, options)
    name = _free_name(system, info)
    memory = _take_memory(old, f"{system.name}/{name}", backend, info, options)
    try:
        heir = OpenDevice(backend, info, options, f"{system.name}/{name}", system, memory)
        return await system.start_device(heir, name)
    except BaseException:
        old.have_back(memory)
        raise


def _make(
    system: System, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions
) -> tuple[OpenDevice, str]:
    """Return a device that is not started yet, and the name of its actor.

    Raises:
        NotSupportedError: It does not have an option.
    """
    _check_isolation(info, options)
    name = _free_name(system, info)
    return OpenDevice(backend, info, options, f"{system.name}/{name}", system), name


def _check_isolation(info: DeviceInfo, options: DeviceOptions) -> None:
    if options.isolation is not None and options.isolation not in info.isolations:
        allowed = ", ".join(repr(isolation) for isolation in info.isolations)
        reason = ""
        if options.isolation == "process" and sys.platform != "linux":
            reason = f": worker processes need Linux, and this is {sys.platform}"
        raise NotSupportedError(
            f"isolation={options.isolation!r} is not there for this device; it has {allowed}{reason}; open "
            f"the device with isolation={info.isolations[0]!r}",
            device=info.name,
            backend=info.backend,
        )
    if (options.isolation or info.isolations[0]) == "inline":
        _check_inline(info, options)


def _check_inline(info: DeviceInfo, options: DeviceOptions) -> None:
    """Refuse what belongs to worker processes."""
    for given, is_given, what, none in (
        (f"spares={options.spares}", options.spares, "spares are worker processes", "spares=0"),
        (f"preload={options.preload!r}", options.preload, "it is for worker processes", "preload=()"),
    ):
        if is_given:
            raise NotSupportedError(
                f"{given}: {what}, and the context of {info.name} is in this process; open it with "
                f"isolation='process', or with {none}",
                device=info.name,
                backend=info.backend,
            )


def _free_name(system: System, info: DeviceInfo) -> str:
    """Find a name in the tree, numbered where it is taken; warns if the device is open already."""
    # Others may be on their way to the tree.
    children = {child.name: child.actor_class for child in system.tree().children}
    names = itertools.chain([info.name], (f"{info.name}#{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in children and name not in system.opening)
    for other in (*children, *system.opening):
        if other.partition("#")[0] == info.name and children.get(other, _DEVICE) == _DEVICE:
            # No refusal: a program may want an inline context beside a worker, and tests two for two devices.
            warnings.warn(
                f"open_device: {info.name} is open already, as {system.name}/{other}; {system.name}/{name} "
                "is a second context, with memory of its own. Share the Device object that you have, or "
                "close it first; where two contexts are meant, filter this warning",
                RuntimeWarning,
                stacklevel=_levels_to_caller(),
            )
            break
    return name


_DEVICE = DeviceActor.__name__


def _levels_to_caller() -> int:
    """Tell how far up the stack the program is, for a warning of the function that calls this."""
    package, level = __name__.partition(".")[0] + ".", 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while (
        frame is not None
        and frame.f_back is not None
        and f"{frame.f_globals.get('__name__')}.".startswith(package)
    ):
        frame, level = frame.f_back, level + 1
    return level


def _options_of_heir(old: OpenDevice, options: DeviceOptions | None) -> DeviceOptions:
    """Choose the options of the device that adopts: as for the old one, where none are given.

    Raises:
        ValueError: The arrays are out of reach of such a device.
    """
    if options is None:
        options = old.options
    if options.isolation == "inline":
        raise ValueError(
            f"open_device: adopt: isolation='inline' has memory of its own in each context; the arrays of "
            f"{old.path} can only be adopted with isolation='process'"
        )
    return attrs.evolve(options, isolation="process")


async def _check_adoption(system: System, old: OpenDevice) -> None:
    """Refuse a device that leaves nothing; waits for the end of one that is just being given up.

    Raises:
        ValueError: It is another system's, is open, was closed, or was adopted already.
        DeviceLostError: Its memory is lost.
    """
    if old.state.system is not system:
        raise ValueError(
            f"open_device: adopt: {old.path} is a device of another system; its memory is bound to that"
        )
    if not await old.wait_ended():
        raise ValueError(
            f"open_device: adopt: {old.path} is open; only a device that was given up can be adopted"
        )
    if not old.state.is_given_up:
        raise ValueError(
            f"open_device: adopt: {old.path} was closed, which gave its memory back; only a device that was "
            "given up can be adopted"
        )
    if not isinstance(old.dispatch, WorkerDispatch):
        raise DeviceLostError(
            "its arrays cannot be adopted: with isolation='inline' they were lost with its context; "
            "make them again",
            device=old.name,
        )
    if old.dispatch.adopted_by is not None:
        raise _adopted_already(old, old.dispatch)
    if old.state.memory_failure is not None:
        raise DeviceLostError(
            f"its arrays cannot be adopted: the hardware reported an uncorrectable error of its memory "
            f"({old.state.memory_failure}); make them again",
            device=old.name,
        )


def _take_memory(
    old: OpenDevice, heir: str, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions
) -> LeftMemory:
    """Take the memory of a device that was given up.

    Args:
        old: The device.
        heir: Path of the one that adopts.
        backend: Backend of that.
        info: Description of that.
        options: Its options.

    Raises:
        ValueError: It is other hardware, or has too little memory.
    """
    if info.name != old.name or backend.name != old.state.backend.name:
        raise ValueError(
            f"open_device: adopt: the arrays are in the memory of {old.name}, which {info.name} cannot use; "
            f"open {old.name!r}"
        )
    dispatch = old.dispatch
    assert isinstance(dispatch, WorkerDispatch)  # as `_check_adoption` has seen
    memory = dispatch.left
    if memory is None:
        # While this was on its way.
        raise _adopted_already(old, dispatch)
    limit = options.memory_limit
    if limit is not None and memory.nbytes > limit:
        raise ValueError(
            f"open_device: adopt: the arrays take {memory.nbytes} bytes, more than memory_limit = {limit}"
        )
    if old.state.leases:
        raise ValueError(
            f"open_device: adopt: {old.state.leases} of the arrays of {old.path} are leased; "
            "end the leases first"
        )
    memory.take(old.state.system)
    dispatch.left, dispatch.adopted_by = None, heir
    return memory


def _adopted_already(old: OpenDevice, dispatch: WorkerDispatch) -> ValueError:
    return ValueError(
        f"open_device: adopt: the arrays of {old.path} were adopted already, by {dispatch.adopted_by}"
    )
