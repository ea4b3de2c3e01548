"""Specifications of the Fourier transforms."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from ._spec import ArraySpec, OperationSpec, exact, reads, writes

__all__ = ["FftDirection", "FftKind", "FftNorm", "FftSpec"]

FftKind: TypeAlias = Literal["c2c", "r2c", "c2r"]
FftDirection: TypeAlias = Literal["forward", "inverse"]
FftNorm: TypeAlias = Literal["backward", "ortho", "forward"]


@attrs.define(on_setattr=None, unsafe_hash=True)
class FftSpec(OperationSpec):
    """A transform along one axis or several, batched over the others.

    The last of `axes` is the one that is halved: complex kinds of several axes are transforms along
    each of them, and of the real kinds only the last axis is real, the others being complex. So a
    backend whose library has plans of up to three axes runs the axes in groups, one after the other:
    r2c ends, and c2r begins, with plain complex transforms along the first ones.

    Attributes:
        kind: ``"c2c"``, ``"r2c"`` (half spectrum) or ``"c2r"``, in the vendors' terms.
        direction: ``"forward"`` (exponent -) or ``"inverse"`` (exponent +). Where a library has the
            real kinds in one direction only, the other is its conjugate.
        lengths: Length of the transform along each of `axes`, at least 1: ``source`` is cut or padded
            with zeros to it. Along a halved axis ``n // 2 + 1`` elements stand for n.
        axes: Axes of the transform: at least one, distinct, not negative.
        norm: Which direction is scaled, as in `numpy.fft`.
    """

    kind: FftKind = exact()
    direction: FftDirection = exact()
    lengths: tuple[int, ...] = exact()
    axes: tuple[int, ...] = exact()
    norm: FftNorm = exact()
    source: ArraySpec = reads()
    out: ArraySpec = writes()
