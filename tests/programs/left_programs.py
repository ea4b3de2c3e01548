"""Programs that wait for a pipe, so that their callers can leave them; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_accel.programs import Array, method


def wait(path: str) -> str:
    """Wait until somebody has written to a pipe."""
    with open(path) as file:
        return file.read()


def ends(x: Any) -> tuple[float, float]:
    """Least and greatest element of an array on a GPU, or on its stand-in."""
    from cuda.bindings import driver as bindings

    driver: Any = bindings
    host = np.empty(x.shape, x.dtype)
    driver.cuCtxSynchronize()
    driver.cuMemcpyDtoH(host.ctypes.data, x.__cuda_array_interface__["data"][0], host.nbytes)
    return float(host.min()), float(host.max())


class Waits:
    """Each method waits for a pipe."""

    def __init__(self, weights: Array, counts: Array, made: str = "") -> None:
        if made:
            wait(made)
        self.weights, self.counts = weights, counts

    def plain(self, path: str, x: Array = None) -> Any:
        wait(path)
        return len(self.weights.shape) + (0 if x is None else 1)

    @method(out=lambda path: ((2,), "float64"))
    def declared(self, path: str) -> Array:
        wait(path)
        return np.ones(2)

    @method(updates=["self.counts"], out=lambda path, x=None: None)
    def counts_on(self, path: str, x: Array = None) -> None:
        wait(path)
        self.counts += 1.0 if x is None else x[0]

    def notes(self, note: str, x: Array) -> None:
        """Write down what it gets."""
        low, high = (x.min(), x.max()) if isinstance(x, np.ndarray) else ends(x)
        with open(note, "a") as file:
            file.write(f"{low} {high}\n")

    def quick(self) -> float:
        return float(self.weights.shape[0])


def waits(x: Array, path: str) -> float:
    wait(path)
    return float(x.shape[0])


def waits_for(name: Any, out: Any) -> None:
    """As the function of a kernel on the CPU backend: the pipe's name in bytes, padded."""
    wait(bytes(name).rstrip(b"\0").decode())
    out[...] = 1
