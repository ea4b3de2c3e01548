"""A CUTLASS product with a fused epilogue as a kernel of a supervised device, beside cuBLASLt.

pip install nvidia-cutlass, which has CUTLASS's headers, and put CUDA's nvcc on the PATH. Then:
python examples/cutlass_gemm.py --check
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import trio

import trio_accel as ta
from trio_accel import jit

Halves: TypeAlias = np.ndarray[Any, np.dtype[np.float16]]
# The source checks both. A tile has 128 rows and 256 columns, and three stages of 32 along k.
THREADS, SHARED_BYTES = 256, 73_728
# Both round their sums in float to halves once; the order of the sums moves a result to the neighbour.
TOLERANCE = 2.0**-9


def compile_cutlass(arch: str) -> bytes:
    """Compile the kernel for an architecture such as ``"sm_90a"``; blocks for half a minute."""
    package, nvcc = find_spec("cutlass_library"), shutil.which("nvcc")
    if package is None or package.origin is None or nvcc is None:
        raise SystemExit("cutlass_gemm: pip install nvidia-cutlass, and put nvcc on the PATH")
    include = Path(package.origin).parent / "source" / "include"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "linear_relu.cubin"
        options = ["-cubin", "-O3", "-std=c++17", "-w", f"-arch={arch}", f"-I{include}", "-o", str(target)]
        sizes = [f"-DTHREADS={THREADS}", f"-DSHARED_BYTES={SHARED_BYTES}"]
        source = Path(__file__).with_suffix(".cu")
        subprocess.run([nvcc, *options, *sizes, str(source)], check=True)  # noqa: S603  # the user's compiler
        return target.read_bytes()


def blocks(m: int, n: int) -> tuple[int, int]:
    """Return the grid, in which CUTLASS groups columns of tiles so that their operands stay in the cache."""
    rows, columns = jit.cdiv(m, 128), jit.cdiv(n, 256)
    group = 8 if columns >= 6 else 4 if columns >= 3 else columns
    return rows * group, jit.cdiv(columns, group)


def by_numpy(m: int, n: int, k: int, x: Halves, weight: Halves, bias: Halves, out: Halves) -> None:
    """Compute the same on the CPU backend."""
    assert (x.shape, weight.shape) == ((m, k), (k, n))
    out[:] = np.maximum(x.astype(np.float32) @ weight.astype(np.float32) + bias, 0)


def declare(cubin: bytes | None) -> jit.Kernel:
    """Declare the kernel; None is for the CPU. It only overwrites `out`, so a lost launch may run again."""
    sizes, half = {name: jit.scalar("int32") for name in ("m", "n", "k")}, "float16"
    return jit.Kernel(
        "linear_relu",
        jit.source("// by_numpy") if cubin is None else jit.cubin(cubin),
        parameters={
            **sizes,
            "x": jit.reads(half, ndim=2),
            "weight": jit.reads(half, ndim=2),
            "bias": jit.reads(half, ndim=1),
            "out": jit.writes(half, shape=lambda m, n: (m, n)),
        },
        grid=blocks,
        block=THREADS,
        shared=SHARED_BYTES,
        cpu="cutlass_gemm:by_numpy",
    )


async def seconds_of(call: Callable[[], Awaitable[object]], repeats: int) -> float:
    """Return the median of the times of a call, after a first one."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = trio.current_time()
        await call()
        times.append(trio.current_time() - start)
    return float(np.median(times[1:]))


def difference(result: Halves, expected: Halves, k: int) -> float:
    """Return the largest difference, relative to the result or, near 0, to the size of the sums."""
    scale = np.maximum(np.abs(expected.astype(np.float32)), np.sqrt(k))
    return float((np.abs(result.astype(np.float32) - expected) / scale).max())


async def compare(device: ta.Device, kernel: jit.Kernel, size: int, *, poison: bool) -> tuple[str, bool]:
    """Return a row of the table, and whether the results are right. A poisoned launch runs again."""
    rng = np.random.default_rng(0)
    m, n, k = size, size + 8, size  # the last tiles are not full
    x, weight, bias = [
        await device.put(rng.normal(size=shape).astype(np.float16)) for shape in ((m, k), (k, n), (n,))
    ]
    launch = partial(kernel, m, n, k, x, weight, bias)
    library = partial(ta.linalg.fused_matmul, x, weight, bias=bias, activation="relu")
    expected = await (await library()).to_host()
    [first] = await launch()
    worst = await trio.to_thread.run_sync(difference, await first.to_host(), expected, k)
    generation = device.generation
    # In advance, because the first launches after a fault are slower.
    own, peer = [await seconds_of(call, 20) for call in (launch, library)]
    if poison:
        ta.testing.inject_fault(device, kernel.operation, poison=True)
        [again] = await launch()
        worst = max(worst, await trio.to_thread.run_sync(difference, await again.to_host(), expected, k))
        assert device.generation == generation + 1  # the worker was replaced
    row = f"{m:>6} {own * 1e3:>10.2f} {peer * 1e3:>10.2f} {own / peer:>7.2f} {worst:>10.1e}"
    return row + f" {'yes' if poison else '':>8}", worst <= TOLERANCE


async def run(sizes: list[int], backend: str | None, arch: str) -> bool:
    """Print the table; return whether all is right."""
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True)
    async with ta.open_system("cutlass") as system, system.open_device(backend, options=options) as device:
        code = None
        if device.info.backend != "cpu":
            code = await trio.to_thread.run_sync(compile_cutlass, arch)
        kernel = declare(code)
        rows = [await compare(device, kernel, size, poison=size == sizes[0]) for size in sizes]
        print(f"max(0, x @ weight + bias) of float16 on {device.name}, milliseconds with the launch")
    print(f"{'size':>6} {'CUTLASS':>10} {'library':>10} {'ratio':>7} {'difference':>10} {'poisoned':>8}")
    print(*[row for row, _ in rows], sep="\n")
    return all(is_right for _, is_right in rows)


def main() -> int:
    """Return the exit code: 0 if the results are right."""
    parser = argparse.ArgumentParser(description="A CUTLASS product as a kernel of a device.")
    parser.add_argument("--size", type=int, default=512, help="rows and columns, a multiple of 8")
    parser.add_argument("--check", action="store_true", help="take the sizes 1024, 4096 and 8192")
    parser.add_argument("--arch", default="sm_90a", help="the architecture of the GPU, for nvcc")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    given = parser.parse_args()
    sizes = [1024, 4096, 8192] if given.check else [given.size]
    is_right = trio.run(run, sizes, given.backend, given.arch)
    print(f"differences at most {TOLERANCE:.0e}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
