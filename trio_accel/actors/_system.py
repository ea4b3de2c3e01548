"""The root of an actor tree, and the actors' tasks."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import NoReturn, Self

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._actor import Actor, ActorContext, RestartInfo
from ._cell import Cell
from ._errors import ActorFailedError, check_printable, describe, is_fatal, safe_repr, single
from ._events import ActorStarted, Meter, Observer, Subscription
from ._incarnation import Incarnation
from ._loop_watch import LoopHolds, LoopWatch, watch_loop
from ._messages import running, running_cells
from ._openings import not_copied, opens
from ._options import Intensity, Restart, Strategy, SystemOptions
from ._supervisor import Spawner, Supervisor, check_name, check_options
from ._system_state import SystemState
from ._tree import ActorSnapshot

__all__ = [
    "ActorSystem",
    "SupervisorScope",
    "around_each_system",
    "check_name",
    "open_system",
    "running_beside",
]

_logger = logging.getLogger("trio_accel.actors")


@attrs.define(eq=False, repr=False)
class Life:
    """Runs one actor, from spawn to its permanent end.

    The task shields itself, so that a cancelled program still stops its actors in order: only the supervisor
    or `Ref.cancel` ends it. The supervisor bounds the duration by the `grace` of each actor's policy.
    """

    _supervisor: Supervisor
    _cell: Cell
    _args: tuple[object, ...]
    _kwargs: Mapping[str, object]
    # The supervisor of the running incarnation's children.
    _children: Supervisor | None = None
    _is_started: bool = False

    @enable_ki_protection
    async def run(self) -> None:
        """Run incarnations until the actor ends for good.

        Raises:
            ActorFailedError: This actor's failure makes the supervisor fail.
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
            # The actor's error is the cause of the supervisor's error.
            error = error or single(escalated)
            raise
        finally:
            cell.close(error)
            # Remove it from the tree before the announcement, because a waiter may start an actor of the same
            # name.
            self._supervisor.forget(cell)
            cell.announce_end()

    def supervisor_of_children(self) -> Supervisor:
        """Return the supervisor of the incarnation's children, which the first use creates."""
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
        """Run one incarnation to its end; return its error if it failed."""
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
                self._log_crash(error, incarnation.crash_message)
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
                # A lifespan may have started more children before it failed, so stop them too.
                await self._stop_children()  # noqa: ASYNC102  # it shields itself
                incarnation.unwatch_all()
                # The error's traceback refers to the incarnation that it ended. That incarnation must not
                # refer to its predecessor's error, or the chain would keep all errors alive.
                actor.context.restart = RestartInfo(number=number, error=None)

    async def _serve_and_stop_children(self, incarnation: Incarnation) -> None:
        self._has_started()
        task = trio.lowlevel.current_task()
        context = task.context
        try:
            await incarnation.serve(context)
        except BaseException as error:
            # The error reaches the nurseries of the lifespan, and must be printable in their groups.
            check_printable(error)
            raise
        finally:
            incarnation.end_serving()
            # The end of the lifespan must run in the context of its beginning, not in the last caller's. Trio
            # switches the context at the checkpoint.
            task.context = context
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
        # Resume the spawner last, because the actor now accepts messages.
        cell.gate.begin()

    async def _stop_children(self) -> None:  # noqa: ASYNC910  # most have no children
        if self._children is not None:
            await self._children.stop_all("its supervisor ended")

    def _log_crash(self, error: BaseException, message_type: str | None) -> None:
        cell = self._cell
        location = "" if cell.pid is None else f" in process {cell.pid}"
        # Errors of one-way messages reach no caller. An actor that fails together with a child ends for good.
        over = "" if message_type is None else f" over {message_type}"
        is_over = isinstance(error, ActorFailedError) and error.path.startswith(f"{cell.path}/")
        is_over = is_over and cell.restart is Restart.TEMPORARY
        level = logging.ERROR if over or is_over else logging.WARNING
        text = "actor %s%s crashed%s: %s"
        is_expected = isinstance(error, cell.actor_class.expected_crashes)
        trace = None if is_expected else error
        if is_expected and not cell.actor_class.prints_crashes:
            # Another record of the same loss is a warning, and operators count those.
            level = logging.INFO
        extra = {"path": cell.path, "pid": cell.pid, "message_type": message_type, "incarnation": cell.number}
        if cell.actor_class.prints_crashes:
            extra["is_untold"] = True
        shown = describe(error) if is_expected else safe_repr(error)
        _logger.log(level, text, cell.path, location, over, shown, exc_info=trace, extra=extra)


