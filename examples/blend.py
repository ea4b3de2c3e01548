"""Blend three waves with the kernels of `own_kernel.py`, with and without a bias.

python examples/blend.py --backend cpu --isolation process
"""

from __future__ import annotations

import argparse

import numpy as np
import trio
from own_kernel import Blend

import trio_accel as ta


async def main() -> None:
    """Blend three waves, with and without a bias."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--isolation", default="inline", choices=["inline", "process"])
    given = parser.parse_args()
    waves = [np.sin(np.linspace(0.0, 6.0 * frequency, 1000)) for frequency in (1, 2, 3)]
    async with ta.open_system("blend") as system:
        options = ta.DeviceOptions(isolation=given.isolation)
        async with await system.open_device(given.backend, options=options) as device:
            terms = [await device.put(wave) for wave in waves]
            for bias in (None, np.full(1000, 0.5)):
                reply = await device.ask(Blend(tuple(terms), (0.5, 0.5, 0.25), bias))
                right = 0.5 * waves[0] + 0.5 * waves[1] + 0.25 * waves[2] + (0.0 if bias is None else bias)
                error = np.abs(await reply.array.to_host() - np.clip(right, -1.0, 1.0)).max()
                print(f"{reply.clipped} of 1000 clipped, right by {error:.0e}")
            try:
                await device.ask(Blend((terms[0], np.full(1000, np.nan)), (1.0, 1.0)))
            except ta.LibraryError as failure:
                print(f"refused: {failure}")


if __name__ == "__main__":
    trio.run(main)
