"""Specifications of the Fourier transforms."""

from __future__ import annotations

from typing import Literal

import attrs

from ._spec import ArraySpec, OperationSpec, reads, writes

__all__ = ["FftNorm", "FftSpec"]

FftNorm = Literal["backward", "ortho", "forward"]


@attrs.frozen
class FftSpec(OperationSpec):
    """A one-dimensional transform along one axis, batched over the others.

    Attributes:
        kind: ``"c2c"``, ``"r2c"`` (half spectrum) or ``"c2r"``, in the vendors' terms.
        direction: ``"forward"`` (exponent -) or ``"inverse"`` (exponent +).
        n: Length of the transform: ``source`` is cut or padded with zeros to it
            (``n // 2 + 1`` elements where the input is a half spectrum).
        axis: Axis of the transform, not negative.
        norm: Which direction is scaled, as in `numpy.fft`.
    """

    kind: Literal["c2c", "r2c", "c2r"]
    direction: Literal["forward", "inverse"]
    n: int
    axis: int
    norm: FftNorm
    source: ArraySpec = reads()
    out: ArraySpec = writes()
