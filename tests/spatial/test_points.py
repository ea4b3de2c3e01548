"""Points by cells, and their neighbours, against NumPy and SciPy's tree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import pytest
from chosen import BACKEND, INLINE
from scipy.spatial import cKDTree

import trio_accel as ta
from trio_accel.backends import resolve
from trio_accel.backends.cpu import CpuBackend
from trio_accel.spatial import cell_list, neighbours
from trio_accel.testing import inject_fault

RUNS_KERNELS = resolve(BACKEND)[1].runs_kernels

Array: TypeAlias = np.ndarray[Any, Any]

RNG = np.random.default_rng(0)


def some(count: int, axes: int, dtype: str = "float64") -> Array:
    return (RNG.random((count, axes)) * 7 - 3).astype(dtype)


def by_numpy(points: Array, low: Any, size: Any, shape: Sequence[int]) -> tuple[Array, Array]:
    """Order and starts; points outside come last."""
    places = np.floor((points.astype(np.float64) - low) / size)
    inside = np.all((places >= 0) & (places < shape), axis=1)
    cells = np.full(len(points), np.prod(shape))
    cells[inside] = np.ravel_multi_index(tuple(places[inside].astype(int).T), shape)
    order = np.argsort(cells, kind="stable")
    return order, np.searchsorted(cells[order], np.arange(np.prod(shape) + 1))


async def check(cells: ta.spatial.CellList, expected: tuple[Array, Array]) -> None:
    np.testing.assert_array_equal(await cells.order.to_host(), expected[0])
    np.testing.assert_array_equal(await cells.starts.to_host(), expected[1])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int16"])
@pytest.mark.parametrize("axes", [1, 2, 3])
async def test_the_grid_around_all_points(device: ta.Device, axes: int, dtype: str) -> None:
    points = some(400, axes, dtype)
    size = np.array([0.9, 0.7, 1.1])[:axes]
    for given in (1.0, size.tolist()):
        cells = await cell_list(await device.put(points), given)
        low = points.min(axis=0).astype(np.float64)
        shape = np.floor((points.max(axis=0) - low) / given).astype(int) + 1
        assert cells.low == tuple(low)
        assert cells.shape == tuple(shape)
        await check(cells, by_numpy(points, low, given, cells.shape))


async def test_more_cells_than_numbers_of_16_bits(device: ta.Device) -> None:
    points = some(400, 3)
    for shape in (40, 41):  # 64000 and 68921 cells
        cells = await cell_list(await device.put(points), 7 / shape, low=-3.0, shape=shape)
        await check(cells, by_numpy(points, -3.0, 7 / shape, cells.shape))


async def test_points_outside_are_in_no_cell(device: ta.Device) -> None:
    points = np.array([[0.0, 1.0], [np.nan, 0], [5, 5], [-1e-9, 0], [3.999, 0], [4, 0], [1, np.inf]])
    cells = await cell_list(await device.put(points), 1.0, low=0, shape=(4, 2))
    order, starts = await cells.order.to_host(), await cells.starts.to_host()
    assert order.tolist() == [0, 4, 1, 2, 3, 5, 6]
    assert starts.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]


async def test_a_periodic_box(device: ta.Device) -> None:
    points = np.append(some(300, 2), [[-1e-18, 0.0], [7.0, 14.0], [np.nan, 0]], axis=0)
    cells = await cell_list(await device.put(points), (0.9, 2.0), box=7.0)
    assert (cells.shape, cells.size, cells.low) == ((7, 3), (1.0, 7 / 3), (0.0, 0.0))
    wrapped = np.mod(points, 7.0)
    wrapped[wrapped >= 7.0] = np.nextafter(7.0, 0.0)
    await check(cells, by_numpy(wrapped, 0.0, cells.size, cells.shape))
    # 0.3 / 0.1 is less than 3.
    assert (await cell_list(await device.put(points), 0.1, box=0.3)).shape == (3, 3)


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_few_points(device: ta.Device, count: int) -> None:
    points = await device.put(np.ones((count, 3)))
    cells = await cell_list(points, 1.0)
    assert cells.shape == (1, 1, 1)
    assert (await cells.order.to_host()).tolist() == [*range(count)]
    assert (await cells.starts.to_host()).tolist() == [0, count]
    starts, indices = await neighbours(points, 0.1)
    assert (await starts.to_host()).tolist() == [[0], [0, 0], [0, 1, 2]][count]
    assert (await indices.to_host()).tolist() == [[], [], [1, 0]][count]


@pytest.mark.parametrize("box", [None, 7.0, 2.0, 0.5])
@pytest.mark.parametrize("axes", [1, 2, 3])
async def test_neighbours_match_scipys_tree(device: ta.Device, axes: int, box: float | None) -> None:
    points = some(300, axes)
    wrapped = points if box is None else np.mod(points, box)
    # Its types know no single period.
    tree: Any = cKDTree(wrapped, boxsize=cast("Any", box))
    for radius in (0.05, 0.8, 20.0):
        starts, indices = [
            await one.to_host() for one in await neighbours(await device.put(points), radius, box=box)
        ]
        found = [indices[start:end].tolist() for start, end in pairwise(starts)]
        near = tree.query_ball_point(wrapped, radius, return_sorted=True)
        assert found == [[other for other in each if other != i] for i, each in enumerate(near)]


@pytest.mark.skipif(BACKEND != "cpu", reason="the CPU stands for a device that compiles no kernels")
@pytest.mark.parametrize("box", [None, 7.0, 2.0])
@pytest.mark.parametrize("axes", [1, 2, 3])
async def test_a_device_without_kernels_finds_the_same_neighbours(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, axes: int, box: float | None
) -> None:
    infos = tuple(attrs.evolve(info, runs_kernels=False) for info in CpuBackend().list_devices())
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: infos)
    points = some(300, axes) if box is None else np.mod(some(300, axes), box)
    tree: Any = cKDTree(points, boxsize=cast("Any", box))
    expected = tree.query_ball_point(points, 0.8, return_sorted=True)
    async with system.open_device("cpu", options=INLINE) as device:
        assert not device.info.runs_kernels
        starts, indices = [
            await one.to_host() for one in await neighbours(await device.put(points), 0.8, box=box)
        ]
    found = [indices[start:end].tolist() for start, end in pairwise(starts)]
    assert found == [[other for other in near if other != i] for i, near in enumerate(expected)]


async def test_neighbours_on_a_lattice(device: ta.Device) -> None:
    """Distances equal to the radius are within it, at any edge of a cell."""
    points = np.stack(np.meshgrid(*[np.arange(6.0)] * 3), axis=-1).reshape(-1, 3).astype(np.float32)
    for box, pairs in [(None, 6 * 6**3 - 6 * 6**2), (6.0, 6 * 6**3)]:
        _, indices = await neighbours(await device.put(points), 1.0, box=box)
        assert indices.size == pairs


# Springs between particles in a periodic box of cells with the extent 1, by 27 ranges for each particle.
SPRINGS = """
f = 0.0
for c in range(27):
    a = (int(floor(x[i(0), 0])) + c // 9 + n - 1) % n
    b = (int(floor(x[i(0), 1])) + c // 3 % 3 + n - 1) % n
    cell = (a * n + b) * n + (int(floor(x[i(0), 2])) + c % 3 + n - 1) % n
    f = f + sum(
        maximum(1 - sqrt(
            ((x[i(0), 0] - x[order[k], 0] + n * 1.5) % n - n * 0.5) ** 2
            + ((x[i(0), 1] - x[order[k], 1] + n * 1.5) % n - n * 0.5) ** 2
            + ((x[i(0), 2] - x[order[k], 2] + n * 1.5) % n - n * 0.5) ** 2
        ), 0) * ((x[i(0), i(1)] - x[order[k], i(1)] + n * 1.5) % n - n * 0.5)
        for k in range(starts[cell], starts[cell + 1])
    )
"""
springs = ta.jit.elementwise(SPRINGS, inputs=("x", "order", "starts", "n"), outputs=("f",))


async def test_forces_by_ranges_of_cells(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    points = RNG.random((300, 3)) * 6
    away = (points[:, None] - points + 9) % 6 - 3
    expected = np.sum(np.maximum(1 - np.linalg.norm(away, axis=2, keepdims=True), 0) * away, axis=1)
    found: list[Array] = []
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(points)
        for step in ("spatial.cell_list", "jit.elementwise", ""):
            if step:
                inject_fault(device, step, kill=True)
            cells = await cell_list(x, 1.0, box=6.0)
            (forces,) = await springs(x, cells.order, cells.starts, 6, shape=x.shape)
            found.append(await forces.to_host())
        assert device.generation == 3
    np.testing.assert_allclose(found[0], expected, rtol=1e-12, atol=1e-14)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("shape", [8, 300])
async def test_a_graph_has_it(device: ta.Device, shape: int) -> None:
    async def step(x: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        cells = await cell_list(x, 8 / shape, low=0.0, shape=shape)
        return cells.order, cells.starts

    graph = await ta.graphs.capture(device, step, await device.put(RNG.random((200, 2)) * 8))
    for _ in range(3):
        points = RNG.random((200, 2)) * 9
        order, starts = await graph(await device.put(points))
        expected = by_numpy(points, 0.0, 8 / shape, (shape, shape))
        np.testing.assert_array_equal(await order.to_host(), expected[0])
        np.testing.assert_array_equal(await starts.to_host(), expected[1])


async def test_a_loss_in_the_middle(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    points = some(300, 3)
    async with system.open_device(BACKEND, options=options) as device:
        on_device = await device.put(points)
        expected = by_numpy(points, -3.0, 1.0, (7, 7, 7))
        whole = await (await neighbours(on_device, 0.8))[1].to_host()
        for _ in range(3):
            inject_fault(device, "spatial.cell_list", kill=True)
            await check(await cell_list(on_device, 1.0, low=-3.0, shape=7), expected)
        inject_fault(device, "jit.neighbours" if RUNS_KERNELS else "spatial.neighbours", kill=True)
        np.testing.assert_array_equal(await (await neighbours(on_device, 0.8))[1].to_host(), whole)
        assert device.generation == 5


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    good, bad = await device.put(some(5, 2)), await device.put(np.array([[0, np.inf], [1, 1]]))
    text: Any = "a"
    far = await device.put(np.array([[1.7e308, 0.0], [-1.7e308, 0.0]]))
    refused: list[tuple[Callable[[], Awaitable[object]], type[Exception], str]] = [
        (lambda: cell_list(bad, 1.0), ValueError, "points must be finite, got coordinates from"),
        (lambda: cell_list(good, 0), ValueError, "size must be finite and positive, one or 2 numbers, got 0"),
        (lambda: cell_list(good, np.nan), ValueError, "size must be finite and positive"),
        (lambda: cell_list(good, [1, 2, 3]), ValueError, "size must be finite and positive, one or 2 num"),
        (lambda: cell_list(good, text), TypeError, "size must be a real number or one for each axis, got"),
        (lambda: cell_list(good, 1, low=0), ValueError, "low and shape must be given together"),
        (lambda: cell_list(good, 1, shape=3, box=2), ValueError, "shape follows from box"),
        (lambda: cell_list(good, 1, low=0, shape=0), ValueError, "shape must be finite and positive"),
        (lambda: cell_list(good, 1, low=0, shape=cast("int", 2.5)), ValueError, "has no integers"),
        (lambda: cell_list(good, 1e-9), ValueError, "has more than 2147483646 cells; choose a larger size"),
        # These are more cells than a float64 counts.
        (lambda: cell_list(good, 5e-324), ValueError, "has more than 2147483646 cells; choose a larger size"),
        (lambda: cell_list(good, 1e-300, box=1e300), ValueError, "has more than 2147483646 cells"),
        (lambda: cell_list(far, 1.0), ValueError, "points must be no further apart than float64 holds"),
        (lambda: cell_list(good[0], 1), ValueError, r"points must have shape .n, d., with d from 1 to 3"),
        (lambda: cell_list(good[:, :0], 1), ValueError, r"points must have shape .n, d., with d from 1 to 3"),
    ]
    for ask, error, told in refused:
        with pytest.raises(error, match=rf"^spatial\.cell_list: .*{told}"):
            await ask()
    for arguments, told in [
        ((bad, 1.0), "points must be finite"),
        ((good, 0.0), "radius must be finite"),
        ((far, 1.0), "points must be no further apart"),
    ]:
        with pytest.raises(ValueError, match=rf"^spatial\.neighbours: {told}"):
            await neighbours(*arguments)
    with pytest.raises(TypeError, match="must be real"):
        await cell_list(await device.zeros((3, 2), "complex64"), 1.0)
