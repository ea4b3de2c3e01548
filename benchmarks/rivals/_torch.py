"""PyTorch: by blocking, and in an asyncio program that looks at an event in every pass of its loop."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ._mixed import MIXED, REPEATED
from ._waits import measure_latency, measure_rate

__all__ = ["Torch", "make"]


class Torch:
    """The current stream, and matrices of float32 that are multiplied without shorter types."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        self._torch.backends.cuda.matmul.allow_tf32 = False
        self._operands: dict[int, Any] = {}
        self._mixed: dict[str, Callable[[], object]] = {}

    def latency(self, way: str, size: int, calls: int) -> float:
        """Seconds of one product that is awaited."""
        return measure_latency(self._call(way, int(size)), int(calls))

    def rate(self, way: str, size: int, calls: int, tasks: int) -> float:
        """Products per second of so many tasks."""
        return measure_rate(self._call(way, int(size)), int(calls), int(tasks))

    def mixed(self, work: str, calls: int) -> float:
        """Seconds of one operation of mixed shapes, with a fresh result, that is waited for by blocking."""
        call, synchronize = self._mixed.get(work) or self._make_mixed(work), self._torch.cuda.synchronize
        start = time.perf_counter()
        for _ in range(calls):
            call()
            synchronize()
        return (time.perf_counter() - start) / calls

    def _make_mixed(self, work: str) -> Callable[[], object]:
        torch = self._torch
        arrays = itertools.cycle([torch.rand(*shape, device="cuda") for shape in MIXED])
        repeated = torch.rand(REPEATED, REPEATED, device="cuda")

        def multiply() -> object:
            array = next(arrays)
            return array @ array.T

        works: dict[str, Callable[[], object]] = {
            "matmul": multiply,
            "rfft": lambda: torch.fft.rfft(next(arrays)),
            "repeat": lambda: repeated @ repeated,
        }
        call = self._mixed[work] = works[work]
        for _ in MIXED:
            # The first time, its plans are made.
            call()
        torch.cuda.synchronize()
        return call

    def _call(self, way: str, size: int) -> Callable[[], Awaitable[object]]:
        if way != "event":
            raise ValueError(way)
        torch = self._torch
        a = self._operands.setdefault(size, torch.rand(size, size, device="cuda"))

        async def call() -> object:
            product = torch.mm(a, a)
            event = torch.cuda.Event()
            event.record()
            while not event.query():  # noqa: ASYNC110  # it is what is measured
                await asyncio.sleep(0)
            return product

        return call


make = Torch
