"""Refusals of type checkers for messages and handlers of actors; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import assert_type

import attrs

import trio_accel as ta


@attrs.frozen
class Put(ta.Request["Store", int]):
    key: str
    value: bytes = b""


@attrs.frozen
class Get(ta.Request["Store", bytes | None]):
    key: str


@attrs.frozen
class Clear(ta.Message["Store"]):
    pass


class Store(ta.Actor):
    @ta.handles(Put)
    async def put(self, message: Put) -> int:
        return len(message.value)

    @ta.handles(Get)
    async def get(self, message: Get) -> bytes | None:
        return None

    @ta.handles(Clear)
    async def clear(self, message: Clear) -> None:
        pass


class WrongHandlers(Store):
    @ta.handles(Clear)  # type: ignore[arg-type]  # a told message has no reply
    async def replies(self, message: Clear) -> int:
        return 1

    @ta.handles(Put)  # type: ignore[arg-type]  # it takes another message
    async def takes_another(self, message: Get) -> int:
        return 1

    @ta.handles(Get)  # type: ignore[arg-type]  # it does not await anything, and cannot be awaited
    def is_not_async(self, message: Get) -> bytes | None:
        return None


class Named(ta.Actor):
    def __init__(self, label: str) -> None:
        self.label = label


async def arguments(system: ta.System, store: ta.Ref[Store]) -> None:
    Put()  # type: ignore[call-arg]
    Put(3)  # type: ignore[arg-type]
    Put("a", b"", 3)  # type: ignore[call-arg]
    assert_type(await store.ask(Put("a")), int)
    assert_type(await store.ask(Get("a")), bytes | None)
    await store.ask(Clear)  # type: ignore[arg-type]
    await store.ask(Put("a"), abandon=True)  # type: ignore[arg-type]
    await store.tell(Get("a"))  # type: ignore[arg-type]
    await system.spawn(Store, 1)  # type: ignore[arg-type]
    await system.spawn(Named)  # type: ignore[arg-type]


async def relay(store: ta.Ref[Store], request: ta.Request[Store, int]) -> int:
    return await store.ask(request)


async def relays(store: ta.Ref[Store]) -> None:
    assert_type(await relay(store, Put("a")), int)
    await relay(store, Get("a"))  # type: ignore[arg-type]
