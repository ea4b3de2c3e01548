"""Endless waits are errors at once: replies that nobody gives, capacity that nobody frees, starts."""

from __future__ import annotations

from typing import Any

import attrs
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
    Note,
    Number,
    Puppet,
    Run,
    deferring,
    started,
)

from trio_accel.actors import (
    Actor,
    ActorFailedError,
    ActorSystem,
    AskCycleError,
    DeferredReply,
    Directive,
    MailboxFullError,
    MailboxOptions,
    MessageFailed,
    Policy,
    Ref,
    Request,
    fast_path,
    handles,
)

TINY = MailboxOptions(capacity=1)
wait = trio.testing.wait_all_tasks_blocked


@attrs.frozen
class Quick(Request["Deferring", int]):
    """Defer, in the task that asks, and return what is given."""

    returns: object


def _defer_now(actor: Deferring, message: Quick) -> object:
    actor.context.defer()
    return message.returns


class Deferring(Actor):
    @handles(Quick)
    @fast_path(_defer_now)
    async def quick(self, message: Quick) -> int:
        raise NotImplementedError


async def defer_and_return(actor: Puppet, replies: list[DeferredReply[Any]], value: object) -> object:
    replies.append(actor.context.defer())
    return value


@pytest.mark.parametrize("value", [None, 5, "another reply"], ids=["None", "a value", "another reply"])
@pytest.mark.parametrize("request_class", [Do, DoGrouped])
async def test_a_handler_that_defers_and_returns_something_else(
    system: ActorSystem, request_class: type[Do], value: object, events: Events
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    replies: list[DeferredReply[Any]] = []
    is_anothers = value == "another reply"

    async def act(actor: Puppet) -> object:
        return await defer_and_return(actor, replies, replies[0] if is_anothers else value)

    async with trio.open_nursery() as nursery:
        if is_anothers:
            await started(nursery, ref, deferring(replies))
        asker = await started(nursery, ref, request_class(act))
        assert isinstance(asker.outcome, ActorFailedError)
        returned = "DeferredReply" if is_anothers else type(value).__name__
        assert str(asker.outcome.__cause__) == (
            f"the handler of {request_class.__name__} in s/puppet deferred its reply and returned "
            f"{returned}; return what self.context.defer() returned, or do not defer"
        )
        # The deferred reply is over.
        assert not replies[-1].set("too late")
        assert await ref.ask(Number()) == 1
        if is_anothers:
            assert replies[0].set("the first")
    assert system.tree().find("s/puppet").deferred == 0
    assert len(events.of(MessageFailed)) == 1


async def test_the_same_served_in_the_task_of_the_asker(system: ActorSystem) -> None:
    ref = await system.spawn(Deferring, policy=AT_ONCE, name="deferring")
    with pytest.raises(ActorFailedError, match="deferred its reply and returned int") as caught:
        await ref.ask(Quick(5))
    assert isinstance(caught.value.__cause__, RuntimeError)
    await wait()
    node = system.tree().find("s/deferring")
    assert (node.deferred, node.restarts, node.failed, node.handled) == (0, 1, 1, 0)


async def test_with_resume_the_asker_gets_the_error_itself(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={RuntimeError: Directive.RESUME}))
    replies: list[DeferredReply[Any]] = []
    with pytest.raises(RuntimeError, match="deferred its reply and returned NoneType"):
        await ref.ask(Do(lambda actor: defer_and_return(actor, replies, None)))
    assert await ref.ask(Number()) == 0


