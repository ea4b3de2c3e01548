"""The first and last bytes of random numbers; tests of the capability check their values."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from trio_accel.backends.base import DType, NotSupportedError
from trio_accel.backends.base.contract.ops import PHILOX_ROW, PHILOX_START, PhiloxSpec

BLOCK = 4 * PHILOX_ROW
KINDS = [
    ("bits", "uint32"),
    ("uniform", "float32"),
    ("uniform", "float64"),
    ("normal", "float32"),
    ("normal", "float64"),
    ("exponential", "float32"),
    ("exponential", "float64"),
    ("lognormal", "float32"),
    ("lognormal", "float64"),
    ("integers", "int64"),
]


def draw(rig, kind, size, *, row=0, skip=0, low=0.0, width=None, seed=7):
    """Numbers in an array that begins this many elements into its block, and nothing around it is touched."""
    distribution, dtype = kind
    if width is None:
        width = 2.0**32 if distribution == "integers" else 1.0
    whole = rig.put(np.full(size + 2 * skip + 8, 77, DType(dtype).dtype))
    step = DType(dtype).itemsize
    out = attrs.evolve(whole, offset=whole.offset + skip * step, shape=(size,))
    rig.enqueue("random", PhiloxSpec(distribution, PHILOX_START.pack(seed, row), low, width, out))
    host = rig.get(whole)
    assert (host[:skip] == 77).all()
    assert (host[skip + size :] == 77).all()
    return host[skip : skip + size]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1001, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 3])
def test_every_size_is_a_beginning(rig, kind, size):
    np.testing.assert_array_equal(draw(rig, kind, size), draw(rig, kind, 2 * BLOCK + 8)[:size])


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_an_array_may_begin_anywhere(rig, kind, skip):
    size = BLOCK + 11
    np.testing.assert_array_equal(draw(rig, kind, size, skip=skip), draw(rig, kind, size))


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_row_begins_at_the_end_of_the_row_before(rig, kind):
    long = draw(rig, kind, 2 * BLOCK)
    rows = 2 if kind[1].endswith("64") else 1
    for row in (0, 2**40):
        later = draw(rig, kind, BLOCK, row=row + rows)
        assert (later == long[BLOCK:]).all() == (row == 0)
    assert not (draw(rig, kind, 100, row=2**45) == draw(rig, kind, 100)).any()
    assert not (draw(rig, kind, 100, seed=2**63 + 7) == draw(rig, kind, 100)).any()


@pytest.mark.parametrize("kind", KINDS[1:7], ids="-".join)
@pytest.mark.parametrize("size", [1000, 1001])
def test_bounds_and_moments(rig, assert_close, kind, size):
    moved = draw(rig, kind, size, low=-3.5, width=0.25)
    assert_close(moved, -3.5 + 0.25 * draw(rig, kind, size).astype(float))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_derived_from_others(rig, assert_close, dtype):
    uniform, normal = (draw(rig, (name, dtype), 5000).astype(float) for name in ("uniform", "normal"))
    assert_close(draw(rig, ("exponential", dtype), 5000, width=0.5), -0.5 * np.log(uniform))
    assert_close(draw(rig, ("lognormal", dtype), 5000, low=-1.0, width=0.5), np.exp(-1.0 + 0.5 * normal))


@pytest.mark.parametrize(("low", "width"), [(0, 1), (-3, 6), (5, 1 << 32), (-(1 << 53), (1 << 32) - 1)])
def test_whole_numbers_are_the_upper_halves_of_products(rig, low, width):
    words = [draw(rig, KINDS[0], 400, row=row).astype(object) for row in (0, 1)]
    pairs = [(word[1::2] << 32 | word[0::2]).reshape(-1, 2) for word in words]
    expected = low + (np.concatenate(pairs, axis=1).reshape(-1) * width >> 64)
    drawn = draw(rig, ("integers", "int64"), 399, low=float(low), width=float(width))
    np.testing.assert_array_equal(drawn, expected[:399].astype(np.int64))


def test_nothing_is_drawn_into_an_empty_array(rig):
    assert draw(rig, KINDS[3], 0).size == 0


def test_the_error_names_the_unsupported_option(rig, backend):
    for dtype, strides in (("float16", (2,)), ("float32", (8,))):
        out = rig.put(np.zeros(8, dtype))
        out = attrs.evolve(out, shape=(4,), strides=strides)
        with pytest.raises(NotSupportedError, match="makes contiguous arrays of float32, float64") as caught:
            rig.enqueue("random", PhiloxSpec("normal", PHILOX_START.pack(1, 0), 0.0, 1.0, out))
        assert caught.value.backend == backend.name


def test_draws_on_several_streams_in_turn(rig):
    other = rig.device.open_stream("other")
    expected = [draw(rig, KINDS[4], 1001, seed=seed) for seed in range(4)]
    outs = [rig.empty((1001,), "float64") for _ in expected]
    for seed, out in enumerate(outs):
        spec = PhiloxSpec("normal", PHILOX_START.pack(seed, 0), 0.0, 1.0, out)
        rig.enqueue("random", spec, other if seed % 2 else rig.stream)
    rig.finish(other)
    rig.finish(rig.stream)
    for host, out in zip(expected, outs, strict=True):
        np.testing.assert_array_equal(rig.get(out), host)
