"""Registering the pool of host memory with the devices that are opened in this process."""

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
    """Nobody waits for it."""


@attrs.frozen(eq=False)
class _Change:
    """What a thread does, and what is called then."""

    make: Callable[[], None]
    on_done: Callable[[], None] = _nobody


@attrs.frozen(eq=False)
class _Removal:
    """What a thread does when the device is idle."""

    make: Callable[[], None]
    wait_idle: Callable[[], Awaitable[None]]


class HostRegistrar:
    """Registers all slabs with each new device, and those that come and go with the current one.

    That takes milliseconds for each slab, so a thread does it, one after the other. If the device refuses
    a slab, it treats the arrays in it as any other.

    A device that was lost may have a stream that is stuck, and still write to an array of the pool when
    that goes on. So what was in use then is given out again only when such a device has ended.

    Args:
        pool: The slabs.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._device: AccelDevice | None = None
        self._lost: list[AccelDevice] = []
        # By slab: over when the current device has registered it, or has refused.
        self._registrations: dict[int, Arrival] = {}
        self._changes, self._pending = trio.open_memory_channel[_Change](inf)
        self._removals, self._removed = trio.open_memory_channel[_Removal](inf)
        self._wait_idle: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        pool.on_make = self._add
        pool.on_drop = self._remove

    def attach(
        self, device: AccelDevice, wait_idle: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    ) -> None:
        """A device is open, and keeps what is registered until it is closed. Those before it are closed.

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
        """The device is lost, or about to be closed, which makes it forget everything."""
        if self._device is not None:
            self._lost.append(self._device)
            self._device = None
            self._pool.hold_back()

    def registration(self, slab: int) -> Arrival | None:
        """What is over when the device has registered a slab; None if it has, or is lost."""
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
            # Nothing is to hold on to memory while there is nothing to do.
            del change

    @enable_ki_protection
    async def _settle(self) -> None:
        """See whether the lost devices have ended: a device that is closed again says so."""
        for device in tuple(self._lost):
            # One that cannot even be closed has not ended, as far as anybody knows.
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
        # Whatever used it is over: it held on to its array.
        if self._device is not None:
            unregister = partial(self._device.unregister_host, slab.memory)
            remove = partial(self._removals.send_nowait, _Removal(unregister, self._wait_idle))
            registration = self._registrations.get(slab.number)
            if registration is None:
                remove()
            else:
                # If it were unregistered first, it would then be registered, and unmapped all the same.
                registration.tell(remove)

    def _end(self, slab: int, registration: Arrival) -> None:
        if self._registrations.get(slab) is registration:
            del self._registrations[slab]
        registration.end()


def _nothing() -> None:
    """Only look after the lost devices."""
