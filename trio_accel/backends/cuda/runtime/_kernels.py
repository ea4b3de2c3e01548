"""Kernels of the backend's own: sources that are compiled once for an architecture, and launched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from cuda.bindings import driver

from ._compiler import compiled
from ._context import CudaContext
from ._last_uses import LastUses
from ._stream import CudaStream

__all__ = ["Function", "Kernels", "Module"]

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


class Module:
    """Loaded kernels that may be unloaded again.

    Attributes:
        functions: The kernels, in the order in which they were named.
    """

    __slots__ = ("_module", "_runs", "functions")

    def __init__(self, module: Any, functions: tuple[Function, ...]) -> None:
        self._module = module
        self.functions: tuple[Function, ...] = functions
        self._runs = LastUses()

    def note_use(self, stream: CudaStream) -> None:
        """One of the kernels has been launched on a stream."""
        self._runs[stream] = stream.timeline.sequence + 1

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past it."""
        return self._runs.is_busy

    def close(self) -> None:
        """Unload it: nothing of it runs any more. The context is current."""
        driver.cuLibraryUnload(self._module)


class Kernels:
    """The compiled sources of one device.

    What is compiled stays in the disk cache, so that the next process has it in less than a millisecond.
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
            offsets: Where its arguments lie in that, if there are several.
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
        check = self._context.check
        kernel = check(driver.cuLibraryGetKernel(module, name.encode()))
        function = check(driver.cuKernelGetFunction(kernel))
        with suppress(RuntimeError):
            # Else its first launch may; drivers before CUDA 12.4 have no such function.
            check(driver.cuFuncLoad(function))
        return Function(self._context, function, nbytes, self._most, offsets)

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
        code = self._compile(text)
        return self._context.check(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))

    def _compile(self, text: str) -> bytes:
        from cuda.core import ProgramOptions

        # Products and sums are rounded one by one, as NumPy does.
        return compiled(text, ProgramOptions(arch=f"sm_{self._architecture}", fma=False)).code
