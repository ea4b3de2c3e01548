"""The five strongest tones of each of 64 recordings: spectra stay on the device, one small answer comes back.

NumPy finds the same in spectra that are copied out: for the numbers, and for the time.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import trio

import trio_accel as ta

RECORDINGS, TONES, WIDTH = 64, 5, 3

# 0 where a bin is no peak, so that the largest values are peaks.
PEAKS = ta.jit.elementwise(
    "here = s[i(0), i(1)]; left = s[i(0), maximum(i(1) - 1, 0)]; right = s[i(0), i(1) + 1]\n"
    "out = where(here > left and here >= right, here, 0)",
    name="peaks",
)


def make_recordings(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Make recordings of five tones and noise; return them, and the tones' bins in order."""
    rng = np.random.default_rng(7)
    bins = np.sort(rng.choice(np.arange(20, samples // 2 - 20, 16), (RECORDINGS, TONES)), axis=1)
    phase = 2 * np.pi * np.arange(samples) / samples
    sound = sum((1 + tone / TONES) * np.sin(bins[:, tone, None] * phase) for tone in range(TONES))
    return (sound + 0.05 * rng.standard_normal((RECORDINGS, samples))).astype(np.float32), bins


async def find_on_device(sounds: ta.AccelRef) -> np.ndarray:
    """Return the bins of the strongest peaks of each recording, in order."""
    spectra = await ta.fft.rfft(sounds)
    # The windows are a view: no magnitude is copied.
    windows = ta.arrays.sliding_window_view(await ta.arrays.abs(spectra), WIDTH, axis=1)
    smooth = await ta.arrays.mean(windows, axis=-1)
    found = await ta.arrays.top_k(await PEAKS(smooth, shape=smooth.shape), TONES)
    return np.sort(await found.indices.to_host(), axis=1) + WIDTH // 2


def find_on_host(spectra: np.ndarray) -> np.ndarray:
    """Find the same by NumPy."""
    smooth = np.lib.stride_tricks.sliding_window_view(np.abs(spectra), WIDTH, axis=1).mean(axis=-1)
    beside = np.pad(smooth, ((0, 0), (1, 1)), mode="edge")
    peaks = np.where((smooth > beside[:, :-2]) & (smooth >= beside[:, 2:]), smooth, 0)
    return np.sort(np.argsort(-peaks, axis=1)[:, :TONES], axis=1) + WIDTH // 2


async def run(samples: int, backend: str | None) -> bool:
    """Print how long both ways take; return whether all tones were found."""
    host, bins = make_recordings(samples)
    async with ta.open_system("recordings") as system, system.open_device(backend) as device:
        sounds = await device.put(host)
        await find_on_device(sounds)  # compiles and plans
        start = time.perf_counter()
        found = await find_on_device(sounds)
        middle = time.perf_counter()
        copied = find_on_host(await (await ta.fft.rfft(sounds)).to_host())
        end = time.perf_counter()
    print(f"{RECORDINGS} recordings of {samples} samples, {found.nbytes} bytes come back")
    print(f"on the device {1e3 * (middle - start):.1f} ms, spectra copied out {1e3 * (end - middle):.1f} ms")
    return bool((found == copied).all() and (abs(found - bins) <= 1).all())


def main() -> int:
    """Return the exit code: 0 if all tones were found."""
    parser = argparse.ArgumentParser(description="The strongest tones of 64 recordings.")
    parser.add_argument("--samples", type=int, default=1 << 16, help="samples of each recording")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    print("tones:", "right" if (is_right := trio.run(run, arguments.samples, arguments.backend)) else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
