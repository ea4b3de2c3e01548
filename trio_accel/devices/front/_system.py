"""A system of actors that can open devices, also with the arrays of one that was given up."""

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
# Packages of operations that the program has not imported by the time it opens a device.
_CAPABILITIES = tuple(
    [f"trio_accel.{name}" for name in ("linalg", "fft", "random", "sparse", "graphs", "jit", "nn")]
)


class System(actors.ActorSystem):
    """A tree of actors, devices among them. Made by `open_system`.

    Attributes:
        opening: Paths of devices that are being opened.
    """

    def __init__(self, name: str, options: SystemOptions, nursery: trio.Nursery) -> None:
        super().__init__(name, options, nursery)
        self.opening: set[str] = set()
        self._devices: WeakValueDictionary[str, OpenDevice] = WeakValueDictionary()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this system that are open, in the order in which they were opened."""
        return tuple(device for device in self._devices.values() if not device.state.availability.is_ended)

    @property
    def outages(self) -> tuple[DeviceLostError, ...]:
        """Why devices refuse requests: given up, for good or for now. Devices that were closed have none."""
        known = self._devices.values()
        faulty = [device for device in known if device.state.is_given_up or not device.is_ended]
        return tuple(outage for device in faulty if (outage := device.outage) is not None)

    def expect(self, device: OpenDevice) -> OpenDevice:
        """Have a device that is going to be started; its path is taken from now on."""
        # Systems in the order of their opening.
        self._devices.pop(device.path, None)
        self._devices[device.path] = device
        self.opening.add(device.path)
        return device

    async def start_device(self, device: OpenDevice, group: DeviceGroup | None = None) -> Device:
        """Start the actors of a device that is expected, in the group if there is one."""
        failure: Exception | None = None
        is_started = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_import_capabilities)
                try:
                    await device.start(self if group is None else group.scope)
                    is_started = True
                    # The program would not get a device that is open, if this wait were cancelled.
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
            name: Name in the tree, in errors, metrics and the dashboard; by default that of the hardware.
                A second context that has a name is meant to be one, so no warning tells of it.

        Raises:
            ValueError: There is no such backend or device; the name is taken, empty or has a ``/``; or the
                device to be adopted is another system's, is open, was closed or adopted already, is other
                hardware, takes more than `memory_limit`, or has an array that is leased.
            TypeError: No name, no options, or no device.
            NotSupportedError: The backend is not available, or does not have an option.
            RuntimeError: It is awaited in another thread or Trio run than the system's.
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
            # Refuses what is no option there, either.
            DeviceOptions(**cast("dict[str, Never]", unknown))
            given = ", ".join(f"{name}={unknown[name]!r}" for name in unknown)
            raise TypeError(f"open_device: give options in one: options=ta.DeviceOptions({given})")
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

        All are opened at the same time, and closed at the same time. If one cannot be opened, none
        is. But where the program has not named each device, those that cannot be opened are left out with a
        warning in the logs, as long as there is another.

        The devices stand below a supervisor in the tree, so their paths are such as
        ``"system/devices/cuda:0"``. One that is named twice has two contexts, each with memory of its own.

        Args:
            specs: Name of a backend, for all its devices; of one device; or a sequence of names as for
                `open_device`. None takes all devices of the machine, or what the environment variable
                ``TRIO_ACCEL_BACKEND`` names.
            options: How each is opened and supervised.
            policy: Chooses the device in `DeviceGroup.place`; None takes the one with the least load.
            name: Name of the group among the actors of the system.

        Raises:
            ValueError: There is no such backend or device, no name at all, or the name of the group is taken.
            TypeError: No names, no options, or no policy.
            NotSupportedError: A backend is not available, or does not have an option.
            RuntimeError: It is used in another thread or Trio run than the system's.
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
                yield group  # noqa: ASYNC119  # as that of `open_system`
        if refusal is not None:
            raise refusal


@opens("the system is not open yet: async with ta.open_system(...) as system")
@enable_ki_protection
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[System]:
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


async def _import_capabilities() -> None:
    """Import the packages of operations in a thread, while the program waits for a device anyway.

    The first product of a program would import them in the loop, which takes 25 to 150 ms for one package.
    """
    missing = [name for name in _CAPABILITIES if name not in sys.modules]
    if missing:
        await trio.to_thread.run_sync(import_ahead, missing)


@enable_ki_protection
async def _open(
    system: System, group: DeviceGroup | None, spec: str | None, options: DeviceOptions, name: str | None
) -> Device:
    system.check_run("open_device")
    *others, last = await trio.to_thread.run_sync(candidates, spec)
    for backend, info in others:
        device = _expect(system, group, backend, info, options, name)
        # The program has named no device, so another one will do. Errors of the options were raised by now.
        try:
            return await system.start_device(device, group)
        except NotSupportedError as error:
            _tell_left_out(info, error)
    return await system.start_device(_expect(system, group, *last, options, name), group)


def _tell_left_out(info: DeviceInfo, error: NotSupportedError) -> None:
    _logger.warning("%s was found, but cannot be opened: %s", info.name, error.message)


async def _open_all(
    system: System,
    group: DeviceGroup,
    chosen: Sequence[tuple[AccelBackend, DeviceInfo]],
    *,
    is_each_named: bool,
) -> Exception | None:
    """Open the devices of a group at the same time; returns why it has none, for its caller to raise."""
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
            # They may have come in any order.
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
    """Find the devices of a group; blocks."""
    if specs is None or isinstance(specs, str):
        return members(specs)
    return tuple([candidates(spec)[0] for spec in specs])


def _check_options(where: str, options: object) -> None:
    if options is not None and not isinstance(options, DeviceOptions):
        raise TypeError(f"{where}: options must be DeviceOptions, got {options!r}")


def _check_group(specs: object, options: object, policy: object) -> None:
    """Refuse what no group can be opened with.

    Raises:
        TypeError, ValueError: It is no such argument.
    """
    names = cast("Sequence[object]", () if specs is None else specs)
    if not isinstance(specs, str | Sequence | None) or not all(isinstance(each, str) for each in names):
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
    """Open a device with the memory of one that was given up, which keeps it if that fails."""
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
    """Make a device that is to be started.

    Raises:
        ValueError: The name is taken.
        NotSupportedError: It does not have an option.
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


