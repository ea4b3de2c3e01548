"""Answers for an operator: whether the service is alive, whether it is ready, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..actors._conditions import faults_of
from ..devices import System
from ..programs._program import ended_programs
from ._checks import Check, checks_of, device_of, faults_of_checks
from ._edge import Probe, Reply


class Exposes(Protocol):
    """The figures of a program, such as a `trio_accel.telemetry.Recorder`."""

    def exposition(self) -> str:
        """Return the figures in the text format of Prometheus."""
        ...


def probes_of(
    system: System | None, recorder: Exposes | None, checks: Sequence[Check] = ()
) -> Mapping[str, Probe]:
    """Make the routes for a system, a recorder and checks."""

    async def metrics() -> Reply:
        assert recorder is not None
        return Reply(200, recorder.exposition())

    routes: dict[str, Probe] = {} if recorder is None else {"/metrics": metrics}
    if system is not None or checks:
        restarting = [check for check in checks if check.restarts]
        routes |= {"/health": lambda: _health(system, restarting), "/ready": lambda: _ready(system, checks)}
    return routes


async def _health(system: System | None, checks: Sequence[Check]) -> Reply:
    """Return the faults that only a restart ends. No actor is asked, so a busy device is alive."""
    faults = [*_ended(system), *(await faults_of_checks(checks) if checks else ())]
    workers = [(node.path, node.pid) for node in system.tree().walk() if node.pid] if system else []
    devices = {
        device.path: {
            "generation": device.generation,
            "pid": next((pid for path, pid in workers if path.startswith(f"{device.path}/")), None),
        }
        for device in (system.devices if system else ())
    }
    shown = {"status": "failed" if faults else "alive", "faults": faults, "devices": devices}
    return Reply(503 if faults else 200, shown)


async def _ready(system: System | None, checks: Sequence[Check]) -> Reply:
    """Return whether each part can serve now: devices, programs and clusters of the system, and checks."""
    faults = _ended(system)
    if system is not None:
        # These devices will be opened again, so `_ended` omits them.
        faults += [str(outage) for outage in system.outages if outage.retry_after is not None]
        faults += faults_of(system)
        checks = _without_outages(system, [*checks_of(system.devices), *checks])
    # A part of the system may also be among the checks.
    faults = list(dict.fromkeys([*faults, *await faults_of_checks(checks)]))
    if not faults:
        return Reply(200, {"status": "ready"})
    return Reply(503, {"status": "not ready", "faults": faults}, ((b"retry-after", b"1"),))


def _without_outages(system: System, checks: Sequence[Check]) -> list[Check]:
    """Return the checks without those of devices whose faults are known."""
    lost = system.outages_by_path
    return [check for check in checks if (device := device_of(check)) is None or device.path not in lost]


def _ended(system: System | None) -> list[str]:
    """Return the parts of a system that have failed for good."""
    if system is None:
        return []
    faults = [str(outage) for outage in system.outages if outage.retry_after is None]
    for device in system.devices:
        faults += [f"program {program.name!r} has ended" for program in ended_programs(device)]
    return faults
