"""The accounts of the soak. They have a module of their own, because each agent of the cluster imports it."""

from __future__ import annotations

import attrs
import numpy as np

import trio_accel as ta
from trio_accel import cluster

__all__ = ["Account", "Add", "Additions"]


@attrs.frozen
class Add(ta.Request["Account", int]):
    """Add a number; the reply is how many there are."""

    number: int


@attrs.frozen
class Additions(ta.Request["Account", list[int]]):
    """All numbers that were added, in their order."""


class Account(cluster.DurableEntity):
    """Remembers each number, so that a lost one and one that was counted twice are seen."""

    save_every = 7

    async def load(self, saved: cluster.Saved | None) -> None:
        """Begin with the numbers that were saved, and with their count on a device."""
        self.numbers: list[int] = [] if saved is None else [int(number) for number in saved["numbers"]]
        self.count = await self.home.device.put(np.zeros(4) if saved is None else saved["count"])

    async def save(self) -> cluster.Saved:
        """Return what is to be saved."""
        return {"numbers": np.array(self.numbers, np.int64), "count": self.count}

    @ta.handles(Add)
    async def add(self, message: Add) -> int:
        """Add a number."""
        await ta.linalg.axpy(1.0, np.ones(4), self.count)
        self.numbers.append(message.number)
        return len(self.numbers)

    @ta.handles(Additions)
    async def additions(self, message: Additions) -> list[int]:
        """Return the numbers, unless the device has counted others."""
        counts = await self.count.to_host()
        if not np.array_equal(counts, np.full(4, len(self.numbers))):
            raise AssertionError(f"the device has counted {counts}, and there are {len(self.numbers)}")
        return list(self.numbers)
