"""Nodes, on which a cluster starts and ends agents."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import suppress
from typing import Protocol, cast

import trio

from ..actors import nearest
from ..actors._errors import single
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._errors import not_started
from ._frames import failure, raised
from ._link import Address

__all__ = ["LocalNodes", "Nodes"]

# More processes than these are a mistake; seconds for an orderly end after the program's end.
_MAX_NODES, _GRACE = 256, 10.0


class Nodes(Protocol):
    """A source of nodes, which starts and ends an agent on each.

    Attributes:
        is_one_host: Whether all nodes are of one host, so that a `SqliteStore` will do.
    """

    is_one_host: bool

    def watch(self) -> AsyncGenerator[Collection[str]]:
        """Yield the names of the nodes, at once and after each change."""
        ...

    async def start(self, config: AgentConfig) -> Started:
        """Start the agent of a node; return when it listens.

        Raises:
            NodeLostError: It does not start.
            NotSupportedError, ValueError: The node lacks a device, or nobody knows such a one.
        """
        ...

    async def end(self, node: str) -> bool | None:
        """End the agent of a node, if any; return when it and everything that it has started are gone.

        Returns whether its process has crashed on its own, and was not killed; None if that is unknown.
        """
        ...


class LocalNodes:
    """Nodes as processes of this host: for tests, and for several agents on a large machine.

    Args:
        names: Their names, or their number.

    Raises:
        TypeError: `names` is neither a number nor several names, or a name is not a str, is empty or has a
            slash.
        ValueError: A name is duplicate, or there are no nodes.
    """

    is_one_host: bool = True

    def __init__(self, names: int | Iterable[str]) -> None:
        if isinstance(names, (bool, str, bytes)) or not isinstance(cast("object", names), (int, Iterable)):
            hint = f"; write [{names!r}]" if isinstance(names, str) else ""
            raise TypeError(f"LocalNodes: names must be a number or a list of names, got {names!r}{hint}")
        count = min(names, _MAX_NODES + 1) if isinstance(names, int) else 0
        name_list = [f"node-{number}" for number in range(count)] if isinstance(names, int) else list(names)
        for name in name_list:
            _checked_name("names", name)
        if not name_list or len({*name_list}) < len(name_list) or len(name_list) > _MAX_NODES:
            raise ValueError(f"LocalNodes: names must be 1 to {_MAX_NODES}, each once, got {names!r}")
        # Each name with the number of its addition.
        self._numbers = itertools.count()
        self._names: dict[str, int] = {name: next(self._numbers) for name in name_list}
        self._changed = trio.Event()
        self._processes: dict[str, trio.Process] = {}

    def add(self, name: str) -> None:
        """Add a node, unless it is there.

        Raises:
            TypeError: The name is not a str, is empty or has a slash.
        """
        self._names.setdefault(_checked_name("add", name), next(self._numbers))
        self._tell()

    def remove(self, name: str) -> None:
        """Remove a node: its agent ends without a hand-off, as if its host was lost.

        If you add the node again at once, a new agent starts when the old one has ended.

        Raises:
            KeyError: There is no such node.
        """
        if name not in self._names:
            raise KeyError(f"LocalNodes.remove: {name!r} is not a node; {nearest(str(name), self._names)}")
        del self._names[name]
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[Collection[str]]:
        """See `Nodes`."""
        yielded = dict[str, int]()
        while True:
            changed, names = self._changed, {**self._names}
            stayed = [name for name, number in names.items() if yielded.get(name, number) == number]
            if len(stayed) < len(names):
                # The others were removed and added again, so their agents end first.
                yield stayed
            yielded = names
            yield [*names]
            await changed.wait()

    async def start(self, config: AgentConfig) -> Started:
        """See `Nodes`."""
        command = [sys.executable, "-P", "-c", _AGENT]
        # A session of its own, because Ctrl-C is for the program, which ends its agents in order.
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._processes[config.node] = process
        assert process.stdin is not None
        assert process.stdout is not None
        async with process.stdout:
            with suppress(trio.BrokenResourceError):
                await process.stdin.send_all(pickle.dumps(sys.path) + pickle.dumps(config))
            output = b"".join([part async for part in process.stdout])
        if not output:
            raise not_started(config.node, RuntimeError("its process has ended"))
        started = pickle.loads(output)  # noqa: S301  # our own process
        if not isinstance(started, Started):
            cause = raised(started, config.node)
            raise not_started(config.node, cause) from cause
        return started

    async def end(self, node: str) -> bool | None:
        """See `Nodes`."""
        process = self._processes.pop(node, None)
        if process is None:
            return None
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            assert process.stdin is not None
            await process.stdin.aclose()
        # A process that ended earlier has its own status.
        return process.returncode not in {-signal.SIGKILL, -signal.SIGTERM}

    def pid(self, node: str) -> int:
        """Return the process ID of a node's agent.

        Raises:
            KeyError: It has none now.
        """
        if node not in self._processes:
            raise KeyError(f"LocalNodes.pid: node {node!r} has no agent now")
        return self._processes[node].pid


def _checked_name(argument: str, name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise TypeError(
            f"LocalNodes: {argument}: the name of a node must be a str without a slash, got {name!r}"
        )
    return name


# The path is sent first, so that an agent imports the program's modules, and none of the current folder.
_AGENT = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from trio_accel.cluster._nodes import run_agent
run_agent()
"""


def run_agent() -> None:
    """Run the agent of a local node in this process, until its standard input ends."""
    output = os.fdopen(os.dup(1), "wb")
    # Prints of the user's code must not mix with the messages.
    os.dup2(2, 1)
    stdin = sys.stdin.buffer
    logging.basicConfig(format=LOG_FORMAT)
    config: AgentConfig = pickle.load(stdin)  # noqa: S301  # the program has started this process

    def tell(message: object) -> None:
        with output:
            pickle.dump(message, output)

    def started(address: Address, devices: tuple[str, ...]) -> None:
        tell(Started(address, devices, os.getpid()))

    async def serve() -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:

            def watch() -> None:
                stdin.read()
                token.run_sync_soon(scope.cancel)
                time.sleep(_GRACE)
                os._exit(1)

            threading.Thread(target=watch, daemon=True).start()
            await Agent(config).run(started)

    try:
        trio.run(serve)
    except Exception as error:
        if output.closed:
            raise
        tell(failure(single(error)))
    os._exit(0)
