"""The steps of a transform from a GPU library's parts: plans of up to three axes and a batch, and copies.

The libraries of the vendors have the same plans, cuFFT's: of up to three axes and one batch, with a stride, a
distance and storage dimensions on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import attrs

from ..contract.dtypes import DType, Ints
from ..contract.ops import ArraySpec, FftSpec, FusedFftSpec, complex_of, contiguous_strides

MOST_AXES = 3
# To execute one plan more often than that costs the loop more than a copy to where once is enough.
_MOST_EXECUTIONS = 16

# Buffers; those after them are temporary.
SOURCE, OUT = 0, 1


@attrs.frozen
class View:
    """An array in one of a transform's buffers.

    Attributes:
        buffer: `SOURCE`, `OUT`, or a temporary one.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
        is_aligned: Whether its first element is aligned as a complex number must be; real arrays must be
            also.
    """

    buffer: int
    dtype: DType
    shape: Ints
    strides: Ints
    is_aligned: bool = True

    def cut(self, shape: Ints) -> View:
        """Return the part that it has in common with an array of another shape."""
        return attrs.evolve(self, shape=tuple(map(min, self.shape, shape)))

    @classmethod
    def packed(cls, buffer: int, dtype: DType, shape: Ints, last_axes: Ints = ()) -> View:
        """One without gaps, in C order but for some axes that come last."""
        order = [axis for axis in range(len(shape)) if axis not in last_axes] + list(last_axes)
        inner = contiguous_strides(tuple(shape[axis] for axis in order), dtype.itemsize)
        return cls(buffer, dtype, shape, tuple(inner[order.index(axis)] for axis in range(len(shape))))


@attrs.frozen
class PlanKey:
    """Key of a plan: the arguments of `cufftMakePlanMany64`, which count in elements."""

    kind: str
    is_double: bool
    lengths: Ints
    inembed: Ints
    istride: int
    idist: int
    onembed: Ints
    ostride: int
    odist: int
    batch: int


@attrs.frozen
class Fit:
    """The plan of a transform, and the places where it is executed.

    Attributes:
        key: The plan.
        offsets: The places of its executions: bytes from the start of either array.
    """

    key: PlanKey
    offsets: tuple[tuple[int, int], ...]


def fit(source: View, out: View, lengths: dict[int, int]) -> Fit | None:
    """Find the plan of a transform; None without one, or if it had to be executed too often.

    Args:
        source: Has at least as many elements along the axes as the transform takes.
        out: The result.
        lengths: Number of points for each axis to be transformed, at least 2; of real transforms the halved
            axis is the last.
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
    batch_axes = (axis for axis, extent in enumerate(out.shape) if extent > 1 and axis not in lengths)
    runs = _runs([(out.shape[axis], ins[axis], outs[axis]) for axis in batch_axes])
    if inembed is None or onembed is None or runs is None:
        return None
    (batch, idist, odist), offsets = runs
    is_double = out.dtype in (DType.float64, DType.complex128)
    istride, ostride = ins[axes[-1]], outs[axes[-1]]
    key = PlanKey(kind, is_double, points, inembed, istride, idist, onembed, ostride, odist, batch)
    byte_offsets = tuple((i * source.dtype.itemsize, o * out.dtype.itemsize) for i, o in offsets)
    alignment = max(source.dtype.itemsize, out.dtype.itemsize)
    return (
        Fit(key, byte_offsets) if all(i % alignment == o % alignment == 0 for i, o in byte_offsets) else None
    )


