"""Specifications of random number generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ..dtypes import DType
from ._array import ArraySpec
from ._roles import exact, scalar, writes
from ._spec import OperationSpec, specification

__all__ = ["PHILOX_ROW", "RANDOM_DTYPES", "Distribution", "PhiloxSpec"]

Distribution: TypeAlias = Literal["bits", "uniform", "normal", "exponential", "lognormal", "integers"]

_REALS = (DType.float32, DType.float64)

RANDOM_DTYPES: Mapping[Distribution, tuple[DType, ...]] = {
    "bits": (DType.uint32,),
    "uniform": _REALS,
    "normal": _REALS,
    "exponential": _REALS,
    "lognormal": _REALS,
    "integers": (DType.int64,),
}
"""The dtypes of the numbers of each distribution."""

PHILOX_ROW = 1 << 16
"""Subsequences of the Philox sequence: so many counters make a row."""


@specification
class PhiloxSpec(OperationSpec):
    """Numbers of a Philox-4x32-10 sequence (Salmon et al., SC 2011), in the order of cuRAND.

    Four 32-bit words come from one counter. Counter ``c`` of the sequence has its first half at
    ``row + c // 65536`` and its second half at ``c % 65536``; the key is the seed. Of every four
    float64 or int64 values, the first two come from one counter and the others from that of the next row.

    Attributes:
        distribution: ``"bits"`` (uint32 words), ``"uniform"`` (over ``low`` to ``low + width``,
            from numbers above 0 up to 1), ``"normal"`` (mean ``low``, standard deviation ``width``,
            by Box and Muller), ``"exponential"`` (mean ``width``: minus the logarithms of uniform numbers),
            ``"lognormal"`` (of normal numbers the exponentials) or ``"integers"`` (int64 from ``low`` on,
            below ``low + width``, of at most 2**32: the upper half of the product with two words).
        seed: 64-bit key.
        row: First row, even.
        low: Lower bound, or mean.
        width: Width, or standard deviation.
    """

    distribution: Distribution = exact()
    seed: int = exact()
    row: int = exact()
    low: float = scalar()
    width: float = scalar()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        allowed = RANDOM_DTYPES.get(self.distribution, ())
        if self.out.dtype not in allowed or not self.out.is_contiguous:
            names = ", ".join(map(str, allowed))
            raise TypeError(
                f"{name} {self.distribution} makes contiguous arrays of {names}, not {self.out.dtype}"
            )
