"""What devices say of themselves, asked for in the background."""

from __future__ import annotations

from collections import Counter

import attrs
import trio

from ..actors import ActorRestarted, ActorSnapshot, ActorStarted, Event, System
from ..devices import Device, DeviceStatistics, LibraryStatistics, QueueStatistics
from ..devices import System as DeviceSystem
from ._snapshot import ActorMemoryRow, CacheRow, DeviceRow, LibraryRow, MemoryRow
from ._tally import OTHER_ACTORS

__all__ = ["DeviceRows"]

# Younger counts of a device are not asked for again.
_FRESH = 0.5
# Of one device, in a snapshot.
_MOST_ACTORS = 100
_IDLE = QueueStatistics(waiting=0, in_flight=0)
_UNUSED = LibraryStatistics()


@attrs.define(eq=False)
class _Known:
    """What is known of one device.

    Attributes:
        statistics: Its own counts, as it told them last.
        told_at: When it did, on Trio's clock.
        asking: Set when the device, which is being asked, has answered or failed; None while it is not asked.
        scope: Around who asks.
        lost_at: When its context was lost, while there is no other.
        recovery_time: Seconds that the last recovery took.
    """

    statistics: DeviceStatistics | None = None
    told_at: float = float("-inf")
    asking: trio.Event | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    lost_at: float | None = None
    recovery_time: float | None = None


class DeviceRows:
    """The devices of a system, as they were when they last answered.

    A device answers from its worker process, which may hang. So a snapshot does not wait for that: tasks of
    their own ask, at most one for each device.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._known: dict[Device, _Known] = {}
        self._is_closed = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The open devices."""
        return self._system.devices if isinstance(self._system, DeviceSystem) else ()

    def observe(self, event: Event) -> None:
        """See how long a device has no context."""
        if not isinstance(event, (ActorRestarted, ActorStarted)) or not event.path.endswith("/context"):
            return
        path = event.path.removesuffix("/context")
        for device in self.devices:
            if device.path == path:
                known = self._of(device)
                if isinstance(event, ActorRestarted):
                    if known.lost_at is None:
                        known.lost_at = trio.current_time()
                elif known.lost_at is not None:
                    known.recovery_time = trio.current_time() - known.lost_at
                    known.lost_at = None

    def ask(self) -> list[trio.Event]:
        """Have the devices asked whose counts are old; returns what is set when they have answered."""
        devices = self.devices
        for gone in self._known.keys() - set(devices):
            self._known.pop(gone).scope.cancel(reason="the device has ended")
        now = trio.current_time()
        for device in devices:
            known = self._of(device)
            if known.asking is None and known.told_at < now - _FRESH and not self._is_closed:
                known.asking, known.scope = trio.Event(), trio.CancelScope()
                trio.lowlevel.spawn_system_task(self._ask, device, known, name=f"statistics of {device.path}")
        return [known.asking for known in self._known.values() if known.asking is not None]

    async def _ask(self, device: Device, known: _Known) -> None:
        asking = known.asking
        assert asking is not None
        try:
            with known.scope:
                known.statistics = await device.statistics()
                known.told_at = trio.current_time()
        except Exception:  # noqa: BLE001  # a device that is lost or closes says so to its own askers
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            known.asking = None
            asking.set()

    def close(self) -> None:
        """Stop asking."""
        self._is_closed = True
        for known in self._known.values():
            known.scope.cancel(reason="recording ends")

    def rows(self, actors: dict[str, ActorSnapshot]) -> tuple[DeviceRow, ...]:
        """The devices now.

        Args:
            actors: All actors by their paths.
        """
        return tuple([_row(device, self._of(device), actors) for device in self.devices])

    def array_bytes(self) -> Counter[str]:
        """Bytes of the arrays of all devices, by the path of the actor that made them."""
        found: Counter[str] = Counter()
        for known in self._known.values():
            if known.statistics is not None:
                found.update(known.statistics.actors)
        return found

    def _of(self, device: Device) -> _Known:
        known = self._known.get(device)
        if known is None:
            known = self._known[device] = _Known()
        return known


def _row(device: Device, known: _Known, actors: dict[str, ActorSnapshot]) -> DeviceRow:
    context, cost = actors.get(f"{device.path}/context"), device.recovery
    row = DeviceRow(
        path=device.path,
        name=device.name,
        backend=device.info.backend,
        isolation=device.isolation,
        state="restarting" if context is None else context.state,
        generation=device.generation,
        losses=device.losses,
        recovery_time=known.recovery_time,
        recovery_cost=cost.seconds,
        recovery_text=None if cost.seconds is None else str(cost),
        pending=device.pending,
        pid=None if context is None else context.pid,
    )
    told = known.statistics
    if told is None:
        return row
    return attrs.evolve(
        row,
        age=trio.current_time() - known.told_at,
        launched=told.launched,
        completed=told.completed,
        in_flight=told.in_flight,
        memory=MemoryRow(**attrs.asdict(told.memory)),
        libraries=tuple(
            [_library(library, told) for library in sorted(told.queues.keys() | told.libraries.keys())]
        ),
        actors=_actors(told),
    )


def _actors(told: DeviceStatistics) -> tuple[ActorMemoryRow, ...]:
    ordered = sorted(told.actors.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(nbytes for _, nbytes in ordered[_MOST_ACTORS:])
    shown = [*ordered[:_MOST_ACTORS], *([(OTHER_ACTORS, rest)] if rest else [])]
    return tuple([ActorMemoryRow(path=path, used=nbytes) for path, nbytes in shown])


def _library(library: str, told: DeviceStatistics) -> LibraryRow:
    queue = told.queues.get(library, _IDLE)
    planned = told.libraries.get(library, _UNUSED)
    return LibraryRow(
        library=library,
        waiting=queue.waiting,
        in_flight=queue.in_flight,
        plans=CacheRow(**attrs.asdict(planned.plans)),
        templates=CacheRow(**attrs.asdict(planned.templates)),
        workspace=planned.workspace,
    )
