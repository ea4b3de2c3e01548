"""Elementwise functions of `ta.arrays`: against NumPy in wider types, by the rules of the standard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta
from trio_accel.arrays import _elementwise

Array = npt.NDArray[Any]

WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *WHOLE, *FLOATS, *COMPLEX)
TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "complex64": 2e-6}
WIDER: dict[str, Any] = {
    **dict.fromkeys(("float16", "bfloat16", "float32"), np.float64),
    "float64": np.longdouble,
    "complex64": np.complex128,
    "complex128": np.clongdouble,
}
# Functions with results that depend on the dtype of the computation.
NARROW = {"nextafter", "floor_divide", "remainder"}
TERNARY = ("clip", "where")
NAMES = [name for name in _elementwise.__all__ if name not in TERNARY]
UNARY = [name for name in NAMES if getattr(ta.arrays, name).expression.inputs == ("x",)]
BINARY = [name for name in NAMES if name not in UNARY]
# The stand-in's compiler takes a second for each.
COMPILED = NAMES[::8] if IS_STAND_IN else NAMES
TAKES_COMPLEX = {
    *(
        "abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "conj",
        "cos",
        "cosh",
        "exp",
        "expm1",
        "imag",
    ),
    *("isfinite", "isinf", "isnan", "log", "log1p", "log2", "log10", "logical_not", "negative", "positive"),
    *("real", "reciprocal", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "add", "divide"),
    *("equal", "logical_and", "logical_or", "logical_xor", "multiply", "not_equal", "pow", "subtract"),
}


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(ta.arrays, name)
    return found


def data(name: str, count: int, seed: int = 0) -> Array:
    """Numbers of all sizes, beginning with special ones."""
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if not dtype.is_inexact:
        limits = np.iinfo(dtype.dtype)
        large = rng.integers(limits.min, limits.max, count, dtype=dtype.dtype, endpoint=True)
        small = (rng.integers(0, 12, count) - 5 * (dtype.kind == "int")).astype(dtype.dtype)
        x: Array = np.where(rng.random(count) < 0.6, small, large)
        x[:3] = [limits.min, limits.max, 0]
        return x
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, -2.5, 1e-5, 3e4]
    real = np.concatenate([special, rng.normal(0, 2, count)])[:count]
    other = rng.permutation(real) if dtype.kind == "complex" else None
    with np.errstate(all="ignore"):
        return (real if other is None else _complex(real, other)).astype(dtype.dtype)


def _complex(real: Any, imag: Any) -> Array:
    made = np.empty(np.shape(real), complex)
    made.real, made.imag = real, imag
    return made


def by_numpy(name: str, *arrays: Array) -> Array:
    """NumPy's result in a wider type, as one of the type that it has of these arrays."""
    with np.errstate(all="ignore"):
        narrow = np.asarray(getattr(np, name)(*arrays))
        wide = [array.astype(WIDER.get(array.dtype.name, array.dtype)) for array in arrays]
        if name == "floor_divide" and ta.DType.of(arrays[0].dtype).is_inexact:
            # The standard's: NumPy's takes the remainder if a number is infinite.
            return np.where(np.isinf(arrays[0]) | np.isinf(arrays[1]), arrays[0] / arrays[1], narrow)
        if name in NARROW or not ta.DType.of(arrays[0].dtype).is_inexact:
            return narrow
        return np.asarray(getattr(np, name)(*wide)).astype(narrow.dtype)


def assert_close(got: Array, want: Array, what: str) -> None:
    """Require the same numbers, and the same signs of real zeros."""
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    if want.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    tolerance = TOLERANCES.get(want.dtype.name, 1e-13)
    # Terms of a sum cancel.
    least = tolerance * (1 if "logaddexp" in what else 1e-6)
    if ta.DType.of(want.dtype).kind == "complex":
        sizes = np.abs(np.nan_to_num(want, posinf=0, neginf=0))
        for got_part, want_part in ((got.real, want.real), (got.imag, want.imag)):
            with np.errstate(all="ignore"):
                is_near = np.abs(got_part - want_part) <= tolerance * sizes + least
            is_same = (got_part == want_part) | (np.isnan(got_part) & np.isnan(want_part))
            np.testing.assert_array_equal(is_near | is_same, True, err_msg=what)
        return
    got, want = got.astype(float), want.astype(float)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=least, err_msg=what)
    # The sign of a zero is up to NumPy.
    zero = (want == 0) & (not what.startswith("sign "))
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), err_msg=what)


