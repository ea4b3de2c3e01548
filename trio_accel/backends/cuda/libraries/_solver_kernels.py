"""What dense solvers need around the vendor's routines: status words, triangles, pivots and pointers."""

from __future__ import annotations

import struct
from typing import Literal

from ...base.checks import NATIVE
from ...base.device_array import DeviceArray, stacked
from ..runtime._kernels import Kernels

__all__ = ["POINTER", "SolverKernels"]

POINTER = 8
"""Bytes of a device address, and of a pivot of the 64-bit API."""

# As in solver.cu.
_ARGUMENTS = struct.Struct("<QQQQqqqqii")
_TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
_TRIANGLES = {"": 0, "L": 1, "U": 2}
_OF_ELEMENTS = ("screen", "blank", "finish_triangle")
_NAMES = (*_OF_ELEMENTS, "merge", "confirm_pivots", "determinants", "move_pivots", "list_matrices")


class SolverKernels:
    """Kernels of the backend's own: solver.cu says what each does. Made blockingly: they are compiled."""

    def __init__(self, kernels: Kernels) -> None:
        self._functions = {name: kernels.function("solver", name, _ARGUMENTS.size) for name in _NAMES}

    def apply(
        self,
        stream: int,
        name: Literal["screen", "blank", "finish_triangle", "confirm_pivots"],
        matrices: DeviceArray,
        status: int = 0,
        triangle: str = "",
    ) -> None:
        """Enqueue something for each element of matrices without gaps, or for each matrix."""
        count = matrices.size if name in _OF_ELEMENTS else stacked(matrices)
        self._launch(
            stream, name, count, a=matrices.address, status=status, shape=matrices.shape[-2:],
            code=_TYPES[matrices.dtype], mode=_TRIANGLES[triangle],
        )  # fmt: skip

    def merge(self, stream: int, said: int, status: int, count: int) -> None:
        """Take over what a routine says of those matrices that have no status yet."""
        self._launch(stream, "merge", count, b=said, status=status)

    def determinants(
        self, stream: int, factors: DeviceArray, pivots: DeviceArray, status: int, out: int
    ) -> None:
        """Write three complex128 of each matrix that LU has factored; see solver.cu."""
        self._launch(
            stream, "determinants", stacked(factors), a=factors.address, b=out, c=pivots.address,
            status=status, shape=factors.shape[-2:], code=_TYPES[factors.dtype], mode=pivots.dtype.itemsize,
        )  # fmt: skip

    def move_pivots(
        self, stream: int, source: DeviceArray, out: DeviceArray, step: int, status: int = 0
    ) -> None:
        """Write pivots as numbers of another size, with a number added.

        Args:
            stream: The stream.
            source: Where they are: int32 or int64, without gaps.
            out: Where they go, likewise.
            step: What is added.
            status: With status words, pivots are checked to be rows of square matrices.
        """
        self._launch(
            stream, "move_pivots", source.size, a=source.address, b=out.address, status=status, step=step,
            shape=(source.shape[-1],) * 2, code=source.dtype.itemsize + 16 * out.dtype.itemsize,
        )  # fmt: skip

    def list_matrices(self, stream: int, first: int, nbytes: int, count: int, out: int) -> None:
        """Write the addresses of matrices that lie one by one, as batched routines want them."""
        self._launch(stream, "list_matrices", count, a=first, b=out, step=nbytes)

    def _launch(
        self, stream: int, name: str, count: int, *, a: int = 0, b: int = 0, c: int = 0, status: int = 0,
        step: int = 0, shape: tuple[int, ...] = (1, 1), code: int = 0, mode: int = 0,
    ) -> None:  # fmt: skip
        function = self._functions[name]
        with function as arguments:
            _ARGUMENTS.pack_into(arguments, 0, a, b, c, status, count, step, *shape, code, mode)
            function.launch(stream, count)
