"""The members, the homes of entities, and the way of requests to them."""

from __future__ import annotations

import re
import uuid
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import attrs
import trio

from ..actors import ActorStoppedError, Message, ParkingLot, Request, TaskEvent, run_apart, warn_untold
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

_INTEGER = re.compile("-?[0-9]{1,20}")
# Seconds until a request that waits for a node is logged; and until a request is sent again without a new
# table, if its entity was not at home, or its node was lost.
_LOG_AFTER_SECONDS, _RETRY_INTERVAL, _LEAVE_RETRY_INTERVAL = 5.0, 0.1, 1.0
# Seconds without a loss of a node after which nobody kills nodes any longer.
_QUIET = 5.0


@attrs.frozen
class Table:
    """The members at one time.

    Attributes:
        epoch: The number of the table, which rises with each change.
        members: The members, sorted by name.
    """

    epoch: int = 0
    members: tuple[Member, ...] = ()
    _homes: dict[Target, Member | None] = attrs.field(
        factory=dict[Target, "Member | None"], init=False, eq=False, repr=False
    )

    def home(self, target: Target) -> Member | None:
        """Return the home of an entity, by rendezvous hashing; None without members."""
        if target not in self._homes:
            fit = [member for member in self.members if target.node in (None, member.name)]
            # The hash takes 2 µs for each member.
            self._homes[target] = by_key(f"{target.path}/{target.key!r}", fit) if fit else None
        return self._homes[target]

    def __reduce__(self) -> tuple[object, ...]:
        return Table, (self.epoch, self.members)


class EntityRouter:
    """Sends requests to the homes of entities, by the newest table.

    Attributes:
        table: The newest table.
        before: The previous table, until all of its members have taken the newest one; then the newest one.
        settled: Set when they have taken it.
        is_closed: Whether its cluster has ended, so that nobody answers any longer.
    """

    def __init__(self) -> None:
        self._blame = Blame(self._is_quiet)
        self.table: Table = Table()
        self.before: Table = self.table
        self.settled: TaskEvent = TaskEvent()
        self.is_closed: bool = False
        self._links: dict[Member, Link] = {}
        # For each path of a class, the first key that is an integer or the text of an integer.
        self._numeric_keys: dict[str, Key] = {}
        self._changed = ParkingLot()

    @property
    def epoch(self) -> int:
        """The number of the newest table."""
        return self.table.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes with an agent."""
        return self.table.members

    def update(self, table: Table, previous: Table | None = None) -> None:
        """Apply a newer table; links to lost members end.

        Args:
            table: The table.
            previous: The previous table, with members that answer until `settle`; None if the missing ones
                are lost.
        """
        self.settled.set()
        self.settled = TaskEvent()
        self.table, self.before = table, previous or table
        if previous is None:
            self.settled.set()
        for link in self._pop_links():
            link.close()
        self._changed.unpark_all()

    async def settle(self, seconds: float) -> None:
        """End the links to former members, after their answers or after `seconds`."""
        self.before = self.table
        self.settled.set()
        links = self._pop_links()
        with trio.move_on_after(seconds):
            for link in links:
                await link.wait_answered()
        # The ends of their agents close them after a cancellation.
        for link in links:
            link.close()

    def _is_reached(self, member: Member) -> bool:
        return member in self.table.members or member in self.before.members

    def _pop_links(self) -> list[Link]:
        return [self._links.pop(member) for member in [*self._links] if not self._is_reached(member)]

    def close(self) -> None:
        """End it: waiting requests fail, and so do later ones."""
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
        """Return the link to a member.

        Raises:
            LinkLostError: The member is lost, and the next table will show that.
        """
        if member not in self._links:
            raise LinkLostError(f"node {member.name} is gone", is_begun=False)
        return self._links[member]

    async def ask(self, target: Target, message: object, number: str | None, *, is_told: bool = False) -> Any:
        """Have an entity serve a message at its home.

        Raises:
            NodeLostError: The node was lost meanwhile, and the message may have been executed. A message with
                a number is sent again.
            LethalRequestError: Nodes were lost whenever this message was sent.
            ActorStoppedError: The cluster is closed.
            Exception: The error of the entity's handler.
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
        """Return whether no member is lost for some seconds; without members, the wait has not begun."""
        while not (self.members or self.is_closed):
            await self.wait_changed()
        previous = {*self.members}
        with trio.move_on_after(_QUIET):
            while previous <= {*self.members} and not self.is_closed:
                previous = {*self.members}
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
            missing_node = "no node" if target.node is None else f"not node {target.node}"
            text = "%s waits for a home: the cluster has %s"
            warn_untold("trio_accel.cluster", text, target.text, missing_node)

    def entity(self, cls: type[EntityT], key: Key) -> EntityRef[EntityT]:
        """Return the address of an entity without a request.

        Keys of two types are two entities. So a class has either integers or texts of integers as keys in a
        program, because ``5`` in one place and ``"5"`` in another one would be a mistake.

        Raises:
            TypeError: The key is not a str, bytes or int, the class is not an `Entity`, or both ``5`` and
                ``"5"`` could be its keys.
            ValueError: Another node cannot import the class.
        """
        if not isinstance(cast("object", key), (str, bytes, int)) or isinstance(key, bool):
            raise TypeError(f"entity: key must be a str, bytes or an int, got {key!r}")
        ref = self._entity(cls, key, None)
        if isinstance(key, int) or _INTEGER.fullmatch(key if isinstance(key, str) else key.decode("latin-1")):
            first = self._numeric_keys.setdefault(path_of(cls), key)
            if type(first) is not type(key):
                raise TypeError(
                    f"entity: {cls.__name__} has keys such as {first!r}, and {key!r} would be another entity "
                    f"than its {type(first).__name__}; use keys of one type, such as str(number)"
                )
        return ref

    def on_node(self, cls: type[EntityT], node: str) -> EntityRef[EntityT]:
        """Return the address of an entity that always has its home on one node.

        Raises:
            TypeError: The class is not an `Entity`, or the node is not a str.
            ValueError: Another node cannot import the class.
        """
        if not isinstance(cast("object", node), str):
            raise TypeError(f"on_node: node must be the name of a node, a str, got {node!r}")
        return self._entity(cls, node, node)

    def _entity(self, cls: Any, key: Key, node: str | None) -> EntityRef[Any]:
        is_durable = getattr(cls, "is_durable", None)
        if not isinstance(cls, type) or not isinstance(is_durable, bool):
            raise TypeError(f"entity: cls must be a subclass of Entity, the class itself, got {cls!r}")
        path = path_of(cls)
        return EntityRef(self, Target(path, key, is_durable, node, digest_of(cls.__module__)))


