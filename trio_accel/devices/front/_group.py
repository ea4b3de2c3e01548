"""Several devices as one group, and the choice among them: rules that groups and routers share."""

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
from ..base._refusals import bounded_integer
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
    """An opening device. Await it, or use it in ``async with``, which closes it at the end."""

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
"""The types of keys. Equal keys have the same device in every process."""


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
    """Leave out permanently ended candidates.

    Args:
        candidates: All candidates.
        skips: Whether restarting or rebuilding candidates are also left out, as long as another one works.
    """
    alive = [candidate for candidate in candidates if not candidate.is_dead]
    return [candidate for candidate in alive if candidate.is_available or not skips] or alive


def by_key(key: object, candidates: Sequence[NamedT]) -> NamedT:
    """Choose the candidate of a key by rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998).

    The key and the names decide, and not the number or order of the candidates. So when a candidate is
    removed, its keys move to all the others, and when one is added, it gets a share of the keys of each. No
    other key moves.

    Args:
        key: A str, bytes or an int.
        candidates: At least one.

    Raises:
        TypeError: The key is of another type.
    """
    text = _as_bytes(key)
    return max(candidates, key=lambda candidate: (_score(text, candidate.name), candidate.name))


def _score(key: bytes, name: str) -> bytes:
    # The length separates the two, so that no other pair gives the same bytes.
    named = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(len(named).to_bytes(8, "big") + named + key, digest_size=16).digest()


