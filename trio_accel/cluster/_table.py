"""Who is a member, which entity is at home where, and the way of a request to it."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, TypeVar, cast

import attrs
import trio

from ..actors import ActorStoppedError, Message, Request, warn_untold
from ..devices import Key, by_key
from ._blame import Blame, RequestTrial
from ._errors import EntityMovedError, NodeLostError
from ._frames import digest_of, path_of
from ._link import Link, LinkLostError
from ._members import Member, Target

__all__ = ["EntityRef", "EntityRouter", "Table"]

EntityT_contra = TypeVar("EntityT_contra", contravariant=True)
EntityT = TypeVar("EntityT")
ReplyT = TypeVar("ReplyT")

# Seconds until who waits for a node is told of in the log; and until a request that was not at home, or was
# lost with its node, is asked again if no new table comes meanwhile.
_LOG_AFTER_SECONDS, _RETRY_INTERVAL, _LEAVE_RETRY_INTERVAL = 5.0, 0.1, 1.0
# Seconds without a loss of a node after which nobody kills them.
_QUIET = 5.0


@attrs.frozen
class Table:
    """The members at a time.

    Attributes:
        epoch: Its number; a later table has a higher one.
        members: The members, in the order of their names.
    """

    epoch: int = 0
    members: tuple[Member, ...] = ()
    _homes: dict[Target, Member | None] = attrs.field(
        factory=dict[Target, "Member | None"], init=False, eq=False, repr=False
    )

    def home(self, target: Target) -> Member | None:
        """Return the member where an entity is at home, by rendezvous hashing; None without one."""
        if target not in self._homes:
            fit = [one for one in self.members if target.node in (None, one.name)]
            # The hash takes 2 µs for each member.
            self._homes[target] = by_key(f"{target.path}/{target.key!r}", fit) if fit else None
        return self._homes[target]

    def __reduce__(self) -> tuple[object, ...]:
        return Table, (self.epoch, self.members)


class EntityRouter:
    """Sends requests to the homes of entities, by the newest table.

    Attributes:
        table: The newest table.
        before: The table before, until all of its members have taken the newest one; then the same.
        settled: Set when they have.
        is_closed: Whether its cluster has ended, and nobody answers any more.
    """

    def __init__(self) -> None:
        self._blame = Blame(self._is_quiet)
        self.table: Table = Table()
        self.before: Table = self.table
        self.settled: trio.Event = trio.Event()
        self.is_closed: bool = False
        self._links: dict[Member, Link] = {}
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def epoch(self) -> int:
        """Number of the newest table."""
        return self.table.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes that have an agent."""
        return self.table.members

    def update(self, table: Table, previous: Table | None = None) -> None:
        """Take a newer table; links to lost members end.

        Args:
            table: The table.
            previous: The table before, whose members answer until `settle`; None if the missing ones are
                lost.
        """
        self.settled.set()
        self.settled = trio.Event()
        self.table, self.before = table, previous or table
        if previous is None:
            self.settled.set()
        for link in self._pop_links():
            link.close()
        self._changed.unpark_all()

    async def settle(self, seconds: float) -> None:
        """End the links to members that have left, after their answers or so many seconds."""
        self.before = self.table
        self.settled.set()
        left = self._pop_links()
        with trio.move_on_after(seconds):
            for link in left:
                await link.wait_answered()
        # The ends of their agents close them after a cancellation.
        for link in left:
            link.close()

    def _is_reached(self, member: Member) -> bool:
        return member in self.table.members or member in self.before.members

    def _pop_links(self) -> list[Link]:
        return [self._links.pop(one) for one in [*self._links] if not self._is_reached(one)]

    def close(self) -> None:
        """End it: asks that wait have their errors, and later ones too."""
        self.is_closed = True
        self.update(self.table)

    async def wait_changed(self) -> None:
        """Wait for the next table."""
        await self._changed.park()

    async def wait_epoch(self, epoch: int) -> None:
        """Wait for a table of this number, or a later one."""
        while self.epoch < epoch:
            await self.wait_changed()

    async def link(self, member: Member) -> Link:
        """Return the way to a member.

        Raises:
            LinkLostError: It is gone, and the next table is about to say so.
        """
        if member not in self._links:
            raise LinkLostError(f"node {member.name} is gone", is_begun=False)
        return self._links[member]

    async def ask(self, target: Target, message: object, number: str | None, *, is_told: bool = False) -> Any:
        """Have an entity serve a message, wherever it is at home.

        Raises:
            NodeLostError: The node was lost meanwhile, and it may have been executed. One with a number is
                asked again.
            LethalRequestError: Nodes were lost whenever it was asked.
            ActorStoppedError: The cluster is closed.
            Exception: As the entity's handler does.
        """
        trial = RequestTrial(target, type(message))
        while True:
            async with self._blame.turn(trial) if trial.lost or self._blame.has_suspects else nullcontext():
                self._check_open(target)
                table = self.table
                member = table.home(target)
                if member is None:
                    await self._wait_for_home(target)
                    continue
                sent = trio.current_time()
                try:
                    link = await self.link(member)
                    return await link.ask(("ask", table.epoch, target, message, number, is_told))
                except EntityMovedError:
                    pass
                except LinkLostError as error:
                    if error.is_begun and (number is None or self.is_closed):
                        text = f"{error}; it may have been executed"
                        raise NodeLostError(text, node=member.name, epoch=table.epoch) from error
                    if error.is_begun:
                        trial.lose(member, sent, error.beside)
            # Until a lost member has left the table, nobody knows whether it has crashed.
            is_leaving = bool(trial.lost) and trial.lost[-1] in self.members
            with trio.move_on_after(_LEAVE_RETRY_INTERVAL if is_leaving else _RETRY_INTERVAL):
                while self.table is table or (is_leaving and trial.lost[-1] in self.members):
                    self._check_open(target)
                    await self.wait_changed()

    async def _is_quiet(self) -> bool:
        """Return whether no member is lost within some seconds; without members, they have not begun."""
        while not (self.members or self.is_closed):
            await self.wait_changed()
        before = {*self.members}
        with trio.move_on_after(_QUIET):
            while before <= {*self.members} and not self.is_closed:
                before = {*self.members}
                await self.wait_changed()
            return False
        return True

    def _check_open(self, target: Target) -> None:
        if self.is_closed:
            raise ActorStoppedError(f"{target.text}: its cluster is closed", path=target.text)

    async def _wait_for_home(self, target: Target) -> None:
        with trio.move_on_after(_LOG_AFTER_SECONDS) as scope:
            await self.wait_changed()
        if scope.cancelled_caught:
            where = "no node" if target.node is None else f"not node {target.node}"
            text = "%s waits for a home: the cluster has %s"
            warn_untold("trio_accel.cluster", text, target.text, where)

    def entity(self, cls: type[EntityT], key: Key) -> EntityRef[EntityT]:
        """Return the address of an entity; it asks nothing.

        Raises:
            TypeError: The key is no str, bytes or int; the class is no `Entity`.
            ValueError: Another node cannot import the class.
        """
        if not isinstance(cast("object", key), (str, bytes, int)) or isinstance(key, bool):
            raise TypeError(f"entity: key must be a str, bytes or an int, got {key!r}")
        return self._entity(cls, key, None)

    def on_node(self, cls: type[EntityT], node: str) -> EntityRef[EntityT]:
        """Return the address of the entity that is at home on a node alone."""
        return self._entity(cls, node, node)

    def _entity(self, cls: Any, key: Key, node: str | None) -> EntityRef[Any]:
        path, is_durable = path_of(cls), getattr(cls, "is_durable", None)
        if not isinstance(is_durable, bool):
            raise TypeError(f"entity: cls must be a subclass of Entity, got {cls!r}")
        return EntityRef(self, Target(path, key, is_durable, node, digest_of(cls.__module__)))


