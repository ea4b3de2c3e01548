"""Operations on a device: against the bare library, and against Trio's own threads."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.fft
import trio

import trio_accel as ta

from ._harness import Benchmark, Figure, Goal, Plan, Result, alternate, per_call
from ._peers import hog_loop

__all__ = ["BENCHMARKS"]

Host: TypeAlias = npt.NDArray[np.float32]
Call: TypeAlias = Callable[[], Awaitable[object]]

_STARVED = 60.0


@asynccontextmanager
async def _device(plan: Plan) -> AsyncGenerator[ta.Device, None]:
    async with ta.open_system("benchmark") as system, system.open_device(plan.backend) as device:
        yield device


def _matrix(size: int) -> Host:
    return np.random.default_rng(size).standard_normal((size, size), dtype=np.float32)


def _bare(function: Callable[[], object]) -> Call:
    """A call that does not leave the Trio thread."""

    async def call() -> None:  # noqa: ASYNC124, ASYNC910  # async for the harness only
        function()

    return call


def _threaded(function: Callable[[], object]) -> Call:
    """A call in one of Trio's worker threads: how a program does it that has no device."""

    async def call() -> None:
        await trio.to_thread.run_sync(function)

    return call


async def gemm(size: int, calls: int, plan: Plan) -> tuple[Result, ...]:
    """Products of float32 matrices, one after the other; peer: bare `numpy.matmul`."""
    host, other = _matrix(size), _matrix(size + 1)[:size, :size].copy()
    calls = plan.count(calls)

    async def gigaflops(function: Call) -> float:
        return 2e-9 * size**3 / await per_call(function, calls)

    async with _device(plan) as device:
        a, b = await device.put(host), await device.put(other)
        ours = partial(gigaflops, lambda: ta.linalg.matmul(a, b))
        pairs = await alternate(ours, partial(gigaflops, _bare(lambda: np.matmul(host, other))), plan)
    goal = Goal(figure=Figure.RATIO, least=0.97)
    return (Result.compare(f"devices.gemm-{size}", pairs, unit="GFLOP/s", goal=goal),)


async def gemm_1024(plan: Plan) -> tuple[Result, ...]:
    """Products of float32 matrices of 1024, one after the other; peer: bare `numpy.matmul`."""
    return await gemm(1024, 10, plan)


async def gemm_2048(plan: Plan) -> tuple[Result, ...]:
    """Products of float32 matrices of 2048, one after the other; peer: bare `numpy.matmul`."""
    return await gemm(2048, 2, plan)


async def _small(
    name: str, peer: Call, plan: Plan, *, goal: Goal | None = None, busy: bool = False
) -> Result:
    """Ask for one small product at a time, and compare the microseconds."""
    calls = plan.count(20 if busy else 200)

    async def microseconds(function: Call) -> float:
        return await per_call(function, calls) * 1e6

    async with _device(plan) as device, trio.open_nursery() as nursery:
        a = await device.put(_matrix(64))
        ours = partial(microseconds, lambda: ta.linalg.matmul(a, a))
        if busy:
            nursery.start_soon(hog_loop)
        pairs = await alternate(ours, partial(microseconds, peer), plan)
        nursery.cancel_scope.cancel(reason="measured")
    return Result.compare(name, pairs, unit="µs", goal=goal)


async def matmul_64(plan: Plan) -> tuple[Result, ...]:
    """One small product (float32, 64): what asking adds to the call; peer: bare `numpy.matmul`."""
    host = _matrix(64)
    goal = Goal(figure=Figure.DIFFERENCE, most=120.0)
    return (await _small("devices.matmul-64", _bare(lambda: np.matmul(host, host)), plan, goal=goal),)


async def matmul_64_thread(plan: Plan) -> tuple[Result, ...]:
    """The same small product; peer: `numpy.matmul` by `trio.to_thread.run_sync`."""
    peer = _threaded(partial(np.matmul, _matrix(64), _matrix(64)))
    return (await _small("devices.matmul-64-thread", peer, plan),)


