"""Nodes of Ray, which starts, pins and ends agents. Messages do not pass through Ray (D198)."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import attrs
import trio

from ..actors._errors import single
from ..backends.base.kit.modules import deferred_extra, import_extra
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._errors import not_started
from ._link import Address

__all__ = ["RayNodes"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds between two checks of Ray's nodes, and of an ending process; for a connection; and the maximum for
# the end of an agent: Ray kills a stopped one after five.
_POLL_INTERVAL, _RETRY_INTERVAL, _REACH_TIMEOUT, _END_TIMEOUT = 1.0, 0.02, 1.0, 20.0


class RayAgent:
    """An agent in a Ray actor: Trio runs in a thread next to the event loop in which Ray calls this.

    Args:
        config: The configuration.
    """

    def __init__(self, config: AgentConfig) -> None:
        logging.basicConfig(format=LOG_FORMAT)
        self._agent = Agent(config)
        self._started: Future[Started] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    async def start(self) -> Started:
        """Return when the agent listens."""
        # Ray has imported it here, and others who import this module do not need it.
        import asyncio

        return await asyncio.wrap_future(self._started)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            if self._started.done():
                _logger.exception("this agent has failed")
                os._exit(1)
            self._started.set_exception(single(error))

    async def _main(self) -> None:
        await self._agent.run(self._tell)

    def _tell(self, address: Address, devices: tuple[str, ...]) -> None:
        self._started.set_result(Started(address, devices, os.getpid()))


class RayNodes:
    """The nodes of a Ray cluster, with an agent in a Ray actor on each. Needs the extra ``ray``.

    A node has its name in Ray: from ``ray start --node-name``, or else its address. If nodes share a name,
    only one gets an agent, and a warning is logged. A node without a CPU for Ray is left out, such as a head
    with ``--num-cpus=0``. An agent does not take a CPU from Ray, and ends with this program.

    Requests are sent by streams from process to process. If a firewall allows only a few ports, such as the
    ports that Ray got for its workers, pass them as `ports`.

    Args:
        address: The address of the cluster, as for ``ray.init``. The connection stays until the program ends;
            an existing connection of the program is kept.
        num_gpus: The number of GPUs per agent; by default all GPUs of its node.
        runtime_env: The environment of the agents, as for any Ray actor. Agents have the priority of Ray's
            own processes instead of the low priority of its workers. To change that, set
            `RAY_worker_niceness` in ``env_vars``.
        ports: Ports from which each agent takes a free one; by default any.

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
        ports: Sequence[int] = (0,),
    ) -> None:
        self._load_ray = deferred_extra("ray", "ray")
        self._address, self._num_gpus, self._ports = address, num_gpus, ports
        # Ray's workers give way to all other programs. At that priority an agent would be silent too long.
        variables: dict[str, Any] = {"RAY_worker_niceness": "0"} | ((runtime_env or {}).get("env_vars") or {})
        self._runtime_env: dict[str, Any] = {**(runtime_env or {}), "env_vars": variables}
        self._nodes: dict[str, Any] = {}
        self._shared: set[str] = set()
        self._actors: dict[str, Any] = {}
        self._started: dict[str, tuple[Started, AgentConfig]] = {}

    @property
    def _ray(self) -> Any:
        """The package. Its import takes seconds, and `_poll` in its thread is the first use."""
        return self._load_ray()

    async def watch(self) -> AsyncGenerator[Collection[str]]:
        """See `Nodes`."""
        while True:
            previous = self._nodes
            # Ray answers late or never without its head.
            self._nodes = await trio.to_thread.run_sync(self._poll, abandon_on_cancel=True)
            if not previous or [*self._nodes] != [*previous]:
                yield [*self._nodes]
            await trio.sleep(_POLL_INTERVAL)

    def _poll(self) -> dict[str, Any]:
        if not self._ray.is_initialized():
            self._ray.init(self._address)
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        shared = {name for name, count in Counter(node["NodeName"] for node in nodes).items() if count > 1}
        for name in shared - self._shared:
            text = "several nodes are named %s, and one of them has an agent: use `ray start --node-name`"
            _logger.warning(text, name)
        self._shared = shared
        living = {node["NodeID"] for node in nodes}
        # A returning node may appear before the news of its loss, so it waits for its name.
        retained = {name: node for name, node in self._nodes.items() if node["NodeID"] in living}
        named = {node["NodeName"]: node for node in nodes} | retained
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
            agent_config = attrs.evolve(config, host=node["NodeManagerAddress"], ports=tuple(self._ports))
            actor = self._actors[name] = await trio.to_thread.run_sync(remote.remote, agent_config)
            call = actor.start.remote()
            started: Started = await trio.to_thread.run_sync(self._ray.get, call, abandon_on_cancel=True)
        except Exception as error:
            # Ray wraps the error of a call.
            raise not_started(name, getattr(error, "cause", error)) from error
        self._started[name] = started, config
        return started

    async def end(self, node: str) -> None:
        """End the agent of a node, as `Nodes.end`.

        An agent that cannot be reached is waited for as long as it serves without a word of the program.
        """
        actor, (started, config) = self._actors.pop(node, None), self._started.pop(node, (None, None))
        if actor is None:
            return
        alone_seconds = 0.0 if config is None else config.options.alone_after
        with trio.move_on_after(max(_END_TIMEOUT, alone_seconds), shield=True) as scope:
            await trio.to_thread.run_sync(self._ray.kill, actor, abandon_on_cancel=True)
            began = trio.current_time()
            # Ray calls it dead at once.
            while started is not None:
                is_there = await _is_there(started.address)
                if is_there is False or (is_there is None and trio.current_time() - began > alone_seconds):
                    break
                await trio.sleep(_RETRY_INTERVAL)
        if scope.cancelled_caught:
            _logger.warning(
                "node %s: Ray has not ended its agent within %g s", node, max(_END_TIMEOUT, alone_seconds)
            )


async def _is_there(address: Address) -> bool | None:
    """Return whether an agent listens; None for a host that does not answer."""
    with trio.move_on_after(_REACH_TIMEOUT), trio.socket.socket() as sock, suppress(OSError):
        try:
            await sock.connect((address.host, address.port))
            return True
        except ConnectionRefusedError:
            return False
    return None
