"""Neighbouring expressions of a repeated chain become one launch, and keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND
from isolations import inline

import trio_accel as ta
from trio_accel import arrays

pytestmark = pytest.mark.any_backend

# Calls of one structure until neighbours are joined, and one more.
TURNS = 6
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int8", "uint32", "int64")
Chain = Callable[[Any, Any], Any]


def numbers(dtype: str) -> npt.NDArray[Any]:
    """Small integers, fractions, and numbers that round, overflow or are NaN."""
    draw = np.random.default_rng(5)
    kind = ta.DType(dtype).dtype
    if np.dtype(kind).kind in "iu":
        return draw.integers(0, 127, (6, 8)).astype(kind)
    values = draw.standard_normal((6, 8)) * 10.0 ** draw.integers(-4, 5, (6, 8))
    values.flat[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0]
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(kind)


def nodes(device: ta.Device) -> list[str]:
    """Return the operations of the chain that ran last."""
    chains: Any = device.chains  # type: ignore[attr-defined]  # an open device has them
    template = max(chains.kept.plans.values(), key=lambda plan: plan.number).value
    return [node.operation for node in template.layout.recipe.nodes]


async def turns(device: ta.Device, chain: Chain, *given: Any) -> list[int]:
    """Compare the bits of all turns; returns how many operations each had."""
    found: list[int] = []
    expected: npt.NDArray[Any] | None = None
    for _ in range(TURNS):
        got = await (await chain(*given)).to_host()
        found.append(len(nodes(device)))
        expected = got if expected is None else expected
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()
    return found


@inline
@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_joined_expression_has_the_bits_of_its_parts(device: ta.Device, dtype: str) -> None:
    x, y = await device.put(numbers(dtype)), await device.put(numbers(dtype)[::-1].copy())

    def chain(x: Any, y: Any) -> Any:
        product = x * y + x
        return (product * 3 - y) * product

    # The product has two readers, so it is not written into both.
    assert await turns(device, chain, x, y) == [5, 5, 5, 5, 2, 2]
    assert nodes(device)[0] == "arrays.multiply, arrays.add"


@inline
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
async def test_functions_keep_their_bits(device: ta.Device, dtype: str) -> None:
    x = await device.put(numbers(dtype))
    chains: tuple[Chain, ...] = (
        lambda x, y: arrays.exp(x * 0.1) + x * y,
        lambda x, y: arrays.tanh(arrays.exp(x)) * y,
        lambda x, y: arrays.erf(x * y) - 1,
        lambda x, y: arrays.asin(arrays.erf(x)) + y,
    )
    # On the CPU a single function is NumPy's, and ours in company: these are not fused.
    steps = (3, 3, 3, 2) if BACKEND == "cpu" else (1, 1, 1, 1)
    for chain, count in zip(chains, steps, strict=True):
        assert (await turns(device, chain, x, x))[-1] == count


@inline
async def test_a_result_in_between_is_rounded_as_if_it_were_stored(device: ta.Device) -> None:
    x = await device.put(numbers("float64"))
    rounded = await turns(device, lambda x, y: (x.cast("float16") * 3).cast("float64") - y, x, x)
    # Conversions are not expressions; intermediate arrays around them are unchanged.
    assert rounded[-1] == rounded[0]
    low = await device.put(numbers("float16"))
    assert (await turns(device, lambda x, y: arrays.sqrt(x * 0.1) + x * y, low, low))[-1] == 1
    high = await device.put(numbers("float32"))
    assert (await turns(device, lambda x, y: x * y - x * x + 0.1, high, high))[-1] == 1


@inline
async def test_unfused_operations(device: ta.Device) -> None:
    x, row = await device.put(numbers("float64")), await device.put(numbers("float64")[0])
    # It would be computed again for each row.
    assert (await turns(device, lambda x, y: arrays.exp(y) + x, x, row))[-1] == 2
    # The sum is of all elements, so no element of a later result is computed with it.
    assert (await turns(device, lambda x, y: arrays.sum(x * 2.0) + 1.0, x, row))[-1] == 2
    # Arrays held by the program are stored.
    kept = await device.put(np.empty((6, 8)))
    found = await turns(device, lambda x, y: arrays.add(x, 1.0, out=y) * 2.0, x, kept)
    assert found[-1] == 2
    np.testing.assert_array_equal(await kept.to_host(), numbers("float64") + 1.0)


REDUCED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: arrays.sum(x, axis=0),
    "mean of all": arrays.mean,
    "largest": lambda x: arrays.max(x, axis=1),
    "place": lambda x: arrays.argmax(x, axis=1),
    "softmax": lambda x: arrays.softmax(x, axis=1),
    "deviation": lambda x: arrays.std(x, axis=(0, 1)),
}


@inline
@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
async def test_a_reduction_takes_its_values_along(device: ta.Device, name: str, dtype: str) -> None:
    x, y = await device.put(numbers(dtype)), await device.put(numbers(dtype)[::-1].copy())

    def chain(x: Any, y: Any) -> Any:
        return REDUCED[name]((x - y) * 2 + x)

    found = await turns(device, chain, x, y)
    # On the CPU a single exp is NumPy's, so softmax is not fused.
    assert (found[0], found[-1]) == (4, 2 if name == "softmax" and BACKEND == "cpu" else 1)


@inline
async def test_a_reduction_by_a_combination_takes_its_values_along(device: ta.Device) -> None:
    host = np.linspace(-1, 1, 48).reshape(6, 8)
    x = await device.put(host)
    largest = ta.jit.reduction("abs(v)", "a if a > b else b", identity=0, post="a * n")
    times = ta.jit.elementwise("a * b")
    found = await turns(device, lambda x, y: largest(times(x, y), axis=1), x, x)
    assert found[-1] == 1
    got = await (await largest(x * x, axis=1)).to_host()
    np.testing.assert_array_equal(got, (host * host).max(1) * 8)


@inline
async def test_a_reduction_of_other_strides_reads_stored_elements(device: ta.Device) -> None:
    """The strides decide in which order a backend adds, and so the bits."""
    x, row = await device.put(numbers("float32")), await device.put(numbers("float32")[0])
    turned = await device.put(numbers("float32").reshape(8, 6).T.copy())
    assert (await turns(device, lambda x, y: arrays.sum(x * y, axis=1), x, row))[-1] == 2
    assert (await turns(device, lambda x, y: arrays.sum(x.T * y, axis=1), x, turned.T))[-1] == 2
    shifted = ta.jit.elementwise("x[i(0), i(1) - 1] + x[i(0), i(1)]")
    assert (await turns(device, lambda x, y: arrays.sum(shifted(x, shape=(6, 8))), x, x))[-1] == 2


@inline
async def test_an_operand_that_changes_before_the_neighbour_is_read_before(device: ta.Device) -> None:
    for _ in range(TURNS):
        x = await device.put(np.full(3, 2.0))
        y = await device.put(np.full(3, 5.0))
        # The sum is made of the first contents of y, and the product after its change.
        got = await ((x + y) * arrays.add(x, 10.0, out=y)).to_host()
        np.testing.assert_array_equal(got, np.full(3, 84.0))
        np.testing.assert_array_equal(await y.to_host(), np.full(3, 12.0))


@inline
async def test_a_long_chain_is_joined_in_parts(device: ta.Device) -> None:
    x = await device.put(numbers("float64"))

    def chain(x: Any, y: Any) -> Any:
        for _ in range(300):
            x = x * 0.5 + y
        return x

    found = await turns(device, chain, x, x)
    assert found[0] == 600
    assert found[-1] < 30


@inline
async def test_loads_are_a_part(device: ta.Device) -> None:
    x = await device.put(numbers("float64"))
    turned = ta.jit.elementwise("x[i(0), 7 - i(1)] * 2")
    add = ta.jit.elementwise("t = x - 1; out = t + y")

    def chain(x: Any, y: Any) -> Any:
        return add(turned(x, shape=(6, 8)), y)

    assert (await turns(device, chain, x, x))[-1] == 1


@inline
async def test_a_result_that_elements_are_loaded_from_is_stored(device: ta.Device) -> None:
    tenfold, first = ta.jit.elementwise("a * 10"), ta.jit.elementwise("a[0] + b")
    for turn in range(1, TURNS + 2):
        x = await device.put(np.arange(1, 5, dtype="float32") * turn)
        t = tenfold(x)
        np.testing.assert_array_equal(
            await (await first(t, t)).to_host(), (10 + 10 * np.arange(1, 5, dtype="float32")) * turn
        )


@inline
@pytest.mark.parametrize(
    "text", ["(\U0001d4651 * 2) - \U0001d4650", "t = x1\n(out) = t - x0", "x1 * 1.e5 - x0"]
)
async def test_names_match_python(device: ta.Device, text: str) -> None:
    x, y = await device.put(np.arange(4.0)), await device.put(np.full(4, 10.0))
    product, last = ta.jit.elementwise("a * b"), ta.jit.elementwise(text, inputs=("x1", "x0"))
    found = await turns(device, lambda x, y: last(product(x, y), x), x, y)
    assert (found[0], found[-1]) == (2, 1)


@inline
async def test_a_number_like_a_name_is_a_number(device: ta.Device) -> None:
    x = await device.put(np.ones(4))
    product, last = ta.jit.elementwise("a * 10"), ta.jit.elementwise("e5 * 1.e5")
    assert (await turns(device, lambda x, y: last(product(x)), x, x))[-1] == 1


@inline
async def test_arrays_of_many_axes_are_not_too_much_for_a_kernel(device: ta.Device) -> None:
    axes = 45
    many = [await device.put(np.full((1,) * axes, float(number))) for number in range(6)]
    at = ",".join(["0"] * axes)
    added = ta.jit.elementwise(f"a[{at}] + b[{at}] + c[{at}] + x", inputs=("a", "b", "c", "x"))
    y = await device.put(np.zeros(4))
    for _ in range(TURNS + 1):
        got = await added(*many[3:], added(*many[:3], np.ones(4)), out=y)
        np.testing.assert_array_equal(await got.to_host(), np.full(4, 16.0))
