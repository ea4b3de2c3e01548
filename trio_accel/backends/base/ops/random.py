"""Specifications of random number generation."""

from __future__ import annotations

from typing import Literal

from ._array import ArraySpec
from ._roles import exact, scalar, writes
from ._spec import OperationSpec, specification

__all__ = ["PHILOX_ROW", "PhiloxSpec"]

PHILOX_ROW = 1 << 16
"""Subsequences of the Philox sequence: so many counters make a row."""


@specification
class PhiloxSpec(OperationSpec):
    """Numbers of a Philox-4x32-10 sequence (Salmon et al., SC 2011), in the order of cuRAND.

    Four 32-bit words come from one counter. Counter ``c`` of the sequence has its first half at
    ``row + c // 65536`` and its second half at ``c % 65536``; the key is the seed. Of every four
    float64 values, the first two come from one counter and the others from that of the next row.

    Attributes:
        distribution: ``"bits"`` (uint32 words), ``"uniform"`` (over ``low`` to ``low + width``,
            from numbers above 0 up to 1) or ``"normal"`` (mean ``low``, standard deviation ``width``,
            by Box and Muller).
        seed: 64-bit key.
        row: First row, even.
        low: Lower bound, or mean.
        width: Width, or standard deviation.
    """

    distribution: Literal["bits", "uniform", "normal"] = exact()
    seed: int = exact()
    row: int = exact()
    low: float = scalar()
    width: float = scalar()
    out: ArraySpec = writes()
