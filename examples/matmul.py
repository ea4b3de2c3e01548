"""Several tasks multiply matrices on one device at the same time; each product is checked against NumPy.

Run it with: python matmul.py --size 512 --clients 4
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import trio

import trio_accel as ta


async def client(number: int, left: ta.AccelRef, right: np.ndarray, products: dict[int, np.ndarray]) -> None:
    """Request one product. The right operand is a NumPy array, which is sent with the request."""
    products[number] = await (left @ right).to_host()


async def run(size: int, clients: int, backend: str | None) -> float:
    """Return the largest relative error of a product in the Frobenius norm."""
    generator = np.random.default_rng(0)
    left = generator.standard_normal((size, size), np.float32)
    rights = [generator.standard_normal((size, size), np.float32) for _ in range(clients)]
    products: dict[int, np.ndarray] = {}
    async with ta.open_system("matmul") as system, system.open_device(backend) as device:
        device_left = await device.put(left)
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number, right in enumerate(rights):
                nursery.start_soon(client, number, device_left, right, products)
        seconds = time.perf_counter() - start
        print(f"{clients} products of {size} × {size} on {device.info.name}")
        print(f"{2 * size**3 * clients / seconds / 1e9:.1f} GFLOP/s with transfers")
    errors: list[float] = []
    for number, right in enumerate(rights):
        reference = left.astype(np.float64) @ right.astype(np.float64)
        errors.append(float(np.linalg.norm(products[number] - reference) / np.linalg.norm(reference)))
    return max(errors)


def main() -> int:
    """Return the exit code: 0 if every product is right."""
    parser = argparse.ArgumentParser(description="Several tasks multiply matrices at the same time.")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the operands")
    parser.add_argument("--clients", type=int, default=4, help="tasks that multiply at the same time")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    error = trio.run(partial(run, arguments.size, arguments.clients, arguments.backend))
    is_right = error <= 1e-5 * arguments.size**0.5
    print(f"largest relative error {error:.1e}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
