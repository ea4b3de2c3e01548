"""The base of convolutions, pooling and attention: kernels of `dnn.cu`, and wide arrays for them."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from struct import Struct
from typing import Any, ClassVar

from ...base import DType
from ...base.contract.ops import ArraySpec, StatusArray
from ...base.gpu.driver import Function
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice
from . import _cudnn
from ._cudnn import Cudnn, Graph

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)

KINDS = {dtype: number for number, dtype in enumerate(FLOATS)}
"""As in dnn.cu."""

LANES = 32
"""Threads that share a row, or a weight."""

GRID = "18q"
"""As in dnn.cu."""

_SPATIAL = 3
# Bytes: what the front end takes for granted of its tensors.
_ALIGNMENT = 16


class DnnKernels(CudaLibrary):
    """The kernels of the source `dnn`, and cuDNN: both are loaded when a plan needs them."""

    name = "dnn"
    # Graphs of cuDNN have kernels in device memory.
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._functions: dict[str, tuple[Function, Struct]] = {}
        self._cudnn: Cudnn | None = None
        self._has_looked = False

    def _find_cudnn(self) -> Cudnn | None:
        """Load cuDNN, once; None where it is not installed. Blocks."""
        if not self._has_looked:
            self._has_looked = True
            front = _cudnn.front_end()
            self._cudnn = None if front is None else Cudnn(self._device, front)
        return self._cudnn

    def _run_graph(self, graph: Graph, call: KernelCall, addresses: dict[str, int]) -> None:
        """Enqueue a graph of cuDNN."""
        workspace = call.workspace(graph.size)
        try:
            graph.run(call.stream, workspace, addresses)
        except (RuntimeError, ValueError) as error:
            assert self._cudnn is not None
            raise self._cudnn.error_of(error) from error

    def _close_plan(self, plan: Any) -> None:
        graph = getattr(plan, "graph", None)
        if graph is not None:
            graph.close()

    def _is_busy(self, plan: Any) -> bool:
        graph = getattr(plan, "graph", None)
        return graph is not None and graph.is_busy

    def _destroy(self) -> None:
        if self._cudnn is not None:
            self._cudnn.destroy()
        super()._destroy()

    def _load(self, name: str, layout: Struct) -> None:
        """Load a kernel; the first one compiles the source, which blocks."""
        if name not in self._functions:
            self._functions[name] = self._device.kernels.function("dnn", name, layout.size), layout

    def launch(
        self, name: str, call: KernelCall, count: int, *values: object, layout: Struct | None = None
    ) -> None:
        """Launch a kernel that is loaded, for so many threads."""
        function, own = self._functions[name]
        function.run(call.handle, count, layout or own, *values)


def wide_of(dtype: DType) -> DType:
    """Return the type that an array is computed in."""
    return DType.float32 if dtype.is_half else dtype


def wide(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array, or of a copy, without gaps and in the type that it is computed in."""
    if not array.dtype.is_half:
        return call.packed(array)
    room = call.workspace_array(DType.float32, array.shape)
    call.convert(call.array(array), room)
    return room.address


def is_aligned(array: ArraySpec) -> bool:
    """Tell whether the first element lies where cuDNN may read several at once."""
    return array.offset % _ALIGNMENT == 0


def aligned(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array without gaps, as cuDNN wants it: its own, or a copy's."""
    return call.packed(array) if is_aligned(array) else call.copy_of(array).address


@contextmanager
def aligned_result(call: KernelCall, array: ArraySpec, *, is_direct: bool = False) -> Generator[int]:
    """Give the address to write a result to, without gaps and as cuDNN wants it; or as it lies."""
    if is_direct or (array.is_contiguous and is_aligned(array)):
        yield call.at(array)
        return
    room = call.workspace_array(array.dtype, array.shape)
    yield room.address
    call.convert(room, call.array(array))


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
        images: Images of shape (..., *spatial).
        windows: Windows of shape (..., *windows).
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


def first_wrong(words: StatusArray) -> int:
    """Return the number that a kernel has found wrong, out of its two halves."""
    return (int(words[2]) << 32) | (int(words[1]) & 0xFFFFFFFF)
