"""Products of whole numbers, which cuBLAS does not have as NumPy does: by a kernel of the backend's own."""

from __future__ import annotations

import struct

from ...base.device_array import DeviceArray
from ...base.product_layouts import broadcast_operands
from ..runtime._kernels import Kernels
from ..runtime._stream import CudaStream

__all__ = ["IntegerProducts"]

# As in integers.cu.
_AXES = 64
_ARGUMENTS = struct.Struct("<QQQqqqqqqqqii")


class IntegerProducts:
    """Multiplies whole numbers modulo two to the power of their bits. Compiled when it is made, which blocks.

    One thread for each element of the result, without tiles: right, and far from what the device could do.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._multiply = kernels.function("integers", "multiply", _ARGUMENTS.size + 3 * 8 * _AXES)

    def multiply(self, stream: CudaStream, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        """Enqueue ``out = a @ b`` by NumPy's rules; ``out`` is in C order and not empty."""
        batch, left, right = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
        with self._multiply as arguments:
            _ARGUMENTS.pack_into(
                arguments,
                0,
                a.address,
                b.address,
                out.address,
                out.size,
                left.shape[0],
                right.shape[1],
                left.shape[1],
                *left.strides,
                *right.strides,
                a.dtype.itemsize,
                len(batch),
            )
            for number, row in enumerate((batch, left.batch_strides, right.batch_strides)):
                struct.pack_into(f"<{len(row)}q", arguments, _ARGUMENTS.size + 8 * _AXES * number, *row)
            self._multiply.launch(stream.handle, out.size)