async def test_an_earlier_reply_remains_valid(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> object:
        actor.context.defer().set("given")
        return None

    assert await puppet.ask(Do(act)) == "given"
    assert await puppet.ask(Number()) == 0


async def test_a_tell_to_itself_with_a_full_mailbox(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", mailbox=TINY)

    async def act(actor: Puppet) -> str:
        await ref.tell(Note("has room"))
        with pytest.raises(MailboxFullError) as caught:
            await ref.tell(Note("has none"))
        with pytest.raises(trio.WouldBlock):
            ref.tell_nowait(Note("has none either"))
        notes.append(actor.notes)
        return str(caught.value)

    notes: list[list[str]] = []
    assert await ref.ask(Do(act)) == (
        "Note was not sent: the mailbox of s/puppet is full (1 messages), and s/puppet makes no room before "
        "the sender goes on; use tell_nowait(), or a larger MailboxOptions.capacity"
    )
    await wait()
    assert notes == [["has room"]]
    node = system.tree().find("s/puppet")
    assert (node.mailbox_waiting, node.mailbox_depth, node.dropped) == (0, 0, 1)


async def test_a_tell_to_itself_as_it_starts(system: ActorSystem) -> None:
    refs: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        refs.append(actor.context.ref)
        await refs[0].tell(Note("has room"))
        with pytest.raises(MailboxFullError, match="makes no room before the sender goes on"):
            await refs[0].tell(Note("has none"))

    ref = await system.spawn(Puppet, None, start, mailbox=TINY)
    assert await ref.ask(Echo("alive")) == "alive"


async def test_a_tell_to_an_actor_that_waits_for_the_sender(system: ActorSystem) -> None:
    a = await system.spawn(Puppet, name="a", mailbox=TINY)
    b = await system.spawn(Puppet, name="b")

    async def tell_a(actor: Puppet) -> str:
        await a.tell(Note("has room"))
        with pytest.raises(MailboxFullError, match="the mailbox of s/a is full"):
            await a.tell(Note("has none"))
        return "refused"

    assert await a.ask(Do(lambda actor: b.ask(Do(tell_a)))) == "refused"


async def test_a_tell_that_only_has_to_wait_is_sent(system: ActorSystem) -> None:
    """A handler of a group runs concurrently with the actor's own task, which makes space meanwhile."""
    ref = await system.spawn(Puppet, mailbox=TINY)
    gate = Gate()

    async def act(actor: Puppet) -> str:
        await gate(actor)
        await ref.tell(Note("first"))
        await ref.tell(Note("second"))
        return "both"

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, DoGrouped(act))
        gate.open.set()
    assert asker.outcome == "both"
    others_gate = Gate()
    async with trio.open_nursery() as nursery:
        # From outside of any actor: it waits until there is room.
        await started(nursery, ref, Do(others_gate))
        await started(nursery, ref, Note("fills it"))
        teller = await started(nursery, ref, Note("waits"))
        assert teller.is_waiting
        others_gate.open.set()
    assert teller.outcome == "told"


@pytest.mark.parametrize("where", ["handler", "lifespan", "told"])
async def test_a_starting_child_asks_its_spawner(system: ActorSystem, where: str) -> None:
    errors: list[AskCycleError] = []
    parents: list[Ref[Puppet]] = []

    async def ask_parent(child: Puppet) -> None:
        with pytest.raises(AskCycleError) as caught:
            await parents[0].ask(Echo("from below"))
        errors.append(caught.value)

    async def spawn_child(parent: Puppet) -> None:
        parents.append(parent.context.ref)
        await parent.context.spawn(Puppet, None, ask_parent, name="child")

    ref = await system.spawn(Puppet, None, spawn_child if where == "lifespan" else None, name="parent")
    if where == "handler":
        await ref.ask(Do(spawn_child))
    elif where == "told":
        await ref.tell(Run(spawn_child))
    assert await ref.ask(Echo("alive")) == "alive"
    [error] = errors
    assert str(error) == "the ask would wait for itself: s/parent -> s/parent/child -> s/parent"
    assert error.path == "s/parent"


async def test_a_start_that_waits_for_its_spawner_through_others(system: ActorSystem) -> None:
    """The parent spawns a child, which spawns its own; that asks another, which asks the parent."""
    parent = await system.spawn(Puppet, name="parent")
    between = await system.spawn(Puppet, name="between")
    texts: list[str] = []

    async def ask_back(actor: Puppet) -> None:
        with pytest.raises(AskCycleError) as caught:
            await parent.ask(Echo("back"))
        texts.append(str(caught.value))

    async def start_of_grandchild(actor: Puppet) -> None:
        await between.ask(Do(ask_back))

    async def start_of_child(actor: Puppet) -> None:
        await actor.context.spawn(Puppet, None, start_of_grandchild, name="grandchild")

    async def act(actor: Puppet) -> None:
        await actor.context.spawn(Puppet, None, start_of_child, name="child")

    await parent.ask(Do(act))
    [text] = texts
    names = "s/parent -> s/parent/child -> s/parent/child/grandchild -> s/between -> s/parent"
    assert text == f"the ask would wait for itself: {names}"


async def test_a_child_that_lets_the_error_out_does_not_start(system: ActorSystem) -> None:
    async def act(parent: Puppet) -> str:
        async def ask_parent(child: Puppet) -> None:
            await parent.context.ref.ask(Echo("from below"))

        with pytest.raises(AskCycleError):
            await parent.context.spawn(Puppet, None, ask_parent, name="child")
        return "no child"

    ref = await system.spawn(Puppet, name="parent")
    assert await ref.ask(Do(act)) == "no child"
    assert system.tree().find("s/parent").children == ()


async def test_a_started_child_may_ask_its_parent(system: ActorSystem) -> None:
    children: list[Ref[Puppet]] = []

    async def act(parent: Puppet) -> None:
        children.append(await parent.context.spawn(Puppet, policy=AT_ONCE, name="child"))

    ref = await system.spawn(Puppet, name="parent")
    await ref.ask(Do(act))
    assert await children[0].ask(Do(lambda child: ref.ask(Echo("from below")))) == "from below"


async def test_a_restarted_child_may_ask_its_parent_as_it_starts(system: ActorSystem) -> None:
    """Nobody waits for that start: the parent serves meanwhile."""
    replies: list[str] = []

    async def start(child: Puppet) -> None:
        if child.context.restart.number:
            replies.append(await ref.ask(Echo("from below")))

    async def act(parent: Puppet) -> Ref[Puppet]:
        return await parent.context.spawn(Puppet, None, start, policy=AT_ONCE, name="child")

    ref = await system.spawn(Puppet, name="parent")
    child: Ref[Puppet] = await ref.ask(Do(act))
    with pytest.raises(ActorFailedError):
        await child.ask(Do(_boom))
    assert await child.ask(Number()) == 1
    assert replies == ["from below"]


async def _boom(actor: Puppet) -> None:
    raise BoomError
