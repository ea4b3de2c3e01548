"""The base of library actors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar

import trio

from ..actors import NOT_NOW, Actor, ActorContext, DeferredReply, handles, quick
from ..backends.base import KernelLibrary
from ._engine import Engine
from ._errors import FailureClass, classify
from ._lane import Lane
from ._operation import Launch

__all__ = ["LibraryActor"]


class LibraryActor(Actor):
    """Owns the handle of one library and a stream; launches one operation after the other.

    Its handler returns as soon as the operation is enqueued; the reply comes at completion.

    Attributes:
        library: Name of the backend's library.
    """

    library: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kernels: KernelLibrary
        self._lane: Lane

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the library's handle and a stream.

        A graceful end waits for what is in flight, that of earlier incarnations too. A crash does
        not: that work belongs to the engine, which sees it through, while the next incarnation has
        a new handle and stream.
        """
        engine = self._engine
        kernels = engine.device.ready_library(self.library)
        if kernels is None:
            kernels = await trio.to_thread.run_sync(engine.device.open_library, self.library)
        try:
            lane = engine.open_lane(self.library, context.path)
        except BaseException:
            kernels.close()
            raise
        self._kernels, self._lane = kernels, lane
        try:
            yield
            engine.expect_end()
            await engine.synchronize(context.path)
        finally:
            engine.retire_lane(lane, kernels.close)

    def launch_now(self, message: Launch) -> object:
        """Enqueue an operation, unless it would have to wait."""
        try:
            if self._kernels.prepare(message.spec) is not None:
                return NOT_NOW
            if not self._engine.may_launch(message, self._lane):
                return NOT_NOW
            context = self.context
            return self._engine.launch(message, self._kernels, self._lane, context.defer, context.crash, None)
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    @handles(Launch)
    @quick(launch_now)
    async def launch(self, message: Launch) -> DeferredReply[None]:
        """Enqueue an operation, when the window has room and those before it are launched."""
        failure: Exception | None = None
        try:
            prepare = self._kernels.prepare(message.spec)
            if prepare is not None:
                failure = await self._engine.prepare(message, self._lane, prepare)
            if not self._engine.may_launch(message, self._lane):
                await self._engine.wait_to_launch(message, self._lane)
            context = self.context
            return self._engine.launch(
                message, self._kernels, self._lane, context.defer, context.crash, failure
            )
        except Exception as error:  # noqa: BLE001  # whose it is, is told there
            return self._refused(error)

    def _refused(self, error: Exception) -> DeferredReply[None]:
        """Reply with what the library said; called while that is handled.

        Raises:
            Exception: The same, if the library is suspect.
        """
        if classify(error) is FailureClass.SUSPECT:
            raise error
        reply: DeferredReply[None] = self.context.defer()
        reply.fail(error)
        return reply
