"""Specifications of the Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ..dtypes import DType
from ._array import ArraySpec
from ._roles import exact, reads, writes
from ._shapes import refuse_shapes, transformed_shape
from ._spec import OperationSpec, specification

__all__ = ["FFT_DTYPES", "FftDirection", "FftKind", "FftNorm", "FftSpec"]

FftKind: TypeAlias = Literal["c2c", "r2c", "c2r"]
FftDirection: TypeAlias = Literal["forward", "inverse"]
FftNorm: TypeAlias = Literal["backward", "ortho", "forward"]

FFT_DTYPES: Mapping[FftKind, Mapping[DType, DType]] = {
    "c2c": {DType.complex64: DType.complex64, DType.complex128: DType.complex128},
    "r2c": {DType.float32: DType.complex64, DType.float64: DType.complex128},
    "c2r": {DType.complex64: DType.float32, DType.complex128: DType.float64},
}
"""By the kind of a transform: the dtype of its result by that of its source."""


@specification
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

    def check_shapes(self, name: str) -> None:
        """See `OperationSpec.check_shapes`."""
        kind, source, out, axes, lengths = self.kind, self.source, self.out, self.axes, self.lengths
        if (
            not axes
            or len(axes) != len(lengths)
            or len(set(axes)) != len(axes)
            or not 0 <= min(axes) <= max(axes) < len(source.shape)
            or min(lengths) < 1
        ):
            rule = f"axes={axes} must be distinct axes of source, each with one of lengths={lengths} above 0"
            refuse_shapes(name, self, rule, source=source, out=out)
        shape = transformed_shape(source.shape, axes, lengths, is_halved=kind == "r2c")
        if out.shape != shape:
            rule = f"out must have shape {shape} for axes={axes} and lengths={lengths}"
            refuse_shapes(name, self, rule, source=source, out=out)
        if FFT_DTYPES[kind].get(source.dtype) is not out.dtype:
            transform = f"{self.direction} {kind} transform of {source.dtype} to {out.dtype}"
            raise TypeError(f"{name}: FftSpec: there is no {transform}")
