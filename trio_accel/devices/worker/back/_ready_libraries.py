"""Libraries that are loaded before anybody asks for them."""

from __future__ import annotations

from ....backends.base import AccelDevice, KernelLibrary

__all__ = ["ReadyLibraries"]


class ReadyLibraries:
    """Keeps libraries that were opened ahead until their use, as a vendor's handle takes milliseconds."""

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self._ready: dict[str, KernelLibrary] = {}

    def load(self, name: str) -> None:
        """Open a library ahead; blocks.

        Raises:
            NotSupportedError: There is no such library.
        """
        if name not in self._ready:
            self._ready[name] = self._device.ready_library(name) or self._device.open_library(name)

    def take(self, name: str) -> KernelLibrary | None:
        """The one that was opened ahead, if there is one, or what the device has at once."""
        ready = self._ready.pop(name, None)
        return self._device.ready_library(name) if ready is None else ready

    def open(self, name: str) -> KernelLibrary:
        """The one that was opened ahead, or a new one; blocks.

        Raises:
            NotSupportedError: There is no such library.
        """
        ready = self._ready.pop(name, None)
        return self._device.open_library(name) if ready is None else ready
