"""`ta.jit.reduction` on devices: against NumPy, on every backend and through a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

pytestmark = pytest.mark.conformance

RNG = np.random.default_rng(6)
AXES = [None, 0, -1, (0, 2), (1, 2), ()]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "min", "max", "any", "all", "argmin", "argmax"])
async def test_reductions_match_numpy(device: ta.Device, reduce: str, keepdims: bool) -> None:
    f = ta.jit.reduction("x * y", reduce)
    x = RNG.normal(size=(5, 6, 7))
    x[0, 0] = 0.0
    y = RNG.normal(size=(1, 6, 1))
    on, other = await device.put(x), await device.put(y)
    for axis in AXES[:3] if "arg" in reduce else AXES:
        want: Any = np.asarray(getattr(np, reduce)(x * y, axis=axis, keepdims=keepdims))
        out = await f(on, other, axis=axis, keepdims=keepdims)
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(await out.to_host(), want, rtol=1e-12, atol=1e-12)
        turned = await f(on.T, (await device.put(y.T)), axis=axis, keepdims=keepdims)
        want = np.asarray(getattr(np, reduce)(x.T * y.T, axis=axis, keepdims=keepdims))
        np.testing.assert_allclose(await turned.to_host(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(600_000,), (3, 200_000), (200_000, 3), (200, 300)])
async def test_long_reductions_are_made_in_parts(device: ta.Device, shape: tuple[int, ...]) -> None:
    x = RNG.normal(size=shape).astype(np.float32)
    on = await device.put(x)
    for f, numpy in (
        (ta.jit.reduction("x * x", "sum", name="squares"), lambda x, axis: (x * x).sum(axis=axis)),
        (ta.jit.reduction("x", "argmax"), lambda x, axis: x.argmax(axis=axis)),
    ):
        for axis in (None, 0, -1):
            want = numpy(x if f.operation == "jit.reduction" else x.astype(float), axis)
            np.testing.assert_allclose(await (await f(on, axis=axis)).to_host(), want, rtol=2e-7)


async def test_sums_in_single_precision_are_rounded_once(device: ta.Device) -> None:
    x = np.full(1 << 16, 0.1, np.float32)
    x[0] = 1e7
    total = await ta.jit.reduction("x", "sum")(await device.put(x))
    assert total.dtype == "float32"
    assert await total.to_host() == np.float32(x.astype(float).sum())


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "complex64"])
async def test_dtypes_match_numpy(device: ta.Device, dtype: str) -> None:
    x = RNG.integers(0, 9, (30, 40)).astype(dtype)
    on = await device.put(x)
    for reduce in ("sum", "any", *(("max", "argmin") if dtype != "complex64" else ())):
        want = getattr(np, reduce)(x, axis=1)
        out = await ta.jit.reduction("x", reduce)(on, axis=1)
        assert out.dtype == want.dtype
        np.testing.assert_array_equal(await out.to_host(), want)


async def test_an_expression_combines(device: ta.Device) -> None:
    largest = ta.jit.reduction("abs(x)", "a if a > b else b", identity=0)
    x = RNG.normal(size=(50, 333))
    on = await device.put(x)
    np.testing.assert_array_equal(await (await largest(on, axis=1)).to_host(), np.abs(x).max(axis=1))
    np.testing.assert_array_equal(await (await largest(on[:0], axis=0)).to_host(), np.zeros(333))
    log_sum = ta.jit.reduction("x", "logaddexp(a, b)", post="a - log(n)")
    want = np.log(np.exp(x).mean(axis=0))
    np.testing.assert_allclose(await (await log_sum(on, axis=0)).to_host(), want, rtol=1e-12)


async def test_numbers_are_arguments_and_results_are_finished(device: ta.Device) -> None:
    norm = ta.jit.reduction("(a * x) ** 2", "sum", post="sqrt(a)", inputs=("x", "a"), name="norm")
    x = RNG.normal(size=(4, 100)).astype(np.float32)
    out = await norm(await device.put(x), 3, axis=1)
    assert out.dtype == "float32"
    np.testing.assert_allclose(await out.to_host(), 3 * np.linalg.norm(x.astype(float), axis=1), rtol=1e-6)
    mean = ta.jit.reduction("x", post="a / n")
    np.testing.assert_allclose(await (await mean(await device.put(x))).to_host(), x.mean(), rtol=1e-5)


async def test_the_last_step_is_computed_before_the_result_is_rounded(device: ta.Device) -> None:
    on = await device.put(np.full(1 << 12, 300, np.float16))
    for f in (ta.jit.reduction("x", "mean"), ta.jit.reduction("x", post="a / n")):
        out = await f(on)
        assert (out.dtype, await out.item()) == ("float16", 300)
    root = await ta.jit.reduction("1e4 * x", post="sqrt(a / n)")(await device.put(np.float16([4, 4])))
    assert (root.dtype, await root.item()) == ("float16", 200)
    with pytest.raises(ValueError, match="post: mean has its own"):
        ta.jit.reduction("x", "mean", post="a + 1")


async def test_results_are_written_to_the_requested_arrays(device: ta.Device) -> None:
    f = ta.jit.reduction("x")
    x = await device.put(np.arange(12, dtype=np.float32).reshape(3, 4))
    out = await device.zeros(4, "float64")
    assert await f(x, axis=0, out=out) is out
    np.testing.assert_array_equal(await out.to_host(), [12, 15, 18, 21])
    with pytest.raises(ValueError, match="must not share memory with x"):
        await f(x, axis=0, out=x[0])
    with pytest.raises(TypeError, match="does not become int32"):
        await f(x, axis=0, out=await device.zeros(4, "int32"))
    whole = await ta.jit.reduction("x", dtype="int16")(x)
    assert (whole.dtype, int(await whole.to_host())) == (ta.DType.int16, 66)


async def test_nothing_is_reduced_as_numpy_does(device: ta.Device) -> None:
    x = await device.zeros((3, 0))
    for reduce in ("sum", "prod", "any", "all"):
        want = getattr(np, reduce)(np.zeros((3, 0)), axis=1)
        out = await ta.jit.reduction("x", reduce)(x, axis=1)
        np.testing.assert_array_equal(await out.to_host(), want)
    for reduce in ("min", "argmax", "a * b"):
        with pytest.raises(ValueError, match="has no identity"):
            await ta.jit.reduction("x", reduce)(x, axis=1)
        assert (await ta.jit.reduction("x", reduce)(x, axis=0)).shape == (0,)


async def test_not_a_number_is_found_as_numpy_finds_it(device: ta.Device) -> None:
    x = RNG.normal(size=(3, 2000))
    x[1, 700] = x[1, 900] = x[2, 5] = np.nan
    on = await device.put(x)
    for reduce in ("min", "max", "argmin", "argmax"):
        want = getattr(np, reduce)(x, axis=1)
        np.testing.assert_array_equal(await (await ta.jit.reduction("x", reduce)(on, axis=1)).to_host(), want)


async def test_wrong_calls_are_refused(device: ta.Device) -> None:
    f, index = ta.jit.reduction("x * y", name="dot"), ta.jit.reduction("x", "argmax")
    x = await device.zeros((3, 4))
    for axis, error in ((2, ValueError), ((0, 0), ValueError), ((0, -2), ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"jit.dot: axis"):
            await f(x, x, axis=axis)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one axis or None"):
        await index(x, axis=(0, 1))
    with pytest.raises(TypeError, match="at least one argument must be an array"):
        await device.ask(f.compute(1, 2))
    with pytest.raises(TypeError, match="complex numbers cannot be compared"):
        await index(await device.zeros(3, "complex64"))
    with pytest.raises(ValueError, match="do not broadcast"):
        await f(x, await device.zeros(3))


@pytest.mark.parametrize("identity", [np.int64(3), np.float32(3), np.complex64(3), np.bool_(True)])
async def test_an_identity_may_be_a_number_of_numpy(device: ta.Device, identity: Any) -> None:
    added = ta.jit.reduction("x", "a + b", identity=identity)
    assert await (await added(await device.zeros(0, "complex128"))).item() == complex(identity)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"text": "x.y"}, "map: an attribute"),
        ({"text": "x", "reduce": "median"}, "there is no 'median'"),
        ({"text": "x", "reduce": "a + c"}, "of a and b"),
        ({"text": "x", "post": "b"}, "post: reads b"),
        ({"text": "x", "identity": 1}, "identity"),
        ({"text": "axis * 2"}, "the name axis"),
        ({"text": "x", "name": "1"}, "identifier"),
    ],
)
def test_wrong_declarations_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ta.jit.reduction(**arguments)
