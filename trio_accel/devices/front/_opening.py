"""A device that is being opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

import attrs
from trio.lowlevel import enable_ki_protection

from ..base._refusals import NotAwaited
from ..operations._ref import Device

__all__ = ["DeviceOpening"]


@attrs.define(eq=False)
class DeviceOpening(NotAwaited):
    """A device being opened: await it, or use it in ``async with``, which closes the device at the end."""

    what_to_do = (
        "the device is not open yet: device = await system.open_device(...), "
        "or async with system.open_device(...) as device"
    )

    _open: Callable[[], Awaitable[Device]]
    _device: Device | None = attrs.field(default=None, init=False)

    def __await__(self) -> Generator[Any, Any, Device]:
        return self._open().__await__()

    @enable_ki_protection
    async def __aenter__(self) -> Device:
        self._device = await self
        return self._device

    @enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
        if self._device is not None:
            await self._device.close()  # noqa: ASYNC102  # it shields itself