@attrs.frozen(eq=False, repr=False)
class EntityRef(Generic[EntityT_contra]):
    """The address of an entity. It stays the same when the entity moves.

    It is also a model for all patterns: ``await ref(request)`` asks.
    """

    without_device: ClassVar[str] = "devices of another node are used there; send one array a node by ask()"
    _router: EntityRouter
    _target: Target

    def __repr__(self) -> str:
        home = self._router.table.home(self._target)
        return f"<EntityRef {self._target.text}, {'nowhere' if home is None else f'on {home.name}'}>"

    @property
    def is_available(self) -> bool:
        """Whether it has a home."""
        return not self.is_dead and self._router.table.home(self._target) is not None

    @property
    def is_dead(self) -> bool:
        """Whether its cluster is closed, so that it never answers again."""
        return self._router.is_closed

    async def ask(self, request: Request[EntityT_contra, ReplyT], *, id: str | None = None) -> ReplyT:  # noqa: A002
        """Ask the entity, and wait for its reply. Its first message starts it.

        Deadline and cancellation apply to the request, as for an actor.

        Args:
            request: The request, which is pickled, together with its host arrays.
            id: The id of a request to a `DurableEntity`, which executes each id only once. By default a new
                id.

        Raises:
            NodeLostError: The node was lost, and the request may have been executed. It is not raised for a
                `DurableEntity`, which is asked again.
            LethalRequestError: Each node on which a `DurableEntity` got this request was lost, so that the
                request itself is the likely reason.
            ActorStoppedError: The cluster is closed.
            ImportError: The node does not have the class.
            TypeError: The id is not a str or is empty, it is not a request, or it cannot be pickled.
            ValueError: The request is too large.
            Exception: The error of the handler, with its frames on the node as a note.
        """
        if id is not None and (not isinstance(cast("object", id), str) or not id):
            raise TypeError(f"ask: id must be a str that is not empty, got {id!r}")
        if id is not None and not self._target.is_durable:
            raise TypeError(f"ask: id is for a DurableEntity: nothing keeps it for {self._target.text}")
        number = (id or uuid.uuid4().hex) if self._target.is_durable else None
        # Its steps wait in `finally`, and write to the store.
        return cast("ReplyT", await run_apart(self._router.ask, self._target, request, number))

    async def __call__(self, request: Request[EntityT_contra, ReplyT]) -> ReplyT:
        """Ask, as a model does."""
        return await self.ask(request)

    async def tell(self, message: Message[EntityT_contra]) -> None:
        """Send a message without a reply; return when it is in the mailbox, or a `DurableEntity`'s store.

        Raises:
            Exception: As `ask` does.
        """
        number = uuid.uuid4().hex if self._target.is_durable else None
        await run_apart(partial(self._router.ask, self._target, message, number, is_told=True))
