from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType, LibraryError
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopySpec,
    CopyToHostSpec,
    FillSpec,
)

FLOAT8 = {DType.float8_e4m3fn: ml_dtypes.float8_e4m3fn, DType.float8_e5m2: ml_dtypes.float8_e5m2}


def random_bits(count, dtype):
    """Any bit pattern that the type has, NaNs that signal among them."""
    if dtype is DType.bool:
        return np.arange(count) % 3 == 0
    data = np.random.default_rng(1).integers(0, 256, count * dtype.itemsize, np.uint8)
    return data.view(dtype.dtype)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("count", [0, 1, 255, 100_001])
def test_every_dtype_is_copied_there_and_back_bit_exact(rig, dtype, count):
    host = random_bits(count, dtype)
    assert rig.get(rig.put(host)).tobytes() == host.tobytes()


@pytest.mark.parametrize("dtype", list(DType))
def test_a_copy_on_the_device_is_bit_exact(rig, dtype):
    host = random_bits(5000, dtype)
    source, out = rig.put(host), rig.empty((5000,), dtype)
    rig.enqueue("memory", CopySpec(source, out))
    assert rig.get(out).tobytes() == host.tobytes()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_256_codes_of_float8_equal_ml_dtypes(rig, dtype):
    codes = np.arange(256, dtype=np.uint8).view(FLOAT8[dtype])
    wide = rig.empty((256,), DType.float32)
    source = rig.put(codes)
    rig.enqueue("memory", CopySpec(source, wide))
    np.testing.assert_array_equal(rig.get(wide), codes.astype(np.float32))
    narrow = rig.empty((256,), dtype)
    rig.enqueue("memory", CopySpec(wide, narrow))
    np.testing.assert_array_equal(rig.get(narrow).astype(np.float32), codes.astype(np.float32))
    assert rig.get(source).tobytes() == bytes(range(256))


@pytest.mark.parametrize("dtype", [DType.float8_e4m3fn, DType.float8_e5m2, DType.bfloat16, DType.float16])
def test_rounding_to_low_precision_equals_the_host_type(rig, dtype, random_array):
    host = random_array((20_000,), DType.float32) * np.float32(3)
    out = rig.empty(host.shape, dtype)
    rig.enqueue("memory", CopySpec(rig.put(host), out))
    assert rig.get(out).tobytes() == host.astype(dtype.dtype).tobytes()


@pytest.mark.parametrize("source", list(DType))
@pytest.mark.parametrize("target", list(DType))
def test_conversion_between_all_pairs(rig, source, target):
    numbers = [0, 1, 2, 3, 5] + ([] if source.kind in ("uint", "bool") else [-1, -4])
    host = np.array(numbers, np.float32).astype(source.dtype)
    if source.kind != "bool" and target.kind == "uint":
        host = host[host.astype(np.float32).real >= 0] if source.kind != "complex" else host[host.real >= 0]
    out = rig.empty(host.shape, target)
    rig.enqueue("memory", CopySpec(rig.put(host), out))
    real = host.real.astype(np.float64) if source.kind == "complex" else host.astype(np.float64)
    expected = (real != 0) if target.kind == "bool" else real
    wide = np.complex128 if target.kind == "complex" else np.float64
    np.testing.assert_array_equal(rig.get(out).astype(wide), expected.astype(wide))


@st.composite
def layouts(draw):
    """A host array with steps, reversals, permuted axes, broadcast never (it could not be written)."""
    ndim = draw(st.integers(1, 4))
    base = np.arange(1, 1 + np.prod(shape := draw(st.tuples(*[st.integers(1, 6)] * ndim)))).reshape(shape)
    steps = draw(st.tuples(*[st.sampled_from([1, 2, 3, -1, -2])] * ndim))
    view = base[tuple(slice(None, None, step) for step in steps)]
    return view.transpose(draw(st.permutations(range(ndim))))


@settings(max_examples=60, deadline=None)
@given(host=layouts(), target=layouts())
def test_any_layout_on_either_side(open_rig, host, target):
    with open_rig() as rig:
        array = rig.put_as_laid_out(host)
        back = np.zeros_like(target, shape=host.shape)
        rig.apply("memory", CopyToHostSpec(back, array))
        np.testing.assert_array_equal(back, host)
        # The bytes between the elements are unchanged.
        block = ArraySpec(rig.allocate(target.base.nbytes), 0, DType.int64, (target.base.size,), (8,))
        offset = target.ctypes.data - target.base.ctypes.data
        written = ArraySpec(block.block, offset, DType.int64, target.shape, target.strides)
        rig.enqueue("memory", FillSpec(-1, block))
        rig.enqueue("memory", CopyFromHostSpec(target, written))
        expected = np.full_like(target.base, -1).reshape(-1)
        picked = set(target.reshape(-1).tolist())
        expected = np.where(np.isin(target.base.reshape(-1), list(picked)), target.base.reshape(-1), -1)
        np.testing.assert_array_equal(rig.get(block), expected)


