"""Shared helpers for tests of devices in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from processes import until
from recovery_load import AT_ONCE, MANY

import trio_accel as ta
from trio_accel.devices.dispatch import WorkerDispatch

__all__ = ["BLAS", "options", "outcome", "replace_worker", "wait_at_worker", "wait_in_flight"]

BLAS = "trio_accel.linalg:BlasActor"


def options(**changes: Any) -> ta.DeviceOptions:
    """A worker that may be lost often, and is replaced without a back-off."""
    return ta.DeviceOptions(**{"isolation": "process", "intensity": MANY, "backoff": AT_ONCE, **changes})


async def outcome(wait: Callable[..., Any], *arguments: Any) -> object:
    """Its result, or the error of the device at its end."""
    try:
        return await wait(*arguments)
    except ta.AccelError as error:
        return error


async def wait_at_worker(device: ta.Device, count: int = 1) -> None:
    """Wait until the worker has read at least this many open requests."""
    dispatch = device.dispatch
    assert isinstance(dispatch, WorkerDispatch)
    await until(lambda: dispatch._requests.sent >= count)
    await device.statistics()


async def replace_worker(device: ta.Device) -> None:
    """Kill the worker, and wait until the next one serves."""
    generation, process = device.generation, device.dispatch.process  # type: ignore[attr-defined]
    process.kill()
    await until(lambda: device.generation > generation)


async def wait_in_flight(device: ta.Device, count: int = 1, library: str = BLAS) -> None:
    """Wait until exactly this many operations of a library are in flight."""
    while True:
        queue = (await device.statistics()).queues.get(library)
        if queue is not None and queue.in_flight == count:
            return
