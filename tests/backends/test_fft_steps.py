"""Transforms are made of as few copies as the layouts of a GPU's library allow. Needs no device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, FftSpec, contiguous_strides
from trio_accel.backends.base.kit.fft_steps import OUT, SOURCE, Convert, FftStep, TransformPlan, View, Zero

COMPLEX = {DType.float64: DType.complex128, DType.float32: DType.complex64}
REAL = {complex_: real for real, complex_ in COMPLEX.items()}


def packed(shape: tuple[int, ...], dtype: DType, block: int = 0, offset: int = 0) -> ArraySpec:
    return ArraySpec(block, offset, dtype, shape, contiguous_strides(shape, dtype.itemsize))


def transform(
    kind: Any,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    *,
    direction: Any = "forward",
    lengths: tuple[int, ...] | None = None,
    norm: Any = "backward",
    source: ArraySpec | None = None,
    out: ArraySpec | None = None,
) -> FftSpec:
    """A transform of a packed double array to another, unless they are given; `shape` is the source's."""
    source = source or packed(shape, DType.float64 if kind == "r2c" else DType.complex128)
    if lengths is None:
        lengths = tuple(shape[axis] for axis in axes)
        if kind == "c2r":
            lengths = (*lengths[:-1], 2 * (shape[axes[-1]] - 1))
    extents = list(shape)
    for axis, length in zip(axes, lengths, strict=True):
        extents[axis] = length
    if kind == "r2c":
        extents[axes[-1]] = lengths[-1] // 2 + 1
    dtype = {"c2c": COMPLEX.get, "r2c": COMPLEX.get, "c2r": REAL.get}[kind](source.dtype, source.dtype)
    return FftSpec(kind, direction, lengths, axes, norm, source, out or packed(tuple(extents), dtype, 1))


def letters(plan: TransformPlan) -> str:
    """The steps by their first letters; a transform executed several times has a number."""
    names = []
    for step in plan.steps:
        is_transform = isinstance(step, FftStep)
        times = len(step.fit.offsets) if is_transform else 1
        names.append(("T" if is_transform else type(step).__name__[0]) + (str(times) if times > 1 else ""))
    return "".join(names)


TURNED = ArraySpec(0, 9 * 16, DType.complex128, (10,), (-16,))
UNALIGNED = ArraySpec(0, 4, DType.float32, (10,), (4,))
EVERY_SECOND = ArraySpec(0, 0, DType.complex128, (6, 10), (2 * 10 * 32, 32))
FORTRAN = ArraySpec(0, 0, DType.complex128, (6, 10), (16, 96))


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (transform("c2c", (64,), (0,)), "T"),
        (transform("c2c", (5, 64), (1,)), "T"),
        (transform("c2c", (64, 5), (0,)), "T"),
        (transform("c2c", (8, 9), (0, 1)), "T"),
        (transform("c2c", (8, 9), (1, 0)), "T"),
        (transform("c2c", (7, 8, 9), (0, 1, 2)), "T"),
        (transform("c2c", (7, 8, 9), (0, 2)), "T"),
        (transform("c2c", (3, 7, 8, 9), (1, 2, 3)), "T"),
        (transform("c2c", (3, 7, 8, 9), (0, 1, 2, 3)), "TT"),
        (transform("c2c", (1, 64, 1), (0, 1, 2)), "T"),
        (transform("c2c", (4, 64, 500), (1,)), "T4"),
        (transform("c2c", (500, 64, 4), (1,)), "T4"),
        (transform("c2c", (50, 64, 50), (1,)), "CTC"),
        (transform("c2c", (1, 1), (0, 1)), "C"),
        (transform("c2c", (64,), (0,), direction="inverse"), "TC"),
        (transform("c2c", (64,), (0,), norm="ortho"), "TC"),
        (transform("c2c", (64,), (0,), norm="forward", direction="inverse"), "T"),
        (transform("c2c", (64,), (0,), lengths=(50,)), "T"),
        (transform("c2c", (64,), (0,), lengths=(80,)), "ZCT"),
        (transform("c2c", (64,), (0,), lengths=(80,), direction="inverse"), "ZCT"),
        (transform("c2c", (10,), (0,), source=TURNED), "CT"),
        (transform("c2c", (6, 10), (0, 1), source=EVERY_SECOND), "T"),
        (transform("c2c", (6, 10), (0, 1), source=FORTRAN), "TT"),
        (transform("c2c", (6, 10), (1,), source=FORTRAN), "T"),
        (transform("r2c", (64,), (0,)), "T"),
        (transform("r2c", (5, 64), (1,)), "T"),
        (transform("r2c", (64, 5), (0,)), "T"),
        (transform("r2c", (8, 9), (0, 1)), "T"),
        (transform("r2c", (8, 9), (1, 0)), "TT"),
        (transform("r2c", (6, 7, 8, 9), (0, 1, 2, 3)), "TT"),
        (transform("r2c", (64,), (0,), direction="inverse"), "TC"),
        (transform("r2c", (10,), (0,), source=UNALIGNED), "CT"),
        (transform("r2c", (5, 1), (1,)), "C"),
        (transform("c2r", (33,), (0,), direction="inverse"), "CT"),
        (transform("c2r", (33,), (0,)), "CT"),
        (transform("c2r", (8, 9), (0, 1)), "CT"),
        (transform("c2r", (5, 6, 7, 8), (0, 1, 2, 3)), "CTT"),
        (transform("c2r", (50, 6, 50), (1,)), "CTC"),
        (transform("c2r", (5, 1), (1,), lengths=(1,)), "CC"),
    ],
)
def test_the_steps(spec: FftSpec, steps: str) -> None:
    assert letters(TransformPlan(spec)) == steps


