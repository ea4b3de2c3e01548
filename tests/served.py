"""Serve the attacked application and a program in a worker, as a process: `python served.py KIND GRACE`."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse

import trio_accel as ta
from trio_accel.http import Limits, on_host, run, serve

sys.path.insert(0, str(Path(__file__).parent))
from attacked import Seen, make


class Sleeper:
    """A model that takes its time."""

    def sleep(self, seconds: float) -> float:
        # clock: the time that this work takes decides nothing
        time.sleep(seconds)
        return seconds


async def main(kind: str, grace: float) -> None:
    """Serve until SIGTERM; ``/work`` takes the worker for a minute."""
    options = ta.DeviceOptions(isolation="process", close_grace=1.0)
    async with ta.open_system("served") as system, system.open_device("cpu", options=options) as device:
        sleep = on_host(await ta.open_program(device, Sleeper), Sleeper.sleep)

        async def work(request: Request) -> JSONResponse:
            return JSONResponse(await sleep(60.0))

        app = make(kind, Seen())
        app.add_route("/work", work)
        async with trio.open_nursery() as nursery:
            serving = partial(serve, app, port=0, system=system, limits=Limits(grace=grace))
            print(await nursery.start(serving), flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1], float(sys.argv[2]))
