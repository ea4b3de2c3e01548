"""Registration of the pool of host memory with the devices that are opened in this process."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import describe
from ...backends.base import AccelDevice
from ..base._waits import Arrival
from ._host_pool import HostPool, Slab

__all__ = ["HostRegistrar"]

_logger = logging.getLogger("trio_accel.devices")


def _nobody() -> None:
    """Do nothing."""


@attrs.frozen(eq=False)
class _Change:
    """A job for a thread, and a callback afterwards."""

    make: Callable[[], None]
    on_done: Callable[[], None] = _nobody


@attrs.frozen(eq=False)
class _Removal:
    """A job for a thread, once the device is idle."""

    make: Callable[[], None]
    wait_idle: Callable[[], Awaitable[None]]


class HostRegistrar:
    """The registration of all slabs with each new device, and of those that come and go meanwhile.

    A thread registers slabs one after the other, since each takes milliseconds. If the device refuses a slab,
    it treats arrays in it as any other.

    A lost device may have a stuck stream, which may still write to arrays of the pool when it goes on. So
    arrays that were in use at the loss are given out again only when such a device has ended.

    Args:
        pool: The slabs.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._device: AccelDevice | None = None
        self._lost: list[AccelDevice] = []
        # By slab: an arrival that ends when the current device has registered the slab, or has refused it.
        self._registrations: dict[int, Arrival] = {}
        self._changes, self._pending = trio.open_memory_channel[_Change](inf)
        self._removals, self._removed = trio.open_memory_channel[_Removal](inf)
        self._wait_idle: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        pool.on_make = self._add
        pool.on_drop = self._remove

    def attach(
        self, device: AccelDevice, wait_idle: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    ) -> None:
        """Begin with an open device, which keeps registrations until it is closed; earlier ones are closed.

        Args:
            device: The device.
            wait_idle: Waits until the device is idle, before a slab is to be unregistered.
        """
        self._device = device
        self._wait_idle = wait_idle
        self._registrations.clear()
        if self._lost:
            self._changes.send_nowait(_Change(_nothing))
        for slab in self._pool.slabs.values():
            self._add(slab)

    def detach(self) -> None:
        """End with a device that is lost or about to be closed, which makes it forget all registrations."""
        if self._device is not None:
            self._lost.append(self._device)
            self._device = None
            self._pool.hold_back()

    def registration(self, slab: int) -> Arrival | None:
        """Return the arrival of a slab's registration; None if that is over, or the device is lost."""
        return self._registrations.get(slab)

    async def run(self) -> None:
        """Register and unregister, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_removals)
            await self._run_changes()

    async def _run_removals(self) -> None:
        async for removal in self._removed:
            await removal.wait_idle()
            await self._make(removal.make)
            del removal

    async def _run_changes(self) -> None:
        async for change in self._pending:
            if self._lost and self._device is not None:
                await self._settle()
            try:
                await self._make(change.make)
            finally:
                change.on_done()
            # A reference would keep the slab mapped while the task waits.
            del change

    @enable_ki_protection
    async def _settle(self) -> None:
        """Find out whether the lost devices have ended: `close` may be called again, and returns that."""
        for device in tuple(self._lost):
            # A device that cannot even be closed counts as not ended.
            with suppress(Exception):
                if await trio.to_thread.run_sync(device.close, 0.0):
                    self._lost.remove(device)
        if not self._lost:
            self._pool.let_go()

    @enable_ki_protection
    async def _make(self, make: Callable[[], None]) -> None:
        try:
            await trio.to_thread.run_sync(make)
        except Exception as error:  # noqa: BLE001  # the device is closed by now, or cannot; it goes on without
            _logger.debug("host memory is not known to the device: %s", describe(error))

    def _add(self, slab: Slab) -> None:
        if self._device is not None:
            registration = self._registrations[slab.number] = Arrival()
            self._changes.send_nowait(
                _Change(
                    partial(self._device.register_host, slab.memory),
                    partial(self._end, slab.number, registration),
                )
            )

    def _remove(self, slab: Slab) -> None:
        # All users of the slab are over: each held a reference to its array.
        if self._device is not None:
            unregister = partial(self._device.unregister_host, slab.memory)
            remove = partial(self._removals.send_nowait, _Removal(unregister, self._wait_idle))
            registration = self._registrations.get(slab.number)
            if registration is None:
                remove()
            else:
                # In this order: unregistered first, it would be registered afterwards, and unmapped while the
                # driver has it.
                registration.tell(remove)

    def _end(self, slab: int, registration: Arrival) -> None:
        if self._registrations.get(slab) is registration:
            del self._registrations[slab]
        registration.end()


def _nothing() -> None:
    """Do nothing: the queue is only woken for the lost devices."""
