"""The measured bandwidth from one device to another, in bytes a second."""

from __future__ import annotations

import time

import numpy as np

from ...actors import named_arguments
from ..base._refusals import bounded_integer
from ..operations._ref import Device, check_device

__all__ = ["measure_bandwidth"]

_NBYTES = 64 << 20


@named_arguments
async def measure_bandwidth(
    source: Device, target: Device, *, nbytes: int = _NBYTES, repeats: int = 5
) -> float:
    """Measure copies of an array from one open device to another, as `AccelRef.copy_to` makes them.

    The first copy does not count, because it makes the memory. Other work of the devices is part of the
    measurement. This takes `nbytes` on the source, and as many on the target. They are freed at the end, even
    if the call fails or is cancelled.

    Args:
        source: The device with the array.
        target: The device that gets the copy. The same device measures copies within its memory.
        nbytes: The size of the array in bytes, at least 1. Small arrays measure the time of a call.
        repeats: The number of measured copies, at least 1.

    Returns:
        The median of the copies, in bytes per second.

    Raises:
        TypeError: `source` or `target` is not an open device, or a number is not an integer.
        ValueError: A number is below 1.
        OutOfMemoryError: A device does not have enough memory.
        ContextLostError, DeviceLostError: A device was lost meanwhile.
    """
    check_device("measure_bandwidth", source)
    check_device("measure_bandwidth", target)
    for name, value in (("nbytes", nbytes), ("repeats", repeats)):
        if bounded_integer("measure_bandwidth", name, value) < 1:
            raise ValueError(f"measure_bandwidth: {name} must be at least 1, got {value}")
    array = await source.full(nbytes, 1, "uint8")
    try:
        seconds: list[float] = []
        for _ in range(1 + repeats):
            begun = time.perf_counter()
            copy = await array.copy_to(target)
            seconds.append(time.perf_counter() - begun)
            copy.release()
    finally:
        array.release()
    return nbytes / float(np.median(seconds[1:]))
