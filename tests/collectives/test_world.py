"""Collectives of whole worlds, against NumPy."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import trio
from chosen import BACKEND
from worlds import DTYPES, REDUCTIONS, check_way, contents, elements, opened_world, put, reduced

import trio_accel as ta
from trio_accel.collectives import World

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

# How many ranks, and their way.
WORLDS: tuple[Any, ...] = (
    pytest.param(2, "mapped"),
    pytest.param(2, "library"),
)
if BACKEND == "cpu":
    WORLDS = (
        *(pytest.param(size, "mapped") for size in (2, 1, 3)),
        pytest.param(3, "library"),
        pytest.param(8, "mapped", marks=pytest.mark.slow),
    )
SHAPES = ((), (1,), (0,), (7,), (6, 5), (12, 3, 2), (2, 0), (1030, 3))


@pytest.fixture
async def world(system: ta.System, size: int, way: str) -> AsyncGenerator[World, None]:
    async with opened_world(system, size, transport=way) as world:
        yield world
        check_way(world, way)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize(("size", "way"), WORLDS, indirect=["way"])


async def test_all_reduce_of_every_shape(world: World) -> None:
    for shape in SHAPES:
        hosts = [elements(shape, "float32", seed) for seed in range(world.size)]
        made = await world.all_reduce(await put(world, hosts))
        assert [ref.device for ref in made] == list(world.devices)
        for one in await contents(made):
            np.testing.assert_array_equal(one, reduced("sum", hosts), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_reductions_of_every_dtype(world: World, dtype: str) -> None:
    hosts = [elements((6, 4), dtype, seed) for seed in range(world.size)]
    arrays = await put(world, hosts)
    kind = hosts[0].dtype.kind
    for reduction in REDUCTIONS:
        if (kind == "c" and reduction in ("min", "max")) or (kind in "bui" and reduction == "mean"):
            with pytest.raises(TypeError, match=f"collectives.reduce: {reduction} needs"):
                await world.reduce(arrays, cast("Any", reduction))
            continue
        expected = reduced(reduction, hosts)
        for one in await contents(await world.all_reduce(arrays, cast("Any", reduction))):
            assert one.tobytes() == expected.tobytes()
            assert one.dtype == hosts[0].dtype
        root = world.size - 1
        one = await world.reduce(arrays, cast("Any", reduction), root=root)
        assert one.device is world.devices[root]
        assert (await one.to_host()).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_short_floating_numbers_are_rounded_once(system: ta.System, dtype: str, size: int) -> None:
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    # Without fractions of float32, so that only the last step rounds. Of three ranks, each reduces its share.
    shape = 4 * size, 20_000 if size == 3 else 2
    whole = [np.random.default_rng(seed).integers(-2000, 2000, shape) for seed in range(size)]
    hosts = [(one / 8).astype(element) for one in whole]
    exact = np.sum([host.astype(np.float64) for host in hosts], 0)
    async with opened_world(system, size, "inline", transport="mapped") as world:
        arrays = await put(world, hosts)
        total, mean = exact.astype(element), (exact / size).astype(np.float32).astype(element)
        for one in await contents(await world.all_reduce(arrays)):
            np.testing.assert_array_equal(one, total, strict=True)
        for one in await contents(await world.all_reduce(arrays, "mean")):
            np.testing.assert_array_equal(one, mean, strict=True)
        np.testing.assert_array_equal(await (await world.reduce(arrays)).to_host(), total, strict=True)
        parts = await contents(await world.reduce_scatter(arrays))
        np.testing.assert_array_equal(np.concatenate(parts), total, strict=True)
        await world.all_reduce(arrays, out=arrays)
        for one in await contents(arrays):
            np.testing.assert_array_equal(one, total, strict=True)


async def test_a_sum_of_short_numbers_that_overflows_in_between_is_right(system: ta.System) -> None:
    async with opened_world(system, 3, "inline") as world:
        hosts = [np.array([number], np.float16) for number in (60000, 60000, -60000)]
        for one in await contents(await world.all_reduce(await put(world, hosts))):
            assert one.tolist() == [60000.0]
        hosts = [np.array([number], np.float16) for number in (1000, 1000, 1e-3)]
        product = np.prod([host.astype(np.float64) for host in hosts], 0).astype(np.float16)
        for one in await contents(await world.all_reduce(await put(world, hosts), "prod")):
            np.testing.assert_array_equal(one, product)


async def test_float8_is_refused_before_anything_runs(system: ta.System) -> None:
    async with opened_world(system, 2, "inline") as world:
        arrays = await put(world, [np.ones(4, ml_dtypes.float8_e5m2)] * 2)
        for call in (world.all_reduce, world.reduce, world.reduce_scatter):
            with pytest.raises(ta.NotSupportedError, match=r"float8_e5m2.*cast\(\)"):
                await call(arrays)
        np.testing.assert_array_equal(await (await world.gather(arrays)).to_host(), np.ones(8))


async def test_reduce_scatter_and_all_gather_are_all_reduce(world: World) -> None:
    hosts = [np.random.default_rng(seed).normal(size=(world.size * 5, 3)) for seed in range(world.size)]
    arrays = await put(world, hosts)
    parts = await world.reduce_scatter(arrays)
    whole = await contents(await world.all_gather(parts))
    for rank, part in enumerate(await contents(parts)):
        np.testing.assert_array_equal(part, reduced("sum", hosts)[rank * 5 : rank * 5 + 5])
    for one, other in zip(whole, await contents(await world.all_reduce(arrays)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_operations_that_move_elements(world: World, dtype: str) -> None:
    size = world.size
    hosts = [elements((2 * size, 3), dtype, seed) for seed in range(size)]
    arrays = await put(world, hosts)
    joined = np.concatenate(hosts)
    for root in range(size):
        for one in await contents(await world.broadcast(arrays[root], root=root)):
            np.testing.assert_array_equal(one, hosts[root], strict=True)
        for rank, one in enumerate(await contents(await world.scatter(arrays[root], root=root))):
            np.testing.assert_array_equal(one, hosts[root][2 * rank : 2 * rank + 2], strict=True)
        gathered = await world.gather(arrays, root=root)
        assert gathered.device is world.devices[root]
        np.testing.assert_array_equal(await gathered.to_host(), joined, strict=True)
        sent = await world.send(arrays[root], (root + 1) % size, root=root)
        assert sent.device is world.devices[(root + 1) % size]
        np.testing.assert_array_equal(await sent.to_host(), hosts[root], strict=True)
    for one in await contents(await world.all_gather(arrays)):
        np.testing.assert_array_equal(one, joined, strict=True)
    for rank, one in enumerate(await contents(await world.all_to_all(arrays))):
        expected = np.concatenate([host[2 * rank : 2 * rank + 2] for host in hosts])
        np.testing.assert_array_equal(one, expected, strict=True)


async def test_all_to_all_with_splits(world: World) -> None:
    size = world.size
    rng = np.random.default_rng(3)
    splits = rng.integers(0, 4, (size, size)).tolist()
    hosts = [rng.normal(size=(sum(row), 2)) for row in splits]
    made = await world.all_to_all(await put(world, hosts), splits=splits)
    for rank, one in enumerate(await contents(made)):
        parts = [
            host[sum(row[:rank]) : sum(row[: rank + 1])] for host, row in zip(hosts, splits, strict=True)
        ]
        np.testing.assert_array_equal(one, np.concatenate(parts))


async def test_arrays_without_axes_are_gathered(world: World) -> None:
    made = await world.all_gather(await put(world, [np.asarray(float(rank)) for rank in range(world.size)]))
    for one in await contents(made):
        np.testing.assert_array_equal(one, np.arange(world.size, dtype=np.float64), strict=True)


async def test_views_and_out(world: World) -> None:
    hosts = [np.random.default_rng(seed).normal(size=(8, 6)) for seed in range(world.size)]
    arrays = await put(world, hosts)
    views, expected = [one.T[::2, ::-1] for one in arrays], reduced("sum", [h.T[::2, ::-1] for h in hosts])
    for one in await contents(await world.all_reduce(views)):
        np.testing.assert_array_equal(one, expected)
    kept = [await device.zeros((3, 8)) for device in world.devices]
    strided = [await device.zeros((6, 8)) for device in world.devices]
    for out in (kept, [one[::2] for one in strided]):
        made = await world.all_reduce(views, out=out)
        assert [one is other for one, other in zip(made, out, strict=True)] == [True] * world.size
        for one in await contents(out):
            np.testing.assert_array_equal(one, expected)
    assert (await strided[0][1::2].to_host() == 0).all()
    # In place, with the other elements of the arrays as they were.
    await world.all_reduce(views, out=views)
    for host, one in zip(hosts, await contents(arrays), strict=True):
        np.testing.assert_array_equal(one.T[::2, ::-1], expected)
        np.testing.assert_array_equal(one.T[1::2], host.T[1::2])


async def test_every_out(world: World) -> None:
    size = world.size
    hosts = [elements((2 * size, 3), "float32", seed) for seed in range(size)]
    arrays = await put(world, hosts)

    async def new(*shape: int) -> list[ta.AccelRef]:
        return [await device.zeros(shape, "float32") for device in world.devices]

    joined, total = np.concatenate(hosts), reduced("sum", hosts)
    whole, part, same = await new(2 * size * size, 3), await new(2, 3), await new(2 * size, 3)
    root = size - 1
    assert await world.gather(arrays, root=root, out=whole[root]) is whole[root]
    np.testing.assert_array_equal(await whole[root].to_host(), joined)
    assert await world.reduce(arrays, root=root, out=same[root]) is same[root]
    np.testing.assert_array_equal(await same[root].to_host(), total)
    await world.all_gather(arrays, out=whole)
    np.testing.assert_array_equal(np.stack(await contents(whole)), np.stack([joined] * size))
    await world.reduce_scatter(arrays, out=part)
    np.testing.assert_array_equal(np.concatenate(await contents(part)), total)
    await world.scatter(arrays[root], root=root, out=part)
    np.testing.assert_array_equal(np.concatenate(await contents(part)), hosts[root])
    await world.all_to_all(arrays, out=same)
    np.testing.assert_array_equal(await same[0].to_host(), np.concatenate([host[:2] for host in hosts]))
    await world.broadcast(arrays[root], root=root, out=[None if n == root else same[n] for n in range(size)])
    for one in (await contents(same))[:root]:
        np.testing.assert_array_equal(one, hosts[root])
    if size > 1:
        assert await world.send(arrays[root], 0, root=root, out=same[0]) is same[0]
        np.testing.assert_array_equal(await same[0].to_host(), hosts[root])


async def test_sums_are_the_same_on_all_ranks_and_each_time(world: World) -> None:
    hosts = [np.random.default_rng(seed).normal(size=1001).astype(np.float32) for seed in range(world.size)]
    arrays = await put(world, hosts)
    seen = {one.tobytes() for _ in range(3) for one in await contents(await world.all_reduce(arrays))}
    assert seen == {reduced("sum", hosts).tobytes()}


@pytest.mark.skipif(BACKEND != "cpu", reason="the same on any backend, and three ranks")
async def test_small_arrays_are_reduced_in_one_step(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_world(system, 3) as world:
        hosts = [np.random.default_rng(seed).normal(size=999).astype(np.float32) for seed in range(3)]
        arrays = await put(world, hosts)
        seen, launched = set[bytes](), list[int]()
        for small in (0, hosts[0].nbytes, hosts[0].nbytes - 1):
            monkeypatch.setattr("trio_accel.collectives._world._LOCAL_REDUCTION_BYTES", small)
            before = [(await device.statistics()).launched for device in world.devices]
            made = await world.all_reduce(arrays)
            after = [(await device.statistics()).launched for device in world.devices]
            launched.append(sum(after) - sum(before))
            seen.update(one.tobytes() for one in await contents(made))
        assert seen == {reduced("sum", hosts).tobytes()}
        assert launched == [6, 3, 6]


@pytest.mark.parametrize("isolations", [("inline", "process"), ("inline", "inline"), ("process", "inline")])
async def test_any_mix_of_isolations(system: ta.System, isolations: tuple[ta.Isolation, ...]) -> None:
    async with opened_world(system, 3, *isolations) as world:
        hosts = [np.random.default_rng(seed).normal(size=(6, 4)) for seed in range(3)]
        arrays = await put(world, hosts)
        for one in await contents(await world.all_reduce(arrays)):
            np.testing.assert_array_equal(one, reduced("sum", hosts))
        for one in await contents(await world.all_gather(arrays)):
            np.testing.assert_array_equal(one, np.concatenate(hosts))
        await world.all_reduce(arrays, "max", out=arrays)
        for one in await contents(arrays):
            np.testing.assert_array_equal(one, reduced("max", hosts))


async def test_collectives_at_the_same_time(world: World) -> None:
    """They run in the order of the calls, with operations of the program in between."""
    hosts = [np.full(100, rank + 1.0) for rank in range(world.size)]
    arrays = await put(world, hosts)
    total = sum(range(1, world.size + 1))

    async def grow() -> None:
        await world.all_reduce(arrays, out=arrays)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(grow)
            for array in arrays:
                nursery.start_soon(array.to_host)
    for one in await contents(arrays):
        assert (one == total * world.size**2).all()


async def test_two_worlds_with_the_same_devices_do_not_wait_for_each_other(world: World) -> None:
    arrays = await put(world, [np.full(64, 1.0 + rank) for rank in range(world.size)])
    others = await put(world, [np.zeros(64)] * world.size)
    async with ta.open_world(reversed(world.devices)) as other:

        async def forth() -> None:
            for _ in range(5):
                await world.all_gather(arrays)
                await world.all_reduce(arrays, "max", out=others)

        async def back() -> None:
            for _ in range(5):
                await other.all_gather(others[::-1])
                await other.all_reduce(others[::-1], "max", out=arrays[::-1])

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(forth)
                nursery.start_soon(back)
    for one in await contents([*arrays, *others]):
        assert set(one) <= {0.0, *range(1, world.size + 1)}


async def test_nothing_is_left(world: World) -> None:
    arrays = await put(world, [np.ones((world.size * 10, 7))] * world.size)

    async def used() -> list[tuple[int, int]]:
        for device in world.devices:
            await device.synchronize()
        memory = [(await device.statistics()).memory for device in world.devices]
        return [(each.used, each.blocks) for each in memory]

    before = await used()
    for _ in range(3):
        await world.all_reduce(arrays)
        await world.all_gather(arrays)
        await world.all_to_all(arrays)
    assert await used() == before


async def test_bad_input(system: ta.System) -> None:
    async with opened_world(system, 2) as world:
        x, y = await put(world, [np.ones((4, 3)), np.ones((4, 3))])
        other = await world.devices[1].put(np.ones((3, 4)))
        whole = await world.devices[1].put(np.ones((4, 3), np.int32))

        async def ask(function: str, *arguments: Any, **options: Any) -> None:
            await getattr(world, function)(*arguments, **options)

        host, first = np.ones((4, 3)), await x.cast("int32")
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, "arrays must name 2, one of each rank, got 1", ask("all_reduce", [x])),
            (ValueError, "arrays must name 2, one of each rank, got one array", ask("all_reduce", x)),
            (
                ValueError,
                "share dtype and shape, got float64 (4, 3) of rank 0 and float64 (3, 4) of rank 1",
                ask("all_reduce", [x, other]),
            ),
            (ValueError, "and int32 (4, 3) of rank 1", ask("all_gather", [x, whole])),
            (ValueError, f"arrays[0] is on {y.device.path}, and rank 0 is", ask("all_reduce", [y, x])),
            (TypeError, "arrays[1] must be an AccelRef, got ndarray", ask("all_reduce", [x, host])),
            (
                ValueError,
                "reduction must be one of sum, prod, min, max, mean, got 'avg'",
                ask("all_reduce", [x, y], "avg"),
            ),
            *[
                (ValueError, f"{name}: reduction must be one of", ask(name, [x, y], None))
                for name in ("all_reduce", "reduce", "reduce_scatter")
            ],
            (
                TypeError,
                "mean needs floating or complex arrays, got int32",
                ask("reduce", [first, whole], "mean"),
            ),
            (ValueError, "root must be a rank below 2, got 2", ask("reduce", [x, y], root=2)),
            (ValueError, "root must be a rank below 2, got -1", ask("broadcast", x, root=-1)),
            (ValueError, "broadcast: array is on", ask("broadcast", x, root=1)),
            (
                ValueError,
                "the first axis must have a multiple of 2 elements, one part for each rank, got shape (3, 4)",
                ask("scatter", other, root=1),
            ),
            (ValueError, "out must name 2 arrays, got 1", ask("all_reduce", [x, y], out=[x])),
            (
                ValueError,
                "out[1] must have shape (4, 3) and dtype float64, got shape (3, 4) and dtype float64",
                ask("all_reduce", [x, y], out=[x, other]),
            ),
            (ValueError, "splits must have 2 rows of 2", ask("all_to_all", [x, y], splits=[[4, 0]])),
            (
                ValueError,
                "splits[1] must be at least 0 and sum to 4, the rows of its array, got [1, 2]",
                ask("all_to_all", [x, y], splits=[[4, 0], [1, 2]]),
            ),
            (ValueError, "send: to must be a rank below 2, got 5", ask("send", x, 5)),
        ]
        for cls, match, call in wrong:
            with pytest.raises(cls, match=re.escape(match)):
                await call
        y.release()
        with pytest.raises(ta.StaleRefError, match=r"all_reduce: arrays\[1\]: its memory was released"):
            await world.all_reduce([x, y])
        device = world.devices[0]
        for devices, match in (
            ([], "at least one"),
            ([device, device], "there twice; each device is one rank"),
        ):
            with pytest.raises(ValueError, match=match):
                async with ta.open_world(devices):
                    pass
        with pytest.raises(TypeError, match="open_world: device must be an open Device, got str"):
            async with ta.open_world(cast("Any", ["cpu"])):
                pass
        with pytest.raises(ValueError, match="retry must be an integer of at least 0, got -1"):
            async with ta.open_world([device], retry=-1):
                pass
    with pytest.raises(
        ta.collectives.WorldBrokenError, match="all_gather: the world is closed; open another"
    ):
        await world.all_gather([x, x])
