"""The examples' simulations beside Taichi, and hash maps beside CuPy.

Run it with ``python -m benchmarks.gpu.simulations [--backend B] [--small]``.

Steps a second of examples/simulations: ours inline and in a worker, with each step awaited, and kernels of
Taichi with the same arithmetic and one wait at the end. All have the same numbers after two steps. Each turn
begins with the first state, and all sides step as often; the best of three turns counts. The fluid is left
out: Taichi has no sine transform.

Seconds of examples/hash_join.py, with arrays of the host in and sums out, beside a sort and a binary search
in CuPy; and of a hash map whose keys are inserted and looked up on the device. What cannot be imported is
left out. A row that fails is told, and the others go on; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import trio

import trio_accel as ta

from ._simulations_by_taichi import STEPS, Peer

__all__ = ["main"]

Numbers: TypeAlias = Any
Devices: TypeAlias = Mapping[str, ta.Device]

_SIZES = {"particles": 1_000_000, "cloth": 512, "filters": 1080, "lattice_boltzmann": 512}
_SMALL_SIZES = {"particles": 5000, "cloth": 48, "filters": 90, "lattice_boltzmann": 48}
_KEYS, _SMALL_KEYS = 10**7, 10**5
_TURNS = 3
# Steps of a turn: what the slowest side has in so many seconds, and at most so many.
_SECONDS, _SMALL_SECONDS, _STEPS, _TRIED = 0.8, 0.1, 1000, 10
# What differs in the last digits grows: so many steps are compared.
_COMPARED, _APART = 2, 1e-9
# GB of the device that Taichi may take at once; the largest fields need half of one.
_TAICHI_MEMORY = 2.0
_COLUMNS = ("inline", "worker", "Taichi", "CuPy")


class Side(Protocol):
    """One of those that step."""

    async def begin(self) -> None:
        """Go back to the first state."""

    async def run(self, count: int) -> None:
        """Step so often, and wait until all is done."""

    async def got(self) -> Sequence[Numbers]:
        """Copy the state to the host."""
        ...


@attrs.define
class Ours:
    """Arrays of a device."""

    first: Sequence[Any]
    step: Callable[..., Awaitable[Sequence[Any]]]
    state: Sequence[Any] = ()

    async def begin(self) -> None:
        """Go back to the first state."""
        self.state = self.first

    async def run(self, count: int) -> None:
        """Step so often."""
        for _ in range(count):
            self.state = await self.step(*self.state)

    async def got(self) -> Sequence[Numbers]:
        """Copy the state to the host."""
        return [await array.to_host() for array in self.state]


@attrs.frozen
class Taichis:
    """Fields of Taichi, which blocks the loop."""

    ti: Any
    peer: Peer
    first: Sequence[Numbers]

    async def begin(self) -> None:
        """Go back to the first state."""
        self.peer.put(self.first)
        self.ti.sync()  # noqa: ASYNC200  # Taichi blocks, and is measured so

    async def run(self, count: int) -> None:
        """Step so often, and wait once."""
        for _ in range(count):
            self.peer.step()
        self.ti.sync()  # noqa: ASYNC200  # Taichi blocks, and is measured so

    async def got(self) -> Sequence[Numbers]:
        """Copy the state to the host."""
        return self.peer.got()


@attrs.frozen
class Asked:
    """Work that is timed as a whole: `ask` does it, and `host` copies what it returns."""

    ask: Callable[[], Awaitable[Any]]
    host: Callable[[Any], Awaitable[Numbers]]


@attrs.frozen
class Table:
    """What is printed at the end: what each column of a row has, as text; and what has failed."""

    rows: dict[str, dict[str, str]] = attrs.field(factory=dict[str, dict[str, str]])
    failed: list[str] = attrs.field(factory=list[str])

    def fail(self, name: str, error: Exception) -> None:
        """Say that something has failed."""
        _say(f"{name} FAILED: {type(error).__name__}: {error}")
        self.failed.append(name)

    def __str__(self) -> str:
        """Return the lines, with only those columns that have something."""
        columns = [name for name in _COLUMNS if any(name in row for row in self.rows.values())]
        lines = [f"{'':40}" + "".join(f"{name:>10}" for name in columns)]
        for name, row in self.rows.items():
            lines.append(f"{name:40}" + "".join(f"{row.get(column, ''):>10}" for column in columns))
        return "\n".join([*(line.rstrip() for line in lines), *(f"{name} FAILED" for name in self.failed)])


async def _steps(devices: Devices, ti: Any, name: str, size: int, seconds: float, table: Table) -> None:
    """Compare and time the steps of an example."""
    module, sides = import_module(name), dict[str, Side]()
    for column, device in devices.items():
        first, step = await module.start(device, size, 0)
        if module.SIMULATION.operation is ta.graphs.Replay:
            step = await ta.graphs.capture(device, step, *first)
        sides[column] = Ours(first, step)
    await sides["inline"].begin()
    initial = await sides["inline"].got()
    wanted = await _compared(sides["inline"])
    _check(name, "worker", wanted, await _compared(sides["worker"]))
    if ti is not None:
        try:
            arch = ti.cuda if devices["inline"].info.name.startswith("cuda") else ti.cpu
            side = _taichis(ti, arch, module, size, initial)
            _check(name, "Taichi", wanted, await _compared(side))
            sides["Taichi"] = side
        except Exception as error:  # noqa: BLE001  # ours are timed all the same
            table.fail(f"{name} by Taichi", error)
    # The first steps may compile, so the best of several trials counts.
    slowest = max([min([await _timed(side, _TRIED) for _ in range(_TURNS)]) for side in sides.values()])
    count = int(np.clip(seconds / slowest * _TRIED, _TRIED, _STEPS))
    least = dict.fromkeys(sides, np.inf)
    for turn in range(_TURNS):
        for column, side in sides.items():
            least[column] = min(least[column], await _timed(side, count))
        told = ", ".join(f"{column} {count / took:.0f}" for column, took in least.items())
        _say(f"{name} {size}, turn {turn + 1} of {count} steps: best {told} a second")
    table.rows[f"{name} {size}, steps a second"] = {
        column: f"{count / took:.0f}" for column, took in least.items()
    }


def _taichis(ti: Any, arch: Any, module: Any, size: int, first: Sequence[Numbers]) -> Side:
    """The same steps by Taichi, which is begun anew: so nothing is left of the row before."""
    precision, make = STEPS[module.__name__]
    ti.init(
        arch=arch,
        default_fp=getattr(ti, precision),
        device_memory_GB=_TAICHI_MEMORY,
        log_level=ti.WARN,
        offline_cache=False,
    )
    if ti.cfg.arch != arch:
        raise RuntimeError(f"Taichi has no {arch}, and would take {ti.cfg.arch}")
    return Taichis(ti, make(ti, module, size), first)


async def _compared(side: Side) -> Sequence[Numbers]:
    await side.begin()
    await side.run(_COMPARED)
    return await side.got()


async def _timed(side: Side, count: int) -> float:
    await side.begin()
    start = time.perf_counter()
    await side.run(count)
    return time.perf_counter() - start


def _check(name: str, column: str, ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> None:
    """Compare two states: numbers by the largest of each array, whole numbers of images as they are."""
    if name == "particles":
        # Grains of one cell have any order. Each has a tag of its own.
        ours, theirs = ([array[np.argsort(state[-1])] for array in state] for state in (ours, theirs))
    relative, whole = 0.0, 0
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype == np.uint8:
            whole = max(whole, int(np.abs(a.astype(int) - b).max()))
        else:
            relative = float(np.maximum(relative, np.abs(a - b).max() / np.abs(a).max()))
    _say(f"{name}: {column} is apart from inline by {relative:.0e}, whole numbers by {whole}")
    if not (relative <= _APART and whole <= 1):
        raise ValueError(f"{column} differs from inline by {relative:.0e}, and whole numbers by {whole}")


async def _join(devices: Devices, cupy: Any, orders: int, table: Table) -> None:
    """Time the whole of the example: all sides copy the tables to the device."""
    module: Any = import_module("hash_join")
    tables = module.made(orders)

    async def ours(device: ta.Device) -> Numbers:
        return await module.by_hash(device, tables, 0)

    async def theirs() -> Numbers:
        return _joined(cupy, module.REGIONS, tables)

    async def same(sums: Numbers) -> Numbers:
        return sums

    sides = {column: Asked(partial(ours, device), same) for column, device in devices.items()}
    if cupy is not None:
        sides["CuPy"] = Asked(theirs, same)
    await _seconds(f"hash_join {orders}", sides, module.by_sorting(tables), table)


def _joined(cupy: Any, regions: int, tables: Mapping[str, Numbers]) -> Numbers:
    """The sums that the example finds, by sorting customers and searching for those of the orders."""
    there = {name: cupy.asarray(array) for name, array in tables.items()}
    stays = ~cupy.isin(there["customers"], there["left"])
    customers, region_of = there["customers"][stays], there["regions"][stays]
    order = cupy.argsort(customers)
    customers, region_of = customers[order], region_of[order]
    place = cupy.searchsorted(customers, there["bought"]).clip(0, customers.size - 1)
    region = cupy.where(customers[place] == there["bought"], region_of[place], regions)
    # Sums of weights are float64, which has these whole numbers.
    sums = cupy.bincount(region, there["cents"].astype(cupy.float64), minlength=regions + 1)
    return cupy.asnumpy(sums).astype(np.int64)


async def _map(devices: Devices, cupy: Any, count: int, table: Table) -> None:
    """Time so many keys that are inserted, and as many that are looked up, a tenth of which nobody knows."""
    rng = np.random.default_rng(0)
    keys, values, places = rng.integers(-(2**63), 2**63 - 1, count), np.arange(count), rng.permutation(count)
    is_known = rng.random(count) < 0.9
    sought = np.where(is_known, keys[places], rng.integers(0, 2**40, count))
    sides: dict[str, Asked] = {}

    async def ours(arrays: Sequence[Any]) -> Any:
        made = ta.tables.HashMap(arrays[0].device, count)
        await made.insert(*arrays[:2])
        return (await made.lookup(arrays[2], default=-1))[0]

    async def theirs(arrays: Sequence[Any]) -> Any:
        found = _looked_up(cupy, *arrays)
        cupy.cuda.get_current_stream().synchronize()
        return found

    async def to_host(found: Any) -> Numbers:
        return await found.to_host()

    async def from_cupy(found: Any) -> Numbers:
        return cupy.asnumpy(found)

    for column, device in devices.items():
        arrays = [await device.put(array) for array in (keys, values, sought)]
        sides[column] = Asked(partial(ours, arrays), to_host)
    if cupy is not None:
        arrays = [cupy.asarray(array) for array in (keys, values, sought)]
        sides["CuPy"] = Asked(partial(theirs, arrays), from_cupy)
    await _seconds(f"hash map {count}", sides, np.where(is_known, places, -1), table)


def _looked_up(cupy: Any, keys: Any, values: Any, sought: Any) -> Any:
    """The values of keys, -1 where there is none, by sorting those that are there."""
    order = cupy.argsort(keys)
    keys = keys[order]
    place = cupy.searchsorted(keys, sought).clip(0, keys.size - 1)
    return cupy.where(keys[place] == sought, values[order[place]], -1)


async def _seconds(name: str, sides: Mapping[str, Asked], wanted: Numbers, table: Table) -> None:
    """Compare with what is wanted, then time in turns."""
    least: dict[str, float] = {}
    for column, side in sides.items():
        try:
            np.testing.assert_array_equal(await side.host(await side.ask()), wanted)
            least[column] = np.inf
        except Exception as error:  # noqa: BLE001  # the other sides are timed all the same
            table.fail(f"{name}, {column}", error)
    _say(f"{name}: right by {', '.join(least)}")
    for turn in range(_TURNS):
        for column, best in least.items():
            start = time.perf_counter()
            await sides[column].ask()
            least[column] = min(best, time.perf_counter() - start)
        told = ", ".join(f"{column} {took:.4f} s" for column, took in least.items())
        _say(f"{name}, turn {turn + 1}: best {told}")
    table.rows[f"{name}, seconds"] = {column: f"{took:.4f}" for column, took in least.items()}


def _found(name: str) -> Any:
    """A module that need not be there."""
    # Taichi greets, and asks the net for a newer one.
    os.environ.update(ENABLE_TAICHI_HEADER_PRINT="0", TI_SKIP_VERSION_CHECK="ON")
    try:
        return import_module(name)
    except ImportError as error:
        _say(f"{name} is left out: {error}")
        return None


async def _measure(backend: str, is_small: bool) -> Table:
    examples, table = Path(__file__).parents[2] / "examples", Table()
    sys.path[:0] = [str(examples), str(examples / "simulations")]
    ti, cupy = _found("taichi"), None
    if backend.startswith("cuda"):
        cupy = _found("cupy")
    else:
        _say("CuPy is left out: it computes on GPUs alone")
    keys, seconds = (_SMALL_KEYS, _SMALL_SECONDS) if is_small else (_KEYS, _SECONDS)
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(ta.open_system("simulations"))
        devices: dict[str, ta.Device] = {}
        isolations: dict[str, ta.Isolation] = {"inline": "inline", "worker": "process"}
        for column, isolation in isolations.items():
            options = ta.DeviceOptions(isolation=isolation)
            device = await system.open_device(backend, options=options, name=column)
            devices[column] = await stack.enter_async_context(device)
        rows: dict[str, Callable[[], Awaitable[None]]] = {
            "hash_join": partial(_join, devices, cupy, keys, table),
            "hash map": partial(_map, devices, cupy, keys, table),
        }
        for name, size in (_SMALL_SIZES if is_small else _SIZES).items():
            rows[name] = partial(_steps, devices, ti, name, size, seconds, table)
        for name, row in rows.items():
            try:
                await row()
            except Exception as error:  # noqa: BLE001  # the others go on
                table.fail(name, error)
    return table


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, and print the table; returns 1 if something has failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.simulations")
    parser.add_argument("--backend", default="cuda", help="cuda or cpu, for Taichi too (default: cuda)")
    parser.add_argument("--small", action="store_true", help="so little that a processor can do it")
    given = parser.parse_args()
    table = trio.run(_measure, given.backend, given.small)
    _say(f"\n{table}")
    return int(bool(table.failed))


if __name__ == "__main__":
    sys.exit(main())
