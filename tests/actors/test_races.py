"""Two things at once: every pair of cancel, stop, crash and reply, in every order, leaves one outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    Asker,
    BoomError,
    Crash,
    Do,
    DoGrouped,
    Echo,
    Gate,
    Note,
    Number,
    Puppet,
    Run,
    deferring,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorContext,
    ActorError,
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    DeferredReply,
    MailboxOptions,
    Overflow,
    Ref,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


class Scene:
    """An ask in a certain place, and the possible events."""

    def __init__(self, ref: Ref[Puppet]) -> None:
        self.ref = ref
        self.gate = Gate()
        self.asker: Asker
        self.context: ActorContext
        self.replies: list[DeferredReply[Any]] = []

    async def act(self, actor: Puppet) -> str:
        self.context = actor.context
        return await self.gate(actor)

    async def busy(self, actor: Puppet) -> str:
        return await self.act(actor)

    def cancel_ask(self) -> None:
        self.asker.scope.cancel()

    def cancel_actor(self) -> None:
        self.ref.cancel("raced")

    def open_gate(self) -> None:
        self.gate.open.set()

    def crash(self) -> None:
        self.context.crash(BoomError("raced"))

    def stop(self) -> None:
        self.ref._cell.request_stop("raced")

    def reply(self) -> None:
        for reply in self.replies:
            reply.set("replied")

    def unwind(self) -> None:
        for reply in self.replies:
            if reply.is_cancelled:
                reply.cancelled()

    def sweep(self) -> None:
        incarnation = self.ref._cell.incarnation
        if incarnation is not None:
            incarnation.nursery.cancel_scope.cancel()


STEPS: dict[str, Callable[[Scene], None]] = {
    "cancel ask": Scene.cancel_ask,
    "cancel actor": Scene.cancel_actor,
    "open gate": Scene.open_gate,
    "crash": Scene.crash,
    "stop": Scene.stop,
    "reply": Scene.reply,
    "sweep": Scene.sweep,
}
PLACES = ["running", "grouped", "queued", "waiting", "deferred", "stashed"]


async def set_up(scene: Scene, place: str, nursery: trio.Nursery) -> None:
    ref = scene.ref
    if place == "running":
        scene.asker = await started(nursery, ref, Do(scene.act))
    elif place == "grouped":
        scene.asker = await started(nursery, ref, DoGrouped(scene.act))
    elif place == "deferred":
        scene.asker = await started(nursery, ref, deferring(scene.replies, scene.unwind))
        nursery.start_soon(_quietly, ref, Do(scene.act))
        await wait()
    elif place == "stashed":

        async def stash(actor: Puppet) -> None:
            actor.context.stash(stashed)

        stashed = Do(stash)
        scene.asker = await started(nursery, ref, stashed)
        nursery.start_soon(_quietly, ref, Do(scene.act))
        await wait()
    else:
        nursery.start_soon(_quietly, ref, Do(scene.act))
        await wait()
        if place == "waiting":
            await ref.tell(Note("fills the mailbox"))
        scene.asker = await started(nursery, ref, Echo("an echo"))


async def _quietly(ref: Ref[Puppet], message: Any) -> None:
    try:
        await ref.ask(message)
    except ActorError:
        return


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", list(itertools.permutations(STEPS, 2)), ids=" then ".join)
@pytest.mark.parametrize("pause", [0, 1])
async def test_two_things_at_once_leave_one_outcome(place: str, steps: tuple[str, ...], pause: int) -> None:
    async with open_system("s") as system:
        ref = await system.spawn(Puppet, policy=AT_ONCE, mailbox=MailboxOptions(capacity=1))
        scene = Scene(ref)
        async with trio.open_nursery() as nursery:
            await set_up(scene, place, nursery)
            for step in steps:
                STEPS[step](scene)
                for _ in range(pause):
                    await trio.lowlevel.checkpoint()
            await wait()
            scene.open_gate()
            await wait()
            ref.cancel("the test is over")
            await ref.wait_terminated()
            await wait()
            # Exactly one outcome, whatever happened.
            outcome = scene.asker.outcome
            assert isinstance(outcome, (str, ActorError, trio.Cancelled))
            if isinstance(outcome, trio.Cancelled):
                assert "cancel ask" in steps
        assert system.dead_letters <= 3


@pytest.mark.parametrize("pause", range(6))
async def test_a_stop_at_each_step_of_a_restart(system: ActorSystem, pause: int) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    async with trio.open_nursery() as nursery:
        crashing = start_ask(nursery, ref, Crash())
        for _ in range(pause):
            await trio.lowlevel.checkpoint()
        asker = start_ask(nursery, ref, Number())
        await ref.stop()
    assert ref.is_terminated
    assert isinstance(crashing.outcome, (ActorFailedError, ActorStoppedError))
    assert asker.outcome in (0, 1) or isinstance(asker.outcome, ActorStoppedError)


@pytest.mark.parametrize("pause", range(8))
async def test_a_cancellation_at_each_step_of_a_spawn(system: ActorSystem, pause: int) -> None:
    log: list[str] = []

    async def start(actor: Puppet) -> None:
        for _ in range(4):
            await trio.lowlevel.checkpoint()

    async def spawn() -> None:
        with scope:
            refs.append(await system.spawn(Puppet, log, start, name="puppet"))

    scope, refs = trio.CancelScope(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn)
        for _ in range(pause):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    if refs:
        assert await refs[0].ask(Number()) == 0
    else:
        assert system.tree().children == ()
        assert log in ([], ["+puppet0", "-puppet0"])


@pytest.mark.parametrize("pause", range(10))
async def test_a_cancellation_at_each_step_of_a_supervisor_s_body(system: ActorSystem, pause: int) -> None:
    async def run() -> None:
        with scope:
            async with system.open_supervisor("pool") as pool:
                refs.extend([await pool.spawn(Puppet, policy=AT_ONCE) for _ in range(3)])
                await refs[0].ask(Echo("a"))

    scope = trio.CancelScope()
    refs: list[Ref[Puppet]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for _ in range(pause):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    assert system.tree().children == ()
    assert all(ref.is_terminated for ref in refs)


@pytest.mark.parametrize("pause", range(8))
async def test_a_crash_at_each_step_of_a_stop(system: ActorSystem, pause: int) -> None:
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        children.extend([await actor.context.spawn(Puppet, policy=AT_ONCE) for _ in range(2)])

    parent = await system.spawn(Puppet, None, start, policy=AT_ONCE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent.stop)
        for _ in range(pause):
            await trio.lowlevel.checkpoint()
        for child in children:
            incarnation = child._cell.incarnation
            if incarnation is not None:
                incarnation.crash(BoomError())
    assert parent.is_terminated
    assert all(child.is_terminated for child in children)


@pytest.mark.parametrize("overflow", list(Overflow))
async def test_many_askers_of_a_mailbox_of_one_with_cancellations(
    system: ActorSystem, overflow: Overflow
) -> None:
    options = MailboxOptions(capacity=1, overflow=overflow)
    ref = await system.spawn(Puppet, policy=AT_ONCE, mailbox=options)
    askers: list[Asker] = []

    async def act(actor: Puppet) -> str:
        await trio.lowlevel.checkpoint()
        return "done"

    async with trio.open_nursery() as nursery:
        for number in range(100):
            askers.append(start_ask(nursery, ref, (Do, DoGrouped)[number % 2](act)))
            if number % 3 == 0:
                askers[number // 2].scope.cancel()
            if number % 7 == 0:
                await trio.lowlevel.checkpoint()
    kinds = {type(asker.outcome).__name__ for asker in askers}
    assert kinds <= {"str", "Cancelled", "MailboxFullError"}
    assert await ref.ask(Echo("alive")) == "alive"


async def test_an_observer_that_cancels_the_asker_at_each_event(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = Asker()

        def observer(event: object) -> None:
            asker.scope.cancel()

        with system.subscribe(observer):
            nursery.start_soon(asker._run, ref, Do(gate), False)
            await wait()
    assert isinstance(asker.outcome, trio.Cancelled)
    assert await ref.ask(Number()) == 0


async def test_a_reply_from_the_hook_of_its_own_cancellation(puppet: Ref[Puppet]) -> None:
    replies: list[DeferredReply[Any]] = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies, lambda: replies[0].set("just in time")))
        asker.scope.cancel()
    assert asker.outcome == "just in time"


async def test_the_supervisor_fails_while_its_parent_is_stopped(system: ActorSystem) -> None:
    from trio_accel.actors import Directive, Policy

    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        policy = Policy(directives={BoomError: Directive.ESCALATE})
        children.extend([await actor.context.spawn(Puppet, policy=policy) for _ in range(2)])

    parent = await system.spawn(Puppet, None, start, policy=AT_ONCE)
    gates = [Gate(), Gate()]

    def failing(gate: Gate) -> Run:
        async def act(actor: Puppet) -> None:
            await gate(actor)
            raise BoomError

        return Run(act)

    async with trio.open_nursery() as nursery:
        for child, gate in zip(children, gates, strict=True):
            await child.tell(failing(gate))
        await wait()
        nursery.start_soon(parent.stop)
        await wait()
        for gate in gates:
            gate.open.set()
    assert parent.is_terminated
    assert all(child.is_terminated for child in children)


async def test_a_handler_that_swallows_every_cancellation_is_cancelled_once_more_by_each(
    system: ActorSystem,
) -> None:
    """A handler may refuse its caller, but the actor then continues with the next message."""
    ref = await system.spawn(Puppet)
    attempts: list[str] = []

    async def act(actor: Puppet) -> str:
        for _ in range(3):
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:  # noqa: ASYNC103  # the test is about it
                attempts.append("cancelled")
        return "stubborn"

    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.ask(Do(act))
    assert scope.cancelled_caught
    assert attempts == []
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, ref, Do(act))
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        asker.scope.cancel()
    assert asker.outcome == "stubborn" or isinstance(asker.outcome, trio.Cancelled)
    assert await ref.ask(Echo("next")) == "next"


async def test_an_error_that_cannot_be_printed_reaches_its_asker(system: ActorSystem) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    with pytest.raises(ActorFailedError, match=r"UnprintableError: \(it cannot be printed\)") as caught:
        await ref.ask(Do(_raise(UnprintableError())))
    assert isinstance(caught.value.__cause__, UnprintableError)
    assert await ref.ask(Number()) == 1
    assert system.tree().find("s/puppet").last_error == "UnprintableError: (it cannot be printed)"


def _raise(error: Exception) -> Callable[[Puppet], Any]:
    async def act(actor: Puppet) -> None:
        raise error

    return act