def arguments_of(name: str, dtype: str, count: int) -> list[Array]:
    arrays = [data(dtype, count, seed) for seed in range(1 if name in UNARY else 2)]
    if name == "pow" and dtype.startswith("int"):
        arrays[1] &= 15  # NumPy refuses negative ones
    return arrays


def is_there(name: str, arrays: list[Array]) -> bool:
    """Whether the standard or NumPy has a function of these."""
    if arrays[0].dtype.kind == "c":
        return name in TAKES_COMPLEX
    if name == "reciprocal" and arrays[0].dtype.kind in "biu":
        return False  # NumPy's are also integers: nearly all of them zero
    try:
        getattr(np, name)(*(array[:0] for array in arrays))
    except TypeError:
        return False
    return True


def test_all_functions_of_the_standard_are_there() -> None:
    assert len(UNARY) + len(BINARY) + len(TERNARY) == 68  # 67, and where
    assert all(hasattr(np, name) for name in _elementwise.__all__)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_function_of_every_dtype(device: ta.Device, dtype: str) -> None:
    for name in COMPILED:
        arrays = arguments_of(name, dtype, 257)
        on = [await device.put(array) for array in arrays]
        if not is_there(name, arrays):
            with pytest.raises(TypeError, match=rf"arrays\.{name}: \w+ does not take {dtype}"):
                await function(name)(*on)
            continue
        found = await function(name)(*on)
        with np.errstate(all="ignore"):
            assert_close(await found.to_host(), by_numpy(name, *arrays), f"{name} of {dtype}")


PARTS = (0.0, -0.0, 1.0, -1.0, 1 + 2.0**-50, 1 - 2.0**-50, 1e-8, -0.5, 25.0, 1e17, 1e-300, 1e300, 5e-324,
         709.9, math.inf, -math.inf, math.nan)  # fmt: skip
CUT = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "expm1", "log", "log2",
       "log10", "sin", "sinh", "sqrt", "tan", "tanh")  # fmt: skip


async def test_complex_functions_on_branch_cuts_and_at_infinity(device: ta.Device) -> None:
    real, imag = (np.ravel(each) for each in np.meshgrid(PARTS, PARTS))
    x = _complex(real, imag)
    on = await device.put(x)
    for name in CUT[::5] if IS_STAND_IN else CUT:
        got = await (await function(name)(on)).to_host()
        want = by_numpy(name, x)
        # NumPy's expm1 has infinities where a factor of a product is one.
        is_finite = np.isfinite(x)
        chosen = is_finite & (real < 700) if name == "expm1" else np.full(x.shape, True)
        for got_part, want_part in ((got.real, want.real), (got.imag, want.imag)):
            # C99 leaves the sign of such infinities open.
            is_open = np.isinf(want_part) & ~is_finite
            for part in (got_part, want_part):
                np.absolute(part, out=part, where=is_open)
            np.testing.assert_allclose(
                got_part[chosen], want_part[chosen], rtol=1e-13, atol=1e-322, err_msg=name
            )
        # The side of a cut is the sign of a zero.
        sides = is_finite & chosen & (want.imag != 0)
        np.testing.assert_array_equal(np.signbit(got.imag[sides]), np.signbit(want.imag[sides]), err_msg=name)


async def test_expm1_of_complex_zeros_and_infinities_is_that_of_c99(device: ta.Device) -> None:
    inf, nan = math.inf, math.nan
    cases = (
        *((zero, 0.0, 0.0, 0.0) for zero in (0.0, -0.0)),
        *((0.0, -0.0, 0.0, -0.0), (inf, 0.0, inf, 0.0), (-inf, 0.0, -1.0, 0.0), (nan, 0.0, nan, 0.0)),
        *((-inf, inf, -1.0, 0.0), (-inf, nan, -1.0, 0.0), (inf, inf, inf, nan), (inf, nan, inf, nan)),
    )
    real, imag, want_real, want_imag = np.array(cases).T
    for dtype in ("complex64", "complex128"):
        got = await (await ta.arrays.expm1(await device.put(_complex(real, imag).astype(dtype)))).to_host()
        np.testing.assert_array_equal(got.real, want_real)
        # Of infinities the sign of a part is not specified.
        np.testing.assert_array_equal(np.abs(got.imag), np.abs(want_imag))
        np.testing.assert_array_equal(np.signbit(got[:3].real), [False] * 3)
        np.testing.assert_array_equal(np.signbit(got[:3].imag), np.signbit(want_imag[:3]))


