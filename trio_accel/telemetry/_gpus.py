"""Reading GPUs without their workers, and without waiting for them on the loop."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import ActorSnapshot, System
from ..devices import System as DeviceSystem
from ._nvml import GpuReading, XidEvent, XidEvents, nvml_library, read_all
from ._protocol import check_interval

__all__ = ["GpuWatch", "read_gpus", "watch_gpus"]

T = TypeVar("T")

_KEPT = 50
# Seconds for which the end waits for a library that may hang.
_PATIENCE = 0.5
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("the one call of NVML at a time")


async def read_gpus(system: System | None = None) -> tuple[GpuReading, ...]:
    """Read memory, utilization, power, temperature and errors of all NVIDIA GPUs of the machine.

    Needs the extra ``nvml``. The figures come from the driver, by NVIDIA's management library (NVML), and not
    from a worker: they are to be had while a worker is dead or hangs. The library is called in a thread, one
    call at a time, so the loop goes on. If it hangs, this waits, and can be cancelled; the program can end.

    NVML knows nothing of ``CUDA_VISIBLE_DEVICES``. Open devices are matched with GPUs by their UUID.

    Args:
        system: Whose devices and worker processes are named in the readings.

    Returns:
        One reading for each GPU, in the order of NVML's numbers.

    Raises:
        NotSupportedError: The package or the driver is missing; the error says which.
    """
    readings = await _call(read_all)
    return tuple(_placed(readings, system))


class GpuWatch:
    """Reads GPUs again and again. Made by `watch_gpus`.

    Attributes:
        interval: Seconds between two readings.
    """

    def __init__(self, interval: float, system: System | None) -> None:
        self.interval: float = interval
        self._system = system
        self._latest: tuple[GpuReading, ...] = ()
        self._read_at = time.monotonic()
        self._failure: str | None = None
        # The rest belongs to the one call of the library.
        self._held = ExitStack()
        self._xids: dict[int, deque[XidEvent]] = {}
        self._events = XidEvents(lambda index, event: self._xids[index].append(event))
        self._has_ended = False

    @property
    def latest(self) -> tuple[GpuReading, ...]:
        """The last readings, one for each GPU; never empty if there are GPUs."""
        return tuple(
            [
                attrs.evolve(reading, xids=tuple(self._xids[reading.index].copy()))
                if reading.index in self._xids
                else reading
                for reading in self._latest
            ]
        )

    @property
    def age(self) -> float:
        """Seconds since the last readings. It grows if the library hangs, or fails."""
        return time.monotonic() - self._read_at

    @property
    def failure(self) -> str | None:
        """Why the last attempt gave no readings; None if it did."""
        return self._failure

    async def begin(self) -> None:
        """Begin to see errors, and read for the first time."""
        await _call(self._open)
        await self.read()

    async def read(self) -> None:
        """Read once."""
        readings = await _call(self._read)
        self._latest = tuple(_placed(readings, self._system))
        self._read_at, self._failure = time.monotonic(), None

    async def sample(self) -> None:
        """Read for ever."""
        while True:
            await trio.sleep(self.interval)
            try:
                await self.read()
            except Exception as error:  # noqa: BLE001  # the next attempt may do better
                self._failure = str(error) or type(error).__name__

    async def end(self) -> None:
        """Let the library go; not now, if it hangs."""
        self._has_ended = True
        with trio.move_on_after(_PATIENCE, shield=True):
            await _call(self._close)

    def _open(self) -> None:
        nvml = self._held.enter_context(nvml_library())
        self._held.callback(self._events.close)
        self._xids = {index: deque(maxlen=_KEPT) for index in self._events.open(nvml)}
        self._close_if_ended()

    def _read(self) -> tuple[GpuReading, ...]:
        try:
            self._events.poll()
            return read_all()
        finally:
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        # This call was cancelled, and its caller does not wait for it any more.
        if self._has_ended:
            self._close()

    def _close(self) -> None:
        self._held.close()


@asynccontextmanager
@enable_ki_protection
async def watch_gpus(
    interval: float = 1.0, *, system: System | None = None
) -> AsyncGenerator[GpuWatch, None]:
    """Read all NVIDIA GPUs of the machine again and again, inside the ``async with``.

    As `read_gpus`, in the background; the first readings are there at the begin. Besides, errors that the
    driver reports (Xid) are seen from then on, and come with the readings. They are noticed with the next
    reading, and the last 50 of a GPU are kept. If the library hangs later, `GpuWatch.latest` stays as it is
    and `GpuWatch.age` grows; the end waits for at most half a second.

    Args:
        interval: Seconds between two readings, 0.1 to 60.
        system: Whose devices and worker processes are named in the readings.

    Raises:
        ValueError: The interval is no such number.
        NotSupportedError: The package or the driver is missing; the error says which.
    """
    watch = GpuWatch(check_interval(interval), system)
    scope, has_ended = trio.CancelScope(), trio.Event()

    async def sample() -> None:
        try:
            with scope:
                await watch.sample()
        finally:
            has_ended.set()

    try:
        await watch.begin()
        trio.lowlevel.spawn_system_task(sample, name="readings of GPUs")
        try:
            yield watch
        finally:
            scope.cancel(reason="GPUs are watched no more")
            with trio.CancelScope(shield=True):
                await has_ended.wait()
    finally:
        await watch.end()  # noqa: ASYNC102  # what it waits for is bounded


async def _call(function: Callable[[], T]) -> T:
    """Call what blocks, one at a time in this run; who is cancelled leaves it alone."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


def _placed(readings: tuple[GpuReading, ...], system: System | None) -> Iterator[GpuReading]:
    """The readings, with what is known of this program."""
    pids = {os.getpid()}
    devices: dict[str, list[str]] = {}
    if system is not None:
        pids |= set(_pids(system.tree()))
    if isinstance(system, DeviceSystem):
        for device in system.devices:
            if device.info.uuid is not None:
                devices.setdefault(device.info.uuid.lower(), []).append(device.path)
    for reading in readings:
        yield attrs.evolve(
            reading,
            processes=reading.processes
            and tuple([attrs.evolve(p, is_ours=p.pid in pids) for p in reading.processes]),
            devices=None
            if system is None or reading.uuid is None
            else tuple(devices.get(reading.uuid.lower(), ())),
        )


def _pids(root: ActorSnapshot) -> Iterator[int]:
    """Processes of an actor and those below it."""
    actors = [root]
    while actors:
        actor = actors.pop()
        if actor.pid is not None:
            yield actor.pid
        actors += actor.children
