"""The children of one actor or system: starting, deciding on their failures, stopping in order."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import trio

from ._actor import Actor
from ._cell import Cell
from ._errors import ActorFailedError
from ._options import Backoff, Directive, Intensity, MailboxOptions, Policy, Restart
from ._ref import Ref

if TYPE_CHECKING:
    from ._system import System

__all__ = ["Supervisor"]

ActorT = TypeVar("ActorT", bound=Actor)


class Supervisor:
    """Children in start order, restarted one for one, within an intensity."""

    __slots__ = ("_counter", "_intensity", "_nursery", "_path", "_restarts", "children", "stopping", "system")

    def __init__(self, system: System, path: str, nursery: trio.Nursery, intensity: Intensity) -> None:
        self.system = system
        self.children: dict[str, Cell] = {}
        self.stopping = False
        self._path = path
        self._nursery = nursery
        self._intensity = intensity
        self._restarts: deque[float] = deque()
        self._counter = 0

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
        """Start a child; returns when its first incarnation takes messages."""
        checked = _check_class(actor_class, args, kwargs)
        name = self._check_name(name, checked)
        if self.stopping:
            raise RuntimeError(f"spawn: {self._path} is stopping and starts no {name!r}")
        cell = Cell(
            self,
            f"{self._path}/{name}",
            checked,
            args,
            kwargs,
            restart=restart,
            policy=policy or Policy(),
            mailbox=mailbox or MailboxOptions(),
        )
        self.children[name] = cell
        try:
            await self._nursery.start(cell.run)
        except BaseException:
            # Never ran at all (the nursery is closed, or the spawner was cancelled before it began).
            self.forget(cell)
            raise
        return Ref(cell)

    def decide(self, cell: Cell, error: BaseException | None) -> float | None:
        """Say what becomes of a child whose incarnation ended.

        Returns:
            Seconds to wait before the next incarnation, or None for no other.

        Raises:
            ActorFailedError: The supervisor has to fail: the intensity is exceeded, or the
                directive is to escalate. The child is not restarted.
        """
        if self.stopping or cell.restart is Restart.TEMPORARY:
            return None
        if error is None:
            if cell.restart is Restart.TRANSIENT:
                return None
        else:
            directive = cell.policy.directive_for(error)
            if directive is Directive.STOP:
                return None
            if directive is Directive.ESCALATE:
                raise self._failed(cell, error, "its policy escalates the error")
        now = trio.current_time()
        self._restarts.append(now)
        while self._restarts[0] < now - self._intensity.within:
            self._restarts.popleft()
        if len(self._restarts) > self._intensity.restarts:
            allowed = f"{self._intensity.restarts} restarts within {self._intensity.within:g} s"
            raise self._failed(cell, error, f"{self._path} allows {allowed}")
        return self._delay(cell, cell.policy.backoff, now)

    async def stop_child(self, cell: Cell, reason: str) -> None:
        """Stop a child gracefully, then by cancellation; returns when it has ended."""
        cell.request_stop(reason)
        with trio.move_on_after(cell.policy.grace):
            await cell.wait_terminated()
            return
        cell.cancel(f"{reason}; it did not stop within its grace of {cell.policy.grace:g} s")
        await cell.wait_terminated()

    async def stop_all(self, reason: str) -> None:
        """Stop the children in reverse start order."""
        self.stopping = True
        while self.children:
            await self.stop_child(next(reversed(self.children.values())), reason)

    def forget(self, cell: Cell) -> None:
        """Take a child that has ended for good out of the tree."""
        name = cell.path.rpartition("/")[2]
        if self.children.get(name) is cell:
            del self.children[name]

    def _delay(self, cell: Cell, backoff: Backoff, now: float) -> float:
        if now - cell.last_failure_time > backoff.reset_after:
            cell.attempt = 0
        cell.last_failure_time = now
        delay = backoff.delay(cell.attempt, self.system.options.random)
        cell.attempt += 1
        return delay

    def _failed(self, cell: Cell, error: BaseException | None, why: str) -> ActorFailedError:
        what = "ended by itself" if error is None else f"failed with {type(error).__name__}: {error}"
        failed = ActorFailedError(
            f"supervisor {self._path} fails: {cell.path} {what}, and {why}", path=cell.path
        )
        failed.__cause__ = error
        return failed

    def _check_name(self, name: str | None, actor_class: type[Actor]) -> str:
        if name is None:
            self._counter += 1
            return f"{actor_class.__name__.lower()}-{self._counter}"
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"spawn: name must be a non-empty string without '/', got {name!r}")
        if name in self.children:
            raise ValueError(
                f"spawn: {self._path} has a child named {name!r} already "
                f"({self.children[name].actor_class.__name__}); choose another name"
            )
        return name


def _check_class(actor_class: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> type[Actor]:
    if not (isinstance(actor_class, type) and issubclass(actor_class, Actor)):
        raise TypeError(f"spawn: {actor_class!r} is not a subclass of Actor")
    try:
        inspect.signature(actor_class).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"spawn: {actor_class.__name__}{inspect.signature(actor_class)}: {error}") from None
    return actor_class
