"""The agent of a node as a process of its own."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time

import trio

from ..actors._errors import single
from ._agent import LOG_FORMAT, Agent, AgentConfig, Started
from ._frames import failure
from ._link import Address

# Seconds to end in order, when the program is gone.
_GRACE = 10.0


def main() -> None:
    """Serve until the standard input ends."""
    told = os.fdopen(os.dup(1), "wb")
    # Prints of the user's code are no messages.
    os.dup2(2, 1)
    given = sys.stdin.buffer
    logging.basicConfig(format=LOG_FORMAT)
    sys.path[:] = pickle.load(given)  # noqa: S301  # the program has started this process
    config: AgentConfig = pickle.load(given)  # noqa: S301

    def tell(what: object) -> None:
        with told:
            pickle.dump(what, told)

    def started(address: Address, devices: tuple[str, ...]) -> None:
        tell(Started(address, devices, os.getpid()))

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

    try:
        trio.run(serve)
    except Exception as error:
        if told.closed:
            raise
        tell(failure(single(error)))
    os._exit(0)
