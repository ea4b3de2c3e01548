"""Routines of cuSOLVER and cuBLAS for stacks of small matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from nvmath.bindings import cublas, cusolverDn

from ...base import DType
from ._cusolver import LETTERS, Handle

__all__ = ["Batched"]

_TRIANGLES = {"L": 0, "U": 1}


class Batched:
    """Routines for stacks of small matrices, which they find by lists of addresses.

    Made with the context current.
    """

    def __init__(self, solver: Handle) -> None:
        self._solver = solver
        self._blas: int = cublas.create()
        self._jacobi: int = cusolverDn.create_gesvdj_info()
        self._stream = 0
        # What cuBLAS says of its arguments, on the host.
        self._said = np.zeros(1, np.int32)

    def potrf(
        self, stream: int, dtype: DType, n: int, triangle: str, listed: int, status: int, count: int
    ) -> None:
        """Cholesky of matrices by columns."""
        self._solver.select(stream)
        function: Callable[..., None] = getattr(cusolverDn, f"{LETTERS[dtype]}potrf_batched")
        function(self._solver.handle, _TRIANGLES[triangle], n, listed, n, status, count)

    def getrf(
        self, stream: int, dtype: DType, n: int, listed: int, pivots: int, status: int, count: int
    ) -> None:
        """LU of square matrices by columns, with pivots of 32 bits, from 1."""
        self._function(stream, f"{LETTERS[dtype]}getrf_batched")(
            self._blas, n, listed, n, pivots, status, count
        )

    def getrs(
        self, stream: int, dtype: DType, shape: tuple[int, int], trans: int, listed: int, pivots: int,
        sides: int, count: int,
    ) -> None:  # fmt: skip
        """Solutions by what `getrf` has made, for n rows and so many columns."""
        n, columns = shape
        self._function(stream, f"{LETTERS[dtype]}getrs_batched")(
            self._blas, trans, n, columns, listed, n, pivots, sides, n, self._said.ctypes.data, count
        )

    def gesvdj_size(self, dtype: DType, m: int, n: int, count: int) -> int:
        """Elements of workspace for `gesvdj`."""
        function: Callable[..., int] = getattr(cusolverDn, f"{LETTERS[dtype]}gesvdj_batched_buffer_size")
        return function(self._solver.handle, 1, m, n, 256, m, 256, 256, m, 256, n, self._jacobi, count)

    def gesvdj(
        self, stream: int, dtype: DType, shape: tuple[int, int], places: tuple[int, int, int, int],
        work: tuple[int, int], status: int, count: int,
    ) -> None:  # fmt: skip
        """Singular values of matrices by columns, with square U and V, of at most 32 rows and columns.

        Args:
            stream: The stream.
            dtype: Element type.
            shape: Rows and columns.
            places: Where the matrices, the values, U and V lie.
            work: Where the workspace lies, and its elements.
            status: Where the status words lie.
            count: How many matrices there are.
        """
        m, n = shape
        a, s, u, v = places
        self._solver.select(stream)
        function: Callable[..., None] = getattr(cusolverDn, f"{LETTERS[dtype]}gesvdj_batched")
        function(self._solver.handle, 1, m, n, a, m, s, u, m, v, n, *work, status, self._jacobi, count)

    def _function(self, stream: int, name: str) -> Callable[..., None]:
        if stream != self._stream:
            cublas.set_stream(self._blas, stream)
            self._stream = stream
        function: Callable[..., None] = getattr(cublas, name)
        return function

    def destroy(self) -> None:
        """Give its handles back; the context is current."""
        cusolverDn.destroy_gesvdj_info(self._jacobi)
        cublas.destroy(self._blas)
