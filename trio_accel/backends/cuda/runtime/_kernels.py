"""Kernels of the backend's own: sources, compiled once for each architecture, and their launches.

Some of them lose the context, for tests.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cuda.bindings import driver

from ...base import Poison, Strs
from ...base.gpu.driver import KernelFunction, Kernels, Launch
from ._compiler import compiled
from ._context import CudaContext
from ._signals import StatusWords
from ._stream import CudaHold, CudaStream

_FOLDER = Path(__file__).parents[1] / "kernels"
_INCLUDES = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_THREADS = 256


class CudaKernels(Kernels):
    """The compiled sources of one device.

    Compiled code stays in the disk cache, so the next process loads it in less than a millisecond.
    """

    def __init__(self, context: CudaContext, architecture: str, multiprocessors: int) -> None:
        super().__init__(context, multiprocessors)
        self._context = context
        self._architecture = architecture

    def read(self, source: str) -> str:
        """Read a source, after the common part and the headers that it includes."""
        body = (_FOLDER / f"{source}.cu").read_text(encoding="utf-8")
        names = "common.cuh", *_INCLUDES.findall(body)
        headers = "".join([(_FOLDER / name).read_text(encoding="utf-8") for name in names])
        return f'{headers}#line 1 "{source}.cu"\n{_INCLUDES.sub("", body)}'

    def compile(self, text: str) -> Any:
        """Compile a source and load it; blocks. The context is current."""
        from cuda.core import ProgramOptions

        # Products and sums are rounded one by one, as NumPy does.
        options = ProgramOptions(arch=f"sm_{self._architecture}", fma=False)
        return self._context.load(compiled(text, options).code)

    def find(self, module: Any, name: str, sizes: Sequence[int]) -> Launch:
        """Find a kernel in a library of the driver, ready to be launched. The context is current."""
        check = self._context.check
        function = self._context.function_of(check(driver.cuLibraryGetKernel(module, name.encode())))

        def launch(blocks: int, threads: int, stream: int, pointer: int) -> None:
            result = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointer, 0)
            if result[0]:
                check(result)

        return launch

    def unload(self, module: Any) -> None:
        """Give a library back to the driver. The context is current."""
        driver.cuLibraryUnload(module)


_ARGUMENTS = struct.Struct("<QQqQ")
# An address never mapped.
_ILLEGAL = 16
_ITEM = 4
_ENDLESS = "endless"
_NAMES: Strs = (*get_args(Poison), _ENDLESS)


class CudaFaults:
    """Faults for tests: kernels that end the context (D53)."""

    def __init__(self, context: CudaContext, kernels: Kernels, status_words: StatusWords) -> None:
        self._context = context
        self._status_words = status_words
        # D50, D53: load them with the device, because a kernel loaded later waits for all held streams.
        self._functions: dict[str, KernelFunction] = {
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
        with self._context:
            self._functions[name].run(stream, 1, _ARGUMENTS, address, 0, 0, 0)

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
            values = address, word.address, nbytes // _ITEM, word.sequence & 0xFFFFFFFF
            function.run(stream.handle, _THREADS, _ARGUMENTS, *values)
        # When this runs, the stream has passed the word, so another stream may have it.
        stream.after(lambda: self._status_words.give_back(word))
        return CudaHold(self._status_words, word)
