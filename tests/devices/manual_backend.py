"""A backend with streams that move at the test's request.

Its kernels and its memory are the CPU backend's, so that results are real. But there is no thread: work runs
in `ManualDevice.run`, `ManualStream.step`, or at once while nothing is held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import attrs
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel.backends.base import (
    AccelEvent,
    AccelStream,
    ChunkKeeper,
    DeviceInfo,
    KeptCounts,
    LibraryUsage,
    MemoryStatistics,
    NotSupportedError,
    PlacedBlock,
    Waker,
)
from trio_accel.backends.base.contract.ops import ArraySpec, OperationSpec
from trio_accel.backends.base.kit.host import map_shared
from trio_accel.backends.cpu.manifest import open_library
from trio_accel.backends.cpu.runtime._memory import CpuMemory, HostLease

LIBRARIES = ("blas", "fft", "memory", "sparse")


@attrs.define(eq=False)
class ManualEvent:
    """A point in a stream, reached when the test moves the stream there."""

    is_done: bool = False
    error: Exception | None = None
    wakers: list[Waker] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class _Wait:
    event: ManualEvent


@attrs.define(eq=False)
class ManualHold:
    """Holds its stream back until the test, or another owner, releases it."""

    device: ManualDevice
    event: ManualEvent = attrs.field(factory=ManualEvent)

    def release(self) -> None:
        self.event.is_done = True
        if not self.device.is_held:
            self.device.run()


@attrs.define(eq=False)
class ManualStream:
    """A queue of work that runs step by step."""

    name: str
    device: ManualDevice
    items: deque[Callable[[], object] | ManualEvent | _Wait] = attrs.field(factory=deque)
    is_closed: bool = False
    waits: int = 0
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_closed and not self.items

    def enqueue(self, work: Callable[[], object]) -> None:
        self._put(work)

    @property
    def is_preparing(self) -> bool:
        return False

    @property
    def failure(self) -> Exception | None:
        return self.device.failure

    def record(self) -> ManualEvent:
        event = ManualEvent()
        self._put(event)
        return event

    def wait(self, event: AccelEvent) -> None:
        assert isinstance(event, ManualEvent)
        self.waits += 1
        self._put(_Wait(event))

    def hold(self, waker: Waker | None = None) -> ManualHold:
        hold = ManualHold(self.device)
        if waker is not None:
            self.notify(self.record(), waker)
        self._put(_Wait(hold.event))
        return hold

    def crash(self) -> None:
        raise NotSupportedError("streams moved by hand run in the test's own process", backend="manual")

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        assert isinstance(event, ManualEvent)
        if event.is_done:
            waker.ring()
        else:
            event.wakers.append(waker)

    def synchronize(self) -> None:
        self.device.run()

    def close(self) -> None:
        self.is_closed = True

    def step(self) -> bool:
        """Do one thing; False if there is nothing, or it waits for another stream."""
        if not self.items:
            return False
        item = self.items[0]
        if isinstance(item, _Wait):
            if not item.event.is_done:
                return False
            self.items.popleft()
            return True
        self.items.popleft()
        if isinstance(item, ManualEvent):
            item.error, self.error = self.error, None
            item.is_done = True
            for waker in item.wakers:
                waker.ring()
            return True
        try:
            item()
        except Exception as error:  # noqa: BLE001  # as a stream does: the next event tells
            self.error = self.error or error
        return True

    def _put(self, item: Callable[[], object] | ManualEvent | _Wait) -> None:
        if self.is_closed:
            raise RuntimeError(f"stream {self.name!r} is closed")
        self.items.append(item)
        if not self.device.is_held:
            self.device.run()


@attrs.define(eq=False)
class ManualLibrary:
    """Kernels of the CPU backend, which fail on request."""

    name: str
    device: ManualDevice
    is_closed: bool = False
    kernels: Any = None

    def __attrs_post_init__(self) -> None:
        self.kernels = open_library(self.name, cast("Any", self.device))

    @property
    def operations(self) -> frozenset[str]:
        return self.kernels.operations

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        return self.device.prepare.get(type(spec))

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        assert isinstance(stream, ManualStream)
        assert not self.is_closed
        device = self.device
        refused = device.refuse.get(type(spec))
        if refused is not None:
            raise refused()
        work = self.kernels.call_of(spec, stream)
        device.enqueued.append(type(spec).__name__)
        failing = device.fail.get(type(spec))
        stream.enqueue(work if failing is None else _failing(failing))

    def close(self) -> None:
        self.is_closed = True


def _failing(make: Callable[[], Exception]) -> Callable[[], object]:
    def work() -> None:
        raise make()

    return work


@attrs.define(eq=False)
class ManualDevice:
    """An open device of the backend.

    Attributes:
        is_held: Whether streams wait for `run` and `step`.
        refuse: Makes the error raised by enqueueing an operation, by specification.
        fail: Makes the error at the end of an operation on its stream.
        prepare: A function to call before an operation is enqueued.
        enqueued: Names of the enqueued specifications.
        used: The result of `usage`.
    """

    info: DeviceInfo
    blocks: CpuMemory
    libraries: tuple[str, ...] = LIBRARIES
    validated_blocks: frozenset[int] = frozenset()
    plan_counts: KeptCounts = attrs.field(factory=KeptCounts)
    is_held: bool = False
    failure: Exception | None = None
    refuse: dict[type[OperationSpec], Callable[[], Exception]] = attrs.field(factory=dict)
    fail: dict[type[OperationSpec], Callable[[], Exception]] = attrs.field(factory=dict)
    prepare: dict[type[OperationSpec], Callable[[], None]] = attrs.field(factory=dict)
    streams: list[ManualStream] = attrs.field(factory=list)
    opened: list[ManualLibrary] = attrs.field(factory=list)
    enqueued: list[str] = attrs.field(factory=list)
    freed: list[int] = attrs.field(factory=list)
    used: dict[str, LibraryUsage] = attrs.field(factory=dict)
    refuse_library: Exception | None = None
    is_closed: bool = False
    has_ended: bool = False

    def open_stream(self, name: str, priority: int = 0) -> ManualStream:
        stream = ManualStream(name, self)
        self.streams.append(stream)
        return stream

    def open_library(self, name: str) -> ManualLibrary:
        if self.refuse_library is not None:
            raise self.refuse_library
        library = ManualLibrary(name, self)
        self.opened.append(library)
        return library

    def allocate(self, block: int, nbytes: int) -> None:
        self.blocks.allocate(block, nbytes)

    def free(self, block: int) -> None:
        self.blocks.free(block)
        self.freed.append(block)

    def renew(self, block: int) -> None:
        """The contents of a block are not kept."""

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int, *, write: bool = True) -> None:
        try:
            self.blocks.map_chunk(chunk, nbytes, descriptor, write=write)
        finally:
            os.close(descriptor)

    def unmap_chunk(self, chunk: int) -> None:
        self.blocks.unmap_chunk(chunk)

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        self.blocks.expect(blocks)

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        self.blocks.adopt(blocks)

    def placement(self, block: int) -> PlacedBlock:
        return self.blocks.placement(block)

    def spin(self, stream: ManualStream, block: int | None = None) -> ManualHold:
        return stream.hold()

    def give_up(self, reason: str) -> None:
        """A context lost for a reason of the engine is replaced, and no part of it is used again."""

    def poison(self, reason: str, how: str = "illegal_address", stream: object = None) -> None:
        self.failure = ta.ContextPoisonedError(reason)

    def reaches(self, peer: DeviceInfo) -> bool:
        return False

    def host_view(self, array: ArraySpec, *, write: bool = True) -> npt.NDArray[Any]:
        return self.blocks.view(array, write=write)

    def exhausted(self, requested: int) -> ta.OutOfMemoryError:
        return self.blocks.exhausted(requested)

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> HostLease:
        return HostLease(self.blocks.view(array, write=write), stream=stream)

    def memory(self) -> MemoryStatistics:
        return self.blocks.statistics()

    def usage(self) -> dict[str, LibraryUsage]:
        """Of its own, which tests change."""
        return self.used

    def close(self, grace: float) -> bool:
        self.is_closed = True
        for stream in self.streams:
            stream.close()
        self.blocks.clear()
        self.has_ended = all(stream.has_ended for stream in self.streams)
        return self.has_ended

    def stream(self, library: str) -> ManualStream:
        """The newest stream of a library."""
        return [stream for stream in self.streams if stream.name.endswith(library)][-1]

    def run(self) -> None:
        """Let every stream do what it has."""
        while sum(stream.step() for stream in self.streams):
            pass

    def release(self) -> None:
        """End all holds."""
        self.is_held = False
        self.run()


@attrs.define(eq=False)
class ManualBackend:
    """The backend: every `open_device` adds to `devices`.

    Attributes:
        may_open: Set while devices may be opened; otherwise that takes until it is.
        refuse_open: The error of opening a device.
        refuse_library: The error of opening the memory library of a device, and any later one.
    """

    name: str = "manual"
    preload: tuple[str, ...] = ()
    shares_memory_with_host: bool = True
    devices: list[ManualDevice] = attrs.field(factory=list)
    may_open: trio.Event = attrs.field(factory=trio.Event)
    refuse_open: Exception | None = None
    refuse_library: Exception | None = None

    @property
    def device(self) -> ManualDevice:
        """The newest device."""
        return self.devices[-1]

    @property
    def info(self) -> DeviceInfo:
        return self.list_devices()[0]

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        return (
            DeviceInfo(
                backend=self.name,
                index=0,
                description="streams moved by hand",
                total_memory=1 << 24,
                compute_units=1,
                isolations=("inline",),
            ),
        )

    def unavailable_reason(self) -> str | None:
        return None

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> ManualDevice:
        assert index == 0
        if self.refuse_open is not None:
            raise self.refuse_open
        limit = self.info.total_memory if memory_limit is None else memory_limit
        blocks = CpuMemory(self.info.name, limit, keeper)
        device = ManualDevice(self.info, blocks, refuse_library=self.refuse_library)
        self.devices.append(device)
        return device

    def prepare_worker(self) -> None:
        raise NotSupportedError("devices moved by hand have no workers", backend="manual")

    def map_host(self, descriptor: int, nbytes: int) -> Any:
        return map_shared(descriptor, nbytes)

    async def run_sync(self, function: Callable[..., Any], *args: object, **_: object) -> Any:
        """Stand in for `trio.to_thread.run_sync` without a thread: a test can wait for all tasks."""
        await trio.lowlevel.checkpoint()
        if getattr(function, "__name__", "") == "open_device":
            with trio.CancelScope(shield=True):
                await self.may_open.wait()
        return function(*args)