async def test_the_special_cases_of_floor_divide_and_remainder(device: ta.Device) -> None:
    inf, nan = math.inf, math.nan
    cases = (
        # x1, x2, quotient, remainder: by the standard, which prefers the rounded quotient to Python's.
        *((0.0, 0.0, nan, nan), (-0.0, 0.0, nan, nan), (0.0, 3.0, 0.0, 0.0), (-0.0, 3.0, -0.0, 0.0)),
        *((0.0, -3.0, -0.0, -0.0), (-0.0, -3.0, 0.0, -0.0), (2.0, 0.0, inf, nan), (2.0, -0.0, -inf, nan)),
        *((-2.0, 0.0, -inf, nan), (-2.0, -0.0, inf, nan), (inf, 0.0, inf, nan), (inf, -0.0, -inf, nan)),
        *((inf, 3.0, inf, nan), (inf, -3.0, -inf, nan), (-inf, 3.0, -inf, nan), (-inf, -3.0, inf, nan)),
        *((inf, inf, nan, nan), (-inf, inf, nan, nan), (2.0, inf, 0.0, 2.0), (2.0, -inf, -0.0, -inf)),
        *((-2.0, inf, -0.0, inf), (-2.0, -inf, 0.0, -2.0), (0.0, -inf, -0.0, -0.0), (nan, inf, nan, nan)),
        *((inf, nan, nan, nan), (nan, 0.0, nan, nan), (7.0, -2.0, -4.0, -1.0), (-7.0, 2.0, -4.0, 1.0)),
    )
    x1, x2, quotient, rest = np.array(cases).T
    for dtype in FLOATS[::3] if IS_STAND_IN else FLOATS:
        on = [await device.put(array.astype(ta.DType(dtype).dtype)) for array in (x1, x2)]
        for name, want in (("floor_divide", quotient), ("remainder", rest)):
            got = (await (await function(name)(*on)).to_host()).astype(float)
            np.testing.assert_array_equal(got, want, err_msg=f"{name} of {dtype}")
            number = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]), err_msg=name)


async def test_tangents_of_infinite_complex_numbers(device: ta.Device) -> None:
    imag = np.array([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, math.inf, -math.inf, math.nan])
    for sign, dtype in ((1, "complex64"), (-1, "complex128")):
        x = _complex(np.full(9, sign * math.inf), imag)
        tanh = await (await ta.arrays.tanh(await device.put(x.astype(dtype)))).to_host()
        # By the definition of the standard: tan(x) = -1j * tanh(1j * x).
        turned = _complex(x.imag, -x.real).astype(dtype)
        tan = await (await ta.arrays.tan(await device.put(turned))).to_host()
        for real, zero in ((tanh.real, tanh.imag), (-tan.imag, tan.real)):
            np.testing.assert_array_equal(real, np.full(9, sign))
            np.testing.assert_array_equal(zero, np.zeros(9))
            np.testing.assert_array_equal(np.signbit(zero)[:8], np.signbit(imag)[:8])


async def test_the_next_number_by_its_code(device: ta.Device) -> None:
    for dtype in FLOATS:
        numpy = ta.DType(dtype).dtype
        x = np.array([0, -0.0, 1, -1, 1e-7, 6e4, np.inf, -np.inf, np.nan, 2, -2], numpy)
        for target in (-np.inf, 0, np.inf, np.nan, 2):
            # The sign of zero towards zero is that of either argument: C takes the second, NumPy the first.
            given = x if target else x[x != 0]
            got = await (await ta.arrays.nextafter(await device.put(given), target)).to_host()
            want = np.nextafter(given, numpy.type(target))
            assert_close(got, want, f"{dtype} towards {target}")
            is_number = ~np.isnan(want)
            code = f"u{numpy.itemsize}"
            np.testing.assert_array_equal(got[is_number].view(code), want[is_number].view(code))


SIGNED = [f"int{bits}" for bits in (8, 16, 32, 64)]
UNSIGNED = [f"uint{bits}" for bits in (8, 16, 32, 64)]


def promoted(first: str, second: str) -> str | None:
    """The table of the standard; with bfloat16, which it has not."""
    kinds = {ta.DType(first).kind, ta.DType(second).kind}
    if {first, second} == {"float16", "bfloat16"}:
        return "float32"
    if kinds == {"int", "uint"}:
        signed, unsigned = sorted((first, second), key=UNSIGNED.count)
        wide = max(ta.DType(signed).itemsize, 2 * ta.DType(unsigned).itemsize)
        return f"int{8 * wide}" if wide <= 8 else None
    if kinds == {"float", "complex"}:
        return "complex128" if {"float64", "complex128"} & {first, second} else "complex64"
    if len(kinds) > 1:
        return None
    return max(first, second, key=lambda name: ta.DType(name).itemsize)


