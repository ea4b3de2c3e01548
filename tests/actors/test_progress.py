"""Progress: an actor that fails after it is in no crash loop, where its supervisor makes that difference."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import Do, Events, Number, Puppet, crash

from trio_accel.actors import (
    ActorFailedError,
    ActorRestarted,
    ActorStoppedError,
    Backoff,
    Intensity,
    Policy,
    Ref,
    SupervisorFailed,
    SystemOptions,
    open_system,
)

LENIENT = SystemOptions(intensity=Intensity(2, 60.0, counts_progress=False))
AT_ONCE = Policy(backoff=Backoff(base=0.0))


async def report(actor: Puppet) -> None:
    actor.context.report_progress()


async def progress_and_crash(ref: Ref[Puppet]) -> None:
    await ref.ask(Do(report))
    await crash(ref)
    await ref.ask(Number())


async def test_a_restart_after_progress_does_not_count_if_the_intensity_says_so() -> None:
    async with open_system("s", options=LENIENT) as system:
        ref = await system.spawn(Puppet, policy=AT_ONCE)
        for _ in range(10):
            await progress_and_crash(ref)
        assert await ref.ask(Number()) == 10


async def test_it_counts_by_default() -> None:
    with pytest.RaisesGroup(ActorFailedError):
        async with open_system("s", options=SystemOptions(intensity=Intensity(2, 60.0))) as system:
            ref = await system.spawn(Puppet, policy=AT_ONCE)
            for _ in range(2):
                await progress_and_crash(ref)
            await ref.ask(Do(report))
            await crash(ref)
            await trio.sleep_forever()


async def test_restarts_without_progress_count_until_one_follows_progress() -> None:
    """Two are allowed in a row; a third in a row is one too many."""
    seen = Events()
    with pytest.RaisesGroup(ActorFailedError):
        async with open_system("s", options=LENIENT) as system:
            system.subscribe(seen.append)
            ref = await system.spawn(Puppet, policy=AT_ONCE)
            for _ in range(3):
                for _ in range(2):
                    await crash(ref)
                    await ref.ask(Number())
                await progress_and_crash(ref)
            for _ in range(2):
                await crash(ref)
                await ref.ask(Number())
            await crash(ref)
            await trio.sleep_forever()
    progressed = [event.has_progressed for event in seen.of(ActorRestarted)]
    assert progressed == [False, False, True] * 3 + [False, False]
    assert "allows 2 restarts within 60 s" in str(seen.of(SupervisorFailed)[0].error)


async def test_one_child_s_progress_is_nothing_to_another() -> None:
    seen = Events()
    with pytest.RaisesGroup(ActorFailedError):
        async with open_system("s", options=LENIENT) as system:
            system.subscribe(seen.append)
            sick, well = [await system.spawn(Puppet, name=name, policy=AT_ONCE) for name in ("sick", "well")]
            for _ in range(2):
                await crash(sick)
                await sick.ask(Number())
                await progress_and_crash(well)
            await crash(sick)
            await trio.sleep_forever()
    assert len(seen.of(ActorRestarted)) == 4


async def test_delays_after_progress_are_a_series_of_their_own(
    autojump_clock: trio.testing.MockClock,
) -> None:
    policy = Policy(
        backoff=Backoff(initial=10.0, base=20.0, jitter=0.0),
        backoff_after_progress=Backoff(initial=0.0, base=0.5, maximum=1.0, jitter=0.0, reset_after=3.0),
    )
    seen = Events()
    async with open_system("s", options=SystemOptions(intensity=Intensity(100, 1.0))) as system:
        system.subscribe(seen.append)
        ref = await system.spawn(Puppet, policy=policy)
        for _ in range(2):
            await crash(ref)
            await ref.ask(Number())
        for _ in range(4):
            await progress_and_crash(ref)
        # It works for long enough: the time since its progress counts, and not that of waiting.
        await ref.ask(Do(report))
        await trio.sleep(3.1)
        await ref.ask(Do(report))
        await crash(ref)
        await ref.ask(Number())
        await crash(ref)
        await ref.ask(Number())
    delays = [event.delay for event in seen.of(ActorRestarted)]
    assert delays == [10.0, 20.0, 0.0, 0.5, 1.0, 1.0, 0.0, 10.0]


async def test_a_supervisor_learns_of_its_children_s_restarts() -> None:
    told: list[ActorRestarted] = []

    async def supervise(actor: Puppet) -> Ref[Puppet]:
        actor.context.observe_restarts(told.append)
        return await actor.context.spawn(Puppet, name="child", policy=AT_ONCE)

    async with open_system("s") as system:
        parent = await system.spawn(Puppet, name="parent")
        child: Ref[Puppet] = await parent.ask(Do(supervise))
        await progress_and_crash(child)
        await crash(child)
        await child.ask(Number())
    assert [(event.path, event.incarnation, event.has_progressed) for event in told] == [
        ("s/parent/child", 1, True),
        ("s/parent/child", 2, False),
    ]


async def test_reports_of_an_ended_incarnation_do_not_reach_the_next() -> None:
    contexts = []

    async def note(actor: Puppet) -> None:
        contexts.append(actor.context)

    seen = Events()
    async with open_system("s") as system:
        system.subscribe(seen.append)
        ref = await system.spawn(Puppet, None, note, policy=AT_ONCE)
        await crash(ref)
        await ref.ask(Number())
        contexts[0].report_progress()
        await crash(ref)
        await ref.ask(Number())
    assert [event.has_progressed for event in seen.of(ActorRestarted)] == [False, False]


async def test_an_actor_knows_that_it_is_stopping() -> None:
    known: list[bool] = []

    async def note(actor: Puppet) -> None:
        known.append(actor.context.is_stopping)

    async with open_system("s") as system:
        ref = await system.spawn(Puppet, None, note, note, policy=AT_ONCE)
        await crash(ref)
        await ref.ask(Number())
        await ref.stop()
        with pytest.raises(ActorStoppedError):
            await ref.ask(Number())
    # The first begins and crashes, the second begins and is stopped.
    assert known == [False, False, False, True]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Intensity(1, counts_progress=1), TypeError, "counts_progress must be True or False, got 1"),
        (lambda: Intensity(1, 2.0, False), TypeError, "positional"),
        (lambda: Policy(backoff_after_progress=1.0), TypeError, "must be a Backoff or None, got 1.0"),
    ],
)
def test_options_are_checked(make: object, error: type[Exception], text: str) -> None:
    assert callable(make)
    with pytest.raises(error, match=text):
        make()


async def test_a_child_pauses_if_its_supervisor_would_fail(autojump_clock: trio.testing.MockClock) -> None:
    pause = Backoff(initial=3.0, base=6.0, factor=2.0, maximum=20.0, jitter=0.0)
    seen = Events()
    intensity = Intensity(1, 60.0, counts_progress=False, pause=pause)
    async with open_system("s", options=SystemOptions(intensity=intensity)) as system:
        system.subscribe(seen.append)
        ref = await system.spawn(Puppet, policy=AT_ONCE)
        for _ in range(5):
            await crash(ref)
            await ref.ask(Number())
        # Progress ends the series, and so does a window without a failure.
        await progress_and_crash(ref)
        for _ in range(2):
            await crash(ref)
            await ref.ask(Number())
        await trio.sleep(61.0)
        for _ in range(2):
            await crash(ref)
            await ref.ask(Number())
    told = [(event.delay, event.is_paused) for event in seen if isinstance(event, ActorRestarted)]
    paused = [(delay, True) for delay in (3.0, 6.0, 12.0, 20.0)]
    assert told == [(0.0, False), *paused, (0.0, False), (0.0, False), (3.0, True), (0.0, False), (3.0, True)]
    assert not any(isinstance(event, SupervisorFailed) for event in seen)


async def test_a_pause_ends_at_once_with_a_stop(autojump_clock: trio.testing.MockClock) -> None:
    intensity = Intensity(0, pause=Backoff(initial=30.0, jitter=0.0))
    async with open_system("s", options=SystemOptions(intensity=intensity)) as system:
        ref = await system.spawn(Puppet)
        await crash(ref)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await ref.stop()
    assert trio.current_time() == began
