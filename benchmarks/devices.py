"""Operations on a device: against the bare library, and against Trio's own threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.fft
import trio

import trio_accel as ta

from ._harness import Figure, Goal, Isolation, Result, alternate, per_call
from ._mixed import mixed_matrices, mixed_works, repeated_matrix
from ._peers import hog_loop
from ._stand import Stand, on_device
from ._statistics import Summary
from ._traced import compare_traced

__all__ = ["BENCHMARKS"]

Host: TypeAlias = npt.NDArray[np.float32]
Call: TypeAlias = Callable[[], Awaitable[object]]

_STARVED = 60.0
_BLAS_RESTS = 0.1
# Each shape once.
_MIXED_CALLS = 40
_BUSY = "devices.matmul-64-busy"
# What asking may add to a small product, in microseconds.
_MOST_ADDED: dict[Isolation, float] = {"inline": 120.0, "process": 220.0}
_COPIED_MIB: dict[Isolation, int] = {"inline": 64, "process": 256}


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


async def gemm(size: int, calls: int, stand: Stand) -> tuple[Result, ...]:
    """Products of float32 matrices, one after the other; peer: bare `numpy.matmul`."""
    host, other = _matrix(size), _matrix(size + 1)[:size, :size].copy()
    calls = stand.plan.count(calls)

    async def gigaflops(function: Call) -> float:
        # Threads of the BLAS look for work for a while: those of the other process would be in the way.
        await stand.plan.rest(_BLAS_RESTS)
        return 2e-9 * size**3 / await per_call(function, calls)

    a, b = await stand.device.put(host), await stand.device.put(other)
    ours = partial(gigaflops, lambda: ta.linalg.matmul(a, b))
    pairs = await alternate(ours, partial(gigaflops, _bare(lambda: np.matmul(host, other))), stand.plan)
    goal = Goal(figure=Figure.RATIO, least=0.97) if stand.isolation == "inline" else None
    return (Result.compare(stand.name(f"devices.gemm-{size}"), pairs, unit="GFLOP/s", goal=goal),)


async def gemm_1024(stand: Stand) -> tuple[Result, ...]:
    """Products of float32 matrices of 1024, one after the other; peer: bare `numpy.matmul`."""
    return await gemm(1024, 10, stand)


async def gemm_2048(stand: Stand) -> tuple[Result, ...]:
    """Products of float32 matrices of 2048, one after the other; peer: bare `numpy.matmul`."""
    return await gemm(2048, 2, stand)


async def _small(
    name: str, peer: Call, stand: Stand, *, goal: Goal | None = None, busy: bool = False
) -> Result:
    """Ask for one small product at a time, and compare the microseconds."""
    calls = stand.plan.count(20 if busy else 200)

    async def microseconds(function: Call) -> float:
        return await per_call(function, calls) * 1e6

    async with trio.open_nursery() as nursery:
        a = await stand.device.put(_matrix(64))
        ours = partial(microseconds, lambda: ta.linalg.matmul(a, a))
        if busy:
            nursery.start_soon(hog_loop)
        pairs = await alternate(ours, partial(microseconds, peer), stand.plan)
        nursery.cancel_scope.cancel(reason="measured")
    return Result.compare(stand.name(name), pairs, unit="µs", goal=goal)


async def matmul_64(stand: Stand) -> tuple[Result, ...]:
    """One small product (float32, 64): what asking adds to the call; peer: bare `numpy.matmul`."""
    host = _matrix(64)
    goal = Goal(figure=Figure.DIFFERENCE, most=_MOST_ADDED[stand.isolation])
    return (await _small("devices.matmul-64", _bare(lambda: np.matmul(host, host)), stand, goal=goal),)


async def matmul_64_recorded(stand: Stand) -> tuple[Result, ...]:
    """The same small product while `telemetry.record` records; peer: the same while nothing does."""
    calls, a = stand.plan.count(200), await stand.device.put(_matrix(64))

    async def microseconds() -> float:
        return await per_call(lambda: ta.linalg.matmul(a, a), calls) * 1e6

    async def recorded() -> float:
        with ta.telemetry.record(stand.device.system):
            return await microseconds()

    pairs = await alternate(recorded, microseconds, stand.plan)
    goal = Goal(figure=Figure.RATIO, most=1.03)
    return (Result.compare(stand.name("devices.matmul-64-recorded"), pairs, unit="µs", goal=goal),)


async def matmul_64_traced(stand: Stand) -> tuple[Result, ...]:
    """The same small product while `telemetry.trace` traces, all or one in a hundred; peer: without it."""
    calls, a = stand.plan.count(100), await stand.device.put(_matrix(64))

    async def microseconds() -> float:
        return await per_call(lambda: ta.linalg.matmul(a, a), calls) * 1e6

    def name(end: str) -> str:
        return stand.name(f"devices.matmul-64-{end}")

    return await compare_traced(name, stand.device.system, microseconds, stand.plan)


async def matmul_64_thread(stand: Stand) -> tuple[Result, ...]:
    """The same small product; peer: `numpy.matmul` by `trio.to_thread.run_sync`."""
    peer = _threaded(partial(np.matmul, _matrix(64), _matrix(64)))
    return (await _small("devices.matmul-64-thread", peer, stand),)


async def matmul_64_busy(stand: Stand) -> tuple[Result, ...]:
    """The same beside a task that hogs the loop in steps of 1 ms; peer: `trio.to_thread.run_sync`.

    In a worker process ours has no part in the interpreter's lock that the loop hogs, and the peer's thread
    may get it never: so ours is measured alone there.
    """
    if stand.isolation == "process":
        return (await _alone_beside_a_hog(stand),)
    peer = _threaded(partial(np.matmul, _matrix(64), _matrix(64)))
    most = 2.0 if stand.plan.is_quick else _STARVED
    with trio.move_on_after(most):
        return (await _small(_BUSY, peer, stand, busy=True),)
    # The loop gives the interpreter's lock back for microseconds only: on some days a thread never gets it.
    reason = f"the busy loop left the threads no time: over {most:g} s"
    return (Result(name=stand.name(_BUSY), reason=reason),)


async def _alone_beside_a_hog(stand: Stand) -> Result:
    calls, took = stand.plan.count(20), list[float]()
    a = await stand.device.put(_matrix(64))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hog_loop)
        for number in range(stand.plan.warmups + stand.plan.pairs):
            stand.plan.watch(max(0, number - stand.plan.warmups), stand.plan.pairs)
            took.append(await per_call(lambda: ta.linalg.matmul(a, a), calls) * 1e6)
        nursery.cancel_scope.cancel(reason="measured")
    return Result(name=stand.name(_BUSY), unit="µs", ours=Summary.of(took[stand.plan.warmups :]))


async def _throughput(name: str, ours: Call, peer: Call, stand: Stand) -> Result:
    """Operations per second of 64 tasks that ask one library."""
    calls = stand.plan.count(30)

    async def rate(function: Call) -> float:
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(per_call, function, calls)
        return 64 * calls / (time.perf_counter() - start)

    pairs = await alternate(partial(rate, ours), partial(rate, peer), stand.plan)
    goal = Goal(figure=Figure.OURS, least=12_000)
    return Result.compare(stand.name(name), pairs, unit="/s", goal=goal)


async def askers(stand: Stand) -> tuple[Result, ...]:
    """64 tasks ask for small operations; peer: the same calls by `trio.to_thread.run_sync`.

    One row scales vectors of 16 elements in place, the other multiplies matrices of 64.
    """
    matrix = _matrix(64)
    vector = matrix[0, :16].copy()
    a, x = await stand.device.put(matrix), await stand.device.put(vector)
    scal = await _throughput(
        "devices.askers-64-scal",
        lambda: ta.linalg.scal(1.0, x),
        _threaded(partial(np.multiply, vector, np.float32(1.0), vector)),
        stand,
    )
    matmul = await _throughput(
        "devices.askers-64-matmul",
        lambda: ta.linalg.matmul(a, a),
        _threaded(partial(np.matmul, matrix, matrix)),
        stand,
    )
    return scal, matmul


async def copies(stand: Stand) -> tuple[Result, ...]:
    """Copies to the device and back into a given array; peer: `numpy.copyto`, warm arrays.

    Of 64 MiB inline and of 256 MiB to and from a worker process.
    """
    plan, device = stand.plan, stand.device
    host: Host = np.ones(plan.count(_COPIED_MIB[stand.isolation] * 2**18), np.float32)
    target = np.zeros_like(host)

    async def gigabytes(function: Call) -> float:
        return host.nbytes / await per_call(function, 2) / 1e9

    goal = Goal(figure=Figure.RATIO, least=0.6)
    peer = partial(gigabytes, _bare(lambda: np.copyto(target, host)))
    put = await alternate(partial(gigabytes, lambda: device.put(host)), peer, plan)
    source = await device.put(host)
    back = await alternate(partial(gigabytes, lambda: source.to_host(out=target)), peer, plan)
    return (
        Result.compare(stand.name("devices.put"), put, unit="GB/s", goal=goal),
        Result.compare(stand.name("devices.to-host"), back, unit="GB/s", goal=goal),
    )


async def rfft(stand: Stand) -> tuple[Result, ...]:
    """Real transform of 2**20 float32 samples; peer: bare `scipy.fft.rfft`."""
    host: Host = np.random.default_rng(20).standard_normal(2**20, dtype=np.float32)
    calls = stand.plan.count(10)

    async def milliseconds(function: Call) -> float:
        return await per_call(function, calls) * 1e3

    a = await stand.device.put(host)
    ours = partial(milliseconds, lambda: ta.fft.rfft(a))
    peer = partial(milliseconds, _bare(lambda: scipy.fft.rfft(host)))
    pairs = await alternate(ours, peer, stand.plan)
    return (Result.compare(stand.name("devices.rfft-2**20"), pairs, unit="ms"),)


async def mixed(stand: Stand) -> tuple[Result, ...]:
    """Products and transforms of 40 mixed float32 shapes, with fresh results; peer: bare NumPy and SciPy.

    The row of ``repeat`` is the product of one matrix of 512 again and again.
    """
    works, plan = await mixed_works(stand.device), stand.plan
    calls, matrices, repeated = plan.count(_MIXED_CALLS), mixed_matrices(), repeated_matrix()
    products, transforms = itertools.cycle(matrices), itertools.cycle(matrices)

    def multiply() -> object:
        matrix = next(products)
        return np.matmul(matrix, matrix.T)

    peers: dict[str, Callable[[], object]] = {
        "matmul": multiply,
        "rfft": lambda: scipy.fft.rfft(next(transforms)),
        "repeat": lambda: np.matmul(repeated, repeated),
    }

    async def microseconds(function: Call) -> float:
        await plan.rest(_BLAS_RESTS)
        return await per_call(function, calls) * 1e6

    rows: list[Result] = []
    for work, ask in works.items():
        pairs = await alternate(partial(microseconds, ask), partial(microseconds, _bare(peers[work])), plan)
        rows.append(Result.compare(stand.name(f"devices.mixed-{work}"), pairs, unit="µs"))
    return tuple(rows)


async def requests(stand: Stand) -> tuple[Result, ...]:
    """A whole request: 8 × 512 float32 of the host in, one or three operations, a host array out.

    Peer: the same operations awaited one by one.
    """
    calls, weights = stand.plan.count(100), _matrix(512)
    x, w = weights[:8].copy(), await stand.device.put(weights)
    linalg, relu, softmax = ta.linalg, ta.nn.relu, ta.arrays.softmax

    async def one_by_one() -> Host:
        return await (await linalg.matmul(x, w)).to_host()

    async def three_by_three() -> Host:
        hidden = await relu(await linalg.matmul(x, w))
        return await (await softmax(await linalg.matmul(hidden, w), axis=1)).to_host()

    async def microseconds(function: Call) -> float:
        await stand.plan.rest(_BLAS_RESTS)
        return await per_call(function, calls) * 1e6

    def one() -> Awaitable[Host]:
        return linalg.matmul(x, w).to_host()

    def three() -> Awaitable[Host]:
        return softmax(relu(linalg.matmul(x, w)) @ w, axis=1).to_host()

    works: dict[str, tuple[Call, Call]] = {"one": (one, one_by_one), "three": (three, three_by_three)}
    rows: list[Result] = []
    for name, (ours, steps) in works.items():
        pairs = await alternate(partial(microseconds, ours), partial(microseconds, steps), stand.plan)
        rows.append(Result.compare(stand.name(f"devices.request-{name}"), pairs, unit="µs"))
    return tuple(rows)


BENCHMARKS = (
    *on_device("devices.gemm-1024", gemm_1024),
    *on_device("devices.gemm-2048", gemm_2048),
    *on_device("devices.matmul-64", matmul_64),
    *on_device("devices.matmul-64-recorded", matmul_64_recorded),
    *on_device("devices.matmul-64-traced", matmul_64_traced),
    *on_device("devices.matmul-64-thread", matmul_64_thread),
    *on_device(_BUSY, matmul_64_busy),
    *on_device("devices.askers-64", askers),
    *on_device("devices.copies", copies),
    *on_device("devices.rfft", rfft),
    *on_device("devices.mixed", mixed),
    *on_device("devices.request", requests),
)
