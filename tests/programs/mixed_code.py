"""A program and a kernel for work of all kinds at once; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import trio_accel as ta
from trio_accel import jit
from trio_accel.programs import Array

Host = npt.NDArray[np.float64]


def host_of(array: Any) -> Any:
    """A NumPy array over an array of any backend."""
    if isinstance(array, np.ndarray):
        return array
    from gpu_programs import host_of as of_gpu

    return of_gpu(array)


class Mixed:
    """Its state is an array that other operations also change."""

    def __init__(self, state: Array) -> None:
        self.state = state

    @ta.programs.method(updates=["self.state"], out=lambda x: None)
    def add(self, x: Array) -> None:
        host_of(self.state)[...] += host_of(x)

    @ta.programs.method(updates=["y"])
    def add_to(self, x: Array, y: Array) -> float:
        """Not declared: so its result is sent after the call."""
        host_of(y)[...] += host_of(x)
        return float(host_of(y).sum())

    @ta.programs.method(out=lambda x: (x.shape, "float64"))
    def sum(self, x: Array) -> Any:
        return host_of(x) + host_of(self.state)

    def sum_of_any(self, x: Array) -> Any:
        return [host_of(x) + host_of(self.state)]

    @ta.programs.method(updates=["y"])
    def breaks(self, y: Array) -> None:
        host_of(y)[:1] += 100.0
        raise ValueError("it breaks")


mix = jit.Kernel(
    "mix",
    """
    extern "C" __global__ void mix(long long n, double a, const double* x, double* y) {
        long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i] - y[i];
    }
    """,
    parameters={
        "n": jit.scalar("int64"),
        "a": jit.scalar("float64"),
        "x": jit.reads("float64"),
        "y": jit.updates("float64"),
    },
    grid=lambda n: jit.cdiv(n, 32),
    block=32,
    cpu="mixed_code:mix_cpu",
)
plus = jit.elementwise("2 * x + y", name="plus")
total = jit.reduction("x", "sum", name="total")


def mix_cpu(n: np.int64, a: np.float64, x: Host, y: Host) -> None:
    np.subtract(a * x, y, out=y)
