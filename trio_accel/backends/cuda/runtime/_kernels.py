"""Kernels of the backend's own: sources that are compiled once for an architecture, and launched.

Among them are those that convert and fill arrays of any layout, and those that lose the context for tests.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any, get_args

import attrs
import numpy as np
from cuda.bindings import driver

from ...base import DType, Poison, scalar
from ...base.device_array import DeviceArray, merged
from ...base.workspace import LastUses
from ._compiler import compiled
from ._context import CudaContext
from ._signals import StatusWords
from ._stream import CudaHold, CudaStream

__all__ = ["ArrayKernels", "CudaFaults", "Function", "Kernels", "LoadedCode", "Module"]

_FOLDER = Path(__file__).parents[1] / "kernels"
_THREADS = 256
# Blocks for each multiprocessor; a kernel goes on in steps of its grid.
_BLOCKS = 8


class Function:
    """One kernel of a loaded module, with one argument, a structure of plain numbers; or with some.

    Attributes:
        arguments: Buffer that they are packed into; the driver copies it at the launch.
    """

    __slots__ = ("_context", "_handle", "_lock", "_most", "_pointer", "_pointers", "arguments")

    def __init__(
        self, context: CudaContext, handle: Any, nbytes: int, most: int, offsets: Sequence[int] = (0,)
    ) -> None:
        self._context = context
        self._handle = handle
        self._most = most
        self._lock = threading.Lock()
        self.arguments: bytearray = bytearray(nbytes)
        start = np.frombuffer(self.arguments, np.uint8).ctypes.data
        self._pointers = np.array([start + offset for offset in offsets], np.uint64)
        self._pointer = int(self._pointers.ctypes.data)

    def __enter__(self) -> bytearray:
        """Take the buffer; another thread's launch waits for its end."""
        self._lock.acquire()
        return self.arguments

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def run(self, stream: int, count: int, layout: Struct, *values: object, threads: int = _THREADS) -> None:
        """Pack values as a structure has them, and launch it; see `launch`."""
        with self as arguments:
            layout.pack_into(arguments, 0, *values)
            self.launch(stream, count, threads=threads)

    def launch(self, stream: int, count: int, *, threads: int = _THREADS, most: int | None = None) -> None:
        """Launch it for so many elements, in blocks of so many threads, with what the buffer holds.

        By default there are as many blocks at most as the device runs at once.
        """
        blocks = min(-(-count // threads), self._most if most is None else most)
        self._context.check(
            driver.cuLaunchKernel(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._pointer, 0)
        )


@attrs.define(eq=False)
class LoadedCode:
    """Code that the driver has loaded, and that may be unloaded again."""

    _library: Any
    _runs: LastUses = attrs.field(factory=LastUses, init=False)

    def note_use(self, stream: CudaStream) -> None:
        """One of the kernels has been launched on a stream."""
        self._runs.note(stream)

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past it."""
        return self._runs.is_busy

    def close(self) -> None:
        """Unload it: nothing of it runs any more. The context is current."""
        if self._library is not None:
            driver.cuLibraryUnload(self._library)


@attrs.define(eq=False)
class Module(LoadedCode):
    """Loaded kernels that may be unloaded again.

    Attributes:
        functions: The kernels, in the order in which they were named.
    """

    functions: tuple[Function, ...]


class Kernels:
    """The compiled sources of one device.

    Compiled code stays in the disk cache, so that the next process has it in less than a millisecond.
    """

    def __init__(self, context: CudaContext, architecture: str, multiprocessors: int) -> None:
        self._context = context
        self._architecture = architecture
        self._most = multiprocessors * _BLOCKS
        self._modules: dict[str, Any] = {}
        self._lock = threading.Lock()

    def function(self, source: str, name: str, nbytes: int, offsets: Sequence[int] = (0,)) -> Function:
        """Find a kernel and load it; compiles its source when that is used first, which blocks.

        Args:
            source: Name of the source file, without its suffix.
            name: Name of the kernel.
            nbytes: Size of the structure that it takes.
            offsets: Offsets of its arguments in that, if there are several.
        """
        with self._context:
            return self._function(self._module(source), name, nbytes, offsets)

    def load(self, text: str, names: Sequence[str], nbytes: int) -> Module:
        """Compile a source that is given as a text, and load its kernels; blocks. The context is current.

        Args:
            text: The source.
            names: Names of the kernels.
            nbytes: Size of the structure that each takes.
        """
        module = self._loaded(text)
        try:
            return Module(module, tuple(self._function(module, name, nbytes) for name in names))
        except BaseException:
            driver.cuLibraryUnload(module)
            raise

    @property
    def most_blocks(self) -> int:
        """How many blocks a kernel is launched with at most."""
        return self._most

    def _function(self, module: Any, name: str, nbytes: int, offsets: Sequence[int] = (0,)) -> Function:
        kernel = self._context.check(driver.cuLibraryGetKernel(module, name.encode()))
        return Function(self._context, self._context.function_of(kernel), nbytes, self._most, offsets)

    def close(self) -> None:
        """Unload everything; no kernel runs any more. The context is current."""
        with self._lock:
            for module in self._modules.values():
                driver.cuLibraryUnload(module)
            self._modules.clear()

    def _module(self, source: str) -> Any:
        with self._lock:
            if source not in self._modules:
                common, own = (
                    (_FOLDER / name).read_text(encoding="utf-8") for name in ("common.cuh", f"{source}.cu")
                )
                self._modules[source] = self._loaded(f'{common}#line 1 "{source}.cu"\n{own}')
            return self._modules[source]

    def _loaded(self, text: str) -> Any:
        from cuda.core import ProgramOptions

        # Products and sums are rounded one by one, as NumPy does.
        options = ProgramOptions(arch=f"sm_{self._architecture}", fma=False)
        return self._context.load(compiled(text, options).code)


# As in arrays.cu.
_AXES = 64
_CONVERT = struct.Struct("<QQqdiiii")
_FILL = struct.Struct("<Qqii16s")
_TYPES = {dtype: code for code, dtype in enumerate(DType)}
_SINGLE = frozenset(
    {
        DType.float32,
        DType.float16,
        DType.bfloat16,
        DType.float8_e4m3fn,
        DType.float8_e5m2,
        DType.complex64,
    }
)


class ArrayKernels:
    """Converts and fills arrays. Compiled when it is made, which blocks."""

    def __init__(self, context: CudaContext, kernels: Kernels) -> None:
        self._context = context
        self._convert = kernels.function("arrays", "convert", _CONVERT.size + 3 * 8 * _AXES)
        self._fill = kernels.function("arrays", "fill", _FILL.size + 2 * 8 * _AXES)

    def convert(
        self,
        stream: CudaStream,
        source: DeviceArray,
        out: DeviceArray,
        *,
        scale: float = 1.0,
        conjugate: bool = False,
    ) -> None:
        """Enqueue ``out = source * scale``, as `numpy.ndarray.astype` converts.

        Computed in float32 where both types are no wider, else in float64. In place only where both arrays
        are the same.
        """
        assert source.shape == out.shape
        if not out.size:
            return
        is_plain = source.dtype is out.dtype and (scale, conjugate) == (1.0, False)
        if is_plain and source.is_contiguous and out.is_contiguous:
            self._context.check(
                driver.cuMemcpyDtoDAsync(out.address, source.address, out.nbytes, stream.handle)
            )
            return
        shape, (ins, outs) = merged(source.shape, (source.strides, out.strides))
        flags = (
            (1 if scale != 1.0 else 0)
            | (2 if conjugate else 0)
            | (4 if source.dtype in _SINGLE and out.dtype in _SINGLE else 0)
            | (8 if is_plain else 0)
        )
        types = _TYPES[source.dtype], _TYPES[out.dtype]
        with self._convert as arguments:
            _CONVERT.pack_into(
                arguments, 0, source.address, out.address, out.size, scale, *types, flags, len(shape)
            )
            _pack_layout(arguments, _CONVERT.size, shape, ins, outs)
            self._convert.launch(stream.handle, out.size)

    def fill(self, stream: CudaStream, out: DeviceArray, value: complex) -> None:
        """Enqueue that every element is set to one value.

        Raises:
            LibraryError: The type cannot hold it.
        """
        bits = scalar(value, out.dtype).tobytes()
        if not out.size:
            return
        size, check = out.dtype.itemsize, self._context.check
        shape, (strides,) = merged(out.shape, (out.strides,))
        if strides in ((), (size,)) and bits == bits[:1] * size:
            check(driver.cuMemsetD8Async(out.address, bits[0], out.nbytes, stream.handle))
        elif strides in ((), (size,)) and size == 4:
            check(
                driver.cuMemsetD32Async(out.address, int.from_bytes(bits, "little"), out.size, stream.handle)
            )
        else:
            with self._fill as arguments:
                _FILL.pack_into(arguments, 0, out.address, out.size, size, len(shape), bits)
                _pack_layout(arguments, _FILL.size, shape, strides)
                self._fill.launch(stream.handle, out.size)


def _pack_layout(arguments: bytearray, offset: int, *rows: tuple[int, ...]) -> None:
    for number, row in enumerate(rows):
        struct.pack_into(f"<{len(row)}q", arguments, offset + 8 * _AXES * number, *row)


_ARGUMENTS = struct.Struct("<QQqQ")
# An address that is never mapped.
_ILLEGAL = 16
_ITEM = 4
_ENDLESS = "endless"
_NAMES: tuple[str, ...] = (*get_args(Poison), _ENDLESS)


class CudaFaults:
    """Faults for tests: kernels that end the context (D53)."""

    def __init__(self, context: CudaContext, kernels: Kernels, status_words: StatusWords) -> None:
        self._context = context
        self._status_words = status_words
        # D50, D53: loaded with the device, because a kernel that is loaded later waits for all held streams.
        self._functions: dict[str, Function] = {
            name: kernels.function("faults", f"fault_{name}", _ARGUMENTS.size) for name in _NAMES
        }
        # The driver makes an assertion's resources at the first launch, and waits for all running work.
        self._launch("assert", 0, 0)

    def launch(self, how: Poison, stream: CudaStream | None) -> None:
        """Lose the context by a kernel, on a stream or on one of its own."""
        with self._context:
            handle = stream.handle if stream else int(self._context.check(driver.cuStreamCreate(1)))
        self._launch(how, _ILLEGAL, handle)

    def _launch(self, name: str, address: int, stream: int) -> None:
        function = self._functions[name]
        with self._context, function as arguments:
            _ARGUMENTS.pack_into(arguments, 0, address, 0, 0, 0)
            function.launch(stream, 1)

    def spin(self, stream: CudaStream, memory: tuple[int, int]) -> CudaHold:
        """Launch a kernel that ends with its hold only.

        Args:
            stream: The stream.
            memory: Address and size of the memory that it writes to.
        """
        function, (address, nbytes) = self._functions[_ENDLESS], memory
        with self._context:
            word = self._status_words.take()
            word.sequence += 1
            with function as arguments:
                _ARGUMENTS.pack_into(
                    arguments, 0, address, word.address, nbytes // _ITEM, word.sequence & 0xFFFFFFFF
                )
                function.launch(stream.handle, _THREADS)
        # When this runs, the stream has passed the word, so another may have it.
        stream.after(lambda: self._status_words.give_back(word))
        return CudaHold(self._status_words, word)
