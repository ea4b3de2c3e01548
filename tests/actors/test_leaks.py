"""Long runs leave nothing: counted by the garbage collector, and weighed on the runtime's own lines."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import Counter
from pathlib import Path

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    Crash,
    Do,
    DoGrouped,
    Echo,
    Gate,
    Note,
    Number,
    Puppet,
    deferring,
    started,
)

import trio_accel.actors
from trio_accel.actors import (
    ActorFailedError,
    ActorSystem,
    Intensity,
    Policy,
    Ref,
    SystemOptions,
    open_system,
)
from trio_accel.actors._messages import running_cells

_FOLDER = Path(trio_accel.actors.__file__).parent
_FILES = tracemalloc.Filter(inclusive=True, filename_pattern=str(_FOLDER / "*"))
_OWN = "trio_accel.actors"


async def own_objects() -> Counter[str]:
    """How many objects of the runtime's classes there are, when nothing moves."""
    # Trio's own loop holds what it last woke a task with.
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    classes = (type(found) for found in gc.get_objects())
    # The watch over the loop has an object for as long as it sees the loop busy.
    return Counter(
        found.__name__
        for found in classes
        if found.__module__.startswith(_OWN) and not found.__module__.endswith("._loop_watch")
    )


async def quick(actor: Puppet) -> None:
    pass


async def nested(actor: Puppet) -> None:
    """The possible effects of a message: a child, a watch, a stash."""
    child = await actor.context.spawn(Puppet)
    actor.context.watch(child, to=Note("ended"))
    await child.ask(Echo("a"))
    await child.stop()
    actor.notes.clear()


async def crash_quietly(ref: Ref[Puppet]) -> None:
    try:
        await ref.ask(Crash())
    except ActorFailedError:
        return


async def cancelled_ask(ref: Ref[Puppet]) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.ask(Do(quick))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    # The fixture of the test runner keeps logged records.
    caplog.set_level("CRITICAL", logger="trio_accel.actors")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", ["ask", "grouped", "crash", "cancelled", "nested", "deferred", "tell"])
async def test_many_times_leave_no_object_behind(kind: str) -> None:
    options = SystemOptions(intensity=Intensity(10**9, 1.0))
    async with open_system("s", options=options) as system:
        ref = await system.spawn(Puppet, policy=AT_ONCE)

        async def once() -> None:
            if kind == "crash":
                await crash_quietly(ref)
                await ref.ask(Number())
            elif kind == "cancelled":
                await cancelled_ask(ref)
            elif kind == "deferred":
                await _ask_deferred(ref)
            elif kind == "tell":
                await ref.tell(Note("a"))
                await ref.ask(Do(_forget_notes))
            else:
                messages = {"ask": Do(quick), "grouped": DoGrouped(quick), "nested": Do(nested)}
                await ref.ask(messages[kind])

        for _ in range(20):
            await once()
        before = await own_objects()
        for _ in range(300):
            await once()
        assert (await own_objects()) - before == Counter()


async def _forget_notes(actor: Puppet) -> None:
    actor.notes.clear()


async def _ask_deferred(ref: Ref[Puppet]) -> None:
    replies: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, deferring(replies))  # type: ignore[arg-type]
        while not replies:  # noqa: ASYNC110  # it is bounded, and polls no clock
            await trio.lowlevel.checkpoint()
        replies[0].set(None)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("quiet")
async def test_10_000_asks_and_restarts_take_no_memory() -> None:
    options = SystemOptions(intensity=Intensity(10**9, 1.0))
    async with open_system("s", options=options) as system:
        ref = await system.spawn(Puppet, policy=AT_ONCE)

        async def many(count: int) -> None:
            for _ in range(count):
                await ref.ask(Do(quick))
                await ref.ask(DoGrouped(quick))
            for _ in range(count // 10):
                await crash_quietly(ref)

        await many(200)
        tracemalloc.start()
        try:
            await many(200)
            gc.collect()
            before = tracemalloc.take_snapshot().filter_traces([_FILES])
            await many(5000)
            gc.collect()
            after = tracemalloc.take_snapshot().filter_traces([_FILES])
        finally:
            tracemalloc.stop()
        grown = sum(line.size_diff for line in after.compare_to(before, "lineno"))
        # The window of the intensity holds the times of the restarts within it; nothing else may grow.
        window = len(system._supervisor._restarts._counted) * 64
        assert grown < 4096 + window


async def test_an_ended_actor_is_forgotten(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet)
    cell = weakref.ref(_Weak(ref))
    await ref.ask(Echo("a"))
    await ref.stop()
    assert system.tree().children == ()
    assert cell() is None
    count = (await own_objects())["Cell"]
    del ref
    assert (await own_objects())["Cell"] < count


class _Weak:
    """References need no weak references of their own: this one represents immediately released objects."""

    def __init__(self, ref: Ref[Puppet]) -> None:
        self.path = ref.path


@pytest.mark.usefixtures("quiet")
async def test_a_dead_incarnation_is_forgotten_at_the_next_crash(system: ActorSystem) -> None:
    """Until then the traceback of the error that ended it holds the last one."""
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    incarnations: list[weakref.ref[Puppet]] = []

    async def remember(actor: Puppet) -> None:
        incarnations.append(weakref.ref(actor))

    for _ in range(3):
        await ref.ask(Do(remember))
        await crash_quietly(ref)
        await ref.ask(Number())
    await ref.ask(Do(remember))
    gc.collect()
    assert [incarnation() is not None for incarnation in incarnations] == [False, False, True, True]


async def test_replies_and_arguments_are_not_kept(system: ActorSystem) -> None:
    class Big:
        pass

    ref = await system.spawn(Puppet)

    async def make(actor: Puppet) -> Big:
        return Big()

    reply = await ref.ask(Do(make))
    alive = weakref.ref(reply)
    del reply
    # Trio's own loop holds what it last woke a task with.
    await trio.lowlevel.checkpoint()
    gc.collect()
    assert alive() is None


async def test_a_cancelled_ask_leaves_no_envelope_in_the_mailbox(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        for _ in range(50):
            asker = await started(nursery, ref, Echo("a"))
            asker.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        # The error that it ended with holds the last one.
        asker.outcomes.clear()
        assert (await own_objects())["Envelope"] == 1
        gate.open.set()


def test_a_run_leaves_no_task_in_the_registry() -> None:
    async def main() -> None:
        async with open_system("s") as system:
            refs = [await system.spawn(Puppet, policy=Policy()) for _ in range(10)]
            assert {cell.path for cell in running_cells()} == {ref.path for ref in refs}

    trio.run(main)
    assert running_cells() == []


async def test_1000_actors_come_and_go(system: ActorSystem) -> None:
    before = await own_objects()
    refs = [await system.spawn(Puppet) for _ in range(1000)]
    for ref in refs:
        await ref.stop()
    del ref, refs
    assert (await own_objects()) - before == Counter()
