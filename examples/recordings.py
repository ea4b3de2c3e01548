"""Find the five strongest tones in each of 64 recordings. Only their bins leave the device, not the spectra.

To compare the results and the time, NumPy finds the same tones in copied spectra.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import trio

import trio_accel as ta

RECORDINGS, TONES = 64, 5
WEIGHTS = np.array([0.25, 0.5, 0.25], np.float32)

# Set bins other than peaks to 0, so that the largest values are peaks.
PEAKS = ta.jit.elementwise(
    "h = s[i(0), i(1)]; out = where(h > s[i(0), maximum(i(1) - 1, 0)] and h >= s[i(0), i(1) + 1], h, 0)"
)


def make_recordings(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return recordings of five tones and noise, and the bins of the tones in ascending order."""
    rng = np.random.default_rng(7)
    there = np.tile(np.arange(20, samples // 2 - 20, 16), (RECORDINGS, 1))
    bins = np.sort(rng.permuted(there, axis=1)[:, :TONES], axis=1)
    sound = rng.normal(0, 0.05, (RECORDINGS, samples))
    for tone in range(TONES):
        sound += (1 + tone / TONES) * np.sin(2 * np.pi / samples * bins[:, tone, None] * np.arange(samples))
    return np.asarray(sound, np.float32), bins


async def find_on_device(sounds: ta.AccelRef) -> np.ndarray:
    """Return the bins of each recording's strongest peaks, in ascending order."""
    magnitudes = await abs(ta.fft.rfft(sounds))
    windows = ta.arrays.sliding_window_view(magnitudes, WEIGHTS.size, axis=1)  # a view, no copy
    smooth = await ta.linalg.vecdot(windows, WEIGHTS)
    found = await ta.arrays.top_k(PEAKS(smooth, shape=smooth.shape), TONES)
    return 1 + np.sort(await found.indices.to_host(), axis=1)


def find_on_host(spectra: np.ndarray) -> np.ndarray:
    """Find the same bins with NumPy."""
    smooth = np.lib.stride_tricks.sliding_window_view(np.abs(spectra), WEIGHTS.size, axis=1) @ WEIGHTS
    beside = np.pad(smooth, ((0, 0), (1, 1)))
    peaks = np.where((smooth > beside[:, :-2]) & (smooth >= beside[:, 2:]), smooth, 0)
    return 1 + np.sort(np.argsort(-peaks, axis=1)[:, :TONES], axis=1)


async def run(samples: int, backend: str | None) -> bool:
    """Print the time of both methods, and return whether they found all tones."""
    host, bins = make_recordings(samples)
    async with ta.open_system("recordings") as system, system.open_device(backend) as device:
        sounds = await device.put(host)
        await find_on_device(sounds)  # compiles and plans
        start = time.perf_counter()
        found, middle = await find_on_device(sounds), time.perf_counter()
        copied = find_on_host(await ta.fft.rfft(sounds).to_host())
        end = time.perf_counter()
    print(f"{RECORDINGS} recordings of {samples} samples: on the device {1e3 * (middle - start):.1f} ms,")
    print(f"spectra copied out {1e3 * (end - middle):.1f} ms; {found.nbytes} bytes come back")
    return bool((found == copied).all() and (found == bins).all())


def main() -> int:
    """Return the exit code: 0 if all tones were found."""
    parser = argparse.ArgumentParser(description="The strongest tones of 64 recordings.")
    parser.add_argument("--samples", type=int, default=1 << 16, help="samples of each recording")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    is_right = trio.run(run, arguments.samples, arguments.backend)
    print("tones:", "right" if is_right else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
