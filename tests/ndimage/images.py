"""Images that tests of `ta.ndimage` share, and how results are compared with SciPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.ndimage

import trio_accel as ta
from trio_accel import ndimage

__all__ = ["MODES", "Array", "compare", "image"]

Array = npt.NDArray[Any]

MODES = ("reflect", "constant", "nearest", "mirror", "wrap", "grid-constant", "grid-mirror", "grid-wrap")


def image(dtype: str, shape: tuple[int, ...] = (23, 31), seed: int = 0) -> Array:
    """Make an image of a dtype, with numbers that it holds."""
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(max(limits.min, -300), min(limits.max, 300), shape).astype(dtype)
    if kind == "b":
        return random.random(shape) > 0.5
    imaginary = 1j * random.normal(size=shape) if kind == "c" else 0
    return np.asarray(random.normal(size=shape) + imaginary).astype(dtype)


async def compare(
    device: ta.Device, name: str, x: Array, *args: Any, tol: float = 1e-12, **kwargs: Any
) -> None:
    """Compare a function with SciPy's. Interpolated integers may differ by one, at halves."""
    wanted: Any = getattr(scipy.ndimage, name)(x, *args, **kwargs)
    found = await getattr(ndimage, name)(await device.put(x), *args, **kwargs)
    several: Any = wanted if type(wanted) is tuple else (wanted,)
    for one, expected in zip(found if type(wanted) is tuple else (found,), several, strict=True):
        got = await one.to_host() if isinstance(one, ta.AccelRef) else np.asarray(one)
        want: Array = np.asarray(expected)
        assert got.shape == want.shape
        if not isinstance(expected, int):
            assert got.dtype == want.dtype
        if want.dtype.kind in "iub":
            differ = np.abs(got.astype(float) - want)
            assert differ.max(initial=0) <= ("order" in kwargs), (name, args, kwargs)
            assert (differ > 0).sum() <= 0.05 * differ.size
        else:
            single = np.finfo(want.dtype).eps > 1e-10
            np.testing.assert_allclose(got, want, rtol=1e-5 if single else tol, atol=1e-5 if single else tol)
