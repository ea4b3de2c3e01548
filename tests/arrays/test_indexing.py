"""Elements at indices in arrays, against NumPy; and the errors for indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays, graphs
from trio_accel.backends.base.contract.ops import Reduce

Array = npt.NDArray[Any]
INLINE = ta.DeviceOptions(isolation="inline")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
UFUNCS: dict[Reduce, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

any_example = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 999)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Small integers: their sums and products are exact in every dtype, in any order."""
    return np.random.default_rng(seed).integers(0, 2, shape).astype(ta.DType(dtype).dtype)


def strided(x: Array, seed: int) -> Array:
    """The same elements with other strides: transposed, backwards, or with gaps."""
    kind = seed % 4
    if kind == 1:
        return np.asfortranarray(x)
    if kind == 2:
        return np.flip(np.flip(x).copy())
    if kind == 3:
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x


async def on_device(device: ta.Device, x: Array) -> ta.AccelRef:
    """Put an array, and keep its strides."""
    if x.flags.f_contiguous:
        return (await device.put(x.T)).T
    if x.flags.c_contiguous:
        return await device.put(x)
    steps = tuple(slice(None, None, -1) if step < 0 else slice(None) for step in x.strides)
    turned = x[steps]
    if turned.flags.c_contiguous:
        return (await device.put(turned))[steps]
    return (await device.put(np.repeat(x, 2, axis=-1)))[..., ::2]


async def check(got: ta.AccelRef, want: Array) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    host = await got.to_host()
    np.testing.assert_array_equal(host.astype(complex), want.astype(complex))


@any_example
@given(shapes, st.data(), st.sampled_from(DTYPES), st.sampled_from(WHOLE), seeds)
async def test_take(shape: tuple[int, ...], draw: st.DataObject, dtype: str, kind: str, seed: int) -> None:
    axis = draw.draw(st.integers(-len(shape), len(shape) - 1))
    count = draw.draw(st.lists(st.integers(0, 4), max_size=2).map(tuple))
    low = 0 if kind.startswith("u") else -shape[axis]
    indices = np.random.default_rng(seed).integers(low, shape[axis], count).astype(kind)
    x = strided(numbers(shape, dtype, seed), seed)
    want = np.take(x, indices.astype(np.int64), axis)
    async with ta.open_system("take") as system, system.open_device(BACKEND, options=INLINE) as device:
        on, at = await on_device(device, x), await device.put(indices)
        await check(await arrays.take(on, at, axis), want)
        out = await device.zeros((*want.shape[::-1], 2), dtype)
        # Any strides of the result do.
        view = out[..., 1].T
        assert await arrays.take(on, indices, axis, out=view) is view
        await check(view, want)


@any_example
@given(shapes, st.data(), st.sampled_from(DTYPES), seeds)
async def test_take_along_axis(shape: tuple[int, ...], draw: st.DataObject, dtype: str, seed: int) -> None:
    axis = draw.draw(st.integers(-len(shape), len(shape) - 1))
    one = draw.draw(st.tuples(*[st.booleans() for _ in shape]))
    lines = [1 if single else extent for single, extent in zip(one, shape, strict=True)]
    lines[axis] = draw.draw(st.integers(0, 6))
    indices = np.random.default_rng(seed).integers(-shape[axis], shape[axis], lines)
    x = strided(numbers(shape, dtype, seed), seed)
    async with ta.open_system("take") as system, system.open_device(BACKEND, options=INLINE) as device:
        on, at = await on_device(device, x), await on_device(device, strided(indices, seed + 1))
        await check(await arrays.take_along_axis(on, at, axis), np.take_along_axis(x, indices, axis))


