"""Follow radium and its daughters for an hour, with the operation of `own_operation.py`.

python examples/decay.py --isolation process
"""

from __future__ import annotations

import argparse

import numpy as np
import trio
from own_operation import expm

import trio_accel as ta

# Half-lives of Ra-223, Pb-211 and Bi-211 in minutes; the following nuclides count as stable here.
HALF_LIVES = np.array([11.43 * 24 * 60, 36.1, 2.14])


async def main() -> None:
    """Compute the remaining amount of each nuclide at several times, in a single call."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--isolation", default="inline", choices=["inline", "process"])
    given = parser.parse_args()
    rates, minutes = np.log(2) / HALF_LIVES, np.array([1.0, 10.0, 60.0])
    chain = np.diag([*-rates, 0.0]) + np.diag(rates, -1)
    async with ta.open_system("decay") as system:
        options = ta.DeviceOptions(isolation=given.isolation)
        async with await system.open_device("cpu", options=options) as device:
            steps = await device.put(minutes[:, None, None] * chain)
            left = await expm(steps).to_host()
            for minute, amounts in zip(minutes, left[:, :, 0], strict=True):
                print(f"{minute:3.0f} min:", " ".join(f"{amount:.2e}" for amount in amounts))
            values, vectors = np.linalg.eig(chain)
            right = (vectors * np.exp(minutes[:, None, None] * values)) @ np.linalg.inv(vectors)
            error = np.abs(left - right).max()
            print(f"largest error {error:.0e}: {'right' if error < 1e-12 else 'WRONG'}")
            try:
                await expm(await device.put(np.full((2, 2), np.nan)))
            except ta.LinAlgError as failure:
                print(f"refused: {failure}")


if __name__ == "__main__":
    trio.run(main)
