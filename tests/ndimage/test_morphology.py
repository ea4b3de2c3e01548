"""Labels, distances, erosion and dilation against SciPy's; and cancellations and losses in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import trio
from chosen import IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from images import Array, compare

import trio_accel as ta
from trio_accel import ndimage

no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")


def blobs(shape: tuple[int, ...] = (60, 71), share: float = 0.5, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random(shape) < share


def spiral(size: int) -> Array:
    """Make one part of the greatest length, because labels take most rounds there."""
    x = np.zeros((size, size), bool)
    x[::2] = True
    x[1::4, -1] = True
    x[3::4, 0] = True
    return x


@pytest.mark.parametrize("share", [0.55] if IS_STAND_IN else [0.1, 0.4, 0.59, 0.8])
async def test_labels_by_share(device: ta.Device, share: float) -> None:
    x = blobs(share=share)
    await compare(device, "label", x)
    await compare(device, "label", x, np.ones((3, 3)))


@no_stand_in
async def test_labels_of_other_shapes(device: ta.Device) -> None:
    for shape in ((300,), (12, 13, 14), (), (0, 3), (1, 1), (5, 4, 3, 6)):
        await compare(device, "label", blobs(shape, 0.4))
    for x in (spiral(41), spiral(41).T, np.ones((9, 9)), np.zeros((9, 9)), np.array([[0.5, 0, -3, np.nan]])):
        await compare(device, "label", x)
    one_way = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    await compare(device, "label", blobs(), one_way)


@no_stand_in
@settings(max_examples=30, deadline=None)
@given(hnp.arrays(bool, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9)), st.booleans())
def test_any_image(x: Array, is_full: bool) -> None:
    structure = np.ones((3,) * x.ndim) if is_full else None

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device("cpu") as device:
            await compare(device, "label", x, structure)
            if not x.all():
                await compare(device, "distance_transform_edt", x)
            await compare(device, "binary_erosion", x, structure, iterations=2, border_value=1)

    trio.run(main)


async def test_labels_of_a_dtype(device: ta.Device) -> None:
    x = np.eye(20, dtype=bool)
    ref, out = await device.put(x), await device.zeros(x.shape, "uint8")
    found = await ndimage.label(ref, output=out)
    assert found.labels is out
    assert found.num_features == 20
    assert np.array_equal(np.diag(await out.to_host()), np.arange(1, 21))
    many = np.zeros((2, 600), bool)
    many[:, ::2] = True
    with pytest.raises(ValueError, match="output of uint8 has no room for 300 labels"):
        await ndimage.label(await device.put(many), output="uint8")


async def test_the_image_stays_unchanged(device: ta.Device) -> None:
    x = blobs()
    ref = await device.put(x)
    await ndimage.label(ref)
    await ndimage.distance_transform_edt(ref)
    await ndimage.binary_erosion(ref, iterations=3)
    assert np.array_equal(await ref.to_host(), x)


async def test_labels_of_a_call(device: ta.Device) -> None:
    x = np.random.default_rng(2).random((30, 30))
    ref = await device.put(x)
    for limit in (0.3, 0.5, 0.5, 0.5, 0.7):
        found = await ndimage.label(ta.arrays.less(ref, limit))
        wanted, count = scipy.ndimage.label(x < limit)
        assert found.num_features == count
        assert np.array_equal(await found.labels.to_host(), wanted)


@pytest.mark.parametrize("sampling", [None] if IS_STAND_IN else [None, 2.5, (0.5, 2)])
async def test_distances(device: ta.Device, sampling: Any) -> None:
    for share in (0.5,) if IS_STAND_IN else (0.5, 0.95, 0.999):
        await compare(device, "distance_transform_edt", blobs(share=share), sampling=sampling)


@no_stand_in
async def test_distances_of_other_shapes(device: ta.Device) -> None:
    far = np.ones((70, 90))
    far[3, 80] = 0
    for x in (far, far.T, blobs((9, 10, 11), 0.97), blobs((200,), 0.9), np.ones((0, 4))):
        await compare(device, "distance_transform_edt", x)


async def test_positions_are_at_the_reported_distances(device: ta.Device) -> None:
    x, size = blobs((20, 21, 6), 0.97), np.array([1.0, 0.5, 3.0])
    found: Any = await ndimage.distance_transform_edt(
        await device.put(x), sampling=size.tolist(), return_indices=True
    )
    distances, places = [await one.to_host() for one in found]
    assert places.dtype == np.int32
    assert not x[tuple(places)].any()
    away = (places - np.indices(x.shape)) * size.reshape(3, 1, 1, 1)
    np.testing.assert_allclose(np.sqrt((away**2).sum(0)), distances, rtol=1e-12)
    only = await ndimage.distance_transform_edt(
        await device.put(x), return_distances=False, return_indices=True
    )
    assert isinstance(only, ta.AccelRef)
    assert only.shape == (3, *x.shape)


async def test_nothing_to_be_near_to(device: ta.Device) -> None:
    got = await ndimage.distance_transform_edt(await device.put(np.ones((4, 5))))
    assert isinstance(got, ta.AccelRef)
    assert np.isinf(await got.to_host()).all()


STRUCTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "cross": (None, {}),
    "all": (np.ones((3, 3)), {"border_value": 1}),
    "even": (np.ones((2, 4)), {"origin": (0, 1)}),
    "without its middle": (np.array([[1, 0, 1]]), {"iterations": 2}),
    "until nothing changes": (None, {"iterations": 0, "mask": blobs(share=0.7, seed=4)}),
    "large": (np.ones((9, 5)), {"iterations": 2}),
}


@pytest.mark.parametrize("name", ["binary_erosion", "binary_dilation"])
@pytest.mark.parametrize("case", ["cross"] if IS_STAND_IN else STRUCTURES)
async def test_structures(device: ta.Device, name: str, case: str) -> None:
    structure, kwargs = STRUCTURES[case]
    x = blobs(share=0.05 if "until" in case else 0.5)
    wanted = getattr(scipy.ndimage, name)(x, structure, **kwargs)
    given = {key: await device.put(one) if key == "mask" else one for key, one in kwargs.items()}
    got = await getattr(ndimage, name)(await device.put(x), structure, **given).to_host()
    assert np.array_equal(got, wanted)


async def test_a_cyclic_image_ends(device: ta.Device) -> None:
    # Each erosion swaps the two, so there is nothing that stays. SciPy's looks for it without an end.
    ref = await device.put(np.array([0, 1, 0, 1]))
    found = await ndimage.binary_erosion(ref, [1, 0, 1], 0, border_value=1).to_host()
    assert found.tolist() in ([False, True, False, True], [True, False, True, False])


async def test_a_truth_value_beyond_the_edges(device: ta.Device) -> None:
    for value in (True, False):
        await compare(device, "binary_erosion", blobs(), border_value=value)


@no_stand_in
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("structure", ["last axis", "no last axis", "diagonals", "alone", "one diagonal"])
async def test_labels_by_structures(device: ta.Device, structure: str, seed: int) -> None:
    near = np.zeros((3, 3, 3), int)
    near[1, 1, 1] = 1
    if structure == "last axis":
        near[1, 1] = 1
    elif structure == "no last axis":
        near[:, 1, 1] = near[1, :, 1] = 1
    elif structure == "diagonals":
        near[::2, ::2, ::2] = 1
    elif structure == "one diagonal":
        near[0, 0, 2] = near[2, 2, 0] = near[1, 1, 0] = near[1, 1, 2] = 1
    for share in (0.3, 0.6, 0.9):
        await compare(device, "label", blobs((7, 8, 9), share, seed), near)


async def test_a_cancelled_label_leaves_nothing_behind(device: ta.Device) -> None:
    ref = await device.put(spiral(301))
    for deadline in (0, 0.001, 0.003, 0.01):
        with trio.move_on_after(deadline):
            await ndimage.label(ref)
    assert (await ndimage.label(ref)).num_features == 1


REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "shape": ("label", (np.ones((3, 2)),), {}, ValueError, r"structure must have shape \(3, 3\)"),
    "sides": ("label", ([[1, 0, 0], [0, 1, 0], [0, 0, 0]],), {}, ValueError, "the same on opposite sides"),
    "axes": (
        "binary_erosion",
        (np.ones(3),),
        {},
        ValueError,
        r"structure must have 2 axes .* got \[True",
    ),
    "mask": ("binary_dilation", (), {"mask": np.ones((60, 71))}, TypeError, "mask must be an AccelRef"),
    "iterations": ("binary_erosion", (), {"iterations": 1.5}, TypeError, "iterations must be an integer"),
    "origin": ("binary_erosion", (), {"origin": 2}, ValueError, "origin from -1 to 1 for 3, got 2"),
    "nothing": ("distance_transform_edt", (), {"return_distances": False}, ValueError, "must be True"),
    "sampling": (
        "distance_transform_edt",
        ((1, 2, 3),),
        {},
        ValueError,
        "sampling must be one, or one for each of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_arguments_are_reported_with_the_functions_name(device: ta.Device, case: str) -> None:
    name, args, kwargs, error, text = REFUSED[case]
    with pytest.raises(error, match=text) as refusal:
        await getattr(ndimage, name)(await device.put(blobs()), *args, **kwargs)
    assert name in str(refusal.value)
