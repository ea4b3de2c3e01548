"""Make `top.svg`, the picture of the guide: `trio-accel top` beside a program that computes and fails.

    python docs/pictures/make_top.py

Both run in this process's environment, the command in tmux. The picture is the screen after some seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from pictures.drawn_terminal import Screen, Terminal, draw  # noqa: E402

TERMINAL = Terminal("trio-accel-top", 100, 22)
COMMAND = "trio-accel top"
# Until the figures of the last seconds are those of the load.
SECONDS = 20.0

PROGRAM = """
import logging, random
import attrs, numpy as np, trio
import trio_accel as ta

logging.getLogger("trio_accel").addHandler(logging.NullHandler())

@attrs.frozen
class Embed(ta.Request["Embedder", float]):
    text: str

class Embedder(ta.Actor):
    def __init__(self, weights):
        self.weights = weights

    @ta.handles(Embed)
    async def embed(self, message):
        if not message.text:
            raise ValueError("there is no text to embed")
        product = await ta.linalg.matmul(self.weights, self.weights)
        return float(len(message.text))

async def load(ref, wait):
    while True:
        await trio.sleep(random.expovariate(1 / wait))
        try:
            await ref.ask(Embed("some text" if random.random() > 0.002 else ""))
        except (ta.ActorError, ta.AccelError):
            pass

async def transform(device):
    signal = await device.put(np.ones(4096, np.complex64))
    while True:
        await trio.sleep(0.02)
        try:
            await ta.fft.fft(signal)
        except ta.AccelError:
            pass

async def poison(device):
    while True:
        await trio.sleep(8)
        ta.testing.poison(device)

async def main():
    often = ta.SystemOptions(intensity=ta.Intensity(1000, 1.0))
    async with ta.open_system("search", options=often) as system, ta.telemetry.open_socket(system):
        options = ta.DeviceOptions(isolation="process")
        async with system.open_device("cpu", options=options) as device, trio.open_nursery() as nursery:
            resumes = {ta.AccelError: ta.Directive.RESUME}
            policy = ta.Policy(directives=resumes, backoff=ta.Backoff(base=0.05, maximum=0.1))
            weights = await device.put(np.ones((256, 256), np.float32))
            for name, wait in (("title", 0.02), ("body", 0.01), ("author", 0.2)):
                ref = await system.spawn(Embedder, weights, name=name, policy=policy)
                for _ in range(4):
                    nursery.start_soon(load, ref, wait)
            nursery.start_soon(transform, device)
            nursery.start_soon(poison, device)

trio.run(main)
"""


def main() -> None:
    """Run the program and the command, and write the picture."""
    with tempfile.TemporaryDirectory() as runtime:
        # Other programs of the user are not in the picture.
        os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = runtime
        program = subprocess.Popen([sys.executable, "-c", PROGRAM])  # noqa: S603
        try:
            time.sleep(SECONDS / 2)
            with TERMINAL.open():
                TERMINAL.type(COMMAND)
                TERMINAL.press("Enter")
                time.sleep(SECONDS)
                screen = Screen(0.0, TERMINAL.lines())
                TERMINAL.press("q")
        finally:
            program.terminate()
            program.wait()
    picture = HERE / "top.svg"
    picture.write_text(draw([screen], TERMINAL, COMMAND), encoding="utf-8")
    sys.stdout.write(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB\n")


if __name__ == "__main__":
    main()
