"""How the engine learns that work on a stream is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from ..backends.base import AccelEvent, AccelStream
from ._bridge import LoopWaker

__all__ = ["CompletionPort", "CompletionStrategy", "HostCallbackCompletion"]


class CompletionPort(Protocol):
    """The completions of one engine."""

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        """See to it that the engine looks at its events soon after this one is done."""

    def close(self) -> None:
        """Watch nothing any more."""


class CompletionStrategy(Protocol):
    """A way to learn of completions, given to `DeviceOptions`."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine.

        Args:
            reap: Looks at the engine's events; to be called on the Trio thread.
        """
        ...


@attrs.frozen(kw_only=True)
class HostCallbackCompletion:
    """The stream itself rings, from its own thread or the driver's; Trio is woken by token."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        """Start for one engine."""
        return _HostCallbackPort(LoopWaker(reap))


@attrs.frozen
class _HostCallbackPort:
    _waker: LoopWaker

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.notify(event, self._waker)

    def close(self) -> None:
        self._waker.close()
