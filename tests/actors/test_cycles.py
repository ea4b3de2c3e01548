"""Ask cycles are refused at once, whatever their length."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing
from sample_actors import Do, Echo, Gate, Puppet, started

from trio_accel.actors import ActorContext, ActorSystem, AskCycleError, Ref

wait = trio.testing.wait_all_tasks_blocked


@attrs.define
class Hop:
    """Asks one after the other, each from within the one before."""

    path: list[Ref[Puppet]]

    async def __call__(self, actor: Puppet) -> Any:
        first, *rest = self.path
        return await first.ask(Do(Hop(rest)) if rest else Echo("end"))


async def spawn(system: ActorSystem, names: str) -> list[Ref[Puppet]]:
    return [await system.spawn(Puppet, name=name) for name in names]


async def test_an_actor_cannot_ask_itself(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> str:
        with pytest.raises(AskCycleError) as caught:
            await puppet.ask(Echo("myself"))
        assert caught.value.path == "s/puppet"
        return str(caught.value)

    assert await puppet.ask(Do(act)) == "the ask would wait for itself: s/puppet -> s/puppet"


async def test_a_asks_b_asks_a(system: ActorSystem) -> None:
    a, b = await spawn(system, "ab")

    async def act(actor: Puppet) -> str:
        with pytest.raises(AskCycleError, match=r"s/a -> s/b -> s/a$"):
            await a.ask(Echo("back"))
        return "refused"

    assert await a.ask(Do(lambda actor: b.ask(Do(act)))) == "refused"


async def test_a_longer_cycle_names_only_its_members(system: ActorSystem) -> None:
    a, b, c, d = await spawn(system, "abcd")

    async def act(actor: Puppet) -> str:
        with pytest.raises(AskCycleError) as caught:
            await b.ask(Echo("back"))
        return str(caught.value)

    text = await a.ask(Do(lambda _: b.ask(Do(lambda _: c.ask(Do(lambda _: d.ask(Do(act))))))))
    assert text == "the ask would wait for itself: s/b -> s/c -> s/d -> s/b"


async def test_a_chain_without_a_cycle_is_accepted(system: ActorSystem) -> None:
    a, b, c = await spawn(system, "abc")
    assert await a.ask(Do(Hop([b, c]))) == "end"


async def test_asking_an_actor_that_waits_elsewhere_is_not_a_cycle(system: ActorSystem) -> None:
    a, b, c = await spawn(system, "abc")
    gate = Gate()
    async with trio.open_nursery() as nursery:
        # a waits for c; b asks a meanwhile and has to wait, but not for itself.
        first = await started(nursery, a, Do(lambda _: c.ask(Do(gate))))
        second = await started(nursery, b, Do(Hop([a])))
        assert second.is_waiting
        gate.open.set()
    assert (first.outcome, second.outcome) == ("through the gate", "end")


async def test_an_asker_with_an_abandoned_request_no_longer_waits(system: ActorSystem) -> None:
    a, b = await spawn(system, "ab")
    gate = Gate()

    async def ask_b(actor: Puppet) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await b.ask(Do(ask_a), abandon_on_cancel=True)

    async def ask_a(actor: Puppet) -> None:
        await gate(actor)
        outcomes.append(await a.ask(Echo("free again")))

    scopes: list[trio.CancelScope] = []
    outcomes: list[str] = []
    async with trio.open_nursery() as nursery:
        await started(nursery, a, Do(ask_b))
        scopes[0].cancel()
        await wait()
        gate.open.set()
        await wait()
    assert outcomes == ["free again"]


async def test_an_ask_of_itself_from_the_lifespan_is_a_cycle(system: ActorSystem) -> None:
    context: list[ActorContext] = []

    async def start(actor: Puppet) -> None:
        context.append(actor.context)
        with pytest.raises(AskCycleError):
            await Ref(actor.context._cell).ask(Echo("myself"))

    ref = await system.spawn(Puppet, None, start)
    assert await ref.ask(Echo("alive")) == "alive"


async def test_a_tell_is_never_a_cycle(system: ActorSystem) -> None:
    from sample_actors import Note

    a, b = await spawn(system, "ab")

    async def act(actor: Puppet) -> str:
        await a.tell(Note("back"))
        return "told"

    assert await a.ask(Do(lambda _: b.ask(Do(act)))) == "told"


async def test_a_second_round_after_the_first_has_ended_is_not_a_cycle(system: ActorSystem) -> None:
    a, b = await spawn(system, "ab")
    for _ in range(3):
        assert await a.ask(Do(Hop([b]))) == "end"
        assert await b.ask(Do(Hop([a]))) == "end"
