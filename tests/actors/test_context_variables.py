"""Context variables of the sender reach the handler, and nothing leaks back."""

from __future__ import annotations

from contextvars import ContextVar

import pytest
import trio
import trio.testing
from sample_actors import AT_ONCE, Do, DoGrouped, Gate, Note, Number, Puppet, Run, crash, started

from trio_accel.actors import ActorSystem, Ref, Terminated

wait = trio.testing.wait_all_tasks_blocked
variable: ContextVar[str] = ContextVar("variable", default="unset")


async def read(actor: Puppet) -> str:
    return variable.get()


async def write(actor: Puppet) -> None:
    variable.set("by the handler")


@pytest.mark.parametrize("message", [Do, DoGrouped])
@pytest.mark.parametrize("is_idle", [True, False])
async def test_the_asker_s_reach_the_handler(
    puppet: Ref[Puppet], message: type[Do | DoGrouped], is_idle: bool
) -> None:
    variable.set("by the asker")
    if is_idle:
        await wait()
        assert await puppet.ask(message(read)) == "by the asker"
        return
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        asker = await started(nursery, puppet, message(read))
        gate.open.set()
    assert asker.outcome == "by the asker"


async def test_the_teller_s_reach_the_handler(puppet: Ref[Puppet]) -> None:
    seen: list[str] = []

    async def act(actor: Puppet) -> None:
        seen.append(variable.get())

    variable.set("by the teller")
    await puppet.tell(Run(act))
    variable.set("afterwards")
    await wait()
    puppet.tell_nowait(Run(act))
    await wait()
    assert seen == ["by the teller", "afterwards"]


@pytest.mark.parametrize("message", [Do, DoGrouped])
async def test_the_handlers_settings_do_not_leak(puppet: Ref[Puppet], message: type[Do | DoGrouped]) -> None:
    variable.set("by the asker")
    await puppet.ask(message(write))
    assert variable.get() == "by the asker"
    assert await puppet.ask(message(read)) == "by the asker"
    assert await puppet.ask(Do(read)) == "by the asker"


async def test_every_message_has_its_own(puppet: Ref[Puppet]) -> None:
    async def ask(text: str) -> None:
        variable.set(text)
        for _ in range(20):
            assert await puppet.ask(Do(read)) == text
            assert await puppet.ask(DoGrouped(read)) == text

    async with trio.open_nursery() as nursery:
        for text in "abcd":
            nursery.start_soon(ask, text)


async def test_they_travel_down_a_chain_of_asks_and_to_tasks_of_the_handler(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    other = await system.spawn(Puppet)
    seen: list[str] = []

    async def act(actor: Puppet) -> str:
        async def helper() -> None:
            seen.append(variable.get())

        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # the nursery is what it tests
            nursery.start_soon(helper)
        return await other.ask(Do(read))

    variable.set("by the first")
    assert await puppet.ask(Do(act)) == "by the first"
    assert seen == ["by the first"]


async def test_the_spawner_s_reach_the_lifespan_of_actor_and_child(system: ActorSystem) -> None:
    seen: list[str] = []

    async def start(actor: Puppet) -> None:
        seen.append(variable.get())
        if len(seen) == 1:
            variable.set("by the lifespan")
            await actor.context.spawn(Puppet, None, start)

    variable.set("by the spawner")
    await system.spawn(Puppet, None, start)
    assert seen == ["by the spawner", "by the lifespan"]
    assert variable.get() == "by the spawner"


async def test_a_child_spawned_by_a_handler_has_the_asker_s(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    seen: list[str] = []

    async def start(actor: Puppet) -> None:
        seen.append(variable.get())

    async def act(actor: Puppet) -> None:
        await actor.context.spawn(Puppet, None, start)

    variable.set("by the asker")
    await puppet.ask(Do(act))
    assert seen == ["by the asker"]


class Shared(Puppet):
    """An actor that serves others for longer than its spawner."""

    inherits_context = False


async def test_a_shared_actor_has_those_of_its_system(puppet: Ref[Puppet], system: ActorSystem) -> None:
    seen: list[str] = []

    async def start(actor: Puppet) -> None:
        seen.append(variable.get())

    async def act(actor: Puppet) -> None:
        await actor.context.spawn(Shared, None, start, policy=AT_ONCE, name="shared")

    variable.set("by the asker")
    await puppet.ask(Do(act))
    assert seen == ["unset"]
    assert variable.get() == "by the asker"
    # Its handlers have the asker's, as those of other actors.
    shared = await system.spawn(Shared, None, start)
    assert await shared.ask(Do(read)) == "by the asker"
    assert seen == ["unset", "unset"]


@pytest.mark.parametrize("ending", ["stop", "crash", "cancel", "itself"])
async def test_the_lifespan_ends_in_the_context_that_it_began_in(system: ActorSystem, ending: str) -> None:
    tokens: list[object] = []
    seen: list[str] = []

    async def start(actor: Puppet) -> None:
        tokens.append(variable.set("by the lifespan"))

    async def end(actor: Puppet) -> None:
        seen.append(variable.get())
        variable.reset(tokens.pop())  # type: ignore[arg-type]

    async def stop(actor: Puppet) -> None:
        variable.set("by the handler")
        actor.context.stop()

    ref = await system.spawn(Puppet, None, start, end, policy=AT_ONCE)
    variable.set("by the asker")
    await ref.ask(Do(write))
    if ending == "stop":
        await ref.stop()
    elif ending == "crash":
        await crash(ref)
        assert await ref.ask(Number()) == 1
    elif ending == "cancel":
        ref.cancel("enough")
        await ref.wait_terminated()
    else:
        await ref.ask(Do(stop))
        await ref.wait_terminated()
    assert seen == ["by the lifespan"]


async def test_the_next_incarnation_does_not_see_the_message_that_crashed_the_last(
    system: ActorSystem,
) -> None:
    seen: list[str] = []

    class Reader(Puppet):
        def __init__(self) -> None:
            super().__init__(None, self.read)
            seen.append(variable.get())

        async def read(self, actor: Puppet) -> None:
            seen.append(variable.get())

    variable.set("by the spawner")
    ref = await system.spawn(Reader, policy=AT_ONCE)
    variable.set("by the asker")
    await crash(ref)
    await ref.ask(Number())
    assert seen == ["by the spawner"] * 4


async def test_a_watch_message_comes_in_the_context_of_the_watch(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    seen: list[str] = []

    class Reader(Puppet):
        async def note(self, message: Note) -> None:
            seen.append(variable.get())

    async def watch(actor: Puppet) -> None:
        actor.context.watch(puppet, to=Note("ended"))

    async def stop(actor: Puppet) -> None:
        actor.context.stop()

    reader = await system.spawn(Reader)
    variable.set("by the one who had it watch")
    await reader.ask(Do(watch))
    variable.set("by the one who stopped the other")
    await puppet.ask(Do(stop))
    ended = await puppet.wait_terminated()
    await wait()
    assert isinstance(ended, Terminated)
    assert seen == ["by the one who had it watch"]