class _Memory:
    """Buffers of a plan as NumPy arrays; whatever reads or writes outside of one fails."""

    def __init__(self, spec: FftSpec, plan: TransformPlan, values: Any) -> None:
        self.buffers: dict[int, bytearray] = {buffer: bytearray(size) for buffer, size in plan.sizes.items()}
        self.buffers[SOURCE] = bytearray(values.tobytes())
        self.buffers[OUT] = bytearray(math.prod(spec.out.shape) * spec.out.dtype.itemsize)

    def view(self, view: View) -> Any:
        return np.ndarray(view.shape, view.dtype.dtype, self.buffers[view.buffer], 0, view.strides)

    def side(self, buffer: int, offset: int, key: Any, *, is_in: bool) -> Any:
        """The operands of a plan: batch and axes."""
        embed, stride, distance = (
            (key.inembed, key.istride, key.idist) if is_in else (key.onembed, key.ostride, key.odist)
        )
        is_real = key.kind == ("r2c" if is_in else "c2r")
        extents = list(key.lengths)
        if key.kind != "c2c" and not is_real:
            extents[-1] = extents[-1] // 2 + 1
        strides = [stride]
        for extent in embed[:0:-1]:
            strides.insert(0, strides[0] * extent)
        dtype = np.dtype(
            ("f" if is_real else "c") + str(8 * (2 if key.is_double else 1) // (2 if is_real else 1))
        )
        steps = [step * dtype.itemsize for step in (distance, *strides)]
        return np.ndarray((key.batch, *extents), dtype, self.buffers[buffer], offset, steps)


def run(spec: FftSpec, plan: TransformPlan, values: Any) -> Any:
    """The result of the steps, with NumPy for the library."""
    memory = _Memory(spec, plan, values)
    for step in plan.steps:
        if isinstance(step, Zero):
            memory.view(step.out)[...] = 0
        elif isinstance(step, Convert):
            numbers = memory.view(step.source) * step.scale
            if spec.out.dtype.kind == "float" and step.out.buffer == OUT:
                numbers = numbers.real
            memory.view(step.out)[...] = np.conj(numbers) if step.conjugate else numbers
        else:
            key = step.fit.key
            axes = tuple(range(1, 1 + len(key.lengths)))
            for source, out in step.fit.offsets:
                given = memory.side(step.source, source, key, is_in=True)
                if key.kind == "c2c":
                    function = np.fft.fftn if step.is_forward else np.fft.ifftn
                    norm = "backward" if step.is_forward else "forward"
                    result = function(given, axes=axes, norm=norm)
                elif key.kind == "r2c":
                    result = np.fft.rfftn(given, axes=axes)
                else:
                    result = np.fft.irfftn(given, key.lengths, axes, "forward")
                memory.side(step.out, out, key, is_in=False)[...] = result
    return memory.view(View(OUT, spec.out.dtype, spec.out.shape, spec.out.strides))


@given(
    kind=st.sampled_from(["c2c", "r2c", "c2r"]),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_numbers(kind: Any, shape: list[int], data: st.DataObject) -> None:
    """Also with more axes and loops than in a test of a device."""
    axes = tuple(data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))])
    lengths = tuple(data.draw(st.integers(1, 6)) for _ in axes)
    spec = transform(
        kind, tuple(shape), axes, lengths=lengths, direction="forward" if kind != "c2r" else "inverse"
    )
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    values = values.real if kind == "r2c" else values
    functions = {"c2c": np.fft.fftn, "r2c": np.fft.rfftn, "c2r": np.fft.irfftn}
    expected = functions[kind](values, lengths, axes)
    np.testing.assert_allclose(run(spec, TransformPlan(spec), values), expected, atol=1e-11)
