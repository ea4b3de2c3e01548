"""Entities of the cluster example, in a separate module because each node imports it."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

import trio_accel as ta
from trio_accel import cluster

Found = list[tuple[float, int]]


@attrs.frozen
class Add(ta.Request["Account", float]):
    """Add an amount to each day's balance; the reply is the last day's balance."""

    amount: float


class Account(cluster.DurableEntity):
    """Balances of 128 days on a device, which outlive worker, agent and node."""

    save_every = 20

    async def load(self, saved: cluster.Saved | None) -> None:
        """Begin with the saved balances."""
        days = np.zeros(128) if saved is None else saved["days"]
        self.days = await self.home.device.put(days)

    async def save(self) -> cluster.Saved:
        """Return the state to save. The cluster copies device arrays to the host."""
        return {"days": self.days}

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        """Add an amount."""
        await ta.linalg.axpy(1.0, np.full(128, message.amount), self.days)
        return float((await self.days.to_host())[-1])


@attrs.frozen
class Fill(ta.Request["Shard", int]):
    """Compute this node's part of an index from a seed; the reply is its number of rows."""

    seed: int
    rows: int


@attrs.frozen
class Search(ta.Request["Shard", Found]):
    """Find the nearest rows; the reply has a score and a row number for each."""

    query: npt.NDArray[Any]
    count: int


class Shard(cluster.Entity):
    """A part of a vector index, one on each node."""

    vectors: ta.AccelRef | None = None
    seed: int = 0

    @ta.handles(Fill)
    async def fill(self, message: Fill) -> int:
        """Put the vectors on the device of the node."""
        rows = np.random.default_rng(message.seed).standard_normal((message.rows, 64)).astype(np.float32)
        self.vectors, self.seed = await self.home.device.put(rows), message.seed
        return message.rows

    @ta.handles(Search)
    async def search(self, message: Search) -> Found:
        """Score all rows by one product, and take the best."""
        if self.vectors is None:
            return []
        scores = await (await (self.vectors @ message.query)).to_host()
        best = np.argsort(scores)[::-1][: message.count]
        return [(float(scores[row]), self.seed * len(scores) + int(row)) for row in best]
