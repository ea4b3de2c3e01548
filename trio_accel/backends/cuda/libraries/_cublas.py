"""The handle of cuBLAS: types, factors and memory of its routines."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Generator
from contextlib import contextmanager

import attrs
from nvmath.bindings import cublas

from ...base import DType
from ...base.gpu.workspace import Workspace
from ...base.kit.product_layouts import Product
from ..kit._library import LibraryDevice
from ..runtime._stream import CudaStream, scratch

HOST, DEVICE = int(cublas.PointerMode.HOST), int(cublas.PointerMode.DEVICE)
"""Places of factors and results."""

DEFAULT = int(cublas.GemmAlgo.DEFAULT)
"""cuBLAS chooses how it multiplies."""

# NVIDIA's advice for Hopper. With a workspace of ours cuBLAS allocates nothing, and repeats its results.
_WORKSPACE = 32 << 20
# Partial sums have the type of the sum, and not of the result, so they are rounded once.
_MATH = int(cublas.Math.DEFAULT_MATH) | int(cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION)
_SINGLE, _DOUBLE = int(cublas.ComputeType.COMPUTE_32F), int(cublas.ComputeType.COMPUTE_64F)
_FOUR_SINGLES, _FOUR_DOUBLES = struct.Struct("=ff8xff"), struct.Struct("=4d")

# The letters of sides, triangles, transposes and diagonals: none means two things.
_CODES = {"L": 0, "R": 1, "U": 1, "N": 0, "T": 1, "C": 2}


@attrs.frozen
class CublasType:
    """An element type in cuBLAS' terms.

    Attributes:
        code: Its `cudaDataType`.
        factor: The type of its factors, in which the vectors' routines compute.
        compute: Type that products are summed in; float32 is not computed in a shorter type.
        real: The type of its absolute values.
        is_double: Whether factors are doubles.
        letter: First letter of this type's routines; empty without routines.
    """

    code: int
    factor: int
    compute: int
    real: DType
    is_double: bool
    letter: str = ""


KINDS = {
    DType.float16: CublasType(2, 0, _SINGLE, DType.float16, False),
    DType.bfloat16: CublasType(14, 0, _SINGLE, DType.bfloat16, False),
    DType.float32: CublasType(0, 0, _SINGLE, DType.float32, False, "s"),
    DType.float64: CublasType(1, 1, _DOUBLE, DType.float64, True, "d"),
    DType.complex64: CublasType(4, 4, _SINGLE, DType.float32, False, "c"),
    DType.complex128: CublasType(5, 5, _DOUBLE, DType.float64, True, "z"),
}


class HostFactors:
    """Two factors in host memory, which cuBLAS reads at the call.

    Attributes:
        alpha: Address of the first one.
        beta: Address of the second one.
    """

    __slots__ = ("_buffer", "_view", "alpha", "beta")

    def __init__(self) -> None:
        self._buffer = bytearray(_FOUR_DOUBLES.size)
        self._view = (ctypes.c_char * len(self._buffer)).from_buffer(self._buffer)
        self.alpha: int = ctypes.addressof(self._view)
        self.beta: int = self.alpha + _FOUR_DOUBLES.size // 2

    def packed(self) -> bytes:
        """Return the bytes of both: zeros of either sign differ, and NaNs do not."""
        return bytes(self._buffer)

    def put(self, kind: CublasType, alpha: complex, beta: complex = 0.0) -> None:
        """Write both, in the type that belongs to an element type."""
        numbers = alpha.real, alpha.imag, beta.real, beta.imag
        if kind.is_double:
            _FOUR_DOUBLES.pack_into(self._buffer, 0, *numbers)
            return
        try:
            _FOUR_SINGLES.pack_into(self._buffer, 0, *numbers)
        except OverflowError:
            # Infinite, as it is for NumPy.
            rounded = (ctypes.c_float(number).value for number in numbers)
            _FOUR_SINGLES.pack_into(self._buffer, 0, *rounded)


class Cublas:
    """A handle, on one stream at a time. Made in a thread, with the device's context current.

    Args:
        device: The device.
        library: Name of the library that owns the handle.

    Attributes:
        handle: The library's own.
        factors: For one call.
        plain: Factors 1 and 0, for types with and without doubles as factors.
    """

    def __init__(self, device: LibraryDevice, library: str) -> None:
        self._device = device
        self._context = device.context
        self._workspace = Workspace(device.blocks, library)
        self._stream: CudaStream | None = None
        self._mode = HOST
        self._warm: set[int] = set()
        self.factors: HostFactors = HostFactors()
        self.plain: dict[bool, HostFactors] = {False: HostFactors(), True: HostFactors()}
        for kind in KINDS.values():
            self.plain[kind.is_double].put(kind, 1.0)
        self.handle: int = cublas.create()
        try:
            cublas.set_math_mode(self.handle, _MATH)
            # The library loads kernels at first use, and then waits for all work of the device. The
            # vectors' routines of all types are loaded with those of one type. Products of each type have
            # their own kernels, which take ten to eighty milliseconds, so only the most usual type is
            # loaded here; other types are loaded on request.
            self._try(KINDS[DType.float32], has_vectors=True)
        except BaseException:
            cublas.destroy(self.handle)
            raise

    def select(self, stream: CudaStream, mode: int) -> None:
        """Switch the handle to a stream, with results and factors in the memory of host or device.

        Raises:
            CudaMemoryError: There is no memory for the stream's workspace.
        """
        if stream is not self._stream:
            self._move(stream, stream.handle)
            self._stream = stream
        self.set_mode(mode)

    def set_mode(self, mode: int) -> None:
        """Have results and factors in the memory of host or device."""
        if mode != self._mode:
            cublas.set_pointer_mode(self.handle, mode)
            self._mode = mode

    def select_for_capture(self, stream: CudaStream, handle: int) -> None:
        """Let the handle work on a stream that captures, as if on another, until the next `select`.

        With the other's workspace, where what is captured will run. Factors are in the memory of the host.
        """
        self._move(stream, handle)
        self.set_mode(HOST)

    def _move(self, stream: CudaStream, handle: int) -> None:
        address = self._workspace.reserve(stream, _WORKSPACE)
        self._stream = None
        cublas.set_stream(self.handle, handle)
        # Each stream has its own, and a change of the stream takes it away.
        cublas.set_workspace(self.handle, address, _WORKSPACE)

    def destroy(self) -> None:
        """Give the handle and its memory back; the context is current."""
        cublas.destroy(self.handle)
        self._workspace.close()

    def is_warm(self, kind: CublasType) -> bool:
        """Return whether a product of a type was computed before."""
        return kind.code in self._warm

    def warm(self, kind: CublasType) -> None:
        """Compute a product of a type, so that cuBLAS loads the kernels of all its products; blocks.

        Nothing is enqueued meanwhile.
        """
        if not self.is_warm(kind):
            with self._context:
                self._try(kind)

    def _try(self, kind: CublasType, *, has_vectors: bool = False) -> None:
        size = 64 * 64 * 16
        with self.scratch(2 * size) as (stream, source):
            out = source + size
            code, plain, factor = kind.code, self.plain[kind.is_double], kind.factor

            def multiply(_: object = None) -> None:
                cublas.gemm_ex_64(
                    self.handle,
                    0,
                    0,
                    64,
                    64,
                    64,
                    plain.alpha,
                    source,
                    code,
                    64,
                    source,
                    code,
                    64,
                    plain.beta,
                    out,
                    code,
                    64,
                    kind.compute,
                    DEFAULT,
                )

            multiply()
            if has_vectors:
                self._device.graphs.warm(stream, multiply)
                cublas.scal_ex_64(self.handle, 1, plain.alpha, factor, source, code, 1, factor)
                cublas.axpy_ex_64(self.handle, 1, plain.alpha, factor, source, code, 1, out, code, 1, factor)
                self.set_mode(DEVICE)
                cublas.dot_ex_64(self.handle, 1, source, code, 1, source, code, 1, out, code, factor)
                cublas.nrm2ex_64(self.handle, 1, source, code, 1, out, code, factor)
        self._warm.add(kind.code)

    @contextmanager
    def scratch(self, nbytes: int) -> Generator[tuple[int, int]]:
        """A stream of the handle, and the address of zeros, to try something out; waits for it at the end."""
        with scratch(self._context, _WORKSPACE, nbytes) as (stream, [workspace, zeros]):
            self._stream = None
            cublas.set_stream(self.handle, stream)
            cublas.set_workspace(self.handle, workspace, _WORKSPACE)
            self.set_mode(HOST)
            yield stream, zeros

    def multiply(
        self, kind: CublasType, product: Product, factors: HostFactors, a: int, b: int, c: int
    ) -> None:
        """Enqueue a product on the selected stream; its arrays are at these addresses."""
        first, second = (b, a) if product.is_swapped else (a, b)
        handle, code, compute = self.handle, kind.code, kind.compute
        op_a, op_b, m, n, k, lda, ldb, ldc = product.call
        if product.is_single:
            cublas.gemm_ex_64(
                handle,
                op_a,
                op_b,
                m,
                n,
                k,
                factors.alpha,
                first,
                code,
                lda,
                second,
                code,
                ldb,
                factors.beta,
                c,
                code,
                ldc,
                compute,
                DEFAULT,
            )
            return
        step_a, step_b, step_c = product.steps
        for group in product.groups:
            from_a, from_b = (group.b, group.a) if product.is_swapped else (group.a, group.b)
            cublas.gemm_strided_batched_ex_64(
                handle,
                op_a,
                op_b,
                m,
                n,
                k,
                factors.alpha,
                first + from_a,
                code,
                lda,
                step_a,
                second + from_b,
                code,
                ldb,
                step_b,
                factors.beta,
                c + group.c,
                code,
                ldc,
                step_c,
                product.batches,
                compute,
                DEFAULT,
            )

    def scale(
        self, stream: CudaStream, kind: CublasType, factor: complex, size: int, address: int, step: int = 1
    ) -> None:
        """Enqueue that a vector at an address is multiplied by a factor."""
        self.select(stream, HOST)
        self.factors.put(kind, factor)
        cublas.scal_ex_64(
            self.handle, size, self.factors.alpha, kind.factor, address, kind.code, step, kind.factor
        )

    def invoke(self, kind: CublasType, name: str, *arguments: str | complex) -> None:
        """Call the routine of a type on the selected stream.

        Args:
            kind: The type.
            name: Its name without the letter of the type, which replaces ``{}`` or comes first.
            arguments: Letters, sizes and addresses (of type int), and up to two factors (of other types).
        """
        factors = [value for value in arguments if not isinstance(value, (str, int))]
        if factors:
            self.factors.put(kind, *factors)
        addresses = iter((self.factors.alpha, self.factors.beta))
        values = [
            _CODES[value] if isinstance(value, str) else value if isinstance(value, int) else next(addresses)
            for value in arguments
        ]
        letter = kind.letter
        if name == "asum":
            letter = {"c": "sc", "z": "dz"}.get(letter, letter)
        name = name.format(letter) if "{}" in name else letter + name
        getattr(cublas, f"{name}_64")(self.handle, *values)
