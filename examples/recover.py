"""Faults crash the actor that computes products. The affected callers get an error, and all others a product.

Run it with: python recover.py --requests 20 --faults 2
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import trio

import trio_accel as ta


async def ask(device: ta.Device, left: np.ndarray, right: ta.AccelRef, outcomes: list[str]) -> None:
    """Request one product, and record the outcome."""
    try:
        product = await (left @ right).to_host()
    except ta.ActorFailedError as error:
        outcomes.append(f"failed: {error.__cause__}")
    else:
        is_right = np.allclose(product, left @ await right.to_host(), rtol=1e-3, atol=1e-3)
        outcomes.append("completed" if is_right else "WRONG")


async def run(requests: int, faults: int, backend: str | None) -> list[str]:
    """Return the outcome of every request."""
    generator = np.random.default_rng(0)
    outcomes: list[str] = []
    async with ta.open_system("recover") as system, system.open_device(backend) as device:
        right = await device.put(generator.standard_normal((64, 64), np.float32))
        ta.testing.inject_fault(device, ta.linalg.Matmul, fail=RuntimeError("a fault"), count=faults)
        async with trio.open_nursery() as nursery:
            for _ in range(requests):
                left = generator.standard_normal((64, 64), np.float32)
                nursery.start_soon(ask, device, left, right, outcomes)
        # The other requests did not need the crashed actor, but this product waits for its restart.
        await ta.linalg.matmul(right, right)
        print(system.tree())
    return outcomes


def main() -> int:
    """Return the exit code: 0 if every request has an outcome, and exactly the faulty ones failed."""
    parser = argparse.ArgumentParser(description="An actor crashes and recovers under load.")
    parser.add_argument("--requests", type=int, default=20, help="products requested at once")
    parser.add_argument("--faults", type=int, default=2, help="products that crash the actor, at most 3")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    outcomes = trio.run(partial(run, arguments.requests, arguments.faults, arguments.backend))
    for outcome in sorted(set(outcomes)):
        print(f"{outcomes.count(outcome):4} {outcome}")
    expected = [arguments.requests - arguments.faults, arguments.faults]
    is_right = [outcomes.count("completed"), outcomes.count("failed: a fault")] == expected
    print("every request has its outcome" if is_right else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
