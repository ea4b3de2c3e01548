"""Work that keeps a CUDA device busy: how much of it is left by asking."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import trio

import trio_accel as ta

from ._cuda_stand import matrix, on_cuda
from ._harness import Figure, Goal, Isolation, Plan, Result, alternate, per_call
from ._stand import Stand
from .rivals import Rival, banded, open_rival

__all__ = ["BENCHMARKS"]

# So few that a row is short: whoever computes beside us on the host is then as he was at its ends.
_IN_FLIGHT, _SINGLES = 8, 10
_MATRIX, _SAMPLES, _ROWS, _BYTES = 8192, 26, 10_000_000, 256 << 20
_MOST_MORE: dict[Isolation, float] = {"inline": 40.0, "process": 110.0}

Call = Callable[[], Awaitable[object]]


@attrs.frozen(kw_only=True)
class Work:
    """Something large.

    Attributes:
        name: Ending of its rows.
        rival: What the rival calls it.
        size: Its size, in the rival's terms.
        make: Puts the operands; returns what asks once.
        each: How often each of those in flight asks.
        least: The goal: how much of the bare library's rate is left.
    """

    name: str
    rival: str
    size: int
    make: Callable[[ta.Device, int], Awaitable[Call]]
    each: int = 16
    least: float = 0.97


async def _gemm(dtype: Any, device: ta.Device, size: int) -> Call:
    a = await device.put(matrix(size, dtype))
    return lambda: ta.linalg.matmul(a, a)


async def _fused(device: ta.Device, size: int) -> Call:
    a = await device.put(matrix(size, ml_dtypes.bfloat16))
    return lambda: ta.linalg.fused_matmul(a, a, None, a[0], "relu")


async def _float8(device: ta.Device, size: int) -> Call:
    a = await device.put(matrix(size, ml_dtypes.float8_e4m3fn))
    return lambda: ta.linalg.fused_matmul(a, ta.linalg.matrix_transpose(a))


async def _fft(device: ta.Device, size: int) -> Call:
    a = await device.put(np.full(4 * size, 0x3F80, np.uint16).view(np.complex64))
    return lambda: ta.fft.fft(a)


async def _spmv(device: ta.Device, rows: int) -> Call:
    # Checking that a matrix of this size is one takes SciPy longer than all that is measured.
    indptr, indices, data = [await device.put(part) for part in await trio.to_thread.run_sync(banded, rows)]
    sparse, x = ta.sparse.CsrMatrix((rows, rows), indptr, indices, data), await device.put(_ones(rows))
    return lambda: ta.sparse.spmv(sparse, x)


async def _put(device: ta.Device, nbytes: int) -> Call:
    host = device.host_empty((nbytes,), np.uint8)
    host[...] = 1
    await trio.lowlevel.checkpoint()
    return lambda: device.put(host)


async def _to_host(device: ta.Device, nbytes: int) -> Call:
    host = device.host_empty((nbytes,), np.uint8)
    host[...] = 1
    source = await device.put(host)
    return lambda: source.to_host(out=host)


def _ones(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.ones(count, np.float32)


def _works(plan: Plan) -> tuple[Work, ...]:
    """All of them, of a size that a shorter plan makes smaller."""
    scale = plan.scale
    side = max(16, round(_MATRIX * math.sqrt(scale) if scale > 0.01 else _MATRIX * scale))
    samples = 1 << max(6, _SAMPLES + math.floor(math.log2(scale)))
    bfloat16: Any = ml_dtypes.bfloat16
    return (
        Work(name="gemm-bf16", rival="gemm_bf16", size=side, make=partial(_gemm, bfloat16)),
        Work(name="gemm-f32", rival="gemm_f32", size=side, make=partial(_gemm, np.float32), each=4),
        Work(name="fused-bf16", rival="fused_bf16", size=side, make=_fused),
        Work(name="fused-f8", rival="fused_f8", size=side, make=_float8, least=0.95),
        Work(name="fft", rival="fft", size=samples, make=_fft),
        # A third of a millisecond each: with fewer the beginning counts, when nothing is in flight yet.
        Work(name="spmv", rival="spmv", size=plan.count(_ROWS), make=_spmv, each=64),
        Work(name="put", rival="put", size=plan.count(_BYTES), make=_put),
        Work(name="to-host", rival="to_host", size=plan.count(_BYTES), make=_to_host),
    )


async def bandwidth(stand: Stand) -> tuple[Result, ...]:
    """Large work with 8 in flight, and one at a time; peer: the bare library, in a loop or waited for.

    One at a time it is asked for 10 times in a row. A row has the median of these, and another the first of
    them, which comes after a pause: by then both sides have slept, and it has no goal.

    Products of 8192 in bfloat16 and float32, one with a bias and relu, and one of float8; a transform of
    2**26 samples of complex64, a product with a sparse matrix of 10**8 values, and copies of 256 MiB from
    and to host arrays of the device.
    """
    rows: list[Result] = []
    async with open_rival("bare") as rival:
        for work in _works(stand.plan):
            rows += await _compare(work, rival, stand)
            # What it has put is given back before the next.
            await stand.device.synchronize()
    return tuple(rows)


async def _compare(work: Work, rival: Rival, stand: Stand) -> tuple[Result, ...]:
    ask, plan = await work.make(stand.device, work.size), stand.plan
    # The first is checked, planned or compiled.
    await ask()
    bare: dict[str, str | int] = {"work": work.rival, "size": work.size}

    async def rate() -> float:
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(_IN_FLIGHT):
                nursery.start_soon(per_call, ask, work.each)
        return _IN_FLIGHT * work.each / (time.perf_counter() - start)

    first, bare_first = 0.0, 0.0
    firsts: list[tuple[float, float]] = []

    async def single() -> float:
        nonlocal first
        times: list[float] = []
        for _ in range(_SINGLES):
            start = time.perf_counter()
            await ask()
            times.append((time.perf_counter() - start) * 1e6)
        first = times[0]
        return statistics.median(times)

    async def bare_single() -> float:
        nonlocal bare_first
        times = await rival.measure_each("singles", **bare, calls=_SINGLES)
        bare_first = times[0] * 1e6
        return statistics.median(times) * 1e6

    bare_rate = partial(rival.measure, "rate", **bare, calls=_IN_FLIGHT * work.each)
    # Where the device is busy all the time, no processor's speed matters.
    many = await alternate(rate, bare_rate, attrs.evolve(plan, patience=0.0))
    one = await alternate(single, bare_single, plan, on_pair=lambda: firsts.append((first, bare_first)))
    of_firsts = attrs.evolve(
        one, ours=tuple([ours for ours, _ in firsts]), peer=tuple([peer for _, peer in firsts])
    )
    name = stand.name("cuda.bandwidth")
    least = Goal(figure=Figure.RATIO, least=work.least)
    most = Goal(figure=Figure.DIFFERENCE, most=_MOST_MORE[stand.isolation])
    return (
        Result.compare(f"{name}-{work.name}", many, unit="/s", goal=least),
        Result.compare(f"{name}-{work.name}-single", one, unit="µs", goal=most),
        Result.compare(f"{name}-{work.name}-first", of_firsts, unit="µs"),
    )


BENCHMARKS = on_cuda("cuda.bandwidth", bandwidth)
