"""Asking actors: the time of a round trip, and how many there are in a second."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

import trio_accel as ta

from ._harness import Benchmark, Figure, Goal, Plan, Result, alternate, per_call
from ._peers import Channel, hog_loop
from ._traced import compare_traced

__all__ = ["BENCHMARKS", "Add", "Counter"]

_MICRO = 1e6


@attrs.frozen
class Add(ta.Request["Counter", int]):
    """Add a number; replies with the sum."""

    number: int


class Counter(ta.Actor):
    """The least that an actor can do: its cost is that of asking."""

    def __init__(self) -> None:
        self.value: int = 0

    @ta.handles(Add)
    async def add(self, message: Add) -> int:
        """Add and reply."""
        self.value += message.number
        return self.value  # noqa: ASYNC910  # its cell checkpoints for each message


@asynccontextmanager
async def _pair() -> AsyncGenerator[tuple[Callable[[], Awaitable[int]], Callable[[], Awaitable[int]]], None]:
    """One question to an idle actor, and one to an idle task behind a channel."""
    channel = Channel()
    async with ta.open_system("benchmark") as system, trio.open_nursery() as nursery:
        counter = await system.spawn(Counter)
        nursery.start_soon(channel.serve)  # noqa: ASYNC113  # what is sent before it runs waits in the channel
        yield lambda: counter.ask(Add(1)), partial(channel.ask, 1)
        nursery.cancel_scope.cancel(reason="measured")


async def _microseconds(function: Callable[[], Awaitable[object]], calls: int) -> float:
    return await per_call(function, calls) * _MICRO


async def ask(plan: Plan) -> tuple[Result, ...]:
    """Ask an idle actor; peer: a Trio memory channel and an event per question."""
    calls = plan.count(1000)
    async with _pair() as (ours, peer):
        pairs = await alternate(
            partial(_microseconds, ours, calls), partial(_microseconds, peer, calls), plan
        )
    goal = Goal(figure=Figure.RATIO, most=1.8)
    return (Result.compare("actors.ask", pairs, unit="µs", goal=goal),)


async def ask_recorded(plan: Plan) -> tuple[Result, ...]:
    """Ask an idle actor while `telemetry.record` records; peer: the same while nothing does."""
    calls = plan.count(1000)
    async with ta.open_system("benchmark") as system:
        counter = await system.spawn(Counter)

        async def microseconds() -> float:
            return await _microseconds(lambda: counter.ask(Add(1)), calls)

        async def recorded() -> float:
            with ta.telemetry.record(system):
                return await microseconds()

        pairs = await alternate(recorded, microseconds, plan)
    goal = Goal(figure=Figure.RATIO, most=1.03)
    return (Result.compare("actors.ask-recorded", pairs, unit="µs", goal=goal),)


async def ask_traced(plan: Plan) -> tuple[Result, ...]:
    """Ask an idle actor while `telemetry.trace` traces, all or one in a hundred; peer: without it."""
    calls = plan.count(500)
    async with ta.open_system("benchmark") as system:
        counter = await system.spawn(Counter)

        async def microseconds() -> float:
            return await _microseconds(lambda: counter.ask(Add(1)), calls)

        return await compare_traced("actors.ask-{}".format, system, microseconds, plan)


async def ask_busy(plan: Plan) -> tuple[Result, ...]:
    """The same beside a task that hogs the loop in steps of 1 ms: it counts passes of the loop."""
    calls = plan.count(20)
    async with _pair() as (ours, peer), trio.open_nursery() as nursery:
        nursery.start_soon(hog_loop)
        pairs = await alternate(
            partial(_microseconds, ours, calls), partial(_microseconds, peer, calls), plan
        )
        nursery.cancel_scope.cancel(reason="measured")
    return (Result.compare("actors.ask-busy", pairs, unit="µs"),)


async def askers(plan: Plan) -> tuple[Result, ...]:
    """16 tasks ask one actor at once; peer: the same through a memory channel."""
    calls = plan.count(100)

    async def rate(question: Callable[[], Awaitable[object]]) -> float:
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(per_call, question, calls)
        return 16 * calls / (time.perf_counter() - start)

    async with _pair() as (ours, peer):
        pairs = await alternate(partial(rate, ours), partial(rate, peer), plan)
    return (Result.compare("actors.askers-16", pairs, unit="/s"),)


async def ask_pykka(plan: Plan) -> tuple[Result, ...]:
    """Asks per second to an idle actor; peer: Pykka's ask of a threading actor.

    Pykka's ask blocks its thread. In the first row it blocks the Trio thread itself, which no
    program with a loop can afford, but nothing is quicker; in the second it has a worker thread.
    """
    await trio.lowlevel.checkpoint()
    names = ("actors.ask-pykka", "actors.ask-pykka-thread")
    goal = Goal(figure=Figure.RATIO, least=3.0)
    try:
        from ._pykka import PykkaCounter
    except ImportError:
        return tuple(Result(name=name, goal=goal, reason="Pykka is not installed") for name in names)
    calls = plan.count(300)
    peer = PykkaCounter.start()

    async def blocking() -> None:  # noqa: ASYNC124, ASYNC910  # blocks, as the docstring says
        peer.ask(1)

    async def threaded() -> None:
        await trio.to_thread.run_sync(peer.ask, 1)

    async def rate(question: Callable[[], Awaitable[object]]) -> float:
        return 1 / await per_call(question, calls)

    results: list[Result] = []
    try:
        async with _pair() as (ours, _):
            for name, theirs in zip(names, (blocking, threaded), strict=True):
                pairs = await alternate(partial(rate, ours), partial(rate, theirs), plan)
                results.append(Result.compare(name, pairs, unit="/s", goal=goal))
    finally:
        peer.stop()
    return tuple(results)


BENCHMARKS = (
    Benchmark("actors.ask", ask),
    Benchmark("actors.ask-recorded", ask_recorded),
    Benchmark("actors.ask-traced", ask_traced),
    Benchmark("actors.ask-busy", ask_busy),
    Benchmark("actors.askers-16", askers),
    Benchmark("actors.ask-pykka", ask_pykka),
)
