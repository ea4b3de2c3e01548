"""Steps of the simulations beside Numba, NumPy and SciPy: `python -m benchmarks.simulations [NAME ...]`.

Milliseconds of processor time and, in brackets, steps a second: the best of several rounds, by turns in one
process. Numba is left out where it is not installed. `NAME=SIZE` chooses an example and its size.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import trio

import trio_accel as ta

from ._simulations_by_others import OTHERS

SIZES = {
    "particles": 20_000,
    "cloth": 128,
    "fluid": 256,
    "lattice_boltzmann": 128,
    "filters": 240,
    "video": 240,
    "analysis": 256,
    "bricks": 16,
}
_ROUNDS, _SECONDS = 7, 0.2
# What differs in the last digits grows: so many steps are compared.
_COMPARED = 2


async def _best(step: Callable[..., Any], state: Any, least: list[float]) -> Any:
    """Step for a while; note the least processor time and wall time of a step."""
    count, start, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < _SECONDS:
        made = step(*state)
        state = (await made) if inspect.isawaitable(made) else made
        count += 1
    spent = (time.process_time() - start) / count, (time.perf_counter() - wall) / count
    least[:] = np.fmin(least, spent)
    return state


def _apart(a: Any, b: Any) -> float:
    """The greatest difference, where both are finite."""
    is_finite = np.isfinite(a)
    assert (np.isfinite(b) == is_finite).all()
    return float(np.abs(np.subtract(a[is_finite], b[is_finite], dtype=float)).max(initial=0))


async def _row(device: ta.Device, name: str, size: int) -> None:
    module = import_module(name)
    state, step = await module.start(device, size, 0)
    if name not in ("particles", "analysis"):
        step = await ta.graphs.capture(device, step, *state)
    steps: dict[str, tuple[Callable[..., Any], Any]] = {"trio_accel": (step, state)}
    host = [await array.to_host() for array in state]
    for label, make in OTHERS.get(name, {}).items():
        if "Numba" not in label:
            steps[label] = make(module, size), host
        elif find_spec("numba"):
            steps[label] = make(module, import_module("numba").njit, size), host
    ours: Any = state
    for _ in range(_COMPARED):
        ours = await step(*ours)
    ours = [await array.to_host() for array in ours]
    told = ""
    for other, (function, theirs) in list(steps.items())[1:]:
        made = theirs
        for _ in range(_COMPARED):
            made = function(*made)
        apart = max(_apart(a, b) for a, b in zip(ours, made, strict=True))
        told += f"; apart from {other} {apart:.0e}"
    least = {other: [np.nan, np.nan] for other in steps}
    for _ in range(_ROUNDS):
        for other, (function, current) in steps.items():
            steps[other] = function, await _best(function, current, least[other])
    columns = "  ".join(f"{other} {1e3 * cpu:.2f} ({1 / wall:.0f}/s)" for other, (cpu, wall) in least.items())
    print(f"{name} {size}: {columns}{told}", flush=True)  # noqa: T201


async def main(names: list[str]) -> None:
    """Print a line for each example."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "simulations"))
    async with ta.open_system("simulations") as system, system.open_device("cpu") as device:
        for each in names or SIZES:
            name, _, size = each.partition("=")
            await _row(device, name, int(size or SIZES[name]))


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
