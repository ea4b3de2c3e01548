"""Direct solutions of sparse systems by cuDSS: it finds an order on the host, and makes and uses factors."""

from __future__ import annotations

import ctypes
import importlib
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from nvmath.bindings import cudss

from ...base import DType, NotSupportedError
from ..kit._library import KernelCall, LibraryDevice
from ..runtime._stream import CudaStream
from ._sparse_makers import TYPES, VALUE_TYPES

# The version of the bindings: numbers of parameters change between versions.
_VERSION = (0, 8)
_INSTALL = "pip install '.[cuda13]' in a checkout, or '.[cuda12]'"
_INDEX_TYPES = {DType.int32: cudss.DataType.R_32I, DType.int64: cudss.DataType.R_64I}
_NAME_LENGTH = 64
# It comes with cuDSS: several threads of the host find an order in less time.
_THREADS = "libcudss_mtlayer_gomp.so.0"
# The layout is that of the structure in residuals.cu.
_ARGUMENTS = struct.Struct("<6Q2qii")
SIZES = 4
"""Numbers by which the solution of one side is judged."""

# The number of roundings that a solution may be off, relative to the largest number that comes to its
# residual.
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
class System:
    """Equations, by addresses.

    Attributes:
        rows: How many there are.
        stored: Values of the matrix.
        matrix: Its row pointers, columns that ascend in each row, and values.
        index: Dtype of its row pointers and columns.
        dtype: Dtype of all values.
        sides: Number of right-hand sides.
        b: Right-hand sides, one column behind the other.
        x: The same of the solutions.
    """

    rows: int
    stored: int
    matrix: tuple[int, int, int]
    index: DType
    dtype: DType
    sides: int
    b: int
    x: int


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

    def solve(self, system: System, stream: CudaStream, *, is_global: bool) -> bool:
        """Solve, and wait for the outcome.

        Args:
            system: The equations.
            stream: Where to enqueue.
            is_global: Whether pivots are looked for in whole columns, which takes longer. Else columns are
                permuted first, so that the diagonal is large, and pivots are looked for in its blocks.

        Returns:
            Whether all pivots were large enough. Else there is no solution.
        """
        self._stream, self._failure = stream, None
        cudss.set_stream(self._handle, stream.handle)
        try:
            return self._solve(system, is_global=is_global)
        except cudss.cuDSSError as error:
            if self._failure is not None:
                raise self._failure from error
            raise

    def _solve(self, system: System, *, is_global: bool) -> bool:
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
            dense = list[int]()
            for address in (system.x, system.b):
                made: int = cudss.matrix_create_dn(
                    rows, system.sides, rows, address, kind, cudss.Layout.COL_MAJOR
                )
                undo.callback(cudss.matrix_destroy, made)
                dense.append(made)
            terms = config, data, a, *dense
            for phase in (cudss.Phase.ANALYSIS, cudss.Phase.FACTORIZATION):
                cudss.execute(self._handle, phase, *terms)
            if self._read(data, cudss.DataParam.INFO, DType.int32) or self._read(
                data, cudss.DataParam.NPIVOTS, system.index
            ):
                return False
            cudss.execute(self._handle, cudss.Phase.SOLVE, *terms)
            return True

    def _read(self, data: int, parameter: int, dtype: DType) -> int:
        """Wait for the device, and read a number."""
        value, written = np.zeros(1, dtype.dtype), np.zeros(1, np.uint64)
        cudss.data_get(self._handle, data, parameter, value.ctypes.data, value.nbytes, written.ctypes.data)
        return int(value[0])

    def find_sizes(self, system: System, call: KernelCall) -> int:
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

    def _allocate(self, _context: int, place: Any, nbytes: int, _stream: int) -> int:
        assert self._stream is not None
        if not nbytes:
            place[0] = None
            return 0
        try:
            address = self._arena.take(self._stream, nbytes)
        except Exception as error:  # noqa: BLE001  # the library is told, and it is raised when that returns
            self._failure = error
            return 1
        self._sizes[address] = nbytes
        place[0] = address
        return 0

    def _free(self, _context: int, address: int | None, _nbytes: int, _stream: int) -> int:
        assert self._stream is not None
        if address is not None:
            self._arena.free(self._stream, address, self._sizes.pop(address))
        return 0


def is_solved(sizes: Any, dtype: DType) -> bool:
    """Tell by the sizes of residuals, four for each side, whether solutions are as good as can be expected.

    That is the backward error by norms: how much the equations would have to be changed for it to be right. A
    side that holds no finite number has no right solution.
    """
    left, x, b, a = np.reshape(sizes, (-1, SIZES)).T
    with np.errstate(all="ignore"):
        most = _ROUNDINGS * float(np.finfo(dtype.dtype).eps) * (a * x + b)
        return bool(((np.isfinite(left) & (left <= most)) | ~np.isfinite(b)).all())


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
        told = ".".join(map(str, version))
        raise NotSupportedError(f"spsolve needs cuDSS 0.8, and has {told}: {_INSTALL}", backend="cuda")
    return path
