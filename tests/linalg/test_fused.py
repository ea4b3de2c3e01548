"""Fused products against their formulas in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import linalg

Array = npt.NDArray[Any]

fused_matmul: Any = linalg.fused_matmul
fused_matmul_grad: Any = linalg.fused_matmul_grad
E4, E5, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
TYPES: dict[str, Any] = {"float64": float, "float32": np.float32, "float16": np.float16, "bfloat16": BF16}
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
ON_CUDA = BACKEND == "cuda"

# Only this process has bindings in the place of the stand-in's.
both = pytest.mark.parametrize("isolation", ["inline", *["process"] * (not IS_STAND_IN)])


@pytest.fixture(scope="module", autouse=True)
def bindings() -> Iterator[Any]:
    """Bindings of cuBLASLt, which the stand-in lacks; None with a card, and on other backends."""
    if not IS_STAND_IN:
        yield None
        return
    # With importlib mode a test folder is not a package, so its modules import their shared code by its own
    # name.
    sys.path.insert(0, str(Path(__file__).parent))
    from lt_bindings import LtBindings

    from trio_accel.backends.cuda.libraries import blaslt

    with pytest.MonkeyPatch.context() as patch:
        made = LtBindings()
        patch.setattr(blaslt, "cublasLt", made)
        yield made


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope(function: Any, x: Array) -> Array:
    """A derivative by a central difference."""
    return (function(x + 1e-6) - function(x - 1e-6)) / 2e-6


FUNCTIONS: dict[str | None, Any] = {None: lambda x: x, "relu": lambda x: np.maximum(x, 0), "gelu": gelu}


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def near(found: Array, expected: Array, dtype: str, terms: int = 1) -> None:
    assert found.shape == expected.shape
    assert found.dtype == np.dtype(TYPES[dtype])
    size = max(float(np.abs(expected).max(initial=0)), 1)
    np.testing.assert_allclose(
        found.astype(float), expected, rtol=0, atol=TOLERANCE[dtype] * math.sqrt(max(terms, 1)) * size
    )


@st.composite
def products(draw: st.DrawFn) -> tuple[dict[str, Array | None], dict[str, Any]]:
    """Operands of any layout, with or without what is added, and an activation."""
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", *["float64"] * (not ON_CUDA)]))
    m, n, k = (draw(st.integers(1, most)) for most in (9, 20, 7))
    stacks = draw(st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 3), (2, 3)), ((2, 1), (3,))]))
    seed = draw(st.integers(0, 99))
    made: dict[str, Array | None] = {}
    for place, (name, stack, shape) in enumerate((("a", stacks[0], (m, k)), ("b", stacks[1], (k, n)))):
        if draw(st.booleans()):
            array = numbers((*stack, *shape[::-1]), TYPES[dtype], seed + place).swapaxes(-1, -2)
        else:
            step = draw(st.sampled_from([1, 1, 2]))
            array = numbers((*stack, shape[0], shape[1] * step), TYPES[dtype], seed + place)[..., ::step]
        made[name] = array
    stack = np.broadcast_shapes(*stacks)
    made["c"] = numbers((*stack, m, n), TYPES[dtype], seed + 2) if draw(st.booleans()) else None
    of_bias = draw(st.sampled_from([None, (n,), (*stack, n)]))
    made["bias"] = None if of_bias is None else numbers(of_bias, TYPES[dtype], seed + 3)
    activation = draw(st.sampled_from([None, "relu", "gelu"]))
    options = {
        "activation": activation,
        "alpha": draw(st.sampled_from([1.0, -0.5])),
        "beta": draw(st.sampled_from([1.0, 0.0, 2.5])),
        "return_aux": activation is not None and draw(st.booleans()),
    }
    return made, options


@given(problem=products())
# Each opens a device.
@settings(max_examples=12 if ON_CUDA else 60, deadline=None, derandomize=True)
def test_any_product(problem: tuple[dict[str, Array | None], dict[str, Any]]) -> None:
    arrays, options = problem
    a, b, c, bias = (None if one is None else one.astype(float) for one in arrays.values())
    assert a is not None
    assert b is not None
    x = options["alpha"] * np.matmul(a, b)
    if c is not None:
        x = x + options["beta"] * c
    if bias is not None:
        x = x + (bias if bias.ndim == 1 else bias[..., None, :])
    found = trio.run(_asked, arrays, options)
    dtype, k = str(np.asarray(arrays["a"]).dtype), a.shape[-1]
    near(found[0], FUNCTIONS[options["activation"]](x), dtype, k)
    if not options["return_aux"]:
        return
    n = x.shape[-1]
    if options["activation"] == "gelu":
        assert found[1].shape[-1] % 8 == 0
        near(found[1][..., :n], x, dtype, k)
    else:
        bits = np.unpackbits(found[1], axis=-1, count=n, bitorder="little")
        # Next to 0 the signs of rounded sums may differ.
        sure = np.abs(x) > 1e-3
        np.testing.assert_array_equal(bits[sure], (x > 0)[sure])


async def _asked(arrays: dict[str, Array | None], options: dict[str, Any]) -> tuple[Array, ...]:
    async with ta.open_system("fused") as system, system.open_device(BACKEND, options=INLINE) as device:
        given = {name: None if one is None else await device.put(one) for name, one in arrays.items()}
        # An array packed by `put` is laid out again in its old form.
        for name in ("a", "b"):
            one = arrays[name]
            if one is not None and one.strides[-1] > one.strides[-2]:
                given[name] = linalg.matrix_transpose(await device.put(one.swapaxes(-1, -2)))
        result = await fused_matmul(*given.values(), **options)
        results = result if options["return_aux"] else (result,)
        return tuple([await one.to_host() for one in results])


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
async def test_gradients(device: ta.Device, activation: str, dtype: str) -> None:
    x, w, v = (numbers(shape, TYPES[dtype], seed) for seed, shape in enumerate([(10, 6), (6, 40), (40, 9)]))
    bias, grad = numbers((40,), TYPES[dtype], 3), numbers((10, 9), TYPES[dtype], 4)
    _, aux = await fused_matmul(await device.put(x), w, None, bias, activation, return_aux=True)
    on_device = await device.put(v)
    out, sums = await fused_matmul_grad(
        grad, linalg.matrix_transpose(on_device), aux, activation, alpha=0.5, return_sums=True
    )
    wide = [one.astype(float) for one in (x, w, v, bias, grad)]
    z = wide[0] @ wide[1] + wide[3]
    expected = 0.5 * (wide[4] @ wide[2].T) * slope(FUNCTIONS[activation], z)
    near(await out.to_host(), expected, dtype, 9)
    near(await sums.to_host(), expected.sum(0), dtype, 90)
    alone = await fused_matmul_grad(grad, linalg.matrix_transpose(on_device), aux, activation, alpha=0.5)
    np.testing.assert_array_equal(await alone.to_host(), await out.to_host())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_sums_of_an_operand(device: ta.Device, dtype: str) -> None:
    x, grad = numbers((30, 6), TYPES[dtype], 0), numbers((30, 16), TYPES[dtype], 1)
    ref = await device.put(x)
    for of, expected in (("b", grad.astype(float).sum(0)), ("a", x.astype(float).sum(0))):
        out, sums = await linalg.fused_matmul_sums(linalg.matrix_transpose(ref), grad, of)  # type: ignore[arg-type]
        near(await out.to_host(), x.T.astype(float) @ grad.astype(float), dtype, 30)
        near(await sums.to_host(), expected, dtype, 30)


def whole(shape: tuple[int, ...], dtype: Any, seed: int, most: int = 5) -> Array:
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(dtype)


@both
@pytest.mark.parametrize(("of_a", "of_b"), [(E4, E4), (E4, E5), (E5, E4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_float8(device: ta.Device, of_a: Any, of_b: Any, dtype: str) -> None:
    # Such sums are exact in all of them.
    a, w = whole((10, 32), of_a, 0, 2), whole((16, 32), of_b, 1, 2)
    expected = a.astype(float) @ w.astype(float).T
    b = linalg.matrix_transpose(await device.put(w))
    ref = await device.put(a)
    found = await fused_matmul(ref, b, dtype=dtype)
    np.testing.assert_array_equal((await found.to_host()).astype(float), expected)
    half, two = np.array(0.5, np.float32), await device.put(np.array(2, np.float32))
    for scales in ({"scale_a": 0.5, "scale_b": 4}, {"scale_a": half, "scale_b": 4}, {"scale_b": two}):
        found = await fused_matmul(ref, b, **scales, dtype=dtype)
        np.testing.assert_array_equal((await found.to_host()).astype(float), 2 * expected)
    # Because b is row-major, it is copied if the library wants columns.
    found = await fused_matmul(ref, np.ascontiguousarray(w.T), dtype=dtype)
    np.testing.assert_array_equal((await found.to_host()).astype(float), expected)


BLOCKS: dict[str, Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]] = {
    "vectors": lambda rows, k: ((rows, -(-k // 128)), (1, 128)),
    "blocks": lambda rows, k: ((-(-rows // 128), -(-k // 128)), (128, 128)),
}


@both
@pytest.mark.parametrize(("m", "n", "k"), [(130, 144, 400), (1, 256, 144), (256, 272, 640), (16, 16, 112)])
@pytest.mark.parametrize(
    ("of_a", "of_b"), [("vectors", "vectors"), ("vectors", "blocks"), ("blocks", "vectors")]
)
async def test_scales_of_blocks(device: ta.Device, of_a: str, of_b: str, m: int, n: int, k: int) -> None:
    a, w = whole((m, k), E4, 0, 2), whole((n, k), E4, 1, 2)
    powers = np.random.default_rng(2)
    wide: list[Array] = []
    scales: list[Array] = []
    for array, kind in ((a, of_a), (w, of_b)):
        shape, block = BLOCKS[kind](*array.shape)
        scales.append(2.0 ** powers.integers(-2, 3, shape).astype(np.float32))
        spread = np.kron(scales[-1], np.ones(block))[: array.shape[0], :k]
        wide.append(array.astype(float) * spread)
    expected, one, two = wide[0] @ wide[1].T, scales[0], scales[1].T
    b = linalg.matrix_transpose(await device.put(w))
    ref = await device.put(a)
    if ON_CUDA and m % 4 and (of_a == "vectors" or m == 1):
        with pytest.raises(ta.NotSupportedError, match=f"parts of rows where m is a multiple of 4, got {m}"):
            await fused_matmul(ref, b, scale_a=one, scale_b=two)
        return
    gaps = await device.put(np.repeat(two, 2, axis=1))
    for scale_a, scale_b in (
        (one, two),
        (np.asfortranarray(one), np.asfortranarray(two)),
        (linalg.matrix_transpose(await device.put(one.T.copy())), gaps[:, ::2]),
    ):
        found = await fused_matmul(ref, b, scale_a=scale_a, scale_b=scale_b, dtype="float32")
        # The library adds such products with few digits.
        bound = 1e-3 * np.abs(expected).max() if ON_CUDA else 0
        np.testing.assert_allclose(await found.to_host(), expected, rtol=0, atol=bound)
    found = await fused_matmul(ref, b, scale_a=one, scale_b=two)
    near(await found.to_host(), expected, "bfloat16")


async def test_scales_of_blocks_of_stacks(device: ta.Device) -> None:
    a, w = whole((2, 16, 256), E4, 0, 2), whole((2, 32, 256), E4, 1, 2)
    one, two = (2.0 ** np.arange(-2, 2).reshape(2, 1, 2) * np.ones((2, n, 2)) for n in (16, 32))
    wide = [array.astype(float) * scale.repeat(128, 2) for array, scale in ((a, one), (w, two))]
    expected = wide[0] @ wide[1].transpose(0, 2, 1)
    scales = one.astype(np.float32), two.astype(np.float32).transpose(0, 2, 1)
    ref, b = await device.put(a), linalg.matrix_transpose(await device.put(w))
    given = {"scale_a": scales[0][:1], "scale_b": scales[1][:1], "dtype": "float32"}
    found = await fused_matmul(ref[:1], b[:1], **given)
    np.testing.assert_allclose(await found.to_host(), expected[:1], atol=1e-3 * np.abs(expected).max())
    if ON_CUDA:
        with pytest.raises(ta.NotSupportedError, match=r"with scales of vectors .* of a stack"):
            await fused_matmul(ref, b, scale_a=scales[0], scale_b=scales[1])
        return
    found = await fused_matmul(ref, b, scale_a=scales[0], scale_b=scales[1], dtype="float32")
    np.testing.assert_array_equal(await found.to_host(), expected)


async def test_scales_of_blocks_are_of_both(device: ta.Device) -> None:
    a, b = await device.zeros((256, 256), "float8_e4m3fn"), await device.zeros((256, 256), "float8_e4m3fn")
    of_blocks, of_rows = np.ones((2, 2), np.float32), np.ones((256, 1), np.float32)
    for scales in (
        {"scale_a": of_rows, "scale_b": of_blocks},
        {"scale_a": of_blocks},
        {"scale_b": of_blocks},
    ):
        with pytest.raises(ValueError, match="for each 128 elements along k if it has, got shapes"):
            await fused_matmul(a, b, **scales)
    with pytest.raises(ValueError, match=r"scale_a must have shape .*\(256, 2\) or \(2, 2\), got \(2, 3\)"):
        await fused_matmul(a, b, scale_a=np.ones((2, 3), np.float32), scale_b=of_blocks)
    if ON_CUDA:
        with pytest.raises(ta.NotSupportedError, match="of one operand, and not of both"):
            await fused_matmul(a, b, scale_a=of_blocks, scale_b=of_blocks)
    # Nothing is added, whatever the scales of nothing are.
    none = np.zeros((4, 0), E4), await device.zeros((0, 16), "float8_e4m3fn")
    of_none = {"scale_a": np.ones((4, 0), np.float32), "scale_b": np.ones((0, 16), np.float32)}
    assert not (await (await fused_matmul(*none, **of_none)).to_host()).any()


@pytest.mark.parametrize("of", [E4, E5])
async def test_results_of_float8_are_scaled_and_saturated(device: ta.Device, of: Any) -> None:
    a, w = whole((16, 32), E4, 0), whole((16, 32), of, 1)
    b = linalg.matrix_transpose(await device.put(w))
    expected = a.astype(float) @ w.astype(float).T
    for scale in (1e-2, 1.0, 1e4):
        found = await fused_matmul(await device.put(a), b, scale_out=scale, dtype=of)
        most = float(ml_dtypes.finfo(of).max)
        rounded = np.clip(np.float32(scale) * expected, -most, most).astype(np.float32).astype(of)
        near_by = np.abs((await found.to_host()).astype(float) - rounded.astype(float))
        # A number in the middle may be rounded either way.
        assert np.all(near_by <= 2.0 ** (-2 if of is E5 else -3) * np.abs(rounded.astype(float)))
        assert np.mean(near_by == 0) > 0.95


@both
async def test_whole_numbers(device: ta.Device) -> None:
    a, w = whole((12, 64), np.int8, 0, 127), whole((8, 64), np.int8, 1, 127)
    expected = a.astype(np.int64) @ w.T.astype(np.int64)
    ref, b = await device.put(a), linalg.matrix_transpose(await device.put(w))
    found = await fused_matmul(ref, b)
    assert found.dtype == "int32"
    np.testing.assert_array_equal(await found.to_host(), expected)
    found = await fused_matmul(ref, b, alpha=0.003, dtype="int8")
    rounded = np.clip(np.rint(np.float32(0.003) * expected.astype(np.float32)), -128, 127)
    np.testing.assert_array_equal(await found.to_host(), rounded)
    assert np.abs(rounded).max() == 128
    bias = np.arange(8, dtype=np.float32) * 20 - 70
    found = await fused_matmul(ref, b, None, bias, "relu", alpha=0.003, dtype="int8")
    plain = np.rint(np.float32(0.003) * expected.astype(np.float32) + bias)
    np.testing.assert_allclose(await found.to_host(), np.clip(plain, 0, 127), rtol=0, atol=1)
    found = await fused_matmul(ref, b, None, bias, "gelu", alpha=0.003, dtype="float32")
    near(await found.to_host(), gelu(0.003 * expected + bias), "float32", 64)


# Roundings of the operands, by their remaining digits.
@pytest.mark.parametrize(
    ("precision", "dtype", "digits"),
    [("ieee", "float32", 22), ("tf32", "float32", 11), ("bf16", "float32", 8)],
)
async def test_precisions(device: ta.Device, precision: str, dtype: str, digits: int) -> None:
    a, b = numbers((64, 64), np.float32, 0), numbers((64, 64), np.float32, 1)
    found = await (await fused_matmul(await device.put(a), b, precision=precision)).to_host()
    expected = a.astype(float) @ b.astype(float)
    error = np.abs(found - expected).max() / (np.abs(a.astype(float)) @ np.abs(b.astype(float))).max()
    assert error < 2.0**-digits
    if ON_CUDA and not IS_STAND_IN and precision != "ieee":
        # It is asked for to be faster, and is no more accurate then.
        assert error > 2.0 ** -(digits + 10)


async def test_results_in_place(device: ta.Device) -> None:
    a, b, c = (numbers((8, 8), np.float32, seed) for seed in range(3))
    expected = a.astype(float) @ b.astype(float) + 0.5 * c
    ref = await device.put(c)
    assert await fused_matmul(await device.put(a), b, ref, beta=0.5, out=ref) is ref
    near(await ref.to_host(), expected, "float32", 8)
    wide = await device.zeros((8, 16), "float32")
    await fused_matmul(await device.put(a), b, c, beta=0.5, out=wide[:, ::2])
    near((await wide.to_host())[:, ::2], expected, "float32", 8)
    assert not (await wide.to_host())[:, 1::2].any()
    product, sums = await linalg.fused_matmul_sums(await device.put(a), b, "b", out=wide[:, 1::2])
    near(await product.to_host(), a.astype(float) @ b.astype(float), "float32", 8)
    near(await sums.to_host(), b.astype(float).sum(0), "float32", 8)
    near((await wide.to_host())[:, ::2], expected, "float32", 8)
    # Apart, it is left as it is.
    kept = await device.put(c)
    await fused_matmul(await device.put(a), b, kept)
    np.testing.assert_array_equal(await kept.to_host(), c)


@pytest.mark.parametrize("shape", [(3, 0, 5), (0, 4, 5), (3, 4, 0)])
async def test_without_elements(device: ta.Device, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    bias = numbers((n,), np.float32, 0)
    result = await fused_matmul(
        await device.zeros((m, k), "float32"), np.ones((k, n), "f"), None, bias, "relu"
    )
    np.testing.assert_array_equal(await result.to_host(), np.zeros((m, n)) + np.maximum(bias, 0))


async def test_sums_without_elements(device: ta.Device) -> None:
    none = await device.zeros((0, 4), "float32")
    aux = np.zeros((0, 8), np.float32)
    out, sums = await fused_matmul_grad(none, np.ones((4, 5), "f"), aux, "gelu", return_sums=True)
    assert out.shape == (0, 5)
    np.testing.assert_array_equal(await sums.to_host(), np.zeros(5))
    # Nothing is added.
    out, sums = await linalg.fused_matmul_sums(linalg.matrix_transpose(none), np.ones((0, 3), "f"), "b")  # type: ignore[arg-type]
    assert not (await out.to_host()).any()
    np.testing.assert_array_equal(await sums.to_host(), np.zeros(3))


@both
async def test_autotuned_products_are_the_same(device: ta.Device) -> None:
    a, b = numbers((33, 65), np.float32, 0), numbers((65, 17), np.float32, 1)
    for _ in range(2):
        found = await fused_matmul(await device.put(a), b, activation="gelu", autotune=True)
        near(await found.to_host(), gelu(a.astype(float) @ b.astype(float)), "float32", 65)


async def test_not_a_number_and_infinities(device: ta.Device) -> None:
    a = np.eye(4, dtype=np.float32)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, math.inf, -math.inf
    found = await fused_matmul(await device.put(a), np.ones((4, 4), "f"))
    # Infinity by zero is NaN, and some builds of NumPy warn of it.
    with np.errstate(invalid="ignore"):
        expected = a @ np.ones((4, 4), "f")
    np.testing.assert_array_equal(await found.to_host(), expected)


f, d, h, e, i = (np.zeros((16, 16), one) for one in (np.float32, float, np.float16, E4, np.int8))
s, rows, columns = (np.ones(shape, np.float32) for shape in ((), (16, 1), (1, 16)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((f, d), {}, TypeError, "operands must share a dtype, got a float32, b float64"),
        (
            (e.astype(E5), e.astype(E5)),
            {},
            TypeError,
            "products are not available for dtypes float8_e5m2 and",
        ),
        ((f, f), {"dtype": "float16"}, TypeError, "dtype float16: products of float32 and float32"),
        ((f, f[0]), {}, ValueError, "a and b must be matrices"),
        ((f, f[:4]), {}, ValueError, "have the same length"),
        ((f, f, f[:4]), {}, ValueError, r"c must have shape \(16, 16\), got \(4, 16\)"),
        ((h, h, f), {}, TypeError, "c must have dtype float16, got float32"),
        ((e, e, e), {}, TypeError, "c must have dtype bfloat16, got float8_e4m3fn"),
        ((f, f, None, f[0, :4]), {}, ValueError, r"bias must have shape \(16,\), got \(4,\)"),
        ((f, f, None, d[0]), {}, TypeError, "bias must have dtype float32, got float64"),
        ((f, f), {"activation": "tanh"}, ValueError, "activation must be None, 'relu' or 'gelu', got 'tanh'"),
        ((f, f), {"precision": "fp8"}, ValueError, "precision must be 'ieee', 'tf32'"),
        ((d, d), {"precision": "tf32"}, TypeError, "precision 'tf32' is for float32, got float64"),
        ((f, f), {"precision": "fixed_point"}, TypeError, "precision 'fixed_point' is for float64"),
        ((f, f), {"return_aux": True}, ValueError, "return_aux must be False, got True"),
        ((f, f), {"autotune": 3}, ValueError, "autotune must be False or True, got 3"),
        ((f, f), {"alpha": 1j}, TypeError, "alpha 1j is complex"),
        ((f, f), {"alpha": 1e300}, ValueError, "alpha"),
        ((i, i), {"alpha": 1e300, "dtype": "float32"}, ValueError, "outside the range of float32"),
        ((i, i), {"activation": "relu"}, TypeError, "int32 with neither bias nor activation"),
        ((i, i, None, i.astype("i")[0]), {}, TypeError, "int32 with neither bias nor activation"),
        ((i, i), {"activation": "gelu", "dtype": "int8"}, TypeError, "to int8 with bias and relu alone"),
        ((i, i), {"alpha": 0.5}, ValueError, "alpha must be an int32 integer, got 0.5"),
        ((f, f), {"scale_a": 2.0}, TypeError, "scale_a and scale_b are for float8, got float32; use alpha"),
        ((f, f), {"scale_a": s}, TypeError, "scale_a and scale_b are for float8, got float32; use alpha"),
        ((e, e), {"scale_a": 0.0}, ValueError, "scale_a must be a finite number above 0 of"),
        ((e, e), {"scale_b": math.nan}, ValueError, "scale_b must be a finite number above 0 of float32"),
        ((e, e), {"scale_b": -1}, ValueError, "scale_b must be a finite number above 0 of float32, got -1"),
        ((e, e), {"scale_a": 1e-60}, ValueError, "scale_a must be a finite number above 0 of float32"),
        ((e, e), {"scale_a": "1"}, TypeError, "scale_a must be a number or an array, got str"),
        ((e, e), {"scale_a": 1e30, "scale_b": 1e30}, ValueError, "alpha times the scales"),
        ((e, e), {"scale_a": d[0, 0]}, ValueError, "scale_a must be a finite number above 0 of float32, got"),
        ((e, e), {"scale_a": rows}, ValueError, "scale_a has one number for each row of a if scale_b"),
        ((e, e), {"scale_a": rows, "scale_b": rows}, ValueError, r"scale_b must have shape \(\)"),
        ((e, e), {"scale_a": s.astype(float)}, TypeError, "scale_a must have dtype float32, got float64"),
        ((e, e), {"scale_out": 2.0}, TypeError, "scale_out is for a result of float8, got bfloat16"),
        ((e, e), {"scale_out": 0, "dtype": E4}, ValueError, "scale_out must be a finite number above 0"),
    ],
)
async def test_invalid_arguments_are_refused(
    device: ta.Device, arguments: tuple[Any, ...], options: dict[str, Any], error: Any, text: str
) -> None:
    first, *others = arguments
    ref = await device.put(first)
    with pytest.raises(error, match=text) as caught:
        await fused_matmul(ref, *others, **options)
    assert str(caught.value).startswith("linalg.fused_matmul: ")


@pytest.mark.skipif(not IS_STAND_IN, reason="bindings that count")
async def test_the_library_is_asked_once_for_a_layout(system: ta.System, bindings: Any) -> None:
    bindings.asked, bindings.ways = 0, 3
    async with system.open_device(BACKEND, options=INLINE) as device:
        a = await device.put(numbers((8, 8), np.float32, 0))
        before = bindings.alive
        for _ in range(3):
            await fused_matmul(a, a, None, a[0])
        assert (bindings.asked, bindings.alive - before) == (1, 6)
        bindings.multiplied.clear()
        # A row begins elsewhere, but as well aligned.
        await fused_matmul(a, a, None, a[4])
        assert (bindings.asked, bindings.multiplied) == (1, [0])
        bindings.multiplied.clear()
        await fused_matmul(a, a, autotune=True)
        # Each way once to load it, and ten times to measure it; then what was asked for.
        assert sorted(bindings.multiplied.count(way) for way in range(3)) == [11, 11, 12]
        assert bindings.asked == 2
    assert bindings.alive == before


@pytest.mark.skipif(BACKEND == "third", reason="it has no graphs")
async def test_layers_in_a_graph(device: ta.Device) -> None:
    x, w, v = (numbers(shape, np.float32, seed) for seed, shape in enumerate([(8, 16), (16, 24), (24, 5)]))
    bias = numbers((24,), np.float32, 3)
    arrays = [await device.put(one) for one in (w, v, bias)]

    async def layers(x: ta.AccelRef) -> ta.AccelRef:
        hidden: ta.AccelRef = await fused_matmul(x, arrays[0], None, arrays[2], "relu", alpha=0.5)
        return await ta.nn.linear(hidden, linalg.matrix_transpose(arrays[1]))  # type: ignore[arg-type]

    graph = await ta.graphs.capture(device, layers, await device.put(x))
    # From the third time on a driver replays what it has captured.
    for times in range(5):
        found = await (await graph(await device.put(x * times))).to_host()
        hidden = np.maximum(0.5 * times * x.astype(float) @ w + bias, 0)
        near(found, hidden @ v.astype(float), "float32", 100)


async def test_repeated_products(device: ta.Device) -> None:
    # From the third time on, a product at the same place is replayed: with other numbers there, and factors.
    x, w, c = (numbers((8, 8), np.float32, seed) for seed in range(3))
    refs, out = [await device.put(one) for one in (x, w, c)], await device.zeros((8, 8), "float32")
    for turn in range(8):
        await linalg.scal(1.5, refs[0])
        x = x * np.float32(1.5)
        for alpha in (1.0, -0.5, 0.0):
            await fused_matmul(*refs, refs[2][turn], "relu", alpha=alpha, beta=2.0, out=out)
            expected = np.maximum(alpha * x.astype(float) @ w + 2 * c + c[turn], 0)
            near(await out.to_host(), expected, "float32", 8)
