"""Numbers that the host computes for a filter or a rotation have the bits of SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import scipy.special

from trio_accel.ndimage._degrees import cosine_and_sine
from trio_accel.ndimage._filters import gaussian_weights

pytestmark = pytest.mark.no_device


def test_cosines_and_sines_of_degrees() -> None:
    rng = np.random.default_rng(0)
    angles = np.concatenate(
        [
            rng.uniform(-720, 720, 3000),
            rng.uniform(-2e14, 2e14, 300),
            np.arange(-1440, 1440, 7.5),
            [0.0, -0.0, 5e-324, 1e300],
        ]
    )
    computed = np.array([cosine_and_sine(angle) for angle in angles.tolist()])
    expected = np.stack([scipy.special.cosdg(angles), scipy.special.sindg(angles)], axis=1)
    np.testing.assert_array_equal(computed, expected)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("sigma", [0.3, 1, 2.5, np.float32(1.3)])
def test_weights_of_gaussian_filters(sigma: float, order: int) -> None:
    for radius in (None, 0, 1, 9):
        reach = int(4.0 * sigma + 0.5) if radius is None else radius
        impulse = np.eye(1, 2 * reach + 1, reach)[0]
        expected = scipy.ndimage.gaussian_filter1d(impulse, sigma, order=order, mode="constant", radius=reach)
        np.testing.assert_array_equal(gaussian_weights(sigma, order, 4.0, radius), expected[::-1])
