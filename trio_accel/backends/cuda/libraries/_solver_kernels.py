"""What dense solvers need around the vendor's routines: status words, triangles, pivots and pointers."""

from __future__ import annotations

import struct
from typing import Literal

from ...base.checks import NATIVE
from ..kit._call import Call
from ..kit._matrices import stacked
from ..runtime._device_array import DeviceArray
from ..runtime._kernels import Kernels

__all__ = ["POINTER", "SolverKernels"]

POINTER = 8
"""Bytes of a device address, and of a pivot of the 64-bit API."""

# As in solver.cu.
_ARGUMENTS = struct.Struct("<QQQqqqqii")
_TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
_TRIANGLES = {"": 0, "L": 1, "U": 2}
_NAMES = ("screen", "blank", "finish_triangle", "merge", "confirm_pivots", "move_pivots", "list_matrices")


class SolverKernels:
    """Kernels of the backend's own. Compiled when they are made, which blocks."""

    def __init__(self, kernels: Kernels) -> None:
        self._functions = {name: kernels.function("solver", name, _ARGUMENTS.size) for name in _NAMES}

    def apply(
        self,
        call: Call,
        name: Literal["screen", "blank", "finish_triangle"],
        matrices: DeviceArray,
        status: int = 0,
        triangle: str = "",
    ) -> None:
        """Enqueue something for each element of matrices without gaps; see solver.cu."""
        rows, columns = matrices.shape[-2:]
        code, mode = _TYPES[matrices.dtype], _TRIANGLES[triangle]
        self._launch(
            call.handle, name, matrices.size, a=matrices.address, status=status, rows=rows, columns=columns,
            code=code, mode=mode,
        )  # fmt: skip

    def merge(self, call: Call, said: int, status: int, count: int) -> None:
        """Take over what a routine says of those matrices that have no status yet."""
        self._launch(call.handle, "merge", count, b=said, status=status)

    def confirm_pivots(self, call: Call, factors: DeviceArray, status: int) -> None:
        """Look at the pivots of LU that are said to be zero."""
        rows, columns = factors.shape[-2:]
        self._launch(
            call.handle, "confirm_pivots", stacked(factors), a=factors.address, status=status, rows=rows,
            columns=columns, code=_TYPES[factors.dtype],
        )  # fmt: skip

    def move_pivots(
        self,
        call: Call,
        source: tuple[int, int],
        out: tuple[int, int],
        shape: tuple[int, int],
        step: int,
        status: int = 0,
    ) -> None:
        """Write pivots as numbers of another size, with a number added.

        Args:
            call: The launch.
            source: Where they are, and the bytes of one.
            out: Where they go, and the bytes of one.
            shape: Matrices, and pivots of each.
            step: What is added.
            status: With status words, pivots are checked to be rows of square matrices.
        """
        count, n = shape
        self._launch(
            call.handle, "move_pivots", count * n, a=source[0], b=out[0], status=status, step=step, rows=n,
            columns=n, code=source[1] + 16 * out[1],
        )  # fmt: skip

    def list_matrices(self, stream: int, first: int, nbytes: int, count: int, out: int) -> None:
        """Write the addresses of matrices that lie one by one, as batched routines want them."""
        self._launch(stream, "list_matrices", count, a=first, b=out, step=nbytes)

    def _launch(
        self, stream: int, name: str, count: int, *, a: int = 0, b: int = 0, status: int = 0, step: int = 0,
        rows: int = 1, columns: int = 1, code: int = 0, mode: int = 0,
    ) -> None:  # fmt: skip
        function = self._functions[name]
        with function as arguments:
            _ARGUMENTS.pack_into(arguments, 0, a, b, status, count, step, rows, columns, code, mode)
            function.launch(stream, count)
