"""A servant whose calls run beside each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import attrs
import trio

from ..actors import ActorContext, DeferredReply
from ._call import Servant, refuse_unbegun, without_cancellation
from ._tally import CallStatistics, Tally

__all__ = ["TaskServant"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class TaskServant(Servant[ItemT, ResultT]):
    """A servant that serves each call in a task of its own, so that no call holds its mailbox.

    The reply is deferred. An error of `answer` is the asker's, as it is, and the actor lives on. The task has
    the asker's deadline and context variables. When the asker is cancelled, its task is too.
    ``stop(drain=True)`` waits for all calls. If the incarnation ends otherwise (it crashed, or its supervisor
    restarts siblings together), the calls in progress fail with `ActorFailedError`, and those in the mailbox
    are served by the next one.
    """

    _nursery: trio.Nursery
    _tally: Tally

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold the tasks of one incarnation."""
        self._tally = Tally()
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    async def answer(self, item: ItemT) -> ResultT:
        """Serve one item, beside others: between two checkpoints each has the actor to itself."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it serves a call")

    async def call(self, item: ItemT) -> ResultT | DeferredReply[ResultT]:
        """Start the task of one item."""
        reply = self.start(partial(self._answer_counted, item))
        await trio.lowlevel.checkpoint()
        return reply

    def statistics(self) -> object:
        """What became of its calls since its incarnation began: `CallStatistics`."""
        return CallStatistics(**attrs.asdict(self._tally))

    def start(
        self, work: Callable[[], Awaitable[ResultT]], *, has_begun: Callable[[], bool] = lambda: True
    ) -> DeferredReply[ResultT]:
        """Start a task for the request that the running handler serves, which returns what this returns.

        The task has the context variables and the deadline of the asker.

        Args:
            work: Gives the reply, or raises the error that is the reply.
            has_begun: Whether the request may have been executed, in part or in full. If not when the
                incarnation ends, it fails with `ActorStoppedError` or `ActorRestartingError`.
        """
        scope = trio.CancelScope(deadline=self.context.deadline)
        reply: DeferredReply[ResultT] = self.context.defer(on_cancel=scope.cancel)
        self._nursery.start_soon(self._answer, work, has_begun, scope, reply)
        return reply

    async def _answer_counted(self, item: ItemT) -> ResultT:
        with self._tally:
            return await self.answer(item)

    async def _answer(
        self,
        work: Callable[[], Awaitable[ResultT]],
        has_begun: Callable[[], bool],
        scope: trio.CancelScope,
        reply: DeferredReply[ResultT],
    ) -> None:
        try:
            with scope:
                try:
                    result = await work()
                except Exception as error:  # noqa: BLE001  # whatever it is, it is the asker's
                    reply.fail(error)
                except BaseExceptionGroup as group:
                    reply.fail(without_cancellation(group))
                else:
                    reply.set(result)
            if scope.cancelled_caught and reply.is_cancelled:
                reply.cancelled()
            elif scope.cancelled_caught:
                # The asker has moved its deadline since it asked.
                reply.fail(trio.TooSlowError("the deadline with which it was asked has passed"))
        finally:
            if not reply.is_done:
                self._ended(reply, has_begun=has_begun())

    def _ended(self, reply: DeferredReply[ResultT], *, has_begun: bool) -> None:
        """The incarnation ends, and no later one knows of the request."""
        if not has_begun:
            refuse_unbegun(self.context, reply)
        elif not self.context.is_stopping:
            reply.fail_as_crash(RuntimeError("the incarnation of the actor ended meanwhile"))
