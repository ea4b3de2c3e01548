"""Direct solutions of sparse systems by cuDSS: it finds an order on the host, and makes and uses factors."""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from nvmath.bindings import cudss

from ...base import DType, NotSupportedError
from ..kit._library import KernelCall, LibraryDevice, read_now
from ..runtime._stream import CudaStream
from ._sparse_makers import TYPES, VALUE_TYPES

# The version of the bindings: numbers of parameters change between versions.
_VERSION = (0, 8)
_INSTALL = "pip install '.[cuda13]' in a checkout, or '.[cuda12]'"
_INDEX_TYPES = {DType.int32: cudss.DataType.R_32I, DType.int64: cudss.DataType.R_64I}
_NAME_LENGTH = 64
# Part of cuDSS: several threads of the host find an order in less time.
_THREADS = "libcudss_mtlayer_gomp.so.0"
# The layout matches the structure in residuals.cu.
_ARGUMENTS = struct.Struct("<6Q2qii")
SIZES = 4
"""Numbers that judge the solution of one side."""

# The number of roundings that a solution may be off, relative to the largest number in its residual's sums.
_ROUNDINGS = 1 << 10

_Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p
)
_Free = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Handler(ctypes.Structure):
    """``cudssDeviceMemHandler_t``."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("allocate", _Allocate),
        ("free", _Free),
        ("name", ctypes.c_char * _NAME_LENGTH),
    )


@attrs.frozen(eq=False)
class LinearSystem:
    """Equations, by addresses.

    Attributes:
        rows: The number of equations.
        stored: Values of the matrix.
        matrix: Its row pointers, columns that ascend in each row, and values.
        index: Dtype of its row pointers and columns.
        dtype: Dtype of all values.
        sides: Number of right-hand sides.
        b: Right-hand sides, column by column.
        x: Solutions, likewise.
    """

    rows: int
    stored: int
    matrix: tuple[int, int, int]
    index: DType
    dtype: DType
    sides: int
    b: int
    x: int


@attrs.frozen(eq=False)
class CudssFactors:
    """Factors that cuDSS has made.

    Attributes:
        terms: Its objects for the configuration, the factors and the matrix.
        close: Frees them; the stream of `Cudss.use` orders that, and the context is current.
    """

    terms: tuple[int, int, int]
    close: Callable[[], None]


class Cudss:
    """The library on a device. Made in a thread, with the context current; all of it blocks.

    Its memory is workspace in the order of the stream, so that it counts as such and the limit holds for it.

    Args:
        device: The device.

    Raises:
        NotSupportedError: cuDSS is not installed, or of another version.
    """

    def __init__(self, device: LibraryDevice) -> None:
        folder = Path(_load()).parent
        self._arena = device.arena
        self._residuals = device.kernels.function("residuals", "measure_residuals", _ARGUMENTS.size)
        self._stream: CudaStream | None = None
        self._sizes: dict[int, int] = {}
        self._failure: Exception | None = None
        self._handle: int = cudss.create()
        self._handler = _Handler(None, _Allocate(self._allocate), _Free(self._free), b"trio_accel")
        cudss.set_device_mem_handler(self._handle, ctypes.addressof(self._handler))
        if (folder / _THREADS).exists():
            cudss.set_threading_layer(self._handle, str(folder / _THREADS))

    def destroy(self) -> None:
        """Give the handle back; the context is current."""
        cudss.destroy(self._handle)

    @property
    def stream(self) -> CudaStream | None:
        """The stream of the last `use`."""
        return self._stream

    @contextmanager
    def use(self, stream: CudaStream) -> Generator[None]:
        """Enqueue on a stream within this, and raise what memory for the library has failed with."""
        self._stream, self._failure = stream, None
        cudss.set_stream(self._handle, stream.handle)
        try:
            yield
        except cudss.cuDSSError as error:
            if self._failure is not None:
                raise self._failure from error
            raise

    def factor(self, system: LinearSystem, *, is_global: bool) -> CudssFactors | None:
        """Factor, and wait for the outcome.

        Args:
            system: The equations, of which the matrix stays in its place as long as the factors.
            is_global: Whether pivots are looked for in whole columns, which takes longer. Else columns are
                permuted first, so that the diagonal is large, and pivots are looked for in its blocks.

        Returns:
            The factors; None where not all pivots are large enough.
        """
        rows, kind, index = system.rows, VALUE_TYPES[system.dtype], _INDEX_TYPES[system.index]
        with ExitStack() as undo:
            config: int = cudss.config_create()
            undo.callback(cudss.config_destroy, config)
            # Only what is zero counts as too small: the default does not know how large other elements are.
            _set(config, cudss.ConfigParam.PIVOT_EPSILON, float(np.finfo(system.dtype.dtype).tiny))
            if is_global:
                _set(config, cudss.ConfigParam.REORDERING_ALG, cudss.ReorderingAlg.COLAMD)
            else:
                _set(config, cudss.ConfigParam.MATCHING_ALG, cudss.MatchingAlg.MAX_DIAG_PRODUCT)
            data: int = cudss.data_create(self._handle)
            undo.callback(cudss.data_destroy, self._handle, data)
            indptr, indices, values = system.matrix
            a: int = cudss.matrix_create_csr(
                rows,
                rows,
                system.stored,
                indptr,
                0,
                indices,
                values,
                index,
                index,
                kind,
                cudss.MatrixType.GENERAL,
                cudss.MatrixViewType.FULL,
                cudss.IndexBase.ZERO,
            )
            undo.callback(cudss.matrix_destroy, a)
            with _sides(system) as dense:
                for phase in (cudss.Phase.ANALYSIS, cudss.Phase.FACTORIZATION):
                    cudss.execute(self._handle, phase, config, data, a, *dense)
            if self._read(data, cudss.DataParam.INFO, DType.int32) or self._read(
                data, cudss.DataParam.NPIVOTS, system.index
            ):
                return None
            return CudssFactors((config, data, a), undo.pop_all().close)

    def solve(self, factors: CudssFactors, system: LinearSystem) -> None:
        """Enqueue the solution of equations, given the factors of their matrix."""
        with _sides(system) as dense:
            cudss.execute(self._handle, cudss.Phase.SOLVE, *factors.terms, *dense)

    def _read(self, data: int, parameter: int, dtype: DType) -> int:
        """Wait for the device, and read a number."""
        value, written = np.zeros(1, dtype.dtype), np.zeros(1, np.uint64)
        cudss.data_get(self._handle, data, parameter, value.ctypes.data, value.nbytes, written.ctypes.data)
        return int(value[0])

    def find_sizes(self, system: LinearSystem, call: KernelCall) -> int:
        """Enqueue a look at the residuals; returns the address of four numbers for each side."""
        nbytes = 8 * SIZES * system.sides
        sizes = call.workspace(nbytes)
        call.stream.set_bytes(sizes, 0, nbytes)
        self._residuals.run(
            call.handle,
            system.rows * system.sides,
            _ARGUMENTS,
            *system.matrix,
            system.b,
            system.x,
            sizes,
            system.rows,
            system.sides,
            TYPES[system.dtype],
            system.index is DType.int64,
        )
        return sizes

    def _allocate(self, _context: int, pointer: Any, nbytes: int, _stream: int) -> int:
        assert self._stream is not None
        if not nbytes:
            pointer[0] = None
            return 0
        try:
            address = self._arena.take(self._stream, nbytes)
        except Exception as error:  # noqa: BLE001  # the library is told, and it is raised when that returns
            self._failure = error
            return 1
        self._sizes[address] = nbytes
        pointer[0] = address
        return 0

    def _free(self, _context: int, address: int | None, _nbytes: int, _stream: int) -> int:
        assert self._stream is not None
        if address is not None:
            self._arena.free(self._stream, address, self._sizes.pop(address))
        return 0


class DirectSolver:
    """Solves systems by cuDSS, and caches numbered factors. All methods but `has` block.

    Args:
        device: The device.
        lock: A lock of its own, because it takes seconds. Operations that block are called in threads.
    """

    def __init__(self, device: LibraryDevice, lock: Any) -> None:
        self._device = device
        self._lock = lock
        self._made: Cudss | None = None
        self._factors: dict[int, CudssFactors] = {}
        # Factors to be freed by the next owner of the lock.
        self._spent: list[CudssFactors] = []

    def destroy(self) -> None:
        """Free everything; the context is current."""
        if self._made is not None:
            self._spent += self._factors.values()
            self._factors.clear()
            self._free_spent()
            self._made.destroy()

    def has(self, number: int | None) -> bool:
        """Return whether there are factors of a number."""
        return number in self._factors

    def solve(self, system: LinearSystem, call: KernelCall, number: int | None, block: int) -> bool:
        """Solve, and judge the solution.

        Args:
            system: The equations.
            call: The launch.
            number: The number of the factors; None if they are only for this solution.
            block: The block of the matrix; its end frees the factors.

        Returns:
            Whether the solution is right. Otherwise the matrix counts as singular.
        """
        with self._lock:
            if self._made is None:
                self._made = Cudss(self._device)
            cudss = self._made
            with cudss.use(call.stream):
                self._free_spent()
                cached = None if number is None else self._factors.get(number)
                if cached is not None and _is_solved(cudss, cached, system, call):
                    return True
                # Pivots of blocks are found in less time, but may fail where pivots of columns succeed.
                for is_global in (False, True):
                    factors = cudss.factor(system, is_global=is_global)
                    if factors is None:
                        continue
                    try:
                        is_right = _is_solved(cudss, factors, system, call)
                        if is_right and number is not None:
                            self._keep(number, factors, block)
                            factors = None
                    finally:
                        if factors is not None:
                            factors.close()
                    if is_right:
                        return True
        return False

    def _keep(self, number: int, factors: CudssFactors, block: int) -> None:
        self._drop(number)
        self._factors[number] = factors
        self._device.invalidate_with(block, partial(self._end, number))

    def _drop(self, number: int) -> None:
        factors = self._factors.pop(number, None)
        if factors is not None:
            self._spent.append(factors)

    def _end(self, number: int, _block: int) -> None:
        """Free the factors of a freed matrix, now unless the library is busy or its stream has ended."""
        self._drop(number)
        stream = None if self._made is None else self._made.stream
        is_over = stream is None or stream.is_destroyed or self._device.context.is_lost
        if not is_over and self._lock.acquire(blocking=False):
            try:
                with self._device.context:
                    self._free_spent()
            finally:
                self._lock.release()

    def _free_spent(self) -> None:
        while self._spent:
            self._spent.pop().close()


def _is_solved(cudss: Cudss, factors: CudssFactors, system: LinearSystem, call: KernelCall) -> bool:
    """Solve by factors, and return whether the solution is right."""
    cudss.solve(factors, system)
    count = SIZES * system.sides
    data = read_now(call.device, call.stream, cudss.find_sizes(system, call), 8 * count)
    return is_solved(np.frombuffer(data, np.float64), system.dtype)


def is_solved(sizes: Any, dtype: DType) -> bool:
    """Return whether solutions are as good as can be expected, by the sizes of residuals, four for each side.

    The criterion is the backward error by norms: how much the equations would have to change for the solution
    to be right. A side that holds no finite number has no right solution.
    """
    residual, x, b, a = np.reshape(sizes, (-1, SIZES)).T
    with np.errstate(all="ignore"):
        limit = _ROUNDINGS * float(np.finfo(dtype.dtype).eps) * (a * x + b)
        return bool(((np.isfinite(residual) & (residual <= limit)) | ~np.isfinite(b)).all())


@contextmanager
def _sides(system: LinearSystem) -> Generator[tuple[int, int]]:
    """Describe the solutions and the right-hand sides of equations."""
    with ExitStack() as undo:
        descriptors = list[int]()
        for address in (system.x, system.b):
            descriptors.append(
                cudss.matrix_create_dn(
                    system.rows,
                    system.sides,
                    system.rows,
                    address,
                    VALUE_TYPES[system.dtype],
                    cudss.Layout.COL_MAJOR,
                )
            )
            undo.callback(cudss.matrix_destroy, descriptors[-1])
        yield descriptors[0], descriptors[1]


def _set(config: int, parameter: int, value: float) -> None:
    word = np.array([value], cudss.get_config_param_dtype(parameter))
    cudss.config_set(config, parameter, word.ctypes.data, word.nbytes)


def _load() -> str:
    """Load cuDSS; returns its path."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    try:
        path = str(pathfinder.load_nvidia_dynamic_lib("cudss").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        raise NotSupportedError(
            f"spsolve needs cuDSS, which is missing: {_INSTALL}", backend="cuda"
        ) from error
    version = cudss.get_property(0), cudss.get_property(1)
    if version != _VERSION:
        actual = ".".join(map(str, version))
        raise NotSupportedError(f"spsolve needs cuDSS 0.8, and has {actual}: {_INSTALL}", backend="cuda")
    return path
