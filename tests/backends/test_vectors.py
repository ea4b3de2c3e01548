from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel import linalg
from trio_accel.backends.base import DType, LibraryError, NotSupportedError

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
REAL = {"complex64": "float32", "complex128": "float64"}
LENGTHS = [0, 1, 3, 255, 1025, 300_001]


def alpha_for(dtype):
    return 1.5 - 0.5j if dtype in REAL else 1.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_axpy(rig, random_array, exact, assert_close, dtype, length):
    x, y = random_array((length,), dtype, 1), random_array((length,), dtype, 2)
    device_x, device_y = rig.put(x), rig.put(y)
    rig.enqueue("blas", linalg.axpy.spec(alpha_for(dtype), device_x, device_y))
    assert_close(rig.get(device_y), alpha_for(dtype) * exact(x) + exact(y))
    assert rig.get(device_x).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_scal(rig, random_array, exact, assert_close, dtype, length):
    x = random_array((length,), dtype)
    device_x = rig.put(x)
    rig.enqueue("blas", linalg.scal.spec(alpha_for(dtype), device_x))
    assert_close(rig.get(device_x), alpha_for(dtype) * exact(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_scal_of_an_array_of_another_rank_keeps_the_signs_of_zeros(rig, dtype):
    zeros = np.array([0.0, -0.0] * 12, DType(dtype).dtype).reshape(2, 3, 4)
    device_x = rig.put_as_laid_out(np.repeat(zeros, 2, axis=1)[:, ::2, ::3])
    for alpha in (2.0, -1.0):
        before = np.signbit(rig.get(device_x))
        rig.enqueue("blas", linalg.scal.spec(alpha, device_x))
        assert (np.signbit(rig.get(device_x)) == (before != (alpha < 0))).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_dot(rig, random_array, exact, assert_close, dtype, length):
    # Between 0 and 1 for float16, because its largest number is 65504.
    x, y = (
        np.asarray(random_array((length,), dtype, seed) / 4).astype(DType(dtype).dtype) for seed in (1, 2)
    )
    out = rig.empty((), dtype)
    rig.enqueue("blas", linalg.dot.spec(rig.put(x), rig.put(y), out))
    assert_close(rig.get(out), np.asarray(np.sum(exact(x) * exact(y))), length)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_nrm2(rig, random_array, exact, assert_close, dtype, length):
    x = random_array((length,), dtype)
    out = rig.empty((), REAL.get(dtype, dtype))
    rig.enqueue("blas", linalg.nrm2.spec(rig.put(x), out))
    assert_close(rig.get(out), np.asarray(np.linalg.norm(exact(x))), length)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float64", 1e200),
        ("float64", 1e-200),
        ("float64", 5e-324),
        ("complex128", 1e200 + 1e200j),
        ("complex128", 1e-320j),
        ("float32", 1e30),
        ("float32", 1e-30),
        ("float32", 1e-45),
        ("complex64", 1e30 - 1e30j),
        ("bfloat16", 1e30),
        ("complex64", 1e-45j),
        ("bfloat16", 1e-30),
        ("bfloat16", 9e-41),
        ("float16", 6e-8),
        ("float16", 20000.0),
    ],
)
def test_nrm2_of_very_large_and_very_small_numbers(rig, assert_close, dtype, number):
    x = np.full(9, number, DType(dtype).dtype)
    out = rig.empty((), REAL.get(dtype, dtype))
    rig.enqueue("blas", linalg.nrm2.spec(rig.put(x), out))
    single = complex(x[0]) if dtype in REAL else float(x[0])
    ratio = np.asarray(float(rig.get(out)) / (3 * abs(single)))
    assert_close(ratio.astype(DType(REAL.get(dtype, dtype)).dtype), np.asarray(1.0))


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        ("float32", -126),
        ("complex64", -126),
        ("bfloat16", -126),
        ("float64", -1022),
        ("complex128", -1022),
        ("float64", -485),
        ("float32", -52),
    ],
)
@pytest.mark.parametrize(("length", "step"), [(1, 1), (1025, 3), (50_001, 1)])
def test_nrm2_of_numbers_around_the_smallest_normal_one(
    rig, random_array, exact, assert_close, dtype, exponent, length, step
):
    numbers = exact(random_array((length * step,), dtype))
    if dtype in REAL:
        numbers.real, numbers.imag = np.ldexp(numbers.real, exponent), np.ldexp(numbers.imag, exponent)
    else:
        numbers = np.ldexp(numbers, exponent)
    x = numbers.astype(DType(dtype).dtype)[::step]
    out = rig.empty((), REAL.get(dtype, dtype))
    rig.enqueue("blas", linalg.nrm2.spec(rig.put_as_laid_out(x), out))
    # In units of that number, so that larger numbers are above 1.
    large = np.ldexp(np.stack([exact(x).real, exact(x).imag]), -exponent)
    result = np.ldexp(float(rig.get(out)), -exponent)
    assert_close(
        result.astype(DType(REAL.get(dtype, dtype)).dtype), np.asarray(np.linalg.norm(large)), length
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_nrm2_of_zeros(rig, dtype):
    out = rig.put(np.ones((), DType(REAL.get(dtype, dtype)).dtype))
    rig.enqueue("blas", linalg.nrm2.spec(rig.put(np.zeros(3000, DType(dtype).dtype)), out))
    assert float(rig.get(out)) == 0


def test_nrm2_of_large_and_small_numbers_together(rig):
    x = np.array([3e-200, 1e180, 4e-200, 1e180])
    out = rig.empty((), "float64")
    rig.enqueue("blas", linalg.nrm2.spec(rig.put(x), out))
    assert float(rig.get(out)) == pytest.approx(math.sqrt(2) * 1e180, rel=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "bfloat16"])
