"""Interpolation against SciPy's: by orders, modes, dtypes; and at coordinates without a place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from chosen import IS_STAND_IN
from images import MODES, compare, image

import trio_accel as ta
from trio_accel import ndimage

# Far enough apart that SciPy's start values of "reflect", which end with the image, are exact.
SHAPE = (36, 40)
COORDINATES = np.random.default_rng(5).uniform(-50, 90, (2, 9, 7))
CASES: dict[str, tuple[Any, ...]] = {
    "map_coordinates": (COORDINATES,),
    "shift": ((1.3, -2),),
    "zoom": ((1.7, 0.6),),
    "rotate": (33,),
    "affine_transform": ([[0.8, 0.1], [-0.2, 1.1]], 0.3),
}
ORDERS = (0, 1, 3) if IS_STAND_IN else range(6)
CHOSEN = MODES[1:3] if IS_STAND_IN else MODES


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", CHOSEN)
async def test_each_order_and_mode(device: ta.Device, order: int, mode: Any) -> None:
    x = image("float64", SHAPE)
    for name, args in list(CASES.items())[:1] if IS_STAND_IN else CASES.items():
        await compare(device, name, x, *args, order=order, mode=mode, cval=3.0, tol=1e-9)


@pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int16", "uint64", "complex128"])
@pytest.mark.parametrize("name", CASES)
async def test_each_dtype(device: ta.Device, name: str, dtype: str) -> None:
    x = image(dtype, SHAPE)
    for order in (0, 1, 3):
        await compare(device, name, x, *CASES[name], order=order, mode="nearest", tol=1e-9)


@pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")
@pytest.mark.parametrize("order", [1, 3])
async def test_more_and_fewer_axes(device: ta.Device, order: int) -> None:
    line, volume = image("float64", (40,)), image("float64", (36, 38, 40))
    for x in (line, volume):
        await compare(device, "shift", x, 0.4, order=order, mode="reflect", tol=1e-9)
        await compare(device, "zoom", x, 0.3, order=order, mode="grid-wrap", grid_mode=True, tol=1e-9)
        await compare(device, "affine_transform", x, [0.5, 1.5, 0.9][: x.ndim], 0.2, order=order, tol=1e-9)
    await compare(device, "rotate", volume, 20, axes=(2, 0), reshape=False, order=order, tol=1e-9)
    homogeneous = np.vstack([np.c_[np.eye(3) * 0.7, [1, 2, 3]], [0, 0, 0, 1]])
    await compare(device, "affine_transform", volume, homogeneous, order=order, tol=1e-9)
    await compare(
        device,
        "affine_transform",
        volume,
        [[1, 0], [0, 1], [0.5, 0]],
        output_shape=(5, 6),
        order=order,
        tol=1e-9,
    )


@pytest.mark.parametrize("mode", CHOSEN)
async def test_coefficients(device: ta.Device, mode: Any) -> None:
    x = image("float64", SHAPE)
    for order in (3,) if IS_STAND_IN else (2, 3, 4, 5):
        await compare(device, "spline_filter", x, order, mode=mode, tol=1e-11)
    if not IS_STAND_IN:
        await compare(device, "spline_filter1d", image("uint8", SHAPE), 3, 0, mode=mode, tol=1e-10)
        await compare(device, "spline_filter1d", image("complex64", SHAPE), 3, output="complex128", mode=mode)


async def test_existing_coefficients(device: ta.Device) -> None:
    x = image("float64", SHAPE)
    coefficients = await ndimage.spline_filter(await device.put(x), 3)
    got = await ndimage.map_coordinates(coefficients, COORDINATES, mode="mirror", prefilter=False).to_host()
    wanted = scipy.ndimage.map_coordinates(x, COORDINATES, mode="mirror")
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


async def test_a_short_axis_is_interpolated_exactly(device: ta.Device) -> None:
    # SciPy's coefficients are wrong by 1e-8 here, so its image is not found again.
    x = image("float64", (5, 6))
    at = np.indices(x.shape)
    for mode in ("reflect", "mirror", "grid-wrap"):
        got = await ndimage.map_coordinates(await device.put(x), at, mode=mode).to_host()
        np.testing.assert_allclose(got, x, rtol=1e-13, atol=1e-13)


async def test_coordinates_on_the_device_and_in_whole_numbers(device: ta.Device) -> None:
    x, at = image("float32", SHAPE), np.arange(12).reshape(2, 6)
    got = await ndimage.map_coordinates(await device.put(x), await device.put(at), order=1).to_host()
    np.testing.assert_allclose(got, x[tuple(at)], rtol=1e-6)


async def test_nan_coordinates(device: ta.Device) -> None:
    ref = await device.put(image("float64", SHAPE))
    at = np.array([[np.nan, np.inf, -np.inf, 1e300], [1.0, 1.0, 1.0, 1.0]])
    for mode in ("constant", "nearest"):
        got = await ndimage.map_coordinates(ref, at, order=1, mode=mode, cval=-7.0).to_host()
        assert np.isnan(got[0])
        if mode == "constant":
            assert (got[1:] == -7).all()
        else:
            x = await ref.to_host()
            np.testing.assert_allclose(got[1:], [x[-1, 1], x[0, 1], x[-1, 1]])


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
async def test_an_empty_image_equals_its_boundary_value(device: ta.Device, dtype: str) -> None:
    for mode in ("constant", "grid-constant"):
        x, at = np.zeros((0, 3), dtype), np.array([[-4.0, 0.5], [0.0, 0.5]])
        await compare(device, "map_coordinates", x, at, order=1, mode=mode, cval=3)


# Lengths before and after, for which rounding moves the last coordinate of a zoom after the last element.
STRIPES = [(n, m) for n in range(1, 65) for m in range(2, 65) if (n - 1) / (m - 1) * (m - 1) > n - 1]


@pytest.mark.parametrize("order", ORDERS)
async def test_the_last_elements_of_a_zoom_are_in_the_image(device: ta.Device, order: int) -> None:
    # SciPy's start values of "reflect" are not exact for short images.
    for mode in ("constant", "wrap") if IS_STAND_IN else MODES[1:6]:
        for n, m in [(1, 5), (5, 1), *STRIPES[order :: len(STRIPES) // 12]]:
            x = image("float64", (n,))
            at = np.clip((n - 1) / max(m - 1, 1) * np.arange(m), 0, n - 1)
            want = scipy.ndimage.map_coordinates(x, [at], order=order, mode=mode, cval=3.0)
            ref = await device.put(x)
            made = await ndimage.zoom(ref, m / n, order=order, mode=mode, cval=3.0)
            np.testing.assert_allclose(
                await made.to_host(), want, rtol=0, atol=1e-9, err_msg=f"{mode} {n} {m}"
            )
            step = (n - 1) / max(m - 1, 1)
            if n > 1 and mode in ("constant", "wrap"):
                made = await ndimage.affine_transform(
                    ref, [step], output_shape=(m,), order=order, mode=mode, cval=3.0
                )
                np.testing.assert_allclose(await made.to_host(), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_turned_image_keeps_its_edges(device: ta.Device, order: int) -> None:
    """The middle of an edge stays on the axis of a turn by 30 degrees, whatever sums are rounded to."""
    found = list[int]()
    for shape in ((1, 1), (9, 1), (9, 9), (13, 21)):
        x, cosine, sine = image("float64", shape), np.sqrt(0.75), 0.5
        for angle, matrix in (
            (30, [[cosine, sine], [-sine, cosine]]),
            (-60, [[sine, -cosine], [cosine, sine]]),
        ):
            given: Any = {"order": order, "mode": "constant", "cval": np.nan}
            made = await ndimage.rotate(await device.put(x), angle, **given)
            half = np.indices(made.shape) - (np.array(made.shape) - 1).reshape(2, 1, 1) / 2
            middle = (np.array(shape) - 1).reshape(2, 1, 1)
            at = np.einsum("ij,jkl->ikl", matrix, half) + middle / 2
            inside = np.clip(at, 0, middle)
            at = np.where(abs(at - inside) < 1e-11, inside, at)
            want = scipy.ndimage.map_coordinates(x, at, **given)
            found.append(np.isfinite(want).sum())
            np.testing.assert_allclose(await made.to_host(), want, rtol=0, atol=1e-9)
    assert found[0] == 1
    assert min(found[4:]) > 50


@pytest.mark.parametrize("order", ORDERS)
async def test_truth_values_are_rounded(device: ta.Device, order: int) -> None:
    """SciPy cuts 0.9999 to False. Numbers between are True from a half on."""
    mask = np.random.default_rng(5).random((12, 15)) > 0.5
    ref = await device.put(mask)
    moved = await (await ndimage.shift(ref, (2, -3), order=order)).to_host()
    np.testing.assert_array_equal(moved[2:, :-3], mask[:-2, 3:])
    same = await ndimage.affine_transform(ref, np.eye(2), order=order, mode="nearest")
    np.testing.assert_array_equal(await same.to_host(), mask)
    for mode in ("mirror", "nearest") if IS_STAND_IN else MODES:
        given: Any = {"order": order, "mode": mode}
        made = await (await ndimage.rotate(ref, 30, **given)).to_host()
        between = scipy.ndimage.rotate(mask.astype(float), 30, **given)
        clear = abs(between - 0.5) > 1e-9
        np.testing.assert_array_equal(made[clear], between[clear] > 0.5)


async def test_a_zoom_of_one_is_the_image(device: ta.Device) -> None:
    x = image("uint8", SHAPE)
    got = await ndimage.zoom(await device.put(x), 1)
    assert np.array_equal(await got.to_host(), x)


async def test_results_fit_into_the_dtype(device: ta.Device) -> None:
    x = np.array([0, 255, 0, 255, 0, 0, 255, 255], np.uint8)
    await compare(device, "shift", x, 0.5, order=5, mode="mirror")
    big = np.array([-(2**63), 2**63 - 1, 2**62], np.int64)
    got = await ndimage.shift(await device.put(big), 0.0, order=1, mode="nearest").to_host()
    assert got[0] == -(2**63)
    assert got[1] > 2**63 - 2048


REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "order": ("shift", (1,), {"order": 6}, ValueError, "order must be from 0 to 5, got 6"),
    "low order": ("spline_filter", (1,), {}, ValueError, "order must be from 2 to 5, got 1"),
    "mode": ("zoom", (2,), {"mode": "edge"}, ValueError, "mode must be one of .* got 'edge'"),
    "coordinates": ("map_coordinates", ([1, 2],), {}, ValueError, r"coordinates must have shape \(2, ...\)"),
    "complex": ("map_coordinates", ([[1j], [2]],), {}, TypeError, "complex"),
    "matrix": ("affine_transform", (np.eye(3)[:2, :1],), {}, ValueError, r"matrix must have shape \(2, 2\)"),
    "row": (
        "affine_transform",
        (np.ones((3, 3)),),
        {},
        ValueError,
        "matrix must end with a row of 0 and a 1",
    ),
    "zoom": ("zoom", (-1,), {}, ValueError, "zoom must be at least 0, got -1"),
    "offset": ("affine_transform", (np.eye(2), np.nan), {}, ValueError, "offset must be finite, got nan"),
    "shape": (
        "affine_transform",
        (np.eye(2),),
        {"output_shape": (-1, 3)},
        ValueError,
        r"output_shape must be at least 0, got \(-1, 3\)",
    ),
    "plane": ("rotate", (10, (0,)), {}, ValueError, "axes must be two"),
    "axes": ("rotate", (10, (0, 5)), {}, ValueError, "axes must be different ones of 2"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_arguments_are_reported_with_the_functions_name(device: ta.Device, case: str) -> None:
    name, args, kwargs, error, text = REFUSED[case]
    with pytest.raises(error, match=text) as refusal:
        await getattr(ndimage, name)(await device.put(image("float64")), *args, **kwargs)
    assert name in str(refusal.value)


async def test_too_many_elements_for_each_one(device: ta.Device) -> None:
    for axes, order, count in ((9, 3, 4**9), (7, 5, 6**7), (14, 0, 1)):
        x = await device.put(image("float64", (2,) * axes))
        told = f"{count} elements for each one by order {order} along {axes} axes; 65536 along 13 axes are"
        with pytest.raises(ta.NotSupportedError, match=told):
            await ndimage.shift(x, 0.5, order=order)


# By order, a shape with more elements for each result than an expression has room for in one sum.
LOOPED: dict[int, tuple[int, ...]] = {
    1: (2,) * 6,
    2: (3, 2, 4, 2, 2),
    3: (6, 5, 4, 5),
    4: (5, 4, 3, 4),
    5: (9, 8, 7),
}


@pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for seconds")
@pytest.mark.parametrize("mode", ["constant", "mirror", "wrap", "grid-wrap"])
@pytest.mark.parametrize("order", LOOPED)
async def test_leading_axes_are_summed_in_a_loop(device: ta.Device, order: int, mode: Any) -> None:
    x = image("float64", LOOPED[order])
    given: dict[str, Any] = {"order": order, "mode": mode, "cval": 3.0, "tol": 1e-9}
    await compare(device, "shift", x, 0.3, **given)
    await compare(
        device, "map_coordinates", x, np.random.default_rng(1).uniform(-3, 9, (x.ndim, 11)), **given
    )
    await compare(device, "shift", image("complex128", LOOPED[order]), 0.3, **given)
    await compare(device, "affine_transform", x, np.eye(x.ndim) * 0.8 + 0.03, 0.1, **given)


@pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for seconds")
@pytest.mark.parametrize("mode", MODES)
async def test_splines_of_order_5_in_three_dimensions(device: ta.Device, mode: Any) -> None:
    """SciPy's coefficients of "reflect" are not exact for short axes, so both functions get the same ones."""
    x = image("float64", (14, 16, 15))
    filtered = await ndimage.spline_filter(await device.put(x), 5, mode="mirror")
    at = np.random.default_rng(2).uniform(-4, 20, (3, 50))
    got = await ndimage.map_coordinates(filtered, at, order=5, mode=mode, prefilter=False)
    want = scipy.ndimage.map_coordinates(await filtered.to_host(), at, order=5, mode=mode, prefilter=False)
    np.testing.assert_allclose(await got.to_host(), want, rtol=1e-9, atol=1e-9)
    if mode in ("nearest", "mirror", "grid-wrap", "grid-constant"):
        await compare(device, "zoom", x, 0.7, order=5, mode=mode, tol=1e-9)
    await compare(device, "rotate", x, 20, axes=(2, 0), order=5, mode="mirror", reshape=False, tol=1e-9)


async def test_a_plane_of_many_axes_is_turned(device: ta.Device) -> None:
    x = image("float64", (1,) * 20 + (4, 5))
    await compare(device, "rotate", x, 30, axes=(21, 20), order=5, mode="mirror", tol=1e-9)
