"""The agent of a node as a process of its own."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import threading
import time

import trio

from ._agent import Agent, AgentConfig, Started
from ._link import Address

LENGTH = struct.Struct("<Q")
# Seconds to end in order, when the program is gone.
_GRACE = 10.0


def main() -> None:
    """Serve until the standard input ends."""
    told = os.fdopen(os.dup(1), "wb")
    # Prints of the user's code are no messages.
    os.dup2(2, 1)
    given = sys.stdin.buffer
    sys.path[:] = pickle.load(given)  # noqa: S301  # the program has started this process
    config: AgentConfig = pickle.load(given)  # noqa: S301

    def started(address: Address, devices: tuple[str, ...]) -> None:
        data = pickle.dumps(Started(address, devices, os.getpid()))
        told.write(LENGTH.pack(len(data)) + data)
        told.flush()

    async def serve() -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:

            def watch() -> None:
                given.read()
                token.run_sync_soon(scope.cancel)
                time.sleep(_GRACE)
                os._exit(1)

            threading.Thread(target=watch, daemon=True).start()
            await Agent(config).run(started)

    trio.run(serve)
    os._exit(0)
