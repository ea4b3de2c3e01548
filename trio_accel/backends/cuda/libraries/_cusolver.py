"""Solvers of cuSOLVER, and of cuBLAS for stacks with small matrices, in a table; and kernels around them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from cuda.bindings import driver
from nvmath.bindings import cublas, cusolverDn

from ...base import NATIVE, DType, Ints, Strs
from ...base.contract.device_array import DeviceArray, stacked
from ...base.gpu.driver import Kernels
from ..runtime._context import CudaContext
from ..runtime._stream import scratch
from ._cublas import KINDS

LOWER, UPPER = 0, 1

_COMPLEX = {"?orgqr": "?ungqr", "?sygvd": "?hegvd"}

_X, _WORK = "solver params", "work bytes host host_bytes info"
# Arguments of each routine, in order (D107). T is the type, R its real one, C its complex one; a* and x* are
# lists of addresses.
_CALLS = {
    "xpotrf": f"{_X} uplo n T a n T {_WORK}",
    "xgetrf": f"{_X} m n T a m pivots T {_WORK}",
    "xgetrs": f"{_X} trans n columns T a n pivots T x n info",
    "xgeqrf": f"{_X} m n T a m T tau T {_WORK}",
    "xgesvd": f"{_X} job job m n T a m R s T u m T vh n T {_WORK}",
    "xsyev_batched": f"{_X} job uplo n T a n R w T {_WORK} batch",
    "xgeev": f"{_X} none job n T a n C w T null n T v n T {_WORK}",
    "?sygvd": "solver itype job uplo n a n b n w work elements info",
    "?orgqr": "solver m n k a m tau work elements info",
    "?potrf_batched": "solver uplo n a* n info batch",
    "?getrf_batched": "blas n a* n pivots info batch",
    "?getrs_batched": "blas trans n columns a* n pivots x* n said batch",
    "?gesvdj_batched": "solver job m n a m s u m v n work elements info jacobi batch",
}
_WORDS = {name: tuple(words.split()) for name, words in _CALLS.items()}
_ARRAYS = ("a", "b", "pivots", "x", "tau", "s", "u", "v", "vh", "w")
# The functions that return the size of a workspace do not take these.
_NOT_ASKED = frozenset({*_WORK.split(), "elements", "pivots"})

Addresses: TypeAlias = "Mapping[str, tuple[int, int]]"
"""Address of each array, and its bytes for one matrix."""


@attrs.frozen(eq=False)
class SolverRoutine:
    """A routine for matrices of one size, by columns.

    Attributes:
        name: Its name in the bindings; ``?`` is a placeholder for the letter of the type.
        dtype: Element type.
        sizes: Extents, by their words in the table.
        options: Letters, in the vendor's numbers.
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
    def words(self) -> Strs:
        """Its arguments, in order."""
        return _WORDS[self.name]

    @property
    def arrays(self) -> list[str]:
        """The words for arrays, the matrices first, or for lists of arrays."""
        return [word for word in self.words if word.rstrip("*") in _ARRAYS]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrices."""
        return self.sizes.get("m", self.sizes["n"]), self.sizes["n"]

    def values(self) -> dict[str, int]:
        """Return the values of all words that depend on no address."""
        kind = KINDS[self.dtype]
        # A complex type's number is 4 more than its real type's: 0 and 1 become 4 and 5.
        values = {"T": kind.code, "R": KINDS[kind.real].code, "C": kind.code | 4, "itype": 1}
        values |= dict.fromkeys(("none", "null"), 0)
        values |= {"bytes": self.work[0], "host_bytes": self.work[1]}
        values["elements"] = self.work[0] // self.dtype.itemsize
        return {**values, **self.sizes, **self.options, "batch": self.batch}

    def function(self, suffix: str = "") -> Any:
        """Return the function of the bindings."""
        letter = KINDS[self.dtype].letter
        name = _COMPLEX.get(self.name, self.name) if letter in "cz" else self.name
        module = cublas if self.words[0] == "blas" else cusolverDn
        return getattr(module, name.replace("?", letter) + suffix)


class SolverHandles:
    """The handles of cuSOLVER and cuBLAS, each on one stream at a time. Made with the context current."""

    def __init__(self) -> None:
        # cuBLAS's status of its arguments, on the host.
        self._said = np.zeros(1, np.int32)
        self._handles: dict[str, int] = {
            "solver": cusolverDn.create(),
            "params": cusolverDn.create_params(),
            "blas": cublas.create(),
            "jacobi": cusolverDn.create_gesvdj_info(),
            "said": int(self._said.ctypes.data),
        }
        self._streams = {"solver": 0, "blas": 0}

    def sized(self, routine: SolverRoutine) -> SolverRoutine:
        """Return the routine with its workspace."""
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
        self,
        routine: SolverRoutine,
        stream: int,
        addresses: Addresses,
        count: int,
        work: tuple[int, int],
        status: int,
    ) -> None:
        """Enqueue a routine for each matrix of a stack.

        Args:
            routine: The routine, as `sized` makes it.
            stream: The stream.
            addresses: Its arrays.
            count: How many matrices there are.
            work: Addresses of its workspace, on the device and on the host.
            status: Address of the status words.
        """
        self.select(routine.words[0], stream)
        function, values = routine.function(), {**routine.values(), **self._handles}
        values["work"], values["host"] = work
        for number in range(0, count, routine.batch):
            for name, (address, nbytes) in addresses.items():
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


POINTER = 8
"""Bytes of a device address, and of a pivot of the 64-bit API."""

# The layout matches the structure in solver.cu.
_ARGUMENTS = struct.Struct("<QQQQqqqqii")
_TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
_TRIANGLES = {"": 0, "L": 1, "U": 2}
_OF_ELEMENTS = ("screen", "blank", "finish_triangle")
_NAMES = (
    *_OF_ELEMENTS,
    "merge",
    "confirm_pivots",
    "determinants",
    "move_pivots",
    "list_matrices",
    "join_pairs",
)


class SolverKernels:
    """The backend's own kernels, described in solver.cu. Making them blocks, because it compiles them."""

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
            stream,
            name,
            count,
            a=matrices.address,
            status=status,
            shape=matrices.shape[-2:],
            code=_TYPES[matrices.dtype],
            mode=_TRIANGLES[triangle],
        )

    def merge(self, stream: int, said: int, status: int, count: int) -> None:
        """Copy a routine's status to those matrices that have no status yet."""
        self._launch(stream, "merge", count, b=said, status=status)

    def determinants(
        self, stream: int, factors: DeviceArray, pivots: DeviceArray, status: int, out: int
    ) -> None:
        """Write three complex128 of each matrix that LU has factored; see solver.cu."""
        self._launch(
            stream,
            "determinants",
            stacked(factors),
            a=factors.address,
            b=out,
            c=pivots.address,
            status=status,
            shape=factors.shape[-2:],
            code=_TYPES[factors.dtype],
            mode=pivots.dtype.itemsize,
        )

    def move_pivots(
        self, stream: int, source: DeviceArray, out: DeviceArray, step: int, status: int = 0
    ) -> None:
        """Write pivots as numbers of another size, with a number added.

        Args:
            stream: The stream.
            source: The pivots: int32 or int64, without gaps.
            out: Their target, likewise.
            step: The number to add.
            status: With status words, pivots are checked to be rows of square matrices.
        """
        self._launch(
            stream,
            "move_pivots",
            source.size,
            a=source.address,
            b=out.address,
            status=status,
            step=step,
            shape=(source.shape[-1],) * 2,
            code=source.dtype.itemsize + 16 * out.dtype.itemsize,
        )

    def join_pairs(self, stream: int, columns: DeviceArray, values: int, out: int) -> None:
        """Make complex vectors from real columns: LAPACK's layout for two conjugate values."""
        self._launch(
            stream,
            "join_pairs",
            columns.size,
            a=columns.address,
            b=out,
            c=values,
            shape=columns.shape[-2:],
            code=_TYPES[columns.dtype],
        )

    def list_matrices(self, stream: int, first: int, nbytes: int, count: int, out: int) -> None:
        """Write the addresses of matrices that follow one another, as batched routines want them."""
        self._launch(stream, "list_matrices", count, a=first, b=out, step=nbytes)

    def _launch(
        self,
        stream: int,
        name: str,
        count: int,
        *,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        status: int = 0,
        step: int = 0,
        shape: Ints = (1, 1),
        code: int = 0,
        mode: int = 0,
    ) -> None:
        values = a, b, c, status, count, step, *shape, code, mode
        self._functions[name].run(stream, count, _ARGUMENTS, *values)


