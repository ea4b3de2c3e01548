"""`ta.jit.elementwise` on devices: against NumPy, on every backend and through a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trio_accel as ta

pytestmark = pytest.mark.conformance

RNG = np.random.default_rng(5)


async def host(ref: ta.AccelRef) -> npt.NDArray[Any]:
    return await ref.to_host()


async def test_arrays_and_numbers(device: ta.Device) -> None:
    saxpy = ta.jit.elementwise("y = a*x + b")
    assert (saxpy.inputs, saxpy.outputs) == (("a", "x", "b"), ("y",))
    x = RNG.normal(size=(3, 1000)).astype(np.float32)
    y = await saxpy(2.5, await device.put(x), -1)
    assert (y.dtype, y.shape) == (ta.DType.float32, (3, 1000))
    np.testing.assert_allclose(await host(y), np.float32(2.5) * x - 1, rtol=1e-6, atol=1e-6)
    # NumPy's numbers have dtypes, and host arrays are copied to the device.
    y = await saxpy(x=await device.put(x), a=np.float64(2.5), b=x)
    assert y.dtype == "float64"
    np.testing.assert_allclose(await host(y), 2.5 * x.astype(float) + x, rtol=1e-15, atol=1e-15)


async def test_several_results_and_temporaries(device: ta.Device) -> None:
    polar = ta.jit.elementwise("t = x*x + y*y; r = sqrt(t); phi = arctan2(y, x)", outputs=("r", "phi"))
    x, y = RNG.normal(size=(2, 50))
    radius, angle = await polar(await device.put(x), await device.put(y))
    np.testing.assert_allclose(await host(radius), np.hypot(x, y), rtol=1e-14)
    np.testing.assert_allclose(await host(angle), np.arctan2(y, x), rtol=1e-14)


@pytest.mark.parametrize(
    "shapes",
    [((4, 1, 3), (5, 1)), ((), (2, 3)), ((0, 3), (3,)), ((1, 1), (1,)), ((2, 3, 4, 5), (3, 1, 5))],
)
async def test_arrays_broadcast(device: ta.Device, shapes: tuple[tuple[int, ...], ...]) -> None:
    difference = ta.jit.elementwise("x - y")
    x, y = (RNG.normal(size=shape) for shape in shapes)
    out = await difference(await device.put(x), await device.put(y))
    np.testing.assert_array_equal(await host(out), x - y)


async def test_views_are_read_as_they_lie(device: ta.Device) -> None:
    product = ta.jit.elementwise("x * y")
    x, y = RNG.normal(size=(6, 7, 8)), RNG.normal(size=(8, 7, 6))
    on, other = await device.put(x), await device.put(y)
    np.testing.assert_array_equal(await host(await product(on, other.T)), x * y.T)
    np.testing.assert_array_equal(await host(await product(on[::-2, 1:], 3.0)), x[::-2, 1:] * 3)


async def test_an_argument_is_changed_in_place(device: ta.Device) -> None:
    step = ta.jit.elementwise("x = x - rate * gradient")
    x, gradient = RNG.normal(size=(2, 40))
    on = await device.put(x)
    assert await step(on, 0.5, await device.put(gradient), out=on) is on
    np.testing.assert_array_equal(await host(on), x - 0.5 * gradient)
    swap = ta.jit.elementwise("a = y; b = x", inputs=("x", "y"), outputs=("a", "b"))
    other = await device.put(gradient)
    await swap(on, other, out=(on, other))
    np.testing.assert_array_equal(await host(on), gradient)
    np.testing.assert_array_equal(await host(other), x - 0.5 * gradient)


async def test_a_result_over_other_elements_of_an_argument_is_refused(device: ta.Device) -> None:
    double = ta.jit.elementwise("2 * x")
    x = await device.zeros((4, 4))
    with pytest.raises(ValueError, match="must not share memory with x"):
        await double(x.T, out=x)
    with pytest.raises(ValueError, match="must not share memory with y"):
        await ta.jit.elementwise("x + y")(x, x[:1], out=x)
    both = ta.jit.elementwise("a = x; b = x", outputs=("a", "b"))
    y = await device.zeros(4)
    with pytest.raises(ValueError, match="must not share memory with a"):
        await both(x[0], out=(y, y))


async def test_results_are_converted_to_the_requested_dtype(device: ta.Device) -> None:
    x = await device.put(np.arange(5, dtype=np.float32))
    assert (await ta.jit.elementwise("x / 3", dtypes="float16")(x)).dtype == "float16"
    halved = ta.jit.elementwise("a = x / 2; b = x > 2", outputs=("a", "b"), dtypes={"b": "int8"})
    a, b = await halved(x)
    assert (a.dtype, b.dtype) == (ta.DType.float32, ta.DType.int8)
    np.testing.assert_array_equal(await host(b), [0, 0, 0, 1, 1])
    wide = await device.zeros(5, "float64")
    await ta.jit.elementwise("x / 3")(x, out=wide)
    np.testing.assert_array_equal(
        await host(wide), (np.arange(5, dtype=np.float32) / np.float32(3)).astype(float)
    )
    with pytest.raises(TypeError, match="does not become int32"):
        await ta.jit.elementwise("x / 3")(x, out=await device.zeros(5, "int32"))


@pytest.mark.parametrize(
    ("text", "dtype", "numpy"),
    [
        ("x // 7 * 3 % 5 - x % -3", "int32", lambda x: x // 7 * 3 % 5 - x % -3),
        ("(x & 12 | 3) ^ x << 2", "uint8", lambda x: (x & 12 | 3) ^ x << 2),
        ("x * conj(x) + 1j * x", "complex64", lambda x: x * np.conj(x) + np.complex64(1j) * x),
        ("abs(x) + real(x) * imag(x)", "complex128", lambda x: abs(x) + x.real * x.imag),
        ("x * 0.3 + x", "float16", lambda x: x * np.float16(0.3) + x),
        ("not x and x < 1", "bool", lambda x: ~x & (x < 1)),
        ("x ** 5", "int64", lambda x: x**5),
        ("x if 0 < x < 9 else -x", "int16", lambda x: np.where((x > 0) & (x < 9), x, -x)),
    ],
)
async def test_dtypes_match_numpy(device: ta.Device, text: str, dtype: str, numpy: Any) -> None:
    x: npt.NDArray[Any] = RNG.integers(0 if dtype[0] in "ub" else -20, 20, 100).astype(dtype)
    if dtype.startswith("complex"):
        x = x + (1j * RNG.normal(size=100)).astype(dtype)
    out = await ta.jit.elementwise(text)(await device.put(x))
    want = numpy(x)
    assert out.dtype == want.dtype
    np.testing.assert_allclose(
        await host(out), want, rtol=1e-5 if dtype == "complex64" else 1e-14, atol=1e-13
    )


async def test_large_whole_numbers_in_bfloat16(device: ta.Device) -> None:
    x = await device.put(np.ones(3, ta.DType.bfloat16.dtype))
    y = await ta.jit.elementwise(f"{2**64 - 1} * x")(x)
    assert (await host(y)).astype(np.float64).tolist() == [2.0**64] * 3
    assert (await host(await x.fill(2**63))).astype(np.float64).tolist() == [2.0**63] * 3


async def test_bfloat16_is_rounded_after_each_step(device: ta.Device) -> None:
    x = np.linspace(-3, 3, 200).astype(ta.DType.bfloat16.dtype)
    out = await ta.jit.elementwise("x * 0.3 + x")(await device.put(x))
    assert out.dtype == "bfloat16"
    product = (x.astype(np.float32) * np.float32(x.dtype.type(0.3))).astype(x.dtype)
    want = (product.astype(np.float32) + x.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal((await host(out)).view(np.uint16), want.view(np.uint16))


async def test_wrong_calls_are_refused(device: ta.Device) -> None:
    f = ta.jit.elementwise("a * x + b", name="affine")
    x, count = await device.zeros(3, "int8"), await device.zeros(4)
    for arguments, named in (((1, x), {}), ((1, x, 2, 3), {}), ((1, x), {"a": 1})):
        with pytest.raises(TypeError, match=r"jit.affine takes 3 arguments \(a, x, b\)"):
            await f(*arguments, **named)
    with pytest.raises(TypeError, match=r"jit.affine: there is no option 'c'; there are a, b, out, shape, x"):
        await f(1, x, 2, c=1)
    with pytest.raises(ValueError, match=r"jit.affine: a 300 is outside -128 to 127, which int8 holds"):
        await f(300, x, 1)
    with pytest.raises(ValueError, match="64 bits"):
        await f(1 << 63, x, 1)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(4,\) do not broadcast"):
        await f(1, x, count)
    with pytest.raises(TypeError, match="out must name 1 arrays"):
        await f(1, x, 1, out=(x, x))
    with pytest.raises(TypeError, match="no operand is on a device"):
        await f(1, 2, 3)
    with pytest.raises(TypeError, match="x must be a number or an array, got str"):
        await device.ask(f.compute(1, "x", 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jit.elementwise: bitwise_and does not take float64, a Python int"):
        await ta.jit.elementwise("x & 1")(count)
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await ta.jit.elementwise("x + 1")(await device.zeros(3, "float8_e4m3fn"))


async def test_numbers_without_arrays_are_asked_of_a_device(device: ta.Device) -> None:
    f = ta.jit.elementwise("sqrt(a) + b")
    assert await host(await device.ask(f.compute(4.0, 1))) == 3.0


async def test_an_operation_has_its_name(device: ta.Device) -> None:
    f = ta.jit.elementwise("x + 1", name="increment")
    message = f.compute(await device.zeros(3))
    assert message.operation == f.operation == "jit.increment"
    assert f.text == "x + 1"
    released = await device.zeros(3)
    released.release()
    with pytest.raises(ta.StaleRefError, match=r"jit\.increment"):
        await f(released)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"text": "x."}, "invalid syntax"),
        ({"text": "a = x; b = y"}, "several results"),
        ({"text": "out + 1"}, "the name out"),
        ({"text": "x", "name": "a b"}, "identifier"),
        ({"text": "x", "dtypes": {"y": "float32"}}, "y is not a result"),
        ({"text": "x", "inputs": ("y",)}, "inputs"),
    ],
)
def test_wrong_declarations_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ta.jit.elementwise(**arguments)


async def test_a_large_array_is_computed_whole(device: ta.Device) -> None:
    x = RNG.normal(size=(700, 999)).astype(np.float32)
    on = await device.put(x)
    np.testing.assert_array_equal(await host(await ta.jit.elementwise("x + y")(on, on[:, :1])), x + x[:, :1])
