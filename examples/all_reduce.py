"""Add up one array of each device by the operation of `own_collective.py`.

python examples/all_reduce.py --devices 3
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import AsyncExitStack

import numpy as np
import trio
from own_collective import AllReduce

import trio_accel as ta

# Two contexts on one processor are meant here.
warnings.filterwarnings("ignore", "open_device", RuntimeWarning)


async def main() -> None:
    """Add up one array of each device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    given = parser.parse_args()
    options = ta.DeviceOptions(isolation="inline")
    hosts = np.random.default_rng(1).standard_normal((given.devices, 1000))
    async with ta.open_system("reduce") as system, AsyncExitStack() as stack:
        devices = [await stack.enter_async_context(system.open_device("cpu", options=options)) for _ in hosts]
        arrays = [await device.put(host) for device, host in zip(devices, hosts, strict=True)]
        sums = await ta.ask_across(AllReduce(arrays))
        results = [await total.to_host() for total in sums]
        error = np.abs(results[0] - hosts.sum(axis=0)).max()
        same = all(result.tobytes() == results[0].tobytes() for result in results)
        print(f"{len(sums)} devices, right by {error:.0e}, {'the same' if same else 'other'} bits")
        try:
            await ta.ask_across(AllReduce([arrays[0], arrays[1][:10]]))
        except ValueError as refused:
            print(f"refused: {refused}")


if __name__ == "__main__":
    trio.run(main)
