"""Add up an array of three times the device's memory by `ta.stream`, beside bare copies of the same bytes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import trio

import trio_accel as ta

MIB = 1 << 20
DEPTH = 3


def pieces(buffers: list[np.ndarray[Any, Any]], count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield batch after batch of ones and a number. A reader of files would fill the buffers instead."""
    for number in range(count):
        # The batch before the previous one is on the device, so its memory may be filled again.
        buffer = buffers[number % len(buffers)]
        buffer[:1] = number
        yield buffer


async def run(backend: str | None, memory: int, batch: int, factor: float) -> bool:
    """Print the rates; return whether the sum is right, and a single array was refused."""
    limit = memory * MIB or None
    options = ta.DeviceOptions(memory_limit=limit)
    async with ta.open_system("large") as system, system.open_device(backend, options=options) as device:
        length = batch * MIB // 4
        count = math.ceil(factor * (limit or device.info.total_memory) / (batch * MIB))
        try:
            await device.empty((count, length), "float32")
        except ta.OutOfMemoryError:
            print(f"{count} batches of {batch} MiB on {device.name}: no room for one array")
            is_refused = True
        else:
            is_refused = False
        buffers = [device.host_empty(length, "float32") for _ in range(2)]
        for buffer in buffers:
            buffer[:] = 1.0

        start, total = trio.current_time(), 0.0
        async with ta.stream(device, pieces(buffers, count), depth=DEPTH) as ahead:
            async for x in ahead:
                total += await ta.arrays.sum(x, dtype="float64").item()
        streamed = trio.current_time() - start

        start = trio.current_time()
        for number in range(count):
            await device.put(buffers[number % 2])
        copied = trio.current_time() - start

    gibibytes = count * batch / 1024
    for name, seconds in (("streamed and added", streamed), ("bare copies", copied)):
        print(f"{name:<20} {gibibytes / seconds:8.2f} GiB/s")
    return is_refused and total == count * (length - 1) + count * (count - 1) / 2


def main() -> int:
    """Return the exit code: 0 if the sum is right."""
    parser = argparse.ArgumentParser(description="Work through more than the memory of a device.")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    parser.add_argument("--memory", type=int, default=0, help="MiB that the device may use; 0 for all")
    parser.add_argument("--batch", type=int, default=256, help="MiB of a batch")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times the memory")
    given = parser.parse_args()
    is_right = trio.run(run, given.backend, given.memory, given.batch, given.factor)
    print("sum:", "right" if is_right else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
