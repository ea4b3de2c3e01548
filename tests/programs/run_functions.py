"""Functions for `ta.run`; workers import this module."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from trio_accel.programs import Array, method

KEPT: list[Any] = []


class OddError(Exception):
    """An error of the module's own."""


def double(x: Array) -> Array:
    return x * 2


def peaks(spectrum: Array, *, count: int = 1) -> tuple[Array, Array]:
    """Places and values of the largest elements."""
    places = np.argsort(spectrum)[::-1][:count]
    return places, np.asarray(spectrum)[places]


def pairs(batch: dict[str, Array], weights: list[Array]) -> dict[str, Any]:
    return {"sum": batch["a"] + weights[0], "names": sorted(batch), "none": None, "part": weights[1][1:]}


@method(out=lambda x: (x.shape, "float64"))
def declared(x: Array) -> Array:
    return x + 1


@method(updates=["x"])
def add_one(x: Array, limit: float = 1e9) -> None:
    x += 1
    if x.max() > limit:
        raise ValueError("above the limit")


@method(refuses=(OddError,))
def odd(x: Array, kind: str) -> Array:
    errors = {"OddError": OddError, "KeyError": KeyError, "StopIteration": StopIteration}
    raise errors[kind](f"not {x.shape}")


def view_of(x: Array) -> Array:
    return x[::-1]


def nothing(x: Array) -> None:
    KEPT.append(x)


def kept(x: Array) -> float:
    """Write to an array of an earlier call."""
    KEPT[-1][...] = x
    return 1.0


def a_set(x: Array) -> Any:
    return {1, 2}


def raises_late(x: Array) -> Array:
    y = x @ x
    raise RuntimeError(f"after {y.shape}")


def slow(x: Array) -> Array:
    # clock: the time that this work takes decides nothing
    time.sleep(0.05)
    return x


async def asynchronous(x: Array) -> Array:
    return x


def generator(x: Array) -> Any:
    yield x


class Callable:
    def __call__(self, x: Array) -> Array:
        return x


instance = Callable()