@any_example
@given(shapes, st.data(), st.sampled_from(DTYPES), seeds)
async def test_gather_and_scatter_nd(
    shape: tuple[int, ...], draw: st.DataObject, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    axes = draw.draw(st.integers(1, len(shape)))
    counts = [(3, 1), (4,), (3, 4), ()]
    indices = tuple(
        [rng.integers(-shape[axis], shape[axis], counts[(seed + axis) % 4]) for axis in range(axes)]
    )
    x = strided(numbers(shape, dtype, seed), seed)
    want = np.asarray(x[indices])
    async with ta.open_system("take") as system, system.open_device(BACKEND, options=INLINE) as device:
        on = await on_device(device, x)
        at = tuple([await device.put(index) for index in indices])
        await check(await arrays.gather_nd(on, at), want)
        values = numbers(want.shape, dtype, seed + 1)
        assert await arrays.scatter_nd(on, at, await device.put(values), reduce="add") is on
        changed = x.copy()
        np.add.at(changed, indices, values)
        await check(on, changed)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_reduction_of_every_dtype(device: ta.Device, dtype: str) -> None:
    indices = np.array([[1, 0, 1], [-1, 1, 3]])
    for reduce, ufunc in UFUNCS.items():
        x, values = numbers((2, 7, 3), dtype, 5), numbers((2, 2, 3, 3), dtype, 6)
        on = await device.put(x)
        if reduce in ("min", "max") and dtype.startswith("complex"):
            with pytest.raises(TypeError, match=rf"arrays\.scatter: .*values of {dtype} cannot be compared"):
                await arrays.scatter(on, indices, values, 1, reduce=reduce)
            continue
        if reduce == "multiply" and dtype == "complex128" and BACKEND == "cuda":
            with pytest.raises(ta.NotSupportedError, match="complex128"):
                await arrays.scatter(on, indices, values, 1, reduce=reduce)
            continue
        assert await arrays.scatter(on, indices, values, 1, reduce=reduce) is on
        ufunc.at(x, (slice(None), indices), values)
        await check(on, x)


async def test_many_values_for_few_elements(device: ta.Device) -> None:
    for size in (0, 1, 31, 255, 256, 257, 1025, 40_000):
        indices = np.random.default_rng(size).integers(0, 7, size)
        for dtype in ("int8", "uint16", "float16", "int32", "float32", "complex64", "complex128"):
            counts = await device.zeros(7, dtype)
            # In float16 the sum stays where one more is rounded away, in any order.
            most = 2048 if dtype == "float16" else size
            await arrays.scatter(counts, indices, 1, reduce="add")
            want = np.minimum(np.bincount(indices, minlength=7), most).astype(ta.DType(dtype).dtype)
            await check(counts, want)


async def test_put(device: ta.Device) -> None:
    x = np.arange(24.0).reshape(4, 6)
    for axis, values in ((0, 1.5), (1, 2), (0, np.arange(6)), (-1, np.arange(2.0)), (1, np.ones((4, 1)))):
        on, want = await device.put(x), x.copy()
        indices = np.array([3, -4])
        assert await arrays.put(on, indices, values, axis) is on
        want[(slice(None), indices) if axis else indices] = values
        await check(on, want)
    on, want = await device.put(x), x.copy()
    lines = np.argmax(x, axis=1, keepdims=True)
    assert await arrays.put_along_axis(on, lines, -1.0) is on
    np.put_along_axis(want, lines, -1.0, 1)
    await check(on, want)
    # A view is changed in place.
    await arrays.put(on[::2, ::-1], np.array([0]), 9, 1)
    want[::2, ::-1][:, 0] = 9
    await check(on, want)


@pytest.mark.parametrize("axis", [0, 1, 2])
async def test_large_arrays(device: ta.Device, axis: int) -> None:
    x: Array = np.random.default_rng(axis).integers(0, 100, (2, 600, 600)).astype(np.int32)
    extent: int = x.shape[axis]
    indices = np.random.default_rng(axis).integers(-extent, extent, extent)
    on, at = await device.put(x), await device.put(indices)
    want = np.take(x, indices, axis)
    taken = await arrays.take(on, at, axis)
    await check(taken, want)
    places: Any = (*(slice(None),) * axis, indices)
    np.add.at(x, places, want)
    await check(await arrays.scatter(on, at, taken, axis, reduce="add"), x)


async def test_nan_and_signed_zeros(device: ta.Device) -> None:
    x = np.array([np.nan, -0.0, np.inf, 1.0], np.float32)
    taken = await arrays.take(await device.put(x), np.array([1, 0, 2]))
    host = await taken.to_host()
    np.testing.assert_array_equal(host, x[[1, 0, 2]])
    assert np.signbit(host[0])
    reduce: Reduce
    for reduce in ("min", "max"):
        on = await device.put(np.ones(2, np.float32))
        await arrays.scatter(
            on, np.array([0, 0, 1]), np.array([3, np.nan, np.inf], np.float32), reduce=reduce
        )
        np.testing.assert_array_equal(await on.to_host(), [np.nan, 1 if reduce == "min" else np.inf])


async def test_extremes_of_whole_numbers(device: ta.Device) -> None:
    for name in WHOLE:
        limits = np.iinfo(name)
        on = await device.put(np.array([limits.max, limits.min, 1], name))
        await arrays.scatter(on, np.array([0, 1]), np.array([limits.min, limits.max], name), reduce="max")
        assert (await on.to_host()).tolist() == [limits.max, limits.max, 1]
        await arrays.scatter(on, np.array([0]), 1, reduce="add")
        assert (await on.to_host()).tolist() == [limits.min, limits.max, 1]


async def test_empty_arrays(device: ta.Device) -> None:
    empty = await device.zeros((3, 0))
    nothing, some = np.zeros(0, np.int64), np.array([0])
    assert (await arrays.take(empty, nothing, 1)).shape == (3, 0)
    assert (await arrays.take(empty, np.array([2, 7]), 0)).shape == (2, 0)
    assert (await arrays.take(await device.zeros(4), nothing)).shape == (0,)
    assert await arrays.put(empty, nothing, 1.0, 1) is empty
    with pytest.raises(ValueError, match=r"arrays\.take: x of shape \(3, 0\) has no elements"):
        await arrays.take(empty, some, 1)
    with pytest.raises(ValueError, match=r"arrays\.put: x of shape \(3, 0\) has no elements"):
        await arrays.put(empty, some, 1.0, 1)


async def test_one_hot(device: ta.Device) -> None:
    x = np.array([[2, 0, 3], [-1, 1, 2]])
    want = (x[..., None] == np.arange(3)).astype(np.float32)
    await check(await arrays.one_hot(await device.put(x), 3), want)
    out = await device.zeros((2, 3, 3), "bool")
    assert await arrays.one_hot(x, 3, dtype="bool", out=out) is out
    await check(out, want.astype(bool))


BAD: dict[str, Callable[[ta.AccelRef, Array], Any]] = {
    "take": lambda x, at: arrays.take(x, at, 1),
    "take_along_axis": lambda x, at: arrays.take_along_axis(x, at[None], 1),
    "put": lambda x, at: arrays.put(x, at, 1.0, 1),
    "put_along_axis": lambda x, at: arrays.put_along_axis(x, at[None], 1.0, 1),
    "scatter": lambda x, at: arrays.scatter(x, at, 1.0, 1, reduce="add"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("bad", [10, -11, 2**63 - 1, -(2**63)])
async def test_an_index_outside_fails_the_operation(device: ta.Device, name: str, bad: int) -> None:
    x = np.arange(3000.0).reshape(300, 10)
    on, indices = await device.put(x), np.zeros(500, np.int64)
    indices[321] = bad
    told = rf"indices: {bad} is outside axis 1 of x, which has length 10 .*operation arrays\.{name}\b"
    with pytest.raises(ta.OutOfRangeError, match=told) as caught:
        await BAD[name](on, indices)
    assert isinstance(caught.value, IndexError)
    assert (caught.value.index, caught.value.axis, caught.value.length) == (bad, 1, 10)
    if name.startswith("take"):
        await check(on, x)
    else:
        with pytest.raises(ta.StaleRefError, match=rf"arrays\.{name}"):
            await on.to_host()
    # The device works on.
    again = await device.put(x)
    indices[321] = -10
    await check(await arrays.take(again, indices, 1), np.take(x, indices, 1))


async def test_an_index_out_of_range_is_reported_with_its_array(device: ta.Device) -> None:
    x = await device.zeros((4, 5))
    rows, columns = np.array([0, 3]), np.array([[1], [5]])
    with pytest.raises(ta.OutOfRangeError, match=r"indices_1: 5 is outside axis 1 of x, which has length 5"):
        await arrays.gather_nd(x, (rows, columns))
    with pytest.raises(ta.OutOfRangeError, match=r"indices_0: 4 is outside axis 0 of x, which has length 4"):
        await arrays.scatter_nd(x, (rows + 1, columns - 1), 1.0)
    # An index too large for int64 is reported as its largest number.
    with pytest.raises(ta.OutOfRangeError, match=str(2**63 - 1)):
        await arrays.take(await device.zeros(3), np.array([2**64 - 1], np.uint64))


async def test_a_graph_fails_over_an_index_outside(device: ta.Device) -> None:
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")

    async def step(x: ta.AccelRef, at: ta.AccelRef) -> ta.AccelRef:
        return await arrays.add(await arrays.take(x, at), 1.0)

    x, at = await device.put(np.arange(5.0)), await device.put(np.array([1, -1, 4]))
    graph = await graphs.capture(device, step, x, at)
    for _ in range(6):
        await check(await graph.replay(), np.array([2.0, 5.0, 5.0]))
    await arrays.put(at, np.array([1]), 5)
    with pytest.raises(ta.OutOfRangeError, match=r"indices: 5 is outside axis 0 of x, which has length 5"):
        await graph.replay()
    await arrays.put(at, np.array([1]), -1)
    await check(await graph.replay(), np.array([2.0, 5.0, 5.0]))
    graph.close()


async def test_invalid_indices_are_refused(device: ta.Device) -> None:
    x, at = await device.zeros((3, 4)), np.array([0, 1])
    whole = await device.zeros((3, 4), "int32")
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"take: x of shape \(3, 4\) has not one axis", lambda: arrays.take(x, at)),
        (ValueError, r"take: axis 2 is not there .* of shape \(3, 4\)", lambda: arrays.take(x, at, 2)),
        (TypeError, "take: .*an index is an integer, got float64", lambda: arrays.take(x, at + 0.5, 0)),
        (TypeError, "take: .*an index is an integer, got bool", lambda: arrays.take(x, at > 0, 0)),
        (TypeError, "take: indices must be an AccelRef or a NumPy array, got list",
         lambda: arrays.take(x, [0], 0)),  # type: ignore[arg-type]
        (ValueError, "take: out must have shape", lambda: arrays.take(x, at, 0, out=x)),
        (ValueError, "take: out must not share memory with x", lambda: arrays.take(x, at, 0, out=x[:2])),
        (ValueError, "take_along_axis: x and indices must have as many axes",
         lambda: arrays.take_along_axis(x, at)),
        (ValueError, r"take_along_axis: shapes .* do not broadcast beside axis 1",
         lambda: arrays.take_along_axis(x, np.zeros((2, 4), int), 1)),
        (TypeError, "gather_nd: indices must be a tuple of arrays, got ndarray",
         lambda: arrays.gather_nd(x, at)),  # type: ignore[arg-type]
        (ValueError, "gather_nd: indices must be one array for each of the first axes",
         lambda: arrays.gather_nd(x, (at, at, at))),
        (ValueError, r"gather_nd: the shapes \(2,\), \(3,\) of indices do not broadcast",
         lambda: arrays.gather_nd(x, (at, np.zeros(3, int)))),
        (TypeError, "put: values is of float64, which does not become int32 of x",
         lambda: arrays.put(whole, at, np.ones(4), 0)),
        (TypeError, "put: values is a Python float, which does not become int32 of x",
         lambda: arrays.put(whole, at, 1.5, 0)),
        (ValueError, "put: values .* is outside", lambda: arrays.put(whole, at, 2**31, 0)),
        (ValueError, "put: the shapes .* do not broadcast", lambda: arrays.put(x, at, np.ones(3), 0)),
        (ValueError, "put: x must not share memory with values", lambda: arrays.put(x, at, x[:2], 0)),
        (TypeError, "put: x must be an AccelRef",
         lambda: arrays.put(np.zeros(3), whole[0], 1)),  # type: ignore[arg-type]
        (ValueError, "scatter: reduce must be 'set', 'add', 'multiply', 'min' or 'max', got 'mean'",
         lambda: arrays.scatter(x, at, 1, 0, reduce="mean")),  # type: ignore[arg-type]
    ]  # fmt: skip
    for error, told, call in refused:
        with pytest.raises(error, match=told):
            await call()
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await arrays.take(await device.zeros(3, "float8_e5m2"), at)
