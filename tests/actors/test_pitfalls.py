"""The fifteen pitfalls of actors on Trio that the design names, each as a test of its own."""

from __future__ import annotations

import ast
import functools
import math
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Crash,
    Do,
    Echo,
    Gate,
    Note,
    Number,
    Puppet,
    crash,
    deferring,
    raises_group,
    start_ask,
    started,
)

import trio_accel.actors
from trio_accel.actors import (
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    DeferredReply,
    Directive,
    Intensity,
    MailboxOptions,
    Policy,
    Ref,
    SystemOptions,
    open_system,
    run_all,
    run_apart,
)

wait = trio.testing.wait_all_tasks_blocked
# The watch over the loop looks from a thread, because a task cannot see that the loop is held.
FILES = [
    path
    for path in sorted(Path(trio_accel.actors.__file__).parent.glob("*.py"))
    if path.name != "_loop_watch.py"
]
SOURCE = "\n".join(path.read_text() for path in FILES)


async def test_1_a_child_s_error_is_data_and_does_not_cancel_the_shared_nursery(system: ActorSystem) -> None:
    """Each cell turns failures into data; only escalation raises."""
    gate = Gate()
    failing = await system.spawn(Puppet, policy=AT_ONCE)
    sibling = await system.spawn(Puppet)
    async with trio.open_nursery() as nursery:
        beside = await started(nursery, sibling, Do(gate))
        for number in range(3):
            await crash(failing)
            assert await failing.ask(Number()) == number + 1
        assert beside.is_waiting
        gate.open.set()
    assert beside.outcome == "through the gate"


async def test_1_only_escalation_raises() -> None:
    with raises_group():
        async with open_system("s") as system:
            await crash(await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.ESCALATE})))
            await trio.sleep_forever()


async def test_2_exception_groups_hide_no_types(system: ActorSystem) -> None:
    """Directives and causes see through the groups of nurseries; strict groups stay on."""
    assert "strict_exception_groups" not in SOURCE
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.RESUME}))

    async def act(actor: Puppet) -> None:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(trio.sleep_forever)
            inner.start_soon(fail)

    async def fail() -> None:
        raise BoomError("inside")

    with pytest.raises(ExceptionGroup) as caught:  # noqa: ASYNC401  # any group will do
        await ref.ask(Do(act))
    assert caught.group_contains(BoomError)
    assert await ref.ask(Number()) == 0


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit])
def test_3_a_group_that_holds_a_failure_and_an_exit_is_not_swallowed(fatal: type[BaseException]) -> None:
    """Not even where the policy would resume after the failure."""

    async def act(actor: Puppet) -> None:
        raise BaseExceptionGroup("both", [BoomError(), fatal()])

    async def main() -> None:
        async with open_system("s") as system:
            policy = Policy(directives={Exception: Directive.RESUME})
            ref = await system.spawn(Puppet, policy=policy)
            with pytest.raises(ActorFailedError):
                await ref.ask(Do(act))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(main)
    assert caught.group_contains(fatal)
    assert caught.group_contains(BoomError)


async def test_3_a_group_that_holds_a_failure_and_cancelled_is_not_swallowed(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(directives={BoomError: Directive.RESUME}))

    async def act(actor: Puppet) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled)
            await trio.sleep_forever()

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise BoomError("while unwinding")

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, Do(act))
        ref.cancel("enough")
    # Resumed after the failure, it would continue although it was cancelled.
    assert isinstance(asker.outcome, ActorFailedError)
    assert isinstance(asker.outcome.__cause__, ActorStoppedError)
    assert (await ref.wait_terminated()).reason == "enough"


async def test_4_a_restart_loop_ends_when_it_is_cancelled() -> None:
    """A child that fails at once, for ever, without back-off."""

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            raise BoomError

    options = SystemOptions(intensity=Intensity(10**9, 1.0))
    with trio.CancelScope() as scope:
        async with open_system("s", options=options) as system:
            ref = await system.spawn(Puppet, None, start, policy=Policy(backoff=Backoff(base=0.0)))
            await crash(ref)
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert ref.is_terminated