def _as_bytes(key: object) -> bytes:
    """Return a key as bytes, which differ for keys of different types."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, int):
        return b"i" + str(int(key)).encode()
    raise TypeError(f"a key must be a str, bytes or an int, got {key!r}")


@attrs.frozen(kw_only=True)
class DeviceLoad:
    """The load of one device in a `DeviceGroup`, as this process knows it, without asking the device.

    Attributes:
        device: The device.
        name: Its name in the group, such as ``"cuda:0"``, by which keys are assigned.
        in_flight: The number of submitted operations that are not done.
        free: The bytes that are available for arrays: the smaller of its limit and the hardware's memory,
            minus the arrays that the system has there.
        turn: The number of its last placing in the group, from 1; 0 if there was none.
    """

    device: Device
    name: str
    in_flight: int
    free: int
    turn: int = 0

    @property
    def is_available(self) -> bool:
        """Whether the device has a context now."""
        return self.device.is_ready

    @property
    def is_dead(self) -> bool:
        """Whether the device has ended."""
        return self.device.is_ended


PlacementPolicy: TypeAlias = Callable[[Sequence[DeviceLoad]], DeviceLoad]
"""Chooses one of the given devices, of which there is at least one."""


def by_load(loads: Sequence[DeviceLoad]) -> DeviceLoad:
    """Choose the device with the fewest operations in flight. This is the default policy of a group.

    Among equal devices it chooses by free memory, and then the longest unchosen device.
    """
    return min(loads, key=lambda load: (load.in_flight, -load.free, load.turn))


@attrs.define(eq=False, slots=False)
class PlacementError(AccelError):
    """No device of a group satisfies the hints.

    Attributes:
        reasons: The reason why each device does not, by its path.
    """

    reasons: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True)


class _Home(Protocol):
    """The system of a group."""

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
    """The conditions for the choice of a device.

    Raises:
        TypeError, ValueError: A hint is invalid.
        StaleRefError: The array is no longer valid.
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
        if bounded_integer("place", "memory", self.memory, "bytes, an integer") < 0:
            raise ValueError(f"place: memory must be at least 0, got {self.memory}")
        if not isinstance(self.exclude, Collection) or not all(
            isinstance(device, Device) for device in self.exclude
        ):
            raise TypeError(f"place: exclude must be open devices, got {self.exclude!r}")
        if self.owner_of is not None:
            if not isinstance(self.owner_of, AccelRef):
                raise TypeError(f"place: owner_of must be an array of a device, got {self.owner_of!r}")
            self.owner_of.block.check("place: owner_of")

    def refusals(self, load: DeviceLoad) -> Iterator[str]:
        """Yield the reasons why a device must not be chosen; none if it may be."""
        device, info = load.device, load.device.info
        if load.is_dead:
            yield "was given up" if opened(device).state.is_given_up else "was closed"
        if any(device is excluded for excluded in self.exclude):
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
    """Devices opened and closed together. Made by `System.open_devices`.

    Each is supervised like any other: a device that loses its context gets the next one, and a device that
    has failed for good leaves the group, while the others continue. Iterating over a group gives its open
    devices.

    Attributes:
        options: The default options of its devices.
        scope: The supervisor of its devices.
    """

    _home: _Home
    scope: SupervisorScope
    options: DeviceOptions
    _policy: PlacementPolicy
    # The members, by their names in the group. An ended device stays until another takes its name.
    _members: dict[str, OpenDevice] = attrs.field(factory=dict[str, OpenDevice], init=False)
    _turns: Counter[str] = attrs.field(factory=Counter[str], init=False)
    _last_turn: int = attrs.field(default=0, init=False)

    def __repr__(self) -> str:
        return f"<DeviceGroup {self.path}, {len(self)} devices>"

    def _repr_html_(self) -> str:
        members = self._members.values()
        return html_table(
            ("device", "hardware", "state", "generation", "waiting requests"),
            [
                (device.path, device.info.description, device.condition, device.generation, device.pending)
                for device in members
            ],
        )

    @property
    def path(self) -> str:
        """The path of the group in the tree; the paths of its devices begin with it."""
        return self.scope.path

    @property
    def devices(self) -> tuple[Device, ...]:
        """The open devices, in the order in which they were opened."""
        return tuple(device for device in self._members.values() if not device.is_ended)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    if not TYPE_CHECKING:  # so that type checkers report their use

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError("a DeviceGroup cannot be indexed; index its tuple of devices: devices.devices[0]")

        def __getattr__(self, name: str) -> NoReturn:
            hint = f"; its devices have it: group.devices[0].{name}" if hasattr(Device, name) else ""
            raise AttributeError(f"a DeviceGroup has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a DeviceGroup", "open one where it is needed")

    def add(self, device: OpenDevice) -> None:
        """Add a newly opened device to the group."""
        name = device.path.rpartition("/")[2]
        # The device is added at the end, even if another had its name.
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
        """Open another device in the group, for example to replace a failed device.

        It works like `System.open_device`. A second context on hardware of the group is taken as intended, so
        it causes no warning.

        Args:
            spec: The name of a backend or device.
            options: The options with which it is opened and supervised; None for the options of the group, or
                with `adopt` those of that device.
            adopt: A device of this system that has failed for good.
            name: Its name below the group in the tree; by default the name of the hardware.

        Raises:
            Exception: See `System.open_device`.
        """
        if adopt is None and options is None:
            options = self.options
        return self._home.open_in(self, spec, options, adopt, name, _unknown)

    def loads(self) -> tuple[DeviceLoad, ...]:
        """Return the loads of its open devices, as this process knows them, without asking the devices.

        Raises:
            RuntimeError: You call it in another thread or Trio run than the system's.
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
        """Choose the device for the next work. This neither waits nor reserves anything.

        The policy of the group chooses among the devices that satisfy the hints. The default policy takes the
        device with the fewest operations in flight, then with the most free memory, then the longest unchosen
        one. A device without a context is left out as long as another device with a context satisfies the
        hints; otherwise its requests wait for the next context. An ended device is never chosen.

        With a key, the policy is not used. Equal keys get the same device, in every process and in any order.
        When that device has ended, its keys move to all the others, and no other key moves. While it rebuilds
        its context, its keys stay, and their requests wait for it.

        Args:
            backend: Only devices of this backend, such as ``"cuda"``.
            product: Only devices with this text in their description, such as ``"H200"``, in any case.
            memory: The bytes that must be free; they are not reserved.
            key: A key for work that must stay on one device, such as a session.
            exclude: Devices that must not be chosen.
            owner_of: An array: only its device.

        Raises:
            PlacementError: No device satisfies the hints; the error gives the reason for each device.
            TypeError: An argument has another type, or the policy returns something else.
            ValueError: `memory` is negative.
            StaleRefError: The array of `owner_of` is no longer valid.
            RuntimeError: You call it in another thread or Trio run than the system's.
        """
        self._home.check_run("place")
        hints = _Hints(backend, product, memory, exclude, owner_of)
        loads = tuple(self._loads())
        reasons = {load.device.path: reason for load in loads if (reason := next(hints.refusals(load), None))}
        fitting = available(
            [load for load in loads if load.device.path not in reasons],
            # D149: cached data for a key is on its device, and exists again with the next context.
            skips=key is None,
        )
        if not fitting:
            details = "; ".join(f"{path} {reason}" for path, reason in reasons.items())
            raise PlacementError(
                f"place: no device of the group {self.path} meets the hints: {details}", reasons=reasons
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
        # Devices outside of the group also count, because all contexts share the hardware's memory.
        held = {device: opened(device).state.blocks.held() for device in self._home.devices}
        taken: Counter[str] = Counter()
        for holder, nbytes in held.items():
            taken[holder.name] += nbytes
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
