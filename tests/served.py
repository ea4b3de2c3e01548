"""Serve the attacked application beside a worker, in a process of its own: `python served.py KIND GRACE`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import trio

import trio_accel as ta
from trio_accel.http import Limits, run, serve

sys.path.insert(0, str(Path(__file__).parent))
from attacked import Seen, make


async def main(kind: str, grace: float) -> None:
    """Serve until SIGTERM."""
    options = ta.DeviceOptions(isolation="process")
    async with (
        ta.open_system("served") as system,
        system.open_device("cpu", options=options),
        trio.open_nursery() as nursery,
    ):
        serving = partial(serve, make(kind, Seen()), port=0, system=system, limits=Limits(grace=grace))
        print(await nursery.start(serving), flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1], float(sys.argv[2]))
