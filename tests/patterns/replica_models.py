"""Models for tests of routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

import trio_accel as ta
from trio_accel.patterns import GetStatistics

Model = Callable[[Any], Awaitable[Any]]


def named(name: str, seconds: float = 0.0) -> Model:
    """A model that returns its name after some time."""

    async def model(item: Any) -> str:
        await trio.sleep(seconds)
        return name

    return model


async def statistics_of(ref: ta.Ref[Any]) -> Any:
    return await ref.ask(GetStatistics())
