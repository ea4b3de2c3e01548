"""Kill worker processes under load. Their arrays outlive them, and every product is checked.

Run it with: python surviving_worker.py --kills 3 --mebibytes 64
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from contextlib import aclosing
from functools import partial

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta


async def client(right: ta.AccelRef, host: npt.NDArray[np.float32], kills: int, counts: Counter[str]) -> None:
    """Request products until the last worker has started, and record each outcome."""
    left = np.random.default_rng().standard_normal((64, 1024), np.float32)
    expected = left.astype(np.float64) @ host.astype(np.float64)
    while right.device.generation <= kills:
        try:
            product = await (left @ right).to_host()
        except ta.ContextLostError:
            counts["lost"] += 1  # the request ran when a worker died; `retry=1` would run it again
        else:
            counts["right" if np.allclose(product, expected, rtol=1e-3, atol=1e-3) else "WRONG"] += 1


async def kill(device: ta.Device, kills: int) -> None:
    """Kill one worker after another, each during a product."""
    async with aclosing(device.watch_generation()) as generations:
        async for generation in generations:
            if generation > kills:
                break
            await trio.sleep(0.1)  # let the worker run for a while
            ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)


async def digest(array: ta.AccelRef) -> str:
    """Return a digest of an array's contents."""
    return hashlib.sha256((await array.to_host()).data).hexdigest()


async def run(kills: int, clients: int, mebibytes: int, backend: str | None) -> bool:
    """Return whether the array is unchanged, every product was right, and the device survived every kill."""
    options = ta.DeviceOptions(isolation="process")
    counts = Counter[str]()
    async with ta.open_system("survive") as system, system.open_device(backend, options=options) as device:
        host = np.random.default_rng(0).standard_normal((mebibytes * 1024, 256), np.float32)
        array = await device.put(host)
        before = await digest(array)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill, device, kills)
            for _ in range(clients):
                nursery.start_soon(client, array[:1024], host[:1024], kills, counts)
        is_intact = await digest(array) == before
        print(f"generation {device.generation}, {mebibytes} MiB {'intact' if is_intact else 'CHANGED'}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    survived = device.generation == kills + 1 and counts["lost"] >= kills
    return is_intact and survived and not counts["WRONG"]


def main() -> int:
    """Return the exit code: 0 if everything survived."""
    parser = argparse.ArgumentParser(description="Worker processes are killed under load.")
    parser.add_argument("--kills", type=int, default=3, help="number of workers to kill")
    parser.add_argument("--clients", type=int, default=4, help="tasks that multiply at the same time")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the array that must survive")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    return 0 if trio.run(partial(run, **vars(arguments))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
