"""Load weights from a safetensors file into a program that survives the loss of its worker process."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from contextlib import aclosing

import numpy as np
import trio
from bag_of_words import BagOfWords

import trio_accel as ta

WORDS, INNER, WIDTH = 1000, 48, 16


async def write_model(device: ta.Device, path: str) -> None:
    """Write random weights to a file, in place of trained weights."""
    random = ta.random.Generator(device, seed=1)
    table = await random.normal((WORDS, INNER), dtype="float32")
    projection = await random.normal((INNER, WIDTH), dtype="float32")
    await ta.weights.save(path, {"table": table, "projection": projection}, metadata={"words": str(WORDS)})


async def main(sentences: int) -> int:
    """Encode sentences, kill the worker, and encode them again."""
    words = np.random.default_rng(2).integers(0, WORDS, (sentences, 9))
    options = ta.DeviceOptions(isolation="process")
    async with ta.open_system("embeddings") as system, system.open_device("cpu", options=options) as device:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            await write_model(device, path)
            weights = await ta.weights.load(device, path, packed=True)
        print(weights, dict(weights.metadata))
        table, projection = weights["table"], weights["projection"]
        async with ta.programs.open_program(device, BagOfWords, table, projection) as encoder:
            before = await (await encoder.ask(BagOfWords.encode, words, WIDTH)).to_host()
            pid = (await device.statistics()).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            # A new process takes over the weights and creates the program again, without the file.
            async with aclosing(device.watch_generation()) as generations:
                while await anext(generations) < 2:
                    pass
            after = await (await encoder.ask(BagOfWords.encode, words, WIDTH)).to_host()
        print(f"{sentences} embeddings, generation {device.generation}, the same bit for bit:", end=" ")
        print(np.array_equal(before, after))
        rows, columns = [(await array.to_host()).astype(float) for array in (table, projection)]
    expected = rows[words].mean(axis=1) @ columns
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    error = np.abs(after - expected).max()
    print(f"largest error {error:.1e}: {'right' if error < 1e-5 else 'wrong'}")
    return 0 if error < 1e-5 and np.array_equal(before, after) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=200)
    raise SystemExit(trio.run(main, parser.parse_args().sentences))
