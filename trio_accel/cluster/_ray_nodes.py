"""Nodes of Ray: it knows them, and starts, pins and ends agents. Messages go beside it, or by its calls."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Collection, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any, Literal

import attrs
import numpy as np
import trio

from ..backends.base.kit.modules import import_extra
from ._agent import Agent, AgentConfig, Started
from ._errors import NodeLostError
from ._frames import Failure, Parts, pack, unpack
from ._link import Address, Link, LinkLostError, serve_one

__all__ = ["RayNodes"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds between two looks at Ray's nodes.
_LOOK = 1.0
# Seconds that a killed process may take to be gone: Ray kills a stopped one after five.
_GONE = 20.0
# Seconds between two looks for a process that is to go.
_AGAIN = 0.02
# Calls of an actor at a time. By Ray's own bound of 1000, signs of life would wait behind asks.
_MOST_CALLS = 1 << 15


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
        transport: Whether messages go by streams, or by calls of Ray's actors, which are slower.

    Raises:
        NotSupportedError: Ray is not installed.
        ValueError: There is no such transport.
    """

    is_one_host: bool = False

    def __init__(
        self,
        address: str = "auto",
        *,
        num_gpus: float | None = None,
        runtime_env: dict[str, Any] | None = None,
        transport: Literal["stream", "ray"] = "stream",
    ) -> None:
        if transport not in {"stream", "ray"}:
            raise ValueError(f"RayNodes: transport must be 'stream' or 'ray', got {transport!r}")
        self._ray: Any = import_extra("ray", "ray")
        self._address, self._num_gpus = address, num_gpus
        self._runtime_env, self._transport = runtime_env, transport
        self._nodes: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._listening: dict[str, Address] = {}

    async def watch(self) -> AsyncGenerator[Collection[str], None]:
        """See `Nodes`."""
        while True:
            before = self._nodes
            # Without its head, Ray answers late or never.
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
            remote = self._ray.remote(RayAgent).options(
                num_cpus=0,
                num_gpus=node["Resources"].get("GPU", 0) if self._num_gpus is None else self._num_gpus,
                max_restarts=0,
                max_concurrency=_MOST_CALLS,
                runtime_env=self._runtime_env,
                scheduling_strategy=pin(node["NodeID"], soft=False),
            )
            told = attrs.evolve(config, host=node["NodeManagerAddress"])
            actor = self._actors[name] = await trio.to_thread.run_sync(remote.remote, told)
            started: Started = await _result(actor.start.remote(), set())
        except Exception as error:
            text = f"the agent of node {name} does not start: {error}"
            raise NodeLostError(text, node=name, epoch=0) from error
        self._listening[name] = started.address
        return started if self._transport == "stream" else attrs.evolve(started, address=RayAddress(actor))

    async def end(self, node: str) -> None:
        """See `Nodes`."""
        actor, address = self._actors.pop(node, None), self._listening.pop(node, None)
        with trio.move_on_after(_GONE, shield=True), suppress(OSError):
            if actor is not None:
                await trio.to_thread.run_sync(self._ray.kill, actor, abandon_on_cancel=True)
            # Ray calls it dead at once. Its host refuses connections when the process is gone.
            while address is not None:
                await (await trio.open_tcp_stream(address.host, address.port)).aclose()
                await trio.sleep(_AGAIN)


