"""Recognize handwritten digits by their nearest known images. The distances never leave the device."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import trio

import trio_accel as ta

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
DIGITS = np.arange(10)


async def tell(
    device: ta.Device, known: np.ndarray, labels: np.ndarray, images: np.ndarray, k: int
) -> np.ndarray:
    """Return each image's most frequent digit among the k nearest known images, the smallest of a tie."""
    points = await device.put(known)
    # Squared distances without the square of the image, which does not change their order.
    distances = ta.linalg.vecdot(points, points) - 2 * (images @ points.T)
    nearest = await ta.arrays.top_k(distances, k, largest=False)
    found = ta.arrays.take(await device.put(labels), nearest.indices)
    votes = ta.arrays.count_nonzero(found[:, :, None] == DIGITS, axis=1)
    return await ta.arrays.argmax(votes, axis=1).to_host()


def expected(known: np.ndarray, labels: np.ndarray, images: np.ndarray, k: int) -> np.ndarray:
    """Compute the same digits with NumPy, from all differences, in integers."""
    told: list[int] = []
    for image in images.astype(np.int64):
        squares = ((known.astype(np.int64) - image) ** 2).sum(1)
        nearest = np.argsort(squares, stable=True)[:k]
        told.append(int(np.bincount(labels[nearest]).argmax()))
    return np.array(told)


async def run(count: int, k: int, backend: str | None) -> bool:
    """Return whether the digits equal NumPy's."""
    data = np.loadtxt(DATA, np.float32, delimiter=",")
    pixels, labels = data[:, :-1], data[:, -1].astype(np.int64)
    known, images = pixels[:-count], pixels[-count:]
    async with ta.open_system("digits") as system, system.open_device(backend) as device:
        told = await tell(device, known, labels[:-count], images, k)
        print(f"{count} images, {len(known)} known ones on {device.info.name}")
    print(f"{np.mean(told == labels[-count:]):.1%} are told right")
    return np.array_equal(told, expected(known, labels[:-count], images, k))


def main() -> int:
    """Return the exit code: 0 if each digit equals NumPy's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=597, help="number of images to recognize by all others")
    parser.add_argument("--neighbours", type=int, default=5)
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    given = parser.parse_args()
    is_right = trio.run(partial(run, given.images, given.neighbours, given.backend))
    print("digits as by NumPy:", "right" if is_right else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
