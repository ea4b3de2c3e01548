"""A `VectorIndex` in a worker that is killed while the index is filled, asked, removed from and filtered."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from index_model import exact_vectors, expected_ids

import trio_accel as ta
from trio_accel.agents import VectorIndex

pytestmark = [
    pytest.mark.no_device,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux"),
]

WIDTH, SEARCHERS = 16, 3
OPTIONS = ta.DeviceOptions(
    isolation="process", intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)


class Chooser:
    """A filter that reports the ids of the search."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, tuple[int, ...]()

    def __call__(self, ids: Any) -> Any:
        self.seen = tuple(ids.tolist())
        return ids % self.step == 0


class Work:
    """The index, a model of it, and the program that uses both until there were enough kills."""

    def __init__(self, device: ta.Device, metric: Any, kills: int) -> None:
        self.device, self.metric, self.wanted = device, metric, kills
        self.rng, self.chance = np.random.default_rng(11), random.Random(11)
        self.index = VectorIndex(device, WIDTH, metric=metric)
        # The possible states seen by a search, by the ids that identify them.
        self.held: dict[int, Any] = {}
        self.states: dict[tuple[int, ...], dict[int, Any]] = {(): {}}
        self.kills = self.searches = self.lost = self.changes = 0
        self.next = 0
        self.until_kill, self.kill_now = 5, trio.Event()

    @property
    def is_over(self) -> bool:
        return self.kills >= self.wanted

    async def done(
        self, work: Callable[[], Awaitable[Any]], on_loss: Callable[[], None] = lambda: None
    ) -> Any:
        """Do something until no loss interrupts it; each try counts down to the next kill."""
        while True:
            self.until_kill -= 1
            if self.until_kill == 0:
                self.kill_now.set()
            try:
                return await work()
            except ta.ContextLostError:
                self.lost += 1
                on_loss()

    async def kill(self) -> None:
        while not self.is_over:
            await self.kill_now.wait()
            self.kill_now = trio.Event()
            generation, pid = self.device.generation, (await self.device.statistics()).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with trio.fail_after(60):
                while self.device.generation == generation:
                    with suppress(ta.ContextLostError):
                        await self.device.synchronize()
            self.kills += 1
            self.until_kill = self.chance.randrange(4, 24)

    async def change(self) -> None:
        while not self.is_over:
            after = dict(self.held)
            if len(after) > 400 or (len(after) > 1 and self.chance.random() < 0.4):
                ids = self.chance.sample(sorted(after), self.chance.randrange(1, 1 + len(after) // 2))
                after = {one: vector for one, vector in after.items() if one not in set(ids)}
                await self.take(after, partial(self.index.remove, ids))
            else:
                await self.add()

    async def add(self) -> None:
        count = self.chance.randrange(1, 80)
        ids = [*range(self.next, self.next + count)]
        self.next += count
        self.chance.shuffle(ids)
        vectors = exact_vectors(self.metric, self.rng, count, WIDTH)
        after = self.held | dict(zip(ids, vectors, strict=True))
        await self.take(after, partial(self.index.add, ids, vectors))

    async def take(self, after: dict[int, Any], change: Callable[[], Awaitable[None]]) -> None:
        self.states[tuple(sorted(after))] = after
        # Other tasks search only: after a change that failed, all is as it was.
        await self.done(change, on_loss=partial(self.check_ids, self.held))
        self.held = after
        self.changes += 1
        self.check_ids(after)

    def check_ids(self, held: dict[int, Any]) -> None:
        assert self.index.ids.tolist() == sorted(held)

    async def search(self) -> None:
        while not self.is_over:
            queries = exact_vectors(self.metric, self.rng, 4, WIDTH)
            chooser = Chooser(self.chance.choice([1, 2, 3]))
            found = await self.done(partial(self.index.search, queries, 12, where=chooser))
            state = self.states[chooser.seen]
            chosen = {one: vector for one, vector in state.items() if one % chooser.step == 0}
            np.testing.assert_array_equal(found.ids, expected_ids(self.metric, queries, chosen, 12))
            self.searches += 1


SLOW = [pytest.param(30, metric, marks=pytest.mark.slow) for metric in ("dot", "l2", "cosine")]


@pytest.mark.parametrize(("kills", "metric"), [(5, "dot"), *SLOW])
async def test_nothing_is_lost_and_no_answer_is_wrong(system: ta.System, kills: int, metric: str) -> None:
    async with system.open_device("cpu", options=OPTIONS) as device:
        work = Work(device, metric, kills)
        # A search in an empty index asks nobody, so its tries would take all kills.
        await work.add()
        with trio.fail_after(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work.kill)
                nursery.start_soon(work.change)
                for _ in range(SEARCHERS):
                    nursery.start_soon(work.search)
        assert device.losses >= kills
        assert work.lost + work.changes > kills // 3
        assert work.searches > kills
        queries = exact_vectors(metric, work.rng, 5, WIDTH)
        found = await work.index.search(queries, 1000)
        np.testing.assert_array_equal(found.ids, expected_ids(metric, queries, work.held, 1000))