class SupervisorScope(Spawner):
    """A supervisor for the body of an ``async with``. Made by `ActorSystem.open_supervisor`."""

    def __init__(self, supervisor: Supervisor, path: str) -> None:
        self._supervisor = supervisor
        self.path = path

    def __repr__(self) -> str:
        return f"<SupervisorScope {self.path}, {len(self._supervisor.children)} children>"

    def snapshot(self) -> ActorSnapshot:
        """Take a snapshot of the supervisor and its actors."""
        return ActorSnapshot(
            path=self.path,
            actor_class="supervisor",
            state="stopping" if self._supervisor.stopping else "running",
            children=self._supervisor.snapshots(),
        )


class ActorSystem(SystemState, Spawner):
    """A tree of actors, and the supervisor of its top level. Made by `open_system`."""

    def __reduce__(self) -> NoReturn:
        raise not_copied("a System", "open one where it is needed")

    def __init__(self, name: str, options: SystemOptions, nursery: trio.Nursery) -> None:
        super().__init__(name, options)
        self._supervisor = Supervisor(self, name, nursery, options.strategy, options.intensity, Life)
        # Supervisors share a namespace with the system's own actors.
        self._scopes: dict[str, SupervisorScope] = {}
        self._supervisor.taken = self._scopes
        self._watch: LoopWatch | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {len(self.alive())} actors>"

    @classmethod
    @asynccontextmanager
    @enable_ki_protection
    async def open(cls, name: str, options: SystemOptions | None = None) -> AsyncGenerator[Self]:
        """Open a system of this class; see `open_system`.

        A system that serves part of another system's tree from another process uses a path as its name.
        """
        if not trio.lowlevel.in_trio_task():
            raise RuntimeError(
                "open_system must be called in a Trio task; start the program with trio.run(main), "
                "because asyncio.run(main()) runs another event loop"
            )
        check_options("open_system", options=(options, SystemOptions, None))
        async with trio.open_nursery() as nursery:
            system = cls(name, options or SystemOptions(), nursery)
            at_end = ExitStack()
            try:
                system._watch = at_end.enter_context(watch_loop(system.options.held_after))
                for enter in tuple(_around_each):
                    at_end.enter_context(enter(system))
                yield system
            except BaseException as error:
                check_printable(error)
                raise
            finally:
                with at_end:
                    await system._stop_all()  # noqa: ASYNC102  # it shields itself
        if alive := system.alive():
            # These actors were abandoned in a supervisor, and another task keeps the supervisor's nursery
            # open.
            paths = ", ".join(sorted(alive))
            raise RuntimeError(f"open_system: {name} closed while actors that were given up live on: {paths}")

    async def _stop_all(self) -> None:
        # Also stop supervisors that other tasks keep open, and let them refuse new actors.
        self._supervisor.stopping = True
        for spawner in (*reversed(self._scopes.values()), self):
            await spawner._supervisor.stop_all("the system closes")  # noqa: SLF001

    @opens("the supervisor is not open yet: async with system.open_supervisor(...) as scope")
    @enable_ki_protection
    async def open_supervisor(
        self,
        name: str,
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
    ) -> AsyncGenerator[SupervisorScope]:
        """Open a supervisor with its own strategy and intensity for the body of the ``async with``.

        At the end of the body it stops its actors in reverse start order. If the supervisor fails, because
        its actors fail too often or escalate, it cancels the body as a nursery would.

        Args:
            name: Name among the system's actors and supervisors.
            strategy: Which actors restart when one fails.
            intensity: The allowed number of restarts; by default 3 within 5 s.

        Raises:
            TypeError: The strategy is not a `Strategy`, or the intensity is not an `Intensity`.
            ValueError: The name is taken or malformed.
            RuntimeError: The system is stopping, or you call this from another thread or Trio run.
            ExceptionGroup: The error of the body, and the `ActorFailedError` of the supervisor.
        """
        # Return a scope instead of a reference, because all its children are dynamic: a restarted supervisor
        # would be empty.
        self.check_run("open_supervisor")
        name = self._supervisor.check_new(name, "open_supervisor")
        check_options(
            "open_supervisor", strategy=(strategy, Strategy), intensity=(intensity, Intensity, None)
        )
        path = f"{self.name}/{name}"
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(self, path, nursery, strategy, intensity or Intensity(), Life)
            scope = self._scopes[name] = SupervisorScope(supervisor, path)
            try:
                yield scope
            except BaseException as error:
                check_printable(error)
                raise
            finally:
                await supervisor.stop_all("its supervisor closes")  # noqa: ASYNC102  # it shields itself
                del self._scopes[name]

    @property
    def loop_holds(self) -> LoopHolds:
        """The times when a task held the Trio loop; see `SystemOptions.held_after`."""
        return LoopHolds() if self._watch is None else self._watch.holds

    def tree(self) -> ActorSnapshot:
        """Take a snapshot of all actors; ``print(system.tree())`` draws it."""
        scopes = tuple(scope.snapshot() for scope in self._scopes.values())
        return ActorSnapshot(
            path=self.name,
            actor_class=type(self).__name__,
            state="stopping" if self._supervisor.stopping else "running",
            children=self._supervisor.snapshots() + scopes,
        )

    def subscribe(self, observer: Observer, *, messages: bool = True, every: bool = True) -> Subscription:
        """Call an observer with every `Event` from now on, on the Trio thread.

        The observer must be quick and must not raise; its errors are logged. Message events cost nothing
        without observers of messages.

        Args:
            observer: The function to call.
            messages: Whether to pass message events too, and not only actor events.
            every: Whether to pass the events of all messages. Otherwise device operations stay as fast as
                without observers, but some or all of them emit no events.

        Returns:
            The subscription: ``close()`` it, or use it in a ``with``.
        """
        return self.observers.add(observer, messages=messages, every=every)

    def measure(self, meter: Meter) -> ExitStack:
        """Measure all messages from now on: the meter receives the end of each message in plain numbers.

        This costs a fraction of events, and messages to device libraries keep their fast paths. Only one
        meter at a time can be installed. In programs, use `trio_accel.telemetry.record`.

        Args:
            meter: The meter, called on the Trio thread.

        Returns:
            A stack that ends the measurement: ``close()`` it, or use it in a ``with``.

        Raises:
            RuntimeError: The system already has a meter.
        """
        return self.observers.measure(meter)

    def alive(self) -> list[str]:
        """List the paths of all live actors."""
        return [cell.path for cell in running_cells() if cell.system is self]


