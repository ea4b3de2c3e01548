"""Counts of a device."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ...backends.base import MemoryStatistics

__all__ = ["DeviceStatistics", "QueueStatistics"]


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
    """

    generation: int
    pid: int | None = None
    launched: int
    completed: int
    in_flight: int
    queues: Mapping[str, QueueStatistics]
    memory: MemoryStatistics
    losses: int
