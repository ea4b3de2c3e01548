"""Transforms between two expressions, against NumPy in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND
from reference_transforms import check, dtypes, normal, reference

import trio_accel as ta
from trio_accel import fft

Array = npt.NDArray[Any]
KINDS = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "irfft2", "rfftn"]
EXPRESSIONS: dict[str, Callable[[Any, Array], Any]] = {
    "x": lambda x, w: x,
    "x * w": lambda x, w: x * w,
    "x[i(0), -1 - i(1)] + i(1)": lambda x, w: x[:, ::-1] + np.arange(x.shape[1]),
    "y": lambda y, w: y,
    "y / 4 + i(0)": lambda y, w: y / 4 + np.arange(y.shape[0])[:, None],
    "abs(y) ** 2": lambda y, w: np.abs(y) ** 2,
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in KINDS for dtype in dtypes(kind.rstrip("n2"))]
)
@pytest.mark.parametrize(
    ("options", "prolog", "epilog"),
    [
        ({}, "x * w", "abs(y) ** 2"),
        ({"norm": "ortho"}, "x * w", "y"),
        ({"norm": "forward"}, "x", "y / 4 + i(0)"),
        ({}, "x[i(0), -1 - i(1)] + i(1)", "abs(y) ** 2"),
        ({"longer": 3}, "x * w", "abs(y) ** 2"),
        ({"longer": -2}, "x * w", "y / 4 + i(0)"),
    ],
    ids=str,
)
async def test_as_numpy(
    device: ta.Device, kind: str, dtype: str, options: dict[str, Any], prolog: str, epilog: str
) -> None:
    x, window = normal((4, 12), dtype), np.hanning(12)
    if "longer" in options:
        several = kind[-1] in "n2"
        given = tuple(extent + options["longer"] for extent in x.shape)
        options = {"s": given} if several else {"n": given[-1]}
        if several:
            options["axes"] = (0, 1)
    arguments: dict[str, Any] = {"w": window.astype(np.zeros(1, dtype).real.dtype)} if "w" in prolog else {}
    made = await fft.fused(getattr(fft, kind), prolog, epilog)(await device.put(x), **arguments, **options)
    wide = EXPRESSIONS[prolog](x.astype(np.result_type(dtype, np.float64)), window)
    expected = EXPRESSIONS[epilog](reference(kind, wide, **options), window)
    check(await made.to_host(), expected, dtype)


@pytest.mark.parametrize("dtype", ["int16", "float16", "uint8"])
@pytest.mark.parametrize("n", [48, 60])
async def test_short_elements_are_converted_on_the_way(device: ta.Device, dtype: str, n: int) -> None:
    x = (normal((3, n), "float32") * 50 + 100).astype(dtype)
    spectrum = fft.fused(fft.rfft, "float32(x) - mean", "float16(abs(y) / count)")
    found = await spectrum(await device.put(x), mean=100.0, count=float(n))
    assert found.dtype == "float16"
    np.testing.assert_allclose(
        await found.to_host(), np.abs(np.fft.rfft(x - 100.0)) / n, rtol=2e-3, atol=2e-3
    )


async def test_real_numbers_are_converted_for_complex_transforms(device: ta.Device) -> None:
    x = normal((3, 10), "float32")
    check(await (await fft.fused(fft.ifft)(await device.put(x))).to_host(), np.fft.ifft(x), "complex64")


async def test_arguments_of_launches_in_a_row_are_their_own(device: ta.Device) -> None:
    x, windows = normal((64,), "complex128"), [normal((64,), "complex128") for _ in range(8)]
    spectrum = fft.fused(fft.fft, "x * w", "y + shift")
    held, given = await device.put(x), [await device.put(window) for window in windows]
    asked = [
        device.submit(spectrum.compute(held, window, float(shift))) for shift, window in enumerate(given)
    ]
    for shift, (reply, window) in enumerate(zip(asked, windows, strict=True)):
        check(await reply.value.to_host(), np.fft.fft(x * window) + shift, "complex128")
    np.testing.assert_array_equal(await held.to_host(), x)


async def test_results_are_written_to_views_and_sources_are_unchanged(device: ta.Device) -> None:
    spectrum = normal((4, 9), "complex128")
    source, whole = await device.put(spectrum), await device.zeros((4, 32), "float64")
    made = await fft.fused(fft.irfft, epilog="y * gain")(source, 2.0, out=whole[:, ::2])
    assert made.shape == (4, 16)
    expected = np.zeros((4, 32))
    expected[:, ::2] = 2 * np.fft.irfft(spectrum)
    check(await whole.to_host(), expected, "float64")
    np.testing.assert_array_equal(await source.to_host(), spectrum)


@pytest.mark.skipif(BACKEND == "third", reason="it has no graphs")
async def test_a_graph_has_one(device: ta.Device) -> None:
    x = normal((32,), "float64")
    power = fft.fused(fft.rfft, "x * x", "abs(y)")

    async def step(a: ta.AccelRef) -> ta.AccelRef:
        return await power(await ta.arrays.add(a, 1.0))

    graph = await ta.graphs.capture(device, step, await device.put(x))
    for _ in range(3):
        check(
            await (await graph(await device.put(x))).to_host(), np.abs(np.fft.rfft((x + 1) ** 2)), "float64"
        )


async def test_no_elements(device: ta.Device) -> None:
    made = await fft.fused(fft.rfft, "x * 2", "abs(y)")(await device.put(np.zeros((0, 8))))
    assert (made.shape, made.dtype) == ((0, 5), "float64")


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: fft.fused(fft.dct), TypeError, r"transform must be a function of trio_accel\.fft"),
        (lambda: fft.fused(fft.fft, "2 * w"), ValueError, r"'2 \* w' does not read x"),
        (lambda: fft.fused(fft.fft, epilog="y[-i(0)]"), ValueError, "can read y at the place of the element"),
        (lambda: fft.fused(fft.fft, "x * n"), ValueError, "cannot have the name n"),
        (lambda: fft.fused(fft.fft, epilog="x * y"), ValueError, "x in the epilog"),
        (lambda: fft.fused(fft.fft, "x +"), ValueError, "x +"),
    ],
)
def test_invalid_declarations_are_refused(
    make: Callable[[], object], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        make()


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    spectrum = fft.fused(fft.rfft, "x * w", "abs(y)")
    assert repr(spectrum) == "<FusedTransform fft.fused_rfft(x, w)>"
    x, w = await device.put(normal((3, 8), "float64")), await device.put(np.ones(7))
    with pytest.raises(ValueError, match=r"fft\.fused_rfft: the shapes \(3, 8\), \(7,\) do not broadcast"):
        await spectrum(x, w)
    with pytest.raises(TypeError, match="the prolog must make float32 or float64, it makes complex128"):
        await spectrum(x, 1j)
    with pytest.raises(TypeError, match="there is no option 's'"):
        await spectrum(x, 2.0, s=(3,))
    with pytest.raises(TypeError, match="w is missing"):
        await spectrum(x)
    with pytest.raises(ValueError, match="n must be at least 1"):
        await spectrum(x, 2.0, n=0)
    with pytest.raises(ValueError, match="out must have shape"):
        await spectrum(x, 2.0, out=x)
    with pytest.raises(ValueError, match="must not share memory"):
        await fft.fused(fft.fft)(held := await device.put(normal((8,), "complex64")), out=held)
    with pytest.raises(ValueError, match="do not broadcast"):
        await fft.fused(fft.rfft, epilog="y * w")(x, w)
    with pytest.raises(ValueError, match="norm must be"):
        await spectrum(x, 2.0, norm="unitary")
