"""A store call that times out before its transaction begins writes nothing, and its error reports that."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from stores import MakeStore, entry, opened, repeated

from trio_accel.cluster import StoreError


@asynccontextmanager
async def timed_out(store: Any, release: threading.Event) -> AsyncGenerator[None, None]:
    """Require that a write times out unbegun after the body has blocked the store.

    Then release the store, and require that its late thread has written nothing.
    """
    # The steps before and after this may take long on a busy machine.
    store.timeout = 0.2
    try:
        yield
        with pytest.raises(StoreError, match="has not answered") as caught:
            await store.write("a", 1, entry(1))
        assert not caught.value.is_begun
    finally:
        release.set()
    store.timeout = 60.0
    async with store._limiter:
        pass
    assert (await repeated(store.take, "a", 1)).number == 0


async def test_a_call_without_a_thread_in_time_has_written_nothing(make_store: MakeStore) -> None:
    async with opened(make_store(timeout=60)) as store:
        await store.take("a", 1)
        release = threading.Event()
        async with timed_out(store, release):
            with pytest.raises(StoreError, match="has not answered") as caught:
                await store._run(release.wait, 60)
            assert caught.value.is_begun


async def test_a_call_that_begins_too_late_writes_nothing(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(make_store(timeout=60)) as store:
        await store.take("a", 1)
        cls, release = cast("Any", type(store)), threading.Event()
        begin = cls._begin

        def begin_late(self: Any) -> None:
            release.wait(60)
            begin(self)

        async with timed_out(store, release):
            monkeypatch.setattr(cls, "_begin", begin_late)
        await store.write("a", 1, entry(1))
