"""Types of devices, arrays and capabilities; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
from scipy import sparse

import trio_accel as ta


async def opening(system: ta.System) -> None:
    assert_type(await system.open_device(), ta.Device)
    options = ta.DeviceOptions(in_flight=8, memory_limit=2**20)
    async with system.open_device("cpu", options=options) as device:
        assert_type(device, ta.Device)
        assert_type(device.info, ta.DeviceInfo)
        assert_type(device.libraries, Sequence[str])
        assert_type(device.generation, int)
        assert_type(device.watch_generation(), AsyncGenerator[int, None])
        assert_type(await device.statistics(), ta.DeviceStatistics)
    assert_type(ta.list_devices(), tuple[ta.DeviceInfo, ...])
    await system.open_device(1)  # type: ignore[arg-type]
    ta.DeviceOptions(8)  # type: ignore[call-arg, arg-type]  # keywords only
    ta.DeviceOptions(in_flight="8")  # type: ignore[arg-type]
    ta.DeviceOptions(in_fligth=8)  # type: ignore[call-arg]
    await system.open_device("cpu").put(1)  # type: ignore[attr-defined]  # it is not awaited


async def arrays(device: ta.Device, host: npt.NDArray[np.float32]) -> None:
    a = await device.put(host)
    assert_type(a, ta.AccelRef)
    assert_type(await device.zeros((2, 3), ta.DType.float32), ta.AccelRef)
    assert_type(await device.full(3, 1.5, np.float64), ta.AccelRef)
    assert_type(a.dtype, ta.DType)
    assert_type(a.shape, tuple[int, ...])
    assert_type(a[1:, None], ta.AccelRef)
    assert_type(a.reshape(2, -1).T, ta.AccelRef)
    assert_type(await a.copy(), ta.AccelRef)
    assert_type(await a.cast("float64"), ta.AccelRef)
    assert_type(await a.fill(0.0), ta.AccelRef)
    assert_type(await a.to_host(), npt.NDArray[Any])
    assert_type(await a.to_host(out=host), npt.NDArray[Any])
    async with a.lease(write=True, stream=7) as array:
        # Its type depends on the backend.
        assert_type(array, Any)
    await a.to_host(host)  # type: ignore[call-arg]  # `out` is a keyword
    await device.zeros("three")  # type: ignore[arg-type]
    a["name"]  # type: ignore[index]
    await (a + "text")  # type: ignore[operator]
    a[0] = 1.0  # type: ignore[index]
    float(a)  # type: ignore[arg-type]


async def products(a: ta.AccelRef, host: npt.NDArray[np.float32]) -> None:
    assert_type(await ta.linalg.matmul(a, host), ta.AccelRef)
    assert_type(await ta.linalg.matmul(host, a, out=a), ta.AccelRef)
    assert_type(await ta.linalg.axpy(2.0, host, a), ta.AccelRef)
    assert_type(await ta.linalg.dot(a, a), ta.AccelRef)
    assert_type(await ta.linalg.nrm2(a), ta.AccelRef)
    assert_type(await ta.linalg.scal(2j, a), ta.AccelRef)
    assert_type(await a.device.ask(ta.linalg.Matmul(a, host)), ta.AccelRef)
    await ta.linalg.axpy(2.0, a, host)  # type: ignore[arg-type]  # what is written to must be on the device
    await ta.linalg.scal(2.0, host)  # type: ignore[arg-type]
    await ta.linalg.matmul(a, a, a)  # type: ignore[call-arg]  # `out` is a keyword


async def transforms(a: ta.AccelRef) -> None:
    assert_type(await ta.fft.fft(a, 16, axis=0, norm="ortho"), ta.AccelRef)
    assert_type(await ta.fft.irfft(await ta.fft.rfft(a)), ta.AccelRef)
    assert_type(await ta.fft.fftn(a, s=(4, 4), axes=(0, 1)), ta.AccelRef)
    assert_type(await ta.fft.irfft2(a, (4, 4), norm="forward", out=a), ta.AccelRef)
    await ta.fft.irfft2(a, n=4)  # type: ignore[call-arg]
    await ta.fft.ifft(a, 4, -1, None, a)  # type: ignore[call-arg]
    await ta.fft.fft(a, norm="unitary")  # type: ignore[arg-type]


async def sparse_matrices(device: ta.Device, matrix: sparse.csr_array[np.float64], x: ta.AccelRef) -> None:
    a = await ta.sparse.csr(device, matrix)
    assert_type(a, ta.sparse.CsrMatrix)
    assert_type(a.nnz, int)
    assert_type(await ta.sparse.spmv(a, x), ta.AccelRef)
    await ta.sparse.spmv(x, a)  # type: ignore[arg-type]


async def random_numbers(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    assert_type(await generator.bits(8), ta.AccelRef)
    assert_type(await generator.uniform((2, 3)), ta.AccelRef)
    assert_type(await generator.normal(8), ta.AccelRef)


async def graphs(device: ta.Device, a: ta.AccelRef) -> None:
    async def step(x: ta.AccelRef) -> tuple[ta.AccelRef, list[ta.AccelRef]]:
        return x, [await ta.linalg.matmul(x, x)]

    graph = await ta.graphs.capture(device, step, a)
    assert_type(graph, ta.graphs.Graph[tuple[ta.AccelRef, list[ta.AccelRef]]])
    assert_type(await graph(a), tuple[ta.AccelRef, list[ta.AccelRef]])
    assert_type(await graph.replay(), tuple[ta.AccelRef, list[ta.AccelRef]])
    pending = device.submit(ta.graphs.Replay(graph, (a,)))
    assert_type(pending.value, tuple[ta.AccelRef, list[ta.AccelRef]])
    await graph(3)  # type: ignore[arg-type]
    with graph as entered:
        assert_type(entered.dot(), str)


async def streams(
    device: ta.Device,
    rows: npt.NDArray[np.float32],
    pairs: Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]],
    named: AsyncIterator[dict[str, npt.NDArray[np.float32]]],
    camera: Callable[[], npt.NDArray[np.uint8] | None],
) -> None:
    async with ta.stream(device, rows, depth=2) as a, ta.stream(device, camera) as b:
        assert_type(a, AsyncIterator[ta.AccelRef])
        assert_type(b, AsyncIterator[ta.AccelRef])
    async with ta.stream(device, pairs) as c, ta.stream(device, named) as d:
        assert_type(c, AsyncIterator[tuple[ta.AccelRef, ...]])
        assert_type(d, AsyncIterator[dict[str, ta.AccelRef]])
    ta.stream(device, 3)  # type: ignore[call-overload]
    assert_type(await device.put(rows, pinned=True), ta.AccelRef)


def errors(error: ta.LibraryError, memory: ta.OutOfMemoryError) -> None:
    assert_type(error.library, str)
    assert_type(error.operation, str | None)
    assert_type(memory.requested, int)
    base: ta.AccelError = error
    del base
