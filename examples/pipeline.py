"""Find the tones in recordings with a pipeline, which reads a file while it computes another's spectrum.

Run it with `trio-accel trace`, and open trace.json at https://ui.perfetto.dev, to see the stages overlap.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import outcome
import trio
from scipy.io import wavfile

import trio_accel as ta
from trio_accel.patterns import GetStatistics, Pipeline, PipelineStage, PipelineStatistics, open_results

TONES = 3


def write_recordings(folder: Path, count: int, samples: int) -> tuple[list[Path], np.ndarray]:
    """Write recordings of three tones, and an invalid file; return the paths and the tones' bins."""
    rng = np.random.default_rng(5)
    bins = np.sort([20 + 16 * rng.choice(samples // 64, TONES, replace=False) for _ in range(count)])
    paths = [folder / f"{number:04}.wav" for number in range(count)]
    for path, tones in zip(paths, bins, strict=True):
        waves = np.sin(2 * np.pi / samples * np.outer(tones, np.arange(samples)))
        sound = waves.sum(axis=0) + rng.normal(0, 0.1, samples)
        wavfile.write(path, 16_000, np.asarray(sound, np.float32))
    paths[count // 2].write_bytes(b"this is no recording")
    return paths, bins


async def read(path: Path) -> np.ndarray:
    """Read the samples of a file, in a thread."""
    return np.asarray((await trio.to_thread.run_sync(wavfile.read, path))[1])


async def spectrum(device: ta.Device, samples: np.ndarray) -> ta.AccelRef:
    """Return the magnitudes of the spectrum, which stay on the device."""
    return await abs(ta.fft.rfft(await device.put(samples)))


async def strongest(magnitudes: ta.AccelRef) -> np.ndarray:
    """Return the bins of the strongest tones, in ascending order."""
    return np.sort(await (await ta.arrays.top_k(magnitudes, TONES)).indices.to_host())


async def run(paths: list[Path], bins: np.ndarray, backend: str | None) -> int:
    """Return 0 if all tones were found, in the order of the files, and only the invalid file failed."""
    async with ta.open_system("tones") as system, system.open_device(backend) as device:
        stages = PipelineStage(read, workers=2), partial(spectrum, device)
        pipeline = await system.spawn(Pipeline, *stages, strongest)
        async with open_results(pipeline, paths, limit=8, outcomes=True) as results:
            found = [result async for result in results]
        statistics: PipelineStatistics = await pipeline.ask(GetStatistics())
    for stage in statistics.stages:
        print(f"{stage.name}: {stage.answered} done, {stage.failed} failed")
    both = zip(found, bins, strict=True)
    right = [isinstance(each, outcome.Value) and (each.value == tones).all() for each, tones in both]
    print(f"{sum(right)} of {len(paths)} right, in the order of the files")
    return 0 if right == [n != len(paths) // 2 for n in range(len(paths))] else 1


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Find the tones in recordings with a pipeline.")
    parser.add_argument("--recordings", type=int, default=64, help="number of files")
    parser.add_argument("--samples", type=int, default=1 << 18, help="samples in each file")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return trio.run(run, *write_recordings(Path(folder), given.recordings, given.samples), given.backend)


if __name__ == "__main__":
    raise SystemExit(main())
