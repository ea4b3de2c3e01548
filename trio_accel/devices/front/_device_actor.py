"""The supervised address of a device."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...actors import Actor, ActorContext

if TYPE_CHECKING:
    from ._device import Device

__all__ = ["DeviceActor"]


class DeviceActor(Actor):
    """Restarts the context of a device, within the device's intensity."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the context; when it is given up, so is the device."""
        device = self._device
        try:
            async with device.dispatch.open(context):
                context.observe_restarts(device.losses.restarted)
                await device.dispatch.start_context(context)
                yield
        finally:
            # One whose opening failed was never a device.
            device.end(is_given_up=device.is_open and not context.is_stopping)
