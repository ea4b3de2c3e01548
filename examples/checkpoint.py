"""A program that loses its state in the middle of a call, and is restored from a copy."""

from __future__ import annotations

import argparse

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array, method


class Sums:
    """Running totals, which are updated in place."""

    def __init__(self, totals: Array) -> None:
        self.totals = totals

    @method(updates=["self.totals"], out=lambda numbers: None)
    def add(self, numbers: Array) -> None:
        """Add numbers to the totals, which are unusable if the call is interrupted."""
        self.totals += numbers


async def run(steps: int, every: int, faults: int) -> bool:
    """Return whether the sums equal NumPy's."""
    rows, options = np.random.default_rng(0).integers(0, 9, (steps, 4)), ta.DeviceOptions(isolation="process")
    async with ta.open_system("lab") as system, system.open_device("cpu", options=options) as device:
        totals = await device.zeros(4, "int64")
        step, saved, at = 0, np.zeros(4, np.int64), 0
        async with ta.open_program(device, Sums, totals) as program:
            while step < steps:
                if step == every * device.generation + 5 and device.generation <= faults:
                    ta.testing.inject_fault(device, program.operation(Sums.add), kill=True)
                try:
                    await program.ask(Sums.add, rows[step])
                    step += 1
                    if step % every == 0:
                        saved, at = await totals.to_host(), step
                except (ta.ContextLostError, ta.StaleRefError):
                    if program.is_damaged:
                        print(f"lost after {step} steps, back to {at}")
                        totals, step = await device.put(saved), at
                        await program.reset(totals=totals)
        return np.array_equal(await totals.to_host(), rows.sum(axis=0))


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=2, help="how many times to kill the worker")
    is_wrong = not trio.run(run, 40, 10, parser.parse_args().faults)
    print("sums as without a device:", "WRONG" if is_wrong else "right")
    return is_wrong


if __name__ == "__main__":
    import checkpoint  # because workers cannot import its class from `__main__`

    raise SystemExit(checkpoint.main())
