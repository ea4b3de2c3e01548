"""Host arrays that reach a device in this process by way of the pool of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import attrs
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base.ops import CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ..base._waits import Arrival
from ..host._host_pool import COPIES_AT_ONCE, SMALL, Copying, HostPool, HostRegistrar
from ..operations._operation import Launch

__all__ = ["WITH_HOST", "InlineCopies", "Travel"]

_SpecT = TypeVar("_SpecT", bound=OperationSpec)
_OnDone: TypeAlias = Callable[["BaseException | None"], None]


WITH_HOST = (CopyFromHostSpec, CopyToHostSpec)
"""Specifications with an array of the host's."""


class Travel:
    """The host arrays of one launch on their way.

    Attributes:
        launch: The launch, with arrays in the pool.
    """

    def __init__(self, copies: InlineCopies, launch: Launch) -> None:
        self._copies = copies
        self._uploads: list[tuple[Copying, Arrival]] = []
        self._downloads: list[Copying] = []
        self._replaced: list[npt.NDArray[Any]] = []
        arrivals: list[Arrival] = []
        self.launch: Launch = attrs.evolve(
            launch,
            spec=self._through(launch.spec, arrivals),
            staged=tuple([self._through(staged, arrivals) for staged in launch.staged]),
            arrivals=arrivals,
            # The device uses regions of the pool in place of these.
            keep=tuple([item for item in launch.keep if not any(item is host for host in self._replaced)]),
        )

    def _through(self, spec: _SpecT, arrivals: list[Arrival]) -> _SpecT:
        """Return the same specification, by way of the pool if the device cannot transfer its host array."""
        if not isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)):
            return spec
        host, copies = spec.host, self._copies
        place = copies.pool.find(host) if host.flags.c_contiguous else None
        if place is not None:
            copies.await_slab(place[0], arrivals)
            return spec
        if host.nbytes <= SMALL:
            return spec
        region = copies.pool.stage(host.nbytes)
        copies.await_slab(region.slab.number, arrivals)
        between = region.array(host.shape, host.dtype)
        self._replaced.append(host)
        if isinstance(spec, CopyToHostSpec):
            self._downloads.append(Copying(host, between))
        else:
            filled = Arrival()
            arrivals.append(filled)
            self._uploads.append((Copying(between, host), filled))
            copies.nursery.start_soon(copies.fill, *self._uploads[-1])
        same: Any = spec
        changed: _SpecT = attrs.evolve(same, host=between)
        return changed

    async def fetch(self) -> None:
        """Fill the program's arrays: the operation is done."""
        with trio.CancelScope(shield=True):
            # Shielded: the threads write to arrays of the program until they are done.
            for copying in self._downloads:
                await trio.to_thread.run_sync(copying.run, limiter=self._copies.limiter)

    async def end(self) -> None:
        """Read no array of the program any more; waits a moment if one is being read. Not to be cancelled."""
        for copying, _ in self._uploads:
            copying.cancel()
        over = trio.Event()
        for _, filled in self._uploads:
            if not filled.is_over:
                filled.tell(over.set)
                await over.wait()
                over = trio.Event()

    def end_by(self, done: _OnDone) -> _OnDone:
        """Return the callback for the operation's end: it calls `done` when the arrays are filled."""

        def over(error: BaseException | None) -> None:
            for copying, _ in self._uploads:
                copying.cancel()
            if error is not None or not self._downloads:
                done(error)
            else:
                self._copies.nursery.start_soon(self._fetch_for, done)

        return over

    @enable_ki_protection
    async def _fetch_for(self, done: _OnDone) -> None:
        error: Exception | None = None
        try:
            await self.fetch()
        except Exception as failure:  # noqa: BLE001  # it is the operation's
            error = failure
        done(error)


class InlineCopies:
    """Copies between the pool and host arrays that the device cannot transfer by itself, in threads (D50).

    Args:
        pool: Memory that the device transfers by itself.
        registrar: Registers it with the device.
        nursery: Runs the copies.

    Attributes:
        pool: The pool.
        nursery: The nursery.
        limiter: How many copies run at a time.
    """

    def __init__(self, pool: HostPool, registrar: HostRegistrar, nursery: trio.Nursery) -> None:
        self.pool: HostPool = pool
        self.nursery: trio.Nursery = nursery
        self.limiter: trio.CapacityLimiter = trio.CapacityLimiter(COPIES_AT_ONCE)
        self._registrar = registrar

    def start(self, launch: Launch) -> Travel | None:
        """Send the host arrays of a launch on their way; None if it has none.

        Raises:
            OutOfMemoryError: The host has not so much.
        """
        if launch.staged or isinstance(launch.spec, WITH_HOST):
            for spec in (launch.spec, *launch.staged):
                if isinstance(spec, WITH_HOST) and spec.host.size and not self._goes_straight(spec.host):
                    return Travel(self, launch)
        return None

    def _goes_straight(self, host: npt.NDArray[Any]) -> bool:
        """Tell whether the device transfers a host array by itself, now."""
        place = self.pool.find(host) if host.flags.c_contiguous else None
        return place is not None and self._registrar.registration(place[0]) is None

    def await_slab(self, slab: int, arrivals: list[Arrival]) -> None:
        """Add the arrival of a slab's registration, if that is not over."""
        registration = self._registrar.registration(slab)
        if registration is not None:
            arrivals.append(registration)

    @enable_ki_protection
    async def fill(self, copying: Copying, filled: Arrival) -> None:
        """Copy in a thread."""
        failure: Exception | None = None
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(copying.run, limiter=self.limiter)
        except Exception as error:  # noqa: BLE001  # the system has no thread: it is the operation's
            failure = error
        finally:
            filled.end(failure)