async def _result(ref: Any, waiting: set[trio.Event]) -> Any:
    """Wait for what a call of Ray's replies, or until the event that is added meanwhile is set."""
    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell(_: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future: Future[Any] = ref.future()
    future.add_done_callback(tell)
    waiting.add(done)
    try:
        await done.wait()
    finally:
        waiting.remove(done)
        if not future.done():
            import_extra("ray", "ray").cancel(ref)
    return future.result(timeout=0)


@attrs.frozen
class RayAddress:
    """Where an agent is reached by calls.

    Attributes:
        actor: Ray's actor.
    """

    actor: Any

    async def connect(self, name: str, window: float, nursery: trio.Nursery) -> Link:
        """See `Address.connect`; the link tells where nobody is there."""
        link = RayLink(self.actor, name, window)
        nursery.start_soon(link.run)
        return link


class RayLink:
    """The way to an agent by calls of its actor. See `Link`.

    Args:
        actor: Ray's actor.
        name: Name of its node, for errors.
        window: The most asks that wait for their replies; who asks more waits in their own task.
    """

    def __init__(self, actor: Any, name: str, window: float) -> None:
        self._actor, self._name, self._window = actor, name, trio.CapacityLimiter(window)
        self._lost = trio.Event()
        self._waiting: set[trio.Event] = set()

    async def run(self) -> None:
        """Wait until the actor is gone, or the link is closed; raises nothing for that."""
        with suppress(LinkLostError):
            await self._call("wait")
        self.close()

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await _result(getattr(self._actor, method).remote(*arguments), self._waiting)
        except (import_extra("ray.exceptions", "ray").RayError, TimeoutError) as error:
            text = f"node {self._name} was lost with this request in flight"
            raise LinkLostError(text, is_begun=True) from error

    async def wait_lost(self) -> None:
        """See `Link`."""
        await self._lost.wait()

    def close(self) -> None:
        """See `Link`."""
        self._lost.set()
        for done in self._waiting:
            done.set()

    async def ask(self, request: object, *, at_once: bool = False) -> Any:
        """See `Link`."""
        parts = pack((request, trio.current_effective_deadline() - trio.current_time()))
        async with nullcontext() if at_once else self._window:
            if self._lost.is_set():
                raise LinkLostError(f"node {self._name} is gone", is_begun=False)
            is_value, answer = await self._call("ask", _arrays(parts))
        # What is in Ray's store is read-only, and would stay there.
        value = unpack([one.copy() for one in answer])
        if is_value:
            return value
        # The agent tells that the deadline has passed, too: the asker's own scope is to do that.
        await trio.lowlevel.checkpoint_if_cancelled()
        raise value.made(self._name)


def _arrays(parts: Parts) -> list[Any]:
    """Make arrays of parts without a copy: these are what Ray has beside its pickles."""
    return [np.asarray(memoryview(one)) for one in parts]


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
        except BaseException as error:
            if self._started.done():
                _logger.exception("this agent has failed")
                os._exit(1)
            self._started.set_exception(error)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:

            def tell(address: Address, devices: tuple[str, ...]) -> None:
                self._started.set_result(Started(address, devices, os.getpid()))

            await self._agent.run(tell)

    async def wait(self) -> None:
        """Never return: the call fails when the actor is gone."""
        await asyncio.Event().wait()

    async def ask(self, parts: Sequence[Any]) -> tuple[bool, list[Any]]:
        """Serve a request; returns whether it is a value and no error, and its parts."""
        answered, scope = Future[tuple[bool, list[Any]]](), trio.CancelScope()
        # Cancelled by Ray, it is done without an answer.
        answered.add_done_callback(lambda _: self._token.run_sync_soon(scope.cancel))
        self._token.run_sync_soon(self._nursery.start_soon, self._serve, parts, scope, answered)
        return await asyncio.wrap_future(answered)

    async def _serve(
        self, parts: Sequence[Any], scope: trio.CancelScope, answered: Future[tuple[bool, list[Any]]]
    ) -> None:
        is_value, reply = False, pack(Failure.of(trio.TooSlowError("the deadline has passed")))
        # What is in Ray's store is read-only.
        copies = [one.copy() for one in parts]
        with scope:
            try:
                is_value, reply = True, await serve_one(self._agent.serve, copies, scope)
            except Exception as error:  # noqa: BLE001  # the asker gets it
                reply = pack(Failure.of(error))
        if answered.set_running_or_notify_cancel():
            answered.set_result((is_value, _arrays(reply)))
