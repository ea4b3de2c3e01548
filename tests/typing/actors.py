"""Types of actors for type checkers; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, assert_type

import attrs

import trio_accel as ta
import trio_accel.actors


@attrs.frozen
class Add(ta.Request["Counter", int]):
    n: int = 1


@attrs.frozen
class Reset(ta.Message["Counter"]):
    pass


@attrs.frozen
class Names(ta.Request["Counter", list[str]]):
    pass


@attrs.frozen
class Stranger(ta.Request["Other", bytes]):
    pass


@attrs.frozen
class StrangeTell(ta.Message["Other"]):
    pass


class Counter(ta.Actor):
    def __init__(self, start: int, label: str = "") -> None:
        self.value = start
        self.label = label

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        assert_type(context.path, str)
        assert_type(context.deadline, float)
        assert_type(context.restart, ta.RestartInfo)
        yield

    @ta.handles(Add)
    async def add(self, message: Add) -> int:
        return self.value + message.n

    @ta.handles(Reset)
    async def reset(self, message: Reset) -> None:
        self.value = 0

    @ta.handles(Names, group="names", limit=2)
    async def names(self, message: Names) -> list[str] | ta.DeferredReply[list[str]]:
        child = await self.context.spawn(Counter, 1, "child")
        assert_type(child, ta.Ref[Counter])
        return self.context.defer()


class Derived(Counter):
    pass


class Other(ta.Actor):
    pass


@attrs.frozen
class Size(ta.Request["Wrong", int]):
    pass


class Wrong(ta.Actor):
    @ta.handles(Size)  # type: ignore[arg-type]  # it promises an int
    async def size(self, message: Size) -> str:
        return ""


async def conversations(system: ta.System) -> None:
    counter = await system.spawn(Counter, 10, name="counter")
    assert_type(counter, ta.Ref[Counter])
    assert_type(await system.spawn(Counter, 10, "label"), ta.Ref[Counter])
    assert_type(await counter.ask(Add(5)), int)
    assert_type(await counter.ask(Names()), list[str])
    assert_type(await counter.ask(Add(5), abandon_on_cancel=True), int)
    await counter.tell(Reset())
    counter.tell_nowait(Reset())
    assert_type(await counter.wait_terminated(), ta.Terminated)
    assert_type(counter.path, str)

    await counter.ask(Stranger())  # type: ignore[arg-type]
    await counter.ask(Reset())  # type: ignore[arg-type]
    await counter.tell(Add())  # type: ignore[arg-type]
    await counter.tell(StrangeTell())  # type: ignore[arg-type]
    counter.tell_nowait(StrangeTell())  # type: ignore[arg-type]


async def inheritance(system: ta.System) -> None:
    derived = await system.spawn(Derived, 1)
    assert_type(derived, ta.Ref[Derived])
    assert_type(await derived.ask(Add()), int)
    # Callers of the base can talk to its subclasses, and not the other way round.
    await takes_base(derived)
    await takes_derived(await system.spawn(Counter, 1))  # type: ignore[arg-type]


async def takes_base(ref: ta.Ref[Counter]) -> None:
    await ref.tell(Reset())


async def takes_derived(ref: ta.Ref[Derived]) -> None:
    await ref.tell(Reset())


async def constructors(system: ta.System) -> None:
    await system.spawn(Counter, "ten")  # type: ignore[arg-type]
    await system.spawn(Counter, 10, 20)  # type: ignore[arg-type]
    await system.spawn(Counter, 1, name=2)  # type: ignore[arg-type]
    await system.spawn(Counter, 1, restart="never")  # type: ignore[arg-type]
    await system.spawn(int)  # type: ignore[type-var]


async def systems() -> None:
    async with ta.open_system("typed", options=ta.SystemOptions()) as system:
        assert_type(system, ta.System)
        assert_type(system.tree(), ta.ActorSnapshot)
        async with system.open_supervisor("pool", strategy=ta.Strategy.ONE_FOR_ALL) as pool:
            assert_type(pool, ta.SupervisorScope)
            assert_type(await pool.spawn(Counter, 1), ta.Ref[Counter])
    async with trio_accel.actors.open_system("bare") as bare:
        # Without devices.
        assert_type(bare, trio_accel.actors.ActorSystem)
        bare.open_device("cpu")  # type: ignore[attr-defined]


def observing(system: ta.System) -> None:
    def observer(event: ta.Event) -> None:
        if isinstance(event, ta.MessageFailed):
            assert_type(event.error, BaseException)

    assert_type(system.subscribe(observer), ta.Subscription)
    system.subscribe(print)

    def wrong(event: str) -> None: ...

    system.subscribe(wrong)  # type: ignore[arg-type]


def deferred(reply: ta.DeferredReply[int], anything: ta.DeferredReply[Any]) -> None:
    reply.set(3)
    reply.set("three")  # type: ignore[arg-type]
    anything.set("three")
