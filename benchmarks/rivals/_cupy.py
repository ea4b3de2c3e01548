"""CuPy in an asyncio program: a host function for each operation, or a thread that waits for the stream."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from ._waits import measure_latency, measure_rate

__all__ = ["Cupy", "make"]


class Cupy:
    """One stream, and two matrices of 512 in float32 for each call."""

    def __init__(self) -> None:
        self._cp: Any = importlib.import_module("cupy")
        self._stream = self._cp.cuda.Stream(non_blocking=True)
        self._operands: dict[int, Any] = {}

    def latency(self, way: str, size: int, calls: int) -> float:
        """Seconds of one product that is awaited."""
        return measure_latency(self._call(way, int(size)), int(calls))

    def rate(self, way: str, size: int, calls: int, tasks: int) -> float:
        """Products per second of so many tasks."""
        return measure_rate(self._call(way, int(size)), int(calls), int(tasks))

    def _call(self, way: str, size: int) -> Callable[[], Awaitable[object]]:
        if size not in self._operands:
            with self._stream:
                self._operands[size] = self._cp.random.rand(size, size, dtype=self._cp.float32)
            self._stream.synchronize()
        return {"callback": self._callback, "thread": self._thread}[way](self._operands[size])

    def _callback(self, a: Any) -> Callable[[], Awaitable[object]]:
        def done(future: asyncio.Future[None]) -> None:
            future.get_loop().call_soon_threadsafe(future.set_result, None)

        async def call() -> object:
            future = asyncio.get_running_loop().create_future()
            with self._stream:
                product = self._cp.matmul(a, a)
            self._stream.launch_host_func(done, future)
            await future
            return product

        return call

    def _thread(self, a: Any) -> Callable[[], Awaitable[object]]:
        async def call() -> object:
            with self._stream:
                product = self._cp.matmul(a, a)
            await asyncio.to_thread(self._stream.synchronize)
            return product

        return call


make = Cupy
