"""A program and a kernel that write, on the CPU and on the stand-in; workers import this module."""

from __future__ import annotations

import functools
from typing import Any

import trio_accel as ta
from trio_accel import jit
from trio_accel.programs import Array, method


def host_of(array: Any) -> Any:
    """The array itself on the CPU, else a NumPy array over its memory."""
    if not hasattr(array, "__cuda_array_interface__"):
        return array
    import gpu_programs

    return gpu_programs.host_of(array)


@method(updates=["array"])
def overwrite(array: Array, values: Array) -> None:
    host_of(array)[...] = host_of(values)


def copy_on_cpu(n: int, values: Any, out: Any) -> None:
    out[:n] = values[:n]


@functools.cache
def copying() -> jit.Kernel:
    """Made at its first use: the package need not have a compiler before."""
    return jit.Kernel(
        "copying",
        """extern "C" __global__ void copying(long long n, const int* values, int* out) {
            long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
            if (i < n) out[i] = values[i];
        }""",
        parameters={
            "n": jit.scalar("int64"),
            "values": jit.reads("int32", ndim=1),
            "out": jit.updates("int32", ndim=1),
        },
        grid=lambda n: jit.cdiv(n, 128),
        block=128,
        cpu="changing_programs:copy_on_cpu",
    )


same = jit.elementwise("out = values", name="same")


async def write_in_graph(values: ta.AccelRef, out: ta.AccelRef) -> None:
    """A step to capture."""
    await same(values, out=out)
