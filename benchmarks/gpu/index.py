"""A `VectorIndex` of many vectors on a GPU: ``python -m benchmarks.gpu.index [--count 1000000]``.

It compares the ids with those of the same product in the index's dtype, and in float64 with the nearest of
all. It times a search beside the bare product and `top_k`, and beside FAISS on the processor if that is
installed. ``--backend cpu --count 100000 --dtype float32`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, cast

import ml_dtypes
import numpy as np
import trio

import trio_accel as ta
from trio_accel.agents import VectorIndex
from trio_accel.testing import inject_fault

__all__ = ["main"]

WIDTH, QUERIES, K, PIECE = 384, 32, 10, 100_000


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _median(ask: Callable[[], Awaitable[object]], rounds: int = 9) -> float:
    took = list[float]()
    for number in range(rounds + 2):
        began = time.perf_counter()
        await ask()
        if number >= 2:
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def _by_faiss(vectors: Any, queries: Any) -> float:
    try:
        faiss = import_module("faiss")
    except ModuleNotFoundError:
        return math.nan
    index = faiss.IndexFlatIP(WIDTH)
    index.add(vectors.astype(np.float32))
    took = list[float]()
    for _ in range(5):
        began = time.perf_counter()
        index.search(queries.astype(np.float32), K)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _exact(vectors: Any, queries: Any) -> Any:
    """Inner products in float64, by pieces."""
    pieces = [vectors[start : start + PIECE].astype(np.float64) for start in range(0, len(vectors), PIECE)]
    return np.concatenate([queries.astype(np.float64) @ one.T for one in pieces], axis=1)


def _first(scores: Any) -> Any:
    """Places of the highest scores, of equal ones the first."""
    least = np.partition(scores, -K)[-K]
    places = np.flatnonzero(scores >= least)
    return places[np.argsort(-scores[places], kind="stable")][:K]


async def measure(given: argparse.Namespace, isolation: Any) -> bool:
    """Fill an index, search in it, compare, and time it."""
    rng = np.random.default_rng(6)
    kind = ta.DType(given.dtype).dtype
    vectors = np.concatenate(
        [
            rng.standard_normal((min(PIECE, given.count - start), WIDTH), dtype=np.float32)
            for start in range(0, given.count, PIECE)
        ]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:QUERIES] + 0.02 * rng.standard_normal((QUERIES, WIDTH), dtype=np.float32)
    vectors, queries = vectors.astype(kind), queries.astype(kind)
    options = ta.DeviceOptions(isolation=isolation, retry=3)
    async with (
        ta.open_system("index") as system,
        system.open_device(given.backend, options=options) as device,
    ):
        index = VectorIndex(device, WIDTH, metric="dot", dtype=given.dtype)
        began = time.perf_counter()
        for start in range(0, given.count, PIECE):
            rows = vectors[start : start + PIECE]
            await index.add(np.arange(start, start + len(rows)), rows)
        filled = time.perf_counter() - began
        await index.compact()
        found = await index.search(queries, K)

        # The same product in the index's dtype, by a sort of all scores; equal ones by id.
        there = await device.put(vectors)
        scores = np.asarray(await ta.linalg.matmul(await device.put(queries), there.mT).to_host())
        ids = np.array([_first(row) for row in scores])
        same = int((ids == found.ids).all(axis=1).sum())
        near = _exact(vectors, queries)
        last = np.take_along_axis(near, found.ids, axis=1).min(axis=1)
        np.put_along_axis(near, found.ids, -math.inf, axis=1)
        limits = cast("Any", ml_dtypes).finfo(kind)
        rounding = float(limits.eps) * math.sqrt(WIDTH)
        missed = float((near.max(axis=1) - last).max())

        async def bare() -> None:
            on_device = await device.put(queries)
            values, places = await ta.arrays.top_k(ta.linalg.matmul(on_device, there.mT), K)
            await values.to_host()
            await places.to_host()

        ours, peer = await _median(lambda: index.search(queries, K)), await _median(bare)
        if isolation == "process":
            inject_fault(device, ta.linalg.Matmul, kill=True)
            again = await index.search(queries, K)
            is_kept = (again.ids == found.ids).all() and (again.scores == found.scores).all()
        else:
            is_kept = True
    is_right = same == QUERIES and missed <= rounding and bool(is_kept)
    _say(
        f"index of {given.count} x {WIDTH} {given.dtype}, {isolation}: filled in {filled:.1f} s; ids of "
        f"{same} of {QUERIES} queries are those of the product; the nearest that was left out is nearer by "
        f"{missed:.1e} at most (rounding {rounding:.1e}); search {1e3 * ours:.2f} ms, bare product and top_k "
        f"{1e3 * peer:.2f} ms, {ours / peer:.2f}; FAISS on the processor "
        f"{1e3 * _by_faiss(vectors, queries):.1f} ms; the same after a kill: {bool(is_kept)}"
    )
    return is_right


async def _main(given: argparse.Namespace) -> int:
    results = [await measure(given, isolation) for isolation in ("inline", "process")]
    return 0 if all(results) else 1


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="float16")
    return trio.run(_main, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
