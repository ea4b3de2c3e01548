"""The copies that the application makes for its worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...host._host_pool import COPIES_AT_ONCE, Copying
from ._request import HostCopy, OperationRequest, RemoteRequest

__all__ = ["CopyService"]


class CopyService:
    """Copies between host arrays of requests and memory that is shared with the worker, in threads.

    That is the memory of the device itself where the application has it mapped, else a region of the pool
    of host memory that the device transfers from and to. The former is copied when the stream of the
    worker gets there; the latter as soon as the request is sent, or when it is done.

    Attributes:
        begun: Copies so far.
    """

    def __init__(self) -> None:
        self.begun: int = 0
        # Copies that run, with their requests.
        self._running: dict[Copying, tuple[OperationRequest, HostCopy]] = {}
        self._changed = trio.Event()
        self._limiter = trio.CapacityLimiter(COPIES_AT_ONCE)
        self._nursery: trio.Nursery

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; copies are waited for by tasks of the nursery."""
        self._nursery = nursery

    def stage(self, request: OperationRequest, filled: Callable[[HostCopy], None]) -> None:
        """Fill the regions of a request that was sent, unless that has begun before.

        Args:
            request: Whose they are.
            filled: Called with each one that is filled, or never will be.
        """
        for copy in request.hosts.copies:
            if copy.is_upload and copy.region is not None and not copy.is_begun:
                self._start(request, copy, _memory(copy), partial(filled, copy))

    def fetch(self, request: OperationRequest) -> None:
        """Bring what the worker has written to regions to the arrays of a request that is done."""
        for copy in request.hosts.copies:
            if not copy.is_upload and copy.region is not None:
                self._start(request, copy, _memory(copy), _nothing)

    def copy_on_device(
        self,
        request: OperationRequest,
        copy: HostCopy,
        view: Callable[[], npt.NDArray[Any]],
        copied: Callable[[], None],
    ) -> None:
        """Copy from or to memory of the device: the worker holds a stream there.

        Args:
            request: Its request, which remembers why a copy failed.
            copy: The copy.
            view: Makes the array over the device's memory.
            copied: Called when the copy is over.
        """
        try:
            memory = view()
        except Exception as error:  # noqa: BLE001  # no address space, or no descriptor for the mapping
            request.failure = error
            copied()
        else:
            self._start(request, copy, memory, copied)

    def cancel(self, request: RemoteRequest) -> None:
        """End the copies of one request soon."""
        for copying, (owner, _) in self._running.items():
            if owner is request:
                copying.cancel()

    def cancel_on_device(self) -> None:
        """End all copies from and to the device's memory soon: what they were for is lost."""
        for copying, (_, copy) in self._running.items():
            if copy.region is None:
                copying.cancel()

    async def wait_off_device(self) -> None:
        """Wait until none touches the device's memory."""
        while any(copy.region is None for _, copy in self._running.values()):
            await self._changed.wait()

    async def wait_idle(self) -> None:
        """Wait until none runs."""
        while self._running:
            await self._changed.wait()

    def _start(
        self,
        request: OperationRequest,
        copy: HostCopy,
        memory: npt.NDArray[Any],
        copied: Callable[[], None],
    ) -> None:
        self.begun += 1
        copy.is_begun = True
        copying = Copying(memory, copy.host) if copy.is_upload else Copying(copy.host, memory)
        # The request's outcome waits for this count: until then the copy touches the program's array.
        request.copies += 1
        self._running[copying] = request, copy
        self._nursery.start_soon(self._copy, copying, copy, copied)

    @enable_ki_protection
    async def _copy(self, copying: Copying, copy: HostCopy, copied: Callable[[], None]) -> None:
        request, _ = self._running[copying]
        try:
            await trio.to_thread.run_sync(copying.run, limiter=self._limiter)
        except Exception as error:  # noqa: BLE001  # the system has no thread
            request.failure = error
        finally:
            copy.is_over = True
            del self._running[copying]
            changed, self._changed = self._changed, trio.Event()
            changed.set()
            copied()
            request.copy_over()


def _memory(copy: HostCopy) -> npt.NDArray[Any]:
    assert copy.region is not None
    return copy.region.array(copy.host.shape, copy.host.dtype)


def _nothing() -> None:
    """End a copy that the worker is done with."""
