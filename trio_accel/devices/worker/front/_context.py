"""The context actor of a device whose contexts live in workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from ....actors import Actor, ActorContext
from ....backends.base import ContextPoisonedError

if TYPE_CHECKING:
    from ._dispatch import WorkerDispatch

__all__ = ["WorkerContextActor"]


class WorkerContextActor(Actor):
    """One incarnation is one generation of the device, served by one worker."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextPoisonedError,)

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch = dispatch

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold a worker; when it is lost, the incarnation ends with it."""
        async with self._dispatch.generation(context):
            yield
