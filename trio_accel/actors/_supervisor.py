"""The children of one actor or system: starts them, reacts to their failures, and stops them in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar, TypeVarTuple, get_origin

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._cell import Cell
from ._errors import ActorFailedError, describe
from ._events import ActorRestarted, SupervisorFailed
from ._handlers import ActorBase
from ._messages import AwaitedStart, TaskEvent, cell_of_task
from ._options import Directive, Intensity, MailboxOptions, Policy, Restart, Strategy, bind_arguments, named
from ._ref import Ref
from ._restarts import Restarts
from ._system_state import SystemState
from ._tree import ActorSnapshot

ActorT = TypeVar("ActorT", bound=ActorBase)
Ts = TypeVarTuple("Ts")


class _Life(Protocol):
    async def run(self) -> None: ...


@attrs.define(eq=False, repr=False)
class Supervisor:
    """Children in start order, restarted by one strategy, within an intensity.

    Under ``one_for_one`` each child's own task handles its restart. Under the other strategies a restart
    affects several children, so each failure gets a task that ends and restarts them. `_turns` serializes
    these tasks.
    """

    system: SystemState
    _path: str
    _nursery: trio.Nursery
    _strategy: Strategy
    _intensity: Intensity
    # Makes a child's task, which has its own supervisor.
    _life: Callable[[Supervisor, Cell, tuple[object, ...], Mapping[str, object]], _Life]
    children: dict[str, Cell] = attrs.field(factory=dict[str, Cell])
    stopping: bool = False
    # Names of other actors under the same path, which children must not use.
    taken: Mapping[str, object] = attrs.field(default=MappingProxyType({}), init=False)
    # Called for each restart, in addition to the system's observers.
    on_restart: Callable[[ActorRestarted], None] | None = None
    _restarts: Restarts | None = None
    _turns: trio.Lock | None = None
    _restarting: trio.CancelScope | None = None
    _counter: int = 0

    @enable_ki_protection
    async def spawn(
        self,
        actor_class: Callable[..., ActorT],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        name: str | None,
        restart: Restart,
        policy: Policy | None,
        mailbox: MailboxOptions | None,
    ) -> Ref[ActorT]:
        """Start a child; return when its first incarnation accepts messages."""
        self.system.check_run("spawn")
        checked = _check_class(actor_class, args, kwargs)
        check_options(
            "spawn",
            restart=(restart, Restart),
            policy=(policy, Policy, None),
            mailbox=(mailbox, MailboxOptions, None),
        )
        name = self.check_new(self._make_name(checked) if name is None else name, "spawn")
        cell = Cell(
            self.system,
            f"{self._path}/{name}",
            checked,
            restart=restart,
            policy=policy or _DEFAULT_POLICY,
            mailbox_options=mailbox or _DEFAULT_MAILBOX,
        )
        # Reserve the name before the first await, because another spawn may request it meanwhile.
        self.children[name] = cell
        cell.gate.expect_begin()
        spawner = cell_of_task()
        if spawner is not None:
            cell.gate.awaited_start = AwaitedStart(spawner, spawner.awaited)
        # `Nursery.start` does not work here. If its caller is cancelled while the task reports its start,
        # Trio leaves the task in the caller's nursery, and the actor would continue to serve there.
        run = self._life(self, cell, args, kwargs).run
        if checked.inherits_context:
            self._nursery.start_soon(run)
        else:
            self.system.context.run(self._nursery.start_soon, run)
        try:
            begun = await cell.gate.wait_begun()
        except GeneratorExit:
            # The await was closed half-way, and can wait for nothing.
            cell.cancel("its spawner has left its await")
            raise
        except BaseException:
            cell.cancel("its spawner was cancelled")
            with trio.CancelScope(shield=True):
                # The actor's own start and end bound this wait. A started actor must not be left running.
                await cell.wait_terminated()
            raise
        if not begun:
            ended = await cell.wait_terminated()
            raise ended.error or RuntimeError(
                f"spawn: {cell.path} was stopped while it started: {ended.reason}"
            )
        return Ref(cell)

    async def next_incarnation(self, cell: Cell, error: BaseException | None) -> bool:
        """Wait for the next incarnation's turn after a child's incarnation has ended.

        Returns:
            False if the child ends for good.

        Raises:
            ActorFailedError: The supervisor has to fail.
        """
        if self._strategy is Strategy.ONE_FOR_ONE:
            return self._is_restarted(cell, error) and await cell.gate.pause(  # noqa: ASYNC910  # its caller checkpoints
                partial(_sleep, self._count(cell, error))
            )
        if cell.gate.swept is None:
            if not self._is_restarted(cell, error):
                return False  # noqa: ASYNC910  # its caller checkpoints
            cell.gate.swept = TaskEvent()
            self._nursery.start_soon(self._restart_several, cell, cell.gate.swept, error)
        return await cell.gate.wait_turn()

    @enable_ki_protection
    async def _restart_several(self, cell: Cell, failure: TaskEvent, error: BaseException | None) -> None:
        """Restart a failed child and the siblings affected by its failure."""
        if self._turns is None:
            self._turns = trio.Lock()
        async with self._turns:
            if self.stopping or cell.terminated is not None or cell.gate.swept is not failure:
                # The restart for an earlier failure has included this child. If a failed start stopped that
                # restart, the restart for the failed start will include this child.
                return
            delay = self._count(cell, error)
            concerned = self._concerned(cell)
            # A stop cancels this at any point, and also ends the children that wait for their turn.
            # Children end in reverse start order and start in start order, as in Erlang/OTP (D14).
            with trio.CancelScope() as self._restarting:
                for sibling in reversed(concerned):
                    if sibling is not cell:
                        await self._sweep(sibling)
                await _sleep(delay)
                for sibling in concerned:
                    if sibling is not cell and sibling.terminated is None:
                        self._observe_restart(sibling, None, 0.0)
                    if not await sibling.gate.take_turn() and sibling.terminated is None:
                        # It failed to start, so its own restart will handle the remaining children.
                        break
            self._restarting = None

    def _concerned(self, cell: Cell) -> list[Cell]:
        children = list(self.children.values())
        if self._strategy is Strategy.REST_FOR_ONE:
            return children[children.index(cell) :]
        return children

    async def _sweep(self, sibling: Cell) -> None:
        """End a child's incarnation because a sibling failed."""
        # Let a spawning child finish its start, so that its spawner is not disturbed, but do not wait
        # forever.
        with trio.move_on_after(sibling.unwind_grace):
            await sibling.gate.wait_begun()
        if sibling.terminated is not None:
            # It ended while this task waited for others.
            return
        if sibling.restart is Restart.TEMPORARY:
            sibling.cancel("a sibling failed")
        swept = sibling.gate.swept
        if swept is None:
            swept = sibling.gate.swept = TaskEvent()
            assert sibling.incarnation is not None
            sibling.incarnation.nursery.cancel_scope.cancel(reason="a sibling failed")
        with trio.move_on_after(sibling.unwind_grace):
            await swept.wait()
            if sibling.terminated is None:
                # If it failed on its own meanwhile, this restart handles that failure too.
                sibling.gate.swept = swept = TaskEvent()
                swept.set()
            return
        # If it ends later after all, it must not wait for a turn, because its turn never arrives.
        sibling.cancel("a sibling failed; it did not end")
        sibling.quarantine()
        raise self._failed(sibling, None, "it does not end although it was cancelled")

    def _is_restarted(self, cell: Cell, error: BaseException | None) -> bool:
        """Return whether the child's restart type and its policy's directive allow a restart."""
        if self.stopping or cell.restart is Restart.TEMPORARY:
            return False
        if error is None:
            return cell.restart is Restart.PERMANENT
        directive = cell.policy.directive_for(error)
        if directive is Directive.ESCALATE:
            raise self._failed(cell, error, "its policy escalates the error")
        return directive is not Directive.STOP

    def _count(self, cell: Cell, error: BaseException | None) -> float:
        """Count a restart, and return the delay in seconds before the child's next incarnation.

        Raises:
            ActorFailedError: The intensity does not allow the restart.
        """
        if self._restarts is None:
            self._restarts = Restarts(self._intensity, self.system.options.random)
        now, progressed_at = trio.current_time(), cell.progressed_at
        has_progressed = progressed_at is not None
        is_paused = not self._restarts.is_one_more_allowed(cell.path, now, has_progressed=has_progressed)
        if is_paused:
            delay = self._restarts.pause(cell.path, now)
        else:
            delay = self._restarts.delay(cell.path, cell.policy, now, progressed_at)
        if delay is None:
            allowed = f"{self._intensity.restarts} restarts within {self._intensity.within:g} s"
            raise self._failed(cell, error, f"{self._path} allows {allowed}")
        self._observe_restart(cell, error, delay, has_progressed=has_progressed, is_paused=is_paused)
        return delay

    def _observe_restart(
        self,
        cell: Cell,
        error: BaseException | None,
        delay: float,
        *,
        has_progressed: bool = False,
        is_paused: bool = False,
    ) -> None:
        observers = self.system.observers
        if not observers.is_anyone and self.on_restart is None:
            return
        restarted = ActorRestarted(
            path=cell.path,
            pid=cell.pid,
            error=error,
            incarnation=cell.number + 1,
            delay=delay,
            has_progressed=has_progressed,
            is_paused=is_paused,
        )
        if self.on_restart is not None:
            self.on_restart(restarted)
        observers.emit_life(restarted)

    def _failed(self, cell: Cell, error: BaseException | None, reason: str) -> ActorFailedError:
        ending = "ended by itself" if error is None else f"failed with {describe(error)}"
        failed = ActorFailedError(
            f"supervisor {self._path} fails: {cell.path} {ending}, and {reason}", path=cell.path
        )
        failed.__cause__ = error
        # Failures that still wait for a decision no longer need one.
        self.stopping = True
        if self.system.observers.is_anyone:
            self.system.observers.emit_life(SupervisorFailed(path=self._path, error=failed))
        return failed

    async def stop_all(self, reason: str) -> None:  # noqa: ASYNC910  # its caller checkpoints
        """Stop the children in reverse start order, even in a cancelled task."""
        # From here on, `check_new` refuses new children.
        self.stopping = True
        if self._restarting is not None:
            self._restarting.cancel(reason=reason)
        try:
            # The children's grace periods bound this.
            with trio.CancelScope(shield=True):
                pending = [cell for cell in self.children.values() if not cell.is_quarantined]
                while pending:
                    newest = pending.pop()
                    together = [newest]
                    if newest.actor_class.ends_together:
                        while pending and pending[-1].actor_class is newest.actor_class:
                            together.append(pending.pop())
                        for cell in together:
                            cell.request_stop(reason)
                    for cell in together:
                        await cell.stop(reason)
        except BaseException:
            # Only Ctrl-C gets through the shield. The nursery waits for the children, and only this
            # supervisor can end them.
            for cell in self.children.values():
                cell.cancel(f"{reason}; that was interrupted")
            raise

    def snapshots(self) -> tuple[ActorSnapshot, ...]:
        """Take snapshots of all descendants, as a tree under each child."""
        # Visit parents before children first, then build the snapshots in the opposite order. Recursion would
        # not do, because a tree may be deeper than Python's stack.
        below: list[tuple[Cell, tuple[Cell, ...]]] = []
        pending = list(self.children.values())
        while pending:
            cell = pending.pop()
            children = tuple(cell.children.values())
            below.append((cell, children))
            pending += children
        done: dict[Cell, ActorSnapshot] = {}
        for cell, children in reversed(below):
            done[cell] = cell.snapshot(tuple(done.pop(child) for child in children))
        return tuple(done[cell] for cell in self.children.values())

    def forget(self, cell: Cell) -> None:
        """Remove a child from the tree after it has ended for good."""
        name = cell.path.rpartition("/")[2]
        del self.children[name]
        if self._restarts is not None:
            self._restarts.forget(cell.path)

    def check_new(self, name: object, verb: str) -> str:
        """Check a new child's name, which must be well-formed and free, and that this is not stopping."""
        name = check_name(name, verb)
        if name in self.children or name in self.taken:
            raise ValueError(f"{verb}: {self._path} has a child named {name!r} already; choose another name")
        if self.stopping:
            raise RuntimeError(f"{verb}: {self._path} is stopping and starts no {name!r}")
        return name

    def _make_name(self, actor_class: type[ActorBase]) -> str:
        while True:
            self._counter += 1
            name = f"{actor_class.__name__.lower()}-{self._counter}"
            if name not in self.children and name not in self.taken:
                return name


