"""An actor system that can open devices, also with the arrays of a failed device."""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Never, cast
from weakref import WeakValueDictionary

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ... import actors
from ..._names import LAZY_PARTS
from ...actors import SystemOptions, named_arguments, opens
from ...backends import candidates, members
from ...backends.base import AccelBackend, DeviceInfo, DeviceLostError, NotSupportedError
from ...backends.base.kit.modules import import_ahead
from ..base._options import DeviceOptions
from ..dispatch import LeftMemory, WorkerDispatch, free_left_memory
from ..operations._ref import Device
from ._device import DeviceActor, OpenDevice, opened
from ._group import DeviceGroup, DeviceOpening, PlacementPolicy, by_load

__all__ = ["System", "open_system"]

_logger = logging.getLogger("trio_accel.devices")
# First uses need the types of low precision, the orders of contractions, and all lazy parts.
_PARTS = ("ml_dtypes", "opt_einsum", *[f"trio_accel.{name}" for name in LAZY_PARTS])
# Functions of `telemetry` that cannot wait import these extras, which may be missing.
_EXTRAS = ("prometheus_client", "opentelemetry.trace")


class System(actors.ActorSystem):
    """A tree of actors and devices. Made by `open_system`.

    Attributes:
        opening: The paths of opening devices.
    """

    def __init__(self, name: str, options: SystemOptions, nursery: trio.Nursery) -> None:
        super().__init__(name, options, nursery)
        self.opening: set[str] = set()
        self._devices: WeakValueDictionary[str, OpenDevice] = WeakValueDictionary()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The open devices of this system, in the order in which they were opened."""
        return tuple(device for device in self._devices.values() if not device.state.availability.is_ended)

    @property
    def outages(self) -> tuple[DeviceLostError, ...]:
        """The reasons why devices refuse requests, for good or temporarily; none for closed devices."""
        return tuple(self.outages_by_path.values())

    @property
    def outages_by_path(self) -> dict[str, DeviceLostError]:
        """The reasons of `outages` by the paths of their devices."""
        devices = self._devices.values()
        faulty = [device for device in devices if device.state.is_given_up or not device.is_ended]
        return {device.path: outage for device in faulty if (outage := device.outage) is not None}

    def expect(self, device: OpenDevice) -> OpenDevice:
        """Reserve the path of a device that will be started."""
        # The dictionary keeps the order of opening.
        self._devices.pop(device.path, None)
        self._devices[device.path] = device
        self.opening.add(device.path)
        return device

    async def start_device(self, device: OpenDevice, group: DeviceGroup | None = None) -> Device:
        """Start the actors of a reserved device, in the group if any."""
        failure: Exception | None = None
        is_started = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_import_parts)
                try:
                    await device.start(self if group is None else group.scope)
                    is_started = True
                    # Cancelling this wait would lose the open device.
                    nursery.cancel_scope.shield = True
                except Exception as error:  # noqa: BLE001  # raised below, because the nursery would group it
                    failure = error
        finally:
            self.opening.discard(device.path)
            if not is_started:
                self._devices.pop(device.path, None)
        if failure is not None:
            raise failure
        if group is not None:
            group.add(device)
        return device

    def open_device(
        self,
        spec: str | None = None,
        *,
        options: DeviceOptions | None = None,
        adopt: Device | None = None,
        name: str | None = None,
        **_unknown: Never,
    ) -> DeviceOpening:
        """Open a device: ``await system.open_device("cpu")``, or ``async with``, which closes it.

        Open a device once and share the `Device`. If it is already open, you get a second context with its
        own memory, and a number in its name in the tree (``cpu:0#2``); a `RuntimeWarning` points that out.

        Args:
            spec: The name of a backend or device, such as ``"cpu"`` or ``"cuda:1"``. None takes the name in
                the environment variable ``TRIO_ACCEL_BACKEND``, or else the best available device.
            options: The options with which it is opened and supervised.
            adopt: A device of this system that has failed for good (its requests raise `DeviceLostError`), on
                the same hardware and with worker processes: the new device takes over its memory. Then all
                its arrays are arrays of the new device, by the same references, with the same contents;
                damaged arrays stay damaged. The other arguments default to that device's arguments. If the
                new device cannot be opened, the arrays stay where they are, and can be adopted again.
            name: The name in the tree, in errors, metrics and the dashboard; by default the name of the
                hardware. A second context with a name is taken as intended, so it causes no warning.

        Raises:
            ValueError: The backend or device does not exist; the name is taken, empty or has a ``/``; or the
                device to be adopted is another system's, is open, was closed or already adopted, is other
                hardware, takes more than `memory_limit`, or has a leased array.
            TypeError: An argument is not a name, options, or a device.
            NotSupportedError: The backend is not available, or does not have an option.
            RuntimeError: You await it in another thread or Trio run than the system's.
            DeviceLostError: The memory of the device to be adopted is lost: it was inline, or the hardware
                reported an uncorrectable error of its memory.
        """
        return self.open_in(None, spec, options, adopt, name, _unknown)

    def open_in(
        self,
        group: DeviceGroup | None,
        spec: str | None,
        options: DeviceOptions | None,
        adopt: Device | None,
        name: str | None,
        unknown: Mapping[str, object],
    ) -> DeviceOpening:
        """Open a device, in a group if there is one; see `open_device`."""
        if unknown:
            # This refuses names unknown there too.
            DeviceOptions(**cast("dict[str, Never]", unknown))
            arguments = ", ".join(f"{name}={unknown[name]!r}" for name in unknown)
            raise TypeError(f"open_device: give options in one: options=ta.DeviceOptions({arguments})")
        if spec is not None and not isinstance(spec, str):
            raise TypeError(
                f"open_device: spec must be the name of a device such as 'cpu' or None, got {spec!r}"
            )
        _check_options("open_device", options)
        if name is not None:
            actors.check_name(name, "open_device")
        if adopt is not None and not isinstance(adopt, Device):
            raise TypeError(f"open_device: adopt must be a Device that was given up, got {adopt!r}")
        if adopt is not None:
            return DeviceOpening(partial(_open_adopting, self, group, spec, options, adopt, name))
        return DeviceOpening(partial(_open, self, group, spec, options or DeviceOptions(), name))

    @opens("the group is not open yet: async with system.open_devices(...) as group")
    @named_arguments
    @enable_ki_protection
    async def open_devices(
        self,
        specs: str | Sequence[str] | None = None,
        *,
        options: DeviceOptions | None = None,
        policy: PlacementPolicy | None = None,
        name: str = "devices",
    ) -> AsyncGenerator[DeviceGroup]:
        """Open several devices as one group: ``async with system.open_devices("cuda") as group``.

        All are opened at the same time, and closed at the same time. If one cannot be opened, none is. But
        unless you name each device, devices that cannot be opened are left out with a warning in the logs, as
        long as another can be opened.

        The devices are below a supervisor in the tree, so they have paths such as
        ``"system/devices/cuda:0"``. If you name a device twice, it gets two contexts, each with its own
        memory.

        Args:
            specs: The name of a backend, for all its devices; of one device; or a sequence of names as for
                `open_device`. None takes all devices of the machine, or the name in the environment variable
                ``TRIO_ACCEL_BACKEND``.
            options: The options with which each is opened and supervised.
            policy: Chooses the device in `DeviceGroup.place`; None takes the one with the least load.
            name: The name of the group among the actors of the system.

        Raises:
            ValueError: A backend or device does not exist, `specs` is empty, or the name of the group is
                taken.
            TypeError: An argument is not names, options, or a policy.
            NotSupportedError: A backend is not available, or does not have an option.
            RuntimeError: You use it in another thread or Trio run than the system's.
            ExceptionGroup: The error of the body.
        """
        self.check_run("open_devices")
        _check_group(specs, options, policy)
        chosen = await trio.to_thread.run_sync(_chosen, specs)
        options = options or DeviceOptions()
        for _, info in chosen:
            _check_isolation(info, options)
        async with self.open_supervisor(name) as scope:
            group = DeviceGroup(self, scope, options, policy or by_load)
            refusal = await _open_all(self, group, chosen, is_each_named=not isinstance(specs, str | None))
            if refusal is None:
                yield group  # noqa: ASYNC119  # as in `open_system`
        if refusal is not None:
            raise refusal


@opens("the system is not open yet: async with ta.open_system(...) as system")
@enable_ki_protection
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[System]:
    """Open a system of actors and devices. They run concurrently with the body of the ``async with``.

    When the body ends, normally or by an exception, devices and actors are stopped in reverse start order; on
    exit no actor is alive. The same holds if the body is cancelled.

    Raises:
        ExceptionGroup: The error of the body, and errors that failed actors escalated to the top.
    """
    actors.check_name(name)
    with ExitStack() as at_end:
        async with System.open(name, options) as system:
            at_end.callback(free_left_memory, system)
            yield system  # noqa: ASYNC119  # `opens` makes a context manager of it


async def _import_parts() -> None:
    """Import the lazy parts of the package in a thread, while the program waits for a device anyway.

    Otherwise a program's first matrix product or gradient would import them in the loop, which takes 10 to
    600 ms for a part.
    """
    missing = [name for name in _PARTS if name not in sys.modules]
    if missing:
        await trio.to_thread.run_sync(import_ahead, [*missing, *_EXTRAS])


@enable_ki_protection
async def _open(
    system: System, group: DeviceGroup | None, spec: str | None, options: DeviceOptions, name: str | None
) -> Device:
    system.check_run("open_device")
    *preferred, fallback = await trio.to_thread.run_sync(candidates, spec)
    for backend, info in preferred:
        device = _expect(system, group, backend, info, options, name)
        # The program has not named a device, so another will do. Errors of the options were already raised.
        try:
            return await system.start_device(device, group)
        except NotSupportedError as error:
            _tell_left_out(info, error)
    return await system.start_device(_expect(system, group, *fallback, options, name), group)


def _tell_left_out(info: DeviceInfo, error: NotSupportedError) -> None:
    _logger.warning("%s was found, but cannot be opened: %s", info.name, error.message)


async def _open_all(
    system: System,
    group: DeviceGroup,
    chosen: Sequence[tuple[AccelBackend, DeviceInfo]],
    *,
    is_each_named: bool,
) -> Exception | None:
    """Open the devices of a group concurrently; return the error, if any, for the caller to raise."""
    devices = [_expect(system, group, backend, info, group.options) for backend, info in chosen]
    failures: dict[OpenDevice, Exception] = {}

    async def start(device: OpenDevice) -> None:
        try:
            await system.start_device(device, group)
        except Exception as error:  # noqa: BLE001  # returned when the others are open
            failures[device] = error

    async with trio.open_nursery() as nursery:
        for device in devices:
            nursery.start_soon(start, device)
    for device in devices:
        if device not in failures:
            # Restore the order, because they may have opened in any order.
            group.add(device)
    for device in devices:
        error = failures.get(device)
        if error is None:
            continue
        if is_each_named or len(failures) == len(devices) or not isinstance(error, NotSupportedError):
            return error
        _tell_left_out(device.info, error)
    return None


def _chosen(specs: str | Sequence[str] | None) -> tuple[tuple[AccelBackend, DeviceInfo], ...]:
    """Return the devices of a group; blocks."""
    if specs is None or isinstance(specs, str):
        return members(specs)
    return tuple([candidates(spec)[0] for spec in specs])


def _check_options(operation: str, options: object) -> None:
    if options is not None and not isinstance(options, DeviceOptions):
        raise TypeError(f"{operation}: options must be DeviceOptions, got {options!r}")


def _check_group(specs: object, options: object, policy: object) -> None:
    """Refuse arguments with which no group can be opened.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    names = cast("Sequence[object]", () if specs is None else specs)
    if not isinstance(specs, str | Sequence | None) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "open_devices: specs must be the name of a backend such as 'cuda', a sequence of names such as "
            f"['cpu', 'cuda:1'], or None, got {specs!r}"
        )
    if specs is not None and not specs:
        raise ValueError("open_devices: specs must name at least one device, got none")
    _check_options("open_devices", options)
    if policy is not None and not callable(policy):
        raise TypeError(f"open_devices: policy must be a function of loads, got {policy!r}")


