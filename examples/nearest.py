"""Run your own function where its arrays are, with NumPy or CuPy, PyTorch, or the array API standard."""

from __future__ import annotations

import argparse
from importlib import import_module

import numpy as np
import trio

import trio_accel as ta


async def run(library: str, backend: str, count: int) -> bool:
    """Return whether the result equals NumPy's in float64."""
    nearest = import_module(f"nearest_{library}").nearest
    random = np.random.default_rng(0)
    centres = random.standard_normal((5, 3))
    points = centres[random.integers(0, 5, count)] + random.normal(0, 0.1, (count, 3))
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with ta.open_system("own") as system, system.open_device(backend, options=options) as device:
        x = await device.put(points)
        chosen, distances = await ta.run(nearest, x, centres)
        average = await ta.arrays.mean(distances).item()
        print(f"{count} points, {average:.3f} from their centres on average")
        steps = np.linalg.norm(points[:, None] - centres, axis=2)
        return np.array_equal(await chosen.to_host(), steps.argmin(1)) and np.allclose(
            await distances.to_host(), steps.min(1), rtol=1e-12
        )


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("numpy", "torch", "array_api"), default="numpy")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    is_right = trio.run(run, given.library, given.backend, 1000)
    print("centres and distances:", "right" if is_right else "WRONG")
    return not is_right


if __name__ == "__main__":
    raise SystemExit(main())
