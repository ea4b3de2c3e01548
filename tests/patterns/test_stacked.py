"""Batches on a device: items stacked in one array, replies as views or rows of one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.devices import Operand, Stack
from trio_accel.patterns import Batcher, Submit, by_length, by_shape, padded, stacked

Array = npt.NDArray[Any]
SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5)


def normal(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


async def as_asked(device: ta.Device, arrays: list[Array], ways: str) -> list[Operand]:
    """Arrays of the host (h), of the device (d), or views on the device (v)."""
    items: list[Operand] = []
    for array, way in zip(arrays, ways, strict=True):
        if way == "h":
            items.append(array)
        elif way == "d":
            items.append(await device.put(array))
        else:
            items.append((await device.put(array[..., ::-1].copy()))[..., ::-1])
    return items


def filled_up(arrays: list[Array], pad: float) -> Array:
    """NumPy's own padding, array by array."""
    longest = np.max([array.shape for array in arrays], axis=0)
    ends = [[(0, most - extent) for most, extent in zip(longest, a.shape, strict=True)] for a in arrays]
    return np.stack([np.pad(a, e, constant_values=pad) for a, e in zip(arrays, ends, strict=True)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int16", "bool"])
@pytest.mark.parametrize("ways", ["hhh", "ddd", "hdv", "v"])
async def test_a_stack_is_numpys(device: ta.Device, dtype: str, ways: str) -> None:
    arrays = [(normal((3, 4), seed) * 3).astype(dtype) for seed in range(len(ways))]
    out = await device.ask(Stack(await as_asked(device, arrays, ways)))
    np.testing.assert_array_equal(await out.to_host(), np.stack(arrays))
    cut = [array[: 1 + index, : 4 - index] for index, array in enumerate(arrays)]
    out = await device.ask(Stack(await as_asked(device, cut, ways), pad=1))
    np.testing.assert_array_equal(await out.to_host(), filled_up(cut, 1))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.data())
def test_padding_is_numpys(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    ways = data.draw(st.text("hdv", min_size=len(shapes), max_size=len(shapes)))
    arrays = [normal(shape, seed) for seed, shape in enumerate(shapes)]

    async def main() -> None:
        async with ta.open_system("stacks") as system:
            device = await system.open_device("cpu", options=ta.DeviceOptions(isolation="inline"))
            seen: list[Array] = []

            async def function(batch: ta.AccelRef, lengths: npt.NDArray[np.int64]) -> ta.AccelRef:
                seen.extend([await batch.to_host(), lengths])
                return batch

            model = padded(function, device, pad=-2.5, to_host=True)
            result: object = await model(await as_asked(device, arrays, ways))
            expected = filled_up(arrays, -2.5)
            np.testing.assert_array_equal(seen[0], expected)
            np.testing.assert_array_equal(seen[1], [len(array) for array in arrays])
            assert type(result) is np.ndarray
            np.testing.assert_array_equal(result, expected)

    trio.run(main)


async def test_mismatched_inputs_are_refused(device: ta.Device) -> None:
    a, b = normal((2, 3), 1), normal((2, 4), 2)
    with pytest.raises(ValueError, match=r"arrays must hold at least one"):
        await device.ask(Stack([]))
    with pytest.raises(
        ValueError, match=r"share dtype and shape, got float32 \(2, 3\) and, as number 1, .*\(2, 4\)"
    ):
        await device.ask(Stack([a, b]))
    with pytest.raises(ValueError, match="share dtype and"):
        await device.ask(Stack([a, a.astype("float64")]))
    with pytest.raises(ValueError, match="share dtype and number of axes"):
        await device.ask(Stack([a, b[0]], pad=0))
    with pytest.raises((TypeError, ValueError), match="pad"):
        await device.ask(Stack([a.astype("int16")], pad=0.5))
    with pytest.raises(TypeError, match=r"arrays\[1\] must be an AccelRef or a NumPy array, got list"):
        await device.ask(Stack([a, [1, 2]]))  # type: ignore[list-item]
    released = await device.put(a)
    released.release()
    with pytest.raises(ta.StaleRefError):
        await device.ask(Stack([a, released]))


@pytest.mark.parametrize("to_host", [True, False])
async def test_rows_come_back_to_their_askers(device: ta.Device, to_host: bool) -> None:
    weights, sizes = normal((8, 5), 0), list[int]()
    on_device = await device.put(weights)

    async def function(batch: ta.AccelRef) -> ta.AccelRef:
        sizes.append(len(batch))
        return await ta.linalg.matmul(batch, on_device)

    batcher = await device.system.spawn(
        Batcher, stacked(function, device, to_host=to_host), max_size=16, bucket=by_shape, name="batcher"
    )
    rows = [normal((8,), seed) for seed in range(1, 13)]
    results: dict[int, Array] = {}
    errors: list[Exception] = []

    async def ask(index: int, item: object) -> None:
        try:
            reply = await batcher.ask(Submit(item))
        except (ValueError, TypeError) as error:
            errors.append(error)
            return
        assert isinstance(reply, np.ndarray if to_host else ta.AccelRef)
        results[index] = reply if isinstance(reply, np.ndarray) else await reply.to_host()

    async with trio.open_nursery() as nursery:
        for index, row in enumerate(rows):
            nursery.start_soon(ask, index, await device.put(row) if index % 3 == 0 else row)
        # Of a wrong length, and another type: only they fail.
        nursery.start_soon(ask, 98, normal((9,), 98))
        nursery.start_soon(ask, 99, "no array")
    assert len(results) == 12
    for index, row in enumerate(rows):
        expected = row.astype("float64") @ weights.astype("float64")
        np.testing.assert_allclose(results[index], expected, rtol=1e-5, atol=1e-5 * 8**0.5)
    assert {type(error) for error in errors} == {TypeError, ValueError}
    assert len(sizes) < 12


async def test_views_give_the_memory_back_with_the_last_one(device: ta.Device) -> None:
    async def function(batch: ta.AccelRef) -> ta.AccelRef:
        return await batch.copy()

    model = stacked(function, device)
    await device.synchronize()
    before = (await device.statistics()).memory.used
    result = await model([normal((70_000,), seed) for seed in range(3)])
    views = [result[index] for index in range(3)]
    del result
    views[1:] = []
    np.testing.assert_array_equal(await views[0].to_host(), normal((70_000,), 0))
    views.clear()
    await device.synchronize()
    assert (await device.statistics()).memory.used == before


async def test_a_stack_in_a_graph(device: ta.Device) -> None:
    first, second = await device.put(np.arange(3.0)), await device.put(np.arange(4.0))

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        return await ta.linalg.matmul(await device.ask(Stack([x, y], pad=-1)), y)

    graph = await ta.graphs.capture(device, step, first, second)
    result = await (await graph(first, second)).to_host()
    np.testing.assert_array_equal(result, [0 + 1 + 4 - 3, 0 + 1 + 4 + 9])


async def test_a_lost_worker_fails_its_batch_and_the_next_one_works(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=0)
    async with await system.open_device("cpu", options=options) as device:
        launches = list[int]()
        weights = await device.put(np.eye(4) * 2)

        async def function(batch: ta.AccelRef) -> ta.AccelRef:
            launches.append(len(batch))
            return await ta.linalg.matmul(batch, weights)

        model = stacked(function, device, to_host=True)
        batcher = await system.spawn(Batcher, model, max_size=4, adaptive=False, name="batcher")
        outcomes: list[object] = []

        async def ask(number: int) -> None:
            try:
                outcomes.append((await batcher.ask(Submit(np.full(4, float(number))))).tolist())
            except ta.ContextLostError as error:
                outcomes.append(type(error))

        async def four() -> list[object]:
            outcomes.clear()
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, number)
            return outcomes

        ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)
        assert await four() == [ta.ContextLostError] * 4
        # Nothing ran again, and the model's matrix is there.
        assert launches == [4]
        assert sorted(await four(), key=str) == [[2.0 * number] * 4 for number in range(4)]


def test_keys_keep_the_padding_below_half() -> None:
    keys = {length: by_length(np.zeros((length, 3))) for length in range(1, 300)}
    for one, key in keys.items():
        assert all(
            max(one, other) < 2 * min(one, other) for other, of_other in keys.items() if of_other == key
        )
    assert by_length(np.zeros((5, 3))) != by_length(np.zeros((5, 4))) != by_length(np.zeros((5, 4), "f4"))
    assert by_shape(np.zeros((2, 3))) == by_shape(np.ones((2, 3))) != by_shape(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="at least one axis"):
        by_length(np.zeros(()))
    with pytest.raises(TypeError, match="got list"):
        by_shape([1, 2])  # type: ignore[arg-type]


async def test_keys_are_the_same_on_host_and_device(device: ta.Device) -> None:
    host = normal((5, 3), 1)
    assert by_shape(await device.put(host)) == by_shape(host)
    assert by_length(await device.put(host)) == by_length(host)
