"""Strategies of one's own, in a module that a worker can import."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import attrs

import trio_accel as ta
from trio_accel.backends.base import AccelDevice, AccelStream
from trio_accel.devices import CompletionPort, StreamSource

# The application logs the worker's records below this name.
_logger = logging.getLogger("trio_accel.strategies")


@attrs.frozen
class LoggedStreams:
    """Gives the streams of another strategy out, and logs which."""

    strategy: ta.StreamPool

    def open(self, device: AccelDevice) -> StreamSource:
        return _LoggedSource(self.strategy.open(device))


@attrs.frozen
class _LoggedSource:
    source: StreamSource

    def acquire(self, library: str) -> AccelStream:
        stream = self.source.acquire(library)
        _logger.warning("process %d gives stream %d to %s", os.getpid(), id(stream), library)
        return stream

    def release(self, stream: AccelStream) -> None:
        self.source.release(stream)


@attrs.frozen
class LoggedCompletion:
    """Callbacks, and a line in the log for each engine."""

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        _logger.warning("process %d completes", os.getpid())
        return ta.HostCallbackCompletion().open(reap)


@attrs.frozen
class LockedUp:
    """Cannot be pickled."""

    function: Callable[[], None] = lambda: None

    def open(self, reap: Callable[[], None]) -> CompletionPort:
        raise AssertionError("it was opened all the same")
