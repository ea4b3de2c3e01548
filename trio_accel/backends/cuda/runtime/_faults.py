"""Kernels that lose the context or do not end, for tests of what happens then."""

from __future__ import annotations

import struct
from typing import get_args

from cuda.bindings import driver

from ...base import Poison
from ._context import CudaContext
from ._kernels import Function, Kernels
from ._status_words import StatusWords
from ._stream import CudaHold, CudaStream

__all__ = ["CudaFaults"]

_ARGUMENTS = struct.Struct("<QQqQ")
# Mapped nowhere.
_ILLEGAL = 16
# One block: the rest of the device works on.
_THREADS = 256
_ITEM = 4
_ENDLESS = "endless"
_NAMES: tuple[str, ...] = (*get_args(Poison), _ENDLESS)


class CudaFaults:
    """Launches kernels that no program wants to have."""

    def __init__(self, context: CudaContext, kernels: Kernels, status_words: StatusWords) -> None:
        self._context = context
        self._status_words = status_words
        # What is loaded later runs, on whatever stream, only when none is held any more.
        self._functions: dict[str, Function] = {
            name: kernels.function("faults", f"fault_{name}", _ARGUMENTS.size) for name in _NAMES
        }
        # What an assertion needs of the context is made at the first launch, and waits for all that runs.
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
            stream: Where.
            memory: Address and size of what it writes to.
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
        # By then the stream has passed it.
        stream.after(lambda: self._status_words.give_back(word))
        return CudaHold(self._status_words, word)
