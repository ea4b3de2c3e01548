"""Agents as actors of Ray's, and asks by Ray's calls: the way to an agent that no stream reaches."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any

import attrs
import numpy as np
import trio

from ..actors._errors import single
from ..backends.base.kit.modules import import_extra
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._frames import Parts, failure, pack, raised, unpack
from ._link import VERSION, Address, Allocate, Link, LinkLostError, RefusedError, serve_one

__all__ = ["RayAddress", "RayAgent"]

_logger = logging.getLogger("trio_accel.cluster")

# Seconds in which an agent must say by a call that it is there.
_PROOF = 2.0
_Answer = tuple[bool, Sequence[Any]]


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

    async def version(self) -> str:
        """Return the version of the package and of Python."""
        return VERSION

    async def wait(self) -> None:
        """Never return: the call fails when the actor is gone."""
        await asyncio.Event().wait()

    async def ask(self, parts: Sequence[Any]) -> _Answer:
        """Serve a request; returns whether it is a value and no error, and its parts."""
        answered, scope = Future[_Answer](), trio.CancelScope()
        # A call that Ray has cancelled is done without an answer.
        answered.add_done_callback(lambda _: self._token.run_sync_soon(scope.cancel))
        self._token.run_sync_soon(self._nursery.start_soon, self._serve, parts, scope, answered)
        return await asyncio.wrap_future(answered)

    async def _serve(self, parts: Sequence[Any], scope: trio.CancelScope, answered: Future[_Answer]) -> None:
        is_value, reply = False, pack(failure(trio.TooSlowError("the deadline has passed")))
        with scope:
            try:
                is_value, reply = True, await serve_one(self._agent.serve, _copies(parts), scope)
            except Exception as error:  # noqa: BLE001  # the asker gets it
                reply = pack(failure(error))
        if answered.set_running_or_notify_cancel():
            answered.set_result((is_value, _arrays(reply)))


def _arrays(parts: Parts) -> list[Any]:
    """Make arrays of parts without a copy: Ray has these beside its pickles."""
    return [np.asarray(memoryview(one)) for one in parts]


def _copies(parts: Sequence[Any]) -> list[Any]:
    """Copy what is in Ray's store: it is read-only, and would stay there."""
    return [one.copy() for one in parts]


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
            link = _CallLink(self.actor, name, window)
            nursery.start_soon(link.run)
            await link.prove(error)
            text = "%s; asks go by Ray's calls, which take five times as long"
            _logger.warning(text, error)
            self.is_called = True
            return link


class _CallLink:
    """The way to an agent by calls of its actor. See `Link`."""

    def __init__(self, actor: Any, name: str, window: float) -> None:
        self._actor, self._name, self._window = actor, name, trio.CapacityLimiter(window)
        self._ray: Any = import_extra("ray", "ray")
        self._waiting: set[trio.Event] = set()
        self.lost: trio.Event = trio.Event()

    async def run(self) -> None:
        """Wait until the actor is gone, or the link is closed; raises nothing for that."""
        with suppress(LinkLostError):
            await self._call("wait")
        self.close()

    async def prove(self, error: LinkLostError) -> None:
        """Have the agent say that it is there, and of this version.

        Args:
            error: What to raise where it is not there.
        """
        refusal: LinkLostError | None = error
        try:
            with trio.move_on_after(_PROOF), suppress(LinkLostError):
                theirs = await self._call("version")
                text = f"node {self._name} cannot be reached: it has {theirs}, and this is {VERSION}"
                refusal = None if theirs == VERSION else LinkLostError(text, is_begun=False)
        finally:
            if refusal is not None:
                self.close()
        if refusal is not None:
            raise refusal

    async def ask(self, request: object, *, at_once: bool = False) -> Any:
        """See `Link`."""
        parts = pack((request, trio.current_effective_deadline() - trio.current_time()))
        async with nullcontext() if at_once else self._window:
            if self.lost.is_set():
                raise LinkLostError(f"node {self._name} is gone", is_begun=False)
            is_value, answer = await self._call("ask", _arrays(parts))
        value = unpack(_copies(answer))
        if is_value:
            return value
        # The agent tells that the deadline has passed, too: the asker's own scope is to do that.
        await trio.lowlevel.checkpoint_if_cancelled()
        raise raised(value, self._name)

    def close(self) -> None:
        """See `Link`."""
        self.lost.set()
        for done in self._waiting:
            done.set()

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._result(getattr(self._actor, method).remote(*arguments))
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            text = f"node {self._name} was lost with this request in flight"
            raise LinkLostError(text, is_begun=True) from error

    async def _result(self, ref: Any) -> Any:
        """Wait for what a call replies, or until the link is closed."""
        done, soon = trio.Event(), trio.lowlevel.current_trio_token().run_sync_soon
        future: Future[Any] = ref.future()
        future.add_done_callback(_teller(soon, done))
        self._waiting.add(done)
        try:
            await done.wait()
        finally:
            self._waiting.remove(done)
            if not future.done():
                self._ray.cancel(ref)
        return future.result(timeout=0)


def _teller(soon: Callable[[Callable[[], None]], None], done: trio.Event) -> Callable[[object], None]:
    def tell(_: object) -> None:
        with suppress(trio.RunFinishedError):
            soon(done.set)

    return tell
