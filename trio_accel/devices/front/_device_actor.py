"""The supervised address of a device."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ...actors import Actor, ActorContext
from ..engine._device_state import DeviceState
from ._dispatch import Dispatch

__all__ = ["DeviceActor"]


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