@enable_ki_protection
async def _open_adopting(
    system: System,
    group: DeviceGroup | None,
    spec: str | None,
    options: DeviceOptions | None,
    adopt: Device,
    name: str | None,
) -> Device:
    """Open a device with the memory of a failed device, which gets it back if that fails."""
    system.check_run("open_device")
    old = opened(adopt)
    await check_adoption(system, old)
    options = options_of_heir(old, options)
    *_, (backend, info) = await trio.to_thread.run_sync(candidates, spec or old.name)
    _check_isolation(info, options)
    path = _free_path(system, group, info, name)
    memory = take_memory(old, path, backend, info, options)
    try:
        heir = system.expect(OpenDevice(backend, info, options, path, system, memory))
        return await system.start_device(heir, group)
    except BaseException:
        old.take_back(memory)
        raise


def _expect(
    system: System,
    group: DeviceGroup | None,
    backend: AccelBackend,
    info: DeviceInfo,
    options: DeviceOptions,
    name: str | None = None,
) -> OpenDevice:
    """Make a device that will be started.

    Raises:
        ValueError: The name is taken.
        NotSupportedError: The device does not have an option.
    """
    _check_isolation(info, options)
    return system.expect(OpenDevice(backend, info, options, _free_path(system, group, info, name), system))


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
    """Refuse options of worker processes."""
    for option, is_given, reason, alternative in (
        (f"spares={options.spares}", options.spares, "spares are worker processes", "spares=0"),
        (f"preload={options.preload!r}", options.preload, "it is for worker processes", "preload=()"),
    ):
        if is_given:
            raise NotSupportedError(
                f"{option}: {reason}, and the context of {info.name} is in this process; open it with "
                f"isolation='process', or with {alternative}",
                device=info.name,
                backend=info.backend,
            )


