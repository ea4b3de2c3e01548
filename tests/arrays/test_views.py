"""Views: the elements of NumPy's views of the same array, in the same memory, and nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trio_accel as ta
from trio_accel import arrays

INLINE = ta.DeviceOptions(isolation="inline")
windows = np.lib.stride_tricks.sliding_window_view

# Of an array of shape (2, 3, 4) or a part of it: the function, and NumPy's.
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "transpose": (lambda x: x.transpose(2, 0, 1), lambda h: h.transpose(2, 0, 1)),
    "transpose of a tuple": (lambda x: x.transpose((0, -1, 1)), lambda h: h.transpose(0, -1, 1)),
    "mT": (lambda x: x.mT, lambda h: h.mT),
    "permute_dims": (lambda x: arrays.permute_dims(x, (1, 2, 0)), lambda h: h.transpose(1, 2, 0)),
    "moveaxis": (lambda x: arrays.moveaxis(x, 0, -1), lambda h: np.moveaxis(h, 0, -1)),
    "moveaxis of two": (
        lambda x: arrays.moveaxis(x, (0, 1), (1, 2)),
        lambda h: np.moveaxis(h, (0, 1), (1, 2)),
    ),
    "matrix_transpose": (arrays.matrix_transpose, np.matrix_transpose),
    "squeeze": (lambda x: arrays.squeeze(x[:1], 0), lambda h: h[0]),
    "expand_dims": (lambda x: arrays.expand_dims(x, (0, -1)), lambda h: h[None, ..., None]),
    "flip": (arrays.flip, np.flip),
    "flip an axis": (lambda x: arrays.flip(x, -2), lambda h: np.flip(h, -2)),
    "flip axes": (lambda x: arrays.flip(x, (0, 2)), lambda h: np.flip(h, (0, 2))),
    "broadcast_to": (
        lambda x: arrays.broadcast_to(x[:, :1], (5, 2, 3, 4)),
        lambda h: np.broadcast_to(h[:, :1], (5, 2, 3, 4)),
    ),
    "diagonal": (arrays.diagonal, lambda h: np.diagonal(h, 0, -2, -1)),
    "diagonal above": (lambda x: arrays.diagonal(x, offset=2), lambda h: np.diagonal(h, 2, -2, -1)),
    "diagonal below": (lambda x: arrays.diagonal(x, offset=-1), lambda h: np.diagonal(h, -1, -2, -1)),
    "no diagonal": (lambda x: arrays.diagonal(x, offset=9), lambda h: np.diagonal(h, 9, -2, -1)),
    "windows": (lambda x: arrays.sliding_window_view(x, 2, 1), lambda h: windows(h, 2, 1)),
    "windows of two axes": (
        lambda x: arrays.sliding_window_view(x, (2, 3), (0, 2)),
        lambda h: windows(h, (2, 3), (0, 2)),
    ),
    "windows of all": (lambda x: arrays.sliding_window_view(x, (1, 2, 2)), lambda h: windows(h, (1, 2, 2))),
}


@pytest.mark.parametrize("name", CALLS)
async def test_every_view(device: ta.Device, name: str) -> None:
    ours, numpys = CALLS[name]
    host = np.arange(2 * 3 * 4, dtype=np.int32).reshape(4, 3, 2)
    x, host = (await device.put(host)).T[:, ::-1], host.T[:, ::-1]
    launched = (await device.statistics()).launched
    view, want = ours(x), numpys(host)
    assert (await device.statistics()).launched == launched
    assert view.block is x.block
    assert (view.shape, view.dtype) == (want.shape, "int32")
    np.testing.assert_array_equal(await view.to_host(), want)


SEVERAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "unstack": (arrays.unstack, list),
    "unstack the last": (lambda x: arrays.unstack(x, axis=-1), lambda h: list(np.moveaxis(h, -1, 0))),
    "split": (lambda x: arrays.split(x, 3, -1), lambda h: np.split(h, 3, -1)),
    "split at places": (lambda x: arrays.split(x, [1, 1, 4, 9], 1), lambda h: np.split(h, [1, 1, 4, 9], 1)),
    "split at places from the end": (
        lambda x: arrays.split(x, [-2, 3], 2),
        lambda h: np.split(h, [-2, 3], 2),
    ),
    "broadcast_arrays": (
        lambda x: arrays.broadcast_arrays(x[0], x[:, :1]),
        lambda h: np.broadcast_arrays(h[0], h[:, :1]),
    ),
    "broadcast_arrays of one": (arrays.broadcast_arrays, np.broadcast_arrays),
    "meshgrid": (
        lambda x: arrays.meshgrid(x[0, 0], x[0, :, 0], x[:, 0, 0]),
        lambda h: np.meshgrid(h[0, 0], h[0, :, 0], h[:, 0, 0]),
    ),
    "meshgrid ij": (
        lambda x: arrays.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
        lambda h: np.meshgrid(h[0, 0], h[0, :, 0], indexing="ij"),
    ),
    "meshgrid of one": (lambda x: arrays.meshgrid(x[0, 0]), lambda h: np.meshgrid(h[0, 0])),
    "meshgrid of a number": (
        lambda x: arrays.meshgrid(x[0, 0], x[0, 0, 0, ...]),
        lambda h: np.meshgrid(h[0, 0], h[0, 0, 0]),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
async def test_several_views(device: ta.Device, name: str) -> None:
    ours, numpys = SEVERAL[name]
    host = np.arange(2 * 5 * 6.0).reshape(2, 5, 6)
    x = await device.put(host)
    views, want = ours(x), numpys(host)
    assert len(views) == len(want)
    # By the standard; it does not have NumPy's `split`.
    assert isinstance(views, list if "split" in name else tuple)
    for view, one in zip(views, want, strict=True):
        assert view.shape == one.shape
        assert view.block is x.block
        np.testing.assert_array_equal(await view.to_host(), one)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
async def test_any_order_of_axes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    source = data.draw(st.integers(-len(shape), len(shape) - 1))
    async with ta.open_system("views") as system, system.open_device(BACKEND, options=INLINE) as device:
        x = await device.put(host)
        np.testing.assert_array_equal(await arrays.permute_dims(x, axes).to_host(), host.transpose(axes))
        moved = arrays.moveaxis(arrays.flip(x, source), source, axes[0])
        want = np.moveaxis(np.flip(host, source), source, axes[0])
        np.testing.assert_array_equal(await moved.to_host(), want)
        assert (await device.statistics()).memory.blocks == 1


async def test_reshape(device: ta.Device) -> None:
    host = np.arange(12.0).reshape(3, 4)
    x = await device.put(host)
    view = await arrays.reshape(x, (2, -1))
    assert view.block is x.block
    copied = await arrays.reshape(x.T, 12)
    assert copied.block is not x.block
    np.testing.assert_array_equal(await copied.to_host(), host.T.reshape(12))
    copied = await arrays.reshape(x, (4, 3), copy=True)
    assert copied.block is not x.block
    np.testing.assert_array_equal(await copied.to_host(), host.reshape(4, 3))
    assert (await arrays.reshape(x, 12, copy=False)).block is x.block
    with pytest.raises(ValueError, match="cannot be viewed as shape"):
        await arrays.reshape(x.T, 12, copy=False)
    launched = (await device.statistics()).launched
    for copy in (None, False):
        with pytest.raises(ValueError, match="cannot reshape array of size 12"):
            await arrays.reshape(x.T, 5, copy=copy)
    assert (await device.statistics()).launched == launched


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "transpose": (lambda x: x.transpose(0, 0), ValueError, r"once, got \(0, 0\)"),
    "mT": (lambda x: x[0].mT, ValueError, "matrix transpose"),
    "permute_dims": (lambda x: arrays.permute_dims(x, (0,)), ValueError, r"arrays\.permute_dims: axes"),
    "moveaxis": (
        lambda x: arrays.moveaxis(x, 2, 0),
        ValueError,
        r"arrays\.moveaxis: .*axis 2 is out of bounds",
    ),
    "squeeze": (lambda x: arrays.squeeze(x, 0), ValueError, r"arrays\.squeeze: cannot select an axis"),
    "expand_dims": (lambda x: arrays.expand_dims(x, 9), ValueError, r"arrays\.expand_dims: axis 9"),
    "flip": (lambda x: arrays.flip(x, (0, 0)), ValueError, r"arrays\.flip: repeated axis"),
    "broadcast_to": (lambda x: arrays.broadcast_to(x, (2, 5)), ValueError, r"arrays\.broadcast_to: "),
    "broadcast_arrays": (
        lambda x: arrays.broadcast_arrays(x, x[:, :3]),
        ValueError,
        r"arrays\.broadcast_arrays: ",
    ),
    "meshgrid": (
        lambda x: arrays.meshgrid(x, x),
        ValueError,
        r"arrays\.meshgrid: each array must be a vector or a scalar",
    ),
    "meshgrid of another kind": (
        lambda x: arrays.meshgrid(x[0], indexing="yx"),
        ValueError,
        "must be 'xy' or 'ij'",
    ),
    "diagonal": (lambda x: arrays.diagonal(x[0]), ValueError, r"arrays\.diagonal: "),
    "large window": (
        lambda x: arrays.sliding_window_view(x, 4, 0),
        ValueError,
        r"arrays\.sliding_window_view: ",
    ),
    "no window": (
        lambda x: arrays.sliding_window_view(x, 0, 0),
        ValueError,
        "window_shape must be at least 1",
    ),
    "unstack": (
        lambda x: arrays.unstack(x, axis=2),
        ValueError,
        r"arrays\.unstack: axis 2 is not there in an array of shape \(3, 4\)",
    ),
    "split": (
        lambda x: arrays.split(x, 2),
        ValueError,
        r"arrays\.split: 3 elements are not divided into 2 parts",
    ),
    "split into none": (lambda x: arrays.split(x, 0), ValueError, "into 0 parts"),
    "a host array": (
        lambda x: arrays.flip(np.zeros(3)),
        TypeError,
        r"arrays\.flip: x must be an AccelRef, got ndarray",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_invalid_arguments_are_refused(device: ta.Device, name: str) -> None:
    call, error, text = WRONG[name]
    x = await device.zeros((3, 4))
    with pytest.raises(error, match=text):
        call(x)


async def test_operations_read_windows_and_broadcast_arrays(device: ta.Device) -> None:
    host = np.random.default_rng(2).normal(size=(4, 40))
    x = await device.put(host)
    means = await arrays.sum(arrays.sliding_window_view(x, 5, 1), -1)
    np.testing.assert_allclose(await means.to_host(), windows(host, 5, 1).sum(-1), rtol=1e-12)
    wide = arrays.broadcast_to(x[:1], (4, 40))
    np.testing.assert_array_equal(await (await arrays.add(x, wide)).to_host(), host + host[:1])
    np.testing.assert_array_equal(await (await wide.copy()).to_host(), np.broadcast_to(host[:1], (4, 40)))
    product = await ta.linalg.matmul(wide, x.T)
    np.testing.assert_allclose(
        await product.to_host(), np.broadcast_to(host[:1], (4, 40)) @ host.T, rtol=1e-12
    )
