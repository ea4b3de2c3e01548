from __future__ import annotations

import math
import re

import attrs
import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType, LibraryError, NotSupportedError
from trio_accel.backends.base.contract.ops import FftSpec, FillSpec

pytestmark = pytest.mark.machine

REFERENCES = {
    ("c2c", "forward"): np.fft.fft,
    ("c2c", "inverse"): np.fft.ifft,
    ("r2c", "forward"): np.fft.rfft,
    ("r2c", "inverse"): np.fft.ihfft,
    ("c2r", "forward"): np.fft.hfft,
    ("c2r", "inverse"): np.fft.irfft,
}
OPPOSITE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
SOURCES = {
    "c2c": ["complex64", "complex128"],
    "r2c": ["float32", "float64"],
    "c2r": ["complex64", "complex128"],
}
RESULTS = {("r2c", "float32"): "complex64", ("r2c", "float64"): "complex128"}
RESULTS |= {("c2r", "complex64"): "float32", ("c2r", "complex128"): "float64"}
CASES = [(kind, direction, dtype) for kind, direction in REFERENCES for dtype in SOURCES[kind]]


def transform(rig, source, kind, direction, n, axis, norm):
    return transform_axes(rig, source, kind, direction, (n,), (axis,), norm)


def transform_axes(rig, source, kind, direction, lengths, axes, norm):
    shape = list(source.shape)
    for n, axis in zip(lengths, axes, strict=True):
        shape[axis] = n
    if kind == "r2c":
        shape[axes[-1]] = lengths[-1] // 2 + 1
    dtype = str(DType.of(source.dtype))
    out = rig.empty(tuple(shape), RESULTS.get((kind, dtype), dtype))
    rig.enqueue("memory", FillSpec(7, out))  # old contents must not count
    rig.enqueue("fft", FftSpec(kind, direction, lengths, axes, norm, rig.put_as_laid_out(source), out))
    return rig.get(out)


def reference_axes(source, kind, direction, lengths, axes, norm):
    """NumPy's transforms of several axes; real ones exist in one direction, and need conjugates."""
    if kind == "c2c":
        function = np.fft.fftn if direction == "forward" else np.fft.ifftn
        return function(source, lengths, axes, norm)
    if kind == "r2c":
        if direction == "forward":
            return np.fft.rfftn(source, lengths, axes, norm)
        return np.conj(np.fft.rfftn(source, lengths, axes, OPPOSITE[norm]))
    if direction == "inverse":
        return np.fft.irfftn(source, lengths, axes, norm)
    return np.fft.irfftn(np.conj(source), lengths, axes, OPPOSITE[norm])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000, 1009])
def test_lengths_and_norms(rig, random_array, exact, assert_close, case, norm, n):
    kind, direction, dtype = case
    source = random_array((3, n // 2 + 1 if kind == "c2r" else n), dtype)
    expected = REFERENCES[kind, direction](exact(source), n, 1, norm)
    assert_close(transform(rig, source, kind, direction, n, 1, norm), expected, n)


@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(CASES),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    n=st.integers(1, 20),
    data=st.data(),
)
def test_axes_cut_padding_and_layouts(open_rig, random_array, exact, assert_close, case, shape, n, data):
    kind, direction, dtype = case
    axis = data.draw(st.integers(0, len(shape) - 1))
    step = data.draw(st.sampled_from([1, 2, -1]))
    stored = random_array((*shape[:-1], shape[-1] * abs(step)), dtype)[..., ::step]
    source = stored.T if data.draw(st.booleans()) else stored
    with open_rig() as rig:
        result = transform(rig, source, kind, direction, n, axis, "backward")
    assert_close(result, REFERENCES[kind, direction](exact(source), n, axis), max(n, *shape))


@settings(max_examples=120, deadline=None)
@given(
    case=st.sampled_from(CASES),
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    norm=st.sampled_from(["backward", "ortho", "forward"]),
    data=st.data(),
)
def test_several_axes(open_rig, random_array, exact, assert_close, case, shape, norm, data):
    kind, direction, dtype = case
    axes = tuple(data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))])
    lengths = tuple(data.draw(st.integers(1, 9)) for _ in axes)
    step = data.draw(st.sampled_from([1, 2, -1]))
    source = random_array((*shape[:-1], shape[-1] * abs(step)), dtype)[..., ::step]
    source = source.T if data.draw(st.booleans()) else source
    with open_rig() as rig:
        result = transform_axes(rig, source, kind, direction, lengths, axes, norm)
    expected = reference_axes(exact(source), kind, direction, lengths, axes, norm)
    assert_close(result, expected, math.prod(lengths))


