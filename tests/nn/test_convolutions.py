"""Convolutions against SciPy and loops in float64, and gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.signal
import trio
from chosen import BACKEND, INLINE
from dnn_references import NUMPYS, TOLERANCE, Array, check, convolved, numbers, slope, spread
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import nn

CONVS: list[Any] = [nn.conv1d, nn.conv2d, nn.conv3d]
TRANSPOSED: list[Any] = [nn.conv_transpose1d, nn.conv_transpose2d, nn.conv_transpose3d]


@pytest.mark.parametrize("dims", [1, 2, 3])
async def test_a_correlation_is_that_of_scipy(device: ta.Device, dims: int) -> None:
    x, weight = numbers((1, 1, *(11, 9, 8)[:dims])), numbers((1, 1, *(4, 3, 2)[:dims]), seed=1)
    for padding, mode in (("valid", "valid"), ((3, 2, 1)[:dims], "full")):
        made = await CONVS[dims - 1](await device.put(x), weight, padding=padding)
        check(
            await made.to_host(),
            scipy.signal.correlate(x[0, 0], weight[0, 0], mode, "direct")[None, None],
            terms=24,
        )
    # SciPy has the odd element of "same" before, so its center is another one.
    odd = numbers((1, 1, *(5, 3, 3)[:dims]), seed=2)
    made = await CONVS[dims - 1](await device.put(x), odd, padding="same")
    check(
        await made.to_host(),
        scipy.signal.correlate(x[0, 0], odd[0, 0], "same", "direct")[None, None],
        terms=45,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_images_of_channels(device: ta.Device, dtype: str) -> None:
    x, weight, bias = numbers((3, 4, 9, 8), dtype), numbers((6, 2, 3, 2), dtype, 1), numbers((6,), dtype, 2)
    sizes: dict[str, Any] = {"stride": (2, 1), "padding": [(1, 1), (2, 2)], "dilation": (1, 2)}
    expected = convolved(x, weight, bias, groups=2, **sizes)
    options = {**sizes, "padding": (1, 2), "groups": 2}
    ref = await device.put(x)
    made = await nn.conv2d(ref, weight, bias, **options)
    check(await made.to_host(), expected, dtype, terms=12)
    # Without an axis for the batch, a view, and to an existing array.
    check(await (await nn.conv2d(ref[1], weight, bias, **options)).to_host(), expected[1], dtype, terms=12)
    turned = await device.put(np.ascontiguousarray(x[::-1].swapaxes(2, 3)))
    out = await device.zeros((*expected.shape[:3], 2 * expected.shape[3]), dtype)
    view = out[..., ::2]
    assert await nn.conv2d(turned[::-1].transpose(0, 1, 3, 2), weight, bias, **options, out=view) is view
    check(await view.to_host(), expected, dtype, terms=12)
    # The bits are the same in each run.
    again = await nn.conv2d(ref, weight, bias, **options)
    np.testing.assert_array_equal(await again.to_host(), await made.to_host())


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_gradients_in_each_dtype(device: ta.Device, dtype: str) -> None:
    x, weight, grad = numbers((2, 2, 5), dtype), numbers((4, 1, 3), dtype, 1), numbers((2, 4, 3), dtype, 2)
    sizes: dict[str, Any] = {"stride": [2], "padding": [(1, 1)], "dilation": [1], "groups": 2}
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
    exact = [array.astype(float) for array in (x, weight, grad)]
    ref = await device.put(grad)
    found = await nn.conv_input_grad(x.shape, weight, ref, **options)
    expected = slope(lambda moved: convolved(moved, exact[1], **sizes), exact[0], exact[2], 1.0)
    check(await found.to_host(), expected, dtype, terms=9)
    found = await nn.conv_weight_grad(x, weight.shape, ref, **options)
    expected = slope(lambda moved: convolved(exact[0], moved, **sizes), exact[1], exact[2], 1.0)
    check(await found.to_host(), expected, dtype, terms=8)
    check(await (await nn.conv_bias_grad(ref)).to_host(), exact[2].sum((0, 2)), dtype, terms=8)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    few = st.lists(st.integers(1, 3), min_size=dims, max_size=dims)
    window, stride, dilation = draw(few), draw(few), draw(few)
    pair = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding = draw(st.lists(pair, min_size=dims, max_size=dims))
    spare = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
    least = [d * (k - 1) + 1 - sum(pair) for d, k, pair in zip(dilation, window, padding, strict=True)]
    spatial = [max(one, 1) + more for one, more in zip(least, spare, strict=True)]
    batch, inputs, outputs = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 2))
    x = numbers((batch, inputs * groups, *spatial), seed=draw(st.integers(0, 99)))
    weight = numbers((outputs * groups, inputs, *window), seed=draw(st.integers(0, 99)))
    return x, weight, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


@given(problem=problems())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_sizes(problem: tuple[Array, Array, dict[str, Any]]) -> None:
    x, weight, sizes = problem
    dims = x.ndim - 2
    expected = convolved(x, weight, **sizes)
    grad = numbers(expected.shape, seed=5)

    async def main() -> None:
        async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
            made = await CONVS[dims - 1](await device.put(x), weight, **sizes)
            check(await made.to_host(), expected, terms=60)
            back = await device.put(grad)
            to_x = await (await nn.conv_input_grad(x.shape, weight, back, **sizes)).to_host()
            to_weight = await (await nn.conv_weight_grad(x, weight.shape, back, **sizes)).to_host()
            # The map is linear in each argument, so that differences are exact but for rounding.
            if x.size < 60:
                check(to_x, slope(lambda moved: convolved(moved, weight, **sizes), x, grad, 1.0), terms=99)
            if weight.size < 60:
                check(
                    to_weight, slope(lambda moved: convolved(x, moved, **sizes), weight, grad, 1.0), terms=99
                )
            # And the transposed map has the same product with any direction.
            total = (expected * grad).sum()
            for array, found in ((x, to_x), (weight, to_weight)):
                np.testing.assert_allclose((array * found).sum(), total, rtol=1e-11, atol=1e-11)

    trio.run(main)


@pytest.mark.parametrize("dims", [1, 2, 3])
async def test_transposed_convolutions(device: ta.Device, dims: int) -> None:
    x, weight = numbers((2, 4, *(4, 3, 2)[:dims])), numbers((4, 3, *(3, 2, 3)[:dims]), seed=1)
    bias = numbers((6,), seed=2)
    sizes: dict[str, Any] = {"stride": (3, 2, 1)[:dims], "dilation": (1, 2, 1)[:dims], "groups": 2}
    more, padding = (2, 1, 0)[:dims], (1, 0, 1)[:dims]
    made = await TRANSPOSED[dims - 1](
        await device.put(x), weight, bias, padding=padding, output_padding=more, **sizes
    )
    extents = [
        (extent - 1) * s - 2 * p + d * (k - 1) + extra + 1
        for extent, s, p, d, k, extra in zip(
            x.shape[2:], sizes["stride"], padding, sizes["dilation"], weight.shape[2:], more, strict=True
        )
    ]
    assert made.shape == (2, 6, *extents)

    def forward(image: Array) -> Array:
        return convolved(image, weight, padding=[(p, p) for p in padding], **sizes)

    alone = spread(x, weight, extents, padding=padding, **sizes)
    expected = alone + bias.reshape(-1, *(1,) * dims)
    check(await made.to_host(), expected, terms=40)
    # Its gradients are a convolution, and that for the weights of a convolution.
    grad = numbers(made.shape, seed=3)
    to_x = await CONVS[dims - 1](await device.put(grad), weight, padding=padding, **sizes)
    check(await to_x.to_host(), forward(grad), terms=60)
    to_weight = await nn.conv_weight_grad(await device.put(grad), weight.shape, x, padding=padding, **sizes)
    total = (alone * grad).sum()
    np.testing.assert_allclose((await to_weight.to_host() * weight).sum(), total, rtol=1e-11)


async def test_pieces_make_the_same(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, grad = numbers((5, 4, 8, 5)), numbers((6, 2, 3, 3), seed=1), numbers((5, 6, 6, 3), seed=2)
    sizes: dict[str, Any] = {"stride": [1, 1], "padding": [(0, 0)] * 2, "dilation": [1, 1], "groups": 2}
    expected = convolved(x, weight, **sizes)
    async with system.open_device(BACKEND, options=INLINE) as device:
        ref, back = await device.put(x), await device.put(grad)
        for piece in (1, 900, 5000, 1 << 21):
            monkeypatch.setattr("trio_accel.backends.cpu.libraries.dnn._COLUMNS", piece)
            made = await nn.conv2d(ref, weight, groups=2)
            check(await made.to_host(), expected, terms=18)
            found = await nn.conv_input_grad(x.shape, weight, back, groups=2)
            one = (await found.to_host() * x).sum()
            found = await nn.conv_weight_grad(ref, weight.shape, back, groups=2)
            other = (await found.to_host() * weight).sum()
            np.testing.assert_allclose([one, other], (expected * grad).sum(), rtol=1e-11)


async def test_messages(device: ta.Device) -> None:
    x, weight = numbers((1, 2, 5), "float32"), numbers((3, 2, 2), "float32", 1)
    made = await device.ask(nn.Conv1d(x, weight))
    expected = convolved(x, weight, stride=[1], padding=[(0, 0)], dilation=[1])
    check(await made.to_host(), expected, "float32", terms=4)
    assert made.dtype == NUMPYS["float32"]
    # All but the first argument are by position in PyTorch's order.
    same = await nn.conv1d(await device.put(x), weight, None, 2, 1, 1, 1)
    expected = convolved(x, weight, stride=[2], padding=[(1, 1)], dilation=[1])
    check(await same.to_host(), expected, "float32", terms=4)
    turned = await nn.conv_transpose1d(
        await device.put(x), numbers((2, 1, 3), "float32", 1), None, 2, 1, 1, 2, 1
    )
    assert turned.shape == (1, 2, 10)
