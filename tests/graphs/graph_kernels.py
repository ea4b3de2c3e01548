"""A kernel of a graph, and its computation on the CPU backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trio_accel import jit

halves = jit.Kernel(
    "halves",
    """
    extern "C" __global__ void halves(long long n, const double* x, double* y) {
        long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        if (i < n) y[i] = 0.5 * x[i] + 1.0;
    }
    """,
    parameters={
        "n": jit.scalar("int64"),
        "x": jit.reads("float64"),
        "y": jit.writes("float64", shape=lambda x: x.shape),
    },
    grid=lambda n: jit.cdiv(n, 128),
    block=128,
    cpu="graph_kernels:halves_cpu",
)


def halves_cpu(n: np.int64, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    """The result of the kernel."""
    y[...] = 0.5 * x + 1.0
