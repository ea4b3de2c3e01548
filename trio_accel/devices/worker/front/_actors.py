"""The actors of a worker as the application shows them, and its operations as they are measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs
import outcome

from ....actors import (
    ActorRestarted,
    ActorSnapshot,
    ActorStarted,
    ActorTerminated,
    Event,
    Measured,
    Meter,
    note_end,
)
from ...base._library_paths import is_actor_of
from ...base._statistics import QueueStatistics
from ...engine._device_state import DeviceState
from ...operations._operation import Launch
from ..transport._protocol import Message
from ._launch_encoding import TemplateTable
from ._request import HostArrays, OperationRequest

__all__ = ["MeasuredRequest", "Measures", "WorkerActors"]

_IDLE = QueueStatistics(waiting=0, in_flight=0)


@attrs.define
class _Node:
    """One actor, and what its libraries had handled and failed before it was there."""

    actor_class: str
    handled_before: Mapping[str, int]
    failed_before: Mapping[str, int]
    state: str = "starting"
    incarnation: int = 0
    last_error: str | None = None


class WorkerActors:
    """Puts the library actors of a worker together from its events and the requests that it serves.

    Attributes:
        handled: Requests that the worker has served, by the import path of the library.
        failed: Requests that have crashed the library's actor.
    """

    def __init__(self) -> None:
        self.handled: defaultdict[str, int] = defaultdict(int)
        self.failed: defaultdict[str, int] = defaultdict(int)
        self._nodes: dict[str, _Node] = {}

    def clear(self) -> None:
        """Forget the actors: the worker is gone."""
        self._nodes.clear()
        self.handled.clear()
        self.failed.clear()

    def take(self, event: Event, actor_class: str) -> None:
        """Follow the life of an actor."""
        if not isinstance(event, (ActorStarted, ActorRestarted, ActorTerminated)):
            return
        if isinstance(event, ActorTerminated):
            self._nodes.pop(event.path, None)
            return
        node = self._nodes.get(event.path)
        if node is None:
            node = self._nodes[event.path] = _Node(actor_class, dict(self.handled), dict(self.failed))
        node.incarnation = event.incarnation
        node.state = "running"
        if isinstance(event, ActorRestarted):
            node.state = "restarting"
            if event.error is not None:
                node.last_error = f"{type(event.error).__name__}: {event.error}"

    def path_of(self, library: str) -> str | None:
        """Return the path of the actor that serves the library at an import path; None if there is none."""
        return next(
            (path for path, node in self._nodes.items() if is_actor_of(path, node.actor_class, library)), None
        )

    def snapshots(self, queues: dict[str, QueueStatistics]) -> tuple[ActorSnapshot, ...]:
        """Describe the actors as they are now.

        Args:
            queues: Requests by the import path of the library.
        """
        below: dict[str, list[ActorSnapshot]] = {}
        # Children before their parents.
        for path in sorted(self._nodes, key=lambda path: -path.count("/")):
            snapshot = self._snapshot(path, queues, tuple(below.pop(path, ())))
            parent = path.rpartition("/")[0]
            below.setdefault(parent if parent in self._nodes else "", []).append(snapshot)
        return tuple(below.get("", ()))

    def _snapshot(
        self, path: str, queues: dict[str, QueueStatistics], children: tuple[ActorSnapshot, ...]
    ) -> ActorSnapshot:
        node = self._nodes[path]

        def counted(now: Mapping[str, int], before: Mapping[str, int]) -> int:
            return sum(
                count - before.get(library, 0)
                for library, count in now.items()
                if is_actor_of(path, node.actor_class, library)
            )

        own = (queue for library, queue in queues.items() if is_actor_of(path, node.actor_class, library))
        queue = next(own, _IDLE)
        return ActorSnapshot(
            path=path,
            actor_class=node.actor_class,
            state=node.state,
            incarnation=node.incarnation,
            mailbox_depth=queue.waiting,
            deferred=queue.in_flight,
            handled=counted(self.handled, node.handled_before),
            failed=counted(self.failed, node.failed_before),
            last_error=node.last_error,
            children=children,
        )


class Measures:
    """Takers of operations' times and outcomes, by library and name.

    Args:
        device: The device.
        actors: The actors of its worker.
    """

    def __init__(self, device: DeviceState, actors: WorkerActors) -> None:
        self._observers = device.system.observers
        self._path = f"{device.path}/context"
        self._actors = actors
        self._meter: Meter | None = None
        self._measured: dict[tuple[str, str], Measured] = {}

    def now(self) -> float:
        """Return the time."""
        return self._observers.now()

    def of(self, launch: Launch) -> Measured | None:
        """Return the taker of such operations; None if they are not measured any more."""
        meter = self._observers.meter
        if meter is not self._meter:
            self._meter = meter
            self._measured = {}
        if meter is None:
            return None
        key = launch.library, launch.name
        measured = self._measured.get(key)
        if measured is None:
            # A library that was never opened has no actor.
            path = self._actors.path_of(launch.library)
            measured = meter.measured(path or self._path, launch.name)
            if path is not None:
                self._measured[key] = measured
        return measured


class MeasuredRequest(OperationRequest):
    """A launch in a worker, which is measured."""

    __slots__ = ("_began", "_measures", "_sent")

    def __init__(
        self, number: int, launch: Launch, hosts: HostArrays, measures: Measures, *, invalidates: bool
    ) -> None:
        super().__init__(number, launch, hosts, invalidates=invalidates)
        self._measures = measures
        self._began = measures.now()
        # When it was handed over to a worker last.
        self._sent: float | None = None

    def message(self, word: int, released: tuple[int, ...], templates: TemplateTable) -> Message:
        """Encode it for the worker that has these templates."""
        self._sent = self._measures.now()
        return super().message(word, released, templates)

    def settle(self, result: outcome.Outcome[None]) -> None:
        """Count the launch, and give its outcome."""
        measured = self._measures.of(self.launch)
        if measured is not None:
            now = self._measures.now()
            sent = now if self._sent is None else self._sent
            error = result.error if isinstance(result, outcome.Error) else None
            # A cancellation and Ctrl-C are no errors of a launch.
            is_cancelled = error is not None and not isinstance(error, Exception)
            failure = None if is_cancelled else error
            note_end(measured, sent - self._began, now - sent, failure, cancelled=is_cancelled)
        super().settle(result)
