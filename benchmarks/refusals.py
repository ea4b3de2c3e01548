"""Refused requests beside good ones: ``python -m benchmarks.refusals [cpu | cuda] [PAIRS]``.

24 clients ask a program for sums of rows, without a pause. Another client sends ten requests a second that
the program refuses, or none, in turns. Printed is the share of the good answers that is left beside the bad
ones. On CUDA the library is CuPy. Workers import this module.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array, method

__all__ = ["main", "sums"]

CLIENTS = 24
EVERY = 0.1
"""Seconds from one bad request to the next."""


@method(out=lambda rows: (rows.shape[:1], rows.dtype), refuses=(ValueError,))
def sums(rows: Array) -> Array:
    """Sum each row; refuse rows with elements that are not finite."""
    library: Any = np
    if not isinstance(rows, np.ndarray):
        library = import_module("cupy")
        rows = library.from_dlpack(rows)
    if not library.isfinite(rows).all():
        raise ValueError("an element is not finite")
    return cast("Any", rows).sum(axis=1)


async def _rate(
    program: ta.programs.FunctionProgram[..., Any], good: ta.AccelRef, bad: ta.AccelRef | None, seconds: float
) -> float:
    """Return the good answers a second, beside bad requests if there is one."""
    answers, began = 0, trio.current_time()

    async def ask() -> None:
        nonlocal answers
        while trio.current_time() < began + seconds:
            await program.ask(good)
            answers += 1

    async def ask_badly(request: ta.AccelRef) -> None:
        number = 1
        while number * EVERY < seconds:
            await trio.sleep_until(began + number * EVERY)
            try:
                await program.ask(request)
            except ValueError:
                number += 1
            else:
                raise AssertionError("a bad request was not refused")

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(ask)
        if bad is not None:
            nursery.start_soon(ask_badly, bad)
    return answers / (trio.current_time() - began)


async def main(backend: str = "cpu", pairs: int = 8, seconds: float = 1.5) -> list[str]:
    """Measure inline and from a worker; returns a line for each.

    Args:
        backend: The device.
        pairs: How often the clients ask with bad requests beside them, and without.
        seconds: How long each time.
    """
    host = np.random.default_rng(1).standard_normal((8, 64))
    lines: list[str] = []
    isolations: tuple[ta.Isolation, ...] = ("inline", "process")
    async with ta.open_system("refusals") as system:
        for isolation in isolations:
            options = ta.DeviceOptions(isolation=isolation)
            async with (
                system.open_device(backend, options=options) as device,
                ta.open_program(device, sums) as program,
            ):
                good, bad = await device.put(host), await device.put(np.full_like(host, np.nan))
                alone, shares = list[float](), list[float]()
                await _rate(program, good, None, seconds)
                for _ in range(pairs):
                    alone.append(await _rate(program, good, None, seconds))
                    shares.append(await _rate(program, good, bad, seconds) / alone[-1])
                result = await (await program.ask(good)).to_host()
                np.testing.assert_allclose(result, host.sum(axis=1), rtol=1e-12)
            lines.append(
                f"{isolation:8} {statistics.median(alone):8.0f} /s, beside bad requests "
                f"{statistics.median(shares):.3f} of that ({min(shares):.3f} to {max(shares):.3f})"
            )
    return lines


if __name__ == "__main__":
    given = sys.argv[1:]
    # By the name that workers import it by.
    measured = partial(import_module("benchmarks.refusals").main, *given[:1], *map(int, given[1:2]))
    sys.stdout.write("\n".join(trio.run(measured)) + "\n")
