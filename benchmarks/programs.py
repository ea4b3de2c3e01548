"""Functions as programs, beside the bare library: ``python -m benchmarks.programs [cpu | cuda]``.

On CUDA the library is CuPy. For each way to declare a function it prints the median time of a call of one
asker, and the calls a second of sixteen. Workers import this module.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array, method

__all__ = ["declared", "enqueuing", "enqueuing_undeclared", "main", "measure", "not_declared"]

ASKERS = 16
_WARM = 50


def _like(x: Any) -> Any:
    return x.shape, x.dtype


def not_declared(x: Array) -> Array:
    """``x * 2``, without a word on its result."""
    if not isinstance(x, np.ndarray):
        x = import_module("cupy").from_dlpack(x)
    return cast("Any", x) * 2


@method(out=_like)
def declared(x: Array) -> Array:
    """The same, whose result is declared."""
    return not_declared(x)


@method(out=_like, enqueues=True)
def enqueuing(x: Array) -> Array:
    """The same, which is also declared to wait for nothing."""
    return not_declared(x)


@method(enqueues=True)
def enqueuing_undeclared(x: Array) -> Array:
    """The same, which is declared to wait for nothing, and whose result is not declared."""
    return not_declared(x)


async def measure(call: Callable[[], Awaitable[object]], seconds: float) -> tuple[float, float]:
    """Measure a call.

    Args:
        call: The call.
        seconds: How long, for one asker and again for all.

    Returns:
        The median of one asker in µs, and how many a second all of them make.
    """
    for _ in range(_WARM):
        await call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await call()
        taken.append(time.perf_counter() - began)
    count, began = 0, time.perf_counter()

    async def ask() -> None:
        nonlocal count
        while time.perf_counter() < began + seconds:
            await call()
            count += 1

    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            nursery.start_soon(ask)
    return statistics.median(taken) * 1e6, count / (time.perf_counter() - began)


def _bare(backend: str, host: Any, seconds: float) -> float:
    """The median of the bare library's, in µs: the function, and the wait for the device."""
    library: Any = np if backend == "cpu" else import_module("cupy")
    x, taken = library.asarray(host), list[float]()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        _ = x * 2
        if backend != "cpu":
            library.cuda.get_current_stream().synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


async def main(backend: str = "cpu", seconds: float = 1.0) -> list[str]:
    """Measure everything; returns the lines of the table."""
    host = np.random.default_rng(1).standard_normal((256, 256), np.float32)
    lines = [f"{'bare library':30} {_bare(backend, host, seconds):8.1f} µs"]
    isolations: tuple[ta.Isolation, ...] = ("inline", "process")
    async with ta.open_system("programs") as system:
        for isolation in isolations:
            options = ta.DeviceOptions(isolation=isolation)
            async with system.open_device(backend, options=options) as device:
                x = await device.put(host)
                for function in (enqueuing, enqueuing_undeclared, declared, not_declared):
                    async with ta.open_program(device, function) as program:
                        one, many = await measure(partial(program.ask, x), seconds)
                        np.testing.assert_array_equal(await (await program.ask(x)).to_host(), host * 2)
                    name = f"{isolation}: {function.__name__}"
                    lines.append(f"{name:30} {one:8.1f} µs {many:10.0f} /s of {ASKERS} askers")
    return lines


if __name__ == "__main__":
    # By the name that workers import it by.
    measured = partial(import_module("benchmarks.programs").main, *sys.argv[1:2])
    sys.stdout.write("\n".join(trio.run(measured)) + "\n")