async def test_5_cleanup_that_waits_is_bounded_and_then_quarantined(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    """The deadline is the grace; held objects are not freed, but logged and counted."""
    release = trio.Event()

    async def end(actor: Puppet) -> None:
        with trio.CancelScope(shield=True):
            await release.wait()

    ref = await system.spawn(Puppet, None, None, end, name="puppet", policy=Policy(grace=2.0))
    await ref.stop()
    assert trio.current_time() == pytest.approx(4.0)
    assert system.tree().find("s/puppet").state == "quarantined"
    assert system.quarantined == 1
    release.set()
    await ref.wait_terminated()


async def test_5_cancelled_cleanup_does_not_mask_the_real_error(system: ActorSystem) -> None:
    async def end(actor: Puppet) -> None:
        await trio.sleep_forever()

    ref = await system.spawn(Puppet, None, None, end, name="puppet")
    error = BoomError("the real one")
    assert await crash(ref, error) is error
    await wait()
    ref.cancel("its cleanup waits for ever")
    ended = await ref.wait_terminated()
    assert ended.reason == "its cleanup waits for ever"


@pytest.mark.parametrize("order", ["asker first", "actor first"])
async def test_6_an_inner_scope_does_not_catch_cancelled_when_the_outer_is_cancelled_too(
    system: ActorSystem, puppet: Ref[Puppet], order: str
) -> None:
    """Every dequeued envelope is resolved once, whoever cancels."""
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(gate))
        steps = [asker.scope.cancel, lambda: puppet.cancel("both")]
        for step in steps if order == "asker first" else reversed(steps):
            step()
    assert isinstance(asker.outcome, (trio.Cancelled, ActorFailedError))
    await puppet.wait_terminated()


async def test_7_messages_can_be_withdrawn_and_are_kept_without_a_receiver(system: ActorSystem) -> None:
    """A memory channel that loses its last receiver drops them silently; this mailbox is the cell's."""
    assert "open_memory_channel" not in SOURCE
    ref = await system.spawn(Puppet, policy=AT_ONCE, mailbox=MailboxOptions(capacity=3))
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise BoomError

    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(act))
        kept, withdrawn, last = [await started(nursery, ref, Echo(text)) for text in "abc"]
        withdrawn.scope.cancel()
        gate.open.set()
    assert (kept.outcome, last.outcome) == ("a", "c")
    assert isinstance(withdrawn.outcome, trio.Cancelled)


@pytest.mark.parametrize("abandon", [False, True])
async def test_8_no_stale_wake_up_reaches_a_later_wait(system: ActorSystem, abandon: bool) -> None:
    """The reply does not reschedule a caller that left, nor does the death of the actor."""
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    gate, later = Gate(), trio.Event()
    log: list[str] = []

    async def leave_and_wait() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await ref.ask(Do(gate) if abandon else Echo("queued"), abandon_on_cancel=abandon)
        await later.wait()
        log.append("woken by its own event")

    scopes: list[trio.CancelScope] = []
    async with trio.open_nursery() as nursery:
        if not abandon:
            await started(nursery, ref, Do(gate))
        nursery.start_soon(leave_and_wait)
        await wait()
        scopes[0].cancel()
        await wait()
        gate.open.set()
        await wait()
        await crash(ref)
        await ref.stop()
        await wait()
        assert log == []
        later.set()
    assert log == ["woken by its own event"]


async def test_9_siblings_end_in_reverse_start_order(system: ActorSystem) -> None:
    """That of a nursery is random."""
    log: list[str] = []
    async with system.open_supervisor("pool") as pool:
        for number in range(30):
            await pool.spawn(Puppet, log, name=f"n{number:02}")
    assert log[30:] == [f"-n{number:02}0" for number in reversed(range(30))]


async def test_10_a_late_reply_to_an_abandoned_slot_does_nothing(puppet: Ref[Puppet]) -> None:
    replies: list[DeferredReply[Any]] = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies), abandon=True)
        asker.scope.cancel()
    assert isinstance(asker.outcome, trio.Cancelled)
    replies[0].set("late")
    assert not replies[0].set("later still")
    assert await puppet.ask(Echo("alive")) == "alive"


async def test_10_the_death_of_a_cell_resolves_every_open_slot(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, mailbox=MailboxOptions(capacity=1, stash=1))
    gate = Gate()

    async def stash(actor: Puppet) -> None:
        actor.context.stash(stashed)

    stashed = Do(stash)
    async with trio.open_nursery() as nursery:
        askers = [
            await started(nursery, ref, message)
            for message in (deferring([]), stashed, Do(gate), Echo("queued"), Echo("waits"), Note("waits"))
        ]
        assert all(asker.is_waiting for asker in askers)
        ref.cancel("enough")
    outcomes = [type(asker.outcome) for asker in askers]
    assert outcomes == [ActorFailedError, ActorStoppedError, ActorFailedError] + [ActorStoppedError] * 3


