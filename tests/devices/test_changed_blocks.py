"""Any write to an array discards the cached facts about its contents.

A sparse structure is checked once, and then used without a check. So each way to write replaces a checked
structure by a wrong one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import scipy.sparse
from changing_programs import copying, host_of, overwrite, same, write_in_graph
from chosen import BACKEND, IS_STAND_IN

import trio_accel as ta
from trio_accel import graphs, sparse
from trio_accel.devices import Assign

pytestmark = pytest.mark.skipif(
    BACKEND not in ("cpu", "cuda") or (BACKEND == "cuda" and not IS_STAND_IN),
    reason="NumPy sees the memory of the CPU and of the stand-in",
)

Write: TypeAlias = "Callable[[ta.AccelRef, ta.AccelRef], Awaitable[object]]"
Use: TypeAlias = "Callable[[sparse.CsrMatrix, ta.AccelRef], Awaitable[Any]]"

RIGHT, OTHER, WRONG = ([0, 2, 1, 3, 0], [1, 3, 0, 2, 3], [0, 2, 9, 3, 0])
INDPTR = [0, 2, 3, 4, 5]
X = np.array([1.0, 10.0, 100.0, 1000.0])


async def assign(array: ta.AccelRef, values: ta.AccelRef) -> object:
    return await array.assign(values)


async def assign_from_host(array: ta.AccelRef, values: ta.AccelRef) -> object:
    return await array.assign(await values.to_host())


async def assign_to_a_view(array: ta.AccelRef, values: ta.AccelRef) -> object:
    await array[3:].assign(values[3:])
    return await array[:3].assign(values[:3])


async def compute_into(array: ta.AccelRef, values: ta.AccelRef) -> object:
    return await same(values, out=array)


async def fill_each(array: ta.AccelRef, values: ta.AccelRef) -> object:
    for place, value in enumerate(await values.to_host()):
        await array[place : place + 1].fill(int(value))
    return array


async def lease(array: ta.AccelRef, values: ta.AccelRef) -> None:
    host = await values.to_host()
    async with array.lease(write=True) as given:
        host_of(given)[...] = host


async def run_kernel(array: ta.AccelRef, values: ta.AccelRef) -> object:
    return await copying()(values.size, values, array)


async def run_program(array: ta.AccelRef, values: ta.AccelRef) -> object:
    return await ta.run(overwrite, array, values)


async def replay(array: ta.AccelRef, values: ta.AccelRef) -> None:
    graph = await graphs.capture(array.device, write_in_graph, values, array)
    # From the third on it is launched as one.
    for _ in range(5):
        await graph(values, array)
    graph.close()


async def multiply(matrix: sparse.CsrMatrix, x: ta.AccelRef) -> Any:
    return await (await sparse.spmv(matrix, x)).to_host()


async def multiply_in_graph(matrix: sparse.CsrMatrix, x: ta.AccelRef) -> Any:
    async def step(
        indptr: ta.AccelRef, indices: ta.AccelRef, data: ta.AccelRef, x: ta.AccelRef
    ) -> ta.AccelRef:
        return await sparse.spmv(sparse.CsrMatrix(matrix.shape, indptr, indices, data), x)

    graph = await graphs.capture(matrix.device, step, matrix.indptr, matrix.indices, matrix.data, x)
    for _ in range(4):
        made = await graph.replay()
    return await made.to_host()


WRITES: list[Write] = [
    assign,
    assign_from_host,
    assign_to_a_view,
    compute_into,
    fill_each,
    lease,
    run_kernel,
    run_program,
    replay,
]


async def take_part(matrix: sparse.CsrMatrix, x: ta.AccelRef) -> Any:
    made = await sparse.tril(matrix, 3)
    parts = [await one.to_host() for one in (made.data, made.indices, made.indptr)]
    return scipy.sparse.csr_array(tuple(parts), shape=(4, 4)) @ X


USES: list[Use] = [multiply, multiply_in_graph, take_part]


def expected(indices: list[int]) -> Any:
    return scipy.sparse.csr_array((np.arange(1.0, 6.0), indices, INDPTR), shape=(4, 4)) @ X


async def opened(device: ta.Device) -> tuple[sparse.CsrMatrix, ta.AccelRef]:
    parts = [np.array(INDPTR, np.int32), np.array(RIGHT, np.int32), np.arange(1.0, 6.0)]
    return sparse.CsrMatrix((4, 4), *[await device.put(part) for part in parts]), await device.put(X)


@pytest.mark.parametrize("use", USES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
async def test_a_cached_structure_is_checked_again(device: ta.Device, write: Write, use: Use) -> None:
    if write is lease and BACKEND == "cuda" and device.isolation == "process":
        pytest.skip("the memory of a GPU is its worker's")
    matrix, x = await opened(device)
    wrong, other = [await device.put(np.array(values, np.int32)) for values in (WRONG, OTHER)]
    for _ in range(3):
        np.testing.assert_array_equal(await use(matrix, x), expected(RIGHT))
    await write(matrix.indices, wrong)
    for _ in range(2):
        with pytest.raises(ta.LibraryError, match="indices"):
            await use(matrix, x)
    await write(matrix.indices, other)
    for _ in range(3):
        np.testing.assert_array_equal(await use(matrix, x), expected(OTHER))
    await write(matrix.indices, wrong)
    with pytest.raises(ta.LibraryError, match="indices"):
        await use(matrix, x)


async def test_a_look_that_a_write_has_overtaken_proves_nothing(device: ta.Device) -> None:
    matrix, x = await opened(device)
    wrong = await device.put(np.array(WRONG, np.int32))
    # Both are launched before either is complete.
    pending = [device.submit(sparse.Spmv(matrix, x)), device.submit(Assign(matrix.indices, wrong))]
    for each in pending:
        await each.wait()
    for _ in range(2):
        with pytest.raises(ta.LibraryError, match="indices"):
            await multiply(matrix, x)


async def test_a_graph_writes_arrays_it_has_checked(device: ta.Device) -> None:
    matrix, x = await opened(device)
    wrong, right = [await device.put(np.array(values, np.int32)) for values in (WRONG, RIGHT)]

    async def step(indices: ta.AccelRef, values: ta.AccelRef, x: ta.AccelRef) -> ta.AccelRef:
        own = sparse.CsrMatrix(matrix.shape, matrix.indptr, indices, matrix.data)
        made = await sparse.spmv(own, x)
        await same(values, out=indices)
        return made

    graph = await graphs.capture(device, step, matrix.indices, right, x)
    for _ in range(5):
        await graph(matrix.indices, right, x)
    await graph(matrix.indices, wrong, x)
    for _ in range(2):
        with pytest.raises(ta.LibraryError, match="indices"):
            await multiply(matrix, x)
    graph.close()
