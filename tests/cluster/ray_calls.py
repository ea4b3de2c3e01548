"""Asks by calls of Ray's actors: the reference of streams in tests and measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

import attrs
import numpy as np
import ray
import trio

from trio_accel import cluster

FRAMES: Any = import_module("trio_accel.cluster._frames")
LINK: Any = import_module("trio_accel.cluster._link")


async def _result(ref: Any, waiting: set[trio.Event]) -> Any:
    """Wait for the reply to a call of Ray's, or until the event added meanwhile is set."""
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
            ray.cancel(ref)
    return future.result(timeout=0)


@attrs.frozen
class RayAddress:
    """The address for calls of an agent.

    Attributes:
        actor: Ray's actor.
    """

    actor: Any

    async def connect(self, name: str, window: float, nursery: trio.Nursery, *_: object) -> Any:
        """See `Address.connect`; the link reports the absence of a peer."""
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
        self.lost = trio.Event()
        self._waiting: set[trio.Event] = set()

    async def run(self) -> None:
        """Wait until the actor has ended, or the link is closed; raises nothing for that."""
        with suppress(LINK.LinkLostError):
            await self._call("wait")
        self.close()

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await _result(getattr(self._actor, method).remote(*arguments), self._waiting)
        except (ray.exceptions.RayError, TimeoutError) as error:
            if isinstance(error, ray.exceptions.RayActorError):
                # Later asks are not sent: they were never begun.
                self.close()
            text = f"node {self._name} was lost with this request in flight"
            raise LINK.LinkLostError(text, is_begun=True) from error

    def close(self) -> None:
        """See `Link`."""
        self.lost.set()
        for done in self._waiting:
            done.set()

    async def ask(self, request: object, *, at_once: bool = False) -> Any:
        """See `Link`."""
        parts = FRAMES.pack((request, trio.current_effective_deadline() - trio.current_time()))
        async with nullcontext() if at_once else self._window:
            if self.lost.is_set():
                raise LINK.LinkLostError(f"node {self._name} is gone", is_begun=False)
            is_value, answer = await self._call("ask", _arrays(parts))
        # Objects in Ray's store are read-only, and would stay there.
        value = FRAMES.unpack([one.copy() for one in answer])
        if is_value:
            return value
        # The agent also reports that the deadline has passed, although the caller's own scope does that.
        await trio.lowlevel.checkpoint_if_cancelled()
        raise FRAMES.raised(value, self._name)


def _arrays(parts: Any) -> list[Any]:
    """Make arrays of parts without a copy: Ray has these next to its pickles."""
    return [np.asarray(memoryview(one)) for one in parts]


class CalledAgent(cluster.RayNodes.agent):  # type: ignore[misc]
    """An agent that can also be asked by calls."""

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            await super()._main()

    async def wait(self) -> None:
        """Never return: the call fails when the actor has ended."""
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
        is_value, reply = False, FRAMES.pack(FRAMES.failure(trio.TooSlowError("the deadline has passed")))
        # Objects in Ray's store are read-only.
        copies = [one.copy() for one in parts]
        with scope:
            try:
                request, left = FRAMES.unpack(copies)
                scope.deadline = trio.current_time() + left
                is_value, reply = True, FRAMES.pack(await self._agent.serve(request))
            except Exception as error:  # noqa: BLE001  # the asker gets it
                reply = FRAMES.pack(FRAMES.failure(error))
        if answered.set_running_or_notify_cancel():
            answered.set_result((is_value, _arrays(reply)))


class RayCalls(cluster.RayNodes):
    """Nodes of Ray's with agents that are asked by calls."""

    agent = CalledAgent

    async def start(self, config: cluster.AgentConfig) -> cluster.Started:
        started = await super().start(config)
        return attrs.evolve(started, address=RayAddress(self._actors[config.node]))
