"""Make the pictures of the dashboard: `python docs/pictures/make_dashboard.py`. It needs Chromium.

A program with load and faults runs for some seconds. Its page is drawn at 1280 pixels in light colours, and
at 400 pixels in dark ones.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
import trio
from playwright.sync_api import sync_playwright

import trio_accel as ta

HERE = Path(__file__).parent
SECONDS = 45.0
PICTURES: tuple[tuple[int, Literal["light", "dark"], str], ...] = (
    (1280, "light", "dashboard.png"),
    (400, "dark", "dashboard-small.png"),
)


@attrs.frozen
class Embed(ta.Request["Embedder", float]):
    size: int


class Embedder(ta.Actor):
    """Stands for a service's own actor."""

    def __init__(self, device: ta.Device) -> None:
        self.device = device

    @ta.handles(Embed)
    async def embed(self, message: Embed) -> float:
        """Compute a little."""
        vector = await ta.random.Generator(self.device, seed=message.size).normal(message.size)
        return float(await ta.linalg.nrm2(vector).item())


async def load(device: ta.Device, embedder: ta.Ref[Embedder], source: random.Random) -> None:
    """Be a client."""
    matrix = await device.put(np.eye(64))
    while True:
        try:
            await embedder.ask(Embed(source.randint(1, 4096)))
            for _ in range(source.randint(1, 8)):
                await ta.linalg.matmul(matrix, matrix)
            await ta.fft.fft(matrix)
        except (ta.AccelError, ta.ActorError):
            # The page is to show losses: the next round asks again.
            pass
        await trio.sleep(source.expovariate(40))


async def harm(device: ta.Device) -> None:
    """Lose a worker now and then, and have a library fail."""
    while True:
        await trio.sleep(7)
        ta.testing.inject_fault(device, ta.fft.Fft, fail=RuntimeError("a handle is broken"))
        await trio.sleep(4)
        ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)


def draw(url: str) -> None:
    """Draw the page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = []
        for width, scheme, name in PICTURES:
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page.goto(url)
            pages.append((page, name))
        pages[0][0].wait_for_timeout(SECONDS * 1000)
        for page, name in pages:
            page.screenshot(path=HERE / name, full_page=True)
        browser.close()


async def main() -> None:
    """Run the program, and look at it."""
    options = ta.DeviceOptions(isolation="process", spares=1, retry=1)
    async with ta.open_system("service") as system, ta.open_dashboard(system, errors=True) as dashboard:
        device = await system.open_device("cpu", options=options)
        embedder = await system.spawn(Embedder, device, name="embedder")
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(load, device, embedder, random.Random(number))  # noqa: S311  # load
            nursery.start_soon(harm, device)
            await trio.to_thread.run_sync(draw, dashboard.url)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
