"""The vendor's driver as this folder needs it: a context, streams, and loaded code.

A backend has to implement the protocols, and the methods of `Kernels` that raise here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import pairwise
from struct import Struct
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np

from ..contract.protocols import AccelStream

_THREADS = 256
# Blocks for each multiprocessor; a kernel continues in steps of its grid.
_BLOCKS = 8
# Axes of an array, in the structures of sources.
_AXES = 64

Launch: TypeAlias = Callable[[int, int, int, int], None]
"""Enqueues a kernel: blocks, threads of each, handle of the stream, address of the arguments' addresses."""


class GpuContext(AbstractContextManager[None], Protocol):
    """A device's context: the driver can be called within its block. It also has memory of the host."""

    @property
    def is_lost(self) -> bool:
        """Whether nothing is enqueued any longer."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether the driver takes nothing back any longer."""
        ...

    def make_current(self) -> bool:
        """Make it current in this thread; return whether `restore` must follow."""
        ...

    def restore(self) -> None:
        """Make the previous context current again."""

    def detect_loss(self) -> None:
        """Ask the driver whether the context is lost; if so, `failure` returns the error from then on."""

    def failure(self) -> Exception | None:
        """Make a new error with the reason why the context is lost; return None while it is usable."""
        ...

    def take_host(self, nbytes: int) -> int:
        """Take `nbytes` bytes of host memory for the device; return the address. Makes the context current.

        Raises:
            MemoryError: The machine has too little memory.
        """
        ...

    def free_host(self, address: int) -> None:
        """Give them back."""

    def register_host(self, address: int, nbytes: int) -> None:
        """Let the device reach memory of the host; it may do so already. Makes it current itself.

        Raises:
            AccelError: The driver refused.
        """

    def unregister_host(self, address: int) -> None:
        """Unregister memory; a dead context does nothing."""


