"""Updated copies by `x.at[key]`: their values against NumPy, and their gradients against differences."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
UFUNCS: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "min": np.minimum,
    "max": np.maximum,
}
METHODS = ["set", *UFUNCS]


def updated(x: Any, key: Any, method: str, values: Any) -> Any:
    """Update a copy by NumPy, whose assignments leave the last of several values."""
    copy = np.array(x)
    if method == "set":
        copy[key] = values
    else:
        UFUNCS[method].at(copy, key, values)
    return copy


def by_mask(x: Any, mask: Any, method: str, values: Any) -> Any:
    """Update a copy by a mask, with the values of the same places."""
    with np.errstate(all="ignore"):
        new = values if method == "set" else UFUNCS[method](x, values)
    return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), new, x)


class Keys:
    """Generated keys of a shape."""

    def __init__(self, seed: int, *, has_twice: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.has_twice = has_twice

    def shape(self) -> tuple[int, ...]:
        sizes = self.rng.choice(
            [0, 1, 2, 3, 4, 5], size=self.rng.integers(0, 5), p=[0.04, 0.1, 0.2, 0.3, 0.2, 0.16]
        )
        return tuple(map(int, sizes))

    def part(self, kind: str, extent: int, common: tuple[int, ...]) -> Any:
        rng = self.rng
        if kind == "array" and extent:
            shape = tuple(
                1 if rng.random() < 0.3 else size for size in common[int(rng.integers(0, len(common) + 1)) :]
            )
            dtype = rng.choice(["int64", "int32", "int8", "uint8"])
            return rng.integers(0 if dtype == "uint8" else -extent, extent, shape).astype(dtype)
        if kind == "number" and extent:
            return int(rng.integers(-extent, extent))
        bounds = [
            int(bound) if rng.random() < 0.6 else None for bound in rng.integers(-extent - 1, extent + 2, 2)
        ]
        return slice(*bounds, [None, 1, 2, -1, -2, 3][int(rng.integers(6))])

    def key(self, shape: tuple[int, ...]) -> Any:
        rng = self.rng
        common = tuple(int(size) for size in rng.integers(1, 4, rng.integers(0, 3)))
        count = int(rng.integers(0, len(shape) + 1))
        is_basic = rng.random() < 0.4
        kinds = ["slice", "number"] if is_basic else ["slice", "array", "number", "array"]
        start = int(rng.integers(0, count + 1))
        extents = [*shape[:start], *shape[len(shape) - count + start :]]
        parts = [self.part(str(rng.choice(kinds)), extent, common) for extent in extents]
        if start < count or rng.random() < 0.3:
            parts.insert(start, ...)
        for _ in range(int(rng.integers(0, 2))):
            parts.insert(int(rng.integers(0, len(parts) + 1)), None)
        return tuple(parts) if len(parts) != 1 or rng.random() < 0.5 else parts[0]

    def values(self, shape: tuple[int, ...], low: float = 0.5, high: float = 1.5) -> Any:
        """Make values that broadcast to a shape."""
        rng = self.rng
        kept = shape[int(rng.integers(0, len(shape) + 1)) if rng.random() < 0.3 else 0 :]
        return rng.uniform(low, high, [1 if rng.random() < 0.2 else size for size in kept])


async def on_device(device: ta.Device, key: Any, rng: Any) -> Any:
    """Put some arrays of a key on the device."""
    parts = [
        await device.put(part) if isinstance(part, np.ndarray) and rng.random() < 0.6 else part
        for part in (key if isinstance(key, tuple) else (key,))
    ]
    return tuple(parts) if isinstance(key, tuple) else parts[0]


def cases(seed: int, count: int) -> Iterator[tuple[Keys, Any, Any, Any]]:
    """Yield generators with arrays, keys and values."""
    for number in range(count):
        keys = Keys(seed * 1000 + number)
        x = keys.rng.uniform(0.5, 1.5, keys.shape())
        key = keys.key(x.shape)
        yield keys, x, key, keys.values(x[key].shape)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", METHODS)
async def test_updates_have_the_values_of_numpy(device: ta.Device, method: str, seed: int) -> None:
    for keys, x, key, values in cases(seed, 25):
        there, key_there = await device.put(x), await on_device(device, key, keys.rng)
        given = values if keys.rng.random() < 0.3 else await device.put(values)
        new = await getattr(there.at[key_there], method)(given)
        assert (new.shape, new.dtype) == (x.shape, "float64")
        np.testing.assert_allclose(
            await new.to_host(), updated(x, key, method, values), rtol=1e-13, err_msg=f"{key}"
        )
        np.testing.assert_array_equal(await there.to_host(), x)


async def test_an_ellipsis_without_axes_is_between_indices(device: ta.Device) -> None:
    x, first, second = np.arange(6.0).reshape(2, 3), np.array([1, 0, 1, 0]), np.array([2])
    there = await device.put(x)
    for key in ((None, first, ..., second), (None, first, second, ...), (None, ..., first, second)):
        assert (await there.at[key].get()).shape == x[key].shape
        values = np.arange(float(x[key].size)).reshape(x[key].shape)
        new = await there.at[key].set(values)
        np.testing.assert_array_equal(await new.to_host(), updated(x, key, "set", values))


@pytest.mark.parametrize("seed", range(3))
async def test_get_returns_the_part(device: ta.Device, seed: int) -> None:
    for keys, x, key, _ in cases(seed + 50, 40):
        there = await device.put(x)
        key_there = await on_device(device, key, keys.rng)
        got = await there.at[key_there].get()
        np.testing.assert_array_equal(await got.to_host(), x[key])
        got = await (there + 1.0).at[key_there].get()
        np.testing.assert_array_equal(await got.to_host(), x[key] + 1.0)


def along(f: Any, args: tuple[Any, ...], directions: tuple[Any, ...], order: int = 1) -> Any:
    """Return the first or second derivative along directions, by differences."""
    h = 1e-6 if order == 1 else 1e-4
    after, here, before = (
        f(*[arg + step * direction for arg, direction in zip(args, directions, strict=True)])
        for step in (h, 0, -h)
    )
    return (after - before) / (2 * h) if order == 1 else (after - 2 * here + before) / h**2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
async def test_updates_have_gradients_to_the_second_order(device: ta.Device, method: str, seed: int) -> None:
    for keys, x, key, values in cases(seed + 100, 12):
        weights = keys.rng.normal(size=x.shape)
        key_there = await on_device(device, key, keys.rng)
        there, given, weights_there = [await device.put(host) for host in (x, values, weights)]

        def loss(x: Any, v: Any, key: Any = key_there, weights: Any = weights_there) -> Any:
            return a.sum(weights * getattr(x.at[key], method)(v) ** 2)

        def of_numpy(x: Any, v: Any, key: Any = key, weights: Any = weights) -> Any:
            return (weights * updated(x, key, method, v) ** 2).sum()

        directions = keys.rng.normal(size=x.shape), keys.rng.normal(size=np.shape(values))
        slopes = await ta.grad(loss, (0, 1))(there, given)
        for place, slope in enumerate(slopes):
            moved = tuple(d if n == place else 0 * d for n, d in enumerate(directions))
            found = (await slope.to_host() * directions[place]).sum()
            want = along(of_numpy, (x, values), moved)
            np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-7, err_msg=f"{key}, argument {place}")
        curves = await ta.gradients.hvp(loss, (there, given), [await device.put(d) for d in directions])
        found = sum([(await curve.to_host() * d).sum() for curve, d in zip(curves, directions, strict=True)])
        want = along(of_numpy, (x, values), directions, 2)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5, err_msg=f"{key}")


# The shapes: an array, a mask, and values.
X = (3, 4)
MASKS = [(X, X, ()), (X, X, X), (X, X, (1, 4)), (X, X, (1,)), (X, (3,), (4,)), (X, (3,), (3, 1))]
MASKS += [((5,), (5,), (5,)), ((), (), ()), ((2, 0), (2, 0), ())]


@pytest.mark.parametrize(("shape", "mask_shape", "values_shape"), MASKS)
@pytest.mark.parametrize("method", METHODS)
async def test_masks_select_by_place(
    device: ta.Device, method: str, shape: Any, mask_shape: Any, values_shape: Any
) -> None:
    rng = np.random.default_rng(7)
    x, values, weights = (rng.uniform(0.5, 1.5, size) for size in (shape, values_shape, shape))
    mask = np.asarray(rng.random(mask_shape) < 0.5)
    there, given, weights_there = [await device.put(np.asarray(host)) for host in (x, values, weights)]

    def of_numpy(x: Any, v: Any) -> Any:
        return (weights * by_mask(x, mask, method, v) ** 2).sum()

    for mask_there in (mask, await device.put(mask)):

        def loss(x: Any, v: Any, mask: Any = mask_there) -> Any:
            return a.sum(weights_there * getattr(x.at[mask], method)(v) ** 2)

        new = await getattr(there.at[mask_there], method)(given)
        np.testing.assert_allclose(await new.to_host(), by_mask(x, mask, method, values), rtol=1e-14)
        directions = rng.normal(size=shape), rng.normal(size=values_shape)
        slopes = await ta.grad(loss, (0, 1))(there, given)
        for place, slope in enumerate(slopes):
            moved = tuple(d if n == place else 0 * d for n, d in enumerate(directions))
            found = (await slope.to_host() * directions[place]).sum()
            np.testing.assert_allclose(found, along(of_numpy, (x, values), moved), rtol=1e-6, atol=1e-7)


async def test_elements_outside_of_a_mask_have_no_singular_gradient(device: ta.Device) -> None:
    x = await device.put(np.array([-4.0, 0.0, np.inf, 4.0]))
    v = await device.put(np.array([0.0, 0.0, 2.0, 0.5]))
    mask = np.array([False, False, False, True])
    for method, want in (
        ("divide", (2.0, -16.0)),
        ("power", (0.25, 2 * np.log(4.0))),
        ("multiply", (0.5, 4.0)),
    ):
        by_x, by_v = await ta.grad(lambda x, v, m=method: a.sum(getattr(x.at[mask], m)(v)), (0, 1))(x, v)
        np.testing.assert_allclose(await by_x.to_host(), [1, 1, 1, want[0]])
        np.testing.assert_allclose(await by_v.to_host(), [0, 0, 0, want[1]])


async def test_a_product_of_several_values_has_gradients_at_zeros(device: ta.Device) -> None:
    x, index = np.array([2.0, 3.0]), np.array([0, 0, 0, 1])
    for zeros in ([1], [1, 2], [0, 1, 2], [3], []):
        v = np.array([1.5, -2.0, 0.7, 3.0])
        v[zeros] = 0

        def of_numpy(x: Any, v: Any) -> Any:
            return (updated(x, index, "multiply", v) ** 2).sum() + updated(x, index, "multiply", v).sum()

        def loss(x: Any, v: Any) -> Any:
            new = x.at[index].multiply(v)
            return a.sum(new**2) + a.sum(new)

        there = await device.put(x), await device.put(v)
        directions = numbers((2,), 3), numbers((4,), 4)
        moved = [await device.put(d) for d in directions]
        slopes = await ta.grad(loss, (0, 1))(*there)
        found = sum([(await s.to_host() * d).sum() for s, d in zip(slopes, directions, strict=True)])
        np.testing.assert_allclose(found, along(of_numpy, (x, v), directions), rtol=1e-8)
        curves = await ta.gradients.hvp(loss, there, moved)
        found = sum([(await c.to_host() * d).sum() for c, d in zip(curves, directions, strict=True)])
        np.testing.assert_allclose(found, along(of_numpy, (x, v), directions, 2), rtol=1e-5)


async def test_set_takes_the_last_value_of_an_element(device: ta.Device) -> None:
    count = 1000
    index = np.random.default_rng(0).integers(-50, 50, (2, count))
    x, v = np.zeros(50), np.arange(2.0 * count).reshape(2, count)
    want = updated(x, index, "set", v)
    there, given = await device.put(x), await device.put(v)
    np.testing.assert_array_equal(await there.at[index].set(given).to_host(), want)
    slope = await ta.grad(lambda v: a.sum(there.at[index].set(v)))(given)
    taken = np.zeros(2 * count)
    taken[want.astype(int)[np.isin(np.arange(50), index % 50)]] = 1
    np.testing.assert_array_equal(await slope.to_host(), taken.reshape(2, count))


@pytest.mark.parametrize("method", ["min", "max"])
async def test_equal_extrema_share_the_gradient(device: ta.Device, method: str) -> None:
    x = await device.put(np.array([1.0, 1.0, np.nan, 1.0]))
    v = await device.put(np.array([1.0, 1.0, 5.0 if method == "min" else -5.0]))
    index = await device.put(np.array([0, 0, 1]))
    by_x, by_v = await ta.grad(lambda x, v: a.sum(getattr(x.at[index], method)(v)), (0, 1))(x, v)
    np.testing.assert_allclose(await by_x.to_host(), [1 / 3, 1, 1, 1])
    np.testing.assert_allclose(await by_v.to_host(), [1 / 3, 1 / 3, 0])
    by_x = await ta.grad(lambda x: a.sum(getattr(x.at[index], method)(1.0)))(x)
    np.testing.assert_allclose(await by_x.to_host(), [1 / 3, 1 / 2, 1, 1])


@pytest.mark.parametrize("method", ["set", "add", "subtract", "multiply", "divide", "power"])
@pytest.mark.parametrize("kind", ["slice", "indices", "mask"])
async def test_complex_updates(device: ta.Device, method: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    x, v = (rng.normal(size=n) + 1j * rng.normal(size=n) for n in (5, 3))
    key: Any = {"slice": slice(4, 1, -1), "indices": np.array([1, -1, 1]), "mask": rng.random(5) < 0.6}[kind]
    if kind == "mask":
        v = v[0]
    weights = rng.normal(size=5) + 1j * rng.normal(size=5)

    def of_numpy(x: Any, v: Any) -> Any:
        return (weights * updated(x, key, method, v)).real.sum()

    def loss(x: Any, v: Any) -> Any:
        return a.sum(a.real(weights * getattr(x.at[key], method)(v)))

    there, given = await device.put(x), await device.put(np.asarray(v))
    if BACKEND == "cuda" and kind == "indices" and method in ("multiply", "divide", "power"):
        with pytest.raises(ta.NotSupportedError, match="a GPU updates at most 8 bytes atomically"):
            await ta.value_and_grad(loss, (0, 1))(there, given)
        return
    value, slopes = await ta.value_and_grad(loss, (0, 1))(there, given)
    np.testing.assert_allclose(await value.item(), of_numpy(x, v), rtol=1e-13)
    for place, (slope, host) in enumerate(zip(slopes, (x, v), strict=True)):
        direction = rng.normal(size=np.shape(host)) + 1j * rng.normal(size=np.shape(host))
        moved = tuple(direction if n == place else 0 * np.asarray(h) for n, h in enumerate((x, v)))
        # The gradient is the derivative by the real part, minus i times that by the imaginary part.
        found = (await slope.to_host() * direction).real.sum()
        np.testing.assert_allclose(found, along(of_numpy, (x, v), moved), rtol=1e-6, atol=1e-8)


DTYPES = ["int8", "uint8", "int64", "float16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
async def test_results_have_the_dtype_of_the_array(device: ta.Device, method: str, dtype: str) -> None:
    x = np.array([[1, 2, 3], [4, 5, 6]]).astype(dtype)
    there = await device.put(x)
    kinds = np.dtype(dtype).kind
    if (method == "divide" and kinds in "iu") or (method in ("min", "max") and kinds == "c"):
        with pytest.raises(TypeError, match=f"at.{method}: the array is of {dtype}"):
            there.at[0].min(1) if method == "min" else getattr(there.at[0], method)(1)
        return
    keys: list[Any] = [
        0,
        (slice(None), 1),
        np.array([1, 1, 0]),
        (np.array([0, 1]), 2),
        np.eye(2, 3, dtype=bool),
    ]
    small = np.array(2, "uint8")
    for key, values in itertools.product(keys, [2, True, np.uint8(2), small, np.array([2], dtype)]):
        with np.errstate(all="ignore"):
            want = updated(x, key, method, np.asarray(values, dtype))
        given = await device.put(values) if values is small else values
        new = await getattr(there.at[key], method)(given)
        assert new.dtype == dtype
        np.testing.assert_allclose(await new.to_host(), want, rtol=2e-3 if dtype == "float16" else 1e-6)


async def test_values_of_another_dtype_get_gradients_of_their_own(device: ta.Device) -> None:
    x, v = await device.put(np.ones(4, "float32")), await device.put(np.array([0.5, 2.0]))
    for key in (slice(0, 2), np.array([2, 2])):
        by_x, by_v = await ta.grad(lambda x, v, k=key: a.sum(x.at[k].multiply(v) ** 2), (0, 1))(x, v)
        assert (by_x.dtype, by_v.dtype) == ("float32", "float64")
        want = [1.0, 4.0] if isinstance(key, slice) else [4.0, 1.0]
        np.testing.assert_allclose(await by_v.to_host(), want, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
async def test_the_array_is_an_operand_twice(device: ta.Device, method: str) -> None:
    host = np.array([0.6, 0.9, 1.2, 1.4])
    x, index, direction = await device.put(host), np.array([3, 1, 1, 0]), numbers((4,), 2)
    for key in (slice(None, None, -1), index, host > 0.8):
        of = updated if not isinstance(key, np.ndarray) or key.dtype != bool else by_mask
        of_numpy: Any = (
            (lambda x, k=key: (by_mask(x, k, method, x) ** 2).sum())
            if of is by_mask
            else (lambda x, k=key: (updated(x, k, method, x) ** 2).sum())
        )
        slope = await ta.grad(lambda x, k=key: a.sum(getattr(x.at[k], method)(x) ** 2))(x)
        # Equal elements share the gradient, so they are left out.
        if method in ("min", "max") and of is by_mask:
            continue
        np.testing.assert_allclose(
            (await slope.to_host() * direction).sum(), along(of_numpy, (host,), (direction,)), rtol=1e-6
        )


@pytest.mark.parametrize("method", METHODS)
async def test_updates_in_a_step_equal_those_outside(device: ta.Device, method: str) -> None:
    x, v = numbers((4, 3), 1, 0.5, 1.5), numbers((3,), 2, 0.5, 1.5)
    index, mask = np.array([2, 0, 2]), numbers((4, 3), 3) > 0
    there = [await device.put(host) for host in (x, v, index, mask)]

    def loss(x: Any, v: Any, index: Any, mask: Any) -> Any:
        y = getattr(x.at[1:, ::-1], method)(v)
        y = getattr(y.at[:, index], method)(v)
        return a.sum(getattr(y.at[mask], method)(v[0]) ** 2)

    derived: Any = ta.value_and_grad(loss, (0, 1))

    @ta.step
    def stepped(x: Any, v: Any, index: Any, mask: Any) -> Any:
        return derived(x, v, index, mask)

    want, slopes = await derived(*there)
    y = updated(x, (slice(1, None), slice(None, None, -1)), method, v)
    y = updated(updated(y, (slice(None), index), method, v), mask, method, v[0])
    np.testing.assert_allclose(await want.item(), (y**2).sum(), rtol=1e-13)
    for _ in range(2):
        value, found = await stepped(*there)
        np.testing.assert_allclose(await value.item(), await want.item(), rtol=1e-14)
        for slope, of_step in zip(slopes, found, strict=True):
            np.testing.assert_allclose(await of_step.to_host(), await slope.to_host(), rtol=1e-13)
    np.testing.assert_array_equal(await there[0].to_host(), x)


async def test_updates_of_views_leave_the_base(device: ta.Device) -> None:
    host = np.arange(24.0).reshape(2, 3, 4)
    base = await device.put(host)
    view, of_host = base[1, ::-1, 3:0:-1], host[1, ::-1, 3:0:-1]
    for key in ((0, slice(None, None, 2)), np.array([2, 2]), of_host > 15):
        given = np.float64(7.0)
        new = await view.at[key].add(given)
        np.testing.assert_array_equal(await new.to_host(), updated(of_host, key, "add", 7.0))
    broadcast = a.broadcast_to(base[0, 0], (3, 4))
    new = await broadcast.at[1, np.array([0, 0])].add(1.0)
    np.testing.assert_array_equal(
        await new.to_host(), updated(np.broadcast_to(host[0, 0], (3, 4)), (1, np.array([0, 0])), "add", 1.0)
    )
    np.testing.assert_array_equal(await base.to_host(), host)


async def test_updates_are_operands_of_updates(device: ta.Device) -> None:
    x = await device.put(np.zeros(5))
    new = (x + 1).at[0].set(5.0).at[np.array([1, 1])].add(2.0).at[-1].multiply(3.0)
    np.testing.assert_array_equal(await new.to_host(), [5, 5, 1, 1, 3])


async def test_keys_may_be_calls_and_updates_are_traced_by_scan(device: ta.Device) -> None:
    """A sieve: each iteration halves the largest element, and adds it to the next one."""
    host = np.array([0.3, 1.7, 0.8, 1.2])

    def of_numpy(x: Any) -> Any:
        x = x.copy()
        for _ in range(5):
            index = x.argmax()
            x[index] *= 0.5
            x[(index + 1) % 4] += x[index] ** 2
        return (x**3).sum()

    def loss(x: Any) -> Any:
        def step(x: Any, _: None) -> tuple[Any, None]:
            index = a.argmax(x)
            x = x.at[index].multiply(0.5)
            return x.at[(index + 1) % 4].add(a.take(x, index) ** 2), None

        last, _ = ta.gradients.scan(step, x, length=5, every=2)
        return a.sum(last**3)

    value, slope = await ta.value_and_grad(loss)(await device.put(host))
    np.testing.assert_allclose(await value.item(), of_numpy(host), rtol=1e-13)
    direction = numbers((4,), 1)
    want = along(of_numpy, (host,), (direction,))
    np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-7)


async def test_wrong_arguments_are_refused(device: ta.Device) -> None:
    x = await device.put(np.ones((3, 4)))
    n = await device.put(np.ones(3, int))
    mask = np.ones((3, 4), bool)
    shapes = np.arange(3), np.arange(2)
    refusals: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "at.set: an index must be an integer, a slice, ...", lambda: x.at[[0, 1]].set(1)),
        (TypeError, "at.set: an index must be", lambda: (x + 1).at[True].set(x + 2)),
        (TypeError, "at.add: indices must have an integer dtype or bool", lambda: x.at[np.ones(2)].add(1)),
        (TypeError, "at.add: values must be an array or a number", lambda: x.at[0].add([1, 2, 3, 4])),
        (TypeError, "at.set: values is of float64, which does not become", lambda: n.at[0].set(x[0, 0])),
        (ValueError, "at.set: values 0.5 is not an integer", lambda: n.at[0].set(0.5)),
        (TypeError, "at.set: values 1j is complex", lambda: x.at[0].set(1j)),
        (ValueError, r"at.set: values of shape \(3,\) do not broadcast", lambda: (x + 1).at[0].set(n)),
        (ValueError, r"at.max: values of shape \(1, 1, 4\) do not", lambda: x.at[1:].max(x[None, :1])),
        (ValueError, "at.add: values for a mask must be a number, or", lambda: x.at[mask].add(x[0])),
        (IndexError, "at.add: a mask must have the array's shape", lambda: x.at[mask[:2]].add(1)),
        (IndexError, "at.add: the key must have at most one ... and 2", lambda: x.at[0, 0, 0].add(1)),
        (IndexError, "at.add: the key must have at most one", lambda: x.at[..., ...].add(1)),
        (IndexError, "index 3 is out of bounds", lambda: x.at[3].add(1)),
        (IndexError, "at.get: the shapes .* of indices do not broadcast", x.at[shapes].get),
        (ta.NotSupportedError, "at.get: a mask must be the only index of an update", x.at[mask].get),
        (ta.NotSupportedError, "at.add: a mask must be the only", lambda: x.at[mask[0], 1].add(1)),
        (TypeError, "at.add: the array is of bool", lambda: (x > 0).at[0].add(1)),
    ]
    for kind, text, make in refusals:
        with pytest.raises(kind, match=text):
            make()
    for key in (np.array([3]), await device.put(np.array([0, -4]))):
        for method in METHODS:
            with pytest.raises(ta.OutOfRangeError):
                await getattr(x.at[key], method)(1.0)
    np.testing.assert_array_equal(await x.to_host(), np.ones((3, 4)))
    assert (await x.at[:, 0:0].set(x[:, :1] + 1)).shape == (3, 4)
    for method in METHODS:
        with pytest.raises((ValueError, ta.OutOfRangeError)):
            await getattr(x[:0].at[np.array([0])], method)(1.0)
    signed = await x.at[0, 0].set(-0.0)
    assert np.signbit((await signed.to_host())[0, 0])
    b = await (x > 0).at[0, np.array([1, 1])].set(False)
    np.testing.assert_array_equal(await b.to_host(), updated(np.ones((3, 4), bool), (0, 1), "set", False))


async def test_gradients_of_updates_are_derived_once(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with equal keys share a plan, whatever arrays are read."""
    module: Any = sys.modules["trio_accel.gradients._functions"]
    backward, calls = module.backward_in_slices, list[int]()
    monkeypatch.setattr(module, "backward_in_slices", lambda *args: calls.append(1) or backward(*args))
    derived = ta.grad(lambda x, i: a.sum(x.at[i].add(x[:3]).at[i].set(x[3:]).at[1:].set(x[:1]) ** 2))
    for number in range(4):
        x, index = numbers((6, 2), number), np.array([number, number, 4])
        there = await device.put(x), await device.put(index)
        slope, direction = await derived(*there), numbers((6, 2), 9)

        def of_numpy(x: Any, index: Any = index) -> Any:
            new = updated(updated(x, index, "add", x[:3]), index, "set", x[3:])
            return (updated(new, slice(1, None), "set", x[:1]) ** 2).sum()

        found = (await slope.to_host() * direction).sum()
        np.testing.assert_allclose(found, along(of_numpy, (x,), (direction,)), rtol=1e-6)
    assert len(calls) == 1