def test_nrm2_of_infinity_and_of_no_number(rig, dtype):
    for number in (math.inf, -math.inf, math.nan):
        x = np.array([1.0, number, 2.0]).astype(DType(dtype).dtype)
        out = rig.empty((), REAL.get(dtype, dtype))
        rig.enqueue("blas", linalg.nrm2.spec(rig.put(x), out))
        expected = math.nan if math.isnan(number) else math.inf
        np.testing.assert_equal(float(rig.get(out)), expected)


@st.composite
def laid_out_pairs(draw):
    """Two arrays of one shape, each with a layout of its own."""
    shape = draw(st.sampled_from([(7,), (40,), (6, 5), (4, 3, 5)]))
    return [draw(_laid_out(shape, seed)) for seed in (1, 2)]


@st.composite
def _laid_out(draw, shape, seed):
    dtype = np.float64
    step = draw(st.sampled_from([1, 2, 3, -1, -2]))
    is_transposed = draw(st.booleans())
    stored = shape[::-1] if is_transposed else shape
    base = np.random.default_rng(seed).standard_normal((*stored[:-1], stored[-1] * abs(step))).astype(dtype)
    view = base[..., ::step]
    return view.T if is_transposed else view


@settings(max_examples=60, deadline=None)
@given(pair=laid_out_pairs())
def test_layouts_of_axpy_scal_and_nrm2(open_rig, assert_close, pair):
    x, y = pair
    with open_rig() as rig:
        device_x, device_y = rig.put_as_laid_out(x), rig.put_as_laid_out(y)
        norm = rig.empty((), "float64")
        rig.enqueue("blas", linalg.axpy.spec(-2.5, device_x, device_y))
        assert_close(rig.get(device_y), y - 2.5 * x)
        rig.enqueue("blas", linalg.scal.spec(3, device_x))
        assert_close(rig.get(device_x), 3 * x)
        # With more axes it is not a vector: the last of its rows.
        row, place = (
            x.reshape(-1, x.shape[-1])[-1],
            device_x.offset + np.dot(np.subtract(x.shape[:-1], 1), x.strides[:-1]),
        )
        rig.enqueue(
            "blas",
            linalg.nrm2.spec(
                attrs.evolve(device_x, offset=int(place), shape=row.shape, strides=x.strides[-1:]), norm
            ),
        )
        assert_close(rig.get(norm), np.asarray(3 * np.linalg.norm(row)), row.size)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_of_vectors_with_gaps(rig, random_array, exact, assert_close, dtype):
    x, y = random_array((3000,), dtype, 1)[::3], random_array((2000,), dtype, 2)[::-2]
    out = rig.empty((), dtype)
    rig.enqueue("blas", linalg.dot.spec(rig.put_as_laid_out(x), rig.put_as_laid_out(y), out))
    assert_close(rig.get(out), np.asarray(np.sum(exact(x) * exact(y))), 1000)


def test_large_arrays_with_gaps_are_computed_whole(rig, random_array, assert_close):
    x, y = (
        random_array((3, 900, 800), "float64", 1)[:, ::2],
        random_array((3, 450, 1600), "float64", 2)[..., ::2],
    )
    device_x, device_y, norm = rig.put_as_laid_out(x), rig.put_as_laid_out(y), rig.empty((), "float64")
    rig.enqueue("blas", linalg.axpy.spec(2.0, device_x, device_y))
    assert_close(rig.get(device_y), 2.0 * x + y)
    vector = random_array((2_000_000,), "float64", 3)[::2]
    rig.enqueue("blas", linalg.nrm2.spec(rig.put_as_laid_out(vector), norm))
    assert_close(rig.get(norm), np.asarray(np.linalg.norm(vector)), vector.size)


def test_axpy_of_an_array_with_itself_as_input(rig):
    x = rig.put(np.arange(6.0))
    rig.enqueue("blas", linalg.axpy.spec(1.0, x, x))
    np.testing.assert_array_equal(rig.get(x), 2 * np.arange(6.0))


@pytest.mark.parametrize("spec", [lambda x: linalg.axpy.spec(1j, x, x), lambda x: linalg.scal.spec(1j, x)])
def test_a_complex_factor_for_real_numbers_is_refused(rig, spec):
    x = rig.put(np.ones(3))
    with pytest.raises(LibraryError, match="alpha"):
        rig.apply("blas", spec(x))
    assert (rig.get(x) == 1).all()


@pytest.mark.parametrize("dtype", ["int64", "bool", "float8_e5m2"])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("axpy", lambda x, out: linalg.axpy.spec(1.0, x, x)),
        ("scal", lambda x, out: linalg.scal.spec(1.0, x)),
        ("dot", lambda x, out: linalg.dot.spec(x, x, out)),
        ("nrm2", linalg.nrm2.spec),
    ],
)
def test_the_error_names_the_unsupported_option(rig, backend, dtype, name, spec):
    x, out = rig.put(np.ones(3, DType(dtype).dtype)), rig.empty((), dtype)
    with pytest.raises(NotSupportedError, match=rf"{name} for {dtype}") as caught:
        rig.enqueue("blas", spec(x, out))
    assert caught.value.backend == backend.name
    rig.finish(rig.stream)
