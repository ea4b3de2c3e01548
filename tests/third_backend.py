"""A third backend: another kind of GPU, in the engine's view; its kernels compute by NumPy.

It is written only against the protocols of `trio_accel.backends.base`, as a backend of another vendor would
be: memory without host addresses, streams made of command queues, events, copies by commands too, and
completion reported from a thread of the device. The functions of the CPU's libraries compute: a kernel is
called as ``kernel(spec, call)`` on every backend, so they run here too.

`register_third()` makes it known as ``"third"``; ``nox -s third`` runs the conformance tests on it.
"""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn

import attrs
import numpy as np
import numpy.typing as npt

from trio_accel.backends import register
from trio_accel.backends.base import (
    AccelBackend,
    AccelEvent,
    AccelStream,
    BackendReport,
    BlockMemory,
    ChunkKeeper,
    ContextPoisonedError,
    DeviceInfo,
    DeviceReport,
    NotSupportedError,
    Poison,
    Waker,
    as_bits,
)
from trio_accel.backends.base.contract.device_info import choose
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    CopyFromHostSpec,
    CopyToHostSpec,
    HostUse,
    OperationSpec,
)
from trio_accel.backends.base.kit.chunks import ALIGNMENT
from trio_accel.backends.base.kit.device import BlockDevice
from trio_accel.backends.base.kit.kernels import kernels_of, load_module_kernels
from trio_accel.backends.base.kit.library import ComputingCall, ComputingLibrary, LibraryEntry

BACKEND = "third"
IN_WORKERS = "thirdinworkers"
_MEMORY = 8 << 30
# The functions of the CPU; graphs and programs are classes there, and this device has none.
_COMPUTING = (
    *("arrays", "blas", "blaslt", "dnn", "fft", "jit", "memory", "random", "solver", "sparse", "tensor"),
)
LIBRARIES: Mapping[str, LibraryEntry] = {
    name: LibraryEntry(f"trio_accel.backends.cpu.libraries.{name}") for name in _COMPUTING
}

Array = npt.NDArray[Any]
Command = Callable[[], object]


class Context:
    """State shared by the streams of a device: whether it is lost, and why."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.reason: str | None = None

    def failure(self) -> ContextPoisonedError | None:
        """A new error each time, as each caller may raise it."""
        if self.reason is None:
            return None
        return ContextPoisonedError(f"the context is lost: {self.reason}", device=self._device)


class Event:
    """A point in a stream."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.passed = threading.Event()
        self._wakers: list[Waker] = []
        # A waker is rung by `notify` or by `signal`, and not by both.
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        return self.passed.is_set()

    def notify(self, waker: Waker) -> None:
        with self._lock:
            if not self.is_done:
                self._wakers.append(waker)
                return
        waker.ring()

    def signal(self, error: Exception | None, *, is_lost: bool) -> None:
        """Report that the stream is here; a lost device calls nobody back."""
        with self._lock:
            self.error = error
            self.passed.set()
            wakers, self._wakers = self._wakers, []
        for waker in () if is_lost else wakers:
            waker.ring()


class Hold:
    """The reason for a stream to wait."""

    def __init__(self, waker: Waker | None = None, memory: Array | None = None) -> None:
        self._released = threading.Event()
        self._waker = waker
        self._memory = memory

    def release(self) -> None:
        self._released.set()

    def __call__(self) -> None:
        if self._waker is not None:
            self._waker.ring()
        for byte in itertools.cycle(range(256)):
            if self._memory is not None:
                self._memory[...] = byte
            if self._released.wait(None if self._memory is None else 0.0001):
                return


class Stream:
    """A queue of commands, and the thread of the device that takes them in order."""

    def __init__(self, name: str, context: Context) -> None:
        self._name = name
        self._context = context
        self._commands: queue.SimpleQueue[Command | Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def failure(self) -> Exception | None:
        return self._context.failure()

    @property
    def has_ended(self) -> bool:
        return self._is_closed and (self._thread is None or not self._thread.is_alive())

    def enqueue(self, command: Command) -> None:
        """Put a command after all others, unless the context is lost."""
        failure = self.failure
        if failure is not None and not self._is_closed:
            raise failure
        self._put(command)

    def record(self) -> Event:
        event = Event()
        self._put(event)
        return event

    def wait(self, event: AccelEvent) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"event: the third backend waits for its own kind, not {event!r}")
        if not event.is_done:
            self._put(event.passed.wait)

    def hold(self, waker: Waker | None = None) -> Hold:
        hold = Hold(waker)
        self.enqueue(hold)
        return hold

    def crash(self) -> None:
        self.enqueue(partial(signal.raise_signal, signal.SIGSEGV))

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"event: the third backend knows its own kind, not {event!r}")
        event.notify(waker)

    def synchronize(self) -> None:
        passed = threading.Event()
        try:
            self._put(_Latch(passed))
        except RuntimeError:
            self.join()
        else:
            passed.wait()

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _put(self, command: Command | Event) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"stream {self._name!r} is closed and takes no more work")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._commands.put(command)

    def _run(self) -> None:
        error: Exception | None = None
        with np.errstate(all="ignore"):
            while (command := self._commands.get()) is not None:
                lost = self._context.failure()
                if isinstance(command, Event):
                    command.signal(lost or error, is_lost=lost is not None)
                    error = None
                elif isinstance(command, _Latch):
                    command()
                elif lost is None:
                    error = _call(command) or error
                command = None  # an idle thread holds no array


