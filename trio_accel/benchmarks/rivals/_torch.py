"""PyTorch in an asyncio program that looks at an event in every pass of its loop."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

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

    def latency(self, way: str, size: int, calls: int) -> float:
        """Seconds of one product that is awaited."""
        return measure_latency(self._call(way, int(size)), int(calls))

    def rate(self, way: str, size: int, calls: int, tasks: int) -> float:
        """Products per second of so many tasks."""
        return measure_rate(self._call(way, int(size)), int(calls), int(tasks))

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
