"""Make the picture of the simulations: `python docs/pictures/make_simulations.py`. It takes two minutes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import trio
from PIL import Image, ImageOps

import trio_accel as ta

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "simulations"))

TILE = 320, 200
# Example, size and steps of each tile, row by row.
TILES = (
    ("particles", 3000, 700),
    ("cloth", 48, 120),
    ("fluid", 192, 560),
    ("lattice_boltzmann", 106, 9000),
    ("filters", 200, 1),
    ("video", 200, 160),
    ("analysis", 200, 20),
    ("bricks", 25, 1),
)


async def main() -> None:
    """Run each, and put the last pictures side by side."""
    run = import_module("simulation").run
    sheet = Image.new("RGB", (4 * TILE[0], 2 * TILE[1]))
    async with ta.open_system("pictures") as system, system.open_device("cpu") as device:
        for number, (name, size, steps) in enumerate(TILES):
            done = await run(device, import_module(name).SIMULATION, size, steps, 0, pictures=1)
            picture = done.pictures[0]
            if name == "filters":
                picture = picture[len(picture) // 2 :]
            tile = ImageOps.fit(Image.fromarray(picture), TILE)
            sheet.paste(tile, (number % 4 * TILE[0], number // 4 * TILE[1]))
    sheet.quantize(160).save(HERE / "simulations.png", optimize=True)


if __name__ == "__main__":
    trio.run(main)