class Spawner:
    """Starts actors: a system, a supervisor within a system, or an actor's context."""

    __slots__ = ()
    _supervisor: Supervisor

    def _supervisor_of(self, actor_class: Callable[..., object]) -> Supervisor:
        """Return the supervisor for a new actor."""
        return self._supervisor

    async def spawn(
        self,
        actor_class: Callable[[*Ts], ActorT],
        /,
        *args: *Ts,
        name: str | None = None,
        restart: Restart = Restart.PERMANENT,
        policy: Policy | None = None,
        mailbox: MailboxOptions | None = None,
        **kwargs: object,
    ) -> Ref[ActorT]:
        """Start an actor; return when its first incarnation accepts messages.

        If you are cancelled meanwhile, this ends the actor before it returns. Actors that you start from an
        actor's context are children of its incarnation, and end with it.

        Args:
            actor_class: Subclass of `Actor`.
            *args: Constructor arguments, used again at each restart.
            name: Name among its siblings; by default made from the class name.
            restart: The ends after which the actor restarts.
            policy: Directives, back-off and grace; strategy and intensity for its own children.
            mailbox: Capacity and overflow.
            **kwargs: Constructor keyword arguments.

        Raises:
            Exception: The constructor or `lifespan` of the first incarnation raised this error, so the actor
                was not started.
            TypeError: The class is not an `Actor`, or its constructor does not accept the arguments.
            ValueError: The name is taken or malformed.
            RuntimeError: The supervisor is stopping, or the incarnation has ended; or you call this from
                another thread or Trio run.
        """
        return await self._supervisor_of(actor_class).spawn(
            actor_class, args, kwargs, name=name, restart=restart, policy=policy, mailbox=mailbox
        )


