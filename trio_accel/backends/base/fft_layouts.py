"""Which transforms one plan of a GPU's library can do from one array to another.

The libraries of the vendors have the same plans, cuFFT's: of up to three axes and one batch, with a stride, a
distance and storage dimensions on either side.
"""

from __future__ import annotations

import math

import attrs

from .dtypes import DType
from .ops import contiguous_strides

__all__ = ["MOST_AXES", "OUT", "SOURCE", "Fit", "PlanKey", "View", "fit"]

MOST_AXES = 3
# To execute one plan more often than that costs the loop more than a copy to where once is enough.
_MOST_EXECUTIONS = 16

# Buffers; those after them are temporary.
SOURCE, OUT = 0, 1


@attrs.frozen
class View:
    """An array in one of the buffers of a transform.

    Attributes:
        buffer: `SOURCE`, `OUT`, or a temporary one.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
        is_aligned: Whether its first element lies where a complex number may; real ones too are to lie so.
    """

    buffer: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool = True

    def cut(self, shape: tuple[int, ...]) -> View:
        """The part that it has in common with an array of another shape."""
        return attrs.evolve(self, shape=tuple(map(min, self.shape, shape)))

    @classmethod
    def packed(cls, buffer: int, dtype: DType, shape: tuple[int, ...], last: tuple[int, ...] = ()) -> View:
        """One without gaps, in C order but for some axes that come last."""
        order = [axis for axis in range(len(shape)) if axis not in last] + list(last)
        inner = contiguous_strides(tuple(shape[axis] for axis in order), dtype.itemsize)
        return cls(buffer, dtype, shape, tuple(inner[order.index(axis)] for axis in range(len(shape))))


@attrs.frozen
class PlanKey:
    """What a plan is made from: the arguments of `cufftMakePlanMany64`, which count in elements."""

    kind: str
    is_double: bool
    lengths: tuple[int, ...]
    inembed: tuple[int, ...]
    istride: int
    idist: int
    onembed: tuple[int, ...]
    ostride: int
    odist: int
    batch: int


@attrs.frozen
class Fit:
    """How a plan does it.

    Attributes:
        key: The plan.
        offsets: Where it is executed: bytes from the start of either array.
    """

    key: PlanKey
    offsets: tuple[tuple[int, int], ...]


def fit(source: View, out: View, lengths: dict[int, int]) -> Fit | None:
    """Find the plan of a transform; None if there is none, or it would have to be executed too often.

    Args:
        source: Of at least as many elements along the axes as the transform takes.
        out: Where to.
        lengths: Number of points for each axis to be transformed, at least 2; of real transforms the
            halved axis is the last.
    """
    if not (source.is_aligned and out.is_aligned):
        return None
    kind = "c2c" if source.dtype is out.dtype else "r2c" if out.dtype.kind == "complex" else "c2r"
    axes = list(lengths)
    count = len(axes) if kind == "c2c" else len(axes) - 1
    axes[:count] = sorted(axes[:count], key=lambda axis: -out.strides[axis])
    points = tuple(lengths[axis] for axis in axes)
    half = (*points[:-1], points[-1] // 2 + 1)
    ins, outs = _steps(source), _steps(out)
    inembed = _embedding([ins[axis] for axis in axes], half if kind == "c2r" else points)
    onembed = _embedding([outs[axis] for axis in axes], half if kind == "r2c" else points)
    others = (axis for axis, extent in enumerate(out.shape) if extent > 1 and axis not in lengths)
    runs = _runs([(out.shape[axis], ins[axis], outs[axis]) for axis in others])
    if inembed is None or onembed is None or runs is None:
        return None
    (batch, idist, odist), offsets = runs
    is_double = out.dtype in (DType.float64, DType.complex128)
    istride, ostride = ins[axes[-1]], outs[axes[-1]]
    key = PlanKey(kind, is_double, points, inembed, istride, idist, onembed, ostride, odist, batch)
    at = tuple((i * source.dtype.itemsize, o * out.dtype.itemsize) for i, o in offsets)
    alignment = max(source.dtype.itemsize, out.dtype.itemsize)
    return Fit(key, at) if all(i % alignment == o % alignment == 0 for i, o in at) else None


def _steps(view: View) -> list[int]:
    """Strides in elements; 0, which fits nowhere, for what is none."""
    itemsize = view.dtype.itemsize
    return [0 if stride % itemsize else stride // itemsize for stride in view.strides]


def _embedding(steps: list[int], extents: tuple[int, ...]) -> tuple[int, ...] | None:
    """Storage dimensions: each step is a multiple of the next, and has room for what lies within."""
    if steps[-1] < 1:
        return None
    embedding = [extents[0]]
    for outer, inner, extent in zip(steps, steps[1:], extents[1:], strict=False):
        if outer % inner or outer // inner < extent:
            return None
        embedding.append(outer // inner)
    return tuple(embedding)


def _runs(
    axes: list[tuple[int, int, int]],
) -> tuple[tuple[int, int, int], list[tuple[int, int]]] | None:
    """Share axes of (extent, step of the source, step of the result) out between a batch and executions.

    Returns:
        Batch with both distances, and where it begins each time.
    """
    if any(source < 1 or out < 1 for _, source, out in axes):
        return None
    merged: list[tuple[int, int, int]] = []
    for extent, source, out in sorted(axes, key=lambda axis: -axis[2]):
        if merged and merged[-1][1:] == (extent * source, extent * out):
            merged[-1] = (merged[-1][0] * extent, source, out)
        else:
            merged.append((extent, source, out))
    if not merged:
        return (1, 1, 1), [(0, 0)]
    # Of two as long as each other, the one whose elements lie closer.
    batch = max(merged, key=lambda axis: (axis[0], -axis[2]))
    merged.remove(batch)
    if math.prod(extent for extent, _, _ in merged) > _MOST_EXECUTIONS:
        return None
    offsets = [(0, 0)]
    for extent, source, out in merged:
        offsets = [(i + at * source, o + at * out) for i, o in offsets for at in range(extent)]
    return batch, offsets
