"""Routines of cuSOLVER for matrices of one size: what they are told, and what memory they need."""

# Routines take as many arguments as they have.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
from nvmath.bindings import cusolverDn

from ...base import DType
from ...base.ops import real_of

__all__ = [
    "LETTERS",
    "Handle",
    "Routine",
    "eigen",
    "orthogonal",
    "pivoted",
    "positive",
    "reflected",
    "singular",
    "solved",
]

LETTERS = {DType.float32: "s", DType.float64: "d", DType.complex64: "c", DType.complex128: "z"}
"""How names of routines tell element types."""

# cudaDataType.
_CODES = {DType.float32: 0, DType.float64: 1, DType.complex64: 4, DType.complex128: 5}
_LOWER, _UPPER = 0, 1

_Arguments: TypeAlias = Callable[..., tuple[int, ...]]


@attrs.frozen(eq=False)
class Routine:
    """A routine for matrices of one size, by columns.

    Attributes:
        name: Its name in the bindings.
        dtype: Element type.
        shape: Rows and columns of its first array.
        rooms: Bytes that each of its arrays takes for one matrix; the matrices of a stack lie so far apart.
        arguments: What it is told between its handle and its workspace, given where its arrays lie.
        asked: The same for the function that tells the size of its workspace; None if there is no difference.
        is_64: Whether it is one of the 64-bit API, which has workspace on the host too.
        batch: Matrices in one call; None if it takes one only.
        has_workspace: Whether it needs any.
    """

    name: str
    dtype: DType
    shape: tuple[int, int]
    rooms: tuple[int, ...]
    arguments: _Arguments
    asked: _Arguments | None = None
    is_64: bool = True
    batch: int | None = None
    has_workspace: bool = True

    def sizes(self, handle: Handle) -> tuple[int, int]:
        """Ask for its workspace: bytes on the device, and on the host."""
        if not self.has_workspace:
            return 0, 0
        # It depends on no address.
        places = (256,) * len(self.rooms)
        function: Callable[..., Any] = getattr(cusolverDn, f"{self.name}_buffer_size")
        told = (self.asked or self.arguments)(*places)
        if not self.is_64:
            return int(function(handle.handle, *told)) * self.dtype.itemsize, 0
        some = () if self.batch is None else (self.batch,)
        device, host = function(handle.handle, handle.params, *told, *some)
        return int(device), int(host)

    def run(
        self,
        handle: Handle,
        places: tuple[int, ...],
        count: int,
        sizes: tuple[int, int],
        work: tuple[int, int],
        status: int,
    ) -> None:
        """Enqueue it for each matrix of a stack.

        Args:
            handle: The handle, on the stream.
            places: Where its arrays lie.
            count: How many matrices there are.
            sizes: What `sizes` says.
            work: Where its workspace lies, on the device and on the host.
            status: Where the status words lie.
        """
        function: Callable[..., None] = getattr(cusolverDn, self.name)
        first: tuple[int, ...] = (handle.handle, handle.params)
        memory: tuple[int, ...] = (work[0], sizes[0], work[1], sizes[1])
        if not self.has_workspace:
            memory = ()
        elif not self.is_64:
            first, memory = first[:1], (work[0], sizes[0] // self.dtype.itemsize)
        for number in range(0, count, self.batch or 1):
            here = [place + number * room for place, room in zip(places, self.rooms, strict=True)]
            some = () if self.batch is None else (min(self.batch, count - number),)
            function(*first, *self.arguments(*here), *memory, status + 4 * number, *some)


class Handle:
    """A handle of cuSOLVER, on one stream at a time. Made with the context current.

    Attributes:
        handle: The library's own.
        params: What routines of the 64-bit API are told: nothing special.
    """

    def __init__(self, stream: int = 0) -> None:
        self.handle: int = cusolverDn.create()
        self.params: int = cusolverDn.create_params()
        self._stream = 0
        self.select(stream)

    def select(self, stream: int) -> None:
        """Let it work on a stream."""
        if stream != self._stream:
            cusolverDn.set_stream(self.handle, stream)
            self._stream = stream

    def destroy(self) -> None:
        """Give it back; the context is current."""
        cusolverDn.destroy_params(self.params)
        cusolverDn.destroy(self.handle)


def positive(dtype: DType, n: int, triangle: str) -> Routine:
    """Cholesky: of the matrix."""
    code, uplo = _CODES[dtype], _UPPER if triangle == "U" else _LOWER
    return Routine("xpotrf", dtype, (n, n), (n * n * dtype.itemsize,), lambda a: (uplo, n, code, a, n, code))


def pivoted(dtype: DType, m: int, n: int) -> Routine:
    """LU: of the matrix and its pivots, from 1."""
    code = _CODES[dtype]
    return Routine(
        "xgetrf", dtype, (m, n), (m * n * dtype.itemsize, 8 * min(m, n)),
        lambda a, pivots: (m, n, code, a, m, pivots, code), lambda a, pivots: (m, n, code, a, m, code),
    )  # fmt: skip


def solved(dtype: DType, n: int, columns: int, trans: int) -> Routine:
    """Solutions: of what `pivoted` makes, its pivots, and the right-hand sides, whose place they take."""
    code, size = _CODES[dtype], dtype.itemsize
    return Routine(
        "xgetrs", dtype, (n, n), (n * n * size, 8 * n, n * columns * size),
        lambda a, pivots, x: (trans, n, columns, code, a, n, pivots, code, x, n), has_workspace=False,
    )  # fmt: skip


def reflected(dtype: DType, m: int, n: int) -> Routine:
    """QR: of the matrix and the factors of its reflections."""
    code, size = _CODES[dtype], dtype.itemsize
    return Routine(
        "xgeqrf", dtype, (m, n), (m * n * size, min(m, n) * size),
        lambda a, tau: (m, n, code, a, m, code, tau, code),
    )  # fmt: skip


def orthogonal(dtype: DType, m: int, n: int, k: int) -> Routine:
    """Q of QR: of a matrix of n columns, the first k of which hold reflections, and the factors of these."""
    letter, size = LETTERS[dtype], dtype.itemsize
    name = f"{letter}{'ungqr' if letter in 'cz' else 'orgqr'}"
    return Routine(
        name, dtype, (m, n), (m * n * size, k * size), lambda a, tau: (m, n, k, a, m, tau), is_64=False
    )


def singular(dtype: DType, m: int, n: int, job: str) -> Routine:
    """Singular values: of the matrix with m >= n, the values, U and V conjugated and transposed."""
    code, size, real = _CODES[dtype], dtype.itemsize, real_of(dtype)
    columns, letter, values = m if job == "A" else n, ord(job), _CODES[real]
    rooms = 0 if job == "N" else size
    return Routine(
        "xgesvd", dtype, (m, n), (m * n * size, n * real.itemsize, m * columns * rooms, n * n * rooms),
        lambda a, s, u, vh: (letter, letter, m, n, code, a, m, values, s, code, u, m, code, vh, n, code),
    )  # fmt: skip


def eigen(dtype: DType, n: int, triangle: str, has_vectors: bool, batch: int = 1) -> Routine:
    """Eigenvalues of Hermitian matrices: of the matrix, whose place its vectors take, and the values."""
    code, real = _CODES[dtype], real_of(dtype)
    uplo, values = _UPPER if triangle == "U" else _LOWER, _CODES[real]
    return Routine(
        "xsyev_batched", dtype, (n, n), (n * n * dtype.itemsize, n * real.itemsize),
        lambda a, w: (int(has_vectors), uplo, n, code, a, n, values, w, code), batch=batch,
    )  # fmt: skip
