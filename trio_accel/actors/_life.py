"""The life of an actor: its incarnations, one after another."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._actor import Actor, ActorContext, RestartInfo
from ._cell import Cell
from ._errors import ActorFailedError, check_printable, is_fatal, safe_repr, single
from ._events import ActorStarted
from ._incarnation import Incarnation
from ._options import Restart
from ._supervisor import Supervisor
from ._tasks import running

__all__ = ["Life"]

_logger = logging.getLogger("trio_accel.actors")


@attrs.define(eq=False, repr=False)
class Life:
    """Runs one actor, from spawn to its permanent end.

    The task shields itself: only its supervisor (or `Ref.cancel`) ends it, so that a
    cancelled program still stops its actors in order. The supervisor bounds that by the `grace`
    of each actor's policy.
    """

    _supervisor: Supervisor
    _cell: Cell
    _args: tuple[object, ...]
    _kwargs: Mapping[str, object]
    # The supervisor of the running incarnation's children.
    _children: Supervisor | None = attrs.field(default=None, init=False)
    _is_started: bool = attrs.field(default=False, init=False)

    @enable_ki_protection
    async def run(self) -> None:
        """Run incarnations until the actor ends for good.

        Raises:
            ActorFailedError: The supervisor has to fail with this actor.
        """
        cell = self._cell
        error: BaseException | None = None
        try:
            with trio.CancelScope(shield=True), running(cell):
                while True:
                    error = None
                    error = await self._live()
                    if not self._is_started or cell.stop_reason is not None:
                        break
                    if not await self._supervisor.next_incarnation(cell, error):
                        break
        except BaseException as escalated:
            # The supervisor's error has this actor's error as its cause.
            error = error or single(escalated)
            raise
        finally:
            cell.close(error)
            # Out of the tree before the end is announced: a waiter may start an actor of the same name.
            self._supervisor.forget(cell)
            cell.announce_end()

    def supervisor_of_children(self) -> Supervisor:
        """Return the supervisor of the incarnation's children, made on first use."""
        if self._children is None:
            cell, incarnation = self._cell, self._cell.incarnation
            assert incarnation is not None  # its context has looked
            policy = cell.policy
            self._children = Supervisor(
                cell.system, cell.path, incarnation.nursery, policy.strategy, policy.intensity, Life
            )
            cell.children = self._children.children
        return self._children

    async def _live(self) -> BaseException | None:
        """Run one incarnation to its end; returns its error, if it failed."""
        cell = self._cell
        incarnation = cell.begin_incarnation()
        error: BaseException | None = None
        try:
            await self._run(incarnation)
        except BaseException as raised:  # noqa: ASYNC103  # what is fatal is raised
            error = single(raised)
            if is_fatal(raised):
                raise
        finally:
            cell.end_incarnation()
            self._children = None
        if error is not None:
            cell.last_error = error
            if self._is_started:
                self._log_crash(error, incarnation.told)
        if self._is_started:
            cell.suspend()
        return error  # noqa: ASYNC910  # its caller checkpoints

    async def _run(self, incarnation: Incarnation) -> None:
        cell, number = self._cell, incarnation.number
        async with trio.open_nursery() as incarnation.nursery:
            cell.cancel_if_asked(incarnation.nursery.cancel_scope)
            actor = cell.actor_class(*self._args, **self._kwargs)
            assert isinstance(actor, Actor)  # its class was checked
            incarnation.actor = actor
            actor.context = ActorContext(
                cell,
                incarnation,
                RestartInfo(number=number, error=cell.last_error),
                self.supervisor_of_children,
            )
            try:
                if type(actor).lifespan is Actor.lifespan:
                    await self._serve_and_stop_children(incarnation)
                else:
                    async with actor.lifespan(actor.context):
                        await self._serve_and_stop_children(incarnation)
            except BaseException as error:
                check_printable(error)
                raise
            finally:
                incarnation.end_serving()
                # Again, for children that a lifespan started before it failed.
                await self._stop_children()  # noqa: ASYNC102  # it shields itself
                incarnation.unwatch_all()
                # An error's traceback holds the incarnation that it ended, and that would hold the error
                # before: all there ever were.
                actor.context.restart = RestartInfo(number=number, error=None)

    async def _serve_and_stop_children(self, incarnation: Incarnation) -> None:
        self._has_started()
        task = trio.lowlevel.current_task()
        own = task.context
        try:
            await incarnation.serve(own)
        except BaseException as error:
            # The error reaches the nurseries of the lifespan: in their groups an unprintable one does harm.
            check_printable(error)
            raise
        finally:
            incarnation.end_serving()
            # The end of the lifespan must run in the context of its begin, not in the last asker's. Trio
            # switches it with the checkpoint.
            task.context = own
            await trio.lowlevel.cancel_shielded_checkpoint()
            await self._stop_children()  # noqa: ASYNC102  # it shields itself

    def _has_started(self) -> None:
        cell = self._cell
        self._is_started = True
        cell.resume()
        if cell.system.observers.is_anyone:
            cell.system.observers.emit_life(
                ActorStarted(path=cell.path, pid=cell.pid, incarnation=cell.number)
            )
        cell.gate.begin()

    async def _stop_children(self) -> None:  # noqa: ASYNC910  # most have no children
        if self._children is not None:
            await self._children.stop_all("its supervisor ended")

    def _log_crash(self, error: BaseException, told: str | None) -> None:
        cell = self._cell
        where = "" if cell.pid is None else f" in process {cell.pid}"
        # A told message has no asker that gets the error. An actor that fails with a child is given up.
        over = "" if told is None else f" over {told}"
        is_over = isinstance(error, ActorFailedError) and error.path.startswith(f"{cell.path}/")
        is_over = is_over and cell.restart is Restart.TEMPORARY
        level = logging.ERROR if over or is_over else logging.WARNING
        text = "actor %s%s crashed%s: %s"
        trace = None if isinstance(error, cell.actor_class.expected_crashes) else error
        extra = {"path": cell.path, "pid": cell.pid, "message_type": told, "incarnation": cell.number}
        _logger.log(level, text, cell.path, where, over, safe_repr(error), exc_info=trace, extra=extra)
