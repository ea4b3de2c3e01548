"""Creation functions: against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays

INLINE = ta.DeviceOptions(isolation="inline")
DTYPES = (
    "bool",
    "int8",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


async def check(found: ta.AccelRef, want: Any, rtol: float = 0) -> None:
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(await found.to_host(), want, rtol=rtol)


@settings(max_examples=15, deadline=None)
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7).filter(bool), st.booleans())
async def test_arange(start: int, stop: int, step: int, whole: bool) -> None:
    factor: Any = 1 if whole else 0.5
    numbers = start * factor, stop * factor, step * factor
    async with ta.open_system("numbers") as system, system.open_device(BACKEND, options=INLINE) as device:
        await check(await arrays.arange(device, *numbers), np.arange(*numbers))
        await check(await arrays.arange(device, start), np.arange(start))


@pytest.mark.parametrize("size", [0, 1, 31, 255, 256, 257, 1025])
async def test_sizes(device: ta.Device, size: int) -> None:
    await check(await arrays.arange(device, size, dtype="float32"), np.arange(size, dtype="f4"))
    await check(await arrays.arange(device, 3, 3 + size * 0.25, 0.25), np.arange(3, 3 + size * 0.25, 0.25))
    await check(await arrays.linspace(device, -1, 2, size), np.linspace(-1, 2, size), 1e-15)
    found = await arrays.linspace(device, 1, 2 + 1j, size, endpoint=False)
    await check(found, np.linspace(1, 2 + 1j, size, endpoint=False), 1e-15)
    await check(await arrays.eye(device, size, 5, k=-2), np.eye(size, 5, -2))
    await check(await arrays.eye(device, size, 5, k=1 << 62), np.zeros((size, 5)))


WHOLE = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
FLOATS = "float16", "float32", "float64", "complex64", "complex128"


@pytest.mark.parametrize("kind", WHOLE)
async def test_numbers_of_narrow_dtypes_do_not_wrap_around(device: ta.Device, kind: Any) -> None:
    least, most = (kind(number) for number in (np.iinfo(kind).min, np.iinfo(kind).max))
    low, high = int(least), int(most)
    await check(await arrays.linspace(device, least, most, 7), np.linspace(float(low), float(high), 7), 1e-15)
    await check(await arrays.linspace(device, most, least, 7), np.linspace(float(high), float(low), 7), 1e-15)
    await check(await arrays.logspace(device, kind(5), kind(3), 3), np.logspace(5.0, 3.0, 3), 1e-14)
    await check(await arrays.geomspace(device, kind(100), kind(4), 3), np.geomspace(100.0, 4.0, 3), 1e-14)
    step = kind(high // 4 + 1)
    want = np.array(list(range(low, high, int(step))), kind)
    await check(await arrays.arange(device, least, most, step, dtype=kind), want)
    await check(await arrays.arange(device, kind(5), kind(2), -1), np.array([5, 4, 3]))
    with pytest.raises(ValueError, match=f"arrays.arange: {kind.__name__} does not hold"):
        await arrays.arange(device, high - 1, high + 2, dtype=kind)


async def test_steps_that_overflow_or_vanish(device: ta.Device) -> None:
    big, least = 1.7e308, 5e-324
    await check(await arrays.linspace(device, -big, big, 3), np.array([-big, 0, big]))
    await check(await arrays.linspace(device, -big, big, 1), np.array([-big]))
    found = await arrays.linspace(device, big + big * 1j, -big, 5, endpoint=False)
    want = np.array([big + big * 1j, *[big * (1 - 0.4 * n) + big * (1 - 0.2 * n) * 1j for n in range(1, 5)]])
    await check(found, want, 1e-15)
    await check(await arrays.linspace(device, 0, 3 * least, 4), np.arange(4) * least)
    await check(
        await arrays.arange(device, -big, big, big / 2), np.array([-big, -big / 2, 0, big / 2]), 1e-15
    )
    await check(await arrays.linspace(device, 0, 1 << 80, 3), np.array([0, 2.0**79, 2.0**80]))
    await check(await arrays.geomspace(device, 1e-200, 1e200, 3), np.array([1e-200, 1, 1e200]), 1e-13)


@pytest.mark.parametrize(
    ("start", "stop"), [(1, 4), (2, 6), (0.3, 20.3), (-1, -100), (-7e-310, -1e300), (9, 0.1)]
)
async def test_powers_begin_and_end_with_the_numbers_themselves(
    device: ta.Device, start: float, stop: float
) -> None:
    for count in (1, 2, 9, 50):
        found = await arrays.geomspace(device, start, stop, count)
        await check(found, np.geomspace(start, stop, count), 1e-12)
        host = await found.to_host()
        assert (host[0], host[-1]) == (start, stop if count > 1 else start)
    found = await arrays.geomspace(device, start, stop, 4, endpoint=False)
    await check(found, np.geomspace(start, stop, 4, endpoint=False), 1e-12)


async def test_powers_of_ten_are_exact(device: ta.Device) -> None:
    await check(await arrays.geomspace(device, 1, 1e5, 6), 10.0 ** np.arange(6))


@pytest.mark.parametrize("name", ["linspace", "logspace", "geomspace"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_numbers_of_one_distance_or_ratio_are_floating(
    device: ta.Device, name: str, dtype: str
) -> None:
    asked = getattr(arrays, name)(device, 1, 3, 5, dtype=dtype)
    if dtype in FLOATS or dtype == "bfloat16":
        await check(await asked, getattr(np, name)(1, 3, 5).astype(ta.DType(dtype).dtype), 1e-2)
        return
    with pytest.raises(TypeError, match=f"^arrays.{name}: dtype must be floating or complex, got {dtype}"):
        await asked


@pytest.mark.parametrize(
    ("name", "numbers", "told"),
    [
        ("arange", (0, 1, 1e-300), "more numbers than an array has"),
        ("arange", (0, 1e300, 1e-300), "more numbers than an array has"),
        ("arange", (1e308, 1.7e308, 1e-300), "more numbers than an array has"),
        ("arange", (1.7e308, 1e308, -1e-300), "more numbers than an array has"),
        ("arange", (0, 1 << 90), "more numbers than an array has"),
        ("arange", (0.0, 1 << 1100), "is larger than float64 holds"),
        ("linspace", (0, 1, 1 << 70), r"num must be from -2\*\*63 to 2\*\*63 - 1"),
        ("linspace", (0, 1 << 1100, 3), "stop is larger than float64 holds"),
        ("logspace", (0, 1, -1), "num must be at least 0"),
        ("geomspace", (1, 2, -1), "num must be at least 0"),
        ("geomspace", (-1, 2, 3), "of one sign, got -1 and 2"),
        ("geomspace", (0, 2, 3), "not 0"),
        ("geomspace", (1, np.inf, 3), "must be finite"),
    ],
)
async def test_an_error_names_the_called_function(
    device: ta.Device, name: str, numbers: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=rf"^arrays\.{name}: .*{told}"):
        await getattr(arrays, name)(device, *numbers)
    *ends, last = numbers
    if name != "arange":
        with pytest.raises(TypeError, match=rf"^arrays\.{name}: start must be a (real )?number, got '1'"):
            await getattr(arrays, name)(device, "1", *ends[1:], last)


async def test_the_last_number_is_the_end_itself(device: ta.Device) -> None:
    for start, stop in ((0.1, 0.7), (-1 / 3, 1e10), (5.0, 5.0)):
        got = await (await arrays.linspace(device, start, stop, 50)).to_host()
        assert (got[0], got[-1]) == (start, stop)
        np.testing.assert_allclose(got, np.linspace(start, stop, 50), rtol=1e-14, atol=1e-6)
    await check(await arrays.linspace(device, 0, 1, 9, dtype="float16"), np.linspace(0, 1, 9, dtype="f2"))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_dtypes(device: ta.Device, dtype: str) -> None:
    kind = ta.DType(dtype).dtype
    await check(await arrays.eye(device, 3, dtype=dtype), np.eye(3).astype(kind))
    await check(await arrays.ones(device, (2, 3), dtype=dtype), np.ones((2, 3), kind))
    await check(await arrays.zeros(device, 4, dtype=dtype), np.zeros(4, kind))
    await check(await arrays.empty(device, 4, dtype=dtype), np.zeros(4, kind))
    x = await arrays.full(device, (2, 0, 3), 1, dtype=dtype)
    await check(x, np.ones((2, 0, 3), kind))
    x = await arrays.ones(device, (3, 2), dtype=dtype)
    for made, value in ((arrays.ones_like, 1), (arrays.zeros_like, 0), (arrays.empty_like, 0)):
        await check(await made(x.T), np.full((2, 3), value).astype(kind))
        await check(await made(x, dtype="float32"), np.full((3, 2), value, "f4"))
    await check(await arrays.full_like(x, 1), np.ones((3, 2), kind))


async def test_the_dtype_of_a_number(device: ta.Device) -> None:
    for value, dtype in (
        (True, "bool"),
        (7, "int64"),
        (0.5, "float64"),
        (1j, "complex128"),
        (np.float32(2), "float32"),
    ):
        found = await arrays.full(device, (2, 2), value)
        assert found.dtype == dtype
        assert (await found.to_host() == value).all()


@pytest.mark.parametrize("dtype", DTYPES)
async def test_triangles(device: ta.Device, dtype: str) -> None:
    host = np.random.default_rng(1).integers(0, 2, (3, 4, 5)).astype(ta.DType(dtype).dtype)
    x = await device.put(host)
    for k in (-5, -1, 0, 2, 9):
        await check(await arrays.tril(x, k=k), np.tril(host, k))
        await check(await arrays.triu(x[::-1, :, ::-1], k=k), np.triu(host[::-1, :, ::-1], k))


async def test_triangles_in_place_and_with_nan(device: ta.Device) -> None:
    host = np.full((3, 3), np.nan)
    x = await device.put(host)
    assert await arrays.tril(x, out=x) is x
    np.testing.assert_array_equal(await x.to_host(), np.tril(host))
    with pytest.raises(ValueError, match=r"arrays\.triu: x must have at least two axes, got shape \(3,\)"):
        await arrays.triu(x[0])


async def test_asarray(device: ta.Device) -> None:
    host = np.arange(6, dtype=np.int32).reshape(2, 3)
    await check(await arrays.asarray(device, host), host)
    await check(await arrays.asarray(device, host, dtype="float32"), host.astype("f4"))
    await check(await arrays.asarray(device, [[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]))
    await check(await arrays.asarray(device, 1.5, dtype="complex64"), np.asarray(1.5, "c8"))
    x = await device.put(host)
    assert await arrays.asarray(device, x) is x
    assert await arrays.asarray(device, x, dtype="int32", copy=False) is x
    copied = await arrays.asarray(device, x, copy=True)
    assert copied.block is not x.block
    await check(copied, host)
    await check(await arrays.asarray(device, x, dtype="float64"), host.astype(float))
    async with device.system.open_device(BACKEND, options=INLINE) as other:
        there = await arrays.asarray(other, x, dtype="float64")
        assert there.device is other
        await check(there, host.astype(float))
        with pytest.raises(ValueError, match=r"arrays\.asarray: copy=False"):
            await arrays.asarray(other, x, copy=False)
    with pytest.raises(ValueError, match=r"arrays\.asarray: copy=False"):
        await arrays.asarray(device, host, copy=False)
    with pytest.raises(TypeError, match=r"arrays\.asarray: obj: complex128 to float64 would drop"):
        await arrays.asarray(device, np.zeros(3, complex), dtype="float64")
    with pytest.raises(OverflowError):
        await arrays.asarray(device, [300], dtype="uint8")


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: arrays.arange(device, 0, 5, 0), ValueError, r"arrays\.arange: .*the step not 0"),
        (lambda: arrays.arange(device, float("inf")), ValueError, "numbers must be finite"),
        (lambda: arrays.arange(5, 6), TypeError, r"arrays\.arange: device must be an open Device"),  # type: ignore[arg-type]
        (lambda: arrays.linspace(device, 0, 1, -1), ValueError, "num must be at least 0"),
        (
            lambda: arrays.linspace(device, 0, 1, 5, dtype="int64"),
            TypeError,
            "dtype must be floating or complex, got int64",
        ),
        (
            lambda: arrays.linspace(device, 0, 1j, 5, dtype="float64"),
            TypeError,
            "dtype must be complex, got float64",
        ),
        (
            lambda: arrays.eye(device, -1),
            ValueError,
            r"arrays\.eye: shape must be integers of at least 0",
        ),
        (lambda: arrays.full(device, 3, 0.5, dtype="int8"), ValueError, "not an integer"),
        (lambda: arrays.full(3, device, 0.5), TypeError, r"arrays\.full: device must be"),  # type: ignore[arg-type]
        (lambda: arrays.zeros(device, (2, -3)), ValueError, "shape must be integers of at least 0, got"),
        (lambda: arrays.tril(np.zeros((3, 3))), TypeError, "no operand is on a device"),
        (
            lambda: arrays.tril(2.0),
            ValueError,
            r"arrays\.tril: x must have .* axes, got shape \(\)",
        ),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            await call()
