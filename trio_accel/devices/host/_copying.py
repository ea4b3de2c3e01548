"""Copies between host arrays and memory that a device, or a worker, uses by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...backends.base import as_bits

__all__ = ["COPIES_AT_ONCE", "SMALL", "Copying"]

SMALL = 64 << 10
"""Host arrays up to so many bytes travel with a message, or are copied on the spot."""

COPIES_AT_ONCE = 2
"""Copies are bound by memory: so many saturate it."""

# So much is copied in a row: an end that is asked for comes soon.
_PIECE = 8 << 20


class Copying:
    """A copy that runs in a thread and can be ended between two pieces."""

    def __init__(self, target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        self._target = as_bits(target)
        self._source = as_bits(source)
        self._is_cancelled = False

    def cancel(self) -> None:
        """End it soon. Any thread."""
        self._is_cancelled = True

    def run(self) -> None:
        """Copy; blocks."""
        for target, source in _pieces(self._target, self._source):
            if self._is_cancelled:
                return
            np.copyto(target, source)


def _pieces(
    target: npt.NDArray[Any], source: npt.NDArray[Any]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    if target.nbytes <= _PIECE:
        yield target, source
        return
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    rows = max(1, _PIECE // (target.nbytes // len(target)))
    for start in range(0, len(target), rows):
        yield target[start : start + rows], source[start : start + rows]
