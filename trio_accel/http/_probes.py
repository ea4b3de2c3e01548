"""Answers for an operator: whether the service is alive, whether it is ready, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import trio

from ..actors import ActorError
from ..backends.base import AccelError
from ..devices import System
from ..programs._program import ended_programs
from ._edge import Probe, Reply

_READY_SECONDS = 0.5


class Exposes(Protocol):
    """The figures of a program, such as a `trio_accel.telemetry.Recorder`."""

    def exposition(self) -> str:
        """Return the figures in the text format of Prometheus."""
        ...


def probes_of(system: System | None, recorder: Exposes | None) -> Mapping[str, Probe]:
    """Make the routes for a system and a recorder."""

    async def metrics() -> Reply:
        assert recorder is not None
        return Reply(200, recorder.exposition())

    routes: dict[str, Probe] = {} if recorder is None else {"/metrics": metrics}
    if system is not None:
        routes |= {"/health": lambda: _health(system), "/ready": lambda: _ready(system)}
    return routes


async def _health(system: System) -> Reply:
    """Return the faults that end on no restart. No actor is asked, so a busy device is alive."""
    faults = [str(outage) for outage in system.outages]
    for device in system.devices:
        faults += [f"program {program.name!r} has ended" for program in ended_programs(device)]
    workers = [(node.path, node.pid) for node in system.tree().walk() if node.pid]
    devices = {
        device.path: {
            "generation": device.generation,
            "pid": next((pid for path, pid in workers if path.startswith(f"{device.path}/")), None),
        }
        for device in system.devices
    }
    shown = {"status": "failed" if faults else "alive", "faults": faults, "devices": devices}
    return Reply(503 if faults else 200, shown)


async def _ready(system: System) -> Reply:
    """Return whether each device answers within half a second."""
    with trio.move_on_after(_READY_SECONDS), suppress(AccelError, ActorError):
        for device in system.devices:
            await device.statistics()
        return Reply(200, {"status": "ready"})
    return Reply(503, {"status": "a device does not answer"}, ((b"retry-after", b"1"),))
