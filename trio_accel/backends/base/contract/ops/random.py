"""Specifications of random numbers other than `PhiloxSpec`: linear sequences, rejection, Sobol points."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Literal, TypeAlias

from ..dtypes import DType
from ..errors import LibraryError
from ._array import ArraySpec, StatusArray, exact, packed, reads, status, writes
from ._spec import OperationSpec, specification

__all__ = [
    "FIRST",
    "JUMP_WORDS",
    "PHILOX_START",
    "LinearSequence",
    "Rejection",
    "RejectionSpec",
    "SequenceSpec",
    "SobolSpec",
]

PHILOX_START = Struct("<QQ")
"""Key and first row in a Philox sequence: a plan does not depend on them."""

FIRST = Struct("<Q")
"""Number of the first point of a Sobol sequence."""

LinearSequence: TypeAlias = Literal["mrg32k3a", "xorwow"]
"""A generator whose next state is a linear function of its state."""

JUMP_WORDS: Mapping[LinearSequence, int] = {"mrg32k3a": 18, "xorwow": 800}
"""Words of a matrix that jumps: two of 3 x 3 numbers; for each of 160 bits the 5 words that it changes."""

Rejection: TypeAlias = Literal["gamma", "log_gamma", "poisson", "binomial"]
"""A distribution whose numbers take as many uniform ones as it happens."""

_GAMMA_DTYPES = (DType.float32, DType.float64)


@specification
class SequenceSpec(OperationSpec):
    """Words of a linear sequence, cut into pieces of equal length that are drawn in parallel.

    ``"mrg32k3a"`` (L'Ecuyer, Operations Research 47, 1999): words below 2**32 - 209. Its state is three
    numbers of each recurrence, the oldest first. ``"xorwow"`` (Marsaglia, Journal of Statistical Software 8,
    2003): its state is x, y, z, w, v and the counter d.

    Attributes:
        sequence: The name of the sequence.
        piece: Words of a piece.
        state: The state before the first word: 6 words.
        jumps: A matrix for each bit of a piece's number: row ``k`` jumps over ``piece * 2**k`` words.
        out: The words, of uint32.
    """

    sequence: LinearSequence = exact()
    piece: int = exact()
    state: ArraySpec = reads()
    jumps: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        state, jumps, out = self.state, self.jumps, self.out
        width = JUMP_WORDS.get(self.sequence)
        if self.piece < 1 or state.shape != (6,) or jumps.ndim != 2 or jumps.shape[1] != width:
            raise ValueError(f"{name}: {self.sequence} needs 6 words of state, and {width} for each jump")
        if out.size > self.piece << jumps.shape[0]:
            raise ValueError(f"{name}: {jumps.shape[0]} jumps are too few for {out.size} words")
        for array in (state, jumps, out):
            if array.dtype is not DType.uint32 or not array.is_contiguous:
                raise TypeError(f"{name}: {self.sequence} takes and makes contiguous arrays of uint32")


@specification
class RejectionSpec(OperationSpec):
    """Numbers that are proposed until one is accepted, each from counters of its own in a Philox sequence.

    Number ``c`` has these counters: the first half is ``row + c // 65536``, the third word is ``c % 65536``,
    and the fourth word counts the number's blocks. `PhiloxSpec` only uses counters with 0 there. So each
    number may take any number of blocks, and does not depend on the other numbers of the draw.

    Attributes:
        distribution: ``"gamma"`` (of the shape `a` and the scale 1; Marsaglia and Tsang 2000),
            ``"log_gamma"`` (the logarithms of these), ``"poisson"`` (of the mean `a`; PTRS of Hörmann 1993,
            inversion below 10) or ``"binomial"`` (`a` trials of the probability `b`; BTRS of Hörmann 1993,
            inversion below a mean of 10).
        start: The 64-bit key and the first row, of `PHILOX_START`.
        a: Parameters of float64: one for all, or one for each number.
        b: Likewise.
        out: float32 or float64 of gamma, int64 of the others; computed in float64, rounded once.
        fault: One word: whether a parameter is out of range.
    """

    distribution: Rejection = exact()
    start: bytes = packed()
    a: ArraySpec = reads()
    b: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    fault: StatusArray = status()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        out = self.out
        allowed = _GAMMA_DTYPES if "gamma" in self.distribution else (DType.int64,)
        if out.dtype not in allowed or not out.is_contiguous:
            names = ", ".join(map(str, allowed))
            raise TypeError(f"{name} {self.distribution} makes contiguous arrays of {names}, not {out.dtype}")
        if (self.b is None) is (self.distribution == "binomial"):
            raise ValueError(f"{name}: b must be given for binomial, and for nothing else")
        for array in (self.a, self.b):
            if array is None:
                continue
            if array.dtype is not DType.float64 or not array.is_contiguous or array.size not in (1, out.size):
                raise TypeError(f"{name}: parameters must be contiguous arrays of float64, one or {out.size}")

    def check_status(self) -> None:
        """Refuse parameters out of range."""
        if self.fault[0]:
            said = {
                "poisson": "lam must be from 0 to 2**52",
                "binomial": "n must be an integer from 0 to 2**52, and p from 0 to 1",
            }.get(self.distribution, "the shape of a gamma distribution must be at least 0, and finite")
            raise LibraryError(f"random.{self.distribution}: {said}", library="random", code="range")


@specification
class SobolSpec(OperationSpec):
    """Points of a Sobol sequence, as integers.

    Attributes:
        first: Number of the first point, of `FIRST`.
        directions: For each bit of a point's number one number of each dimension, of uint32.
        shift: A number of each dimension, of uint32, which shifts all points.
        out: A row for each point: exclusive or of the directions of its number's bits and the shift.
    """

    first: bytes = packed()
    directions: ArraySpec = reads()
    shift: ArraySpec = reads()
    out: ArraySpec = writes()

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        out, directions, shift = self.out, self.directions, self.shift
        if out.ndim != 2 or directions.ndim != 2 or not out.shape[1:] == directions.shape[1:] == shift.shape:
            raise ValueError(f"{name}: directions, shift and points must agree on the number of dimensions")
        (first,) = FIRST.unpack(self.first)
        if not first <= first + out.shape[0] <= 1 << directions.shape[0]:
            raise ValueError(f"{name}: there are only {1 << directions.shape[0]} points")
        for array in (out, directions, shift):
            if array.dtype is not DType.uint32 or not array.is_contiguous:
                raise TypeError(f"{name}: Sobol points are made of contiguous arrays of uint32")
