"""The backend without what is around it: launches with and without a word on each, and callbacks."""

from __future__ import annotations

import time
from typing import Any

import trio_accel as ta
from trio_accel.backends import resolve
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, MatmulSpec

__all__ = ["Engine", "make"]


class Arm:
    """Is rung by the device's thread; armed again for the next launch when it was."""

    def __init__(self) -> None:
        self.is_free = True

    def ring(self) -> None:
        """The event is done."""
        self.is_free = True


class Engine:
    """A device with one stream and one library."""

    def __init__(self) -> None:
        backend, info = resolve("cuda")
        self._device: Any = backend.open_device(info.index, memory_limit=None)
        self._stream = self._device.open_stream("engine")
        self._library = self._device.open_library("blas")
        self._specs: dict[int, MatmulSpec] = {}

    def rate(self, size: int, calls: int, words: int, callbacks: int) -> float:
        """Launches per second.

        Args:
            size: Rows and columns of the matrices.
            calls: How many launches.
            words: Whether the stream writes a word behind each.
            callbacks: Whether a callback is armed, whenever the one before has come.
        """
        spec, stream, library = self._spec(int(size)), self._stream, self._library
        arm = Arm()
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            library.enqueue(spec, stream)
            if words:
                event = stream.record()
                if callbacks and arm.is_free:
                    arm.is_free = False
                    stream.notify(event, arm)
        stream.synchronize()
        return calls / (time.perf_counter() - start)

    def _spec(self, size: int) -> MatmulSpec:
        if size not in self._specs:
            blocks = [3 * size + number for number in range(3)]
            for block in blocks:
                self._device.allocate(block, 4 * size * size)
            a, b, out = (ArraySpec(block, 0, DType.float32, (size, size), (4 * size, 4)) for block in blocks)
            self._specs[size] = MatmulSpec(a, b, out)
            self._library.enqueue(self._specs[size], self._stream)
        return self._specs[size]


def make() -> Engine:
    """Open the device; says why where there is none."""
    try:
        return Engine()
    except ta.NotSupportedError as error:
        raise RuntimeError(error.message) from error
