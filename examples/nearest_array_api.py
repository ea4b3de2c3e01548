"""The function of `nearest_numpy` in the array API standard, for any library that implements it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from trio_accel.programs import Array

compat: Any = import_module("array_api_compat")  # without types, because it is not a dependency


def nearest(points: Array, centres: Array) -> tuple[Array, Array]:
    """Return the nearest centre of each point, and its distance."""
    if not isinstance(points, np.ndarray):
        library = import_module("cupy" if find_spec("cupy") else "torch")
        points, centres = library.from_dlpack(points), library.from_dlpack(centres)
    xp = compat.array_namespace(points, centres)
    steps = points[:, None, :] - centres[None, :, :]
    distances = xp.sqrt(xp.sum(steps * steps, axis=2))
    return xp.argmin(distances, axis=1), xp.min(distances, axis=1)