def _steps(view: View) -> list[int]:
    """Convert strides to elements; a stride of incomplete elements becomes 0, which never fits."""
    itemsize = view.dtype.itemsize
    return [0 if stride % itemsize else stride // itemsize for stride in view.strides]


def _embedding(steps: list[int], extents: Ints) -> Ints | None:
    """Storage dimensions: each step is a multiple of the next, and has room for the axes within."""
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
    # The smaller stride wins where two axes are of one length.
    batch = max(merged, key=lambda axis: (axis[0], -axis[2]))
    merged.remove(batch)
    if math.prod(extent for extent, _, _ in merged) > _MOST_EXECUTIONS:
        return None
    offsets = [(0, 0)]
    for extent, source, out in merged:
        offsets = [(i + index * source, o + index * out) for i, o in offsets for index in range(extent)]
    return batch, offsets


TEMPORARIES = (2, 3, 4)
"""Buffers between the steps; of these two are in use at a time."""


@attrs.frozen
class Zero:
    """Set an array to zero."""

    out: View


@attrs.frozen
class Convert:
    """Copy an array, with a factor, or its conjugate."""

    source: View
    out: View
    scale: float = 1.0
    conjugate: bool = False


@attrs.frozen
class FftStep:
    """Execute a plan from one buffer to another."""

    fit: Fit
    source: int
    out: int
    is_forward: bool


_Step: TypeAlias = Zero | Convert | FftStep


def single(spec: FftSpec) -> Fit | None:
    """Find the plan that makes all of a transform, but for the factor of its sums.

    Returns:
        The plan, which is executed once; None where a transform takes several, or copies.
    """
    need = list(spec.lengths)
    if spec.kind == "c2r":
        need[-1] = need[-1] // 2 + 1
    is_shorter = any(spec.source.shape[axis] < n for axis, n in zip(spec.axes, need, strict=True))
    if is_shorter or _conjugates(spec) or len(need) > MOST_AXES or min(spec.lengths) < 2:
        return None
    source, out = _view(SOURCE, spec.source), _view(OUT, spec.out)
    plan = fit(source, out, dict(zip(spec.axes, spec.lengths, strict=True)))
    return plan if plan is not None and plan.offsets == ((0, 0),) else None


class TransformPlan:
    """The steps of a checked transform with a result that is not empty; it needs as few copies as possible.

    Attributes:
        steps: In order.
        sizes: Bytes of each temporary buffer.
    """

    def __init__(self, spec: FftSpec) -> None:
        self.steps: list[_Step] = []
        self.sizes: dict[int, int] = dict.fromkeys(TEMPORARIES, 0)
        self._kind = spec.kind
        self._lengths = dict(zip(spec.axes, spec.lengths, strict=True))
        self._halved = spec.axes[-1]
        self._source = _view(SOURCE, spec.source)
        self._out = _view(OUT, spec.out)
        # The place of the numbers now.
        self._at = self._source
        self._scale = scale_of(spec)
        self._conjugate = _conjugates(spec)
        self._is_forward = goes_forward(spec)
        self._plan()

    def _plan(self) -> None:
        rest = [axis for axis, n in self._lengths.items() if n > 1]
        if self._kind != "c2c" and self._lengths[self._halved] > 1:
            rest.remove(self._halved)
        # Axes with the smallest strides are transformed together.
        rest.sort(key=lambda axis: -abs(self._out.strides[axis]))
        if self._kind == "c2c":
            self._complex(rest)
        elif self._kind == "r2c":
            self._complex(self._from_real(rest))
        else:
            self._to_real(rest)
        self._finish()

    def _from_real(self, rest: list[int]) -> list[int]:
        """Transform the halved axis, and axes that fit into the same step; return the remaining axes."""
        if self._lengths[self._halved] == 1:
            # The spectrum of a single number is the number itself.
            self._pack(self._out)
            return rest
        if not self._needs_packing:
            for group in _groups(rest, MOST_AXES - 1):
                if self._transform(self._at, self._out, (*group, self._halved)):
                    return rest[: len(rest) - len(group)]
        group = next(_groups(rest, MOST_AXES - 1))
        axes = (*group, self._halved)
        natural = self._temporary(self._source.dtype)
        if self._fit(natural, self._out, axes) is not None:
            self._pack(natural)
            self._transform(natural, self._out, axes)
        else:
            self._pack(self._temporary(self._source.dtype, axes))
            self._transform(self._at, self._temporary(self._out.dtype, axes), axes)
        return rest[: len(rest) - len(group)]

    def _to_real(self, rest: list[int]) -> None:
        """Transform to real numbers, from a copy: a library destroys the source of such a transform."""
        dtype, real = self._source.dtype, self._out.dtype
        if self._lengths[self._halved] == 1:
            # Copying to real numbers leaves the real parts.
            self._pack(self._temporary(dtype))
            self._complex(rest)
            return
        group = next(_groups(rest, MOST_AXES - 1))
        axes = (*group, self._halved)
        natural = self._temporary(dtype)
        fits = self._fit(natural, self._out, axes) is not None
        self._pack(natural if fits else self._temporary(dtype, axes))
        self._complex(rest[: len(rest) - len(group)])
        if not self._transform(self._at, self._out, axes):
            packed = View.packed(OUT, real, self._out.shape, axes)
            if self._fit(self._at, packed, axes) is None:
                self._copy(self._temporary(dtype, axes))
            self._transform(self._at, self._temporary(real, axes), axes)

    def _complex(self, axes: list[int]) -> None:
        """Transform axes of complex numbers, as many at a time as go together."""
        while axes:
            group = self._transform_group(axes)
            axes = axes[: len(axes) - len(group)]

    def _transform_group(self, axes: list[int]) -> Ints:
        """Transform some of the axes, the last ones."""
        groups = [group for group in _groups(axes, MOST_AXES) if group]
        view, out = self._at, self._out
        is_ours = view.buffer != SOURCE
        targets = [out] if out.dtype is view.dtype else []
        targets += [view] if is_ours and view.buffer != OUT else []
        if is_ours or not self._needs_packing:
            for target in targets:
                for group in groups:
                    if self._transform(view, target, group):
                        return group
        if not is_ours and targets and self._fit(out, out, groups[0]) is not None:
            self._pack(out)
            self._transform(out, out, groups[0])
            return groups[0]
        self._copy(self._temporary(view.dtype, groups[0]))
        self._transform(self._at, self._at, groups[0])
        return groups[0]

    @property
    def _needs_packing(self) -> bool:
        """Whether the source is shorter than the transform somewhere, or is not aligned for the library."""
        shape = self._shape(self._source.dtype)
        return self._is_shorter(shape) or not self._source.is_aligned

    def _is_shorter(self, shape: Ints) -> bool:
        return any(have < need for have, need in zip(self._source.shape, shape, strict=True))

    def _shape(self, dtype: DType) -> Ints:
        """Return the shape of real or complex intermediate results."""
        shape = list(self._source.shape)
        for axis, length in self._lengths.items():
            shape[axis] = length
        if self._kind != "c2c" and dtype.kind == "complex":
            shape[self._halved] = shape[self._halved] // 2 + 1
        return tuple(shape)

    def _temporary(self, dtype: DType, last_axes: Ints = ()) -> View:
        """Room in a temporary buffer, but not in that where the numbers are."""
        buffer = next(buffer for buffer in TEMPORARIES if buffer != self._at.buffer)
        return View.packed(buffer, dtype, self._shape(dtype), last_axes)

    def _pack(self, out: View) -> None:
        """Copy the source, cut and padded, and do on the way what can be done."""
        if self._is_shorter(out.shape):
            self.steps.append(Zero(out))
        common = self._source.cut(out.shape)
        is_early = self._conjugate and self._kind == "c2r"
        self.steps.append(Convert(common, out.cut(common.shape), self._scale, is_early))
        self._go_to(out)
        self._scale = 1.0
        self._conjugate = self._conjugate and not is_early

    def _copy(self, out: View) -> None:
        if self._at.buffer == SOURCE:
            self._pack(out)
        else:
            self.steps.append(Convert(self._at, out))
            self._go_to(out)

    def _go_to(self, out: View) -> None:
        self._at = out
        if out.buffer in self.sizes:
            nbytes = math.prod(out.shape) * out.dtype.itemsize
            self.sizes[out.buffer] = max(self.sizes[out.buffer], nbytes)

    def _finish(self) -> None:
        """Bring the result to its place, with the remaining conversions."""
        if self._at.buffer == SOURCE:
            self._pack(self._out)
        if self._at.buffer != OUT or self._scale != 1.0 or self._conjugate:
            self.steps.append(Convert(self._at, self._out, self._scale, self._conjugate))

    def _fit(self, source: View, out: View, axes: Ints) -> Fit | None:
        return fit(source, out, {axis: self._lengths[axis] for axis in axes})

    def _transform(self, source: View, out: View, axes: Ints) -> bool:
        """Transform axes from one array to another, if one plan does it."""
        plan = self._fit(source, out, axes)
        if plan is not None:
            self.steps.append(FftStep(plan, source.buffer, out.buffer, self._is_forward))
            self._go_to(out)
        return plan is not None


def _groups(axes: list[int], max_axes: int) -> Iterator[Ints]:
    """Yield the last of some axes, fewer and fewer."""
    for count in range(min(max_axes, len(axes)), -1, -1):
        yield tuple(axes[len(axes) - count :])


def _view(buffer: int, array: ArraySpec) -> View:
    size = complex_of(array.dtype).itemsize
    return View(buffer, array.dtype, array.shape, array.strides, array.offset % size == 0)


def _conjugates(spec: FftSpec) -> bool:
    """Return whether the transform, or its source, is the conjugate of one that libraries have.

    Libraries transform from real numbers forward and to real numbers backward.
    """
    return (spec.kind, spec.direction) in (("r2c", "inverse"), ("c2r", "forward"))


def goes_forward(spec: FftSpec) -> bool:
    """Return whether the plan of a transform is executed forward."""
    return spec.direction == "forward" if spec.kind == "c2c" else spec.kind == "r2c"


def scale_of(spec: FftSpec | FusedFftSpec) -> float:
    """Return the factor of the sums."""
    points = math.prod(spec.lengths)
    if spec.norm == "ortho":
        return 1.0 / math.sqrt(points)
    return 1.0 / points if (spec.norm == "forward") == (spec.direction == "forward") else 1.0