def _free_path(system: System, group: DeviceGroup | None, info: DeviceInfo, given: str | None) -> str:
    """Find a path in the tree, numbered where it is taken; warns if the device is open already.

    Raises:
        ValueError: The program has given a name that is taken.
    """
    parent = system.name if group is None else group.path
    # Others may be on their way to the tree.
    actor_classes = {actor.path: actor.actor_class for actor in system.tree().walk()}
    taken = actor_classes.keys() | system.opening
    if given is not None:
        if f"{parent}/{given}" in taken:
            raise ValueError(f"open_device: name={given!r} is taken: there is {parent}/{given} already")
        return f"{parent}/{given}"
    named = {device.path for device in system.devices if device.name == info.name}
    names = itertools.chain([info.name], (f"{info.name}#{number}" for number in itertools.count(2)))
    path = next(path for name in names if (path := f"{parent}/{name}") not in taken)
    for other in (*actor_classes, *system.opening):
        above, _, name = other.rpartition("/")
        # A group that has a device twice means it.
        is_meant = group is not None and above == parent
        is_same = name.partition("#")[0] == info.name and actor_classes.get(other, _DEVICE) == _DEVICE
        if (is_same or other in named) and not is_meant:
            # No refusal: a program may want an inline context beside a worker, and tests two for two devices.
            warnings.warn(
                f"open_device: {info.name} is open already, as {other}; {path} "
                "is a second context, with memory of its own. Share the Device object that you have, or "
                "close it first; where two contexts are meant, give this one a name: open_device(name=...)",
                RuntimeWarning,
                stacklevel=_levels_to_caller(),
            )
            break
    return path


_DEVICE = DeviceActor.__name__


def _levels_to_caller() -> int:
    """Tell how far up the stack the program is, for a warning of the function that calls this."""
    # A group is opened by way of `contextlib`.
    between, level = (__name__.partition(".")[0] + ".", "contextlib."), 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while (
        frame is not None
        and frame.f_back is not None
        and f"{frame.f_globals.get('__name__')}.".startswith(between)
    ):
        frame, level = frame.f_back, level + 1
    return level


def options_of_heir(old: OpenDevice, options: DeviceOptions | None) -> DeviceOptions:
    """Choose the options of the device that adopts: as for the old one, where none are given.

    Raises:
        ValueError: The arrays are out of reach of such a device.
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
    """Refuse a device that leaves nothing; waits for the end of one that is just being given up.

    Raises:
        ValueError: It is another system's, is open, was closed, or was adopted already.
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
        raise _not_adopted(
            f"the arrays are in the memory of {old.name}, which {info.name} cannot use; open {old.name!r}"
        )
    dispatch = old.dispatch
    assert isinstance(dispatch, WorkerDispatch)  # as `_check_adoption` has seen
    memory = dispatch.left
    if memory is None:
        # Another call has adopted the memory while this one was on its way.
        raise _adopted_already(old, dispatch)
    limit = options.memory_limit
    if limit is not None and memory.nbytes > limit:
        raise _not_adopted(f"the arrays take {memory.nbytes} bytes, more than memory_limit = {limit}")
    if old.state.leases:
        raise _not_adopted(f"{old.state.leases} of the arrays of {old.path} are leased; end the leases first")
    memory.take(old.state.system)
    dispatch.left, dispatch.adopted_by = None, heir
    return memory


def _not_adopted(why: str) -> ValueError:
    return ValueError(f"open_device: adopt: {why}")


def _adopted_already(old: OpenDevice, dispatch: WorkerDispatch) -> ValueError:
    return _not_adopted(f"the arrays of {old.path} were adopted already, by {dispatch.adopted_by}")
