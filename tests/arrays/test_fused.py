"""`ta.fused`: against NumPy in float64, and against the same functions of `ta.arrays` step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from array_numbers import numbers, wide
from chosen import BACKEND
from fused_checks import assert_same, outcome, stepwise

import trio_accel as ta
from trio_accel.testing import inject_fault

xp = ta.fused.xp


async def launches(device: ta.Device, of: Any) -> int:
    before = (await device.statistics()).launched
    await of
    return (await device.statistics()).launched - before


@ta.fused
def norm(x: Any, y: Any) -> Any:
    return xp.sqrt(x * x + y * y)


@ta.fused
def softmax(x: Any, *, axis: Any = -1) -> Any:
    space = x.__array_namespace__()
    e = space.exp(x - space.max(x, axis=axis, keepdims=True))
    return e / space.sum(e, axis=axis, keepdims=True)


@ta.fused
def chain(x: Any, y: Any) -> Any:
    space = x.__array_namespace__()
    z = space.where(x > y, space.exp(-abs(x)), 2 * y - 0.5)
    return space.tanh(z) / (1 + z**2) - x


@ta.fused
def spread(x: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    space = x.__array_namespace__()
    d = x - space.mean(x, axis=axis, keepdims=True)
    return space.sqrt(space.mean(d * d, axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("size", [0, 1, 257, 1025])
async def test_a_chain_is_one_launch(device: ta.Device, size: int) -> None:
    x, y = numbers((size,), "float64"), numbers((size,), "float64", 4)
    on, other = await device.put(x), await device.put(y)
    for function in (norm, chain):
        assert await launches(device, function(on, other)) == 1
        found = await function(on, other)
        if function is chain:
            np.testing.assert_allclose(await found.to_host(), chain.__wrapped__(x, y), rtol=1e-13, atol=1e-14)
        else:
            np.testing.assert_allclose(await found.to_host(), np.hypot(x, y), rtol=1e-14)
    single = [await each.cast("float32") for each in (on, other)]
    found = await chain(*single)
    want = chain.__wrapped__(x.astype(np.float32).astype(float), y.astype(np.float32).astype(float))
    assert found.dtype == "float32"
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-5, atol=1e-6)


async def test_special_values_and_signs_of_zeros(device: ta.Device) -> None:
    special = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 5e-324, 1e308])
    x, y = np.repeat(special, len(special)), np.tile(special, len(special))

    def signs(x: Any, y: Any) -> Any:
        space = x.__array_namespace__()
        return space.copysign(space.minimum(x, 3.0) * -1.0, y) + space.where(space.isnan(x), y, -0.0)

    def bounds(x: Any, y: Any) -> Any:
        space = x.__array_namespace__()
        return space.maximum(x, -float("inf")) * y - float("inf") * space.sign(y)

    for function in (signs, bounds):
        found = await (await ta.fused(function)(await device.put(x), await device.put(y))).to_host()
        with np.errstate(all="ignore"):
            want = function(x, y)
        np.testing.assert_array_equal(found, want)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(want[number]))


async def test_functions_of_rows_are_one_launch(device: ta.Device) -> None:
    x = numbers((7, 300), "float32")
    on = await device.put(x)
    for axis in (-1, 0, None, (0, 1)):
        found = await softmax(on, axis=axis)
        np.testing.assert_allclose(
            await found.to_host(), scipy.special.softmax(wide(x), axis=axis), rtol=2e-6
        )
        assert await launches(device, softmax(on, axis=axis)) == 1
        for keepdims in (False, True):
            found = await spread(on, axis=axis, keepdims=keepdims)
            want = wide(x).std(axis=axis, keepdims=keepdims)
            assert found.shape == want.shape
            np.testing.assert_allclose(await found.to_host(), want, rtol=2e-6)
            assert await launches(device, spread(on, axis=axis, keepdims=keepdims)) == 1

    @ta.fused
    def one_sum(x: Any, y: Any) -> Any:
        return xp.sum((x - y) ** 2, axis=1)

    @ta.fused
    def length(x: Any) -> Any:
        return xp.sqrt(xp.sum(x * x, axis=1)) + 1

    @ta.fused
    def scaled(x: Any, weight: Any) -> Any:
        return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight

    weight = numbers((300,), "float32", 5)
    for function, arguments, want in (
        (one_sum, (on, 0.5), ((wide(x) - 0.5) ** 2).sum(1)),
        (length, (on,), np.sqrt((wide(x) ** 2).sum(1)) + 1),
        (scaled, (on, weight), wide(x) / np.sqrt((wide(x) ** 2).mean(1, keepdims=True) + 1e-6) * weight),
    ):
        found = await function(*arguments)
        np.testing.assert_allclose(await found.to_host(), want, rtol=3e-6, atol=1e-6)
        assert await launches(device, function(*[on, *arguments[1:]])) == 1


async def test_few_long_rows_are_made_in_steps(device: ta.Device) -> None:
    x = numbers((2, 140_000), "float32")
    on = await device.put(x)
    assert await launches(device, softmax(on)) == 3
    found = await (await softmax(on)).to_host()
    np.testing.assert_allclose(found, scipy.special.softmax(wide(x), axis=1), rtol=2e-6)


# Each needs several launches, or would be another thing in one; and why.
STEPS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "other axes": (
        lambda x: xp.sum(x, axis=0) + xp.max(x, axis=1),
        ((5, 5),),
        r"arrays.sum is along axes \(0,\), and arrays.max along \(1,\)",
    ),
    "a reduction of a reduction": (
        lambda x: xp.sum(xp.max(x, axis=1), axis=0),
        ((4, 6),),
        r"arrays.max is along axes \(1,\), and arrays.sum along \(0,\)",
    ),
    "without its last axis": (
        lambda x: x - xp.mean(x, axis=1),
        ((5, 5),),
        r"arrays.subtract takes arrays with and without reduced axes \(keepdims=True keeps them\)",
    ),
    "both with its axis and without": (
        lambda x: xp.max(x, axis=1, keepdims=True) - xp.min(x, axis=1),
        ((4, 6),),
        "",
    ),
    "arrays that never meet": (
        lambda x, y: xp.sum(x) / xp.sum(y),
        ((3, 4), (5, 6)),
        r"arrays.sum reduces shape \(3, 4\), and all arrays together have no one shape",
    ),
    "a part of the shape": (
        lambda x, y: x / xp.sum(y, axis=1, keepdims=True),
        ((3, 4), (1, 4)),
        r"arrays.sum reduces shape \(1, 4\), and all arrays together have \(3, 4\)",
    ),
    "an axis of one element": (
        lambda x, y: x - xp.sum(x, axis=0, keepdims=True) * y,
        ((1, 4), (3, 4)),
        r"reduces shape \(1, 4\)",
    ),
    "an array of the reduced shape": (
        lambda x, y: xp.sum(x, axis=1, keepdims=True) * y,
        ((3, 4), (3, 1)),
        r"the result has shape \(3, 1\), and all arrays together have \(3, 4\)",
    ),
    "fewer axes": (lambda x, y: x * xp.max(y, axis=0), ((3, 4), (4,)), r"reduces shape \(4,\)"),
    "a variance beside others": (
        lambda x: xp.var(x, axis=1, correction=1) + xp.sum(x, axis=0),
        ((4, 4),),
        "arrays.var is along",
    ),
    "a variance of found": (
        lambda x: xp.std(xp.sum(x, axis=0), axis=0),
        ((4, 5),),
        "arrays.std reduces shape",
    ),
    "logarithms of sums": (
        lambda x: xp.logsumexp(x, axis=1) + xp.sum(x, axis=0),
        ((4, 4),),
        "arrays.logsumexp is along",
    ),
    "places": (lambda x: xp.argmax(x, axis=1) + xp.argmin(x, axis=0), ((4, 4),), "arrays.argmax is along"),
    "vectors that broadcast": (
        lambda x, y: xp.cosine_similarity(x, y, axis=-1),
        ((3, 4), (4,)),
        r"arrays.cosine_similarity reduces shape \(4,\)",
    ),
}


@pytest.mark.parametrize("case", STEPS)
async def test_what_takes_several_launches_is_refused_and_composes_without(
    device: ta.Device, case: str
) -> None:
    function, shapes, why = STEPS[case]
    arrays = [numbers(shape, "float64", seed) for seed, shape in enumerate(shapes)]
    on = [await device.put(each) for each in arrays]
    launched = (await device.statistics()).launched
    told = rf"^fused\.<lambda>: it takes several launches, as .*{why}.*leave ta\.fused off: calls compose"
    with pytest.raises(ta.NotSupportedError, match=told):
        await ta.fused(eval_with(function))(*on)
    assert (await device.statistics()).launched == launched
    plain = eval_with(function, ta.interop.array_api(device))
    for _ in range(3):
        await assert_same(await function(*on), await stepwise(device, plain, *arrays), case)


def eval_with(function: Callable[..., Any], space: Any = xp) -> Callable[..., Any]:
    """Return a function whose `xp` is another namespace."""
    return type(function)(function.__code__, {"xp": space}, function.__name__)  # type: ignore[call-arg]


async def test_the_function_runs_each_time_and_its_expression_is_made_once(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    written: list[Any] = []
    module: Any = sys.modules[ta.fused.__module__]
    writer = module._Writer

    def counting(*given: Any) -> Any:
        written.append(given)
        return writer(*given)

    monkeypatch.setattr(module, "_Writer", counting)

    @ta.fused
    def counted(x: Any, y: Any, *, power: Any = 2) -> Any:
        calls.append((x.dtype, x.shape, power))
        return x**power + y

    host = numbers((4, 5), "float32")
    x = await device.put(host)
    for _ in range(2):
        for part, number in ((np.s_[:], 1.5), (np.s_[:2, ::-1], 2.5), (np.s_[1:], -3.0), (np.s_[:, :3], 0.5)):
            found = await counted(x[part], number)
            np.testing.assert_allclose(await found.to_host(), wide(host)[part] ** 2 + number, rtol=1e-5)
    assert (len(calls), len(written)) == (8, 1)
    assert calls[1] == ("float32", (2, 5), 2)
    await counted(x, 1.5, power=3)  # a number is handed over
    assert len(written) == 1
    await counted(x, 2)  # a whole number
    await counted(x[0], 2)  # fewer axes
    await counted(x[:1], 2)  # an axis of one element
    await counted(await x.cast("float64"), 2)
    assert len(written) == 5
    for power in (1, 1.0, True, 1):
        outcome_of = await outcome(counted(await x.cast("int32"), 2, power=power))
        assert isinstance(outcome_of, ta.AccelRef) == (power is not True and not isinstance(power, float))


async def test_what_a_function_closes_over_is_looked_at_each_time(device: ta.Device) -> None:
    x, k = await device.put(np.arange(4.0)), 3.0
    weight = await device.put(np.full(4, 2.0))
    scaled = ta.fused(lambda x: x * k * weight)
    for number in range(4):
        k = 3.0 + number
        weight = weight[::-1]
        assert await launches(device, scaled(x)) == 1
        # The chain has a template from the third time on.
        found = await (scaled(x) + 1.0).to_host()
        np.testing.assert_array_equal(found, np.arange(4.0) * k * 2 + 1)


async def test_options_that_are_equal_may_differ(device: ta.Device) -> None:
    scaled = ta.fused(lambda x, *, by: x * by)
    x = await device.put(np.array([1, 2], np.float32))
    whole = await device.put(np.array([1, 2], np.int32))
    assert (await scaled(whole, by=2)).dtype == "int32"
    with pytest.raises(TypeError, match="Python float"):
        await scaled(whole, by=2.0)
    for zero in (0.0, -0.0):
        found = await (await scaled(x, by=zero)).to_host()
        np.testing.assert_array_equal(np.signbit(found), np.signbit(zero))
    total = ta.fused(lambda x, *, axis, keepdims: xp.sum(x * 2, axis=axis, keepdims=keepdims))
    matrix = await device.put(np.ones((2, 3)))
    for axis in (1, [1], (1,), -1):
        assert (await total(matrix, axis=axis, keepdims=False)).shape == (2,)
    for axis, keepdims, told in (
        (1.0, True, "axis must be a whole"),
        (1, 1, "keepdims must be True or False"),
    ):
        with pytest.raises(TypeError, match=rf"fused\.<lambda>: arrays\.sum: {told}"):
            await total(matrix, axis=axis, keepdims=keepdims)


async def test_it_composes_with_products_before_and_behind_in_one_request(device: ta.Device) -> None:
    host, weight = numbers((4, 5), "float64"), numbers((5, 6), "float64", 4)
    x, w = await device.put(host), await device.put(weight)
    for _ in range(4):
        product = x @ w
        y = softmax(norm(product, product[:, :1])) @ w.T
        assert (y.shape, y.dtype) == ((4, 5), "float64")
        found = await (y + product @ w.T).to_host()
        first = host @ weight
        want = scipy.special.softmax(np.hypot(first, first[:, :1]), axis=1) @ weight.T + first @ weight.T
        np.testing.assert_allclose(found, want, rtol=1e-12)
    pending = norm(x, x).start()
    total = ta.fused(lambda x: xp.sum(x, axis=0)).__call__(pending.value).start()
    await total.wait()
    np.testing.assert_allclose(await total.value.to_host(), np.hypot(host, host).sum(0), rtol=1e-12)


async def test_views_of_operands_and_operands_in_lists(device: ta.Device) -> None:
    host = numbers((6, 4), "float64")
    x, w = await device.put(host), await device.put(np.eye(4))
    steps = ta.fused(lambda x: (x[1:] - x[:-1]) * x.T[0, 1:, None])
    total = ta.fused(lambda several, k: several[0] * k + several[1])
    for made in (lambda: x, lambda: x @ w):
        want = (host[1:] - host[:-1]) * host[1:, :1]
        np.testing.assert_allclose(await steps(made()).to_host(), want, rtol=1e-13)
        np.testing.assert_allclose(await total([made(), made()], 2).to_host(), 3 * host, rtol=1e-13)
    copy = ta.fused(lambda x: x)
    assert await launches(device, copy(x)) == 1
    np.testing.assert_array_equal(await copy(x @ w).to_host(), host)


def standard(x: Any, y: Any) -> Any:
    """Compute something by the standard alone."""
    space = x.__array_namespace__(api_version="2023.12")
    d = x - space.mean(x, axis=-1, keepdims=True)
    scaled = space.where(d > space.astype(y, space.float64), d, space.pi) / space.sqrt(
        space.mean(d * d, axis=-1, keepdims=True)
    )
    return space.exp(-abs(scaled)) * space.clip(y, min=0.5)


async def test_one_function_of_the_standard_for_numpy_references_calls_and_fused(device: ta.Device) -> None:
    host, other = numbers((3, 4), "float64"), numbers((3, 4), "float64", 4)
    x, y = await device.put(host), await device.put(other)
    want = standard(host, other)
    assert x.__array_namespace__() is xp
    call = x + y
    assert call.__array_namespace__() is xp
    call.close()
    fused = ta.fused(standard)
    assert await launches(device, fused(x, y)) == 1
    for made in (
        standard(x, y),
        standard(x + 0.0, y * 1.0),
        fused(x, y),
        fused(x + 0.0, y * 1.0),
        fused(x, other),
    ):
        np.testing.assert_allclose(await made.to_host(), want, rtol=1e-12)
    product = xp.matmul(x, xp.matrix_transpose(y))
    np.testing.assert_allclose(await product.to_host(), host @ other.T, rtol=1e-12)
    np.testing.assert_allclose(await xp.vecdot(x, y).to_host(), (host * other).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(
        await (await xp.tensordot(x, y, axes=2)).to_host(), (host * other).sum(), rtol=1e-12
    )
    assert xp.astype(x, "float64", copy=False) is x
    assert xp.newaxis is None
    for name in ("zeros", "asarray", "nothing", "_private"):
        assert not hasattr(xp, name)
    with pytest.raises(AttributeError, match=r"no zeros: it makes arrays on a device: ta\.arrays\.zeros"):
        xp.zeros(3)
    assert {"exp", "sort", "matmul", "float32", "astype", "inf"} <= {*dir(xp)}
    assert "zeros" not in dir(xp)
    with pytest.raises(ValueError, match="api_version must be one of"):
        x.__array_namespace__(api_version="1999.01")


async def test_functions_of_nn_are_expressions_too(device: ta.Device) -> None:
    layer = ta.fused(lambda x, b: ta.nn.relu(x + b) * ta.nn.sigmoid(x))
    host = numbers((3, 4), "float32")
    x = await device.put(host)
    assert await launches(device, layer(x, x[0])) == 1
    want = np.maximum(wide(host) + wide(host)[0], 0) * scipy.special.expit(wide(host))
    np.testing.assert_allclose(await layer(x, x[0]).to_host(), want, rtol=1e-5)
    leaky = ta.fused(lambda x, slope: ta.nn.leaky_relu(x * 2, slope))
    found = await leaky(x, np.float64(0.25))
    assert found.dtype == "float32"
    np.testing.assert_allclose(await found.to_host(), np.where(host > 0, 2 * host, host / 2), rtol=1e-5)


async def test_numbers_of_all_kinds(device: ta.Device) -> None:
    x = await device.put(numbers((6,), "float32"))
    c = await device.put(numbers((6,), "complex64"))

    def mixed(x: Any, k: Any, s: Any) -> Any:
        return (x + k * 2**k) * (s / (1 + s)) - np.float32(0.1) * x

    for k, s in ((2, 0.25), (3, np.float32(2)), (1.5, np.float32(3))):
        found = await ta.fused(mixed)(x, k, s)
        await assert_same(found, await stepwise(device, mixed, await x.to_host(), k, s), (k, s))
    double = await ta.fused(lambda x: np.float64(0.5) * x)(x)
    await assert_same(double, await ta.arrays.multiply(np.float64(0.5), x))
    turned = await (await ta.fused(lambda c: c * complex(-0.0, np.inf))(c)).to_host()
    np.testing.assert_array_equal(turned, (await c.to_host()) * np.complex64(complex(-0.0, np.inf)))
    found = await ta.fused(lambda c, z: xp.exp(c * 1j) + z)(c, 2j)
    np.testing.assert_allclose(await found.to_host(), np.exp(1j * wide(await c.to_host())) + 2j, rtol=1e-6)
    found = await ta.fused(lambda x, weight=None: x if weight is None else x * weight)(x)
    await assert_same(found, x)
    assert found is not x


@pytest.mark.parametrize("along", [False, True])
async def test_whole_numbers_that_a_dtype_does_not_hold(device: ta.Device, along: bool) -> None:
    x = await device.put(np.arange(6, dtype=np.int8).reshape(2, 3))

    def far(x: Any, k: Any) -> Any:
        y = x + k
        return xp.sum(y, axis=1, keepdims=True) - y if along else y * 2

    fused = ta.fused(far)
    host = await (await fused(x, 100)).to_host()
    y = (np.arange(6, dtype=np.int8).reshape(2, 3)) + np.int8(100)
    np.testing.assert_array_equal(host, y.sum(1, keepdims=True) - y if along else y * np.int8(2))
    for wrong in (lambda: fused(x, 300), lambda: ta.fused(lambda x: far(x, 300))(x)):
        with pytest.raises(ValueError, match=r"fused\..*300 is outside -128 to 127, which int8 holds"):
            await wrong()


async def test_results_in_arrays_that_are_given(device: ta.Device) -> None:
    x, y = numbers((4, 5), "float64"), numbers((4, 5), "float64", 4)
    on, other = await device.put(x), await device.put(y)
    out = await device.zeros((4, 10))
    assert (await norm(on, other, out=out[:, ::2])).shape == (4, 5)
    np.testing.assert_allclose((await out.to_host())[:, ::2], np.hypot(x, y), rtol=1e-14)
    single = await device.zeros((4, 5), "float32")
    assert await norm(on, other, out=single) is not None
    np.testing.assert_allclose(await single.to_host(), np.hypot(x, y), rtol=1e-6)
    await softmax(on, out=on)
    np.testing.assert_allclose(await on.to_host(), scipy.special.softmax(x, axis=1), rtol=1e-14)
    centred = ta.fused(lambda y, z: y - xp.mean(y, axis=0) * xp.max(z, axis=0, keepdims=True))
    await centred(other, other, out=other)
    np.testing.assert_allclose(await other.to_host(), y - y.mean(0) * y.max(0), rtol=1e-13)
    total = ta.fused(lambda x: xp.sum(x + 1, axis=1))
    row = await device.zeros(4)
    await total(await device.put(y), out=row)
    np.testing.assert_allclose(await row.to_host(), (y + 1).sum(1), rtol=1e-13)
    with pytest.raises(ValueError, match=r"fused\.norm: out must have shape \(4, 5\)"):
        await norm(on, other, out=row)
    with pytest.raises(TypeError, match=r"fused\.norm: .*float64, which does not become int32 of out"):
        await norm(on, other, out=await device.zeros((4, 5), "int32"))


async def test_functions_of_functions_and_names_of_arguments(device: ta.Device) -> None:
    @ta.fused
    def outer(n: Any, e: Any, _0: Any, found_0: Any, max: Any) -> Any:  # noqa: A002
        return norm(n, e) - xp.max(_0, axis=1, keepdims=True) * found_0 + max

    arrays = [numbers((3, 4), "float64", seed) for seed in range(5)]
    n, e, first, second, last = arrays
    on = [await device.put(each) for each in arrays]
    assert await launches(device, outer(*on)) == 1
    found = await (await outer(await device.put(n), *arrays[1:])).to_host()
    np.testing.assert_allclose(
        found, np.hypot(n, e) - first.max(1, keepdims=True) * second + last, rtol=1e-13
    )
    assert (repr(norm), norm.__name__) == ("<fused norm(x: 'Any', y: 'Any') -> 'Any'>", "norm")


async def test_long_functions(device: ta.Device) -> None:
    @ta.fused
    def horner(x: Any, *, count: int) -> Any:
        y = x
        for number in range(count):
            y = y * x + number % 3
        return y

    host = np.linspace(-0.9, 0.9, 11)
    x = await device.put(host)
    found = await (await horner(x, count=150)).to_host()
    np.testing.assert_allclose(found, horner.__wrapped__(host, count=150), rtol=1e-12)
    with pytest.raises(
        ta.NotSupportedError, match=r"fused\.horner: too much .* characters.*several functions"
    ):
        await horner(x, count=450)


@pytest.mark.skipif(BACKEND == "third", reason="it has no graphs")
async def test_graphs_hold_fused_functions(device: ta.Device) -> None:
    x, y = numbers((4, 5), "float64"), numbers((4, 5), "float64", 4)

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        return await softmax(await norm(x, y))

    graph = await ta.graphs.capture(device, step, await device.put(x), await device.put(y))
    assert "2 operations" in repr(graph)
    found = await (await graph(await device.put(2 * x), await device.put(y))).to_host()
    np.testing.assert_allclose(found, scipy.special.softmax(np.hypot(2 * x, y), axis=1), rtol=1e-13)


@pytest.mark.skipif(BACKEND == "third", reason="it has no workers")
async def test_a_lost_context(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True)
    async with system.open_device(BACKEND, options=options) as device:
        x = numbers((4, 5), "float64")
        on = await device.put(x)
        await norm(on, on)
        inject_fault(device, "fused.norm", poison=True)
        found = await norm(on, 2.0)
        assert device.generation == 2
        np.testing.assert_allclose(await found.to_host(), np.hypot(x, 2), rtol=1e-13)
