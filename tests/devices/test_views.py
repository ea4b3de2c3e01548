"""Views: the same elements as NumPy's views of the same array, over one block of memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trio_accel as ta

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def _numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), shape=SHAPES)
async def test_chains_of_views_match_numpy(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host = _numbers(shape)
    async with ta.open_system("views") as system, system.open_device(BACKEND, options=INLINE) as device:
        ref = await device.put(host)
        expected = host
        for _ in range(3):
            if data.draw(st.booleans()):
                ref, expected = ref.T, expected.T
            index = data.draw(
                hnp.basic_indices(expected.shape, allow_newaxis=True, allow_ellipsis=True, max_dims=6)
            )
            ref, expected = ref[index], np.asarray(expected[index])
        assert (ref.shape, ref.ndim, ref.size) == (expected.shape, expected.ndim, expected.size)
        np.testing.assert_array_equal(await ref.to_host(), expected)
        assert (await device.statistics()).memory.blocks == 1


async def test_reshape(device: ta.Device) -> None:
    shapes: list[tuple[int, ...]] = [(6, 4), (-1,), (2, -1, 4), (24, 1), ()]
    for shape in shapes:
        host = _numbers((2, 3, 4)) if shape else _numbers((1, 1))
        ref = await device.put(host)
        np.testing.assert_array_equal(await ref.reshape(shape).to_host(), host.reshape(shape))
        if shape:
            np.testing.assert_array_equal(await ref.reshape(*shape).to_host(), host.reshape(shape))


async def test_a_reshape_reports_that_it_needs_a_copy(device: ta.Device) -> None:
    ref = await device.put(_numbers((3, 4)))
    with pytest.raises(ValueError, match=r"cannot be viewed as shape \(12,\); reshape a copy"):
        ref.T.reshape(12)
    np.testing.assert_array_equal(
        await (await ref.T.copy()).reshape(12).to_host(), _numbers((3, 4)).T.reshape(12)
    )
    with pytest.raises(ValueError, match="cannot reshape array of size 12 into shape"):
        ref.reshape(5)


OTHER_INDICES: list[tuple[Any, type[Exception], str]] = [
    ([0, 1], TypeError, r"\[0, 1\] would make a copy"),
    (np.array([True, False, True]), TypeError, "would make a copy"),
    (True, TypeError, "True would make a copy"),
    ("a", TypeError, "'a' would make a copy"),
    (3, IndexError, "index 3 is out of bounds"),
    (2**63, IndexError, "out of bounds"),
    ((0, -(2**70)), IndexError, "out of bounds"),
    ((0, 0, 0), IndexError, "too many indices"),
    (np.array(3), IndexError, "index 3 is out of bounds"),
    (np.array(2**64 - 1, np.uint64), IndexError, "out of bounds"),
    (10**5000, IndexError, "index a number of 16610 bits is out of bounds"),
    ([10**5000], TypeError, "an object of list would make a copy"),
    (np.array(1.0), TypeError, "would make a copy"),
    (np.array(True), TypeError, "would make a copy"),
]


async def test_other_indices_are_refused(device: ta.Device) -> None:
    ref = await device.put(_numbers((3, 4)))
    for index, error, text in OTHER_INDICES:
        with pytest.raises(error, match=text):
            ref[index]


WHOLE = [make(number) for make in (int, np.int8, np.uint64, np.array) for number in (0, 1)]
WHOLE += [np.array(2, np.uint8), np.array(-1, np.int8), np.int64(-3)]


@pytest.mark.parametrize("whole", WHOLE, ids=lambda one: f"{type(one).__name__} {one!r}")
async def test_an_integer_of_any_type_is_an_index(device: ta.Device, whole: Any) -> None:
    """NumPy copies for an integer in an array, so a view read off its copy has another address."""
    host, number = _numbers((3, 4, 5)), int(whole)
    ref = await device.put(host)
    for index, plain in (
        (whole, number),
        ((whole, whole), (number, number)),
        ((..., whole), (..., number)),
        ((slice(None), whole, None), (slice(None), number, None)),
        (slice(whole, None), slice(number, None)),
    ):
        np.testing.assert_array_equal(await ref[index].to_host(), host[plain])
        np.testing.assert_array_equal(await ref[::-1][index].to_host(), host[::-1][plain])
        np.testing.assert_array_equal(await (ref + ref)[index].to_host(), (host + host)[plain])


HUGE = 10**5000


@pytest.mark.parametrize("size", [-1, True, 1.0, 2**63, 2**64, HUGE, -HUGE], ids=map(str, range(7)))
async def test_sizes_that_do_not_exist_are_refused(device: ta.Device, size: Any) -> None:
    for shape in ((size,), [2, size], (0, size)):
        for make in (device.zeros, device.empty, lambda given: device.full(given, 1)):
            with pytest.raises(ValueError, match=r"shape must hold sizes from 0 to 2\*\*63 - 1, got "):
                await make(shape)
    assert device.generation == 1


async def test_a_view_is_changed_in_place_and_leaves_the_rest(device: ta.Device) -> None:
    host = np.arange(20.0).reshape(4, 5)
    ref = await device.put(host)
    await ta.linalg.scal(10.0, ref[1::2, ::-2])
    await ref[0].fill(-1.0)
    host[1::2, ::-2] *= 10.0
    host[0] = -1.0
    np.testing.assert_array_equal(await ref.to_host(), host)


async def test_operations_take_views(device: ta.Device) -> None:
    rng = np.random.default_rng(1)
    host = rng.standard_normal((6, 8))
    ref = await device.put(host)
    product = await ta.linalg.matmul(ref[:, ::2], ref.T[1:5, 1:])
    np.testing.assert_allclose(await product.to_host(), host[:, ::2] @ host.T[1:5, 1:], rtol=1e-12)
    product = await ta.linalg.gemm(2.0, ref[::-1], ref.T[:, 2:4], trans_a="N")
    np.testing.assert_allclose(await product.to_host(), 2 * host[::-1] @ host.T[:, 2:4], rtol=1e-12)
    spectrum = await ta.fft.fft(ref[::2, 1:].T, axis=0)
    np.testing.assert_allclose(await spectrum.to_host(), np.fft.fft(host[::2, 1:].T, axis=0), atol=1e-12)
    dot = await ta.linalg.dot(ref[0, ::2], ref[::-1, 3][:4])
    assert await dot.item() == pytest.approx(host[0, ::2] @ host[::-1, 3][:4], rel=1e-12)


async def test_parts_that_do_not_meet_may_be_read_and_written_at_once(device: ta.Device) -> None:
    ref = await device.put(np.arange(8.0))
    await ta.linalg.axpy(1.0, ref[:4], ref[4:])
    np.testing.assert_array_equal(await ref.to_host(), [0, 1, 2, 3, 4, 6, 8, 10])
    with pytest.raises(ValueError, match="y must not share memory with x"):
        await ta.linalg.axpy(1.0, ref[:5], ref[3:])


PLACES = {
    "steps": np.s_[::4, ::2],
    "part of rows": np.s_[2:4, 1:5],
    "from the end": np.s_[-1:-3:-1, ::-2],
    "columns": np.s_[:2, 3:7],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_transposed", [False, True])
async def test_products_and_expressions_write_to_views(
    device: ta.Device, place: str, is_transposed: bool
) -> None:
    rng = np.random.default_rng(2)
    for dtype in ("float64", "float32", "complex64", "float16"):
        a, b = rng.standard_normal((2, 3)).astype(dtype), rng.standard_normal((3, 4)).astype(dtype)
        wanted = np.zeros((8, 8), dtype)
        base = await device.put(wanted)
        out = (base.T if is_transposed else base)[PLACES[place]]
        into = (wanted.T if is_transposed else wanted)[PLACES[place]]
        assert await ta.linalg.matmul(a, b, out=out) is out
        into[...] = a @ b
        np.testing.assert_allclose(await base.to_host(), wanted, rtol=2e-2 if dtype == "float16" else 1e-5)
        assert await ta.jit.elementwise("x + i(1)")(out, out=out) is out
        into += np.arange(4)
        np.testing.assert_allclose(await base.to_host(), wanted, rtol=2e-2 if dtype == "float16" else 1e-5)


async def test_stacks_and_whole_numbers_are_multiplied_into_views(device: ta.Device) -> None:
    for dtype, shape in (("float64", (5, 2, 2)), ("int64", (2, 2))):
        host = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
        a, big = await device.put(host), await device.zeros((*shape[:-1], 4), dtype)
        await ta.linalg.matmul(a, a, out=big[..., ::2])
        got = await big.to_host()
        np.testing.assert_array_equal(got[..., ::2], host @ host)
        assert not got[..., 1::2].any()


async def test_a_view_keeps_the_memory_and_shares_its_fate(device: ta.Device) -> None:
    ref = await device.put(np.arange(6.0))
    view = ref[2:]
    del ref
    await device.synchronize()
    np.testing.assert_array_equal(await view.to_host(), [2, 3, 4, 5])
    other = view[1:]
    view.release()
    with pytest.raises(ta.StaleRefError, match="released"):
        await other.to_host()


async def test_a_view_is_not_iterated_by_accident(device: ta.Device) -> None:
    ref = await device.put(np.arange(3.0))
    with pytest.raises(TypeError, match="not iterable"):
        list(ref)
