"""Element-wise functions outside the standard, and special ones: against NumPy and SciPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from chosen import IS_STAND_IN
from differences import widest
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-12}
SPECIAL = (
    *(
        "digamma",
        "entr",
        "erf",
        "erfc",
        "erfcinv",
        "erfcx",
        "erfinv",
        "expit",
        "gamma",
        "gammaln",
        "i0",
        "i1",
    ),
    *("log_expit", "log_ndtr", "logit", "ndtr", "ndtri", "rel_entr", "xlog1py", "xlogy"),
)
NUMPY = (
    "angle",
    "cbrt",
    "degrees",
    "exp2",
    "fmax",
    "fmin",
    "fmod",
    "heaviside",
    "logaddexp2",
    "radians",
    "sinc",
)
WANTED: dict[str, Callable[..., Any]] = {
    **{name: getattr(scipy.special, name) for name in SPECIAL},
    **{name: getattr(np, name) for name in NUMPY},
    # SciPy's are NaN at infinities.
    "i0": lambda x: np.where(np.isinf(x), np.abs(x), scipy.special.i0(x)),
    "i1": lambda x: np.where(np.isinf(x), x, scipy.special.i1(x)),
    "frac": lambda x: x - np.trunc(x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "isclose": np.isclose,
}
OF_TWO = ("fmax", "fmin", "fmod", "heaviside", "logaddexp2", "rel_entr", "xlog1py", "xlogy", "isclose")
# A result at a steep slope, or from a cancelling difference, has the digits of the argument.
ABSOLUTE = {"digamma": 4, "gammaln": 4, "angle": 0, "logit": 2, "logaddexp2": 2, "sinc": 2}
NAMES = [*WANTED][::4] if IS_STAND_IN else [*WANTED]


def data(dtype: str, seed: int = 0) -> Any:
    special = [0.0, -0.0, 1, -1, 2, 0.5, 0.75, -5, 30, -30, math.inf, -math.inf, math.nan]
    rng = np.random.default_rng(seed)
    return rng.permutation(np.concatenate([special, rng.normal(0, 2, 150)])).astype(ta.DType(dtype).dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_every_function_of_every_dtype(device: ta.Device, dtype: str) -> None:
    for name in NAMES:
        given = [data(dtype, seed) for seed in range(1 + (name in OF_TWO))]
        found = await getattr(ta.arrays, name)(*[await device.put(one) for one in given])
        with np.errstate(all="ignore"):
            want = WANTED[name](*map(widest, given))
            if want.dtype != bool:
                want = widest(want.astype(ta.DType(dtype).dtype))
        assert found.dtype == ("bool" if want.dtype == bool else dtype), name
        tolerance = TOLERANCES[dtype]
        np.testing.assert_allclose(
            widest(await found.to_host()),
            want,
            rtol=tolerance,
            atol=tolerance * ABSOLUTE.get(name, 1e-3),
            err_msg=name,
        )


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint16", "uint64"])
async def test_divisors_and_multiples(device: ta.Device, dtype: str) -> None:
    rng, limits = np.random.default_rng(2), np.iinfo(dtype)
    ends = np.array([limits.min, limits.max, 0, 0, 12, 7], dtype)
    x, y = (np.concatenate([ends, rng.integers(limits.min, limits.max, 60, dtype)]) for _ in range(2))
    y = rng.permutation(y) % 50
    on = await device.put(x)
    for name in ("gcd", "lcm"):
        found = await getattr(ta.arrays, name)(on, y)
        assert found.dtype == dtype
        np.testing.assert_array_equal(await found.to_host(), getattr(np, name)(x, y), err_msg=name)
    with pytest.raises(TypeError, match=r"arrays\.gcd: it does not take float32"):
        await ta.arrays.gcd(await device.zeros(2, "float32"), await device.zeros(2, "float32"))


async def test_whole_and_complex_numbers(device: ta.Device) -> None:
    n, z = np.arange(-3, 6), np.array([1 + 2j, -1 - 0j, 3j, 0, np.nan])
    on, of = await device.put(n), await device.put(z)
    for name in ("expit", "sinc", "gammaln", "cbrt"):
        found = await getattr(ta.arrays, name)(on)
        np.testing.assert_allclose(
            await found.to_host(), WANTED[name](n.astype(float)), rtol=1e-12, atol=1e-16
        )
    np.testing.assert_allclose(await (await ta.arrays.angle(of)).to_host(), np.angle(z))
    np.testing.assert_allclose(await (await ta.arrays.sinc(of[:4])).to_host(), np.sinc(z[:4]))
    for name in ("erfinv", "i0", "expit", "fmax", "cbrt"):
        with pytest.raises(TypeError, match=rf"arrays\.{name}: \w+ does not take complex128"):
            await getattr(ta.arrays, name)(*[of] * (1 + (name in OF_TWO)))


async def test_close_elements(device: ta.Device) -> None:
    x = np.array([1.0, 1.00001, math.inf, -math.inf, math.nan, 0, 1e-9, math.inf])
    y = np.array([1.00001, 1.1, math.inf, math.inf, math.nan, 1e-8, 0, 1.0])
    on = await device.put(x)
    for options in ({}, {"equal_nan": True}, {"rtol": 0.2}, {"atol": 0.0, "rtol": 1e-3}):
        found = await ta.arrays.isclose(on, y, **options)
        np.testing.assert_array_equal(
            await found.to_host(), np.isclose(x, y, **options), err_msg=str(options)
        )
        for shift in (1.0, 1 + 1e-9):
            given = x * shift
            got = await ta.arrays.allclose(on, given, **options)
            assert got is bool(np.allclose(x, given, **options)), options
    # Unsigned numbers do not wrap around, and complex ones are compared by distances.
    few = await device.put(np.array([1, 200], np.uint8))
    assert not await ta.arrays.allclose(few, np.array([2, 199], np.uint8))
    assert await ta.arrays.allclose(few, np.array([2, 199], np.uint8), atol=1)
    z = np.array([1 + 1j, 2 - 1j])
    assert await ta.arrays.allclose(await device.put(z), z + 1e-9j)
    assert await ta.arrays.allclose(on[:0], on[:0])
    with pytest.raises(ValueError, match=r"arrays\.allclose: the shapes \(8,\), \(3,\) do not broadcast"):
        await ta.arrays.allclose(on, np.zeros(3))


async def test_equal_arrays(device: ta.Device) -> None:
    x = np.array([[1.0, math.nan], [0.0, -0.0]])
    on = await device.put(x)
    for other in (x, x.T, x[:1], -x, np.nan_to_num(x), x.astype(np.float32)):
        for equal_nan in (False, True):
            got = await ta.arrays.array_equal(on, other, equal_nan=equal_nan)
            assert got is np.array_equal(x, other, equal_nan=equal_nan)
    assert await ta.arrays.array_equal(on[:0], x[:0])
    with pytest.raises(TypeError, match=r"arrays\.array_equal: x2 must be an AccelRef, got list"):
        await ta.arrays.array_equal(on, [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"equal_nan must be True or False, got 1"):
        await ta.arrays.array_equal(on, on, equal_nan=1)  # type: ignore[arg-type]


async def test_weights_between_two_arrays(device: ta.Device) -> None:
    x, y, w = (np.random.default_rng(4).normal(size=(3, 5)) for _ in range(3))
    w[0, :3] = 0, 1, 0.5
    found = await (await ta.arrays.lerp(await device.put(x), y, w)).to_host()
    np.testing.assert_allclose(found, x + w * (y - x), rtol=1e-12, atol=1e-15)
    assert (found[0, 0], found[0, 1]) == (x[0, 0], y[0, 1])


SPECIAL = (
    *(
        "digamma",
        "entr",
        "erf",
        "erfc",
        "erfcinv",
        "erfcx",
        "erfinv",
        "expit",
        "gamma",
        "gammaln",
        "i0",
        "i1",
    ),
    *("log_expit", "log_ndtr", "logit", "ndtr", "ndtri"),
)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
async def test_special_functions_keep_their_digits(device: ta.Device, dtype: str, tolerance: float) -> None:
    sizes = np.logspace(-37, 37, 501)
    near = [np.linspace(*ends, 501) for ends in ((-20, 20), (0, 1), (-4, -0.01), (30, 180))]
    # Near zeros of digamma, an error of float64 is visible.
    zero = [np.linspace(1.4, 1.46, 50), np.linspace(1.463, 1.5, 50)]
    zero += [np.array([1.4615, 1.4616, 1.4617, -0.504, -1.573])] if dtype == "float32" else []
    x = np.concatenate([sizes, -sizes, 1 - np.logspace(-7, -1, 50), *near, *zero]).astype(dtype)
    on, exact, limits = await device.put(x), x.astype(float), np.finfo(dtype)
    for name in SPECIAL:
        found = (await (await getattr(ta.arrays, name)(on)).to_host()).astype(float)
        want = getattr(scipy.special, name)(exact)
        with np.errstate(over="ignore"):
            rounded = want.astype(dtype).astype(float)
        # Results at the limits of the dtype are rounded as it may, and so is a zero of float64.
        is_normal = (abs(want) < limits.max) & (abs(want) > limits.tiny)
        known = is_normal & ~np.isinf(found)
        # Near its zeros at 1 and 2, only the absolute error is small.
        least = {"float32": 1e-7, "float64": 1e-15}[dtype] if name == "gammaln" else 0
        np.testing.assert_allclose(found[known], want[known], rtol=tolerance, atol=least, err_msg=name)
        np.testing.assert_allclose(found[~known], rounded[~known], rtol=2e-6, atol=1e-19, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_relative_entropy_of_any_quotient(device: ta.Device, dtype: str) -> None:
    limits = np.finfo(dtype)
    numbers = np.array(
        [
            limits.tiny,
            limits.smallest_subnormal,
            limits.max,
            1e-30,
            1e30,
            0.1,
            1,
            1 + 2 * limits.eps,
            1.9,
            3,
            0,
        ]
    ).astype(dtype)
    x, y = (each.ravel() for each in np.meshgrid(numbers, numbers))
    found = await (await ta.arrays.rel_entr(await device.put(x), await device.put(y))).to_host()
    with np.errstate(all="ignore"):
        want = scipy.special.rel_entr(x.astype(float), y.astype(float)).astype(dtype)
    rtol = {"float32": 1e-6, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(found, want, rtol=rtol, atol=4 * limits.smallest_subnormal)


@pytest.mark.parametrize("dtype", [*TOLERANCES, "complex64", "complex128"])
async def test_numbers_in_place_of_nan(device: ta.Device, dtype: str) -> None:
    x, most = data(dtype), float({"bfloat16": 255 * 2.0**120}.get(dtype) or np.finfo(dtype).max)
    if dtype.startswith("complex"):
        x = np.concatenate([x.ravel(), [complex(np.nan, 1), complex(np.inf, -np.inf), complex(-0.0, np.nan)]])
        x = x.astype(dtype)
    on = await device.put(x)
    for options in ({}, {"nan": 2.5}, {"posinf": 5}, {"nan": -1, "posinf": 3, "neginf": -7.5}):
        chosen = {"posinf": most, "neginf": -most, **options}
        want = np.nan_to_num(x.astype(complex), **chosen)
        found = await ta.arrays.nan_to_num(on, **options)
        assert found.dtype == dtype
        np.testing.assert_array_equal((await found.to_host()).astype(complex), want)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint64"])
async def test_integers_stay_when_nan_is_replaced(device: ta.Device, dtype: str) -> None:
    x = np.array([0, 1]).astype(dtype) if dtype == "bool" else np.array([0, np.iinfo(dtype).max], dtype)
    found = await (await ta.arrays.nan_to_num(await device.put(x), nan=2.5)).to_host()
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.sampled_from([((4, 1), (3,)), ((), (2, 2)), ((0, 3), (3,)), ((2, 1, 3), (4, 1))]),
    seed=st.integers(0, 99),
)
def test_shapes_broadcast(shapes: Any, seed: int) -> None:
    import trio

    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=shape) for shape in shapes)

    async def compute() -> None:
        async with ta.open_system("shapes") as system, system.open_device("cpu") as device:
            found = await ta.arrays.xlogy(await device.put(x), y)
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(await found.to_host(), scipy.special.xlogy(x, y), rtol=1e-12)

    trio.run(compute)
