"""The context actor of a device whose contexts live in workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, TypeAlias

from ....actors import Actor, ActorContext
from ....backends.base import ContextPoisonedError

__all__ = ["WorkerContextActor"]

_Serve: TypeAlias = Callable[[ActorContext], AbstractAsyncContextManager[None]]


class WorkerContextActor(Actor):
    """One incarnation is one generation of the device, served by one worker."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextPoisonedError,)

    def __init__(self, serve: _Serve) -> None:
        self._serve = serve

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold a worker; when it is lost, the incarnation ends with it."""
        async with self._serve(context):
            yield
