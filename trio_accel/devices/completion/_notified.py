"""Completions that a stream tells of, and those that its launch waits for."""

from __future__ import annotations

import attrs
import trio

from ...backends.base import AccelEvent, AccelStream
from ..base._bridge import LoopNotifier
from ._port import CompletionPort

__all__ = ["HostCallbackPort", "SyncPort"]


@attrs.frozen
class HostCallbackPort(CompletionPort):
    """Has the stream notify of each event."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.notify(event, self._notifier)

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._notifier.close()


@attrs.frozen
class SyncPort(CompletionPort):
    """Waits for each event at once, and the loop with it."""

    _notifier: LoopNotifier

    def watch(self, stream: AccelStream, event: AccelEvent) -> None:
        stream.synchronize()
        # The launch is not finished yet: the reply follows when the loop goes on.
        self._notifier.notify()

    async def run(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._notifier.close()
