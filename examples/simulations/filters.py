"""Image filters, one after another, over the frames of a camera that pans: a drawing with dark lines.

A bilateral filter, Sobel edges and a tone curve are one graph, which returns the next frame and its drawing.
The tests compare them with SciPy and NumPy. Source: C. Tomasi, R. Manduchi, Bilateral Filtering for Gray and
Color Images, 1998.

Run it with: python filters.py --size 1080 --steps 20 --out drawing.png
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
from simulation import Simulation, State, Step, program

import trio_accel as ta

REACH, FAR, UNLIKE = 2, 2.0, 0.1  # bilateral filter: pixels, deviations by distance and by colour


def bilateral(height: int, width: int) -> ta.jit.Elementwise[ta.AccelRef]:
    """Return an expression that averages similar neighbours of each pixel, for images of shape (3, h, w).

    `ta.ndimage.bilateral_filter` takes one plane; this expression takes all three in one launch.
    """
    lines, around = ["c = x[i(0), i(1), i(2)]"], list(product(range(-REACH, REACH + 1), repeat=2))
    for k, (a, b) in enumerate(around):
        lines += [f"t{k} = x[i(0), clip(i(1) + ({a}), 0, {height - 1}), clip(i(2) + ({b}), 0, {width - 1})]"]
        near = -(a * a + b * b) / (2 * FAR**2)
        lines += [f"d{k} = t{k} - c; w{k} = exp({near} - {1 / (2 * UNLIKE**2)}*d{k}*d{k})"]
    total = " + ".join(f"w{k}*t{k}" for k in range(len(around)))
    weight = " + ".join(f"w{k}" for k in range(len(around)))
    return ta.jit.elementwise(
        f"{'; '.join(lines)}; y = ({total}) / ({weight})", inputs=("x",), name="bilateral"
    )


GREY = ta.jit.elementwise(
    "0.299*x[0, i(0), i(1)] + 0.587*x[1, i(0), i(1)] + 0.114*x[2, i(0), i(1)]", inputs=("x",), name="grey"
)
# Increase the contrast of middle values, and darken the edges.
TONE = ta.jit.elementwise(
    "t = clip(x, 0, 1); y = uint8(255 * t*t*(3 - 2*t) * clip(1.3 - 1.5*hypot(down, right), 0, 1))",
    inputs=("x", "down", "right"),
    name="tone",
)


def step_of(height: int, width: int) -> Step:
    """Return the step for images of shape (3, h, w), float32 from 0 to 1."""
    pan = ta.jit.elementwise(f"x[i(0), i(1), (i(2) + 2) % {width}]", name="pan")
    smooth = bilateral(height, width)

    async def step(image: ta.AccelRef, _: ta.AccelRef) -> State:
        image = await pan(image, shape=image.shape)
        flat = await smooth(image, shape=image.shape)
        grey = await GREY(flat, shape=image.shape[1:])
        down, right = [await ta.ndimage.sobel(grey, axis, mode="nearest") for axis in (0, 1)]
        return image, await TONE(flat, down, right)

    return step


def scene(height: int, width: int, seed: int) -> np.ndarray:
    """Return balls in front of a sky, with noise: float32 of shape (3, h, w)."""
    rng = np.random.default_rng(seed)
    down, right = np.indices((height, width)) / height
    image = np.stack([0.9 - 0.5 * down, 0.7 - 0.2 * down, 0.5 + 0.4 * down])
    for _ in range(40):
        y, x, radius = rng.random() * down.max(), rng.random() * right.max(), rng.uniform(0.03, 0.15)
        height_of = 1 - ((down - y) ** 2 + (right - x) ** 2) / radius**2
        image = np.where(
            height_of > 0, rng.random((3, 1, 1)) * (0.4 + 0.6 * np.sqrt(np.maximum(height_of, 0))), image
        )
    return np.clip(image + 0.05 * rng.standard_normal(image.shape), 0, 1).astype(np.float32)


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Make an image with this height and a screen's aspect ratio, and an empty drawing."""
    image = scene(size, size * 16 // 9, seed)
    return (await device.put(image), await device.put(np.zeros(image.shape, np.uint8))), step_of(
        *image.shape[1:]
    )


def picture(image: np.ndarray, drawing: np.ndarray) -> np.ndarray:
    """Return the frame, with its drawing below."""
    both = np.concatenate([(255 * image).astype(np.uint8), drawing], axis=1)
    return np.ascontiguousarray(np.moveaxis(both, 0, -1))


SIMULATION = Simulation(start=start, picture=picture)
main = partial(program, __doc__, SIMULATION, size=120, steps=50)

if __name__ == "__main__":
    raise SystemExit(main())