async def test_indices_of_few_bits_select_elements_of_large_arrays(device: ta.Device) -> None:
    x, v = numbers((3, 200), 1), numbers((4,), 2)
    key = np.array([2, 0, 2, 2], "uint8"), np.array([199, 7, 100, 199], "uint8")
    direction = numbers((3, 200), 3)
    slope = await ta.grad(lambda x, v: a.sum(x.at[key].multiply(v) ** 2))(
        await device.put(x), await device.put(v)
    )
    want = along(lambda x: (updated(x, key, "multiply", v) ** 2).sum(), (x,), (direction,))
    np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
async def test_hosts_and_numbers_belong_to_each_call(device: ta.Device, method: str) -> None:
    """A kept plan reads the host arrays and numbers of its own call."""
    x, direction = numbers((6,), 1, 0.5, 1.5), numbers((6,), 2)
    there = await device.put(x)
    for number in range(8):
        index, v = (np.array([1, 4, 1, 0]) * (number + 1)) % 6, numbers((4,), number, 0.5, 1.5)
        value = 0.5 + number / 7

        def of_numpy(x: Any, index: Any = index, v: Any = v, value: float = value) -> Any:
            y = updated(updated(x, index, method, v), slice(1, 3), method, value)
            return (updated(y, index[:2], method, value) ** 2).sum()

        def loss(x: Any, index: Any = index, v: Any = v, value: float = value) -> Any:
            y = getattr(getattr(x.at[index], method)(v).at[1:3], method)(value)
            return a.sum(getattr(y.at[index[:2]], method)(value) ** 2)

        found, slope = await ta.value_and_grad(loss)(there)
        np.testing.assert_allclose(await found.item(), of_numpy(x), rtol=1e-13)
        want = along(of_numpy, (x,), (direction,))
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-7)


async def test_writes_in_place_name_the_updated_copy(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    for write in (lambda y: y[0].assign(2.0), lambda y: y.fill(2.0), lambda y: a.put(y, np.array([0]), 1.0)):
        with pytest.raises(ta.NotSupportedError, match=r"in place, and x.at\[key\].set\(v\) updates a copy"):
            await ta.grad(lambda x, write=write: a.sum(write(x * 2)))(x)


@pytest.mark.parametrize("method", METHODS)
async def test_indices_on_the_host_may_change_between_calls(device: ta.Device, method: str) -> None:
    x, values = await device.put(numbers((3,), 0, 1.0, 2.0)), await device.put(numbers((1,), 1, 1.0, 2.0))

    def loss(parameters: Any, index: Any) -> Any:
        return a.sum(getattr(parameters[0].at[index], method)(parameters[1]) ** 2)

    for place in (0, 2, 1, 0):
        host = np.array([place])
        found = await ta.grad(loss)([x, values], host)
        wanted = await ta.grad(loss)([x, values], await device.put(host))
        for slope, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(await slope.to_host(), await want.to_host(), rtol=1e-12)