@st.composite
def large_layouts(draw):
    """Two layouts of one shape: indices of elements in separate buffers, all of them different."""
    dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "float64", "complex128"]).map(DType))
    ndim = draw(st.integers(1, 4))
    sides = [1, 2, 3, 4, 8, 12] if ndim > 2 else [1, 2, 8, 64, 130]
    shape = draw(st.lists(st.sampled_from(sides), min_size=ndim, max_size=ndim))
    for axis in draw(st.lists(st.integers(0, ndim - 1), max_size=2, unique=True)):
        shape[axis] = draw(st.sampled_from([15, 16, 17, 32, 33, 70]))

    def layout():
        order = draw(st.permutations(range(ndim)))
        gaps = draw(st.sampled_from([(0,) * ndim, (0,) * (ndim - 1) + (1,), (1,) + (0,) * (ndim - 1)]))
        padded = [shape[axis] + gap * draw(st.integers(1, 4)) for axis, gap in zip(order, gaps, strict=True)]
        first = draw(st.sampled_from([0, 0, 1, 4]))
        places = np.arange(first, first + math.prod(padded)).reshape(padded)
        places = places[tuple(slice(shape[axis]) for axis in order)].transpose(np.argsort(order))
        flips = draw(st.sampled_from([1, 1, 1, -1]))
        return places[..., ::flips], first + math.prod(padded)

    return dtype, layout(), layout()


@settings(max_examples=80, deadline=None)
@given(drawn=large_layouts())
def test_a_copy_to_another_layout_moves_each_element_and_nothing_else(open_rig, drawn):
    dtype, (places_in, size_in), (places_out, size_out) = drawn
    host = random_bits(size_in, dtype)
    with open_rig() as rig:
        source, out = rig.put(host), rig.put(random_bits(size_out, dtype)[::-1].copy())
        before = rig.get(out)

        def part(block, places):
            strides = tuple(step // 8 * dtype.itemsize for step in places.strides)
            offset = block.offset + int(places.flat[0]) * dtype.itemsize
            return ArraySpec(block.block, offset, dtype, places.shape, strides)

        rig.enqueue("memory", CopySpec(part(source, places_in), part(out, places_out)))
        expected = before.copy()
        expected[places_out] = host[places_in]
        assert rig.get(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [DType.int8, DType.float16, DType.float32, DType.int64, DType.complex128])
@pytest.mark.parametrize("first", [0, 1])
def test_windows_that_overlap_are_copied(rig, dtype, first):
    host = random_bits(200, dtype)
    windows = np.lib.stride_tricks.sliding_window_view(host[first:], 64)[:128]
    source = rig.put(host)
    for axes in ((0, 1), (1, 0)):
        view = windows.transpose(axes)
        given = ArraySpec(
            source.block, source.offset + first * dtype.itemsize, dtype, view.shape, view.strides
        )
        out = rig.empty(view.shape, dtype)
        rig.enqueue("memory", CopySpec(given, out))
        assert rig.get(out).tobytes() == np.ascontiguousarray(view).tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (DType.int64, 2**53 + 1),
        (DType.int64, -(2**63)),
        (DType.uint64, 2**64 - 1),
        (DType.int8, -128),
        (DType.bool, True),
        (DType.bool, False),
        (DType.float64, 0.1),
        (DType.float64, -0.0),
        (DType.float32, float("inf")),
        (DType.float16, 65504.0),
        (DType.bfloat16, 1.5),
        (DType.float8_e4m3fn, -448.0),
        (DType.float8_e5m2, 57344.0),
        (DType.complex64, 1 - 2j),
        (DType.complex128, complex(0.1, -0.0)),
        (DType.float32, 2 + 0j),
        (DType.int32, 7 + 0j),
    ],
)
def test_fill_is_exact(rig, dtype, value):
    out = rig.empty((300,), dtype)
    rig.apply("memory", FillSpec(value, out))
    host_value = value if dtype.kind == "complex" or not isinstance(value, complex) else value.real
    assert rig.get(out).tobytes() == np.full(300, host_value, dtype.dtype).tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(DType.int8, 128), (DType.uint64, -1), (DType.float64, 1j), (DType.int64, float("nan"))],
)
def test_a_value_that_the_type_cannot_hold_is_refused(rig, dtype, value):
    out = rig.put(np.zeros(3, dtype.dtype))
    with pytest.raises(LibraryError, match="value"):
        rig.apply("memory", FillSpec(value, out))
    assert (rig.get(out) == 0).all()


def test_an_array_of_the_host_may_be_of_any_strides(rig, random_array):
    host = random_array((40, 50), DType.bfloat16)[::-3, 1::2].T
    assert rig.get(rig.put(host)).tobytes() == np.ascontiguousarray(host).tobytes()