# Larger matrices need no more kernels than one of this size.
_WARM_UP_ROWS = {"xpotrf": 2048, "xgetrf": 2048, "xgesvd": 256, "xgeev": 256}
_LARGE_OTHERS = 1024


class WarmUps:
    """Runs routines once before they are enqueued for the first time: then they wait for the whole device.

    Kernels depend on the element type and on the size of matrices; sizes with as many bits share one trial.

    Args:
        context: The device's context.
        vendor: The handles; nothing else uses them meanwhile.
        kernels: Kernels of the backend's own.
    """

    def __init__(self, context: CudaContext, vendor: SolverHandles, kernels: SolverKernels) -> None:
        self._context = context
        self._vendor = vendor
        self._kernels = kernels
        self._done: set[tuple[object, ...]] = set()

    def run(self, *routines: SolverRoutine) -> None:
        """Try out routines, each on the results of the previous ones; blocks. The context is current."""
        max_extent = _WARM_UP_ROWS.get(routines[-1].name, _LARGE_OTHERS)
        chain = [_shrunk(routine, max_extent) for routine in routines]
        key = tuple(map(_key, chain))
        if key not in self._done:
            self._run([self._vendor.sized(routine) for routine in chain])
            self._done.add(key)

    def _run(self, chain: list[SolverRoutine]) -> None:
        first, count = chain[0], chain[0].batch
        max_extent = max(2, *[size for routine in chain for size in routine.sizes.values()])
        nbytes = max_extent**2 * first.dtype.itemsize
        # The matrix is the first one.
        words = dict.fromkeys(word for routine in chain for word in routine.arrays)
        lists = [word for word in words if word.endswith("*")]
        names = dict.fromkeys(word.rstrip("*") for word in words)
        device, host = (max(routine.work[index] for routine in chain) for index in (0, 1))
        rooms = [nbytes * count] * len(names) + [POINTER * count] * len(lists)
        with scratch(self._context, *rooms, 4 * count, device) as (stream, [*addresses, status, work]):
            arrays = dict(zip((*names, *lists), addresses, strict=True))
            self._upload(stream, addresses[0], first)
            if "b" in arrays:
                self._upload(stream, arrays["b"], first)
            for word in lists:
                self._kernels.list_matrices(stream, arrays[word[:-1]], nbytes, count, arrays[word])
            room = np.empty(max(1, host), np.uint8)
            operands = {word: (address, nbytes) for word, address in arrays.items()}
            try:
                for routine in chain:
                    self._vendor.run(routine, stream, operands, count, (work, int(room.ctypes.data)), status)
            finally:
                # The stream ends here, and another one may get its number.
                self._vendor.select_all(0)

    def _upload(self, stream: int, address: int, routine: SolverRoutine) -> None:
        """Write a matrix by columns, whose lower triangle belongs to a positive definite matrix."""
        shape = routine.shape
        matrix = np.resize(np.random.default_rng(0).random(997), shape[::-1]).astype(routine.dtype.dtype)
        matrix[np.diag_indices(min(shape))] += sum(shape)
        self._context.check(driver.cuMemcpyHtoDAsync(address, matrix.ctypes.data, matrix.nbytes, stream))
        self._context.check(driver.cuStreamSynchronize(stream))


def _shrunk(routine: SolverRoutine, limit: int) -> SolverRoutine:
    return attrs.evolve(routine, sizes={word: min(size, limit) for word, size in routine.sizes.items()})


def _key(routine: SolverRoutine) -> tuple[object, ...]:
    sizes = (size.bit_length() for size in routine.sizes.values())
    return routine.name, routine.dtype, *sizes, *routine.options.values(), routine.batch
