"""The function of `nearest_numpy` in PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trio_accel.programs import Array

torch: Any = import_module("torch")  # without types, because PyTorch is not a dependency


def nearest(points: Array, centres: Array) -> tuple[Array, Array]:
    """Return the nearest centre of each point, and its distance."""
    points, centres = torch.from_dlpack(points), torch.from_dlpack(centres)
    with torch.inference_mode():
        steps = points[:, None, :] - centres[None, :, :]
        distances = torch.sqrt((steps * steps).sum(dim=2))
        found = distances.min(dim=1)
        return found.indices, found.values
