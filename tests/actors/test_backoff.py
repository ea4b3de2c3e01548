"""Back-off: how long an actor that crashed waits until it is restarted."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import trio
import trio.testing
from sample_actors import Echo, Events, Number, Puppet, crash, started

from trio_accel.actors import (
    ActorRestarted,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    Intensity,
    Policy,
    Ref,
    SystemOptions,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


def delays(backoff: Backoff, count: int, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [backoff.delay(attempt, source) for attempt in range(count)]


def test_back_off_grows_from_the_base_by_the_factor_to_the_maximum() -> None:
    backoff = Backoff(initial=0.5, base=1.0, factor=2.0, maximum=5.0, jitter=0.0)
    assert delays(backoff, 6) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_back_off_without_a_base_does_not_grow() -> None:
    assert delays(Backoff(base=0.0, jitter=0.0), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("factor", [1.0, 2.0, 1e5, 1e308, math.inf])
@pytest.mark.parametrize("base", [0.0, 0.1])
def test_back_off_does_not_overflow_in_a_long_series(factor: float, base: float) -> None:
    backoff = Backoff(base=base, factor=factor, jitter=0.0)
    expected = 0.0 if base == 0 else base if factor == 1.0 else backoff.maximum
    assert backoff.delay(1_000_000, random.Random()) == expected


def test_jitter_spreads_delays_at_the_maximum() -> None:
    backoff = Backoff(base=1.0, factor=2.0, maximum=30.0, jitter=0.5)
    source = random.Random(1)
    drawn = {backoff.delay(50, source) for _ in range(20)}
    assert len(drawn) > 5
    assert max(drawn) == 30.0
    assert 15.0 <= min(drawn) < 30.0


def test_jitter_is_drawn_from_the_given_source() -> None:
    backoff = Backoff(initial=1.0, base=1.0, factor=1.0, jitter=0.25)
    same, again = delays(backoff, 200), delays(backoff, 200)
    assert same == again
    assert same != delays(backoff, 200, seed=1)
    assert all(0.75 <= delay <= 1.25 for delay in same)
    assert max(same) > 1.2
    assert min(same) < 0.8


async def crash_times(seed: int, count: int, backoff: Backoff) -> list[float]:
    times: list[float] = []

    async def start(actor: Puppet) -> None:
        times.append(trio.current_time())

    options = SystemOptions(random=random.Random(seed), intensity=Intensity(1000, 1.0))
    async with open_system("s", options=options) as system:
        ref = await system.spawn(Puppet, None, start, policy=Policy(backoff=backoff))
        for number in range(count):
            await crash(ref)
            assert await ref.ask(Number()) == number + 1
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def test_a_child_waits_its_back_off_before_it_is_restarted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    backoff = Backoff(initial=1.0, base=2.0, factor=3.0, maximum=10.0, jitter=0.0, reset_after=100.0)
    assert await crash_times(0, 4, backoff) == pytest.approx([1.0, 2.0, 6.0, 10.0])


async def test_the_jitter_comes_from_the_system_s_random(autojump_clock: trio.testing.MockClock) -> None:
    backoff = Backoff(initial=1.0, base=1.0, factor=1.0, jitter=0.5)
    first = await crash_times(7, 5, backoff)
    assert first == pytest.approx(delays(backoff, 5, seed=7))
    assert first != pytest.approx(await crash_times(8, 5, backoff))


async def test_the_back_off_begins_again_after_a_quiet_period(autojump_clock: trio.testing.MockClock) -> None:
    backoff = Backoff(initial=0.0, base=4.0, factor=2.0, maximum=100.0, jitter=0.0, reset_after=10.0)
    options = SystemOptions(intensity=Intensity(1000, 1.0))
    seen = Events()
    async with open_system("s", options=options) as system:
        system.subscribe(seen.append)
        ref = await system.spawn(Puppet, policy=Policy(backoff=backoff))
        for pause in (0, 0, 0, 0, 9.0, 11.0, 0):
            await trio.sleep(pause)
            await crash(ref)
            await ref.ask(Number())
    # The delays themselves, of up to 32 s, are not a quiet period.
    assert [event.delay for event in seen.of(ActorRestarted)] == [0.0, 4.0, 8.0, 16.0, 32.0, 0.0, 4.0]


async def test_the_back_off_is_ended_by_a_stop(autojump_clock: trio.testing.MockClock) -> None:
    async with open_system("s") as system:
        ref = await system.spawn(Puppet, policy=Policy(backoff=Backoff(initial=20.0, jitter=0.0)))
        await crash(ref)
        async with trio.open_nursery() as nursery:
            queued = await started(nursery, ref, Echo("a"))
            await ref.stop()
        assert isinstance(queued.outcome, ActorStoppedError)
    assert trio.current_time() == 0.0


async def test_the_back_off_is_ended_by_the_end_of_the_system(autojump_clock: trio.testing.MockClock) -> None:
    async with open_system("s") as system:
        ref = await system.spawn(Puppet, policy=Policy(backoff=Backoff(initial=20.0, jitter=0.0)))
        await crash(ref)
        await wait()
        assert system.tree().children[0].state == "restarting"
    assert trio.current_time() == 0.0
    assert ref.is_terminated


async def test_without_back_off_a_restart_lets_others_run_and_sees_the_end(system: ActorSystem) -> None:
    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            raise ValueError("never again")

    policy = Policy(backoff=Backoff(base=0.0), intensity=Intensity(1_000_000, 1.0))

    async def spawn_child(actor: Puppet) -> None:
        children.append(await actor.context.spawn(Puppet, None, start, policy=policy))

    children: list[Ref[Puppet]] = []
    parent = await system.spawn(Puppet, None, spawn_child, policy=policy)
    await crash(children[0])
    for _ in range(20):
        await trio.lowlevel.checkpoint()
    await parent.stop()
    assert children[0].is_terminated
