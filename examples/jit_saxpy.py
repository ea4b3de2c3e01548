"""A custom kernel: `y = a * x + y` in CUDA code on a GPU, and in NumPy on the CPU backend.

python examples/jit_saxpy.py --backend cpu --isolation process
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Literal

import numpy as np
import trio

import trio_accel as ta
from trio_accel import jit

SOURCE = """
extern "C" __global__ void saxpy(long long n, float a, const float* x, float* y) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def saxpy_cpu(n: int, a: np.float32, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    """Compute the kernel on the CPU backend, which passes NumPy arrays, in a thread of the device."""
    y[:n] += a * x[:n]


def blocks(n: int, block: tuple[int, int, int]) -> int:
    """Return the number of blocks. The launching task passes the arguments with these names."""
    return jit.cdiv(n, block[0])


saxpy = jit.Kernel(
    "saxpy",
    SOURCE,
    parameters={
        "n": jit.scalar("int64"),
        "a": jit.scalar("float32"),
        "x": jit.reads("float32"),
        "y": jit.updates("float32"),
    },
    grid=blocks,
    block=256,
    cpu="jit_saxpy:saxpy_cpu",
)


async def run(size: int, isolation: Literal["inline", "process"], backend: str | None) -> float:
    """Return the largest error."""
    x, y = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    options = ta.DeviceOptions(isolation=isolation)
    async with ta.open_system("jit") as system, system.open_device(backend, options=options) as device:
        on_device = await device.put(y)
        await saxpy(size, 2.0, await device.put(x), on_device)
        error = np.abs(await on_device.to_host() - (2.0 * x.astype(np.float64) + y)).max()
        try:
            await saxpy(size, 2.0, x.astype(np.float64), on_device)
        except TypeError as refusal:
            print(f"refused: {refusal}")
    return float(error)


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description="A custom kernel.")
    parser.add_argument("--size", type=int, default=100_000, help="number of elements")
    parser.add_argument("--isolation", choices=("inline", "process"), default="inline")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    error = trio.run(partial(run, **vars(parser.parse_args())))
    print(f"largest error {error:.0e}: {'right' if error < 1e-6 else 'WRONG'}")
    return 0 if error < 1e-6 else 1


if __name__ == "__main__":
    raise SystemExit(main())
