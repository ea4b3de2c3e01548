"""Snapshots of the tree, and how they print."""

from __future__ import annotations

import textwrap

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Do,
    DoGrouped,
    Echo,
    Gate,
    Puppet,
    Run,
    crash,
    deferring,
    started,
)

from trio_accel.actors import (
    ActorEvent,
    ActorRestarted,
    ActorSnapshot,
    ActorStarted,
    ActorSystem,
    ActorTerminated,
    Backoff,
    Event,
    MailboxOptions,
    Policy,
    Ref,
    SystemOptions,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


def node(path: str, **more: object) -> ActorSnapshot:
    return ActorSnapshot(path=path, actor_class="Puppet", state="running", **more)  # type: ignore[arg-type]


async def test_an_empty_system() -> None:
    async with open_system("s") as system:
        assert system.tree() == ActorSnapshot(path="s", actor_class="ActorSystem", state="running")
        assert str(system.tree()) == "s (ActorSystem) running"


async def test_a_fresh_actor(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    assert system.tree().children == (node("s/puppet"),)


async def test_every_counter(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", mailbox=MailboxOptions(capacity=2), policy=AT_ONCE)
    await crash(ref, BoomError("at first"))
    await ref.ask(Echo("a"))
    grouped, gate = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, deferring([]))
        await started(nursery, ref, DoGrouped(grouped))
        await started(nursery, ref, Do(gate))
        for text in "abc":
            await started(nursery, ref, Echo(text))
        snapshot = system.tree().find("s/puppet")
        assert snapshot == node(
            "s/puppet",
            incarnation=1,
            mailbox_depth=2,
            mailbox_peak=2,
            mailbox_waiting=1,
            running=2,
            handled=2,
            failed=1,
            deferred=1,
            last_error="BoomError: at first",
        )
        assert snapshot.name == "puppet"
        assert snapshot.restarts == 1
        assert str(snapshot) == (
            "puppet (Puppet) running, 2 handled, 1 failed, 3 queued, 1 in flight, 1 restart, "
            "last error: BoomError: at first"
        )
        grouped.open.set()
        gate.open.set()
        await wait()
        await ref.stop()


async def test_the_states(autojump_clock: trio.testing.MockClock) -> None:
    async def state() -> str:
        await wait()
        return system.tree().find("s/puppet").state

    async def slowly(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)

    async with trio.open_nursery() as nursery, open_system("s") as system:
        start = Gate()
        nursery.start_soon(
            lambda: system.spawn(
                Puppet,
                None,
                start,
                name="puppet",
                policy=Policy(grace=3.0, backoff=Backoff(initial=4.0, jitter=0.0)),
            )
        )
        assert await state() == "starting"
        start.open.set()
        assert await state() == "running"
        ref: Ref[Puppet] = Ref(system._supervisor.children["puppet"])
        await crash(ref)
        assert await state() == "restarting"
        await trio.sleep(4.5)
        assert await state() == "running"
        await ref.tell(Run(slowly))
        nursery.start_soon(ref.stop)
        assert await state() == "stopping"
        await trio.sleep(6.5)
        assert await state() == "quarantined"
        await ref.wait_terminated()
        with pytest.raises(KeyError, match="s/puppet"):
            system.tree().find("s/puppet")


async def test_the_tree_draws_children_and_supervisors(system: ActorSystem) -> None:
    async def start(actor: Puppet) -> None:
        for name in ("left", "right"):
            await actor.context.spawn(Puppet, name=name)

    await system.spawn(Puppet, None, start, name="parent")
    last = await system.spawn(Puppet, name="last", policy=AT_ONCE)
    for _ in range(2):
        await crash(last)
        await last.ask(Echo("a"))
    async with system.open_supervisor("pool") as pool:
        await pool.spawn(Puppet, name="worker")
        assert str(system.tree()) == textwrap.dedent(
            """\
            s (ActorSystem) running
            ├─ parent (Puppet) running
            │  ├─ left (Puppet) running
            │  └─ right (Puppet) running
            ├─ last (Puppet) running, 2 handled, 2 failed, 2 restarts, last error: BoomError: boom
            └─ pool (supervisor) running
               └─ worker (Puppet) running"""
        )
        assert [found.path for found in system.tree().walk()] == [
            "s",
            "s/parent",
            "s/parent/left",
            "s/parent/right",
            "s/last",
            "s/pool",
            "s/pool/worker",
        ]
        assert system.tree().find("s/parent/right").name == "right"


async def test_an_error_of_several_lines_stays_in_its_line(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    await crash(ref, BoomError("first line\n  second line"))
    await ref.ask(Echo("a"))
    assert str(system.tree()).splitlines() == [
        "s (ActorSystem) running",
        (
            "└─ puppet (Puppet) running, 1 handled, 1 failed, 1 restart, "
            "last error: BoomError: first line second line"
        ),
    ]


async def test_a_long_error_is_shortened_in_print(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    for length, printed in ((89, "x" * 89), (90, "x" * 88 + "…"), (2000, "x" * 88 + "…")):
        await crash(ref, BoomError("x" * length))
        await ref.ask(Echo("a"))
        snapshot = system.tree().find("s/puppet")
        assert snapshot.last_error == "BoomError: " + "x" * length
        assert snapshot.summary.endswith(f", last error: BoomError: {printed}")


async def test_the_process_of_an_incarnation(system: ActorSystem) -> None:
    events: list[Event] = []

    async def show(actor: Puppet) -> None:
        actor.context.show_process(4711)

    with system.subscribe(events.append, messages=False):
        ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
        assert system.tree().find("s/puppet").pid is None
        await ref.ask(Do(show))
        assert system.tree().find("s/puppet").pid == 4711
        assert str(system.tree()).endswith("puppet (Puppet) running, process 4711, 1 handled")
        await crash(ref)
        await ref.ask(Echo("a"))
        # The next incarnation reports it itself, or is in this process.
        assert system.tree().find("s/puppet").pid is None
        await ref.stop()
    assert [(type(event), event.pid) for event in events if isinstance(event, ActorEvent)] == [
        (ActorStarted, None),
        (ActorRestarted, 4711),
        (ActorStarted, None),
        (ActorTerminated, None),
    ]


async def test_a_snapshot_is_of_one_moment(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    before = system.tree()
    await puppet.ask(Echo("a"))
    assert before.find("s/puppet").handled == 0
    assert system.tree().find("s/puppet").handled == 1


async def test_the_stopping_of_system_and_supervisor_is_shown() -> None:
    trees: list[ActorSnapshot] = []

    async def end(actor: Puppet) -> None:
        trees.append(system.tree())

    async with open_system("s", options=SystemOptions()) as system:
        await system.spawn(Puppet, None, None, end, name="puppet")
        async with system.open_supervisor("pool") as pool:
            await pool.spawn(Puppet, None, None, end, name="worker")
    assert trees[0].find("s/pool").state == "stopping"
    assert trees[0].find("s/pool/worker").state == "stopping"
    assert trees[1].state == "stopping"
    assert repr(pool) == "<SupervisorScope s/pool, 0 children>"


async def test_a_system_prints_its_name_and_how_many_actors_it_has(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, DoGrouped(gate))
        assert repr(system) == "<ActorSystem s, 1 actors>"
        gate.open.set()


async def test_actors_that_live_elsewhere_are_shown_below_the_incarnation_that_shows_them(
    system: ActorSystem,
) -> None:
    elsewhere = ActorSnapshot(path="s/here/there", actor_class="Remote", state="running", deferred=2)
    ref = await system.spawn(Puppet, name="here", policy=AT_ONCE)

    async def show(actor: Puppet) -> None:
        actor.context.show(lambda: (elsewhere,))

    await ref.ask(Do(show))
    assert system.tree().find("s/here/there") is elsewhere
    assert str(system.tree()).endswith("└─ there (Remote) running, 2 in flight")
    await crash(ref)
    assert await ref.ask(Echo(1)) == 1
    assert [below.path for below in system.tree().walk()] == ["s", "s/here"]


async def test_a_note_is_shown_in_the_line_of_the_incarnation_that_shows_it(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="here", policy=AT_ONCE)
    notes = ["first", "long " * 30]

    async def show(actor: Puppet) -> None:
        actor.context.show_note(lambda: notes[0])

    await ref.ask(Do(show))
    assert str(system.tree().find("s/here")) == "here (Puppet) running, 1 handled, first"
    del notes[0]
    snapshot = system.tree().find("s/here")
    assert snapshot.note == "long " * 30
    assert snapshot.summary == f"here (Puppet) running, 1 handled, {('long ' * 20)[:99]}…"
    await crash(ref)
    assert await ref.ask(Echo(1)) == 1
    assert system.tree().find("s/here").note is None


async def test_a_tree_deeper_than_the_stack(system: ActorSystem) -> None:
    levels = 2000

    async def grow(actor: Puppet) -> Ref[Puppet]:
        return await actor.context.spawn(Puppet, name="p")

    ref = await system.spawn(Puppet, name="p")
    for _ in range(levels - 1):
        ref = await ref.ask(Do(grow))
    tree = system.tree()
    nodes = list(tree.walk())
    assert len(nodes) == levels + 1
    assert nodes[-1].path == ref.path
    assert tree.find(ref.path).children == ()
    lines = str(tree).split("\n")
    assert len(lines) == levels + 1
    assert lines[-1] == f"{'   ' * (levels - 1)}└─ p (Puppet) running"
    assert repr(tree).endswith("children=<1>)")
    # And it ends, level by level, within the grace of each.
