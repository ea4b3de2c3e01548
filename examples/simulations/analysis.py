"""Analysis of an image with moving drops: a histogram, a threshold, connected parts, and their areas.

The passes are separate operations, because their results determine the number of passes. Each pass returns
new arrays, so it can run again after a loss. The tests compare every pass with NumPy and SciPy.
Source of the threshold: N. Otsu, A Threshold Selection Method from Gray-Level Histograms, 1979.

Run it with: python analysis.py --size 256 --steps 100 --out drops.apng
"""

from __future__ import annotations

from functools import partial

import numpy as np
from drawing import coloured
from simulation import Simulation, State, Step, program

import trio_accel as ta

DROPS, BINS, TIME = 16, 256, 0.05
BETWEEN = ta.jit.elementwise(  # variance between both sides of a threshold
    "p = n / count; d = total*p - m/count; v = where((0 < p) & (p < 1), d*d / (p*(1 - p)), 0)",
    inputs=("n", "m", "total", "count"),
    name="between",
)


async def threshold(image: ta.AccelRef) -> ta.AccelRef:
    """Return the value that divides dark from light best, as an array of one element."""
    low, high = await ta.arrays.min(image).item(), await ta.arrays.max(image).item()
    counts, edges = await ta.arrays.histogram(image, BINS, range=(low, high))
    counts = await counts.cast("float64")
    middles = (edges[1:] + edges[:-1]) / 2
    weighted = await ta.arrays.cumulative_sum(counts * middles)
    mean = weighted[-1] / image.size
    variance = await BETWEEN(ta.arrays.cumulative_sum(counts), weighted, mean, float(image.size))
    return await ta.arrays.take(edges[1:], ta.arrays.argmax(variance, keepdims=True), axis=0)


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Start the time of drops that oscillate; the first step draws and analyses them."""
    rng = np.random.default_rng(seed)
    lines = ["y = (i(0) + 0.5) / w; x = (i(1) + 0.5) / w"]
    for k, (down, right, radius, speed, phase) in enumerate(rng.random((DROPS, 5))):
        lines += [f"y{k} = y - {down} - 0.1*sin({0.5 + speed}*t + {6 * phase})"]
        lines += [f"x{k} = x - {right} - 0.1*cos({0.5 + speed}*t + {9 * phase})"]
        lines += [f"drop{k} = exp(-(y{k}*y{k} + x{k}*x{k}) / {(0.02 + 0.05 * radius) ** 2})"]
    shine = " + ".join(f"drop{k}" for k in range(DROPS))
    draw = ta.jit.elementwise(
        f"{'; '.join(lines)}; image = {shine} + 0.1*noise", inputs=("t", "w", "noise"), name="drops"
    )
    noise = await device.put(rng.standard_normal((size, size)))

    async def step(t: ta.AccelRef, *_: ta.AccelRef) -> State:
        t = await (t + TIME)
        image = await draw(t, size, noise)
        parts = await ta.ndimage.label(ta.arrays.greater(image, await threshold(image)))
        found = await ta.arrays.unique_counts(parts.labels)
        return t, image, parts.labels, found.values, found.counts

    return (await device.put(np.asarray(0.0)),), step


def picture(_: np.ndarray, image: np.ndarray, labels: np.ndarray, *__: np.ndarray) -> np.ndarray:
    """Return the image, with each connected part in one colour."""
    grey = np.clip(image / 1.5, 0, 1)[..., None]
    colours = coloured(labels * 0.618 % 1, "hsv")
    return np.where(labels[..., None] > 0, (0.3 + 0.7 * grey) * colours, 255 * grey).astype(np.uint8)


SIMULATION = Simulation(start=start, picture=picture, operation="ndimage.label")
main = partial(program, __doc__, SIMULATION, size=64, steps=40)

if __name__ == "__main__":
    raise SystemExit(main())
