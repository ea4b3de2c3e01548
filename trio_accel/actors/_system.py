"""The root of a tree of actors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple

import trio

from ._actor import Actor
from ._options import MailboxOptions, Policy, Restart, SystemOptions
from ._supervisor import Supervisor
from ._tree import ActorSnapshot, snapshot_children

if TYPE_CHECKING:
    from ._cell import Cell
    from ._ref import Ref

__all__ = ["System", "open_system"]

ActorT = TypeVar("ActorT", bound=Actor)
Ts = TypeVarTuple("Ts")


class System:
    """A tree of actors and the supervisor of those at its top. Made by `open_system`."""

    def __init__(self, name: str, options: SystemOptions, nursery: trio.Nursery) -> None:
        self.name = name
        self.options = options
        self.cells: dict[trio.lowlevel.Task, Cell] = {}
        self._root = Supervisor(self, name, nursery, options.intensity)

    def __repr__(self) -> str:
        return f"<System {self.name}, {len(self.cells)} actors>"

    @classmethod
    @asynccontextmanager
    async def open(cls, name: str, options: SystemOptions | None = None) -> AsyncGenerator[Self, None]:
        """Open a system of this class; see `open_system`."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"open_system: name must be a non-empty string without '/', got {name!r}")
        async with trio.open_nursery() as nursery:
            system = cls(name, options or SystemOptions(), nursery)
            try:
                yield system
            finally:
                # The supervisor bounds this by the graces of the actors.
                with trio.CancelScope(shield=True):
                    await system._root.stop_all("the system closes")
        if system.cells:
            raise RuntimeError(f"system {name} closed with actors alive: {list(system.cells.values())}")

    async def spawn(
        self,
        actor_class: Callable[[*Ts], ActorT],
        *args: *Ts,
        name: str | None = None,
        restart: Restart = Restart.PERMANENT,
        policy: Policy | None = None,
        mailbox: MailboxOptions | None = None,
        **kwargs: object,
    ) -> Ref[ActorT]:
        """Start an actor; returns when its first incarnation takes messages.

        Args:
            actor_class: Subclass of `Actor`.
            *args: Arguments of its constructor, used again at each restart.
            name: Name among its siblings; by default made from the class name.
            restart: When it is started again after it ended.
            policy: Directives, back-off and grace; and the intensity of its own children.
            mailbox: Capacity and overflow.
            **kwargs: Keyword arguments of its constructor.

        Raises:
            Exception: What the first incarnation's constructor or `lifespan` raised; there is no
                actor then.
            TypeError: The class is no `Actor`, or its constructor does not take the arguments.
            ValueError: The name is taken or malformed.
        """
        return await self._root.spawn(
            actor_class, args, kwargs, name=name, restart=restart, policy=policy, mailbox=mailbox
        )

    def tree(self) -> ActorSnapshot:
        """Take a snapshot of all actors; ``print(system.tree())`` draws it."""
        return ActorSnapshot(
            path=self.name,
            actor_class=type(self).__name__,
            state="stopping" if self._root.stopping else "running",
            children=snapshot_children(self._root),
        )

    def sender(self) -> Cell | None:
        """The actor whose own task is running now, or None."""
        return self.cells.get(trio.lowlevel.current_task())


@asynccontextmanager
async def open_system(name: str, *, options: SystemOptions | None = None) -> AsyncGenerator[System, None]:
    """Open a system of actors: the body of the ``async with`` runs beside them.

    When the body ends, by itself or by an exception, the actors are stopped in reverse start
    order, each within the grace of its policy; on exit none is alive. That holds too when the
    body is cancelled.

    Raises:
        ExceptionGroup: What the body raised, and what a failed actor escalated to the top.
    """
    async with System.open(name, options) as system:
        yield system
