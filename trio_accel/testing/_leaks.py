"""The check that nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager

import trio

from ..backends.base import DeviceLostError
from ..devices import Device, System
from ..devices.front._device import OpenDevice
from ..devices.worker import WorkerDispatch
from ._census import Census, Leak, open_devices

__all__ = ["LeakError", "leak_check", "raise_leaks"]

# Seconds for resources that end by themselves, such as a worker that was killed.
_SETTLE = 2.0
_LOOK = 0.005


class LeakError(AssertionError):
    """Resources were left behind.

    Attributes:
        leaks: Their descriptions.
    """

    def __init__(self, leaks: Iterable[Leak]) -> None:
        self.leaks: tuple[Leak, ...] = tuple(leaks)
        super().__init__("left behind:\n" + "\n".join(f"  {leak}" for leak in self.leaks))

    def __reduce__(self) -> tuple[type[LeakError], tuple[tuple[Leak, ...]]]:
        return type(self), (self.leaks,)


@asynccontextmanager
async def leak_check(*scope: Device | System) -> AsyncGenerator[None, None]:
    """Fail if the body of the ``async with`` leaves more behind than there was before.

    Counted are devices that are open, references to arrays, blocks and chunks of device memory,
    descriptors, mapped shared memory, threads, and processes, those of its children included. Not
    counted are resources of devices that stay open: the threads of their streams, their workers, the
    launcher of those, one empty chunk each. Descriptors, shared memory and processes are seen on Linux.

    At the end the devices are synchronized, garbage is collected, and resources that end by themselves get up
    to two seconds. If the body raises, nothing is checked.

    Variables live longer than the block that they were assigned in: an array that a local variable
    of the function around it refers to is left behind. Call a function in the body.

    Args:
        *scope: Devices and systems whose devices, arrays and memory are looked at; by default all of
            this Trio run. The rest always is of the whole process.

    Raises:
        LeakError: Something was left behind; it names each thing.
        TypeError: `scope` has something else than devices and systems.
    """
    for item in scope:
        if not isinstance(item, (Device, System)):
            raise TypeError(f"leak_check: scope must be devices and systems, got {item!r}")
    belongs = _belongs(scope)
    before = await _take(belongs)
    yield
    deadline = time.monotonic() + _SETTLE
    while leaks := (await _take(belongs)).leaks_since(before):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        await _pause()


def raise_leaks(before: Census, take: Callable[[], Census]) -> None:
    """Do what `leak_check` does at its end, outside of Trio; blocks.

    Raises:
        LeakError: Something was left behind.
    """
    deadline = time.monotonic() + _SETTLE
    while leaks := take().leaks_since(before):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        time.sleep(_LOOK)


def _belongs(scope: tuple[Device | System, ...]) -> Callable[[OpenDevice], bool]:
    def belongs(device: OpenDevice) -> bool:
        if not scope:
            return device.state.is_own_run()
        return any(device is item or device.state.system is item for item in scope)

    return belongs


async def _take(belongs: Callable[[OpenDevice], bool]) -> Census:
    """Look at everything, when devices have nothing in flight and no memory to give back."""
    memory: dict[str, tuple[int, int]] = {}
    for device in open_devices(belongs):
        try:
            await device.synchronize()
            await _wait_for_spares(device)
            used = (await device.statistics()).memory
        except DeviceLostError:
            # It was closed or given up just now.
            continue
        memory[device.path] = (used.blocks, used.used)
    await trio.lowlevel.checkpoint()
    return Census.take(belongs, memory)


async def _wait_for_spares(device: OpenDevice) -> None:
    """Let the workers come up that are to stand ready: half of one cannot be told from a leak."""
    dispatch = device.dispatch
    deadline = time.monotonic() + _SETTLE
    while (
        isinstance(dispatch, WorkerDispatch)
        and dispatch.spares < device.options.spares
        and time.monotonic() < deadline
    ):
        await _pause()


async def _pause() -> None:
    # Not `trio.sleep`: a test's clock may stand still.
    await trio.to_thread.run_sync(time.sleep, _LOOK)
