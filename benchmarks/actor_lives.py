"""What actors cost while they do nothing, when they crash, and in the long run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import attrs
import trio

import trio_accel as ta

from ._harness import Benchmark, Figure, Goal, Plan, Result
from ._statistics import Pairs, Summary

__all__ = ["BENCHMARKS", "run_child"]

_ROOT = Path(__file__).parents[1]


@attrs.frozen
class Ping(ta.Request["Fragile", int]):
    """Ask for the number of the incarnation."""


@attrs.frozen
class Crash(ta.Request["Fragile", int]):
    """Crash; tells when by the clock."""

    clock: list[float]


class Fragile(ta.Actor):
    """Crashes when asked to."""

    @ta.handles(Ping)
    async def ping(self, message: Ping) -> int:
        """Tell how often it was restarted."""
        return self.context.restart.number  # noqa: ASYNC910  # its cell checkpoints for each message

    @ta.handles(Crash)
    async def crash(self, message: Crash) -> int:
        """Note the time and crash."""
        message.clock.append(time.perf_counter())
        raise RuntimeError("a crash that was asked for")


async def restart(plan: Plan) -> tuple[Result, ...]:
    """From the crash of an actor to the first reply of its next incarnation, without back-off."""
    policy = ta.Policy(backoff=ta.Backoff(base=0.0))
    times: list[float] = []
    options = ta.SystemOptions(intensity=ta.Intensity(1_000_000, 1.0))
    async with ta.open_system("benchmark", options=options) as system:
        fragile = await system.spawn(Fragile, policy=policy)
        repetitions = max(plan.pairs, plan.count(400))
        for number in range(plan.warmups + repetitions):
            clock: list[float] = []
            try:
                await fragile.ask(Crash(clock))
            except ta.ActorFailedError:
                incarnation = await fragile.ask(Ping())
                times.append((time.perf_counter() - clock[0]) * 1e3)
                assert incarnation == number + 1
    goal = Goal(figure=Figure.OURS, most=1.0)
    ours = Summary.of(times[plan.warmups :])
    return (Result(name="actors.restart", unit="ms", ours=ours, goal=goal),)


async def idle(plan: Plan) -> tuple[Result, ...]:
    """Spawn 10 000 actors and leave them idle; peer: 10 000 tasks, each at a memory channel of its own.

    One row is the time for all of them, the other the memory for each.
    """
    await trio.lowlevel.checkpoint()
    count = plan.count(10_000)
    ours: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for number in range(plan.pairs):
        plan.watch(number, plan.pairs)
        ours.append(await run_child("idle-actors", count))
        peer.append(await run_child("idle-tasks", count))
    seconds = Pairs(
        ours=tuple(figures["seconds"] for figures in ours), peer=tuple(figures["seconds"] for figures in peer)
    )
    memory = Pairs(
        ours=tuple(figures["bytes_each"] / 1024 for figures in ours),
        peer=tuple(figures["bytes_each"] / 1024 for figures in peer),
    )
    # The bound is for 10 000 and shrinks with a shorter plan, so that its verdict means the same.
    in_time = Goal(figure=Figure.OURS, most=2.0 * count / 10_000)
    small = Goal(figure=Figure.OURS, most=12.0)
    return (
        Result.compare("actors.idle-time", seconds, unit="s", goal=in_time),
        Result.compare("actors.idle-memory", memory, unit="KiB", goal=small),
    )


async def resident(plan: Plan) -> tuple[Result, ...]:
    """Growth of resident memory from ask 100 000 to ask 1 000 000, in a process of its own; no peer."""
    await trio.lowlevel.checkpoint()
    times = min(plan.pairs, 3)
    grown: list[dict[str, float]] = []
    for number in range(times):
        plan.watch(number, times)
        grown.append(await run_child("asks", plan.count(100_000), plan.count(1_000_000)))
    ours = Summary.of([figures["growth"] / 2**20 for figures in grown])
    goal = Goal(figure=Figure.OURS, most=1.0)
    return (Result(name="actors.resident", unit="MiB", ours=ours, goal=goal),)


async def run_child(*arguments: object) -> dict[str, float]:
    """Measure in a process of its own; see `_child`."""
    command = [sys.executable, "-m", "benchmarks._child", *map(str, arguments)]
    finished = await trio.run_process(command, capture_stdout=True, cwd=_ROOT)
    figures: dict[str, float] = json.loads(finished.stdout)
    return figures


BENCHMARKS = (
    Benchmark("actors.restart", restart),
    Benchmark("actors.idle", idle),
    Benchmark("actors.resident", resident),
)