def _free_path(system: System, group: DeviceGroup | None, info: DeviceInfo, requested: str | None) -> str:
    """Return a free path in the tree, with a number if necessary. Warn if the device is already open.

    Raises:
        ValueError: The program has given a name already in use.
    """
    parent = system.name if group is None else group.path
    # Other devices may be opening, and not in the tree yet.
    actor_classes = {actor.path: actor.actor_class for actor in system.tree().walk()}
    taken = actor_classes.keys() | system.opening
    if requested is not None:
        if f"{parent}/{requested}" in taken:
            raise ValueError(
                f"open_device: name={requested!r} is taken: there is {parent}/{requested} already"
            )
        return f"{parent}/{requested}"
    named = {device.path for device in system.devices if device.name == info.name}
    names = itertools.chain([info.name], (f"{info.name}#{number}" for number in itertools.count(2)))
    path = next(path for name in names if (path := f"{parent}/{name}") not in taken)
    for open_path in (*actor_classes, *system.opening):
        above, _, name = open_path.rpartition("/")
        # A group with a device twice intends it.
        is_meant = group is not None and above == parent
        is_same = name.partition("#")[0] == info.name and actor_classes.get(open_path, _DEVICE) == _DEVICE
        if (is_same or open_path in named) and not is_meant:
            # This is not an error: a program may need an inline context next to a worker, and tests use two.
            warnings.warn(
                f"open_device: {info.name} is open already, as {open_path}; {path} "
                "is a second context, with memory of its own. Share the Device object that you have, or "
                "close it first; where two contexts are meant, give this one a name: open_device(name=...)",
                RuntimeWarning,
                stacklevel=_levels_to_caller(),
            )
            break
    return path


