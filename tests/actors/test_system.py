"""`open_system` and `open_supervisor`: their errors, and their clean-up."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Do,
    DoGrouped,
    Echo,
    Events,
    Gate,
    Number,
    Puppet,
    Run,
    crash,
    raises_group,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    ActorTerminated,
    Directive,
    Intensity,
    Policy,
    Ref,
    Strategy,
    SupervisorScope,
    SystemOptions,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


async def test_actors_stop_in_reverse_order_after_the_body() -> None:
    log: list[str] = []
    async with open_system("s") as system:
        for name in "abc":
            await system.spawn(Puppet, log, name=name)
        log.append("body ends")
    assert log == ["+a0", "+b0", "+c0", "body ends", "-c0", "-b0", "-a0"]


async def test_nothing_is_left_and_everything_refuses() -> None:
    async with open_system("s") as system:
        ref = await system.spawn(Puppet, name="puppet")
        async with system.open_supervisor("pool") as pool:
            worker = await pool.spawn(Puppet, name="worker")
    assert system.alive() == []
    assert str(system.tree()) == "s (ActorSystem) stopping"
    for dead in (ref, worker):
        assert dead.is_terminated
        with pytest.raises(ActorStoppedError):
            await dead.ask(Echo("a"))
    with pytest.raises(RuntimeError, match="spawn: s is stopping and starts no 'late'"):
        await system.spawn(Puppet, name="late")
    with pytest.raises(RuntimeError, match="spawn: s/pool is stopping and starts no 'puppet-1'"):
        await pool.spawn(Puppet)
    with pytest.raises(RuntimeError, match="open_supervisor: s is stopping and starts no 'another'"):
        async with system.open_supervisor("another"):
            pass


async def test_the_body_s_error_comes_in_a_group_and_the_actors_end_first() -> None:
    log: list[str] = []
    with raises_group() as caught:
        async with open_system("s") as system:
            await system.spawn(Puppet, log, name="a")
            raise BoomError("body")
    assert [str(error) for error in caught.value.exceptions] == ["body"]
    assert log == ["+a0", "-a0"]


async def test_single_errors_of_ask_spawn_and_stop_are_not_grouped(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    with pytest.raises(ActorFailedError):
        await ref.ask(Do(_fail))
    with pytest.raises(BoomError):
        await system.spawn(Puppet, None, _fail)


async def _fail(actor: Puppet) -> None:
    raise BoomError


async def test_an_escalation_cancels_the_body_and_both_errors_arrive() -> None:
    with raises_group() as caught:
        async with open_system("s", options=SystemOptions(intensity=Intensity(0))) as system:
            await crash(await system.spawn(Puppet))
            try:
                await trio.sleep_forever()
            finally:
                raise BoomError("in the body's cleanup")
    assert {type(error) for error in caught.value.exceptions} == {ActorFailedError, BoomError}


async def test_a_cancelled_body_still_stops_its_actors_in_order_and_in_grace() -> None:
    log: list[str] = []
    gate = Gate()

    async def end(actor: Puppet) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        log.append("cleaned up")

    with trio.CancelScope() as scope:
        async with open_system("s") as system:
            for name in "ab":
                await system.spawn(Puppet, log, None, end, name=name)
            busy = await system.spawn(Puppet, log, name="busy")
            await busy.tell(Run(gate))
            await gate.entered.wait()
            scope.cancel()
            gate.open.set()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert gate.ended == "returned"
    assert log[3:] == ["-busy0", "-b0", "cleaned up", "-a0", "cleaned up"]


async def test_systems_are_independent() -> None:
    async with open_system("a") as a, open_system("b") as b:
        one = await a.spawn(Puppet, name="puppet")
        two = await b.spawn(Puppet, name="puppet")

        async def act(actor: Puppet) -> str:
            return await two.ask(Echo("across"))

        assert await one.ask(Do(act)) == "across"
        assert (one.path, two.path) == ("a/puppet", "b/puppet")


async def test_a_returning_ask_across_systems_is_a_cycle() -> None:
    from trio_accel.actors import AskCycleError

    async with open_system("a") as a, open_system("b") as b:
        one = await a.spawn(Puppet, name="puppet")
        two = await b.spawn(Puppet, name="puppet")

        async def back(actor: Puppet) -> str:
            with pytest.raises(AskCycleError, match="a/puppet -> b/puppet -> a/puppet"):
                await one.ask(Echo("back"))
            return "refused"

        assert await one.ask(Do(lambda _: two.ask(Do(back)))) == "refused"


def test_a_run_leaves_no_task_and_no_actor_behind() -> None:
    async def main() -> None:
        async with open_system("s") as system:
            await system.spawn(Puppet)
        assert trio.lowlevel.current_statistics().tasks_living == statistics.tasks_living

    async def outer() -> None:
        nonlocal statistics
        statistics = trio.lowlevel.current_statistics()
        await main()

    statistics: trio.lowlevel.RunStatistics
    trio.run(outer)


async def test_the_tasks_of_an_actor_are_known_by_its_path(puppet: Ref[Puppet]) -> None:
    from trio_accel.actors import actor_path_of

    async def act(actor: Puppet) -> str | None:
        return actor_path_of(trio.lowlevel.current_task())

    assert await puppet.ask(Do(act)) == await puppet.ask(DoGrouped(act)) == "s/puppet"
    assert actor_path_of(trio.lowlevel.current_task()) is None


def test_errors_can_be_pickled() -> None:
    import pickle

    error = ActorStoppedError("it has ended", path="s/puppet")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ActorStoppedError
    assert (str(copy), copy.path) == ("it has ended", "s/puppet")


# open_supervisor


async def test_a_supervisor_s_actors_live_for_its_body(system: ActorSystem, events: Events) -> None:
    log: list[str] = []
    async with system.open_supervisor("pool") as pool:
        assert isinstance(pool, SupervisorScope)
        refs = [await pool.spawn(Puppet, log, name=name) for name in "ab"]
        assert [ref.path for ref in refs] == ["s/pool/a", "s/pool/b"]
        assert await refs[0].ask(Echo("a")) == "a"
        assert pool.snapshot() == system.tree().find("s/pool")
    assert log == ["+a0", "+b0", "-b0", "-a0"]
    assert system.tree().children == ()
    assert {event.reason for event in events.of(ActorTerminated)} == {"its supervisor closes"}


async def test_a_failing_supervisor_cancels_only_its_body(system: ActorSystem) -> None:
    outside = await system.spawn(Puppet)
    with raises_group() as caught:
        async with system.open_supervisor("pool", intensity=Intensity(1, 5.0)) as pool:
            ref = await pool.spawn(Puppet, name="a", policy=AT_ONCE)
            await crash(ref)
            await ref.ask(Number())
            await crash(ref)
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert str(failed) == (
        "supervisor s/pool fails: s/pool/a failed with BoomError: boom, "
        "and s/pool allows 1 restarts within 5 s"
    )
    assert await outside.ask(Number()) == 0
    async with system.open_supervisor("pool") as again:
        assert await (await again.spawn(Puppet, name="a")).ask(Number()) == 0


async def test_the_body_s_error_ends_the_supervisor(system: ActorSystem) -> None:
    with raises_group() as caught:
        async with system.open_supervisor("pool") as pool:
            ref = await pool.spawn(Puppet)
            raise BoomError("body")
    assert isinstance(caught.value.exceptions[0], BoomError)
    assert ref.is_terminated


async def test_cancelling_the_body_of_a_supervisor_ends_its_actors(system: ActorSystem) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with system.open_supervisor("pool") as pool:
                ref = await pool.spawn(Puppet, policy=Policy(grace=0.0))
                asker = await started(nursery, ref, Do(gate))
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await wait()
    assert gate.ended == "Cancelled"
    assert isinstance(asker.outcome, ActorFailedError)
    assert ref.is_terminated


async def test_supervisors_and_actors_share_their_names(system: ActorSystem) -> None:
    await system.spawn(Puppet, name="puppet")
    with pytest.raises(ValueError, match="open_supervisor: s has a child named 'puppet' already"):
        async with system.open_supervisor("puppet"):
            pass
    async with system.open_supervisor("puppet-1"):
        with pytest.raises(ValueError, match="open_supervisor: s has a child named 'puppet-1' already"):
            async with system.open_supervisor("puppet-1"):
                pass
        with pytest.raises(ValueError, match="spawn: s has a child named 'puppet-1' already"):
            await system.spawn(Puppet, name="puppet-1")
        ref = await system.spawn(Puppet)
        assert ref.path == "s/puppet-2"


async def test_the_system_closes_while_another_task_keeps_a_supervisor_open() -> None:
    async def keep_open(system: ActorSystem) -> None:
        async with system.open_supervisor("pool") as pool:
            refs.append(await pool.spawn(Puppet))
            opened.set()
            await release.wait()
            with pytest.raises(RuntimeError, match="s/pool is stopping"):
                await pool.spawn(Puppet)

    refs: list[Ref[Puppet]] = []
    opened, release = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        async with open_system("s") as system:
            nursery.start_soon(keep_open, system)  # noqa: ASYNC111  # the test is about it
            await opened.wait()
        assert refs[0].is_terminated
        assert (await refs[0].wait_terminated()).reason == "the system closes"
        release.set()


async def test_actors_given_up_in_an_open_supervisor_are_named(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def keep_open(system: ActorSystem) -> None:
        async with system.open_supervisor("pool") as pool:
            ref = await pool.spawn(Puppet, name="stuck", policy=Policy(grace=1.0))
            await ref.tell(Run(stuck))
            await trio.sleep(50)

    async def stuck(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    async def open_and_close() -> None:
        async with open_system("s") as system:
            nursery.start_soon(keep_open, system)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        with pytest.raises(RuntimeError) as caught:
            await open_and_close()
        assert str(caught.value) == (
            "open_system: s closed while actors that were given up live on: s/pool/stuck"
        )


async def test_escalation_within_a_supervisor_stays_within_it(system: ActorSystem) -> None:
    with raises_group() as caught:
        async with system.open_supervisor("outer", strategy=Strategy.ONE_FOR_ALL) as outer:
            policy = Policy(directives={BoomError: Directive.ESCALATE})
            ref = await outer.spawn(Puppet, policy=policy)
            other = await outer.spawn(Puppet)
            await crash(ref)
            await trio.sleep_forever()
    assert caught.group_contains(ActorFailedError)
    assert other.is_terminated
    assert str(system.tree()) == "s (ActorSystem) running"


def test_ctrl_c_in_a_handler_ends_the_run_and_tells_the_asker() -> None:
    outcomes: list[object] = []

    async def interrupt(actor: Puppet) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            asker = None
            try:
                async with open_system("s") as system:
                    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
                    await crash(ref)
                    asker = start_ask(nursery, ref, Do(interrupt))
                    await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await wait()
                assert asker is not None
                outcomes.append(asker.outcome)
                outcomes.append(await ref.wait_terminated())  # noqa: ASYNC102  # the test is about it

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(main)
    assert caught.group_contains(KeyboardInterrupt)
    failed, ended = outcomes
    assert isinstance(failed, ActorFailedError)
    assert isinstance(failed.__cause__, KeyboardInterrupt)
    assert isinstance(ended.error, KeyboardInterrupt)  # type: ignore[attr-defined]
