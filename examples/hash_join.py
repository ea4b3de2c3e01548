"""A hash join: orders look up their customer's region in a hash map on the device, while workers are killed.

The program fills and changes the map in batches. With --faults, workers die during batches. Each batch still
takes effect as a whole, so the sums equal the result of sorting in NumPy.

Run it with: python hash_join.py --orders 100000 --faults
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import trio

import trio_accel as ta

REGIONS, BATCHES = 8, 10
# The operations in a batch. The worker is killed when it begins one of them.
STEPS = ("jit.hash_stamp", "tables.HashMap", "arrays.count_nonzero")


def made(orders: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return customers with their regions, the departed customers, and orders, some by unknown customers."""
    rng = np.random.default_rng(seed)
    customers = rng.integers(-(2**63), 2**63 - 1, orders // 4)
    bought = np.where(rng.random(orders) < 0.9, rng.choice(customers, orders), rng.integers(0, 2**40, orders))
    return {
        "customers": customers,
        "regions": rng.integers(0, REGIONS, customers.size),
        "left": customers[::7].copy(),
        "bought": bought,
        "cents": rng.integers(1, 10_000, orders),
    }


def by_sorting(tables: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the sums of each region and of orders without a region, by a sort-merge join in NumPy."""
    is_left = np.isin(tables["customers"], tables["left"])
    customers, regions = tables["customers"][~is_left], tables["regions"][~is_left]
    order = np.argsort(customers)
    place = np.searchsorted(customers[order], tables["bought"]).clip(0, customers.size - 1)
    found = customers[order][place] == tables["bought"]
    return np.bincount(np.where(found, regions[order][place], REGIONS), tables["cents"]).astype(np.int64)


async def by_hash(device: ta.Device, tables: dict[str, np.ndarray[Any, Any]], faults: int) -> Any:
    """Return the same sums, by a hash map on the device."""
    kills = {2 * number + 1: STEPS[number % len(STEPS)] for number in range(faults)}
    regions = ta.tables.HashMap(device, tables["customers"].size)
    batches = [np.array_split(tables[name], BATCHES) for name in ("customers", "regions")]
    for number, (keys, values) in enumerate(zip(*batches, strict=True)):
        if number in kills:
            ta.testing.inject_fault(device, kills[number], kill=True)
        await regions.insert(keys, values)
    await regions.erase(tables["left"])
    found, _ = await regions.lookup(tables["bought"], default=REGIONS)
    # The sum of integers has the same bits in any order.
    sums = await device.zeros(REGIONS + 1, "int64")
    return await (await ta.arrays.scatter(sums, found, tables["cents"], reduce="add")).to_host()


async def run(orders: int, backend: str | None, faults: bool) -> bool:
    """Return whether the sums are right."""
    tables = made(orders)
    retries = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    options = retries if faults else ta.DeviceOptions()
    async with ta.open_system("join") as system, system.open_device(backend, options=options) as device:
        began = time.perf_counter()
        sums = await by_hash(device, tables, 3 if faults else 0)
        took, lost = time.perf_counter() - began, device.generation - 1
        print(f"{orders} orders joined in {took:.2f} s on {device.name}, {lost} workers lost")
    right = bool(np.array_equal(sums, by_sorting(tables)))
    print(
        f"{sums[:-1].sum()} cents in {REGIONS} regions, {sums[-1]} without: {'right' if right else 'WRONG'}"
    )
    return right


def main() -> int:
    """Return the exit code: 0 if the sums are right."""
    parser = argparse.ArgumentParser(description="Join orders and customers by a hash map on a device.")
    parser.add_argument("--orders", type=int, default=100_000, help="number of orders")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    parser.add_argument("--faults", action="store_true", help="kill three workers during the join")
    return 0 if trio.run(partial(run, **vars(parser.parse_args()))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
