"""Copies to a device, and batches copied ahead: ``python -m benchmarks.gpu.streaming [SCALE]``.

First `put` of 256 MiB: of an ordinary array, of one with ``pinned=True``, and of one of `host_empty`; beside
the bare copy from ordinary and pinned memory, by CuPy, where it is there. Then 32 batches of 64 MiB, each
multiplied by a matrix and summed: a loop of reading, `put`, computing and release, beside ``ta.stream`` with
a depth of 1 and 3. `put` alone, computing alone, and CuPy's bare copies of the same batches tell how much of
the copies is hidden: a stream can take no less than the longest of them. They are read from memory, and from
a source that waits in each call as a disk does, for as long as the loop takes for a batch from memory. Both
isolations; ``--device`` names another than CUDA's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

__all__ = ["main"]

Host = npt.NDArray[np.float32]
Source = Callable[[], Iterator[Host]]

_BYTES, _BATCH, _BATCHES, _COLUMNS = 256 << 20, 64 << 20, 32, 512
_ROUNDS, _DEPTHS = 7, (1, 3)


async def _time(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def copies(device: ta.Device, scale: float) -> None:
    """Print the bytes a second of `put`, by the memory that it copies from."""
    plain = np.ones(max(1 << 15, int(_BYTES * scale) // 4), np.float32)
    pooled = device.host_empty(plain.shape, np.float32)
    pooled[...] = 1
    lasting = plain.copy()
    lasting.flags.writeable = False
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "put of an ordinary array": partial(device.put, plain),
        "put with pinned=True": partial(device.put, lasting, pinned=True),
        "put of an array of host_empty": partial(device.put, pooled),
    }
    if _has_cupy(device):
        ways |= _bare(plain)
    for name, call in ways.items():
        await call()
        took = [await _time(call) for _ in range(_ROUNDS)]
        _say(f"  {name:<34} {plain.nbytes / statistics.median(took) / 1e9:7.2f} GB/s")


def _bare(plain: Host) -> dict[str, Callable[[], Awaitable[object]]]:
    cupy, pinned_like = import_module("cupy"), import_module("cupyx").empty_like_pinned
    pinned = pinned_like(plain)
    pinned[...] = plain
    target = cupy.empty_like(plain)

    async def copy(host: Any) -> None:
        target.set(host)
        cupy.cuda.get_current_stream().synchronize()
        await trio.lowlevel.checkpoint()

    return {
        "CuPy, cudaMemcpy, ordinary": partial(copy, plain),
        "CuPy, cudaMemcpy, pinned": partial(copy, pinned),
    }


@attrs.define
class Work:
    """What is computed with each batch.

    Attributes:
        weights: It is multiplied by these.
        times: How many times.
    """

    weights: ta.AccelRef
    times: int = 1

    async def __call__(self, x: ta.AccelRef) -> float:
        """Return the sum."""
        for _ in range(self.times - 1):
            await self.once(x)
        return float(await (await self.once(x)).item())

    async def once(self, x: ta.AccelRef) -> ta.AccelRef:
        """Compute the sum."""
        return await ta.arrays.sum(await ta.linalg.matmul(x, self.weights))


async def _loop(device: ta.Device, source: Source, work: Work) -> float:
    total = 0.0
    for host in source():
        x = await device.put(host)
        total += await work(x)
        x.release()
    return total


async def _ahead(device: ta.Device, source: Source, work: Work, depth: int) -> float:
    total = 0.0
    async with ta.stream(device, source(), depth=depth) as ahead:
        async for x in ahead:
            total += await work(x)
            x.release()
    return total


async def batches(device: ta.Device, scale: float) -> None:
    """Print the batches a second of the loop, and how many times as many come from the stream."""
    rows = max(64, int(_BATCH * scale) // (4 * _COLUMNS))
    count = _BATCHES if scale >= 1 else _BATCHES // 2
    data = [np.random.default_rng(number).random((rows, _COLUMNS), np.float32) for number in range(count)]
    pooled = [device.host_empty(host.shape, host.dtype) for host in data]
    for empty, host in zip(pooled, data, strict=True):
        empty[...] = host
    weights = await device.put(np.random.default_rng(count).random((_COLUMNS, _COLUMNS), np.float32))
    work = Work(weights)
    right = await _loop(device, lambda: iter(data), work)

    def waiting(pause: float) -> Iterator[Host]:
        for host in data:
            time.sleep(pause)
            yield host

    put = once = 0.0
    for name, hosts in (("of host_empty", pooled), ("ordinary", data)):
        put, once = await _alone(device, hosts, Work(weights))
        work.times = max(1, round(put / once))
        await _compare(device, name, partial(iter, hosts), work, right, put, once * work.times)
    # Reading takes as long as `put` of the ordinary arrays, and so computing as long as both.
    work.times = max(1, round(2 * put / once))
    source = partial(waiting, put)
    await _compare(device, f"waits {put * 1e3:.1f} ms", source, work, right, 2 * put, once * work.times)


async def _compare(
    device: ta.Device, name: str, source: Source, work: Work, right: float, put: float, computing: float
) -> None:
    """Print how a loop and streams do: `put` and `computing` are the seconds of a batch for each alone."""
    count = sum(1 for _ in source())
    loop: list[float] = []
    ahead: dict[int, list[float]] = {depth: [] for depth in _DEPTHS}
    for _ in range(_ROUNDS):
        loop.append(await _time(partial(_loop, device, source, work)) / count)
        for depth, found in ahead.items():
            start = time.perf_counter()
            total = await _ahead(device, source, work, depth)
            found.append((time.perf_counter() - start) / count)
            assert np.isclose(total, right, rtol=1e-4)
    alone = f"put {put * 1e3:.2f} ms, computing {computing * 1e3:.2f} ms"
    _say(f"  {name:<15} {alone}, loop {statistics.median(loop) * 1e3:.2f} ms a batch")
    for depth, found in ahead.items():
        pairs = list(zip(loop, found, strict=True))
        hidden = statistics.median((plain - stream) / min(put, computing) for plain, stream in pairs)
        told = _quartiles([plain / stream for plain, stream in pairs])
        _say(f"  {name:<15} stream of depth {depth}: {told} of the loop, overlap {hidden:.2f}")


async def _alone(device: ta.Device, data: Sequence[Host], work: Work) -> tuple[float, float]:
    """Return the seconds of a batch for its copy alone, and for computing alone; print bare copies."""
    kept = [await device.put(host) for host in data[:4]]

    async def put() -> None:
        for host in data:
            (await device.put(host)).release()

    async def compute() -> None:
        for number in range(len(data)):
            await work(kept[number % len(kept)])

    ways: dict[str, Callable[[], Awaitable[object]]] = {"put": put, "computing once": compute}
    for name, copy in _bare(data[0]).items() if _has_cupy(device) else ():
        ways[name] = partial(_repeated, copy, len(data))
    took: list[float] = []
    for name, call in ways.items():
        await call()
        took.append(statistics.median([await _time(call) for _ in range(_ROUNDS)]) / len(data))
        _say(f"  {name + ' alone':<34} {took[-1] * 1e3:8.2f} ms a batch")
    for x in kept:
        x.release()
    return took[0], took[1]


async def _repeated(call: Callable[[], Awaitable[object]], times: int) -> None:
    for _ in range(times):
        await call()


def _has_cupy(device: ta.Device) -> bool:
    return device.info.name.startswith("cuda") and find_spec("cupy") is not None


def _quartiles(values: Sequence[float]) -> str:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{median:.2f} × ({low:.2f} to {high:.2f})"


async def _run(scale: float, name: str) -> None:
    isolations: tuple[ta.Isolation, ...] = ("inline", "process")
    for isolation in isolations:
        options = ta.DeviceOptions(isolation=isolation)
        async with ta.open_system("streaming") as system, system.open_device(name, options=options) as device:
            _say(f"{isolation}, {device.info.description}")
            await copies(device, scale)
            await batches(device, scale)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.streaming")
    parser.add_argument("scale", type=float, nargs="?", default=1.0, help="of the sizes (default: 1)")
    parser.add_argument("--device", default="cuda", help="the device (default: cuda)")
    given = parser.parse_args(arguments)
    trio.run(_run, given.scale, given.device)


if __name__ == "__main__":
    main()