class GpuStream(AccelStream, Protocol):
    """A stream that copies, and sets, takes and gives back memory: enqueued, with the context current.

    Memory of the host is read, or written, when the stream gets there. Pageable memory is an exception: it
    has been read, or written, when the call returns, however long that takes.
    """

    @property
    def handle(self) -> int:
        """The stream, as vendors' libraries want it."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more work."""
        ...

    @property
    def is_destroyed(self) -> bool:
        """Whether it has ended and was given back."""
        ...

    @property
    def launched(self) -> int:
        """The number of its last event."""
        ...

    def refresh(self) -> int:
        """Query the stream's progress; return the number of its last event that is done."""
        ...

    def take_memory(self, nbytes: int) -> int:
        """Take memory of the device, for work that is enqueued from now on; return its address.

        Raises:
            MemoryError: There is too little memory.
        """
        ...

    def free_memory(self, address: int) -> None:
        """Free memory after the work that was enqueued; at once if the stream has ended."""

    def check(self) -> None:
        """Refuse more work where none can be enqueued.

        Raises:
            RuntimeError: It is closed.
            ContextPoisonedError: The context is lost.
        """

    def in_use(self) -> AbstractContextManager[None]:
        """Enqueue on it in a thread that the device does not wait for; raises as `check` does."""
        ...

    def after(self, finisher: Callable[[], None]) -> None:
        """Do something short on the host before the next event is done; an error of it is the event's."""

    def copy_in(self, target: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from an address of the host to one of the device."""

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from an address of the device to one of the host."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes within the device."""

    def set_bytes(self, target: int, byte: int, count: int) -> None:
        """Set `count` bytes to one value."""

    def set_words(self, target: int, word: int, count: int) -> None:
        """Set `count` words of 32 bits to one value."""


class KernelFunction:
    """One kernel of a loaded module, with one argument, a structure of plain numbers; or with some.

    Args:
        launch: Enqueues it; the driver copies the arguments meanwhile.
        nbytes: Size of the structure.
        max_blocks: How many blocks fill the device.
        offsets: Offsets of its arguments in the structure.
    """

    __slots__ = ("_arguments", "_launch", "_lock", "_max_blocks", "_pointer", "_pointers")

    def __init__(self, launch: Launch, nbytes: int, max_blocks: int, offsets: Sequence[int] = (0,)) -> None:
        self._launch = launch
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._arguments = bytearray(nbytes)
        start = np.frombuffer(self._arguments, np.uint8).ctypes.data
        self._pointers = np.array([start + offset for offset in offsets], np.uint64)
        self._pointer = int(self._pointers.ctypes.data)

    def run(
        self,
        stream: int,
        count: int,
        layout: Struct,
        *values: object,
        threads: int = _THREADS,
        max_blocks: int = 0,
    ) -> None:
        """Pack values into their structure, and launch the kernel; another thread's launch waits meanwhile.

        Args:
            stream: Handle of the stream.
            count: The number of elements.
            layout: The structure.
            values: Its values.
            threads: Threads of a block.
            max_blocks: The most blocks; 0 for the number that the device runs at once.
        """
        blocks = min(-(-count // threads), max_blocks or self._max_blocks)
        with self._lock:
            layout.pack_into(self._arguments, 0, *values)
            self._launch(blocks, threads, stream, self._pointer)


@cache
def with_axes(fields: str, rows: int, axes: int) -> Struct:
    """Lay out a structure that ends in rows of 64 numbers, one for each axis, of which `axes` are used."""
    return Struct(f"<{fields}" + f"{axes}q{8 * (_AXES - axes)}x" * rows)


class LastUses(dict[GpuStream, int]):
    """The last uses of a resource before its removal: the number of each stream's event after them."""

    __slots__ = ()

    def note(self, stream: GpuStream) -> None:
        """Something there is used on a stream now."""
        self[stream] = stream.launched + 1

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past the last use."""
        for stream, number in tuple(self.items()):
            if stream.is_destroyed or stream.refresh() >= number:
                self.pop(stream, None)
        return bool(self)


@attrs.define(eq=False)
class LoadedCode:
    """Code that the driver has loaded, and that may be unloaded again."""

    _unload: Callable[[], object]
    _runs: LastUses = attrs.field(factory=LastUses, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether a stream may not have got past it."""
        return self._runs.is_busy

    def close(self) -> None:
        """Unload the code, which no longer runs. The context is current."""
        self._unload()


class Kernels:
    """The compiled sources of one device. A backend reads, compiles, loads and unloads them.

    Args:
        context: The context.
        compute_units: How many the device has.

    Attributes:
        most_blocks: How many blocks a kernel is launched with at most.
    """

    def __init__(self, context: GpuContext, compute_units: int) -> None:
        self._within = context
        self.most_blocks: int = compute_units * _BLOCKS
        self._modules: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, source: str) -> str:
        """Read a source of the backend's own, by its name."""
        raise NotImplementedError

    def compile(self, text: str) -> Any:
        """Compile a source and load it; blocks. The context is current."""
        raise NotImplementedError

    def find(self, module: Any, name: str, sizes: Sequence[int]) -> Launch:
        """Find a kernel in loaded code. The context is current.

        Args:
            module: The loaded code.
            name: Name of the kernel.
            sizes: Bytes of each argument, because some drivers need them.
        """
        raise NotImplementedError

    def unload(self, module: Any) -> None:
        """Unload loaded code. The context is current."""
        raise NotImplementedError

    def function(self, source: str, name: str, nbytes: int, offsets: Sequence[int] = (0,)) -> KernelFunction:
        """Find a kernel and load it. The first use of a source compiles it, which blocks.

        Args:
            source: Name of the source.
            name: Name of the kernel.
            nbytes: Size of the structure that it takes.
            offsets: Offsets of its arguments in the structure, if there are several.
        """
        with self._within:
            with self._lock:
                if source not in self._modules:
                    self._modules[source] = self.compile(self.read(source))
                module = self._modules[source]
            sizes = [end - start for start, end in pairwise((*offsets, nbytes))]
            return KernelFunction(self.find(module, name, sizes), nbytes, self.most_blocks, offsets)

    def load(
        self, text: str, names: Sequence[str], nbytes: int
    ) -> tuple[Callable[[], None], dict[str, KernelFunction]]:
        """Compile source text and load its kernels; blocks. The context is current.

        Args:
            text: The source.
            names: Names of the kernels.
            nbytes: Size of the structure that each takes.

        Returns:
            The call that unloads them, and the kernels by their names.
        """
        module = self.compile(text)
        try:
            launches = {name: self.find(module, name, (nbytes,)) for name in names}
            functions = {
                name: KernelFunction(launch, nbytes, self.most_blocks) for name, launch in launches.items()
            }
            return partial(self.unload, module), functions
        except BaseException:
            self.unload(module)
            raise

    def close(self) -> None:
        """Unload everything; no kernel runs any longer. The context is current."""
        with self._lock:
            for module in self._modules.values():
                self.unload(module)
            self._modules.clear()