@attrs.frozen(eq=False, repr=False)
class EntityRef(Generic[EntityT_contra]):
    """The address of an entity. It stays the same wherever the entity is at home.

    It is a model for all patterns: ``await ref(request)`` asks, too.
    """

    without_device: ClassVar[str] = "devices of another node are used there; send one array a node by ask()"
    _router: EntityRouter
    _target: Target

    def __repr__(self) -> str:
        home = self._router.table.home(self._target)
        return f"<EntityRef {self._target.text}, {'nowhere' if home is None else f'on {home.name}'}>"

    @property
    def is_available(self) -> bool:
        """Whether it is at home somewhere."""
        return not self.is_dead and self._router.table.home(self._target) is not None

    @property
    def is_dead(self) -> bool:
        """Whether its cluster is closed, so that it never answers again."""
        return self._router.is_closed

    async def ask(self, request: Request[EntityT_contra, ReplyT], *, id: str | None = None) -> ReplyT:  # noqa: A002
        """Ask the entity, and wait for its reply. It is started for its first message.

        Deadline and cancellation go with the request, as for an actor.

        Args:
            request: The request; it goes to the node by pickle, and arrays of the host with it.
            id: What tells a request of a `DurableEntity` from others: asked twice, it is executed once. By
                default a new one.

        Raises:
            NodeLostError: The node was lost, and the request may have been executed. Not for a
                `DurableEntity`, which is asked again.
            LethalRequestError: Each node that a `DurableEntity` was asked on was lost, so that the request
                itself is the likely reason.
            ActorStoppedError: The cluster is closed.
            ImportError: The node does not have the class.
            TypeError, ValueError: The request cannot go to a node, or is too large.
            Exception: The error of the handler, with its frames on the node as a note.
        """
        if id is not None and not self._target.is_durable:
            raise TypeError(f"ask: id is for a DurableEntity: nothing keeps it for {self._target.text}")
        number = (id or uuid.uuid4().hex) if self._target.is_durable else None
        return cast("ReplyT", await self._router.ask(self._target, request, number))

    async def __call__(self, request: Request[EntityT_contra, ReplyT]) -> ReplyT:
        """Ask, as a model does."""
        return await self.ask(request)

    async def tell(self, message: Message[EntityT_contra]) -> None:
        """Tell the entity something; returns when its mailbox has it, or the store for a `DurableEntity`.

        Raises:
            Exception: As `ask` does.
        """
        number = uuid.uuid4().hex if self._target.is_durable else None
        await self._router.ask(self._target, message, number, is_told=True)