class _Latch:
    """A command that runs also where the context is lost: somebody waits for it."""

    def __init__(self, passed: threading.Event) -> None:
        self._passed = passed

    def __call__(self) -> None:
        self._passed.set()


def _call(command: Command) -> Exception | None:
    try:
        command()
    except BaseException as error:  # noqa: ASYNC103, BLE001  # the thread goes on, and the next event tells
        failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        return failure.with_traceback(None)  # noqa: ASYNC104  # of a thread
    return None


class Chunks:
    """The source of the device's memory."""

    first = 64 << 20
    keep = 256 << 20

    def make(self, nbytes: int) -> tuple[Array, int]:
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return whole[start : start + nbytes], nbytes

    def make_kept(self, nbytes: int, keeper: ChunkKeeper, chunk: int) -> NoReturn:
        raise NotImplementedError

    def map(self, nbytes: int, descriptor: int) -> NoReturn:
        raise NotImplementedError

    def share(self, chunk: Array) -> NoReturn:
        raise NotImplementedError

    def drop(self, chunk: Array) -> None:
        """It is released with the last array over it."""

    def block(self, chunk: Array, offset: int, nbytes: int) -> Array:
        return chunk[offset : offset + nbytes]

    def available(self) -> int:
        return _MEMORY


class Library(ComputingLibrary):
    """A library of an open device: a launch is a command of the stream."""

    backend: ClassVar[str] = BACKEND
    streams: ClassVar[type[Any]] = Stream


class MemoryLibrary(Library):
    """Until the stream gets to a copy between device and host, the engine may withdraw it."""

    def call_of(self, spec: OperationSpec, stream: AccelStream) -> ComputingCall:
        if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec)):
            spec.note_use(HostUse(as_bits(spec.host)))
        return super().call_of(spec, stream)


class Device(BlockDevice[Stream, Array, Array]):
    """An open device."""

    def __init__(self, info: DeviceInfo, memory_limit: int) -> None:
        super().__init__(info, BlockMemory(info.name, memory_limit, Chunks()))
        self.libraries = tuple(sorted(LIBRARIES))
        self._context = Context(info.name)

    def host_view(self, array: ArraySpec, /, *, write: bool = True) -> Array:
        """An array as kernels of the device see it."""
        memory, _ = self.blocks.block(array.block)
        data = memory.data if write else np.frombuffer(memory.data.toreadonly(), np.uint8)
        return np.ndarray(array.shape, array.dtype.dtype, data, array.offset, array.strides)

    def open_stream(self, name: str, priority: int = 0) -> Stream:
        self.check_open()
        return self.add_stream(Stream(name, self._context))

    def open_library(self, name: str) -> Library:
        self.check_open()
        if name not in LIBRARIES:
            return Library(name, self, load_module_kernels(name, BACKEND, self.libraries, self.info.name))
        cls = MemoryLibrary if name == "memory" else Library
        return cls(name, self, kernels_of(vars(LIBRARIES[name].load(None)), "cpu"))

    def spin(self, stream: AccelStream, block: int | None = None) -> Hold:
        if not isinstance(stream, Stream):
            raise TypeError(f"stream: the third backend has its own streams, not {stream!r}")
        hold = Hold(memory=None if block is None else self.blocks.block(block)[0])
        stream.enqueue(hold)
        return hold

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        self._context.reason = reason

    def give_up(self, reason: str) -> None:
        self._context.reason = self._context.reason or reason

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> NoReturn:
        raise NotSupportedError("lease: the host cannot address the memory", backend=BACKEND)

    def end(self, *, is_idle: bool) -> None:
        super().end(is_idle=is_idle)
        if not is_idle:
            self.give_up("the device was closed")


class ThirdBackend(AccelBackend):
    """One device, which is always there."""

    @property
    def name(self) -> str:
        return BACKEND

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        return (
            DeviceInfo(
                backend=BACKEND,
                index=0,
                description="NumPy behind the protocols of a GPU",
                total_memory=_MEMORY,
                compute_units=1,
                isolations=("inline",),
            ),
        )

    def describe(self) -> BackendReport:
        (info,) = self.list_devices()
        return BackendReport(name=BACKEND, devices=(DeviceReport(info=info, libraries=tuple(LIBRARIES)),))

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> Device:
        info, limit = choose(self.list_devices(), BACKEND, index, memory_limit)
        if keeper is not None:
            raise NotSupportedError("its memory ends with its process", backend=BACKEND)
        return Device(info, limit)

    def prepare_worker(self) -> None:
        """It does not have workers."""


class ThirdInWorkers(ThirdBackend):
    """The same in workers, with memory that ends with them."""

    @property
    def name(self) -> str:
        return IN_WORKERS

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        (info,) = super().list_devices()
        return (attrs.evolve(info, backend=IN_WORKERS, isolations=("process", "inline"), keeps_memory=False),)

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> Device:
        assert keeper is None
        info, limit = choose(self.list_devices(), IN_WORKERS, index, memory_limit)
        return Device(info, limit)


def register_third() -> None:
    """Make it known by its name."""
    register(BACKEND, f"{__name__}:ThirdBackend")
