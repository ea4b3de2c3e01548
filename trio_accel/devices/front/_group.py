"""Several devices as one whole, and which of them gets the next work: rules that groups and routers share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, NoReturn, Protocol, TypeAlias, TypeVar

import attrs
from trio.lowlevel import enable_ki_protection

from ...actors import NotAwaited, SupervisorScope, named_arguments, not_copied
from ...backends.base import AccelError
from ..base._options import DeviceOptions
from ..base._refusals import whole
from ..operations._ref import AccelRef, Device
from ._device import OpenDevice, opened
from ._html import html_table

__all__ = [
    "DeviceGroup",
    "DeviceLoad",
    "DeviceOpening",
    "Key",
    "PlacementError",
    "PlacementPolicy",
    "available",
    "by_key",
    "by_load",
]


@attrs.define(eq=False)
class DeviceOpening(NotAwaited):
    """A device being opened: await it, or use it in ``async with``, which closes the device at the end."""

    what_to_do = (
        "the device is not open yet: device = await system.open_device(...), "
        "or async with system.open_device(...) as device"
    )

    _open: Callable[[], Awaitable[Device]]
    _device: Device | None = attrs.field(default=None, init=False)

    def __await__(self) -> Generator[Any, Any, Device]:
        return self._open().__await__()

    @enable_ki_protection
    async def __aenter__(self) -> Device:
        self._device = await self
        return self._device

    @enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
        if self._device is not None:
            await self._device.close()  # noqa: ASYNC102  # it shields itself


Key: TypeAlias = str | bytes | int
"""Types of keys: equal keys have equal places, in every process."""


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


class _Living(Protocol):
    @property
    def is_available(self) -> bool: ...
    @property
    def is_dead(self) -> bool: ...


NamedT = TypeVar("NamedT", bound=_HasName)
LivingT = TypeVar("LivingT", bound=_Living)


def available(candidates: Iterable[LivingT], *, skips: bool) -> list[LivingT]:
    """Leave out those that have ended for good.

    Args:
        candidates: All that there are.
        skips: Whether those that are being restarted or rebuilt are left out too, as long as another works.
    """
    alive = [candidate for candidate in candidates if not candidate.is_dead]
    return [candidate for candidate in alive if candidate.is_available or not skips] or alive


def by_key(key: object, candidates: Sequence[NamedT]) -> NamedT:
    """Find the place of a key by rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998).

    The key and the names decide, not the number or order of the candidates. So when one goes, its keys move
    to all the others, and when one comes, it gets a share of the keys of each. No other key moves.

    Args:
        key: A str, bytes or an int.
        candidates: At least one.

    Raises:
        TypeError: The key is of another type.
    """
    text = _as_bytes(key)
    return max(candidates, key=lambda candidate: (_score(text, candidate.name), candidate.name))


def _score(key: bytes, name: str) -> bytes:
    # The length parts the two, so that no other pair gives the same text.
    named = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(len(named).to_bytes(8, "big") + named + key, digest_size=16).digest()


def _as_bytes(key: object) -> bytes:
    """Return a key as bytes, by which keys of several types differ."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, int):
        return b"i" + str(int(key)).encode()
    raise TypeError(f"a key must be a str, bytes or an int, got {key!r}")


@attrs.frozen(kw_only=True)
class DeviceLoad:
    """The load of one device of a `DeviceGroup`, as this process knows it: the device is not asked.

    Attributes:
        device: The device.
        name: Its name in the group, such as ``"cuda:0"``; keys find it by that.
        in_flight: Operations that were handed over and are not done.
        free: Bytes that arrays may still take: its limit, and the memory of the hardware, less the arrays
            that the system has there.
        turn: Number of its last placing in the group, from 1; 0 if it had none.
    """

    device: Device
    name: str
    in_flight: int
    free: int
    turn: int = 0

    @property
    def is_available(self) -> bool:
        """Whether it has a context now."""
        return self.device.is_ready

    @property
    def is_dead(self) -> bool:
        """Whether it was closed or given up."""
        return self.device.is_ended


PlacementPolicy: TypeAlias = Callable[[Sequence[DeviceLoad]], DeviceLoad]
"""Chooses one of the devices, of which there is at least one."""


def by_load(loads: Sequence[DeviceLoad]) -> DeviceLoad:
    """Choose the device with the fewest operations in flight: the policy of a group that has no other.

    Equal ones are told apart by the most free memory, and then by the longest time since the last choice.
    """
    return min(loads, key=lambda load: (load.in_flight, -load.free, load.turn))