@pytest.mark.skipif(IS_STAND_IN, reason="its compiler takes a second for each of 200 kernels")
async def test_the_promotion_of_the_standard(device: ta.Device) -> None:
    arrays = {name: await device.zeros(2, name) for name in DTYPES}
    for first, second in itertools.product(DTYPES, repeat=2):
        want = promoted(first, second)
        if want is not None:
            assert (await ta.arrays.add(arrays[first], arrays[second])).dtype == want, (first, second)
            assert (await ta.arrays.equal(arrays[first], arrays[second])).dtype == "bool"
            chosen = await ta.arrays.where(arrays["bool"], arrays[first], arrays[second])
            assert chosen.dtype == want, (first, second)
            continue
        for refused in (ta.arrays.add, ta.arrays.less, ta.arrays.pow):
            with pytest.raises(TypeError, match=rf"{first} and x\d is {second}, which the array API"):
                await refused(arrays[first], arrays[second])


@pytest.mark.parametrize(
    ("number", "allowed"),
    [
        (True, ("bool",)),
        (3, (*WHOLE, *FLOATS, *COMPLEX)),
        (2.5, (*FLOATS, *COMPLEX)),
        (1j, (*FLOATS, *COMPLEX)),
    ],
)
async def test_python_numbers_on_both_sides(device: ta.Device, number: Any, allowed: tuple[str, ...]) -> None:
    for name in DTYPES:
        x = await device.put(np.ones(3).astype(ta.DType(name).dtype))
        if name not in allowed:
            with pytest.raises(TypeError, match="does not promote"):
                await ta.arrays.add(x, number)
            with pytest.raises(TypeError, match="does not promote"):
                await ta.arrays.add(number, x)
            continue
        for found in (await ta.arrays.multiply(x, number), await ta.arrays.multiply(number, x)):
            # A real floating dtype and a complex number, by the standard.
            wide = "complex128" if name == "float64" else "complex64"
            assert found.dtype == (wide if number == 1j and name in FLOATS else name)
            assert (await found.to_host()).astype(complex).tolist() == [number] * 3


async def test_numbers_of_numpy_have_their_dtypes(device: ta.Device) -> None:
    x = await device.zeros(3, "float32")
    assert (await ta.arrays.add(np.float64(1), x)).dtype == "float64"
    assert (await ta.arrays.add(x, np.float16(1))).dtype == "float32"
    with pytest.raises(TypeError, match="int64 and x2 is float32"):
        await ta.arrays.add(np.int64(1), x)


