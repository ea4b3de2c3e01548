"""Which stream a library actor works on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import attrs

from ...backends.base import AccelDevice, AccelStream
from ._checks import must, whole

__all__ = [
    "PerActorStreams",
    "PerLibraryStreams",
    "SingleStream",
    "StreamPool",
    "StreamSource",
    "StreamStrategy",
]


class StreamSource(Protocol):
    """The streams of one context."""

    def acquire(self, library: str) -> AccelStream:
        """Return a stream for one incarnation of a library's actor."""
        ...

    def release(self, stream: AccelStream) -> None:
        """That incarnation enqueues nothing more; what is enqueued still runs."""


class StreamStrategy(Protocol):
    """A way to give streams out, given to `DeviceOptions`."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        ...


def _are_priorities(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(library, str) and isinstance(priority, int) and not isinstance(priority, bool)
        for library, priority in cast("Mapping[object, object]", value).items()
    )


@attrs.frozen(kw_only=True)
class PerActorStreams:
    """A stream for each library actor, a new one after a crash: no library waits behind another. The default.

    Attributes:
        priorities: By the name of the library, 0 for those that are not named: work of a higher one is
            begun first, where the device has priorities (CUDA; the CPU has none).
    """

    priorities: Mapping[str, int] = attrs.field(
        factory=dict[str, int],
        validator=must("map library names to whole numbers", _are_priorities, TypeError),
    )

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _OwnStreams(device, self.priorities)


@attrs.frozen(kw_only=True)
class PerLibraryStreams:
    """A stream for each library, shared by all actors that serve it."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _CachedStreams(device)


@attrs.frozen(kw_only=True)
class SingleStream:
    """One stream for everything: operations run one after the other, in the order of their launch."""

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _PooledStreams(device, 1)


@attrs.frozen
class StreamPool:
    """So many streams, which the library actors take in turn.

    Attributes:
        size: How many.
    """

    size: int = attrs.field(validator=whole(1))

    def open(self, device: AccelDevice) -> StreamSource:
        """Start for one context."""
        return _PooledStreams(device, self.size)


@attrs.frozen
class _OwnStreams:
    _device: AccelDevice
    _priorities: Mapping[str, int]

    def acquire(self, library: str) -> AccelStream:
        name = f"{self._device.info.name} {library}"
        return self._device.open_stream(name, self._priorities.get(library, 0))

    def release(self, stream: AccelStream) -> None:
        stream.close()


@attrs.define(eq=False)
class _CachedStreams:
    """Streams that last as long as the context: its end closes them."""

    _device: AccelDevice
    _streams: dict[str, AccelStream] = attrs.field(factory=dict[str, AccelStream], init=False)

    def acquire(self, library: str) -> AccelStream:
        if library not in self._streams:
            self._streams[library] = self._device.open_stream(f"{self._device.info.name} {library}")
        return self._streams[library]

    def release(self, stream: AccelStream) -> None:
        pass


class _PooledStreams(_CachedStreams):
    """The same, taken in turn."""

    def __init__(self, device: AccelDevice, size: int) -> None:
        super().__init__(device)
        self._names: Iterator[str] = itertools.cycle(f"pool {number}" for number in range(size))

    def acquire(self, library: str) -> AccelStream:
        return super().acquire(next(self._names))
