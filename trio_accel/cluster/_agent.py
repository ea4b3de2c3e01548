"""The agent of a node: a system with devices and entities, which serves the program and other agents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import trio

from ..backends import candidates
from ..devices import open_system
from ._entities import Residents
from ._errors import EntityMovedError
from ._link import Address, Allocate, Link, listen
from ._members import Member
from ._options import ClusterOptions
from ._store import opened_store
from ._table import EntityRouter

__all__ = ["AgentConfig", "Started"]

# The process of an agent is a program: nobody else has its warnings written.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_logger = logging.getLogger("trio_accel.cluster")


@attrs.frozen
class AgentConfig:
    """The configuration of an agent.

    Attributes:
        node: The name of its node.
        options: The options of the cluster.
        store: The store of durable entities, or None.
        secret: The secret that all agents and the program prove to know.
        host: The address to listen at.
        ports: The ports to listen at; it takes the first free one. 0 for any.
    """

    node: str
    options: ClusterOptions
    store: Any
    secret: bytes = attrs.field(repr=False)
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)


@attrs.frozen
class Started:
    """The address of a started agent.

    Attributes:
        address: The address at which it is reached.
        devices: The names of its devices.
        pid: Its process ID.
    """

    address: Any
    devices: tuple[str, ...]
    pid: int


class _Peers(EntityRouter):
    """The way to other agents, which connects to each at its first request."""

    def __init__(self, window: int, nursery: trio.Nursery, allocate: Allocate) -> None:
        super().__init__()
        self._given = window, nursery, allocate

    async def link(self, member: Member) -> Link:
        if member not in self._links or self._links[member].lost.is_set():
            self._links.pop(member, None)
            new_link = await member.address.connect(member.name, *self._given)
            # Meanwhile the member may have left, or another task may have connected to it.
            if not self._is_reached(member) or self._links.setdefault(member, new_link) is not new_link:
                new_link.close()
        return await super().link(member)


class Agent:
    """An agent.

    Args:
        config: The configuration.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        # The latest possible time of a reply that the program got, and the time of its last request.
        self._heard = self._asked = 0.0

    async def run(self, started: Callable[[Address, tuple[str, ...]], None]) -> None:
        """Serve until this is cancelled.

        Args:
            started: Called with the agent's address and the names of its devices.
        """
        config, options = self._config, self._config.options
        names = options.devices
        if names is None:
            names = tuple([info.name for _, info in candidates(None) if info.is_accelerator]) or ("cpu",)
        async with (
            open_system(config.node) as system,
            system.open_devices(names, options=options.device) as devices,
            opened_store(config.store),
            trio.open_nursery() as nursery,
        ):
            self._heard = trio.current_time()
            # Received arrays are allocated in memory that a device can read directly.
            allocate = partial(next(iter(devices)).host_empty, dtype="uint8")
            self._router = _Peers(options.window, nursery, allocate)
            # An agent that stops while it writes is ended within that time, which releases its lock.
            patience = 2 * options.heartbeat_timeout
            # Then an agent that cannot save in time still ends its hand-off in time.
            save_time = options.hand_off / 2
            self._residents = Residents(
                config.node, system, devices, self._router, config.store, patience, save_time
            )
            nursery.start_soon(self._listen_for_the_program)
            if options.idle_after is not None:
                nursery.start_soon(self._residents.end_idle, options.idle_after)
            address = await listen(config.host, config.secret, self.serve, nursery, allocate, config.ports)
            started(address, tuple([device.info.name for device in devices]))

    async def serve(self, request: Any) -> Any:
        """Serve a request of the program, or of another agent."""
        kind, *args = request
        if kind == "ask":
            epoch, *asked = args
            await self._router.wait_epoch(epoch)
            if self._is_alone():
                raise EntityMovedError(f"node {self._config.node} hears nothing of the program")
            return await self._residents.ask(*asked)
        if kind == "beat":
            # The program waits for each reply before its next request, so the previous request's time is safe
            # to count from. Late messages after a network outage prove nothing.
            self._heard, self._asked = self._asked, trio.current_time()
        if kind == "table":
            table, previous = args
            if not self._router.epoch:
                self._heard = self._asked = trio.current_time()
            if table.epoch > self._router.epoch:
                await self._residents.take(table, previous)
        if kind == "release":
            epoch, target = args
            await self._router.wait_epoch(epoch)
            await self._residents.release(target)
        if kind == "close":
            return await self._residents.end_durable()
        if kind == "settle" and args == [self._router.epoch]:
            # The agent does so before the program has waited too long for it.
            await self._router.settle(self._config.options.hand_off / 2)
        return None

    def _is_alone(self) -> bool:
        """Return whether the program is silent, because it then gives this node's entities to others."""
        return trio.current_time() - self._heard > self._config.options.alone_after

    async def _listen_for_the_program(self) -> None:
        while True:
            await trio.sleep(self._config.options.heartbeat_timeout / 6)
            if self._is_alone():
                _logger.warning("node %s hears nothing of the program: its entities end", self._config.node)
                await self._residents.end_all(at_once=True)
