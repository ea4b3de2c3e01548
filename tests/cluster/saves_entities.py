"""Entities and stores for the tests of large arrays: another process finds them by this module."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import cluster


@attrs.frozen(eq=False)
class Put(ta.Request[Any, None]):
    """Have these values as the state, besides the existing ones; arrays in an order of `ordered`."""

    values: dict[str, Any]
    order: str = "whole"


@attrs.frozen
class Forget(ta.Request[Any, None]):
    """Have no state."""


@attrs.frozen
class Look(ta.Request[Any, "dict[str, Any]"]):
    """Reply with the result of `seen` for each value of the state."""


@attrs.frozen
class Break(ta.Request[Any, None]):
    """End the incarnation."""


@attrs.frozen
class Step(ta.Request[Any, float]):
    """Add to all elements, and reply the first."""

    x: float


def seen(value: Any) -> object:
    """Return a fingerprint that distinguishes arrays."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return repr(value)
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    return str(value.dtype), value.dtype.byteorder, value.shape, digest, value.flags.writeable


def ordered(value: Any, order: str) -> Any:
    """Return an array in another order of its elements; a message would carry all of it."""
    match order:
        case "transposed":
            return value.T
        case "every second":
            return value[::2]
        case "reversed":
            return value[::-1]
        case "read-only" if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return value


class Box(cluster.DurableEntity):
    """Holds values of any kind."""

    save_every = 1

    async def load(self, saved: cluster.Saved | None) -> None:
        self.values = dict(saved or {})

    async def save(self) -> cluster.Saved:
        return self.values

    @ta.handles(Put)
    async def put(self, message: Put) -> None:
        order = message.order
        self.values |= {name: ordered(value, order) for name, value in message.values.items()}

    @ta.handles(Forget)
    async def forget(self, message: Forget) -> None:
        self.values = {}

    @ta.handles(Look)
    async def look(self, message: Look) -> dict[str, Any]:
        return {name: seen(value) for name, value in self.values.items()}

    @ta.handles(Break)
    async def end(self, message: Break) -> None:
        raise ZeroDivisionError("as was wanted")


class Other(Box):
    """Another class has entities of its own."""


class Model(cluster.DurableEntity):
    """8 MiB on the device that each message changes, and 1 MiB on the host that none does."""

    save_every = 2

    async def load(self, saved: cluster.Saved | None) -> None:
        self.table = np.arange(1 << 17, dtype=np.float64) if saved is None else saved["table"]
        self.weights = await self.home.device.put(np.zeros(1 << 20) if saved is None else saved["weights"])

    async def save(self) -> cluster.Saved:
        return {"weights": self.weights, "table": self.table}

    @ta.handles(Step)
    async def step(self, message: Step) -> float:
        await ta.linalg.axpy(1.0, np.full(1 << 20, message.x), self.weights)
        assert (self.table == np.arange(1 << 17)).all()
        weights = await self.weights.to_host()
        assert (weights == weights[0]).all()
        return float(weights[0])


class StoppingStore(cluster.SqliteStore):
    """Stops on request, as a process by SIGSTOP would, until it should continue."""

    def stop(self, where: str) -> tuple[trio.Event, trio.Event]:
        """Stop once at a place; returns the events of being there, and of continuing."""
        self.where, self.there, self.go = where, trio.Event(), trio.Event()
        return self.there, self.go

    async def _reach(self, where: str) -> None:
        if getattr(self, "where", None) == where:
            self.where = ""
            self.there.set()
            await self.go.wait()

    async def take(self, entity: str, epoch: int) -> cluster.Journal:
        journal = await super().take(entity, epoch)
        await self._reach("taken")
        return journal

    async def write(self, entity: str, epoch: int, entry: cluster.Entry, saved: bytes | None = None) -> None:
        await self._reach("before the commit")
        await super().write(entity, epoch, entry, saved)
        await self._reach("committed")


class UnsureStore(cluster.SqliteStore):
    """A commit with a lost answer while a file exists."""

    async def write(self, *arguments: Any) -> None:
        await super().write(*arguments)
        if os.path.exists(self.path + ".lost"):  # noqa: ASYNC240
            raise cluster.StoreError("the answer is lost")


class DyingStore(cluster.SqliteStore):
    """Kills its process once after the files of a save, and before its commit."""

    async def write(self, entity: str, epoch: int, entry: cluster.Entry, saved: bytes | None = None) -> None:
        if saved is not None and os.path.exists(self.path + ".kill"):  # noqa: ASYNC240
            os.rename(self.path + ".kill", self.path + ".killed")
            Path(self.path + ".killed").write_text(str(len([*Path(self.folder).glob("*/*")])))  # noqa: ASYNC240
            os.kill(os.getpid(), signal.SIGKILL)
        await super().write(entity, epoch, entry, saved)
