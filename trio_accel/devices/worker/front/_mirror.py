"""The actors of a worker as the application shows them."""

from __future__ import annotations

import attrs

from ....actors import ActorFailedError, ActorRestarted, ActorSnapshot, ActorStarted, ActorTerminated, Event
from ...base._import_paths import is_actor_of
from ...base._statistics import QueueStatistics

__all__ = ["Mirror"]


@attrs.define
class _Node:
    actor_class: str
    state: str = "starting"
    incarnation: int = 0
    handled: int = 0
    failed: int = 0
    last_error: str | None = None


class Mirror:
    """The library actors of a worker, put together from its events and the requests that it serves."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # By the import path of the library, as it was looked for last.
        self._of_library: dict[str, tuple[_Node, ...]] = {}

    def clear(self) -> None:
        """The worker is gone, and its actors with it."""
        self._nodes.clear()
        self._of_library.clear()

    def take(self, event: Event, actor_class: str) -> None:
        """Follow the life of an actor."""
        if not isinstance(event, (ActorStarted, ActorRestarted, ActorTerminated)):
            return
        self._of_library.clear()
        if isinstance(event, ActorTerminated):
            self._nodes.pop(event.path, None)
            return
        node = self._nodes.setdefault(event.path, _Node(actor_class))
        node.incarnation = event.incarnation
        node.state = "running"
        if isinstance(event, ActorRestarted):
            node.state = "restarting"
            if event.error is not None:
                node.last_error = f"{type(event.error).__name__}: {event.error}"

    def done(self, library: str, error: BaseException | None) -> None:
        """A request was served by the library at an import path, or crashed it."""
        nodes = self._of_library.get(library)
        if nodes is None:
            nodes = tuple(
                [node for path, node in self._nodes.items() if is_actor_of(path, node.actor_class, library)]
            )
            self._of_library[library] = nodes
        if error is not None and isinstance(error, ActorFailedError):
            for node in nodes:
                node.failed += 1
        else:
            for node in nodes:
                node.handled += 1

    def path_of(self, library: str) -> str | None:
        """Path of the actor that serves the library at an import path; None if there is none."""
        return next(
            (path for path, node in self._nodes.items() if is_actor_of(path, node.actor_class, library)), None
        )

    def snapshots(self, queues: dict[str, QueueStatistics]) -> tuple[ActorSnapshot, ...]:
        """The actors now.

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
        none = QueueStatistics(waiting=0, in_flight=0)
        own = (queue for library, queue in queues.items() if is_actor_of(path, node.actor_class, library))
        queue = next(own, none)
        return ActorSnapshot(
            path=path,
            actor_class=node.actor_class,
            state=node.state,
            incarnation=node.incarnation,
            mailbox_depth=queue.waiting,
            deferred=queue.in_flight,
            handled=node.handled,
            failed=node.failed,
            last_error=node.last_error,
            children=children,
        )
