"""The three strategies: who is ended and started again, in which order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Crash,
    Do,
    Echo,
    Events,
    Gate,
    Number,
    Puppet,
    crash,
    raises_group,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorFailedError,
    ActorRestarted,
    ActorRestartingError,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    Directive,
    Intensity,
    Policy,
    Ref,
    Restart,
    Strategy,
    SupervisorScope,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked
MANY = Intensity(1000, 5.0)
SEVERAL = [Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE]


class Family:
    """Children of one supervisor that note their begins and ends in one log."""

    def __init__(self, scope: SupervisorScope) -> None:
        self.scope = scope
        self.log: list[str] = []

    async def spawn(self, name: str, *, start: Any = None, end: Any = None, **options: Any) -> Ref[Puppet]:
        options.setdefault("policy", AT_ONCE)
        return await self.scope.spawn(Puppet, self.log, start, end, name=name, **options)

    async def spawn_all(self, names: str) -> list[Ref[Puppet]]:
        refs = [await self.spawn(name) for name in names]
        self.log.clear()
        return refs

    async def numbers(self, refs: list[Ref[Puppet]]) -> list[int]:
        return [await ref.ask(Number()) for ref in refs]


@asynccontextmanager
async def family(
    system: ActorSystem, strategy: Strategy, intensity: Intensity = MANY
) -> AsyncGenerator[Family, None]:
    async with system.open_supervisor("f", strategy=strategy, intensity=intensity) as scope:
        yield Family(scope)


EXPECTED: Mapping[Strategy, list[str]] = {
    Strategy.ONE_FOR_ONE: ["-b0", "+b1"],
    Strategy.ONE_FOR_ALL: ["-b0", "-d0", "-c0", "-a0", "+a1", "+b1", "+c1", "+d1"],
    Strategy.REST_FOR_ONE: ["-b0", "-d0", "-c0", "+b1", "+c1", "+d1"],
}


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_ends_in_reverse_and_starts_in_start_order(system: ActorSystem, strategy: Strategy) -> None:
    async with family(system, strategy) as f:
        _, b, *_ = refs = await f.spawn_all("abcd")
        await crash(b)
        await f.numbers(refs)
        assert f.log == EXPECTED[strategy]


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_dynamic_children_take_part_in_start_order(system: ActorSystem, strategy: Strategy) -> None:
    async with family(system, strategy) as f:
        a, b, c = await f.spawn_all("abc")
        await a.stop()
        d = await f.spawn("d")
        f.log.clear()
        await crash(c)
        await f.numbers([b, c, d])
        assert (
            f.log
            == {
                Strategy.ONE_FOR_ONE: ["-c0", "+c1"],
                Strategy.ONE_FOR_ALL: ["-c0", "-d0", "-b0", "+b1", "+c1", "+d1"],
                Strategy.REST_FOR_ONE: ["-c0", "-d0", "+c1", "+d1"],
            }[strategy]
        )


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_children_of_an_actor_follow_the_strategy_of_its_policy(
    system: ActorSystem, strategy: Strategy
) -> None:
    log: list[str] = []
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        spawn = actor.context.spawn
        children.extend([await spawn(Puppet, log, name=name, policy=AT_ONCE) for name in "abcd"])

    await system.spawn(Puppet, None, start, name="p", policy=Policy(strategy=strategy))
    log.clear()
    await crash(children[1])
    for child in children:
        await child.ask(Number())
    assert log == EXPECTED[strategy]


async def test_the_strategy_of_the_system_itself() -> None:
    from trio_accel.actors import SystemOptions

    log: list[str] = []
    async with open_system("s", options=SystemOptions(strategy=Strategy.ONE_FOR_ALL)) as system:
        a, b = [await system.spawn(Puppet, log, name=name, policy=AT_ONCE) for name in "ab"]
        log.clear()
        await crash(a)
        assert [await ref.ask(Number()) for ref in (a, b)] == [1, 1]
        assert log == ["-a0", "-b0", "+a1", "+b1"]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_sibling_s_running_ask_fails_caused_by_the_restart_and_its_queue_is_kept(
    system: ActorSystem, strategy: Strategy
) -> None:
    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a, b = await f.spawn_all("ab")
        gate = Gate()
        running = await started(nursery, b, Do(gate))
        queued = await started(nursery, b, Number())
        await crash(a)
        await wait()
        assert isinstance(running.outcome, ActorFailedError)
        cause = running.outcome.__cause__
        assert isinstance(cause, ActorRestartingError)
        assert cause.path == "s/f/b"
        assert gate.ended == "Cancelled"
        assert queued.outcome == 1


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_temporary_siblings_are_ended_and_not_started_again(
    system: ActorSystem, strategy: Strategy
) -> None:
    async with family(system, strategy) as f:
        a = await f.spawn("a")
        temporary = await f.spawn("t", restart=Restart.TEMPORARY)
        c = await f.spawn("c")
        f.log.clear()
        await crash(a)
        assert await f.numbers([a, c]) == [1, 1]
        assert f.log == ["-a0", "-c0", "-t0", "+a1", "+c1"]
        assert (await temporary.wait_terminated()).reason == "a sibling failed"


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_transient_siblings_are_started_again(system: ActorSystem, strategy: Strategy) -> None:
    async with family(system, strategy) as f:
        a = await f.spawn("a")
        b = await f.spawn("b", restart=Restart.TRANSIENT)
        await crash(a)
        assert await f.numbers([a, b]) == [1, 1]


@pytest.mark.parametrize("strategy", SEVERAL)
@pytest.mark.parametrize("kind", ["temporary", "stop"])
async def test_a_child_without_restarts_does_not_affect_its_siblings(
    system: ActorSystem, strategy: Strategy, kind: str
) -> None:
    async with family(system, strategy) as f:
        if kind == "temporary":
            a = await f.spawn("a", restart=Restart.TEMPORARY)
        else:
            a = await f.spawn("a", policy=Policy(directives={BoomError: Directive.STOP}))
        b = await f.spawn("b")
        await crash(a)
        await a.wait_terminated()
        await wait()
        assert await b.ask(Number()) == 0


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_escalation_fails_the_supervisor_and_stops_everyone(
    system: ActorSystem, strategy: Strategy
) -> None:
    with raises_group() as caught:
        async with family(system, strategy) as f:
            a = await f.spawn("a", policy=Policy(directives={BoomError: Directive.ESCALATE}))
            b = await f.spawn("b")
            await crash(a)
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert isinstance(failed, ActorFailedError)
    assert b.is_terminated


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_one_failure_is_one_restart_for_the_intensity(system: ActorSystem, strategy: Strategy) -> None:
    with raises_group() as caught:
        async with family(system, strategy, Intensity(2, 5.0)) as f:
            refs = await f.spawn_all("abc")
            for number in (1, 2):
                await crash(refs[0])
                assert await f.numbers(refs) == [number] * 3
            await crash(refs[0])
            await trio.sleep_forever()
    assert "allows 2 restarts within 5 s" in str(caught.value.exceptions[0])
    assert f.log[-2:] == ["-c2", "-b2"]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_several_failures_at_once(system: ActorSystem, strategy: Strategy) -> None:
    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        refs = await f.spawn_all("abc")
        for ref in refs:
            nursery.start_soon(crash, ref)
        await wait()
        numbers = await f.numbers(refs)
        assert sorted(f.log[:3]) == ["-a0", "-b0", "-c0"]
        if strategy is Strategy.ONE_FOR_ALL:
            assert numbers == [1, 1, 1]
            assert f.log[3:] == ["+a1", "+b1", "+c1"]
        else:
            # The order of the three is Trio's: one after the first takes its successors along once more.
            assert numbers[0] == 1
            assert numbers == sorted(numbers)


async def test_rest_for_one_a_later_failure_takes_its_turn_after_an_earlier_one(system: ActorSystem) -> None:
    """b and d fail at once: d's restart follows b's, which took d along."""
    async with family(system, Strategy.REST_FOR_ONE) as f, trio.open_nursery() as nursery:
        refs = await f.spawn_all("abcd")
        for ref in (refs[3], refs[1]):
            nursery.start_soon(crash, ref)
        await wait()
        numbers = await f.numbers(refs)
        assert numbers[:3] == [0, 1, 1]
        assert numbers[3] in (1, 2)


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_failure_during_a_restart_is_seen_to_after_it(
    system: ActorSystem, strategy: Strategy
) -> None:
    blocked = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number == 1:
            await blocked(actor)

    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a = await f.spawn("a")
        b = await f.spawn("b", start=start)
        f.log.clear()
        await crash(a)
        await blocked.entered.wait()
        # a runs again and fails, while b is still starting.
        nursery.start_soon(crash, a)
        await wait()
        assert f.log == ["-a0", "-b0", "+a1", "-a1"]
        blocked.open.set()
        await wait()
        assert await f.numbers([a, b]) == [2, 2]
        assert f.log[4:] == ["+b1", "-b1", "+a2", "+b2"]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_child_that_fails_to_start_again_counts_and_is_tried_again(
    system: ActorSystem, strategy: Strategy
) -> None:
    attempts: list[int] = []

    async def start(actor: Puppet) -> None:
        attempts.append(actor.context.restart.number)
        if actor.context.restart.number in (1, 2):
            raise ValueError("not yet")

    async with family(system, strategy) as f:
        a = await f.spawn("a")
        b = await f.spawn("b", start=start)
        c = await f.spawn("c")
        f.log.clear()
        await crash(a)
        await wait()
        assert attempts == [0, 1, 2, 3]
        numbers = await f.numbers([a, b, c])
        assert numbers == ([3, 3, 1] if strategy is Strategy.ONE_FOR_ALL else [1, 3, 1])


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_child_that_never_starts_again_fails_the_supervisor(
    system: ActorSystem, strategy: Strategy
) -> None:
    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            raise ValueError("never")

    with raises_group() as caught:
        async with family(system, strategy, Intensity(3, 5.0)) as f:
            a = await f.spawn("a")
            b = await f.spawn("b", start=start)
            await crash(a)
            await trio.sleep_forever()
    assert "s/f/b failed with ValueError: never, and s/f allows 3 restarts" in str(caught.value.exceptions[0])
    assert a.is_terminated
    assert b.is_terminated


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_child_ended_by_a_failed_restart_lets_its_siblings_start(
    system: ActorSystem, strategy: Strategy
) -> None:
    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            raise BoomError("for good")

    async with family(system, strategy) as f:
        a = await f.spawn("a")
        b = await f.spawn("b", start=start, policy=Policy(directives={BoomError: Directive.STOP}))
        c = await f.spawn("c")
        await crash(a)
        await b.wait_terminated()
        assert await f.numbers([a, c]) == [1, 1]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_sibling_that_does_not_end_fails_the_supervisor(
    system: ActorSystem, strategy: Strategy, autojump_clock: trio.testing.MockClock
) -> None:
    async def act(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100.0)

    with raises_group() as caught:
        async with family(system, strategy) as f, trio.open_nursery() as nursery:
            a = await f.spawn("a")
            b = await f.spawn("b", policy=Policy(grace=2.0))
            start_ask(nursery, b, Do(act))
            await wait()
            await crash(a)
            try:
                await trio.sleep_forever()
            finally:
                assert trio.current_time() == pytest.approx(2.0)
                assert system.tree().find("s/f/b").state == "quarantined"
                assert system.quarantined == 1
    assert caught.group_contains(ActorFailedError, match="it does not end although it was cancelled")
    # The supervisor's own end waits for it, and it is not restarted.
    assert trio.current_time() == pytest.approx(100.0)
    assert (await b.wait_terminated()).reason == "a sibling failed; it did not end"


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_stop_during_the_back_off_of_a_restart_ends_it(
    system: ActorSystem, strategy: Strategy, autojump_clock: trio.testing.MockClock
) -> None:
    slow = Policy(backoff=Backoff(initial=20.0, jitter=0.0))
    async with family(system, strategy) as f:
        a = await f.spawn("a", policy=slow)
        b = await f.spawn("b")
        await crash(a)
        await wait()
        assert system.tree().find("s/f/b").state == "restarting"
    assert trio.current_time() == 0.0
    assert a.is_terminated
    assert b.is_terminated
    assert (await b.wait_terminated()).reason == "its supervisor closes"


@pytest.mark.parametrize("strategy", SEVERAL)
@pytest.mark.parametrize("who", ["a", "b"])
async def test_stopping_a_child_that_waits_for_its_turn(
    system: ActorSystem, strategy: Strategy, who: str, autojump_clock: trio.testing.MockClock
) -> None:
    slow = Policy(backoff=Backoff(initial=20.0, jitter=0.0))
    async with family(system, strategy) as f:
        a = await f.spawn("a", policy=slow)
        b = await f.spawn("b")
        await crash(a)
        await wait()
        stopped, other = (a, b) if who == "a" else (b, a)
        await stopped.stop()
        assert trio.current_time() == 0.0
        # The restart continues with the remaining children.
        assert await other.ask(Number()) == 1
        assert trio.current_time() == pytest.approx(20.0)


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_stop_in_the_very_step_of_its_turn(system: ActorSystem, strategy: Strategy) -> None:
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number == 1:
            await gate(actor)

    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a = await f.spawn("a", start=start)
        b = await f.spawn("b")
        c = await f.spawn("c")
        await crash(a)
        await gate.entered.wait()
        gate.open.set()
        nursery.start_soon(b.stop)
        assert await f.numbers([a, c]) == [1, 1]
    assert b.is_terminated


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_child_in_spawn_is_unaffected(system: ActorSystem, strategy: Strategy) -> None:
    gate = Gate()

    async def spawn_slowly() -> None:
        spawned.append(await f.spawn("slow", start=gate))

    spawned: list[Ref[Puppet]] = []
    async with family(system, strategy) as f:
        async with trio.open_nursery() as nursery:
            a = await f.spawn("a")
            nursery.start_soon(spawn_slowly)
            await gate.entered.wait()
            await crash(a)
            await wait()
            gate.open.set()
        assert await a.ask(Number()) == 1
        assert await spawned[0].ask(Number()) in (0, 1)


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_child_spawned_during_a_restart_is_not_part_of_it(
    system: ActorSystem, strategy: Strategy
) -> None:
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number == 1:
            await gate(actor)

    async with family(system, strategy) as f:
        a = await f.spawn("a", start=start)
        b = await f.spawn("b")
        await crash(a)
        await gate.entered.wait()
        new = await f.spawn("new")
        gate.open.set()
        assert await f.numbers([a, b, new]) == [1, 1, 0]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_sibling_is_cancelled_while_it_is_waited_for(system: ActorSystem, strategy: Strategy) -> None:
    gate = Gate()

    async def act(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await gate(actor)

    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a, b, c = await f.spawn_all("abc")
        start_ask(nursery, b, Do(act))
        await wait()
        await crash(a)
        await wait()
        b.cancel("not wanted any longer")
        gate.open.set()
        assert await f.numbers([a, c]) == [1, 1]
        assert (await b.wait_terminated()).reason == "not wanted any longer"


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_sibling_is_stopped_while_another_is_waited_for(
    system: ActorSystem, strategy: Strategy
) -> None:
    gate = Gate()

    async def act(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await gate(actor)

    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a, b, c = await f.spawn_all("abc")
        start_ask(nursery, c, Do(act))
        await wait()
        await crash(a)
        await wait()
        await b.stop()
        gate.open.set()
        assert await f.numbers([a, c]) == [1, 1]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_a_sibling_without_grace_is_just_being_spawned(system: ActorSystem, strategy: Strategy) -> None:
    refs: list[Ref[Puppet]] = []

    async def spawn() -> None:
        refs.append(await f.spawn("b", policy=Policy(grace=0.0, backoff=AT_ONCE.backoff)))

    async with family(system, strategy) as f:
        a = await f.spawn("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash, a)
            nursery.start_soon(spawn)
        assert await a.ask(Number()) == 1
        assert await refs[0].ask(Number()) in (0, 1)


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_the_supervisor_fails_while_a_restart_runs(system: ActorSystem, strategy: Strategy) -> None:
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number == 1:
            await gate(actor)

    async with trio.open_nursery() as nursery:
        with raises_group():
            async with family(system, strategy) as f:
                a = await f.spawn("a")
                b = await f.spawn("b", start=start, policy=Policy(grace=0.0))
                c = await f.spawn("c", policy=Policy(directives={BoomError: Directive.ESCALATE}))
                await crash(a)
                await gate.entered.wait()
                queued = await started(nursery, c, Crash())
                # c waits for its turn; a new child escalates meanwhile.
                d = await f.spawn("d", policy=Policy(directives={BoomError: Directive.ESCALATE}))
                await crash(d)
                await trio.sleep_forever()
    for ref in (a, b, c, d):
        assert ref.is_terminated
    assert isinstance(queued.outcome, ActorStoppedError)


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_observers_see_who_is_restarted_and_why(
    system: ActorSystem, events: Events, strategy: Strategy
) -> None:
    async with family(system, strategy) as f:
        a, b = await f.spawn_all("ab")
        error = BoomError()
        await crash(a, error)
        await f.numbers([a, b])
    seen = [(event.path, event.error, event.incarnation) for event in events.of(ActorRestarted)]
    assert seen == [("s/f/a", error, 1), ("s/f/b", None, 1)]


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_asks_during_a_restart_wait_for_the_next_incarnation(
    system: ActorSystem, strategy: Strategy
) -> None:
    async with family(system, strategy) as f, trio.open_nursery() as nursery:
        a, b = await f.spawn_all("ab")
        nursery.start_soon(crash, a)
        askers = [start_ask(nursery, ref, Echo("during")) for ref in (a, b) for _ in range(3)]
        await wait()
        assert {asker.outcome for asker in askers} == {"during"}


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_many_rounds_end(system: ActorSystem, strategy: Strategy) -> None:
    async with family(system, strategy) as f:
        refs = await f.spawn_all("abc")
        for round_ in range(30):
            await crash(refs[round_ % 3])
            await wait()
        numbers = await f.numbers(refs)
        assert numbers == ([30] * 3 if strategy is Strategy.ONE_FOR_ALL else [10, 20, 30])


@pytest.mark.parametrize("strategy", SEVERAL)
async def test_the_system_is_cancelled_while_a_restart_waits(strategy: Strategy) -> None:
    slow = Policy(backoff=Backoff(initial=20.0, jitter=0.0))
    with trio.CancelScope() as scope:
        async with open_system("s") as system, family(system, strategy) as f:
            a = await f.spawn("a", policy=slow)
            b = await f.spawn("b")
            await crash(a)
            await wait()
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert a.is_terminated
    assert b.is_terminated