@pytest.mark.parametrize(
    "shapes", [((4, 1, 3), (5, 1)), ((), (2, 3)), ((0, 3), (3,)), ((31,), (1,)), ((1025,), ())]
)
async def test_arrays_broadcast(device: ta.Device, shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = (np.random.default_rng(1).normal(size=shape) for shape in shapes)
    for left, right in ((x, y), (y, x)):
        found = await ta.arrays.subtract(await device.put(left), await device.put(right))
        np.testing.assert_array_equal(await found.to_host(), left - right)
    with pytest.raises(ValueError, match=r"arrays\.add: the shapes \(2, 3\), \(2,\) do not broadcast"):
        await ta.arrays.add(await device.zeros((2, 3)), await device.zeros(2))


async def test_views_are_read_and_written_as_they_lie(device: ta.Device) -> None:
    x = np.arange(60.0).reshape(5, 12)
    on = await device.put(x)
    out = await device.zeros((6, 10))
    view = out[::-1, 1::2]  # (6, 5)
    assert await ta.arrays.sqrt(on.T[::-2], out=view) is view
    want = np.zeros((6, 10))
    want[::-1, 1::2] = np.sqrt(x.T[::-2])
    np.testing.assert_allclose(await out.to_host(), want, rtol=1e-15)
    # In place, and into another dtype of the same kind.
    assert await ta.arrays.add(on, 1, out=on) is on
    np.testing.assert_array_equal(await on.to_host(), x + 1)
    narrow = await device.zeros((5, 12), "float16")
    await ta.arrays.divide(on, 4, out=narrow)
    np.testing.assert_array_equal(await narrow.to_host(), ((x + 1) / 4).astype(np.float16))


async def test_wrong_outputs_are_refused(device: ta.Device) -> None:
    x = await device.zeros((4, 4))
    for out in (x.T, x[::-1]):
        with pytest.raises(ValueError, match=r"arrays\.exp: out must not share memory with x"):
            await ta.arrays.exp(x, out=out)
    with pytest.raises(ValueError, match=r"arrays\.add: out must not share memory with x1"):
        await ta.arrays.add(x[0], x[1], out=x[:, 1])
    with pytest.raises(ValueError, match=r"out must have shape \(4, 4\)"):
        await ta.arrays.exp(x, out=await device.zeros(4))
    with pytest.raises(TypeError, match=r"of float64, which does not become int32"):
        await ta.arrays.exp(x, out=await device.zeros((4, 4), "int32"))


async def test_powers_of_whole_numbers(device: ta.Device) -> None:
    x, y = await device.put(np.array([-2, -1, 0, 1, 3])), await device.put(np.array([-1, -3, -1, -7, 2]))
    np.testing.assert_array_equal(await (await ta.arrays.pow(x, y)).to_host(), [0, -1, 0, 1, 9])
    np.testing.assert_array_equal(await (await ta.arrays.pow(x, 3)).to_host(), [-8, -1, 0, 1, 27])
    np.testing.assert_array_equal(
        await (await ta.arrays.pow(2, await ta.arrays.abs(y))).to_host(), [2, 8, 2, 128, 4]
    )
    with pytest.raises(ValueError, match=r"arrays\.pow: x2 -1 is negative"):
        await ta.arrays.pow(x, -1)


async def test_bounds(device: ta.Device) -> None:
    x = np.array([-3.0, 0.5, math.nan, 7, math.inf], np.float32)
    on, low = await device.put(x), await device.put(np.array([[0], [1]], np.float32))
    for minimum, maximum in ((None, None), (0, None), (None, 1.5), (-1, 2), (3, 1)):
        found = await ta.arrays.clip(on, minimum, maximum)
        assert found.dtype == "float32"
        np.testing.assert_array_equal(await found.to_host(), np.clip(x, minimum, maximum))
    np.testing.assert_array_equal(
        await (await ta.arrays.clip(on, min=low, max=2)).to_host(),
        np.clip(x, np.array([[0], [1]], np.float32), 2),
    )
    assert await ta.arrays.clip(on, max=0, out=on) is on
    with pytest.raises(TypeError, match=r"arrays\.clip: min is a Python float and x is int8"):
        await ta.arrays.clip(await device.zeros(3, "int8"), 0.5)
    with pytest.raises(ValueError, match=r"arrays\.clip: max 300 is outside -128 to 127"):
        await ta.arrays.clip(await device.zeros(3, "int8"), 0, 300)
    for dtype in ("bool", "complex64"):
        wrong = await device.zeros(3, dtype)
        for bounds in ((wrong, wrong), (wrong,), (None, wrong), ()):
            with pytest.raises(TypeError, match=f"arrays.clip: x must be of real numbers, got {dtype}"):
                await ta.arrays.clip(wrong, *bounds)
    with pytest.raises(TypeError, match=r"arrays\.clip: max must be of real numbers, got bool"):
        await ta.arrays.clip(on, max=True)


async def test_elements_selected_by_a_condition(device: ta.Device) -> None:
    x, condition = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True, False, True])
    on, of = await device.put(x), await device.put(condition)
    np.testing.assert_array_equal(
        await (await ta.arrays.where(of, on, -1)).to_host(), np.where(condition, x, -1)
    )
    np.testing.assert_array_equal(await (await ta.arrays.where(True, 2, on)).to_host(), np.full((2, 3), 2))
    for wrong in (on, 1, np.int8(1)):
        with pytest.raises(TypeError, match=r"arrays\.where: condition must be of bool, got .*not_equal"):
            await ta.arrays.where(wrong, on, on)


async def test_an_operand_must_be_an_array(device: ta.Device) -> None:
    x = await device.zeros(3)
    for arguments in ((1.0,), (np.zeros(3),), (np.float32(2),)):
        with pytest.raises(TypeError, match=r"arrays\.sqrt: no operand is on a device"):
            await ta.arrays.sqrt(*arguments)
    with pytest.raises(TypeError, match=r"arrays\.add: x2 must be a number or an array, got list"):
        await ta.arrays.add(x, [1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"missing.* 'x2'|x2 is missing"):
        await ta.arrays.add(x)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"arrays\.add: x2 300 is outside 0 to 255"):
        await ta.arrays.add(await device.zeros(3, "uint8"), 300)
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await ta.arrays.abs(await device.zeros(3, "float8_e4m3fn"))
