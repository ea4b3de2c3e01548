"""The way of a caller's deadline: to its handler, and to the actors that the handler asks."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_actors import Do, DoGrouped, Echo, Events, Gate, Number, Puppet, Run, start_ask, started
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_accel.actors import (
    UNAVAILABLE,
    Actor,
    ActorSystem,
    MessageFailed,
    Ref,
    Request,
    fast_path,
    handles,
    open_system,
)

Seen: TypeAlias = "list[tuple[float, float]]"


def note(seen: Seen) -> Callable[[Puppet], Awaitable[None]]:
    """Note the deadline known to a handler, and the deadline of its waits."""

    async def act(actor: Puppet) -> None:
        seen.append((actor.context.deadline, trio.current_effective_deadline()))

    return act


def asks(
    ref: Ref[Puppet], act: Callable[[Puppet], Awaitable[object]]
) -> Callable[[Puppet], Awaitable[object]]:
    """Ask another actor from a handler."""

    async def relay(actor: Puppet) -> object:
        return await ref.ask(Do(act))

    return relay


async def test_it_reaches_the_last_of_a_chain(system: ActorSystem, mock_clock: MockClock) -> None:
    first, second, third = [await system.spawn(Puppet) for _ in range(3)]
    seen: Seen = []
    act = asks(second, asks(third, note(seen)))
    await first.ask(Do(act))
    with trio.fail_after(7):
        await first.ask(Do(act))
        await first.ask(DoGrouped(act))
    assert seen == [(math.inf, math.inf), (7.0, 7.0), (7.0, 7.0)]


async def test_the_next_actor_serves_no_late_message(system: ActorSystem, autojump_clock: MockClock) -> None:
    """Its own queue ends it: the front, which is shielded, is not heard."""
    front, behind = await system.spawn(Puppet), await system.spawn(Puppet, name="behind")
    busy, never = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, behind, Do(busy))
        with trio.move_on_after(3) as scope:
            await front.ask(Do(asks(behind, never)))
        assert scope.cancelled_caught
        assert trio.current_time() == 3.0
        busy.open.set()
    assert await behind.ask(Echo("alive")) == "alive"
    assert not never.entered.is_set()


Step: TypeAlias = tuple[Literal["within", "shield", "none"], float]


def _expected(deadline: float, step: Step) -> float:
    """The deadline of asks within a block, by Trio's documentation of scopes; all of it at 0 s."""
    kind, seconds = step
    if kind == "shield":
        return math.inf
    return deadline if kind == "none" else min(deadline, seconds)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1.0, 100.0),
    st.lists(
        st.tuples(st.sampled_from(["within", "shield", "none"]), st.floats(1.0, 100.0)),
        min_size=1,
        max_size=5,
    ),
)
def test_each_handler_may_set_an_earlier_one_or_a_shield(seconds: float, steps: list[Step]) -> None:
    """A chain of handlers, each of which asks the next one in a block of its own."""
    seen: Seen = []
    expected = [seconds]
    for step in steps:
        expected.append(_expected(expected[-1], step))

    def act_of(refs: list[Ref[Puppet]], rest: list[Step]) -> Callable[[Puppet], Awaitable[object]]:
        async def act(actor: Puppet) -> None:
            await note(seen)(actor)
            if not rest:
                return
            kind, within = rest[0]
            scope = trio.CancelScope(shield=kind == "shield")
            if kind == "within":
                scope.deadline = within
            with scope:
                await refs[0].ask(Do(act_of(refs[1:], rest[1:])))

        return act

    async def main() -> None:
        async with open_system("s") as system:
            refs = [await system.spawn(Puppet) for _ in range(len(steps) + 1)]
            with trio.fail_after(seconds):
                await refs[0].ask(Do(act_of(refs[1:], steps)))

    trio.run(main, clock=MockClock())
    assert seen == [(deadline, deadline) for deadline in expected]


async def test_a_told_message_has_no_deadline(
    system: ActorSystem, puppet: Ref[Puppet], mock_clock: MockClock
) -> None:
    """Nobody waits for it, so nobody gives up."""
    other = await system.spawn(Puppet)
    seen: Seen = []

    async def tells(actor: Puppet) -> None:
        await other.tell(Run(note(seen)))

    with trio.fail_after(7):
        await puppet.ask(Do(tells))
    await wait_all_tasks_blocked()
    assert seen == [(math.inf, math.inf)]


async def test_an_abandoned_handler_has_no_deadline(puppet: Ref[Puppet], autojump_clock: MockClock) -> None:
    """Its caller leaves at the deadline, and the handler continues."""
    seen: Seen = []
    gate = Gate()

    async def act(actor: Puppet) -> object:
        await note(seen)(actor)
        return await gate(actor)

    with trio.move_on_after(2) as scope:
        await puppet.ask(Do(act), abandon_on_cancel=True)
    assert scope.cancelled_caught
    await trio.sleep(5)
    assert (seen, gate.ended) == ([(math.inf, math.inf)], None)
    gate.open.set()
    assert await puppet.ask(Echo("next")) == "next"
    assert gate.ended == "returned"


@pytest.mark.parametrize("message", [Do, DoGrouped])
async def test_a_handler_ends_although_its_asker_takes_more_time(
    system: ActorSystem,
    puppet: Ref[Puppet],
    events: Events,
    autojump_clock: MockClock,
    message: type[Do | DoGrouped],
) -> None:
    """The request was sent with the first deadline, and its begun work cannot know of the later one."""
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, puppet, message(gate))
        asker.scope.deadline = 5.0
        await wait_all_tasks_blocked()
        asker.scope.deadline = 50.0
        await trio.sleep(10)
        assert isinstance(asker.outcome, trio.TooSlowError)
    assert gate.ended == "Cancelled"
    assert await puppet.ask(Number()) == 0
    node = system.tree().find("s/puppet")
    assert (node.failed, node.handled, node.restarts) == (1, 1, 0)
    (failed,) = events.of(MessageFailed)
    assert isinstance(failed, MessageFailed)
    assert isinstance(failed.error, trio.TooSlowError)


async def test_a_reply_after_the_deadline_is_still_the_reply(
    puppet: Ref[Puppet], autojump_clock: MockClock
) -> None:
    async def shielded(actor: Puppet) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(20)
        return "after all"

    with trio.move_on_after(2) as scope:
        assert await puppet.ask(Do(shielded)) == "after all"
    assert not scope.cancelled_caught


@attrs.frozen
class Remaining(Request["Quick", float]):
    """Ask for the deadline, as a waiting handler knows it."""


@attrs.frozen
class Block(Request["Quick", None]):
    """Keep the actor busy for a second."""


class Quick(Actor):
    @handles(Block)
    async def block(self, message: Block) -> None:
        await trio.sleep(1)

    def _attempt(self, message: Remaining) -> object:
        return UNAVAILABLE

    @handles(Remaining)
    @fast_path(_attempt)
    async def remaining(self, message: Remaining) -> float:
        await trio.lowlevel.checkpoint()
        assert self.context.deadline == trio.current_effective_deadline()
        return self.context.deadline


async def test_a_quick_handler_has_it_when_it_waits(system: ActorSystem, autojump_clock: MockClock) -> None:
    ref = await system.spawn(Quick)
    assert await ref.ask(Remaining()) == math.inf
    with trio.fail_after(9):
        assert await ref.ask(Remaining()) == 9.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ref.ask, Block())
            await wait_all_tasks_blocked()
            assert await ref.ask(Remaining()) == 9.0