@attrs.define(eq=False, slots=False)
class PlacementError(AccelError):
    """No device of a group meets the hints.

    Attributes:
        reasons: The reason why each device does not, by its path.
    """

    reasons: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True)


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
    """The conditions under which a device is chosen.

    Raises:
        TypeError, ValueError: A hint that is none.
        StaleRefError: The array must not be used any more.
    """

    backend: str | None
    product: str | None
    memory: int
    exclude: Collection[Device]
    owner_of: AccelRef | None

    def __attrs_post_init__(self) -> None:
        for name in ("backend", "product"):
            value: object = getattr(self, name)
            if not isinstance(value, str | None):
                raise TypeError(f"place: {name} must be a str or None, got {value!r}")
        if whole("place", "memory", self.memory, "bytes, an integer") < 0:
            raise ValueError(f"place: memory must be at least 0, got {self.memory}")
        if not isinstance(self.exclude, Collection) or not all(
            isinstance(one, Device) for one in self.exclude
        ):
            raise TypeError(f"place: exclude must be open devices, got {self.exclude!r}")
        if self.owner_of is not None:
            if not isinstance(self.owner_of, AccelRef):
                raise TypeError(f"place: owner_of must be an array of a device, got {self.owner_of!r}")
            self.owner_of.block.check("place: owner_of")

    def refusals(self, load: DeviceLoad) -> Iterator[str]:
        """Tell why a device is not to be chosen; nothing if it may be."""
        device, info = load.device, load.device.info
        if load.is_dead:
            yield "was given up" if opened(device).state.is_given_up else "was closed"
        if any(device is one for one in self.exclude):
            yield "is excluded"
        if self.owner_of is not None and self.owner_of.device is not device:
            yield "does not have the array"
        if self.backend not in (None, info.backend):
            yield f"is of backend {info.backend!r}, and not {self.backend!r}"
        if self.product is not None and self.product.lower() not in info.description.lower():
            yield f"is a {info.description!r}, and no {self.product!r}"
        if load.free < self.memory:
            yield f"has {load.free} bytes free, and {self.memory} are needed"


@attrs.define(eq=False)
class DeviceGroup:
    """Devices that were opened together, and that are closed together. Made by `System.open_devices`.

    Each is supervised as any other: one that loses its context gets the next, and one that is given up leaves
    the group, while the others go on. Iterating over a group gives its open devices.

    Attributes:
        options: How devices are opened in it where nothing else is said.
        scope: The supervisor of its devices.
    """

    _home: _Home
    scope: SupervisorScope
    options: DeviceOptions
    _policy: PlacementPolicy
    # The members, by their names in the group. One that has ended stays until another takes its name.
    _members: dict[str, OpenDevice] = attrs.field(factory=dict[str, OpenDevice], init=False)
    _turns: Counter[str] = attrs.field(factory=Counter[str], init=False)
    _last_turn: int = attrs.field(default=0, init=False)

    def __repr__(self) -> str:
        return f"<DeviceGroup {self.path}, {len(self)} devices>"

    def _repr_html_(self) -> str:
        members = self._members.values()
        return html_table(
            ("device", "hardware", "state", "generation", "waiting requests"),
            [(one.path, one.info.description, one.condition, one.generation, one.pending) for one in members],
        )

    @property
    def path(self) -> str:
        """Path of the group in the tree; those of its devices begin with it."""
        return self.scope.path

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices that are open, in the order in which they were opened."""
        return tuple(device for device in self._members.values() if not device.is_ended)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    if not TYPE_CHECKING:  # a type checker reports it where there is none

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError("a DeviceGroup cannot be indexed; index its tuple of devices: devices.devices[0]")

        def __getattr__(self, name: str) -> NoReturn:
            told = f"; its devices have it: group.devices[0].{name}" if hasattr(Device, name) else ""
            raise AttributeError(f"a DeviceGroup has no attribute {name!r}{told}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a DeviceGroup", "open one where it is needed")

    def add(self, device: OpenDevice) -> None:
        """Take a device in that has just been opened for the group."""
        name = device.path.rpartition("/")[2]
        # The member goes to the end, if another had the name.
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
        owner_of: AccelRef | None = None,
    ) -> Device:
        """Choose the device that gets the next work. Waits for nothing, and takes nothing of the device.

        It is the one that the policy of the group chooses among those that meet the hints: where none was
        given, that with the fewest operations in flight, then the most free memory, then that which was not
        chosen for longest. A device without a context is left out as long as another one that meets the
        hints has one; otherwise its requests wait for the next context. One that was closed or given up is
        never chosen.

        With a key the policy is not asked. Equal keys go to the same device, in every process and in any
        order. When that has ended, its keys move to all the others, and no other key moves. While it has no
        context, its keys stay, and their requests wait for it.

        Args:
            backend: Only devices of this backend, such as ``"cuda"``.
            product: Only devices with this text in their description, such as ``"H200"``, in any case.
            memory: Bytes that must be free; they are not reserved.
            key: What is to stay on one device, such as a session.
            exclude: Devices that are not to be chosen.
            owner_of: An array: only the device that has it.

        Raises:
            PlacementError: No device meets the hints; it says of each why not.
            TypeError: An argument of another type, or a policy that returns something else.
            ValueError: `memory` is negative.
            StaleRefError: The array of `owner_of` must not be used any more.
            RuntimeError: It is called in another thread or Trio run than the system's.
        """
        self._home.check_run("place")
        hints = _Hints(backend, product, memory, exclude, owner_of)
        loads = tuple(self._loads())
        reasons = {load.device.path: why for load in loads if (why := next(hints.refusals(load), None))}
        fitting = available(
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
        # Devices outside of the group count, too: hardware has one memory, however many contexts.
        held = {device: opened(device).state.blocks.held() for device in self._home.devices}
        taken: Counter[str] = Counter()
        for other, nbytes in held.items():
            taken[other.name] += nbytes
        for name, device in self._members.items():
            limit = device.options.memory_limit
            free = device.info.total_memory - taken[device.name]
            if limit is not None:
                free = min(free, limit - held.get(device, 0))
            yield DeviceLoad(
                device=device,
                name=name,
                in_flight=device.dispatch.unfinished,
                free=max(0, free),
                turn=self._turns[name],
            )
