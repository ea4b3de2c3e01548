"""Kernels that the tests launch, and the functions that compute them on the CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import trio_accel as ta
from trio_accel import jit

Array = npt.NDArray[Any]

AXPY = """
template <typename T> __device__ T index() { return blockIdx.x * (T)blockDim.x + threadIdx.x; }

extern "C" __global__ void saxpy(long long n, float a, const float* x, float* y) {
    long long i = index<long long>();
    if (i < n) y[i] = a * x[i] + y[i];
}

template <typename T, int K> __global__ void combine(T a, const T* x, const T* y, T* out, int n) {
    long long i = index<long long>();
    if (i < n) out[i] = a * x[i] + K * y[i];
}
"""

saxpy = jit.Kernel(
    "saxpy",
    AXPY,
    parameters={
        "n": jit.scalar("int64"),
        "a": jit.scalar("float32"),
        "x": jit.reads("float32", ndim=1),
        "y": jit.updates("float32", ndim=1),
    },
    grid=lambda n: jit.cdiv(n, 128),
    block=128,
    skip_empty=True,
    cpu="own_kernels:saxpy_cpu",
)


def saxpy_cpu(n: np.int64, a: np.float32, x: Array, y: Array) -> None:
    y[:n] = a * x[:n] + y[:n]


def combine(dtype: str, c_type: str, layout: Any = "contiguous", **options: Any) -> jit.Kernel:
    """``out = a * x + 3 * y``, an instance of a template; the output may be left out."""
    return jit.Kernel(
        f"combine<{c_type}, 3>",
        AXPY,
        parameters={
            "a": jit.scalar(dtype),
            "x": jit.reads(dtype, layout=layout),
            "y": jit.reads(dtype, layout=layout),
            "out": jit.writes(dtype, layout=layout, shape=lambda x: x.shape),
            "n": jit.scalar("int32"),
        },
        grid=lambda x, block: jit.cdiv(x.size, block[0]),
        block=64,
        skip_empty=True,
        cpu="own_kernels:combine_cpu",
        **options,
    )


def combine_cpu(a: Any, x: Array, y: Array, out: Array, n: np.int32) -> None:
    assert n == x.size
    out[...] = a * x + 3 * y


def one(name: str, source: str, *, cpu: Callable[..., object] | None = None, **more: Any) -> jit.Kernel:
    """A kernel that writes one array of eight float64."""
    parameters = {"out": jit.updates("float64")}
    path = None if cpu is None else f"{cpu.__module__}:{cpu.__qualname__}"
    more = {"parameters": parameters, "grid": 1, "block": 8, **more}
    return jit.Kernel(name, source, cpu=path, **more)


def numbers_cpu(*arguments: Any) -> None:
    """The last argument is filled with the others."""
    *values, out = arguments
    out[...] = [float(value) for value in values]


def strided_cpu(x: Array, step: np.int64, out: Array) -> None:
    assert x.strides == (8 * step,)
    out[...] = x


def tail_cpu(x: Array, n: np.int32) -> None:
    assert x.flags.c_contiguous
    x[:n] += 10


def ones_cpu(out: Array) -> None:
    out[...] = 1.0


def raises_cpu(out: Array) -> None:
    out[...] = 7.0
    raise KeyError("nothing of that name")


def exits_cpu(out: Array) -> None:
    raise SystemExit(3)


def interrupts_cpu(out: Array) -> None:
    raise KeyboardInterrupt


def poisons_cpu(out: Array) -> None:
    raise ta.ContextPoisonedError("not really")


def unprintable_cpu(out: Array) -> None:
    raise UnprintableError


class UnprintableError(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def exhausts_cpu(out: Array) -> None:
    """Changes its array, and finds no memory."""
    out += 1.0
    raise MemoryError


_kept: list[Array] = []


def keeps_cpu(out: Array) -> None:
    _kept.append(out)
    out[...] = 1.0


def keeps_read_cpu(x: Array, out: Array) -> None:
    _kept.append(x[1:])
    out[...] = x


def writes_kept_cpu(out: Array) -> None:
    try:
        _kept.pop()[...] = 666.0
    except ValueError:
        out[...] = 2.0


def read_only_cpu(x: Array, out: Array) -> None:
    x[0] = 1.0


def sets_back_cpu(x: Array, out: Array) -> None:
    x[:1].flags.writeable = True


not_a_function = 3
