"""Entities: actors by key, and their hosting at their homes."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any, ClassVar

import attrs
import trio

from ..actors import (
    Actor,
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    Directive,
    Policy,
    Ref,
    Restart,
    describe,
    warn_untold,
)
from ..devices import Device, DeviceGroup, Key
from ._errors import EntityMovedError, NodeLostError
from ._frames import digest_of, find
from ._link import LinkLostError
from ._members import Target
from ._table import EntityRouter, Table

__all__ = ["Entity", "Home"]

_logger = logging.getLogger("trio_accel.cluster")

_CUT_OFF = "hears nothing of the program"


@attrs.define(eq=False)
class Home:
    """The home of an entity, passed to its class.

    Attributes:
        key: The key.
        device: The device of the node for this key.
        devices: All devices of the node.
        system: The system of the node.
        cluster: The way to other entities: ``home.cluster.entity(cls, key)``.
        node: The name of the node.
        epoch: The number of the table that assigned it to this home.
        message_id: The id of the current message, for a `DurableEntity`. An effect outside, such as a mail,
            can use it to recognize a message that runs again.
    """

    key: Key
    device: Device
    devices: DeviceGroup
    system: ActorSystem
    cluster: EntityRouter
    node: str
    epoch: int
    message_id: str | None = None


class Resident:
    """An entity with its home here.

    Args:
        residents: All entities here.
        target: The entity.
        cls: Its class.

    Attributes:
        used: The time of the last request.
        in_use: The number of current requests.
        has_left: Whether it ends, or has ended, and no longer accepts messages.
    """

    restart: ClassVar[Restart] = Restart.PERMANENT

    def __init__(self, residents: Residents, target: Target, cls: Any) -> None:
        self.used: float = trio.current_time()
        self.in_use: int = 0
        self._residents, self._target, self._cls = residents, target, cls
        self._lock = trio.Lock()
        self._ref: Ref[Any] | None = None
        self.has_left: bool = False
        self._is_cut_off = False

    async def ask(self, message: Any, number: str | None, *, is_told: bool) -> Any:
        """Have it serve a message; the first one starts it."""
        async with self._lock:
            self._check()
            if self._ref is None or self._ref.is_terminated:
                self._ref, _ = await self._spawn(self._cls.policy)
        try:
            return await (self._ref.tell(message) if is_told else self._ref.ask(message))
        except ActorStoppedError:
            self._check()
            raise
        except ActorFailedError as error:
            if not self._is_cut_off:
                raise
            node, epoch = self._residents.node, self._residents.router.epoch
            raise NodeLostError(f"node {node} {_CUT_OFF}: {error}", node=node, epoch=epoch) from error

    def _check(self) -> None:
        if self.has_left:
            raise EntityMovedError(f"{self._target.text} has left node {self._residents.node}")

    async def _spawn(self, policy: Policy, epoch: int | None = None) -> tuple[Ref[Any], Home]:
        residents, target = self._residents, self._target
        device = residents.devices.place(key=f"{target.path}/{target.key!r}")
        home = Home(
            target.key,
            device,
            residents.devices,
            residents.system,
            residents.router,
            residents.node,
            residents.router.table.epoch if epoch is None else epoch,
        )
        name = f"{self._cls.__name__.lower()}-{next(residents.numbers)}"
        ref = await residents.system.spawn(self._cls, home, name=name, policy=policy, restart=self.restart)
        return ref, home

    async def save(self) -> None:
        """Save its state before an orderly end, if a store keeps it."""

    async def end(self, *, at_once: bool = False, save_until: float = math.inf) -> str:
        """End it; waiting requests are not at home here any longer.

        Args:
            at_once: Whether to cancel running requests instead of letting them finish, and not to save.
            save_until: The time until which its state is saved.

        Returns:
            The reason why its state is not saved; empty if it is, or need not be.
        """
        self.has_left = True
        self._is_cut_off |= at_once
        if at_once and self._ref is not None:
            self._ref.cancel(f"its node {_CUT_OFF}")
        async with self._lock:
            reason = "" if self._is_cut_off else await self._save(save_until)
            if self._ref is not None:
                await self._ref.stop()
                # An abandoned actor may still write; in that case its node is ended.
                await self._ref.wait_terminated()
            return reason

    async def _save(self, until: float) -> str:
        reason = "the time for saves is over"
        with trio.CancelScope(deadline=until):
            try:
                await self.save()
                return ""
            except Exception as error:  # noqa: BLE001  # user code may raise anything
                reason = describe(error)
        return f"{self._target.text}: {reason}"


class Entity(Actor):
    """Base of actors with a home on one of several nodes, by a key.

    If a node is lost, so is the state of its entities. They start from the beginning on other nodes, with the
    next message.

    Args:
        home: The home.

    Attributes:
        home: The argument.
        policy: The supervision policy on its node. By default, the error of a handler is the reply.
        is_durable: Whether its messages are stored.
        resident: The class that hosts it.
    """

    policy: ClassVar[Policy] = Policy(directives={Exception: Directive.RESUME})
    is_durable: ClassVar[bool] = False
    resident: ClassVar[type[Resident]] = Resident

    def __init__(self, home: Home) -> None:
        self.home: Home = home


class Residents:
    """The entities with their home in this process.

    Args:
        node: The name of the node.
        system: The system of the entities.
        devices: The devices of the node.
        router: The way to other entities; its table determines who is at home here.
        store: The store of durable entities.
        patience: Seconds for which a store that cannot begin is called again.
        save_time: Seconds for the saves of entities that end at the same time.

    Attributes:
        numbers: Numbers for the names of actors with the same class.
    """

    def __init__(
        self,
        node: str,
        system: ActorSystem,
        devices: DeviceGroup,
        router: EntityRouter,
        store: Any = None,
        patience: float = 30.0,
        save_time: float = 15.0,
    ) -> None:
        self.node: str = node
        self.system: ActorSystem = system
        self.devices: DeviceGroup = devices
        self.router: EntityRouter = router
        self.store: Any = store
        self.patience: float = patience
        self.save_time: float = save_time
        self.numbers: itertools.count[int] = itertools.count(1)
        self._all: dict[Target, Resident] = {}

    async def ask(self, target: Target, message: object, number: str | None, is_told: bool) -> Any:
        """Have an entity serve a message.

        Raises:
            EntityMovedError: It is at home elsewhere.
            ImportError: Its class is not there.
            Exception: As its handler does.
        """
        if target not in self._all:
            await self._wait_released(target)
        if not self._is_home(target):
            raise EntityMovedError(f"{target.text} is not at home on node {self.node}")
        resident = self._all.get(target)
        if resident is None:
            cls = find(target.path, self.node)
            if target.digest not in {"", digest_of(cls.__module__)}:
                _logger.warning("node %s has another file of %s than the asker", self.node, target.path)
            resident = self._all[target] = cls.resident(self, target, cls)
        resident.in_use += 1
        try:
            return await resident.ask(message, number, is_told=is_told)
        finally:
            resident.in_use -= 1
            resident.used = trio.current_time()

    def _is_home(self, target: Target) -> bool:
        member = self.router.table.home(target)
        return member is not None and member.name == self.node

    async def _wait_released(self, target: Target) -> None:
        """Wait until an entity of this node has ended at its previous home."""
        router = self.router
        while self._is_home(target) and not router.settled.is_set():
            table, settled, member = router.table, router.settled, router.before.home(target)
            if member is None or member.name == self.node:
                return
            try:
                link = await router.link(member)
                await link.ask(("release", table.epoch, target), at_once=True)
            except LinkLostError:
                # The program ends its agent before the table is settled.
                await settled.wait()
            if router.table is table:
                return

    async def release(self, target: Target) -> None:
        """End an entity with its home elsewhere; return when it has ended."""
        if target in self._all and not self._is_home(target):
            await self._end([target])

    async def take(self, table: Table, previous: Table | None) -> None:
        """Apply a newer table like an `EntityRouter`; return when the entities that it moves have ended."""
        self.router.update(table, previous)
        # If an earlier table began to end an entity without seeing the result, this one finishes that.
        await self._end(
            [target for target, it in self._all.items() if it.has_left or not self._is_home(target)]
        )

    async def _end(self, targets: list[Target], *, at_once: bool = False) -> None:
        until, unsaved = trio.current_time() + self.save_time, list[str]()

        async def end(target: Target, resident: Resident) -> None:
            if reason := await resident.end(at_once=at_once, save_until=until):
                unsaved.append(reason)
            # If removed earlier, its successor would run concurrently. Another call may already have added
            # that.
            if self._all.get(target) is resident:
                del self._all[target]

        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(end, target, self._all[target])
        if unsaved:
            text = "node %s: %d entities end without a save, so their last messages run again: %s"
            warn_untold(_logger.name, text, self.node, len(unsaved), unsaved[0])

    async def end_durable(self) -> int:
        """End the durable entities, and return their number."""
        targets = [target for target in self._all if target.is_durable]
        await self._end(targets)
        return len(targets)

    async def end_all(self, *, at_once: bool = False) -> None:
        """End all entities; a later message starts an entity again.

        Args:
            at_once: Whether to cancel running requests instead of letting them finish.
        """
        await self._end([*self._all], at_once=at_once)

    async def end_idle(self, after: float) -> None:
        """End entities without requests for `after` seconds, forever."""
        while True:
            await trio.sleep(after / 2)
            since = trio.current_time() - after
            await self._end([target for target, it in self._all.items() if not it.in_use and it.used < since])
