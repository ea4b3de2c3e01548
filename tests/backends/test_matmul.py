from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType, NotSupportedError
from trio_accel.backends.base.contract.ops import MatmulSpec

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def multiply(rig, a, b):
    shape = np.matmul(np.zeros(a.shape), np.zeros(b.shape)).shape
    out = rig.empty(shape, a.dtype)
    rig.enqueue("blas", MatmulSpec(rig.put_as_laid_out(a), rig.put_as_laid_out(b), out))
    return rig.get(out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 1), (1, 1)),
        ((17, 33), (33, 5)),
        ((128, 257), (257, 64)),
        ((5,), (5,)),
        ((5,), (5, 3)),
        ((4, 5), (5,)),
        ((3, 4, 5), (5,)),
        ((5,), (3, 5, 2)),
        ((3, 4, 5), (3, 5, 2)),
        ((2, 1, 4, 5), (3, 5, 2)),
        ((7, 4, 5), (5, 2)),
        ((0, 4), (4, 3)),
        ((4, 0), (0, 3)),
        ((0, 2, 2), (2, 2)),
    ],
)
def test_shapes(rig, random_array, exact, assert_close, dtype, left, right):
    a, b = random_array(left, dtype, 1), random_array(right, dtype, 2)
    assert_close(multiply(rig, a, b), np.matmul(exact(a), exact(b)), left[-1])


@st.composite
def operands(draw):
    """Operands with broadcast batches, transposed, cut out with steps, or reversed."""
    m, k, n = (draw(st.integers(1, 20)) for _ in range(3))
    batch = draw(st.sampled_from([((), ()), ((3,), (3,)), ((2, 1), (3,)), ((), (4,)), ((0,), (1,))]))
    return [draw(_laid_out((*lead, *shape))) for lead, shape in zip(batch, ((m, k), (k, n)), strict=True)]


@st.composite
def _laid_out(draw, shape):
    transposed, step = draw(st.booleans()), draw(st.sampled_from([1, 1, 2, -1]))
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    base = np.zeros((*stored[:-1], stored[-1] * abs(step)))
    base.reshape(-1)[:] = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(base.size)
    view = base[..., ::step]
    return view.swapaxes(-1, -2) if transposed else view


@settings(max_examples=80, deadline=None)
@given(pair=operands(), dtype=st.sampled_from(["float64", "float32", "bfloat16"]))
def test_layouts(open_rig, exact, assert_close, pair, dtype):
    a, b = (_retyped(operand, dtype) for operand in pair)
    with open_rig() as rig:
        assert_close(multiply(rig, a, b), np.matmul(exact(a), exact(b)), a.shape[-1])


def _retyped(view, dtype):
    """The same numbers and the same layout (in elements) in another type."""
    base = view
    while base.base is not None:
        base = base.base
    retyped = base.reshape(-1).astype(DType(dtype).dtype)
    strides = tuple(stride // view.itemsize * retyped.itemsize for stride in view.strides)
    offset = (view.ctypes.data - base.ctypes.data) // view.itemsize if view.size else 0
    return np.ndarray(view.shape, retyped.dtype, retyped, offset * retyped.itemsize, strides)


def test_more_pairs_than_anybody_calls_for_one_by_one(rig, random_array, exact, assert_close):
    a, b = random_array((1030, 1, 2, 1), "float32", 1), random_array((1030, 1, 2), "float32", 2)
    assert_close(multiply(rig, a, b), np.matmul(exact(a), exact(b)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_accumulates_in_float32_and_rounds_once(rig, random_array, dtype):
    a, b = random_array((64, 4096), dtype, 1), random_array((4096, 64), dtype, 2)
    result = multiply(rig, a, b)
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64))
    rounded = expected.astype(DType(dtype).dtype).astype(np.float64)
    # Sums of 4096 in the low precision would be off by far more than one rounding.
    spacing = np.abs(expected) * float(np.finfo(np.float16).eps if dtype == "float16" else 2.0**-7)
    assert (np.abs(result.astype(np.float64) - rounded) <= spacing + 1e-3).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_and_wrap_around(rig, dtype):
    if dtype not in {str(name) for name in _supported(rig)}:
        pytest.skip("this backend multiplies no integers")
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    a = rng.integers(info.min, info.max, (9, 11), dtype, endpoint=True)
    b = rng.integers(info.min, info.max, (11, 7), dtype, endpoint=True)
    expected = [
        [sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) % 2**info.bits for column in b.T]
        for row in a
    ]
    wrapped = np.array(expected, np.uint64).astype(f"u{info.bits // 8}").view(dtype)
    np.testing.assert_array_equal(multiply(rig, a, b), wrapped)


def _supported(rig):
    for dtype in DType:
        array = rig.put(np.ones((1, 1)).astype(dtype.dtype))
        try:
            rig.enqueue("blas", MatmulSpec(array, array, rig.empty((1, 1), dtype)))
        except NotSupportedError:
            continue
        yield dtype


def test_an_unsupported_product_is_named_and_nothing_runs(rig, backend):
    a, out = rig.put(np.ones((2, 2), DType.bool.dtype)), rig.put(np.zeros((2, 2), bool))
    with pytest.raises(NotSupportedError, match=r"matmul.*bool") as caught:
        rig.enqueue("blas", MatmulSpec(a, a, out))
    assert caught.value.backend == backend.name
    assert caught.value.device == rig.device.info.name
    assert not rig.get(out).any()


def test_operands_of_different_types_are_refused(rig):
    a, b = rig.put(np.ones((2, 2))), rig.put(np.ones((2, 2), np.float32))
    with pytest.raises(NotSupportedError, match=r"float64.*float32"):
        rig.enqueue("blas", MatmulSpec(a, b, rig.empty((2, 2), "float64")))
