"""Clusters of blocks, shared memory, code in other forms, and the parts untouched by a compilation."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, IS_STAND_IN
from own_kernels import one, ones_cpu

import trio_accel as ta
from trio_accel import jit

on_cuda = pytest.mark.skipif(BACKEND != "cuda", reason="compiles CUDA code")
on_hardware = pytest.mark.skipif(BACKEND != "cuda" or IS_STAND_IN, reason="the stand-in has no such code")
inline = pytest.mark.parametrize("isolation", ["inline"])
FILLED = 'extern "C" __global__ void filled(double* x) { x[threadIdx.x] = 2 * threadIdx.x; }'
HELPER = 'extern "C" __device__ double helper(double x) { return x * x; }'
SQUARES = """
extern "C" __device__ double helper(double x);
template <int N> __global__ void squares(double* x) { x[threadIdx.x] = helper(threadIdx.x) + N; }
"""
# Each block finds the size of its cluster, and its rank in it.
RANKS = """
extern "C" __global__ void ranks(int* out) {
    unsigned count, rank;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
    if (threadIdx.x == 0) out[blockIdx.x] = count * 100 + rank;
}
"""
TURNED = """
extern "C" __global__ void turned(double* x, int n) {
    extern __shared__ double s[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = s[n - 1 - i];
}
"""


def in_clusters(**changes: Any) -> jit.Kernel:
    """A kernel that fills one number for each block, in clusters of two."""
    more = {
        "parameters": {"out": jit.updates("float64")},
        "grid": lambda out: out.size,
        "block": 1,
        "cluster": 2,
        "cpu": ones_cpu,
        **changes,
    }
    return one("ones", 'extern "C" __global__ void ones(double* x) { x[blockIdx.x] = 1; }', **more)


async def test_a_grid_is_whole_clusters(device: ta.Device) -> None:
    (out,) = await in_clusters()(await device.zeros(8))
    assert (await out.to_host()).tolist() == [1.0] * 8
    untouched = await device.zeros(7)
    text = r"jit\.ones: the grid must be whole clusters of \(2, 1, 1\) blocks, got \(7, 1, 1\)"
    with pytest.raises(ValueError, match=text):
        await in_clusters()(untouched)
    with pytest.raises(ValueError, match="at least one block along each axis"):
        await in_clusters()(await device.zeros(0))
    assert not (await untouched.to_host()).any()
    (empty,) = await in_clusters(skip_empty=True)(await device.zeros(0))
    assert empty.size == 0


@on_cuda
@inline
async def test_a_device_without_clusters_is_reported(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    attribute = driver.cuDeviceGetAttribute
    clusters = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH

    def without(asked: Any, number: Any) -> Any:
        return (driver.CUresult.CUDA_SUCCESS, 0) if asked == clusters else attribute(asked, number)

    monkeypatch.setattr(driver, "cuDeviceGetAttribute", without)
    with pytest.raises(
        ta.LibraryError, match="kernel 'ones': this device does not support clusters of blocks"
    ):
        await in_clusters()(await device.zeros(8))


@pytest.mark.parametrize("block", [0, (1, 0), 1025])
async def test_the_occupancy_of_blocks_that_no_device_runs(device: ta.Device, block: Any) -> None:
    with pytest.raises(ValueError, match="a block must have at"):
        await in_clusters().occupancy(device, block)


@on_cuda
@inline
async def test_others_continue_while_a_kernel_is_compiled(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    from trio_accel.backends.cuda.libraries import compiled as library

    compile_kernel, begun, may_go_on = library.compile_kernel, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert may_go_on.wait(60)
        return compile_kernel(*arguments)

    monkeypatch.setattr(library, "compile_kernel", slow)
    x, done = await device.zeros(8), trio.Event()

    async def launch() -> None:
        await one("filled", FILLED)(x)
        done.set()

    nursery.start_soon(launch)
    await trio.to_thread.run_sync(begun.wait)
    for number in range(3):
        y = await device.full(8, float(number))
        await ta.linalg.scal(2.0, y)
        assert (await y.to_host()).tolist() == [2.0 * number] * 8
    assert not done.is_set()
    may_go_on.set()
    await done.wait()
    assert (await x.to_host()).tolist() == [2.0 * number for number in range(8)]


def compiled(text: str, form: str) -> bytes:
    """NVRTC's result for a source."""
    from cuda.core import Program, ProgramOptions

    linked = {"link_time_optimization": True, "relocatable_device_code": True} if form == "ltoir" else {}
    made: Any = Program(text, "c++", ProgramOptions(arch="sm_90", **linked)).compile(form)
    return bytes(made.code)


@on_hardware
async def test_linked_ptx_and_code(device: ta.Device) -> None:
    for code in (jit.ptx(compiled(FILLED, "ptx")), jit.ltoir(compiled(FILLED, "ltoir"))):
        (out,) = await one("filled", code)(await device.zeros(8))
        np.testing.assert_array_equal(await out.to_host(), 2.0 * np.arange(8))
    for number, helper in ((5, HELPER), (6, jit.ltoir(compiled(HELPER, "ltoir")))):
        (out,) = await one(f"squares<{number}>", SQUARES, link=[helper])(await device.zeros(8))
        np.testing.assert_array_equal(await out.to_host(), np.arange(8.0) ** 2 + number)
    with pytest.raises(ta.CompilationError, match=r"kernel 'squares<7>' does not link") as caught:
        await one("squares<7>", SQUARES, link=["__device__ int other() { return 1; }"])(await device.zeros(8))
    assert "helper" in caught.value.log


@on_hardware
@pytest.mark.parametrize("size", [4, 16])
async def test_blocks_know_their_clusters(device: ta.Device, size: int) -> None:
    parameters = {"out": jit.updates("int32")}
    kernel = one("ranks", RANKS, parameters=parameters, grid=32, block=64, cluster=size)
    (out,) = await kernel(await device.zeros(32, "int32"))
    np.testing.assert_array_equal(await out.to_host(), 100 * size + np.arange(32) % size)
    assert (await kernel.occupancy(device)).max_active_clusters > 0


@on_hardware
async def test_dynamic_shared_memory_of_more_than_48_kib(device: ta.Device) -> None:
    kernel = one(
        "turned",
        TURNED,
        parameters={"x": jit.updates("float64"), "n": jit.scalar("int32")},
        block=256,
        shared=lambda n: 8 * n,
    )
    x = np.arange(28000.0)
    (out,) = await kernel(await device.put(x), x.size)
    np.testing.assert_array_equal(await out.to_host(), x[::-1])
    with pytest.raises(ta.LibraryError, match="asks for 320000 bytes of dynamic shared memory"):
        await kernel(await device.zeros(40000), 40000)
