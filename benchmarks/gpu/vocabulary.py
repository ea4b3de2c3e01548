"""Functions of arrays beside CuPy, in one run: ``python -m benchmarks.gpu.vocabulary [SCALE]``.

Large arrays: seconds of one ask, and of one of several that are in flight, and the bytes a second of these by
those of a copy. Sorting, and the largest
elements. A chain of five functions as one expression, beside one pass. What one ask of a small function
costs, inline and through a worker, by the number of elements. It needs a GPU and CuPy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta

__all__ = ["main"]

Ask = Callable[[], Awaitable[object]]

_LARGE, _SORTED, _TOP, _LEADING = 1 << 28, 10**8, 10**7, 100
_ROUNDS, _SMALL_ROUNDS, _IN_FLIGHT = 7, 300, 8
_SIZES = (1, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)


@attrs.frozen
class Row:
    """One comparison.

    Attributes:
        name: What was computed.
        ours, peer: Seconds of a call: the median of ours, and CuPy's.
        each: Seconds of one of several of ours in flight.
        moved: Bytes that are read and written at least.
    """

    name: str
    ours: float
    each: float
    peer: float
    moved: int


async def _ours(ask: Ask, rounds: int) -> float:
    await ask()
    took: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        await ask()
        took.append(time.perf_counter() - start)
    return float(np.median(took))


async def _each_in_flight(ask: Ask) -> float:
    """Seconds for each of several asks that are in flight together: what the device takes."""
    took: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(_IN_FLIGHT):
                nursery.start_soon(_ask, ask)
        took.append((time.perf_counter() - start) / _IN_FLIGHT)
    return float(np.median(took))


async def _ask(ask: Ask) -> None:
    await ask()


def _peer(call: Callable[[], object], rounds: int) -> float:
    cupy: Any = import_module("cupy")
    stream = cupy.cuda.get_current_stream()
    call()
    took: list[float] = []
    for _ in range(rounds):
        stream.synchronize()
        start = time.perf_counter()
        call()
        stream.synchronize()
        took.append(time.perf_counter() - start)
    return float(np.median(took))


async def large(device: ta.Device, scale: float) -> None:
    """Print the rows of large arrays."""
    cupy: Any = import_module("cupy")
    size = int(_LARGE * scale)
    host = np.random.default_rng(0).random(size, np.float32)
    x, out = await device.put(host), await device.put(host)
    x_peer, out_peer = cupy.asarray(host), cupy.asarray(host)
    arrays, sqrt_of, sum_of = ta.arrays, cupy.sqrt, cupy.sum
    copied = _peer(lambda: cupy.copyto(out_peer, x_peer), _ROUNDS)
    speed = 8 * size / copied
    _say(f"copy of {size} float32 by CuPy: {speed / 1e9:.0f} GB/s")

    @cupy.fuse()  # type: ignore[untyped-decorator]
    def chain_peer(x: Any) -> Any:
        return cupy.exp(-(cupy.sqrt(x * x + 1) - 1))

    chain = ta.jit.elementwise("exp(-(sqrt(x * x + 1) - 1))")
    rows = [
        ("sqrt", lambda: arrays.sqrt(x, out=out), lambda: sqrt_of(x_peer, out=out_peer), 8),
        ("add", lambda: arrays.add(x, x, out=out), lambda: cupy.add(x_peer, x_peer, out=out_peer), 8),
        ("sum", lambda: arrays.sum(x), lambda: sum_of(x_peer), 4),
        ("max", lambda: arrays.max(x), lambda: cupy.max(x_peer), 4),
        ("mean", lambda: arrays.mean(x), lambda: cupy.mean(x_peer), 4),
        ("var", lambda: arrays.var(x), lambda: cupy.var(x_peer), 8),
        ("argmax", lambda: arrays.argmax(x), lambda: cupy.argmax(x_peer), 4),
        ("cumulative_sum", lambda: arrays.cumulative_sum(x), lambda: cupy.cumsum(x_peer), 8),
        ("chain of five", lambda: chain(x, out=out), lambda: chain_peer(x_peer), 8),
    ]
    for name, ask, call, each in rows:
        await _compare(name, ask, call, each * size, speed)
    matrix, peer = x.reshape(-1, 1024), x_peer.reshape(-1, 1024)

    def softmax_peer() -> Any:
        e = cupy.exp(peer - peer.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    await _compare(
        "softmax of rows of 1024", lambda: arrays.softmax(matrix, axis=-1), softmax_peer, 8 * size, speed
    )
    await _compare(
        "sum of rows", lambda: arrays.sum(matrix, axis=1), lambda: peer.sum(axis=1), 4 * size, speed
    )
    await _compare(
        "sum of columns", lambda: arrays.sum(matrix, axis=0), lambda: peer.sum(axis=0), 4 * size, speed
    )


async def sorting(device: ta.Device, scale: float) -> None:
    """Print the rows of sorting."""
    cupy: Any = import_module("cupy")
    host = np.random.default_rng(0).standard_normal(int(_SORTED * scale), np.float32)
    x, peer = await device.put(host), cupy.asarray(host)
    await _compare("sort", lambda: ta.arrays.sort(x), lambda: cupy.sort(peer), 8 * x.size, 0)
    await _compare("argsort", lambda: ta.arrays.argsort(x), lambda: cupy.argsort(peer), 12 * x.size, 0)
    few, few_peer = x[: int(_TOP * scale)], peer[: int(_TOP * scale)]
    await _compare(
        f"top_k, {_LEADING}",
        lambda: ta.arrays.top_k(few, _LEADING),
        lambda: cupy.sort(cupy.partition(few_peer, few.size - _LEADING)[-_LEADING:]),
        4 * few.size,
        0,
    )


async def small(device: ta.Device) -> None:
    """Print what one ask of a small function costs, by the number of elements."""
    cupy: Any = import_module("cupy")
    own = ta.jit.elementwise("sqrt(x)")
    for size in _SIZES:
        host = np.random.default_rng(0).random(size, np.float32)
        x, peer = await device.put(host), cupy.asarray(host)
        ours = await _ours(partial(ta.arrays.sqrt, x), _SMALL_ROUNDS)
        plain = await _ours(partial(own, x), _SMALL_ROUNDS)
        total = await _ours(partial(ta.arrays.sum, x), _SMALL_ROUNDS)
        start = time.perf_counter()
        for _ in range(10):
            np.sqrt(host)
        on_host = (time.perf_counter() - start) / 10
        theirs = _peer(partial(cupy.sqrt, peer), _SMALL_ROUNDS)
        times = {
            "sqrt": ours,
            "jit.elementwise": plain,
            "sum": total,
            "CuPy and a wait": theirs,
            "NumPy": on_host,
        }
        _say(f"  {size:>9} float32: " + ", ".join(f"{name} {s * 1e6:.1f} µs" for name, s in times.items()))


async def _compare(name: str, ask: Ask, call: Callable[[], object], moved: int, speed: float) -> None:
    try:
        ours = await _ours(ask, _ROUNDS)
        row = Row(name, ours, await _each_in_flight(ask), _peer(call, _ROUNDS), moved)
    except (ta.NotSupportedError, ta.AccelError, AttributeError) as error:
        _say(f"  {name:<24} {type(error).__name__}: {error}")
        return
    of_copy = ""
    if speed:
        one, each = (100 * moved / seconds / speed for seconds in (row.ours, row.each))
        of_copy = f", of the copy {one:5.1f} % alone, {each:5.1f} % in flight"
    _say(
        f"  {name:<24} {row.ours * 1e3:9.3f} ms, in flight {row.each * 1e3:9.3f} ms, CuPy "
        f"{row.peer * 1e3:9.3f} ms, ratio {row.ours / row.peer:5.2f}{of_copy}"
    )


async def _run(scale: float) -> None:
    isolations: tuple[ta.Isolation, ...] = ("inline", "process")
    for isolation in isolations:
        options = ta.DeviceOptions(isolation=isolation)
        async with (
            ta.open_system("vocabulary") as system,
            system.open_device("cuda", options=options) as device,
        ):
            _say(f"{isolation}, {device.info.description}")
            await small(device)
            if isolation == "inline":
                await large(device, scale)
                await sorting(device, scale)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Print all rows; the argument makes the arrays smaller."""
    trio.run(_run, float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
