"""Kernels of the backend's own: sources that are compiled once for an architecture, and launched."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from ._compiler import compiled
from ._context import CudaContext

__all__ = ["Function", "Kernels"]

_FOLDER = Path(__file__).parents[1] / "kernels"
_THREADS = 256
# Blocks for each multiprocessor; a kernel goes on in steps of its grid.
_BLOCKS = 8


class Function:
    """One kernel of a loaded module, with one argument: a structure of plain numbers.

    Attributes:
        arguments: Buffer that the structure is packed into; the driver copies it at the launch.
    """

    __slots__ = ("_context", "_handle", "_lock", "_most", "_pointer", "_pointers", "arguments")

    def __init__(self, context: CudaContext, handle: Any, nbytes: int, most: int) -> None:
        self._context = context
        self._handle = handle
        self._most = most
        self._lock = threading.Lock()
        self.arguments: bytearray = bytearray(nbytes)
        self._pointers = np.array([np.frombuffer(self.arguments, np.uint8).ctypes.data], np.uint64)
        self._pointer = int(self._pointers.ctypes.data)

    def __enter__(self) -> bytearray:
        """Take the buffer; another thread's launch waits for its end."""
        self._lock.acquire()
        return self.arguments

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def launch(self, stream: int, count: int, *, threads: int = _THREADS) -> None:
        """Launch it for so many elements, in blocks of so many threads, with what the buffer holds."""
        blocks = min(-(-count // threads), self._most)
        self._context.check(
            driver.cuLaunchKernel(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._pointer, 0)
        )


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

    def function(self, source: str, name: str, nbytes: int) -> Function:
        """Find a kernel and load it; compiles its source when that is used first, which blocks.

        Args:
            source: Name of the source file, without its suffix.
            name: Name of the kernel.
            nbytes: Size of the structure that it takes.
        """
        check = self._context.check
        with self._context:
            kernel = check(driver.cuLibraryGetKernel(self._module(source), name.encode()))
            function = check(driver.cuKernelGetFunction(kernel))
            with suppress(RuntimeError):
                # Else its first launch may; drivers before CUDA 12.4 have no such function.
                check(driver.cuFuncLoad(function))
            return Function(self._context, function, nbytes, self._most)

    def close(self) -> None:
        """Unload everything; no kernel runs any more. The context is current."""
        with self._lock:
            for module in self._modules.values():
                driver.cuLibraryUnload(module)
            self._modules.clear()

    def _module(self, source: str) -> Any:
        with self._lock:
            if source not in self._modules:
                code = self._compile((_FOLDER / f"{source}.cu").read_text(encoding="utf-8"))
                load = driver.cuLibraryLoadData(code, None, None, 0, None, None, 0)
                self._modules[source] = self._context.check(load)
            return self._modules[source]

    def _compile(self, text: str) -> bytes:
        from cuda.core import ProgramOptions

        # Products and sums are rounded one by one, as NumPy does.
        return compiled(text, ProgramOptions(arch=f"sm_{self._architecture}", fma=False)).code