_DEVICE = DeviceActor.__name__


def _levels_to_caller() -> int:
    """Return the number of stack levels up to the program, for a warning of the calling function."""
    # A group is opened through `contextlib`.
    prefixes, level = (__name__.partition(".")[0] + ".", "contextlib."), 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while (
        frame is not None
        and frame.f_back is not None
        and f"{frame.f_globals.get('__name__')}.".startswith(prefixes)
    ):
        frame, level = frame.f_back, level + 1
    return level


def options_of_heir(old: OpenDevice, options: DeviceOptions | None) -> DeviceOptions:
    """Choose the options of the adopting device: by default the old device's options.

    Raises:
        ValueError: Such a device cannot reach the arrays.
    """
    if options is None:
        options = old.options
    if options.isolation == "inline":
        raise _not_adopted(
            f"isolation='inline' has memory of its own in each context; the arrays of "
            f"{old.path} can only be adopted with isolation='process'"
        )
    return attrs.evolve(options, isolation="process")


async def check_adoption(system: System, old: OpenDevice) -> None:
    """Refuse a device that leaves no memory. If it is just ending, wait for its end.

    Raises:
        ValueError: It belongs to another system, is open, was closed, or was already adopted.
        DeviceLostError: Its memory is lost.
    """
    if old.state.system is not system:
        raise _not_adopted(f"{old.path} is a device of another system; its memory is bound to that")
    if not await old.wait_ended():
        raise _not_adopted(f"{old.path} is open; only a device that was given up can be adopted")
    if not old.state.is_given_up:
        raise _not_adopted(
            f"{old.path} was closed, which gave its memory back; only a device that was "
            "given up can be adopted"
        )
    if not isinstance(old.dispatch, WorkerDispatch):
        raise DeviceLostError(
            "its arrays cannot be adopted: with isolation='inline' they were lost with its context; "
            "make them again",
            device=old.name,
        )
    if not old.state.info.keeps_memory:
        raise DeviceLostError(
            "its arrays cannot be adopted: the memory of this device ends with its worker; make them again",
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


def take_memory(
    old: OpenDevice, heir: str, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions
) -> LeftMemory:
    """Take the memory of a failed device.

    Args:
        old: The device.
        heir: The path of the adopting device.
        backend: Its backend.
        info: Its description.
        options: Its options.

    Raises:
        ValueError: It is other hardware, or has too little memory.
    """
    if info.name != old.name or backend.name != old.state.backend.name:
        raise _not_adopted(
            f"the arrays are in the memory of {old.name}, which {info.name} cannot use; open {old.name!r}"
        )
    dispatch = old.dispatch
    assert isinstance(dispatch, WorkerDispatch)  # `check_adoption` has tested it
    memory = dispatch.left
    if memory is None:
        # Another call has adopted the memory meanwhile.
        raise _adopted_already(old, dispatch)
    limit = options.memory_limit
    if limit is not None and memory.nbytes > limit:
        raise _not_adopted(f"the arrays take {memory.nbytes} bytes, more than memory_limit = {limit}")
    if old.state.leases:
        raise _not_adopted(f"{old.state.leases} of the arrays of {old.path} are leased; end the leases first")
    memory.take(old.state.system)
    dispatch.left, dispatch.adopted_by = None, heir
    return memory


def _not_adopted(reason: str) -> ValueError:
    return ValueError(f"open_device: adopt: {reason}")


def _adopted_already(old: OpenDevice, dispatch: WorkerDispatch) -> ValueError:
    return _not_adopted(f"the arrays of {old.path} were adopted already, by {dispatch.adopted_by}")