async def test_11_no_exception_instance_is_shared_by_asker_and_supervisor(system: ActorSystem) -> None:
    """Each caller has its own copy, so its changes do not reach the others."""
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.STOP}))
    gate = Gate()
    error = BoomError("boom")

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise error

    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(act))
        queued = [await started(nursery, ref, Crash()) for _ in range(3)]
        open_ = Gate()
        gate.open.set()
        open_.open.set()
    raised: list[Any] = [asker.outcome for asker in (running, *queued)]
    assert len({id(one) for one in raised}) == 4
    ended = await ref.wait_terminated()
    assert all(one is not ended.error for one in raised)
    assert all(one.__cause__ is error for one in raised)
    raised[0].add_note("the asker's own")
    assert not hasattr(ended.error, "__notes__")


async def test_12_callbacks_from_threads_do_not_raise_and_are_not_needed(puppet: Ref[Puppet]) -> None:
    """A reply may come by `run_sync_soon`, in an empty context, also twice and after the end."""
    # Errors name them to callers in other threads. Only the watch over the loop has a thread, and calls back.
    users = set[str]()
    for path in Path(trio_accel.actors.__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        # Code of the caller may run in a thread of Trio's.
        threads = {"to_thread"} if path.stem != "_leavable" else set[str]()
        if used & {"run_sync_soon", "from_thread", *threads}:
            users.add(path.stem)
    assert users == {"_loop_watch"}
    replies: list[DeferredReply[Any]] = []
    settled: list[bool] = []

    def settle(value: int) -> None:
        settled.append(replies[0].set(value))

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            for value in (1, 2):
                token.run_sync_soon(functools.partial(settle, value))

        thread = threading.Thread(target=work)
        thread.start()
        await puppet.ask(Echo("meanwhile"))
        while len(settled) < 2:  # noqa: ASYNC110  # it is bounded, and polls no clock
            await trio.lowlevel.checkpoint()
        await trio.to_thread.run_sync(thread.join)
    assert asker.outcome == 1
    assert settled == [True, False]


async def test_13_nothing_polls(system: ActorSystem) -> None:
    """Short sleeps are long, because an idle system has no deadline at all."""
    policy = Policy(backoff=Backoff(base=0.0))
    refs = [await system.spawn(Puppet, policy=policy) for _ in range(20)]
    replies: list[DeferredReply[Any]] = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, refs[0], deferring(replies))
        await crash(refs[1])
        await wait()
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
        replies[0].set(None)
    assert asker.outcome is None


async def test_14_an_autojump_clock_fires_while_a_thread_works_and_the_ask_waits_for_it(
    puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    """Why such clocks are not for real devices: the deadline passes at once. No thread is left."""
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(5.0)
        ended.set()

    async def act(actor: Puppet) -> str:
        try:
            await trio.to_thread.run_sync(work)
        finally:
            assert ended.is_set()
        return "done"

    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, puppet, Do(act))
        asker.scope.deadline = trio.current_time() + 1000.0
        await trio.sleep(2000.0)
        assert asker.is_waiting
        release.set()
    # The thread's work was finished, so its value is delivered.
    assert asker.outcome == "done"


def test_15_no_system_task_outlives_an_await_and_nothing_is_global() -> None:
    others = [path for path in FILES if path.name != "_leavable.py"]
    assert [path.name for path in others if "spawn_system_task" in path.read_text()] == []
    assert not re.search(r"^\w+ *(:.*)?= *trio\.", SOURCE, re.MULTILINE)

    async def main() -> None:
        root = trio.lowlevel.current_root_task()
        assert root is not None

        def system_tasks() -> int:
            return sum(len(nursery.child_tasks) for nursery in root.child_nurseries)

        async def during() -> int:
            await trio.testing.wait_all_tasks_blocked()
            return system_tasks()

        before = system_tasks()
        async with open_system("s") as system:
            await system.spawn(Puppet)
            assert system_tasks() == before
            # Parts of an await that can be closed are system tasks while it lasts.
            assert max(await run_all([during, during])) == before + 2
            assert system_tasks() == before
            waiting = run_apart(trio.sleep_forever).__await__()
            waiting.send(None)
            assert system_tasks() == before + 1
            waiting.close()
            await trio.testing.wait_all_tasks_blocked()
            assert system_tasks() == before

    trio.run(main)


def test_15_import_starts_no_thread_and_touches_no_driver() -> None:
    program = textwrap.dedent(
        """\
        import sys, threading
        import trio_accel.actors
        assert threading.active_count() == 1, threading.enumerate()
        loaded = [name for name in sys.modules if name.split(".")[0] in ("cuda", "cupy", "numpy", "torch")]
        print(loaded)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=15
    )
    assert "cuda" not in result.stdout