_around_each: list[Callable[[ActorSystem], AbstractContextManager[object]]] = []


@contextmanager
def around_each_system(
    enter: Callable[[ActorSystem], AbstractContextManager[object]],
) -> Generator[None]:
    """Wrap a context manager around every system that this process opens within the block.

    Args:
        enter: Returns the context manager. It is entered before the system's body runs, and exited when the
            actors have ended.
    """
    _around_each.append(enter)
    try:
        yield
    finally:
        _around_each.remove(enter)


@opens("the system is not open yet: async with open_system(...) as system")
@enable_ki_protection
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[ActorSystem]:
    """Open a system of actors, which run concurrently with the body of the ``async with``.

    When the body ends, with or without an exception, the actors stop in reverse start order, each within its
    policy's grace. On exit all actors have ended, even if the body was cancelled.

    Args:
        name: Name of the system: the first part of every path.
        options: Strategy and intensity for the actors at the top level, and the random source.

    Raises:
        ValueError: The name is empty or contains a slash.
        ExceptionGroup: The error of the body, and errors that failed actors escalated to the top.
    """
    check_name(name)
    async with ActorSystem.open(name, options) as system:
        yield system


@asynccontextmanager
async def running_beside(work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Run a task concurrently with a block, cancel it at the end, and raise the block's error unwrapped."""
    failed: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            try:
                yield
            except BaseException as error:  # noqa: ASYNC103, BLE001  # raised below, not in a group
                failed = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The block's own error takes precedence over the task's cancellation.
        if failed is None or group.split(trio.Cancelled)[1] is not None:
            raise
    if failed is not None:
        raise failed
