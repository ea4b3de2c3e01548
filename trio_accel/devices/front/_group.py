"""Several devices as one whole, and which of them gets the next work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Never, Protocol

import attrs

from ...actors import SupervisorScope, named_arguments
from ..base._options import DeviceOptions
from ..operations._ref import AccelRef, Device
from ._device import OpenDevice, opened
from ._opening import DeviceOpening
from ._placement import DeviceLoad, Key, PlacementError, PlacementPolicy, able, by_key

__all__ = ["DeviceGroup", "GpuFigures", "GpuReadings"]


class GpuFigures(Protocol):
    """What a group takes from the reading of a GPU; `GpuReading` has it."""

    @property
    def uuid(self) -> str | None:
        """Its id in NVIDIA's tools."""
        ...

    @property
    def utilization(self) -> int | None:
        """Share of the last moments in which a kernel ran, in percent."""
        ...

    @property
    def memory_used(self) -> int | None:
        """Bytes that are taken, by all processes."""
        ...

    @property
    def memory_total(self) -> int | None:
        """Bytes that there are."""
        ...


class GpuReadings(Protocol):
    """A source of readings of GPUs, such as what `watch_gpus` yields."""

    @property
    def latest(self) -> Sequence[GpuFigures]:
        """The last readings."""
        ...


