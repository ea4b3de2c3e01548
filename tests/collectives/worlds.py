"""Worlds for tests, and arrays of their ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt
from chosen import BACKEND, IS_STAND_IN

import trio_accel as ta
from trio_accel.collectives import World

DTYPES = (
    *("bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bfloat16"),
)
REDUCTIONS = ("sum", "prod", "min", "max", "mean")
BUSY = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(100, 10.0), spares=1)


@asynccontextmanager
async def opened_world(
    system: ta.System,
    size: int,
    *isolations: ta.Isolation,
    options: ta.DeviceOptions | None = None,
    **world: Any,
) -> AsyncGenerator[World, None]:
    """Open a world of this many new devices; isolations are repeated."""
    async with AsyncExitStack() as stack:
        # Each rank has a device of its own where there are this many.
        names = devices_of()
        devices = [
            await stack.enter_async_context(
                system.open_device(
                    names[number % len(names)],
                    options=options
                    or ta.DeviceOptions(
                        isolation=isolations[number % len(isolations)] if isolations else "process"
                    ),
                )
            )
            for number in range(size)
        ]
        yield await stack.enter_async_context(ta.open_world(devices, **world))


def elements(shape: Sequence[int], dtype: str, seed: int) -> npt.NDArray[Any]:
    """Small integers, whose sums and products are exact in every dtype."""
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    whole = np.random.default_rng(seed).integers(0, 3, tuple(shape))
    made: npt.NDArray[Any] = whole.astype(element)
    if element.kind == "c":
        made = made + 1j * whole[::-1]
    return made.astype(element)


async def put(world: World, hosts: Sequence[npt.NDArray[Any]]) -> list[ta.AccelRef]:
    """Put one array on each rank."""
    return [await device.put(host) for device, host in zip(world.devices, hosts, strict=True)]


async def contents(refs: Sequence[ta.AccelRef]) -> list[npt.NDArray[Any]]:
    """Copy arrays to the host."""
    return [await ref.to_host() for ref in refs]


def reduced(reduction: str, hosts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Reduce by NumPy, in the order of the ranks, and at least in float32."""
    dtype = hosts[0].dtype
    if dtype.itemsize == 2 and dtype.kind not in "bui":
        hosts = [host.astype(np.float32) for host in hosts]
    step = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(reduction, np.add)
    total = hosts[0]
    for host in hosts[1:]:
        total = step(total, host)
    return (total / len(hosts) if reduction == "mean" else total).astype(dtype)


def check_way(world: World, way: str) -> None:
    """A library of collectives that could serve was not left meanwhile."""
    is_fake = BACKEND == "cpu" or IS_STAND_IN
    if way == "auto" and world.size > 1 and (is_fake or len(devices_of()) > 1):
        assert world.transport == "nccl", world.why_mapped


def devices_of() -> list[str]:
    """Name the devices of the backend."""
    return [info.name for info in ta.list_devices() if info.backend == BACKEND]


async def kill(device: ta.Device, how: int = signal.SIGKILL) -> None:
    """End or stop the worker of a device."""
    pid = (await device.statistics()).pid
    assert pid is not None
    assert pid != os.getpid()
    os.kill(pid, how)


@attrs.frozen
class Outcome:
    """How a task ended."""

    value: Any = None
    error: BaseException | None = None
