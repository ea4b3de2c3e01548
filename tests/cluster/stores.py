"""Shared helpers of the store tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from trio_accel.cluster import Entry, Journal, StoreError

T = TypeVar("T")
MakeStore = Callable[..., Any]


@asynccontextmanager
async def opened(store: Any) -> AsyncGenerator[Any, None]:
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


def entry(number: int, known_by: str | None = None) -> Entry:
    own = f"id {number}" if known_by is None else known_by
    return Entry(number, own, b"message %d" % number, b"reply \x00\xff %d" % number)


def numbers(journal: Journal) -> list[int]:
    return [one.number for one in journal.entries]


async def repeated(call: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Call a store, and once more if its connection was lost with the call before."""
    try:
        return await call(*arguments)
    except StoreError:
        return await call(*arguments)
