"""The strongest tones of a recording, found with the device's FFT and checked against NumPy.

Without a file, it analyses a computed chord. Run it with: python spectrum.py recording.wav
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import trio
from scipy.io import wavfile

import trio_accel as ta

CHORD = (261.6, 329.6, 392.0)
WINDOW = 4096


def read_samples(path: Path | None) -> tuple[int, np.ndarray]:
    """Return the sampling rate and a single channel of samples; without a path, a second of a chord."""
    if path is not None:
        rate, samples = wavfile.read(path)
        return rate, np.asarray(samples, np.float32).reshape(len(samples), -1).mean(axis=1)
    seconds = np.arange(16_000) / 16_000
    return 16_000, np.sin(2 * np.pi * np.outer(CHORD, seconds)).sum(axis=0).astype(np.float32)


async def run(rate: int, samples: np.ndarray, count: int, backend: str | None) -> float:
    """Print the strongest tones, and return the relative error of all spectra."""
    samples = np.pad(samples, (0, max(0, WINDOW - samples.size)))
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[:: WINDOW // 2]
    frames = (frames * np.hanning(WINDOW)).astype(np.float32)
    async with ta.open_system("spectrum") as system, system.open_device(backend) as device:
        spectra = await ta.fft.rfft(frames_ref := await device.put(frames)).to_host()
        frames_ref.release()
    power = (np.abs(spectra) ** 2).mean(axis=0)
    is_peak = (power[1:-1] > power[:-2]) & (power[1:-1] >= power[2:])
    peaks = 1 + np.flatnonzero(is_peak)
    strongest = peaks[np.argsort(power[peaks])[::-1][:count]]
    for bin_number in sorted(strongest):
        level = 10 * np.log10(power[bin_number] / power.max())
        print(f"{bin_number * rate / WINDOW:8.1f} Hz {level:6.1f} dB")
    reference = np.fft.rfft(frames.astype(np.float64))
    return float(np.linalg.norm(spectra - reference) / np.linalg.norm(reference))


def main() -> int:
    """Return the exit code: 0 if the spectra are right."""
    parser = argparse.ArgumentParser(description="The strongest tones of a recording.")
    parser.add_argument("audio", nargs="?", type=Path, help="WAV file (default: a chord)")
    parser.add_argument("--count", type=int, default=3, help="number of tones to print")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    rate, samples = read_samples(arguments.audio)
    error = trio.run(partial(run, rate, samples, arguments.count, arguments.backend))
    is_right = error <= 1e-5
    print(f"relative error {error:.1e}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