class _Home(Protocol):
    """The system of a group, as that sees it."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    def check_run(self, verb: str) -> None: ...

    def open_in(
        self,
        group: DeviceGroup | None,
        spec: str | None,
        options: DeviceOptions | None,
        adopt: Device | None,
        name: str | None,
        unknown: Mapping[str, object],
    ) -> DeviceOpening: ...


@attrs.frozen
class _Hints:
    """What a device must be to be chosen.

    Raises:
        TypeError, ValueError: A hint that is none.
        StaleRefError: The array must not be used any more.
    """

    backend: str | None
    product: str | None
    memory: int
    exclude: Collection[Device]
    near: AccelRef | None

    def __attrs_post_init__(self) -> None:
        for name in ("backend", "product"):
            value: object = getattr(self, name)
            if not isinstance(value, str | None):
                raise TypeError(f"place: {name} must be a str or None, got {value!r}")
        if isinstance(self.memory, bool) or not isinstance(self.memory, int):
            raise TypeError(f"place: memory must be bytes, a whole number, got {self.memory!r}")
        if self.memory < 0:
            raise ValueError(f"place: memory must be at least 0, got {self.memory}")
        if not isinstance(self.exclude, Collection) or not all(
            isinstance(one, Device) for one in self.exclude
        ):
            raise TypeError(f"place: exclude must be open devices, got {self.exclude!r}")
        if self.near is not None:
            if not isinstance(self.near, AccelRef):
                raise TypeError(f"place: near must be an array of a device, got {self.near!r}")
            self.near.block.check("place: near")

    def refusals(self, load: DeviceLoad) -> Iterator[str]:
        """Tell why a device is not to be chosen; nothing if it may be."""
        device, info = load.device, load.device.info
        if load.is_dead:
            yield "was given up" if opened(device).state.is_given_up else "was closed"
        if any(device is one for one in self.exclude):
            yield "is excluded"
        if self.near is not None and self.near.device is not device:
            yield "does not have the array"
        if self.backend not in (None, info.backend):
            yield f"is of backend {info.backend!r}, and not {self.backend!r}"
        if self.product is not None and self.product.lower() not in info.description.lower():
            yield f"is a {info.description!r}, and no {self.product!r}"
        if load.free < self.memory:
            yield f"has {load.free} bytes free, and {self.memory} are needed"


class DeviceGroup:
    """Devices that were opened together, and that are closed together. Made by `System.open_devices`.

    Each is supervised as any other: one that loses its context gets the next, and one that is given up leaves
    the group, while the others go on. Iterating over a group gives its open devices.

    Attributes:
        path: Path of the group in the tree; those of its devices begin with it.
        options: How devices are opened in it where nothing else is said.
        scope: The supervisor of its devices.
    """

    def __init__(
        self,
        home: _Home,
        scope: SupervisorScope,
        options: DeviceOptions,
        policy: PlacementPolicy,
        readings: GpuReadings | None,
    ) -> None:
        self.path: str = scope.path
        self.options: DeviceOptions = options
        self.scope: SupervisorScope = scope
        self._home = home
        self._policy = policy
        self._readings = readings
        # By their names in the group. One that has ended stays until another takes its name.
        self._members: dict[str, OpenDevice] = {}
        self._turns: Counter[str] = Counter()
        self._last_turn = 0

    def __repr__(self) -> str:
        return f"<DeviceGroup {self.path}, {len(self)} devices>"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices that are open, in the order in which they were opened."""
        return tuple(device for device in self._members.values() if not device.is_ended)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def add(self, device: OpenDevice) -> None:
        """Take a device in that has just been opened for the group."""
        name = device.path.rpartition("/")[2]
        # To the end, if another had the name.
        self._members.pop(name, None)
        self._turns.pop(name, None)
        self._members[name] = device

    def open_device(
        self,
        spec: str | None = None,
        *,
        options: DeviceOptions | None = None,
        adopt: Device | None = None,
        name: str | None = None,
        **_unknown: Never,
    ) -> DeviceOpening:
        """Open one more device in the group, such as in place of one that was given up.

        As `System.open_device`. A second context on hardware that the group has already is meant to be one,
        so no warning tells of it.

        Args:
            spec: Name of a backend or device.
            options: How it is opened and supervised; None for the options of the group, or with `adopt` those
                of that device.
            adopt: A device of this system that was given up.
            name: Its name below the group in the tree; by default that of the hardware.

        Raises:
            Exception: See `System.open_device`.
        """
        if adopt is None and options is None:
            options = self.options
        return self._home.open_in(self, spec, options, adopt, name, _unknown)

    def loads(self) -> tuple[DeviceLoad, ...]:
        """Return the loads of its open devices, as this process knows them: no device is asked.

        Raises:
            RuntimeError: It is called in another thread or Trio run than the system's.
        """
        self._home.check_run("loads")
        return tuple(load for load in self._loads() if not load.is_dead)

    @named_arguments
    def place(
        self,
        *,
        backend: str | None = None,
        product: str | None = None,
        memory: int = 0,
        key: Key | None = None,
        exclude: Collection[Device] = (),
        near: AccelRef | None = None,
    ) -> Device:
        """Choose the device that gets the next work. Waits for nothing, and takes nothing of the device.

        Of the devices that meet the hints, it is the one that the policy of the group chooses: where none was
        given, that with the fewest operations in flight, then the lowest utilization, then the most free
        memory, then that which was not chosen for longest. A device without a context is left out as long as
        another one that meets the hints has one; otherwise its requests wait for the next context. One that
        was closed or given up is never chosen.

        With a key the policy is not asked. Equal keys go to the same device, in every process and in any
        order. When that has ended, its keys move to all the others, and no other key moves. While it has no
        context, its keys stay, and their requests wait for it.

        Args:
            backend: Only devices of this backend, such as ``"cuda"``.
            product: Only devices with this text in their description, such as ``"H200"``, in any case.
            memory: Bytes that must be free; they are not reserved.
            key: What is to stay on one device, such as a session.
            exclude: Devices that are not to be chosen.
            near: An array: only the device that has it.

        Raises:
            PlacementError: No device meets the hints; it says of each why not.
            TypeError: An argument of another type, or a policy that returns something else.
            ValueError: `memory` is negative.
            StaleRefError: The array of `near` must not be used any more.
            RuntimeError: It is called in another thread or Trio run than the system's.
        """
        self._home.check_run("place")
        hints = _Hints(backend, product, memory, exclude, near)
        loads = tuple(self._loads())
        reasons = {load.device.path: why for load in loads if (why := next(hints.refusals(load), None))}
        fitting = able(
            [load for load in loads if load.device.path not in reasons],
            # D149: what is kept for a key is on its device, and is there again with the next context.
            skips=key is None,
        )
        if not fitting:
            told = "; ".join(f"{path} {why}" for path, why in reasons.items())
            raise PlacementError(
                f"place: no device of the group {self.path} meets the hints: {told}", reasons=reasons
            )
        chosen = self._policy(fitting) if key is None else by_key(key, fitting)
        if not any(chosen is load for load in fitting):
            raise TypeError(
                f"place: the policy must return one of the loads that it is given, got {chosen!r}"
            )
        self._last_turn += 1
        self._turns[chosen.name] = self._last_turn
        return chosen.device

    def _loads(self) -> Iterator[DeviceLoad]:
        # Of devices outside of the group too: hardware has one memory, however many contexts.
        held = {device: opened(device).state.blocks.held() for device in self._home.devices}
        taken: Counter[str] = Counter()
        for other, nbytes in held.items():
            taken[other.name] += nbytes
        latest = () if self._readings is None else self._readings.latest
        readings = {one.uuid.lower(): one for one in latest if one.uuid is not None}
        for name, device in self._members.items():
            limit = device.options.memory_limit
            free = [device.info.total_memory - taken[device.name]]
            if limit is not None:
                free.append(limit - held.get(device, 0))
            reading = readings.get((device.info.uuid or "").lower())
            if reading is not None and reading.memory_total is not None and reading.memory_used is not None:
                free.append(reading.memory_total - reading.memory_used)
            yield DeviceLoad(
                device=device,
                name=name,
                in_flight=device.dispatch.unfinished,
                free=max(0, min(free)),
                utilization=None if reading is None else reading.utilization,
                turn=self._turns[name],
            )
