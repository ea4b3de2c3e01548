from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel import linalg
from trio_accel.backends.base import DType, LibraryError, NotSupportedError

LETTERS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
COMPLEX = ("complex64", "complex128")


@st.composite
def products(draw):
    """Letters, and matrices that fit: as they come, transposed, with gaps, backwards or repeated."""
    m, n, k = (draw(st.integers(1, 12)) for _ in range(3))
    letters = [draw(st.sampled_from(sorted(LETTERS))) for _ in range(2)]
    shapes = [(m, k) if letters[0] == "N" else (k, m), (k, n) if letters[1] == "N" else (n, k), (m, n)]
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16", *COMPLEX]))
    matrices = [draw(_laid_out(shape, dtype, seed, seed < 2)) for seed, shape in enumerate(shapes)]
    return dtype, letters, matrices


@st.composite
def _laid_out(draw, shape, dtype, seed, may_repeat):
    """A view of a separate array."""
    is_transposed = draw(st.booleans())
    rows, columns = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (-1, 1), (1, -3)]))
    stored = shape[::-1] if is_transposed else shape
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((stored[0] * abs(rows), stored[1] * abs(columns)))
    if dtype in COMPLEX:
        base = base + 1j * rng.standard_normal(base.shape)
    view = np.asarray(base, DType(dtype).dtype)[::rows, ::columns]
    if may_repeat and draw(st.integers(0, 9)) == 0:
        view = np.broadcast_to(view[:1], view.shape)
    return view.T if is_transposed else view


@settings(max_examples=150, deadline=None)
@given(product=products(), beta=st.sampled_from([0.0, 1.0, -0.5]))
def test_letters_and_layouts(open_rig, exact, assert_close, product, beta):
    dtype, (op_a, op_b), (a, b, c) = product
    alpha = 1.5 - 0.5j if dtype in COMPLEX else 1.5
    with open_rig() as rig:
        device_a, device_b = rig.put_as_laid_out(a), rig.put_as_laid_out(b)
        device_c = rig.put_as_laid_out(c)
        rig.enqueue("blas", linalg.gemm.spec(alpha, device_a, device_b, beta, op_a, op_b, device_c))
        expected = alpha * LETTERS[op_a](exact(a)) @ LETTERS[op_b](exact(b)) + beta * exact(c)
        assert_close(rig.get(device_c), expected, 4 * a.size)
        assert rig.get(device_a).tobytes() == a.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", *COMPLEX])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_sum_of_nothing(rig, random_array, exact, assert_close, dtype, beta):
    c = random_array((5, 6), dtype)[:, ::2]
    device_c = rig.put_as_laid_out(c)
    a, b = rig.empty((5, 0), dtype), rig.empty((0, 3), dtype)
    rig.enqueue("blas", linalg.gemm.spec(1.0, a, b, beta, "N", "N", device_c))
    assert_close(rig.get(device_c), beta * exact(c))


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_a_zero_beta_ignores_the_old_elements(rig, random_array, exact, assert_close, dtype):
    a, b = random_array((3, 4), dtype, 1), random_array((4, 2), dtype, 2)
    for c in (np.full((3, 2), np.nan, dtype), np.full((3, 4), np.nan, dtype)[:, ::2]):
        device_c = rig.put_as_laid_out(c)
        rig.enqueue("blas", linalg.gemm.spec(1.0, rig.put(a), rig.put(b), 0.0, "N", "N", device_c))
        assert_close(rig.get(device_c), exact(a) @ exact(b), 4)


def test_the_error_names_the_unsupported_option(rig, backend):
    whole, real = rig.put(np.ones((2, 2), np.int64)), rig.put(np.ones((2, 2)))
    with pytest.raises(NotSupportedError, match="gemm for int64; it has float16") as caught:
        rig.enqueue("blas", linalg.gemm.spec(1.0, whole, whole, 0.0, "N", "N", whole))
    assert caught.value.backend == backend.name
    for alpha, beta in ((1j, 0.0), (1.0, 1j)):
        with pytest.raises(LibraryError, match="has an imaginary part"):
            rig.apply(
                "blas", linalg.gemm.spec(alpha, real, real, beta, "N", "N", rig.empty((2, 2), "float64"))
            )