async def _sleep(delay: float) -> None:
    if delay > 0:
        await trio.sleep(delay)
    else:
        # Even in a restart loop, let other tasks run and let a cancellation through.
        await trio.lowlevel.checkpoint()


_DEFAULT_POLICY = Policy()
_DEFAULT_MAILBOX = MailboxOptions()


def check_name(name: object, verb: str = "open_system") -> str:
    """Check the name of a system or an actor.

    Raises:
        ValueError: The name is empty or contains a slash.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{verb}: name must be a non-empty string without '/', got {name!r}")
    return name


def check_options(verb: str, **options: tuple[object, type] | tuple[object, type, None]) -> None:
    """Check that each option is an instance of its class; a third member means that None is allowed."""
    for argument, (value, cls, *default) in options.items():
        if not isinstance(value, cls) and not (value is None and default):
            raise TypeError(f"{verb}: {argument} must be {named(cls)}, got {value!r}")


def _check_class(
    actor_class: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> type[ActorBase]:
    # `Pool[int, str]` is for type checkers; the actor is a plain `Pool`.
    cls = get_origin(actor_class) or actor_class
    if not (isinstance(cls, type) and issubclass(cls, ActorBase)):
        name = type(actor_class).__name__
        hint = f": write spawn({name}, ...), with its arguments" if isinstance(actor_class, ActorBase) else ""
        raise TypeError(f"spawn: {actor_class!r} is not a subclass of Actor{hint}")
    signature = inspect.signature(cls)
    bind_arguments(f"spawn: {cls.__name__}", signature, args, kwargs, "name", "restart", "policy", "mailbox")
    return cls