@pytest.mark.parametrize(("kind", "direction", "dtype"), CASES)
def test_a_result_of_another_layout(rig, random_array, exact, assert_close, kind, direction, dtype):
    source = random_array((6, 5, 4), dtype)
    expected = reference_axes(exact(source), kind, direction, (4, 5, 6), (2, 1, 0), "ortho")
    whole = rig.put(np.zeros((*expected.shape[::-1], 2), RESULTS.get((kind, dtype), dtype)))
    size = whole.dtype.itemsize
    strides = tuple(reversed(whole.strides[:-1]))
    out = attrs.evolve(whole, offset=size, shape=expected.shape, strides=strides)
    rig.enqueue("fft", FftSpec(kind, direction, (4, 5, 6), (2, 1, 0), "ortho", rig.put(source), out))
    assert_close(rig.get(out), expected, 120)
    assert not rig.get(whole)[..., 0].any(), "written between the elements"


@pytest.mark.parametrize(("kind", "direction", "dtype"), CASES)
@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1), (2, 0, 1)])
def test_the_source_is_unchanged(rig, random_array, kind, direction, dtype, axes):
    values = random_array((6, 10, 4), dtype)
    source, shape = rig.put(values), list(values.shape)
    for axis in axes:
        shape[axis] = 6
    if kind == "r2c":
        shape[axes[-1]] = 4
    out = rig.empty(tuple(shape), RESULTS.get((kind, dtype), dtype))
    rig.enqueue("fft", FftSpec(kind, direction, (6,) * len(axes), axes, "ortho", source, out))
    np.testing.assert_array_equal(rig.get(source), values)


@pytest.mark.parametrize(("kind", "direction", "dtype"), CASES)
def test_nothing_but_padding(rig, kind, direction, dtype):
    assert not transform(rig, np.zeros((3, 0), dtype), kind, direction, 8, 1, "backward").any()


@pytest.mark.parametrize(("kind", "direction", "dtype"), CASES)
def test_nothing_to_transform(rig, kind, direction, dtype):
    assert transform(rig, np.zeros((0, 8), dtype), kind, direction, 8, 1, "backward").shape[0] == 0


def test_a_large_batch(rig, random_array, exact, assert_close):
    source = random_array((300, 2048), "float32")
    expected = np.fft.rfft(exact(source))
    assert_close(transform(rig, source, "r2c", "forward", 2048, 1, "backward"), expected, 2048)


def test_parsevals_theorem_at_a_million_points(rig, random_array):
    source = random_array((1_000_000,), "complex128")
    result = transform(rig, source, "c2c", "forward", 1_000_000, 0, "ortho")
    np.testing.assert_allclose(np.linalg.norm(result), np.linalg.norm(source), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "direction", "source", "out"),
    [
        ("r2c", "inverse", "complex128", "complex128"),
        ("c2r", "forward", "float64", "float64"),
        ("c2r", "inverse", "complex128", "float32"),
        ("c2c", "forward", "float64", "complex128"),
        ("c2c", "forward", "complex128", "complex64"),
        ("r2c", "forward", "float16", "complex64"),
        ("r2c", "forward", "float32", "complex128"),
    ],
)
def test_the_error_names_the_unsupported_option(rig, backend, kind, direction, source, out):
    array, result = rig.put(np.zeros(4, source)), rig.empty((3 if kind == "r2c" else 4,), out)
    spec = FftSpec(kind, direction, (4,), (0,), "backward", array, result)
    with pytest.raises(NotSupportedError, match=rf"{direction} {kind}") as caught:
        rig.enqueue("fft", spec)
    assert caught.value.backend == backend.name


@pytest.mark.parametrize(
    ("lengths", "axes"),
    [((0,), (0,)), ((4, 0), (0, 1)), ((4,), (0, 1)), ((4, 4), (0, 0)), ((4,), (2,)), ((4,), (-1,)), ((), ())],
)
def test_an_invalid_transform_is_refused(rig, lengths, axes):
    array, out = rig.put(np.zeros((4, 4), complex)), rig.empty((4, 4), complex)
    message = f"axes={axes} must be distinct axes of source, each with one of lengths={lengths} above 0"
    with pytest.raises(LibraryError, match=re.escape(message)) as caught:
        rig.enqueue("fft", FftSpec("c2c", "forward", lengths, axes, "backward", array, out))
    assert caught.value.library == "fft"


class _NoBackend:
    """Settings of a program for all of scipy.fft: they must not reach the device."""

    __ua_domain__ = "numpy.scipy.fft"

    @staticmethod
    def __ua_function__(method, args, kwargs):
        raise AssertionError("called from a device")


def test_a_global_backend_of_scipy_does_not_concern_the_device(rig, random_array, assert_close):
    source = random_array((64,), "complex128")
    scipy.fft.set_global_backend(_NoBackend, only=True)
    try:
        result = transform(rig, source, "c2c", "forward", 64, 0, "backward")
    finally:
        scipy.fft.set_global_backend("scipy")
    assert_close(result, np.fft.fft(source), 64)
