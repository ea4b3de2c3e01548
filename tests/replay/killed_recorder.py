"""Records into a file, and prints the number of each reply: python killed_recorder.py JOURNAL ASKERS"""

from __future__ import annotations

import os
import sys

import numpy as np
import trio

import trio_accel as ta
from trio_accel import replay


async def ask(device: ta.Device, asker: int) -> None:
    x = await device.put(np.arange(8.0) + asker)
    for turn in range(1 << 30):
        read = await (x * float(turn + 1)).to_host()
        # One write call, which is whole or not there.
        os.write(1, f"{asker} {turn} {float(read[1]).hex()}\n".encode())


async def main(path: str, askers: int) -> None:
    async with (
        ta.open_system("killed") as system,
        system.open_device("cpu") as device,
        replay.record(device, replay.FileJournal(path)),
        trio.open_nursery() as nursery,
    ):
        for asker in range(askers):
            nursery.start_soon(ask, device, asker)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
