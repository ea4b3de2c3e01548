"""Counts and times of a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs

from ...backends.base import CacheCounts, MemoryStatistics

__all__ = ["CacheStatistics", "DeviceStatistics", "LaunchTimes", "LibraryStatistics", "QueueStatistics"]


@attrs.frozen(kw_only=True)
class QueueStatistics:
    """Requests of one library.

    Attributes:
        waiting: Handed over and not launched.
        in_flight: Launched and not complete.
    """

    waiting: int
    in_flight: int


@attrs.frozen(kw_only=True)
class CacheStatistics:
    """What became of the entries of a cache.

    Attributes:
        found: How often one was there.
        made: How many were made.
        evicted: How many of those made way for others.
    """

    found: int = 0
    made: int = 0
    evicted: int = 0

    @classmethod
    def of(cls, counts: CacheCounts) -> Self:
        """What was counted by now."""
        return cls(found=counts.found, made=counts.made, evicted=counts.evicted)


@attrs.frozen(kw_only=True)
class LibraryStatistics:
    """What one library has planned in one generation, and holds now.

    Attributes:
        plans: Plans of its operations: each launch by a plan has found one, or had one made.
        templates: Launch templates of its operations, by which they are sent to a worker process. One is made
            when the second operation of its kind is sent. The first one counts nowhere.
        workspace: Bytes that it holds for itself beside the arrays. Where several libraries share a stream,
            what they share is that of the last one that used it.
    """

    plans: CacheStatistics = CacheStatistics()
    templates: CacheStatistics = CacheStatistics()
    workspace: int = 0


@attrs.frozen(kw_only=True)
class DeviceStatistics:
    """Counts of one generation of a device, but for its losses.

    Attributes:
        generation: Number of the generation.
        pid: Number of the worker process that serves it; None where it is in this process.
        launched: Operations enqueued.
        completed: Operations that completed, with or without an error.
        in_flight: Operations that the backend has now.
        queues: By the import path of the library (`Operation.library`): those that have requests now.
        memory: Memory of the device's arrays.
        losses: Contexts that the device has lost since it was opened.
        libraries: By the import path of the library: those that have planned something in this generation,
            or hold memory for themselves.
        actors: Bytes of arrays by the path of the actor whose task made them. ``""`` stands for all other
            tasks, also for those that a handler has started in a nursery.
    """

    generation: int
    pid: int | None = None
    launched: int
    completed: int
    in_flight: int
    queues: Mapping[str, QueueStatistics]
    memory: MemoryStatistics
    losses: int
    libraries: Mapping[str, LibraryStatistics] = attrs.field(factory=dict[str, LibraryStatistics])
    actors: Mapping[str, int] = attrs.field(factory=dict[str, int])


@attrs.frozen
class LaunchTimes:
    """When a worker has launched an operation, by `time.monotonic_ns`, which all processes share.

    Attributes:
        process: Number of the worker process.
        begun: When the backend was about to be called.
        completed: When the operation was seen to be complete.
    """

    process: int
    begun: int
    completed: int
