"""Which of several devices, or of models on them, gets the next work: rules that groups and routers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import attrs

from ...backends.base import AccelError
from ..operations._ref import Device

__all__ = ["DeviceLoad", "Key", "PlacementError", "PlacementPolicy", "able", "by_key", "by_load"]

Key: TypeAlias = str | bytes | int
"""Types of keys: equal keys have equal places, in every process."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Living(Protocol):
    @property
    def is_available(self) -> bool: ...
    @property
    def is_dead(self) -> bool: ...


NamedT = TypeVar("NamedT", bound=_Named)
LivingT = TypeVar("LivingT", bound=_Living)


def able(candidates: Iterable[LivingT], *, skips: bool) -> list[LivingT]:
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
            that the system has there. With readings it is no more than the GPU itself has free.
        utilization: Share of the last moments in which a kernel ran, in percent, by any program; None without
            a reading.
        turn: Number of its last placing in the group, from 1; 0 if it had none.
    """

    device: Device
    name: str
    in_flight: int
    free: int
    utilization: int | None = None
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

    Of equal ones it takes the one with the lowest utilization, where one without a reading counts as idle. Of
    those it takes the one with the most free memory, and of those the one that was not chosen for longest.
    """
    return min(loads, key=lambda load: (load.in_flight, load.utilization or 0, -load.free, load.turn))


@attrs.define(eq=False, slots=False)
class PlacementError(AccelError):
    """No device of a group meets the hints.

    Attributes:
        reasons: By the path of each device why it does not.
    """

    reasons: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True)
