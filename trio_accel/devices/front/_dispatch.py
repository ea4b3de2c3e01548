"""Where the operations of a device go, and the supervised address that holds it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from ...actors import Actor, ActorContext
from ..arrays._pending import Pending
from ..arrays._ref import AccelRef
from ..base._statistics import DeviceStatistics
from ..engine._device_state import DeviceState
from ..operations._operation import Operation

__all__ = ["DeviceActor", "Dispatch"]

LibraryT = TypeVar("LibraryT")
ReplyT = TypeVar("ReplyT")


class Dispatch(Protocol):
    """Serves a device's operations, over all its generations: in this process, or through workers."""

    @property
    def pending(self) -> int:
        """Requests that wait for a context."""
        ...

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the memory that arrays of the device lie in, as far as this process holds any."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that the current context has."""
        ...

    async def prepare(self) -> None:
        """Start what must outlive the device's actor."""

    def started(self) -> None:
        """The device's actor runs."""

    def open(self, context: ActorContext) -> AbstractAsyncContextManager[None]:
        """Hold what lasts longer than a context: the device's actor lives inside."""
        ...

    async def start_context(self, context: ActorContext) -> None:
        """Start the context's actor as a child of the device's."""

    async def ask(self, operation: Operation[LibraryT, ReplyT]) -> ReplyT:
        """See `Device.ask`."""
        ...

    def submit(self, operation: Operation[LibraryT, ReplyT]) -> Pending[ReplyT]:
        """See `Device.submit`."""
        ...

    def lease(self, ref: AccelRef, *, write: bool, stream: object) -> AbstractAsyncContextManager[Any]:
        """See `AccelRef.lease`."""
        ...

    async def synchronize(self) -> None:
        """See `Device.synchronize`."""

    async def statistics(self) -> DeviceStatistics:
        """See `Device.statistics`."""
        ...

    async def close_library(self, path: str) -> None:
        """See `Device.close_library`."""

    def poison(self, reason: str) -> None:
        """See `trio_accel.testing.poison`."""


class DeviceActor(Actor):
    """Restarts the context of a device, within the device's intensity."""

    def __init__(self, state: DeviceState, dispatch: Dispatch) -> None:
        self._state = state
        self._dispatch = dispatch

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the context; when it is given up, so is the device."""
        state = self._state
        try:
            async with self._dispatch.open(context):
                context.observe_restarts(state.losses.restarted)
                await self._dispatch.start_context(context)
                yield
        finally:
            # One whose opening failed was never a device.
            state.end(is_given_up=state.actor is not None and not context.is_stopping)
