"""Restart types, directives, back-off and the state of the next incarnation."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Count,
    Crash,
    Do,
    Echo,
    Events,
    Gate,
    Number,
    Puppet,
    crash,
    raises_group,
    started,
)

from trio_accel.actors import (
    ActorContext,
    ActorFailedError,
    ActorRestarted,
    ActorStarted,
    ActorSystem,
    ActorTerminated,
    Directive,
    Intensity,
    Policy,
    Ref,
    Restart,
    RestartInfo,
    SystemOptions,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


async def test_the_next_incarnation_is_fresh_and_made_with_the_same_arguments(
    system: ActorSystem, events: Events
) -> None:
    log: list[str] = []
    ref = await system.spawn(Puppet, log, name="puppet", policy=AT_ONCE)
    assert [await ref.ask(Count()) for _ in range(3)] == [1, 2, 3]
    await crash(ref)
    assert [await ref.ask(Count()) for _ in range(2)] == [1, 2]
    assert log == ["+puppet0", "-puppet0", "+puppet1"]
    assert [event.incarnation for event in events.of(ActorStarted)] == [0, 1]


async def test_the_context_has_the_number_and_the_previous_error(system: ActorSystem) -> None:
    infos: list[RestartInfo] = []
    paths: list[str] = []

    async def start(actor: Puppet) -> None:
        infos.append(actor.context.restart)
        paths.append(actor.context.path)

    ref = await system.spawn(Puppet, None, start, name="puppet", policy=AT_ONCE)
    errors = [BoomError("first"), BoomError("second")]
    for error in errors:
        await crash(ref, error)
        await wait()
    assert infos == [
        RestartInfo(number=0, error=None),
        RestartInfo(number=1, error=errors[0]),
        RestartInfo(number=2, error=errors[1]),
    ]
    assert paths == ["s/puppet"] * 3


async def test_siblings_are_untouched(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    sibling = await system.spawn(Puppet)
    await sibling.ask(Count())
    await crash(ref)
    await wait()
    assert await sibling.ask(Count()) == 2


@pytest.mark.parametrize("restart", list(Restart))
async def test_after_a_failure(system: ActorSystem, restart: Restart) -> None:
    ref = await system.spawn(Puppet, restart=restart, policy=AT_ONCE, name="puppet")
    error = BoomError()
    await crash(ref, error)
    await wait()
    if restart is Restart.TEMPORARY:
        ended = await ref.wait_terminated()
        assert (ended.path, ended.error) == ("s/puppet", error)
        assert system.tree().children == ()
    else:
        assert await ref.ask(Number()) == 1


async def test_a_child_that_fails_when_it_starts_again_counts_as_another_failure(
    system: ActorSystem, events: Events
) -> None:
    starts: list[int] = []

    async def start(actor: Puppet) -> None:
        starts.append(actor.context.restart.number)
        if 1 <= len(starts) - 1 <= 2:
            raise ValueError("not yet")

    ref = await system.spawn(Puppet, None, start, policy=AT_ONCE, name="puppet")
    await crash(ref)
    assert await ref.ask(Number()) == 3
    assert starts == [0, 1, 2, 3]
    assert [type(event.error) for event in events.of(ActorRestarted)] == [BoomError, ValueError, ValueError]
    assert [event.incarnation for event in events.of(ActorStarted)] == [0, 3]


async def test_the_constructor_may_fail_at_a_restart(system: ActorSystem) -> None:
    class Once(Puppet):
        made = 0

        def __init__(self) -> None:
            Once.made += 1
            if Once.made == 2:
                raise ValueError("no second time, but a third")
            super().__init__()

    ref = await system.spawn(Once, policy=AT_ONCE)
    await crash(ref)
    assert await ref.ask(Number()) == 2


async def test_a_failure_at_the_first_start_is_raised_from_spawn(system: ActorSystem, events: Events) -> None:
    error = ValueError("cannot start")

    async def start(actor: Puppet) -> None:
        raise error

    with pytest.raises(ValueError, match="cannot start") as caught:
        await system.spawn(Puppet, None, start, name="puppet", restart=Restart.PERMANENT)
    assert caught.value is error
    assert system.tree().children == ()
    assert events.of(ActorStarted, ActorRestarted) == []
    assert await (await system.spawn(Puppet, name="puppet")).ask(Number()) == 0


async def test_a_failure_in_the_end_of_the_lifespan_is_a_crash(system: ActorSystem) -> None:
    async def end(actor: Puppet) -> None:
        if actor.context.restart.number == 0:
            raise ValueError("cannot end")

    ref = await system.spawn(Puppet, None, None, end, policy=AT_ONCE, name="puppet")
    await crash(ref)
    assert await ref.ask(Number()) == 1
    # The later error ended it; the crash is its context.
    assert system.tree().find("s/puppet").last_error == "ValueError: cannot end"


async def test_a_failure_in_the_end_of_the_lifespan_at_a_stop_is_logged_and_stops_all_the_same(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    async def end(actor: Puppet) -> None:
        raise ValueError("cannot end")

    ref = await system.spawn(Puppet, None, None, end, name="puppet")
    await ref.stop()
    assert ref.is_terminated
    assert "actor s/puppet crashed: ValueError('cannot end')" in caplog.text


@pytest.mark.parametrize("restart", [Restart.PERMANENT, Restart.TRANSIENT])
async def test_a_lifespan_that_swallows_the_crash_makes_it_a_normal_end(
    system: ActorSystem, restart: Restart
) -> None:
    from contextlib import asynccontextmanager, suppress

    class Careless(Puppet):
        @asynccontextmanager
        async def lifespan(self, context: ActorContext):
            with suppress(BoomError):
                yield

    ref = await system.spawn(Careless, restart=restart, policy=AT_ONCE)
    await crash(ref)
    if restart is Restart.PERMANENT:
        assert await ref.ask(Number()) == 1
    else:
        ended = await ref.wait_terminated()
        assert (ended.reason, ended.error) == ("it ended by itself", None)


async def test_a_lifespan_may_call_the_inherited_one(system: ActorSystem) -> None:
    from contextlib import asynccontextmanager

    from trio_accel.actors import Actor

    log: list[str] = []

    class Careful(Actor):
        @asynccontextmanager
        async def lifespan(self, context: ActorContext):
            async with super().lifespan(context):
                log.append("begins")
                yield
            log.append("ends")

    await (await system.spawn(Careful)).stop()
    assert log == ["begins", "ends"]


# Directives


async def test_the_most_specific_class_wins(system: ActorSystem) -> None:
    policy = Policy(
        directives={
            Exception: Directive.STOP,
            LookupError: Directive.RESTART,
            KeyError: Directive.RESUME,
        },
        backoff=AT_ONCE.backoff,
    )
    ref = await system.spawn(Puppet, policy=policy, name="puppet")
    with pytest.raises(KeyError):
        await ref.ask(Crash(KeyError("resume")))
    assert await ref.ask(Number()) == 0
    await crash(ref, IndexError("restart"))
    assert await ref.ask(Number()) == 1
    await crash(ref, ValueError("stop"))
    assert (await ref.wait_terminated()).reason == "it failed: ValueError: stop"


async def test_anything_else_restarts(system: ActorSystem) -> None:
    policy = Policy(directives={KeyError: Directive.STOP}, backoff=AT_ONCE.backoff)
    ref = await system.spawn(Puppet, policy=policy)
    await crash(ref, LookupError())
    assert await ref.ask(Number()) == 1


@pytest.mark.parametrize(
    ("errors", "directive"),
    [
        ([KeyError(), KeyError()], Directive.RESUME),
        ([KeyError(), ValueError()], Directive.RESTART),
        ([KeyError(), IndexError(), ValueError()], Directive.STOP),
        ([TypeError(), IndexError(), ValueError()], Directive.ESCALATE),
        ([ExceptionGroup("inner", [TypeError()]), KeyError()], Directive.ESCALATE),
    ],
)
def test_groups_are_looked_into_and_the_most_severe_wins(
    errors: list[Exception], directive: Directive
) -> None:
    policy = Policy(
        directives={
            KeyError: Directive.RESUME,
            IndexError: Directive.STOP,
            TypeError: Directive.ESCALATE,
        }
    )
    assert policy.directive_for(ExceptionGroup("outer", errors)) is directive


async def test_a_group_of_resumed_members_is_a_reply(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={KeyError: Directive.RESUME}))
    with raises_group() as caught:
        await ref.ask(Crash(ExceptionGroup("two", [KeyError("a"), KeyError("b")])))
    assert len(caught.value.exceptions) == 2
    assert await ref.ask(Number()) == 0


async def test_the_handler_s_nursery_wraps_its_failure_and_the_directive_finds_it(
    system: ActorSystem,
) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={KeyError: Directive.STOP}))

    async def act(actor: Puppet) -> None:
        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # the nursery is what it tests
            nursery.start_soon(fail)

    async def fail() -> None:
        raise KeyError("deep inside")

    with pytest.raises(ActorFailedError):
        await ref.ask(Do(act))
    ended = await ref.wait_terminated()
    # The groups of one member around it mean nothing.
    assert isinstance(ended.error, KeyError)


async def test_stop_ends_it_for_good(system: ActorSystem, events: Events) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.STOP}), name="puppet")
    await crash(ref)
    ended = await ref.wait_terminated()
    assert isinstance(ended.error, BoomError)
    (event,) = events.of(ActorTerminated)
    assert (event.path, event.error, event.reason) == ("s/puppet", ended.error, ended.reason)
    assert events.of(ActorRestarted) == []


async def test_escalate_fails_the_supervisor() -> None:
    error = BoomError("all the way up")
    with raises_group() as caught:
        async with open_system("s") as system:
            sibling = await system.spawn(Puppet, name="sibling")
            ref = await system.spawn(
                Puppet, policy=Policy(directives={BoomError: Directive.ESCALATE}), name="puppet"
            )
            await crash(ref, error)
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert isinstance(failed, ActorFailedError)
    assert str(failed) == (
        "supervisor s fails: s/puppet failed with BoomError: all the way up, "
        "and its policy escalates the error"
    )
    assert failed.__cause__ is error
    assert sibling.is_terminated
    assert (await ref.wait_terminated()).error is error


async def test_an_escalated_crash_restarts_the_parent_with_its_children(system: ActorSystem) -> None:
    log: list[str] = []

    async def start(actor: Puppet) -> None:
        child = await actor.context.spawn(
            Puppet, log, name="child", policy=Policy(directives={BoomError: Directive.ESCALATE})
        )
        children.append(child)

    children: list[Ref[Puppet]] = []
    parent = await system.spawn(Puppet, log, start, name="parent", policy=AT_ONCE)
    await crash(children[0])
    await children[0].wait_terminated()
    assert await parent.ask(Number()) == 1
    assert log == ["+child0", "+parent0", "-child0", "-parent0", "+child0", "+parent1"]
    assert children[0].is_terminated
    assert await children[1].ask(Echo("the new child")) == "the new child"
    error = system.tree().find("s/parent").last_error
    assert error is not None
    assert error.startswith(
        "ActorFailedError: supervisor s/parent fails: s/parent/child failed with BoomError"
    )


# Intensity


async def test_more_restarts_than_allowed_within_the_window_fail_the_supervisor(
    autojump_clock: trio.testing.MockClock,
) -> None:
    options = SystemOptions(intensity=Intensity(3, 5.0))
    with raises_group() as caught:
        async with open_system("s", options=options) as system:
            sibling = await system.spawn(Puppet)
            ref = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")
            for number in range(3):
                await crash(ref)
                assert await ref.ask(Number()) == number + 1
            await crash(ref)
            await trio.sleep_forever()
    (failed,) = caught.value.exceptions
    assert str(failed) == (
        "supervisor s fails: s/puppet failed with BoomError: boom, and s allows 3 restarts within 5 s"
    )
    assert ref.is_terminated
    assert sibling.is_terminated


async def test_restarts_outside_of_the_window_do_not_count(autojump_clock: trio.testing.MockClock) -> None:
    async with open_system("s", options=SystemOptions(intensity=Intensity(2, 5.0))) as system:
        ref = await system.spawn(Puppet, policy=AT_ONCE)
        for _ in range(5):
            await crash(ref)
            await crash(ref)
            await trio.sleep(5.1)
        assert await ref.ask(Number()) == 10


async def test_the_window_includes_its_edge(autojump_clock: trio.testing.MockClock) -> None:
    with raises_group():
        async with open_system("s", options=SystemOptions(intensity=Intensity(1, 5.0))) as system:
            ref = await system.spawn(Puppet, policy=AT_ONCE)
            await crash(ref)
            await trio.sleep(5.0)
            await crash(ref)
            await trio.sleep_forever()


async def test_intensity_is_counted_per_supervisor_over_all_its_children() -> None:
    with raises_group():
        async with open_system("s", options=SystemOptions(intensity=Intensity(2, 5.0))) as system:
            refs = [await system.spawn(Puppet, policy=AT_ONCE) for _ in range(3)]
            for ref in refs:
                await crash(ref)
            await trio.sleep_forever()


async def test_an_intensity_of_0_allows_no_restart() -> None:
    with raises_group():
        async with open_system("s", options=SystemOptions(intensity=Intensity(0, 5.0))) as system:
            await crash(await system.spawn(Puppet))
            await trio.sleep_forever()


async def test_ends_without_a_restart_do_not_count() -> None:
    async with open_system("s", options=SystemOptions(intensity=Intensity(0, 5.0))) as system:
        for _ in range(3):
            await crash(await system.spawn(Puppet, restart=Restart.TEMPORARY))
        assert await (await system.spawn(Puppet)).ask(Number()) == 0


async def test_the_children_of_an_actor_have_their_own_intensity(system: ActorSystem) -> None:
    policy = Policy(intensity=Intensity(1, 5.0), backoff=AT_ONCE.backoff)
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        children.append(await actor.context.spawn(Puppet, policy=AT_ONCE))

    parent = await system.spawn(Puppet, None, start, policy=policy)
    await crash(children[0])
    assert await parent.ask(Number()) == 0
    assert await children[0].ask(Number()) == 1
    await crash(children[0])
    await children[0].wait_terminated()
    assert await parent.ask(Number()) == 1
    assert await children[1].ask(Number()) == 0


async def test_a_crash_requested_from_outside(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")
    contexts: list[ActorContext] = []
    gate = Gate()

    async def act(actor: Puppet) -> str:
        contexts.append(actor.context)
        return await gate(actor)

    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(act))
        queued = await started(nursery, ref, Number())
        contexts[0].crash(BoomError("from beside"))
        contexts[0].crash(BoomError("a second one is too late"))
        await wait()
        # The message being served is finished first.
        assert running.is_waiting
        gate.open.set()
    assert running.outcome == "through the gate"
    assert queued.outcome == 1
    assert system.tree().find("s/puppet").last_error == "BoomError: from beside"
    contexts[0].crash(BoomError("of an incarnation that has ended"))
    await wait()
    assert await ref.ask(Number()) == 1


async def test_a_crash_from_outside_wakes_an_idle_actor(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    contexts: list[ActorContext] = []

    async def act(actor: Puppet) -> None:
        contexts.append(actor.context)

    await ref.ask(Do(act))
    await wait()
    contexts[0].crash(BoomError())
    await wait()
    assert await ref.ask(Number()) == 1


async def test_a_crash_from_outside_of_a_stopping_actor_is_void(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    async def act(actor: Puppet) -> str:
        actor.context.stop()
        actor.context.crash(BoomError())
        return "last"

    assert await puppet.ask(Do(act)) == "last"
    assert (await puppet.wait_terminated()).error is None
