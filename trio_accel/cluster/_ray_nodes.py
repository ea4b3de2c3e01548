"""Nodes of Ray: it knows them, and starts, pins and ends agents. Messages go beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import attrs
import trio

from ..backends.base.kit.modules import import_extra
from ._agent import Agent, AgentConfig, Started
from ._errors import NodeLostError
from ._link import Address

__all__ = ["RayNodes"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds between two looks at Ray's nodes, and for a process that is to go; and the most that this may take:
# Ray kills a stopped one after five.
_LOOK, _AGAIN, _GONE = 1.0, 0.02, 20.0


class RayAgent:
    """An agent in an actor of Ray's: Trio in a thread, beside the event loop in which Ray calls this.

    Args:
        config: What the agent is told.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._agent = Agent(config)
        self._started: Future[Started] = Future()

    async def start(self) -> Started:
        """Start the agent; returns when it listens."""
        threading.Thread(target=self._run, daemon=True).start()
        return await asyncio.wrap_future(self._started)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            if self._started.done():
                _logger.exception("this agent has failed")
                os._exit(1)
            self._started.set_exception(error)

    async def _main(self) -> None:
        def tell(address: Address, devices: tuple[str, ...]) -> None:
            self._started.set_result(Started(address, devices, os.getpid()))

        await self._agent.run(tell)


class RayNodes:
    """The nodes of a Ray cluster, with an agent in an actor of Ray's on each. Needs the extra ``ray``.

    A node is named as in Ray: by ``ray start --node-name``, or else by its address. Of nodes that share a
    name, one has an agent. A node without a CPU for Ray is left out, as a head with ``--num-cpus=0``. An
    agent takes no CPU of Ray's, and ends with this program.

    Args:
        address: Where the cluster is, as for ``ray.init``. The connection stays until the program ends; a
            program that is connected already keeps its own.
        num_gpus: GPUs of each agent; by default all that its node has.
        runtime_env: Environment of the agents, as for any actor of Ray.

    Attributes:
        is_one_host: See `Nodes`.
        agent: The class of the actors.

    Raises:
        NotSupportedError: Ray is not installed.
    """

    is_one_host: bool = False
    agent: ClassVar[type[RayAgent]] = RayAgent

    def __init__(
        self,
        address: str = "auto",
        *,
        num_gpus: float | None = None,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self._ray: Any = import_extra("ray", "ray")
        self._address, self._num_gpus, self._runtime_env = address, num_gpus, runtime_env
        self._nodes: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._listening: dict[str, Address] = {}

    async def watch(self) -> AsyncGenerator[Collection[str], None]:
        """See `Nodes`."""
        while True:
            before = self._nodes
            # Ray answers late or never without its head.
            self._nodes = await trio.to_thread.run_sync(self._look, abandon_on_cancel=True)
            if not before or [*self._nodes] != [*before]:
                yield [*self._nodes]
            await trio.sleep(_LOOK)

    def _look(self) -> dict[str, Any]:
        if not self._ray.is_initialized():
            self._ray.init(self._address)
        nodes = [one for one in self._ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]
        living = {one["NodeID"] for one in nodes}
        # A node that is back may be there ahead of the news that it was lost: it waits for its name.
        before = {name: one for name, one in self._nodes.items() if one["NodeID"] in living}
        named = {one["NodeName"]: one for one in nodes} | before
        return dict(sorted(named.items()))

    async def start(self, config: AgentConfig) -> Started:
        """See `Nodes`."""
        name = config.node
        try:
            node = self._nodes[name]
            pin: Any = import_extra("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
            remote = self._ray.remote(self.agent).options(
                num_cpus=0,
                num_gpus=node["Resources"].get("GPU", 0) if self._num_gpus is None else self._num_gpus,
                max_restarts=0,
                runtime_env=self._runtime_env,
                scheduling_strategy=pin(node["NodeID"], soft=False),
            )
            told = attrs.evolve(config, host=node["NodeManagerAddress"])
            actor = self._actors[name] = await trio.to_thread.run_sync(remote.remote, told)
            get = partial(self._ray.get, actor.start.remote())
            started: Started = await trio.to_thread.run_sync(get, abandon_on_cancel=True)
        except Exception as error:
            text = f"the agent of node {name} does not start: {error}"
            raise NodeLostError(text, node=name, epoch=0) from error
        self._listening[name] = started.address
        return started

    async def end(self, node: str) -> None:
        """See `Nodes`."""
        actor, address = self._actors.pop(node, None), self._listening.pop(node, None)
        with trio.move_on_after(_GONE, shield=True) as scope, suppress(OSError):
            if actor is not None:
                await trio.to_thread.run_sync(self._ray.kill, actor, abandon_on_cancel=True)
            # Ray calls it dead at once. Its host refuses connections when the process is gone.
            while address is not None:
                await (await trio.open_tcp_stream(address.host, address.port)).aclose()
                await trio.sleep(_AGAIN)
        if scope.cancelled_caught:
            _logger.warning("node %s: Ray has not ended its agent within %g s", node, _GONE)
