"""Find the flow that turns a round drop of dye into letters, with the gradient through all steps.

Stream functions, one after another, give the flow, so it is incompressible. A kill does not change a bit.
Run it with: python fit_simulation.py --kills 3 --out letters.png
"""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib as mpl
import numpy as np
import trio
from PIL import Image, ImageDraw, ImageFont

import trio_accel as ta

FLOWS = 4
# A step of the dye s: flow through the four sides of a cell, from differences of p, and diffusion.
STEP = ta.jit.elementwise(
    """
up = (i(0) - 1) % n; down = (i(0) + 1) % n; left = (i(1) - 1) % n; right = (i(1) + 1) % n
east = p[down, i(1)] - p[up, i(1)] + p[down, right] - p[up, right]
west = p[down, left] - p[up, left] + p[down, i(1)] - p[up, i(1)]
south = p[i(0), left] - p[i(0), right] + p[down, left] - p[down, right]
north = p[up, left] - p[up, right] + p[i(0), left] - p[i(0), right]
c = s[i(0), i(1)]; e = s[i(0), right]; w = s[i(0), left]; b = s[down, i(1)]; a = s[up, i(1)]
new = c - 0.125*(east*(c + e) - west*(w + c) + south*(c + b) - north*(a + c)) + 0.02*(e + w + a + b - 4*c)
""",
    inputs=("s", "p", "n"),
    outputs="new",
    name="flow",
)
ADAM = ta.jit.elementwise(
    "momentum = 0.9*m + 0.1*g; variance = 0.99*v + 0.01*g*g; "
    "new = p - 0.1*momentum/a/(sqrt(variance/b) + 1e-12)",
    inputs=("p", "g", "m", "v", "a", "b"),
    outputs=("new", "momentum", "variance"),
)


def dyes(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the drop and the letters, scaled to equal sums."""
    letters, at = Image.new("L", (size, size)), np.indices((size, size)) - size / 2
    font = ImageFont.load_default(size=0.62 * size)
    ImageDraw.Draw(letters).text((size / 2, size / 2), "ta", fill=255, font=font, anchor="mm")
    target = np.asarray(letters) / 255
    drop = 1 / (1 + np.exp(np.hypot(*at) - 0.35 * size))
    return drop * target.sum() / drop.sum(), target


async def fit(device: ta.Device, given: argparse.Namespace, kills: int) -> tuple[np.ndarray, list[float]]:
    """Return the final dye of the fitted simulation, and the losses."""
    n, steps, rng = given.size, given.steps, np.random.default_rng(given.seed)
    start, target = [await device.put(dye) for dye in dyes(n)]
    flows = [await device.put(1e-3 * rng.standard_normal((n, n))) for _ in range(FLOWS)]
    means = [await device.put(np.zeros((n, n))) for _ in flows]
    squares = list(means)

    def simulate(flows: list[Any]) -> Any:
        dye: Any = start
        for k in range(steps):
            dye = STEP(dye, flows[k * FLOWS // steps], n, shape=(n, n))
        return dye

    def loss_of(flows: list[Any]) -> Any:
        return ta.arrays.mean((simulate(flows) - target) ** 2)

    gradient, losses = ta.value_and_grad(loss_of), list[float]()
    for k in range(1, given.iterations + 1):
        if k in [given.iterations * (each + 1) // (kills + 1) for each in range(kills)]:
            ta.testing.inject_fault(device, "jit.flow", kill=True)
        loss, slopes = await gradient(flows)
        losses.append(await loss.item())
        for at, g in enumerate(slopes):
            flows[at], means[at], squares[at] = await ADAM(
                flows[at], g, means[at], squares[at], 1 - 0.9**k, 1 - 0.99**k
            )
    return await (await simulate(flows)).to_host(), losses


async def main(given: argparse.Namespace) -> int:
    """Fit without and with kills, compare the results, and return the exit code."""
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with ta.open_system("fit") as system, system.open_device(given.backend, options=options) as device:
        dye, losses = await fit(device, given, 0)
        again, others = await fit(device, given, given.kills)
        is_same = dye.tobytes() == again.tobytes() and losses == others and device.generation > given.kills
    print(f"the loss falls {losses[0] / losses[-1]:.1f} times")
    print(f"killed {device.generation - 1} times: {'the same bits' if is_same else 'WRONG'}")
    if given.out:
        picture = mpl.colormaps["magma"](np.hstack([*dyes(given.size), dye]), bytes=True)
        Image.fromarray(picture).resize((1200, 400)).save(given.out)
    return not is_same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu", help="device, such as cpu or cuda:1")
    for name, default in {"size": 48, "steps": 24, "iterations": 100, "kills": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="PNG: the drop, the letters, and the fitted dye")
    raise SystemExit(trio.run(main, parser.parse_args()))
