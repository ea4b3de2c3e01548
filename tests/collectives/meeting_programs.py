"""Programs with ranks that meet; workers import this module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from trio_accel.programs import Array, current_rank, is_cancelled, method

Calls = Sequence[tuple[str, str, int]]


class Meets:
    """Methods that meet the methods of other ranks."""

    def __init__(self, total: Array) -> None:
        self.total = total

    def reduce(self, x: Array, how: str) -> Array:
        made = x.copy()
        current_rank().all_reduce(made, how)  # type: ignore[arg-type]  # one of the reductions
        return made

    def all(self, x: Array) -> list[Array]:
        """Return what each other collective makes."""
        rank = current_rank()
        part = np.empty((len(x) // rank.size, *x.shape[1:]), x.dtype)
        rank.reduce_scatter(x.copy(), part)
        whole = np.empty((len(x) * rank.size, *x.shape[1:]), x.dtype)
        rank.all_gather(x.copy(), whole)
        cast = x.copy()
        rank.broadcast(cast, rank.size - 1)
        ahead, behind = (rank.number + 1) % rank.size, (rank.number - 1) % rank.size
        got = np.empty_like(x)
        if rank.size > 1:
            rank.exchange([(x.copy(), ahead)], [(got, behind)])
        return [part, whole, cast, got]

    def pairs(self, x: Array) -> Array:
        made = x.copy()
        current_rank().group("pair").all_reduce(made, "max")
        current_rank().all_reduce(made, "sum")
        return made

    def series(self, x: Array, calls: Calls) -> Array:
        """Make calls one after the other, each on the result of the last."""
        rank, made = current_rank(), x.copy()
        for name, how, root in calls:
            if name == "all_reduce":
                rank.all_reduce(made, how)  # type: ignore[arg-type]  # one of the reductions
            elif name == "broadcast":
                rank.broadcast(made, root)
            elif rank.number == root:
                rank.send(made, (root + 1) % rank.size)
            elif rank.number == (root + 1) % rank.size:
                rank.recv(made, root)
            made %= 97
        return made

    @method(updates=["self.total"])
    def add(self, x: Array) -> None:
        made = x.copy()
        current_rank().all_reduce(made)
        self.total += made

    @method(updates=["x"])
    def late(self, x: Array, pause: float) -> None:
        """Come to the others after some time; on any device."""
        # clock: the time that this work takes decides nothing
        time.sleep(pause)
        current_rank().all_reduce(x)

    def odd(self, what: str) -> None:
        """Rank 1 does something else than the others."""
        rank, x = current_rank(), np.ones(4)
        rank.all_reduce(x)
        if rank.number != 1:
            rank.all_reduce(x)
        elif what == "other":
            rank.broadcast(x)
        elif what == "longer":
            rank.all_reduce(np.ones(5))
        elif what == "raises":
            raise ValueError("a bad batch")
        elif what == "sleeps":
            while not is_cancelled():
                time.sleep(0.005)

    def forever(self, x: Array) -> None:
        made: Any = x.copy()
        while not is_cancelled():
            current_rank().all_reduce(made, "mean")
