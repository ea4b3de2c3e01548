"""Nodes of Ray: it knows them, and starts, pins and ends agents, which are actors of its own.

Messages go beside Ray, by streams. Where none gets through, Ray's calls carry what the streams would.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
import numpy as np
import trio

from ..actors._errors import single
from ..backends.base.kit.modules import import_extra
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._errors import not_started
from ._frames import Parts
from ._link import VERSION, Address, Allocate, Link, LinkLostError, RefusedError, Stream

__all__ = ["RayNodes"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds in which an agent must say by a call that it is there.
_PROOF = 2.0
# Seconds between two looks at Ray's nodes, and at a process that is to go; for a connection; and the most
# that the end of an agent may take: Ray kills a stopped one after five.
_LOOK, _AGAIN, _REACH, _GONE = 1.0, 0.02, 1.0, 20.0
_Frame: TypeAlias = "tuple[int, int, list[Any]]"


class RayAgent:
    """An agent in an actor of Ray's: Trio in a thread, beside the event loop in which Ray calls this.

    Args:
        config: What the agent is told.
    """

    def __init__(self, config: AgentConfig) -> None:
        logging.basicConfig(format=LOG_FORMAT)
        self._agent = Agent(config)
        self._started: Future[Started] = Future()
        self._nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken
        self._links: dict[bytes, tuple[asyncio.Queue[_Frame], trio.MemorySendChannel[_Frame]]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    async def start(self) -> Started:
        """Return when the agent listens."""
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
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            await self._agent.run(self._tell)

    def _tell(self, address: Address, devices: tuple[str, ...]) -> None:
        self._started.set_result(Started(address, devices, os.getpid()))

    async def open(self, link: bytes) -> str:
        """Have an end of a link here, and return the version of the package and of Python."""
        replies, loop = asyncio.Queue[_Frame](), asyncio.get_running_loop()
        send, receive = trio.open_memory_channel[_Frame](math.inf)
        self._links[link] = replies, send

        def put(frame: _Frame) -> None:
            loop.call_soon_threadsafe(replies.put_nowait, frame)

        stream = _CallStream(put, partial(_only, receive))
        served = Link([stream], "the program", self._agent.serve)
        self._token.run_sync_soon(self._nursery.start_soon, served.run)
        return VERSION

    async def put(self, link: bytes, frame: _Frame) -> None:
        """Take a frame."""
        self._token.run_sync_soon(self._links[link][1].send_nowait, frame)

    async def get(self, link: bytes) -> list[_Frame]:
        """Return frames as soon as there is one."""
        replies = self._links[link][0]
        frames = [await replies.get()]
        while not replies.empty():
            frames.append(replies.get_nowait())
        return frames


async def _only(frames: trio.MemoryReceiveChannel[_Frame]) -> list[_Frame]:
    return [await frames.receive()]


class _CallStream(Stream):
    """Frames by calls.

    Args:
        put: Sends a frame.
        get: Waits for frames.
    """

    def __init__(self, put: Callable[[_Frame], object], get: Callable[[], Awaitable[list[_Frame]]]) -> None:
        super().__init__()
        self._put, self._get = put, get
        self._got = deque[_Frame]()

    async def send(self, number: int, kind: int, parts: Parts) -> None:
        # Ray has arrays beside its pickles, without a copy.
        self._put((number, kind, [np.asarray(memoryview(one)) for one in parts]))

    async def receive(self) -> tuple[int, int, list[memoryview]]:
        if not self._got:
            self._got.extend(await self._get())
        number, kind, parts = self._got.popleft()
        # What is in Ray's store is read-only, and would stay there.
        return number, kind, [memoryview(one.copy()) for one in parts]

    def close(self) -> None:
        pass  # a link ends with the agent at its other end


@attrs.define(unsafe_hash=True)
class RayAddress:
    """Where an agent of Ray's is reached: by streams, or by calls of its actor where none gets through.

    Attributes:
        stream: Where it listens.
        actor: Ray's actor.
        is_called: Whether this process has found no stream to it.
    """

    stream: Address
    actor: Any = attrs.field(eq=False, repr=False)
    is_called: bool = attrs.field(default=False, eq=False)

    async def connect(self, name: str, window: float, nursery: trio.Nursery, allocate: Allocate) -> Link:
        """Connect to the agent, as `Address.connect`."""
        self.is_called = False
        try:
            return await self.stream.connect(name, window, nursery, allocate)
        except LinkLostError as error:
            if isinstance(error.__cause__, RefusedError):
                raise
            link = await self._connect_by_calls(name, window, error)
            _logger.warning("%s; asks go by Ray's calls, which take five times as long", error)
            self.is_called = True
            nursery.start_soon(link.run)
            return link

    async def _connect_by_calls(self, name: str, window: float, error: LinkLostError) -> Link:
        token, theirs, actor = os.urandom(16), None, self.actor
        with trio.move_on_after(_PROOF), suppress(trio.EndOfChannel):
            theirs = await _result(actor.open.remote(token))
        if theirs is None:
            raise error
        if theirs != VERSION:
            text = f"node {name} cannot be reached: it has {theirs}, and this is {VERSION}"
            raise LinkLostError(text, is_begun=False)
        stream = _CallStream(partial(actor.put.remote, token), lambda: _result(actor.get.remote(token)))
        return Link([stream], name, window=window)


async def _result(ref: Any) -> Any:
    """Wait for what a call of Ray's replies.

    Raises:
        EndOfChannel: The actor is gone.
    """
    done, soon = trio.Event(), trio.lowlevel.current_trio_token().run_sync_soon

    def tell(_: object) -> None:
        with suppress(trio.RunFinishedError):
            soon(done.set)

    future: Future[Any] = ref.future()
    future.add_done_callback(tell)
    await done.wait()
    try:
        return future.result(timeout=0)
    except Exception as error:
        raise trio.EndOfChannel(str(error)) from error


class RayNodes:
    """The nodes of a Ray cluster, with an agent in an actor of Ray's on each. Needs the extra ``ray``.

    A node is named as in Ray: by ``ray start --node-name``, or else by its address. Of nodes that share a
    name, one has an agent, and a warning says so. A node without a CPU for Ray is left out, as a head with
    ``--num-cpus=0``. An agent takes no CPU of Ray's, and ends with this program.

    Asks go by streams from process to process. Where a network lets none through, they go by calls of Ray's,
    with a warning: an ask takes about five times as long.

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
        self._shared: set[str] = set()
        self._actors: dict[str, Any] = {}
        self._started: dict[str, tuple[Started, AgentConfig]] = {}

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
        shared = {name for name, count in Counter(one["NodeName"] for one in nodes).items() if count > 1}
        for name in shared - self._shared:
            text = "several nodes are named %s, and one of them has an agent: use `ray start --node-name`"
            _logger.warning(text, name)
        self._shared = shared
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
            gpus = node["Resources"].get("GPU", 0) if self._num_gpus is None else self._num_gpus
            remote = self._ray.remote(self.agent).options(
                num_gpus=gpus, max_restarts=0, runtime_env=self._runtime_env, **self._pin(node)
            )
            told = attrs.evolve(config, host=node["NodeManagerAddress"])
            actor = self._actors[name] = await trio.to_thread.run_sync(remote.remote, told)
            get = partial(self._ray.get, actor.start.remote())
            started: Started = await trio.to_thread.run_sync(get, abandon_on_cancel=True)
        except Exception as error:
            # Ray wraps the error of a call.
            raise not_started(name, getattr(error, "cause", error)) from error
        started = attrs.evolve(started, address=RayAddress(started.address, actor))
        self._started[name] = started, config
        return started

    def _pin(self, node: Any) -> dict[str, Any]:
        pin: Any = import_extra("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
        return {"num_cpus": 0, "scheduling_strategy": pin(node["NodeID"], soft=False)}

    async def end(self, node: str) -> None:
        """End the agent of a node, as `Nodes.end`.

        An agent that cannot be reached is waited for as long as it serves without a word of the program.
        """
        actor, (started, config) = self._actors.pop(node, None), self._started.pop(node, (None, None))
        if actor is None:
            return
        alone = 0.0 if config is None else config.options.alone_after
        with trio.move_on_after(max(_GONE, alone), shield=True) as scope:
            await trio.to_thread.run_sync(self._ray.kill, actor, abandon_on_cancel=True)
            began = trio.current_time()
            # Ray calls it dead at once.
            while started is not None:
                is_there = await self._is_there(node, started)
                if is_there is False or (is_there is None and trio.current_time() - began > alone):
                    break
                await trio.sleep(_AGAIN)
        if scope.cancelled_caught:
            _logger.warning("node %s: Ray has not ended its agent within %g s", node, max(_GONE, alone))

    async def _is_there(self, node: str, started: Started) -> bool | None:
        """Tell whether an agent's process is there; None for a host that does not answer."""
        address: RayAddress = started.address
        with trio.move_on_after(_GONE if address.is_called else _REACH), trio.socket.socket() as sock:
            try:
                if address.is_called:
                    # Who refuses a connection may be a wall between.
                    look = self._ray.remote(_is_process).options(
                        max_retries=0, **self._pin(self._nodes[node])
                    )
                    get = partial(self._ray.get, look.remote(started.pid))
                    return await trio.to_thread.run_sync(get, abandon_on_cancel=True)
                await sock.connect((address.stream.host, address.stream.port))
                return True
            except ConnectionRefusedError:
                return False
            except (OSError, KeyError, self._ray.exceptions.RayError):
                return None
        return None


def _is_process(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
