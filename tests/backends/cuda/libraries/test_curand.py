"""The kernel that draws random numbers is held against cuRAND itself, where there is a GPU.

No part of trio_accel needs cuRAND: `pip install 'cuda-toolkit[curand]'` brings it for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import PHILOX_ROW, PHILOX_START, PhiloxSpec

pytestmark = pytest.mark.one_backend

BLOCK = 4 * PHILOX_ROW
CASES = [
    (0, 0, 1),
    (7, 0, 2 * BLOCK + 3),
    (0x0123456789ABCDEF, 2, 1001),
    (2**63 + 7, 2**32 - 2, 4 * BLOCK + 2),
    (2**64 - 1, 2**45, BLOCK + 5),
]
# The angle's rounding, 2**-22 a step in float32 and 2**-51 in float64, and the sine's,
# times a radius below 7 and below 9.
# On a GPU cuRAND takes the sine in float32 from the hardware, which errs by some 2**-21 whatever the sine is.
TOLERANCES = {"float32": 7 * 2**-19, "float64": 9 * 2**-49}


@pytest.fixture
def curand() -> Any:
    """The bindings of the real library."""
    if BACKEND != "cuda" or IS_STAND_IN:
        pytest.skip("cuRAND draws on a GPU")
    from cuda import pathfinder
    from nvmath.bindings import curand

    try:
        pathfinder.load_nvidia_dynamic_lib("curand")
    except pathfinder.DynamicLibNotFoundError:
        pytest.skip("cuRAND is not installed")
    return curand


Draw = Callable[..., Any]


@pytest.fixture
def draw(rig: Any, curand: Any) -> Iterator[Draw]:
    """Draws by cuRAND, on the rig's stream."""
    with rig.device.context:
        generator = curand.create_generator(curand.RngType.PSEUDO_PHILOX4_32_10)
        # The order with a promise of stability.
        curand.set_generator_ordering(generator, curand.Ordering.PSEUDO_LEGACY)
        curand.set_stream(generator, rig.stream.handle)

    def draw(name: str, dtype: str, seed: int, row: int, size: int, *moments: float) -> Any:
        out = rig.empty((size,), dtype)
        with rig.device.context:
            curand.set_pseudo_random_generator_seed(generator, seed)
            curand.set_generator_offset(generator, row * BLOCK)
            getattr(curand, name)(generator, rig.device.device_array(out).address, size, *moments)
        return rig.get(out)

    yield draw
    with rig.device.context:
        curand.destroy_generator(generator)


def ours(rig: Any, distribution: Any, dtype: str, seed: int, row: int, size: int) -> Any:
    out = rig.empty((size,), dtype)
    rig.enqueue("random", PhiloxSpec(distribution, PHILOX_START.pack(seed, row), 0.0, 1.0, out))
    return rig.get(out)


@pytest.mark.parametrize(("seed", "row", "size"), CASES)
@pytest.mark.parametrize(
    ("distribution", "dtype", "name"),
    [
        ("bits", "uint32", "generate"),
        ("uniform", "float32", "generate_uniform"),
        ("uniform", "float64", "generate_uniform_double"),
    ],
)
def test_bits_and_uniform_numbers_are_curands(
    rig: Any, draw: Draw, distribution: str, dtype: str, name: str, seed: int, row: int, size: int
) -> None:
    expected = draw(name, dtype, seed, row, size)
    np.testing.assert_array_equal(ours(rig, distribution, dtype, seed, row, size), expected)


@pytest.mark.parametrize(("seed", "row", "size"), CASES)
@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "generate_normal"), ("float64", "generate_normal_double")]
)
def test_normal_numbers_are_curands(
    rig: Any, draw: Draw, dtype: str, name: str, seed: int, row: int, size: int
) -> None:
    # cuRAND makes them two at a time.
    expected = draw(name, dtype, seed, row, size + size % 2, 0.0, 1.0)[:size]
    numbers = ours(rig, "normal", dtype, seed, row, size)
    assert numbers.dtype == DType(dtype)
    np.testing.assert_allclose(numbers, expected, rtol=0, atol=TOLERANCES[dtype])
