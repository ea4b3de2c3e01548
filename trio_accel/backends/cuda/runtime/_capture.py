"""Streams that capture graphs of any length, and what a graph may not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from cuda.bindings import driver

from ...base import NotSupportedError
from ._context import CudaContext
from ._driver import is_sticky
from ._stream import CudaStream

__all__ = ["CaptureStream"]

# What the thread does that must not be captured makes the capture fail; what others do is no concern of it.
_MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


class CaptureStream(CudaStream):
    """A stream that runs nothing: what is enqueued becomes a graph that is launched on another stream.

    Libraries take it for any stream. Memory that they need is taken in the order of the other stream, where
    the graph runs, and stays theirs: it is never idle, as nobody knows when a graph is launched again.

    Args:
        stream: Where its graphs are launched.
        context: The device's context, which is current.
    """

    is_capturing = True

    def __init__(self, stream: CudaStream, context: CudaContext) -> None:
        # Nothing of the base's: no event is recorded here, and nothing waited for.
        self._name = f"{stream.name} captures"
        self._context = context
        self.native = context.check(driver.cuStreamCreate(_NON_BLOCKING))
        self.handle = int(self.native)
        self._launches_on = stream
        self.timeline = stream.timeline
        self.is_closed = self.is_destroyed = self.is_light = False

    @property
    def orders_memory(self) -> CudaStream:
        """Where its graphs are launched."""
        return self._launches_on

    def capture(self, enqueue: Callable[[CudaStream], None]) -> Any:
        """Capture what a function enqueues here; returns a graph to be launched.

        What it needs must be loaded by now.

        Raises:
            ContextPoisonedError: The context is lost.
            Exception: What the function raises, or the driver says; there is no graph.
        """
        check = self._context.check
        check(driver.cuStreamBeginCapture(self.native, _MODE))
        is_whole = False
        try:
            enqueue(self)
            is_whole = True
        finally:
            # Also where an interrupt ends it: what follows would be captured, too.
            ended = driver.cuStreamEndCapture(self.native)
            if not is_whole and not ended[0]:
                driver.cuGraphDestroy(ended[1])
        graph = check(ended)
        try:
            return check(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, executable: Any) -> bool:
        """Launch a graph on the other stream; returns False where the driver refuses it.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        code = driver.cuGraphLaunch(executable, self._launches_on.native)[0]
        if is_sticky(code):
            self._context.check((code,))
        return not code

    def discard(self, executable: Any) -> None:
        """Give a graph back. One in flight runs to its end."""
        if not self._context.is_dead:
            driver.cuGraphExecDestroy(executable)

    def check(self) -> None:
        """Refuse what cannot be enqueued; see `CudaStream.check`."""
        failure = self._context.failure()
        if failure is not None:
            raise failure

    def begin_heavy(self) -> None:
        """Nothing is deferred here."""

    def refresh(self) -> int:
        """Nothing of it is ever done: what a graph uses is kept."""
        return -1

    def after(self, finisher: Callable[[], None]) -> NoReturn:
        """Refused: a graph has no events of ours.

        Raises:
            NotSupportedError: In any case.
        """
        raise NotSupportedError(
            "it does something on the host when it is complete, which a graph of the driver cannot",
            backend="cuda",
        )

    def destroy(self) -> None:
        """Give the stream back; the context is current, or dead."""
        if not self.is_destroyed:
            self.is_destroyed = True
            if not self._context.is_dead:
                with suppress(Exception):
                    driver.cuStreamDestroy(self.native)