async def matmul_64_busy(plan: Plan) -> tuple[Result, ...]:
    """The same beside a task that hogs the loop in steps of 1 ms; peer: `trio.to_thread.run_sync`."""
    name = "devices.matmul-64-busy"
    peer = _threaded(partial(np.matmul, _matrix(64), _matrix(64)))
    with trio.move_on_after(_STARVED):
        return (await _small(name, peer, plan, busy=True),)
    # The loop gives the interpreter's lock back for microseconds only: on some days a thread never gets it.
    reason = f"the busy loop left the stream's thread no time: over {_STARVED:g} s"
    return (Result(name=name, reason=reason),)


async def _throughput(name: str, ours: Call, peer: Call, plan: Plan) -> Result:
    """Operations per second of 64 tasks that ask one library."""
    calls = plan.count(30)

    async def rate(function: Call) -> float:
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(per_call, function, calls)
        return 64 * calls / (time.perf_counter() - start)

    pairs = await alternate(partial(rate, ours), partial(rate, peer), plan)
    return Result.compare(name, pairs, unit="/s", goal=Goal(figure=Figure.OURS, least=12_000))


async def askers(plan: Plan) -> tuple[Result, ...]:
    """64 tasks ask for small operations; peer: the same calls by `trio.to_thread.run_sync`.

    One row scales vectors of 16 elements in place, the other multiplies matrices of 64.
    """
    matrix = _matrix(64)
    vector = matrix[0, :16].copy()
    async with _device(plan) as device:
        a, x = await device.put(matrix), await device.put(vector)
        scal = await _throughput(
            "devices.askers-64-scal",
            lambda: ta.linalg.scal(1.0, x),
            _threaded(partial(np.multiply, vector, np.float32(1.0), vector)),
            plan,
        )
        matmul = await _throughput(
            "devices.askers-64-matmul",
            lambda: ta.linalg.matmul(a, a),
            _threaded(partial(np.matmul, matrix, matrix)),
            plan,
        )
    return scal, matmul


async def copies(plan: Plan) -> tuple[Result, ...]:
    """Copies of 64 MiB to the device and back into a given array; peer: `numpy.copyto`, warm arrays."""
    host: Host = np.ones(max(1, plan.count(64 * 2**20) // 4), np.float32)
    target = np.zeros_like(host)

    async def gigabytes(function: Call) -> float:
        return host.nbytes / await per_call(function, 2) / 1e9

    goal = Goal(figure=Figure.RATIO, least=0.6)
    peer = partial(gigabytes, _bare(lambda: np.copyto(target, host)))
    async with _device(plan) as device:
        put = await alternate(partial(gigabytes, lambda: device.put(host)), peer, plan)
        source = await device.put(host)
        back = await alternate(partial(gigabytes, lambda: source.to_host(out=target)), peer, plan)
    return (
        Result.compare("devices.put", put, unit="GB/s", goal=goal),
        Result.compare("devices.to-host", back, unit="GB/s", goal=goal),
    )


async def rfft(plan: Plan) -> tuple[Result, ...]:
    """Real transform of 2**20 float32 samples; peer: bare `scipy.fft.rfft`."""
    host: Host = np.random.default_rng(20).standard_normal(2**20, dtype=np.float32)
    calls = plan.count(10)

    async def milliseconds(function: Call) -> float:
        return await per_call(function, calls) * 1e3

    async with _device(plan) as device:
        a = await device.put(host)
        ours = partial(milliseconds, lambda: ta.fft.rfft(a))
        pairs = await alternate(ours, partial(milliseconds, _bare(lambda: scipy.fft.rfft(host))), plan)
    return (Result.compare("devices.rfft-2**20", pairs, unit="ms"),)


BENCHMARKS = (
    Benchmark("devices.gemm-1024", gemm_1024),
    Benchmark("devices.gemm-2048", gemm_2048),
    Benchmark("devices.matmul-64", matmul_64),
    Benchmark("devices.matmul-64-thread", matmul_64_thread),
    Benchmark("devices.matmul-64-busy", matmul_64_busy),
    Benchmark("devices.askers-64", askers),
    Benchmark("devices.copies", copies),
    Benchmark("devices.rfft", rfft),
)
