"""A program with methods that fail in every possible way."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from trio_accel.programs import Array, Refused, method

RAISED: dict[str, BaseException] = {
    "declared": ValueError("negative"),
    "refused": Refused("negative"),
    "undeclared": KeyError("a bug"),
    "memory": MemoryError(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
}
SIGNALS = {"killed": signal.SIGKILL, "crash": signal.SIGSEGV}
SECONDS = {"": 0.0, "slow": 1.5, "hang": 30.0}


class Fails:
    """Fails on request, or doubles its argument."""

    def __init__(self, totals: Array) -> None:
        self.totals = totals

    @method(out=lambda x, how: (x.shape, "float64"), refuses=(ValueError,))
    def double(self, x: Array, how: str) -> Array:
        """Updates nothing."""
        if how == "wrong":
            return np.zeros(x.shape, np.int8)
        _fail(how)
        return x * 2

    @method(updates=["self.totals"], out=lambda x, how: None)
    def add(self, x: Array, how: str) -> None:
        """Updates its state, and fails in the middle, but for a refusal."""
        if how == "unchanged":
            raise Refused("negative", unchanged=True)
        self.totals[:1] += x[:1]
        _fail(how)
        self.totals[1:] += x[1:]


class Neighbour:
    """Another program on the same device."""

    @method(out=lambda x: (x.shape, "float64"))
    def half(self, x: Array) -> Array:
        """Takes a while, so that it is in flight when the other fails."""
        # clock: the time that this work takes decides nothing
        time.sleep(1.0)
        return x / 2


def _fail(how: str) -> None:
    # Long enough for others to be in flight.
    # clock: the time that this work takes decides nothing
    time.sleep(SECONDS.get(how, 0.1))
    if how in RAISED:
        raise RAISED[how]
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
    elif how == "left":
        os._exit(3)
