"""Element-wise work on arrays of any layout, by kernels of the backend's own."""

from __future__ import annotations

import struct

from cuda.bindings import driver

from ...base import DType, scalar
from ...base.device_array import DeviceArray
from ..runtime._context import CudaContext
from ..runtime._kernels import Kernels
from ..runtime._stream import CudaStream

__all__ = ["ArrayKernels"]

# As in arrays.cu.
_AXES = 64
_CONVERT = struct.Struct("<QQqdiiii")
_FILL = struct.Struct("<Qqii16s")
_TYPES = {dtype: code for code, dtype in enumerate(DType)}
_SINGLE = frozenset(
    {
        DType.float32,
        DType.float16,
        DType.bfloat16,
        DType.float8_e4m3fn,
        DType.float8_e5m2,
        DType.complex64,
    }
)


class ArrayKernels:
    """Converts and fills arrays. Compiled when it is made, which blocks."""

    def __init__(self, context: CudaContext, kernels: Kernels) -> None:
        self._context = context
        self._convert = kernels.function("arrays", "convert", _CONVERT.size + 3 * 8 * _AXES)
        self._fill = kernels.function("arrays", "fill", _FILL.size + 2 * 8 * _AXES)

    def convert(
        self,
        stream: CudaStream,
        source: DeviceArray,
        out: DeviceArray,
        *,
        scale: float = 1.0,
        conjugate: bool = False,
    ) -> None:
        """Enqueue ``out = source * scale``, as `numpy.ndarray.astype` converts.

        Computed in float32 where both types are no wider, else in float64. In place only where both arrays
        are the same.
        """
        assert source.shape == out.shape
        if not out.size:
            return
        is_plain = source.dtype is out.dtype and (scale, conjugate) == (1.0, False)
        if is_plain and source.is_contiguous and out.is_contiguous:
            self._context.check(
                driver.cuMemcpyDtoDAsync(out.address, source.address, out.nbytes, stream.handle)
            )
            return
        shape, (ins, outs) = _simplified(source.shape, source.strides, out.strides)
        flags = (
            (1 if scale != 1.0 else 0)
            | (2 if conjugate else 0)
            | (4 if source.dtype in _SINGLE and out.dtype in _SINGLE else 0)
            | (8 if is_plain else 0)
        )
        types = _TYPES[source.dtype], _TYPES[out.dtype]
        with self._convert as arguments:
            _CONVERT.pack_into(
                arguments, 0, source.address, out.address, out.size, scale, *types, flags, len(shape)
            )
            _pack_layout(arguments, _CONVERT.size, shape, ins, outs)
            self._convert.launch(stream.handle, out.size)

    def fill(self, stream: CudaStream, out: DeviceArray, value: complex) -> None:
        """Enqueue that every element is set to one value.

        Raises:
            LibraryError: The type cannot hold it.
        """
        bits = scalar(value, out.dtype).tobytes()
        if not out.size:
            return
        size, check = out.dtype.itemsize, self._context.check
        shape, (strides,) = _simplified(out.shape, out.strides)
        if strides in ((), (size,)) and bits == bits[:1] * size:
            check(driver.cuMemsetD8Async(out.address, bits[0], out.nbytes, stream.handle))
        elif strides in ((), (size,)) and size == 4:
            check(
                driver.cuMemsetD32Async(out.address, int.from_bytes(bits, "little"), out.size, stream.handle)
            )
        else:
            with self._fill as arguments:
                _FILL.pack_into(arguments, 0, out.address, out.size, size, len(shape), bits)
                _pack_layout(arguments, _FILL.size, shape, strides)
                self._fill.launch(stream.handle, out.size)


def _pack_layout(arguments: bytearray, offset: int, *rows: tuple[int, ...]) -> None:
    for number, row in enumerate(rows):
        struct.pack_into(f"<{len(row)}q", arguments, offset + 8 * _AXES * number, *row)


def _simplified(
    shape: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same elements in the same order with as few axes as can be: an index costs a division each."""
    extents: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        pairs = [(row, stride[axis]) for row, stride in zip(steps, strides, strict=True)]
        if extents and all(row[-1] == extent * step for row, step in pairs):
            extents[-1] *= extent
            for row, step in pairs:
                row[-1] = step
        else:
            extents.append(extent)
            for row, step in pairs:
                row.append(step)
    return tuple(extents), [tuple(row) for row in steps]
