"""What convolutions, pooling and attention have in common: kernels of `dnn.cu`, and wide arrays for them."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from struct import Struct
from typing import Any

from ...base import DType
from ...base.gpu.driver import Function
from ...base.ops import ArraySpec
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice

__all__ = ["FLOATS", "GRID", "LANES", "DnnKernels", "grid_of", "images_of", "wide", "wide_of", "wide_result"]

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)

LANES = 32
"""Threads that share a row, or a weight."""

GRID = "18q"
"""As in dnn.cu."""

_SPATIAL = 3


class DnnKernels(CudaLibrary):
    """The kernels of the source `dnn`, which are loaded when a plan needs them."""

    name = "dnn"

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._functions: dict[str, tuple[Function, Struct]] = {}

    def _load(self, name: str, layout: Struct) -> None:
        """Load a kernel; the first one compiles the source, which blocks."""
        if name not in self._functions:
            self._functions[name] = self._device.kernels.function("dnn", name, layout.size), layout

    def _launch(self, name: str, call: KernelCall, count: int, *values: object) -> None:
        """Launch a kernel that is loaded, for so many threads."""
        function, layout = self._functions[name]
        function.run(call.handle, count, layout, *values)


def wide_of(dtype: DType) -> DType:
    """Return the type that an array is computed in."""
    return DType.float32 if dtype.is_half else dtype


def wide(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array without gaps, in the type that it is computed in: its own, or a copy's."""
    if not array.dtype.is_half:
        return call.packed(array)
    room = call.workspace_array(DType.float32, array.shape)
    call.convert(call.array(array), room)
    return room.address


@contextmanager
def wide_result(call: KernelCall, array: ArraySpec) -> Generator[int]:
    """Give the address to write a result to, without gaps and in the type that it is computed in."""
    if array.is_contiguous and not array.dtype.is_half:
        yield call.at(array)
        return
    room = call.workspace_array(wide_of(array.dtype), array.shape)
    yield room.address
    call.convert(room, call.array(array))


def grid_of(spec: Any, images: ArraySpec, windows: ArraySpec, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of a grid with three axes, the first of which may have one element.

    Args:
        spec: Has stride and padding, and perhaps a dilation.
        images: Of shape (..., *spatial).
        windows: Of shape (..., *windows).
        extents: Elements of a window.
    """
    axes = len(spec.stride)
    rows = (
        (images.shape[-axes:], 1), (extents, 1), (windows.shape[-axes:], 1), (spec.stride, 1),
        (spec.padding, 0), (getattr(spec, "dilation", (1,) * axes), 1),
    )  # fmt: skip
    return tuple([number for row, fill in rows for number in (*(fill,) * (_SPATIAL - axes), *row)])


def images_of(array: ArraySpec, axes: int) -> int:
    """Return how many images there are; 1 where they have no axis."""
    return math.prod(array.shape[: array.ndim - axes - 1])
