"""The figures of a snapshot under the names that metrics have, for all that export them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

import attrs

from ._snapshot import ActorRow, CacheRow, DeviceRow, LibraryRow, OperationRow, SystemSnapshot
from ._tally import OTHER_ACTORS

__all__ = ["FIGURES", "MOST_ACTORS", "Figure", "Sample"]

# Actors that are told apart; the number of metrics that a program exports has to be bounded.
MOST_ACTORS = 1000
_UNUSED = CacheRow()

Labels: TypeAlias = tuple[str, ...]
Sample: TypeAlias = tuple[Labels, float]


@attrs.frozen(kw_only=True)
class Figure:
    """One metric.

    Attributes:
        name: Words of its name, with an underscore between; without the unit.
        unit: ``"seconds"``, ``"bytes"`` or nothing.
        kind: A ``"counter"`` only rises, until what it counts begins anew; a ``"gauge"`` goes up and down.
        help: What it is, in a sentence.
        labels: Names of its labels; that of the system comes before them.
        samples: Its values in a snapshot, each with those of the labels.
    """

    name: str
    unit: str = ""
    kind: Literal["counter", "gauge"]
    help: str
    labels: Labels = ()
    samples: Callable[[SystemSnapshot], Iterable[Sample]]


def _of_actors(figure: Callable[[ActorRow], float]) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """One value for each actor; those of the last ones are added up, if there are very many."""

    def samples(snapshot: SystemSnapshot) -> Iterator[Sample]:
        for actor in snapshot.actors[:MOST_ACTORS]:
            yield (actor.path,), figure(actor)
        if len(snapshot.actors) > MOST_ACTORS:
            yield (OTHER_ACTORS,), sum(figure(actor) for actor in snapshot.actors[MOST_ACTORS:])

    return samples


def _of_devices(
    figure: Callable[[DeviceRow], float | None],
) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """One value for each device of which it is known."""

    def samples(snapshot: SystemSnapshot) -> Iterator[Sample]:
        for device in snapshot.devices:
            value = figure(device)
            if value is not None:
                yield (device.path,), value

    return samples


def _outcomes(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for row in snapshot.operations:
        for outcome, count in (
            ("completed", row.completed),
            ("failed", row.failed),
            ("cancelled", row.cancelled),
            ("dropped", row.dropped),
        ):
            yield (row.path, row.message_type, outcome), count


def _states(snapshot: SystemSnapshot) -> Iterator[Sample]:
    states = ("starting", "running", "restarting", "stopping", "quarantined")
    counts: dict[str, int] = dict.fromkeys(states, 0)
    for actor in snapshot.actors:
        counts[actor.state] = counts.get(actor.state, 0) + 1
    for state, count in counts.items():
        yield (state,), count


def _memory(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        memory = device.memory
        if memory is not None:
            for kind in ("used", "reserved", "workspace", "foreign"):
                yield (device.path, kind), getattr(memory, kind)


def _libraries(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for library in device.libraries:
            yield (device.path, library.library, "waiting"), library.waiting
            yield (device.path, library.library, "in_flight"), library.in_flight


def _workspace(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for library in device.libraries:
            if library.workspace:
                yield (device.path, library.library), library.workspace


def _arrays(snapshot: SystemSnapshot) -> Iterator[Sample]:
    for device in snapshot.devices:
        for actor in device.actors:
            yield (device.path, actor.path), actor.used


def _caches(
    cache: Callable[[LibraryRow], CacheRow],
) -> Callable[[SystemSnapshot], Iterable[Sample]]:
    """The counts of a cache of each library."""

    def samples(snapshot: SystemSnapshot) -> Iterator[Sample]:
        for device in snapshot.devices:
            for library in device.libraries:
                counts = cache(library)
                if counts != _UNUSED:
                    for event in ("found", "made", "evicted"):
                        yield (device.path, library.library, event), getattr(counts, event)

    return samples


def _quantiles(snapshot: SystemSnapshot) -> Iterator[Sample]:
    def of(row: OperationRow) -> Iterator[Sample]:
        for quantile, value in (("0.5", row.p50), ("0.99", row.p99)):
            if value is not None:
                yield (row.path, row.message_type, quantile), value

    for row in snapshot.operations:
        yield from of(row)


FIGURES: tuple[Figure, ...] = (
    Figure(
        name="uptime",
        unit="seconds",
        kind="gauge",
        help="Seconds since the system was opened.",
        samples=lambda snapshot: [((), snapshot.uptime)],
    ),
    Figure(
        name="dead_letters",
        kind="counter",
        help="Messages that were sent and will not be served.",
        samples=lambda snapshot: [((), snapshot.dead_letters)],
    ),
    Figure(
        name="actors",
        kind="gauge",
        help="Actors by their state.",
        labels=("state",),
        samples=_states,
    ),
    Figure(
        name="messages",
        kind="counter",
        help="Messages by actor and type, and what became of them.",
        labels=("path", "message_type", "outcome"),
        samples=_outcomes,
    ),
    Figure(
        name="message_latency",
        unit="seconds",
        kind="gauge",
        help="Seconds from sending to the end that a share of the last messages took at most.",
        labels=("path", "message_type", "quantile"),
        samples=_quantiles,
    ),
    Figure(
        name="actor_restarts",
        kind="counter",
        help="How often an actor was restarted.",
        labels=("path",),
        samples=_of_actors(lambda actor: actor.restarts),
    ),
    Figure(
        name="actor_expired",
        kind="counter",
        help="Requests that were dropped because their deadline had passed.",
        labels=("path",),
        samples=_of_actors(lambda actor: actor.expired),
    ),
    Figure(
        name="mailbox_messages",
        kind="gauge",
        help="Messages in the mailbox of an actor.",
        labels=("path",),
        samples=_of_actors(lambda actor: actor.mailbox_depth),
    ),
    Figure(
        name="mailbox_senders",
        kind="gauge",
        help="Senders that wait for room in the mailbox of an actor.",
        labels=("path",),
        samples=_of_actors(lambda actor: actor.mailbox_waiting),
    ),
    Figure(
        name="actor_in_flight",
        kind="gauge",
        help="Messages that an actor serves, and requests whose reply it gives later.",
        labels=("path",),
        samples=_of_actors(lambda actor: actor.running + actor.deferred),
    ),
    Figure(
        name="device_up",
        kind="gauge",
        help="1 while a device has a context, 0 while one is made.",
        labels=("device",),
        samples=_of_devices(lambda device: device.state == "running"),
    ),
    Figure(
        name="device_generation",
        kind="gauge",
        help="Which context of the device this is, from 1.",
        labels=("device",),
        samples=_of_devices(lambda device: device.generation),
    ),
    Figure(
        name="device_losses",
        kind="counter",
        help="Contexts that a device has lost.",
        labels=("device",),
        samples=_of_devices(lambda device: device.losses),
    ),
    Figure(
        name="device_recovery",
        unit="seconds",
        kind="gauge",
        help="Seconds from the last loss of a context to the next context.",
        labels=("device",),
        samples=_of_devices(lambda device: device.recovery_time),
    ),
    Figure(
        name="device_pending",
        kind="gauge",
        help="Requests that wait while the context of a device is made.",
        labels=("device",),
        samples=_of_devices(lambda device: device.pending),
    ),
    Figure(
        name="device_age",
        unit="seconds",
        kind="gauge",
        help="How old the figures are that a device has told of itself: launches, requests and memory.",
        labels=("device",),
        samples=_of_devices(lambda device: device.age),
    ),
    Figure(
        name="device_launches",
        kind="counter",
        help="Operations launched by the current context of a device.",
        labels=("device",),
        samples=_of_devices(lambda device: None if device.age is None else device.launched),
    ),
    Figure(
        name="device_in_flight",
        kind="gauge",
        help="Operations that a device has now.",
        labels=("device",),
        samples=_of_devices(lambda device: None if device.age is None else device.in_flight),
    ),
    Figure(
        name="device_requests",
        kind="gauge",
        help="Requests of the libraries of a device.",
        labels=("device", "library", "state"),
        samples=_libraries,
    ),
    Figure(
        name="device_plans",
        kind="counter",
        help="Plans of the libraries of the current context of a device: found, made, evicted.",
        labels=("device", "library", "event"),
        samples=_caches(lambda library: library.plans),
    ),
    Figure(
        name="device_templates",
        kind="counter",
        help="Launch templates of the worker of a device: found, made, evicted.",
        labels=("device", "library", "event"),
        samples=_caches(lambda library: library.templates),
    ),
    Figure(
        name="device_memory",
        unit="bytes",
        kind="gauge",
        help="Memory of a device by what it is taken for.",
        labels=("device", "kind"),
        samples=_memory,
    ),
    Figure(
        name="device_arrays",
        unit="bytes",
        kind="gauge",
        help="Memory of the arrays of a device by the actor that made them.",
        labels=("device", "path"),
        samples=_arrays,
    ),
    Figure(
        name="device_workspace",
        unit="bytes",
        kind="gauge",
        help="Memory that the libraries of a device hold for themselves.",
        labels=("device", "library"),
        samples=_workspace,
    ),
    Figure(
        name="device_memory_limit",
        unit="bytes",
        kind="gauge",
        help="The most memory that the arrays of a device may take.",
        labels=("device",),
        samples=_of_devices(lambda device: None if device.memory is None else device.memory.limit),
    ),
)
