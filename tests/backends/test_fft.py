from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType, LibraryError, NotSupportedError
from trio_accel.backends.base.ops import FftSpec

REFERENCES = {
    ("c2c", "forward"): np.fft.fft,
    ("c2c", "inverse"): np.fft.ifft,
    ("r2c", "forward"): np.fft.rfft,
    ("c2r", "inverse"): np.fft.irfft,
}
SOURCES = {
    "c2c": ["complex64", "complex128"],
    "r2c": ["float32", "float64"],
    "c2r": ["complex64", "complex128"],
}
RESULTS = {("r2c", "float32"): "complex64", ("r2c", "float64"): "complex128"}
RESULTS |= {("c2r", "complex64"): "float32", ("c2r", "complex128"): "float64"}
CASES = [(kind, direction, dtype) for kind, direction in REFERENCES for dtype in SOURCES[kind]]


def transform(rig, source, kind, direction, n, axis, norm):
    shape = list(source.shape)
    shape[axis] = n // 2 + 1 if kind == "r2c" else n
    dtype = str(DType.of(source.dtype))
    out = rig.empty(tuple(shape), RESULTS.get((kind, dtype), dtype))
    rig.enqueue("fft", FftSpec(kind, direction, n, axis, norm, rig.put_as_laid_out(source), out))
    return rig.get(out)


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
        ("r2c", "inverse", "float64", "complex128"),
        ("c2r", "forward", "complex128", "float64"),
        ("c2c", "forward", "float64", "complex128"),
        ("c2c", "forward", "complex128", "complex64"),
        ("r2c", "forward", "float16", "complex64"),
        ("r2c", "forward", "float32", "complex128"),
    ],
)
def test_what_is_not_supported_is_said(rig, backend, kind, direction, source, out):
    spec = FftSpec(kind, direction, 4, 0, "backward", rig.put(np.zeros(4, source)), rig.empty((4,), out))
    with pytest.raises(NotSupportedError, match=rf"{direction} {kind}") as caught:
        rig.enqueue("fft", spec)
    assert caught.value.backend == backend.name


def test_a_transform_of_no_points_is_refused(rig):
    array = rig.put(np.zeros(4, complex))
    with pytest.raises(LibraryError, match="at least one"):
        rig.enqueue("fft", FftSpec("c2c", "forward", 0, 0, "backward", array, array))


class _NoBackend:
    """What a program may set for all of scipy.fft: it must not reach the device."""

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
