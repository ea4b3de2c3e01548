"""Clusters: agents on nodes, as children of the program, and the table of members."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import trio

from ..actors import (
    Actor,
    ActorContext,
    Directive,
    Policy,
    Ref,
    SupervisorScope,
    apart,
    nearest,
    opens,
    warn_untold,
)
from ..actors._conditions import part_of
from ..backends.base import NotSupportedError
from ..devices import DeviceGroup, System, run_together
from ._agent import AgentConfig
from ._entities import Residents
from ._errors import EntityMovedError, FencedError, NodeLostError, StoreError
from ._link import Link, LinkLostError, allocate_any
from ._members import Member, Target
from ._nodes import Nodes
from ._options import ClusterOptions
from ._store import Store, check_store, opened_store
from ._table import EntityRef, EntityRouter, Table

__all__ = ["Cluster", "open_cluster", "open_entities"]

_logger = logging.getLogger("trio_accel.cluster")

EntityT = TypeVar("EntityT")

# Heartbeats within the time that an agent may be silent; seconds before an unavailable store is called again
# for a table number.
_BEATS, _PAUSE = 12, 1.0
# Errors of an agent that would also happen to its successor.
_FATAL: dict[type[Exception], Directive] = dict.fromkeys(
    [FencedError, NotSupportedError, StoreError, ValueError], Directive.ESCALATE
)


def _check_argument(label: str, name: str, value: object, kind: Any, expected: str) -> None:
    kinds = cast("tuple[type | None, ...]", kind) if isinstance(kind, tuple) else (kind,)
    if not any(value is None if accepted is None else isinstance(value, accepted) for accepted in kinds):
        raise TypeError(f"{label}: {name} must be {expected}, got {value!r}")


@opens("the cluster is not open yet: async with open_cluster(...) as cluster")
async def open_cluster(
    system: System,
    nodes: Nodes,
    *,
    store: Store | None = None,
    options: ClusterOptions | None = None,
) -> AsyncGenerator[Cluster]:
    """Start an agent on each node, for entities with a home node determined by their keys.

    Agents appear and leave with the nodes; all end with the block, or with this program. An agent is a child
    in the supervision tree of the system, so a failed agent is started again.

    Args:
        system: The system of the program.
        nodes: The source of nodes: `LocalNodes` or `RayNodes`.
        store: The store for the messages of each `DurableEntity`; None without any.
        options: Options.

    Raises:
        TypeError: An argument has another type.
        ValueError: The store is for one host, but the nodes are on several.
        StoreError: The store cannot be opened.
        ExceptionGroup: The error of the body, and of agents that have failed too often; or an
            `ActorFailedError` caused by a `NotSupportedError` or `ValueError`, if a node lacks a device of
            the options, or the name of a device is unknown.
    """
    _check_argument("open_cluster", "system", system, System, "the system of open_system()")
    check_store("open_cluster", store)
    _check_argument("open_cluster", "options", options, (ClusterOptions, None), "ClusterOptions(...)")
    if not hasattr(nodes, "watch"):
        raise TypeError(f"open_cluster: nodes must be LocalNodes(...) or RayNodes(...), got {nodes!r}")
    if store is not None and not (store.is_shared or nodes.is_one_host):
        raise ValueError("open_cluster: this store is for one host, and the nodes are on several")
    options = options or ClusterOptions()
    async with (
        opened_store(store),
        system.open_supervisor("nodes", intensity=options.intensity) as supervisor,
        trio.open_nursery() as nursery,
    ):
        cluster = Cluster(nodes, store, options)
        first = trio.Event()
        nursery.start_soon(cluster.follow, supervisor, first)
        await first.wait()
        try:
            with part_of(system, "cluster", cluster.fault):
                yield cluster
        finally:
            await cluster.end_durable()  # noqa: ASYNC102  # it shields itself
            cluster.close()
            nursery.cancel_scope.cancel(reason="the cluster is closed")


class Cluster(EntityRouter):
    """Nodes with agents; made by `open_cluster`."""

    def __init__(self, nodes: Nodes, store: Store | None, options: ClusterOptions) -> None:
        super().__init__()
        self._nodes, self._store, self._options = nodes, store, options
        self._secret, self._program = secrets.token_bytes(32), secrets.token_hex(16)
        self._epochs = itertools.count(1)
        self._change = trio.Lock()
        self._agents: dict[str, Ref[_NodeAgent]] = {}
        self._tried: dict[str, trio.Event] = {}

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self.members)
        return f"<Cluster of {names or 'no node'}, epoch {self.epoch}>"

    def fault(self) -> str | None:
        """Return why the cluster can serve no request now, or None: for the probe ``/ready``."""
        return None if self.members else "no node is left"

    def replicas(self, cls: type[EntityT]) -> Mapping[str, EntityRef[EntityT]]:
        """Return the address of an entity on each node, by the node's name: for `patterns.ReplicaPool`.

        Raises:
            TypeError, ValueError: As `entity` does.
        """
        return {member.name: self.on_node(cls, member.name) for member in self.members}

    @apart
    async def drain(self, node: str) -> None:
        """Give the entities of a node to others, and end its agent; it stays out while the node stays.

        Raises:
            KeyError: The node is not a member.
        """
        agent = self._agents.get(node)
        names = [member.name for member in self.members]
        if agent is None or node not in names:
            hint = nearest(str(node), names) if names else "there are none"
            raise KeyError(f"drain: {node!r} is not a node with an agent; {hint}")
        try:
            await self._replace(node, None, is_lost=False)
        finally:
            with trio.CancelScope(shield=True):
                await agent.stop()

    async def watch(self) -> AsyncGenerator[Table]:
        """Yield the table, at once and after each change."""
        while True:
            yield self.table
            await self.wait_changed()

    async def end_durable(self) -> None:
        """Refuse further requests, and have all durable entities save their state and end."""
        if self._store is None:
            return
        self.is_closed = True
        counts = [1]

        async def end(link: Link) -> None:
            # A lost agent has ended, and an agent of a silent program ends its entities itself.
            with suppress(LinkLostError, trio.TooSlowError):
                counts.append(await link.ask(("close",), at_once=True))

        with trio.move_on_after(self._options.hand_off, shield=True):
            # An entity that ends may ask another one meanwhile, which starts again.
            while any(counts):
                counts.clear()
                await run_together([partial(end, link) for link in self._links.values()])

    async def follow(self, supervisor: SupervisorScope, first: trio.Event) -> None:
        """Keep an agent on each node; set `first` after an attempt on each initial node."""
        async with aclosing(self._nodes.watch()) as changes:
            async for names in changes:
                for name in [node for node in self._agents if node not in names]:
                    await self._agents.pop(name).stop()
                for name in names:
                    if name not in self._agents:
                        self._tried[name] = trio.Event()
                        # Its end waits for changes before its own: nobody takes its name meanwhile.
                        policy = Policy(directives=_FATAL, backoff=self._options.backoff, grace=math.inf)
                        agent = await supervisor.spawn(_NodeAgent, self, name, name=name, policy=policy)
                        self._agents[name] = agent
                if not first.is_set():
                    for tried in [*self._tried.values()]:
                        await tried.wait()
                    first.set()

    async def live(self, name: str, nursery: trio.Nursery) -> None:
        """Start an agent, make it a member, and return when it is lost, or silent for too long.

        Raises:
            NodeLostError: Always at the end.
        """
        try:
            try:
                config = AgentConfig(name, self._options, self._store, self._secret)
                started = await self._nodes.start(config)
                link = await started.address.connect(name, self._options.window, nursery, allocate_any)
                await self._replace(name, Member(name, started.devices, 0, started.address), link)
            finally:
                self._tried[name].set()
            reason = await self._silence(link)
            if all(member.name != name for member in self.members):
                await trio.sleep_forever()  # whoever handed its entities over cancels this
            raise NodeLostError(f"node {name} {reason}", node=name, epoch=self.epoch)
        except LinkLostError as error:
            raise NodeLostError(str(error), node=name, epoch=self.epoch) from error
        finally:
            with trio.CancelScope(shield=True):
                # The agent first, and then the table: no entity may have two homes.
                await self._end(name)
                if not self.is_closed and any(member.name == name for member in self._links):
                    await self._replace(name, None, is_lost=True)

    async def _silence(self, link: Link) -> str:
        """Wait until an agent is lost or silent; return a description."""
        timeout = self._options.heartbeat_timeout
        while True:
            try:
                with trio.fail_after(timeout):
                    await link.ask(("beat",), at_once=True)
            except trio.TooSlowError:
                return f"gave no sign of life for {timeout:g} s and was ended"
            except LinkLostError:
                return "has lost its agent"
            with trio.move_on_after(timeout / _BEATS):
                await link.lost.wait()

    async def _replace(
        self, name: str, member: Member | None, link: Link | None = None, *, is_lost: bool = False
    ) -> None:
        """Add or remove a member: all agents get the new table, and then hear that all have it (D209)."""
        async with self._change:
            epoch = await self._next_epoch()
            members = {existing.name: existing for existing in self.members if existing.name != name}
            if member is not None and link is not None:
                members[name] = member = attrs.evolve(member, epoch=epoch)
                self._links[member] = link
            table = Table(epoch, tuple([members[node] for node in sorted(members)]))
            previous = None if is_lost else self.table
            recipients = dict.fromkeys([*table.members, *(previous or table).members])
            try:
                await self._give(("table", table, previous), recipients)
            except BaseException:
                with trio.CancelScope(shield=True):
                    # Some agents serve by this table, so its change is not taken back.
                    await self._end(name)
                raise
            self.update(table, previous)
            if previous is not None:
                settle = partial(self._give, ("settle", epoch), table.members)
                await run_together([settle, partial(self.settle, self._options.hand_off)])

    async def _give(self, request: tuple[object, ...], members: Iterable[Member]) -> None:
        """Send a request to agents (a new table makes them end moved entities), and end silent agents."""

        async def give(member: Member) -> None:
            link = self._links[member]
            try:
                with trio.fail_after(self._options.hand_off):
                    await link.ask(request, at_once=True)
                return
            except trio.TooSlowError:
                _logger.warning("node %s has not ended its hand-off: its agent is ended", member.name)
            except LinkLostError:
                pass  # the agent's own task reports that
            # Other nodes serve its entities from here on.
            await self._end(member.name)
            link.close()

        await run_together([partial(give, member) for member in members])

    async def _end(self, name: str) -> None:
        """End the agent of a node, and record whether it had ended on its own."""
        if await self._nodes.end(name):
            for member in self.members:
                if member.name == name:
                    self._blame.note_crash(member)

    async def _next_epoch(self) -> int:
        begun = next(self._epochs)
        if self._store is None:
            return begun
        while not self.is_closed:
            try:
                # The newest program has the store: an older one ends with its next change.
                return await self._store.next_epoch(self._program, takes_over=begun == 1)
            except StoreError as error:
                if error.is_damaged:
                    raise
                warn_untold(_logger.name, "the table of the cluster waits for the store: %s", error)
                await trio.sleep(_PAUSE)
        return begun  # agents take no table of an earlier number than theirs


class _NodeAgent(Actor):
    """The agent of a node, as a child in the tree of the program."""

    expected_crashes = (NodeLostError,)
    prints_crashes = True

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster, self._name = cluster, node

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cluster.live, self._name, nursery)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel(reason="the node has gone")


class _Here(EntityRouter):
    """The way to entities in this process, without a network."""

    residents: Residents

    async def ask(self, target: Target, message: object, number: str | None, *, is_told: bool = False) -> Any:
        self._check_open(target)
        try:
            return await self.residents.ask(target, message, number, is_told)
        except EntityMovedError:
            self._check_open(target)
            raise


@opens("the entities are not open yet: async with open_entities(...) as router")
async def open_entities(
    system: System, devices: DeviceGroup, store: Store | None = None
) -> AsyncGenerator[EntityRouter]:
    """Host entities only in this program; a `DurableEntity` continues after the end of the program.

    Args:
        system: The system of the entities.
        devices: Devices for them.
        store: The store for the messages of each `DurableEntity`.

    Raises:
        TypeError: An argument has another type.
        StoreError: The store cannot be opened.
    """
    _check_argument("open_entities", "system", system, System, "the system of open_system()")
    _check_argument("open_entities", "devices", devices, DeviceGroup, "a group of system.open_devices()")
    check_store("open_entities", store)
    router = _Here()
    residents = router.residents = Residents("here", system, devices, router, store)
    names = tuple([device.info.name for device in devices])
    async with opened_store(store):
        epoch = 1 if store is None else await store.next_epoch()
        router.update(Table(epoch, (Member("here", names, epoch, None),)))
        try:
            yield router
        finally:
            router.close()
            with trio.CancelScope(shield=True):
                await residents.end_all()
