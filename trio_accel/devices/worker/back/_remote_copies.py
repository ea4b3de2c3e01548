"""Copies of host arrays that are in the application, which does the copying."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import attrs

from ....backends.base import AccelDevice, AccelStream, Hold, KernelLibrary
from ....backends.base.ops import CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ...base._bridge import LoopNotifier
from ..transport._codec import Message
from ..transport._protocol import plain_array

__all__ = ["RemoteArray", "RemoteCopies"]


@attrs.frozen
class RemoteArray:
    """Stands for a host array of the application in a specification.

    Attributes:
        request: Number of the request that it belongs to.
        index: Which of its host arrays it is.
    """

    request: int
    index: int


_Copy: TypeAlias = CopyFromHostSpec | CopyToHostSpec


class RemoteCopies:
    """Holds a stream where a copy has its place, until the application has copied.

    So it is where the application has the device's memory mapped: there is one copy and not two.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Hold, LoopNotifier]] = {}

    def wrap(self, device: AccelDevice) -> AccelDevice:
        """The device, with a memory library that knows such arrays."""
        return cast("AccelDevice", _Device(device, self))

    def enqueue(self, copy: _Copy, device: AccelDevice, stream: AccelStream) -> None:
        """Hold a stream, and have the application copy when it gets there."""
        array = copy.source if isinstance(copy, CopyToHostSpec) else copy.out
        host = cast("RemoteArray", copy.host)
        place = device.placement(array.block)
        transfer = next(self._numbers)
        message: Message = (
            "copy",
            transfer,
            host.request,
            host.index,
            place.chunk,
            place.offset,
            plain_array(array),
        )
        notifier = LoopNotifier(lambda: self._send(message, now=True))
        self._waiting[transfer] = stream.hold(notifier), notifier

    def copied(self, transfer: int) -> None:
        """The application has copied: the stream goes on."""
        hold, notifier = self._waiting.pop(transfer)
        notifier.close()
        hold.release()


class _Device:
    """A device whose memory library is this one's."""

    def __init__(self, device: AccelDevice, copies: RemoteCopies) -> None:
        self._device = device
        self._copies = copies
        # What every operation uses.
        self.allocate = device.allocate
        self.free = device.free
        self.renew = device.renew
        self.placement = device.placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def open_library(self, name: str) -> KernelLibrary:
        library = self._device.open_library(name)
        return _Memory(library, self._device, self._copies) if name == "memory" else library


@attrs.frozen(eq=False)
class _Memory:
    """A memory library that has the application copy its own arrays."""

    _library: KernelLibrary
    _device: AccelDevice
    _copies: RemoteCopies

    @property
    def name(self) -> str:
        return self._library.name

    @property
    def operations(self) -> frozenset[str]:
        return self._library.operations

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return self._library.prepare(spec)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        host = cast("object", spec.host) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)) else None
        # Of the array types a specification knows only NumPy's.
        if type(host) is RemoteArray:
            self._copies.enqueue(cast("_Copy", spec), self._device, stream)
        else:
            self._library.enqueue(spec, stream)

    def close(self) -> None:
        self._library.close()
