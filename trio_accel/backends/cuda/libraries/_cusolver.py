"""Routines of cuSOLVER, and of cuBLAS for stacks of small matrices: how each is called, by a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np
from nvmath.bindings import cublas, cusolverDn

from ...base import DType
from ...base.ops import real_of

__all__ = ["LOWER", "UPPER", "Places", "Routine", "Vendor"]

LOWER, UPPER = 0, 1

_LETTERS = {DType.float32: "s", DType.float64: "d", DType.complex64: "c", DType.complex128: "z"}
# cudaDataType.
_CODES = {DType.float32: 0, DType.float64: 1, DType.complex64: 4, DType.complex128: 5}
_COMPLEX = {"?orgqr": "?ungqr"}

_X, _WORK = "solver params", "work bytes host host_bytes info"
# What each routine is told, in order. T is the type, R its real one; a* and x* are lists of addresses.
_CALLS = {
    "xpotrf": f"{_X} uplo n T a n T {_WORK}",
    "xgetrf": f"{_X} m n T a m pivots T {_WORK}",
    "xgetrs": f"{_X} trans n columns T a n pivots T x n info",
    "xgeqrf": f"{_X} m n T a m T tau T {_WORK}",
    "xgesvd": f"{_X} job job m n T a m R s T u m T vh n T {_WORK}",
    "xsyev_batched": f"{_X} job uplo n T a n R w T {_WORK} batch",
    "?orgqr": "solver m n k a m tau work elements info",
    "?potrf_batched": "solver uplo n a* n info batch",
    "?getrf_batched": "blas n a* n pivots info batch",
    "?getrs_batched": "blas trans n columns a* n pivots x* n said batch",
    "?gesvdj_batched": "solver job m n a m s u m v n work elements info jacobi batch",
}
_WORDS = {name: tuple(words.split()) for name, words in _CALLS.items()}
_ARRAYS = ("a", "pivots", "x", "tau", "s", "u", "v", "vh", "w")
# The functions that tell the size of a workspace are not told this.
_NOT_ASKED = frozenset({*_WORK.split(), "elements", "pivots"})

Places: TypeAlias = "Mapping[str, tuple[int, int]]"
"""Where each array lies, and the bytes of it that belong to one matrix."""


@attrs.frozen(eq=False)
class Routine:
    """A routine for matrices of one size, by columns.

    Attributes:
        name: Its name in the bindings; ``?`` stands for the letter of the type.
        dtype: Element type.
        sizes: Extents, by their words in the table.
        options: Letters, as the vendor counts them.
        batch: Matrices in one call.
        work: Bytes of its workspace, on the device and on the host.
    """

    name: str
    dtype: DType
    sizes: Mapping[str, int]
    options: Mapping[str, int] = attrs.field(factory=dict[str, int])
    batch: int = 1
    work: tuple[int, int] = (0, 0)

    @property
    def words(self) -> tuple[str, ...]:
        """What it is told, in order."""
        return _WORDS[self.name]

    @property
    def arrays(self) -> list[str]:
        """Those that are arrays, the matrices first, or lists of arrays."""
        return [word for word in self.words if word.rstrip("*") in _ARRAYS]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrices."""
        return self.sizes.get("m", self.sizes["n"]), self.sizes["n"]

    def values(self) -> dict[str, int]:
        """The values of all words that depend on no address."""
        code, real = _CODES[self.dtype], _CODES[real_of(self.dtype)]
        told = {"T": code, "R": real, "bytes": self.work[0], "host_bytes": self.work[1]}
        told["elements"] = self.work[0] // self.dtype.itemsize
        return {**told, **self.sizes, **self.options, "batch": self.batch}

    def function(self, suffix: str = "") -> Any:
        """The function of the bindings."""
        letter = _LETTERS[self.dtype]
        name = _COMPLEX.get(self.name, self.name) if letter in "cz" else self.name
        module = cublas if self.words[0] == "blas" else cusolverDn
        return getattr(module, name.replace("?", letter) + suffix)


class Vendor:
    """The handles of cuSOLVER and of cuBLAS, each on one stream at a time. Made with the context current."""

    def __init__(self) -> None:
        # What cuBLAS says of its arguments, on the host.
        self._said = np.zeros(1, np.int32)
        self._handles: dict[str, int] = {
            "solver": cusolverDn.create(),
            "params": cusolverDn.create_params(),
            "blas": cublas.create(),
            "jacobi": cusolverDn.create_gesvdj_info(),
            "said": int(self._said.ctypes.data),
        }
        self._streams = {"solver": 0, "blas": 0}

    def sized(self, routine: Routine) -> Routine:
        """The routine with its workspace."""
        if "work" not in routine.words:
            return routine
        # It depends on no address.
        values = {**dict.fromkeys(_ARRAYS, 256), **routine.values(), **self._handles}
        asked = [values[word] for word in routine.words if word not in _NOT_ASKED]
        said: int | tuple[int, int] = routine.function("_buffer_size")(*asked)
        return attrs.evolve(
            routine, work=said if isinstance(said, tuple) else (said * routine.dtype.itemsize, 0)
        )

    def run(
        self, routine: Routine, stream: int, places: Places, count: int, work: tuple[int, int], status: int
    ) -> None:
        """Enqueue a routine for each matrix of a stack.

        Args:
            routine: The routine, as `sized` makes it.
            stream: The stream.
            places: Its arrays.
            count: How many matrices there are.
            work: Where its workspace lies, on the device and on the host.
            status: Where the status words lie.
        """
        self.select(routine.words[0], stream)
        function, values = routine.function(), {**routine.values(), **self._handles}
        values["work"], values["host"] = work
        for number in range(0, count, routine.batch):
            for name, (address, nbytes) in places.items():
                values[name] = address + number * nbytes
            values["info"] = status + 4 * number
            values["batch"] = min(routine.batch, count - number)
            function(*[values[word] for word in routine.words])

    def select(self, handle: str, stream: int) -> None:
        """Let a handle work on a stream."""
        if stream != self._streams[handle]:
            module = cublas if handle == "blas" else cusolverDn
            module.set_stream(self._handles[handle], stream)
            self._streams[handle] = stream

    def select_all(self, stream: int) -> None:
        """Let all handles work on a stream."""
        for handle in self._streams:
            self.select(handle, stream)

    def destroy(self) -> None:
        """Give the handles back; the context is current."""
        handles = self._handles
        cusolverDn.destroy_gesvdj_info(handles["jacobi"])
        cublas.destroy(handles["blas"])
        cusolverDn.destroy_params(handles["params"])
        cusolverDn.destroy(handles["solver"])
