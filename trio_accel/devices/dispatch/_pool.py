"""The worker processes of a device: active, spare and dying."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import describe, warn_untold
from ...backends import path_of
from ...backends.base import NotSupportedError
from ...backends.base.kit.fast_paths import current_fast_paths
from ..base._errors import is_shortage
from ..base._host_pool import HostPool, Slab
from ..base._library_paths import LibrariesInUse
from ..base._options import SyncCompletion, window_of
from ..base._statistics import PreloadState
from ..engine._device_state import DeviceState
from ..engine._library_opener import blocks_of, modules_of
from ..launcher._launcher import Launcher, LauncherError
from ..launcher._link import program_arguments
from ..wire import _orders
from ..wire._answers import ANSWERS
from ..wire._channel import Channel
from ..wire._protocol import SharedPage, WorkerConfig
from ._chunks import Chunk, ChunkTable
from ._link import MessageHandler, WorkerLink

# The maximum bytes of a worker's message; below, with host arrays by value.
_LARGEST_ANSWER = 32 << 20
_MOST_BY_VALUE = 2**32 - 1
# Seconds between attempts to start a spare.
_LEAST_PAUSE = 0.05
_LONGEST_PAUSE = 10.0
_DOUBLINGS = 8
# Seconds for which a lack of descriptors for a worker is tolerated, and the longest pause between attempts.
_SHORTAGE = 30.0
_LONGEST_SHORTAGE_PAUSE = 1.0
# A worker stays awake only for requests that closely follow their answers: for half of this time before one
# is due. A loop cannot sleep for less than that millisecond, because `epoll` rounds up (D171).
_WINDOW = 2e-3
_logger = logging.getLogger("trio_accel.devices")
# The worker's own module, for backends with preloaded workers.
_PROGRAM = "trio_accel.devices.worker._process"
# Packages with library actors that the program imports at their first use. Workers preload them, because a
# worker that takes over may need one at once.
_ACTORS = ("trio_accel.jit", "trio_accel.programs", "trio_accel.collectives")


def check_options(device: DeviceState) -> None:
    """Refuse options that another process cannot have.

    Raises:
        NotSupportedError: A strategy cannot be pickled, or its class is in __main__; or the options ask for
            spares on a device that accepts only one process at a time.
    """
    options = device.options
    if options.spares and device.info.is_exclusive:
        raise NotSupportedError(
            f"spares={options.spares}: {device.name} is in exclusive compute mode and takes one process at a"
            " time; open it with spares=0, or have the mode set to default",
            device=device.name,
            backend=device.info.backend,
        )
    for name in ("completion", "streams"):
        strategy = getattr(options, name)
        problem = None
        if type(strategy).__module__ == "__main__":
            problem = "its class is defined in __main__; move it to a module"
        else:
            try:
                pickle.dumps(strategy)
            except Exception as error:  # noqa: BLE001  # a foreign class may raise anything
                problem = describe(error)
        if problem is not None:
            raise NotSupportedError(
                f"{name}={strategy!r} cannot be given to a worker process ({problem}); "
                "or open the device with isolation='inline'"
            )


class WorkerPool:
    """The workers of a device: starts them and hands them out. All have ended when it is closed.

    Args:
        device: The device.
        chunks: The memory that every worker maps.

    Attributes:
        in_use: The libraries that the generation uses. Every new worker opens them in advance.
    """

    def __init__(self, device: DeviceState, chunks: ChunkTable) -> None:
        self._is_observed = False
        self._is_timed = False
        self._device = device.name
        self._backend = device.info.backend
        self._is_exclusive = device.info.is_exclusive
        self._path = device.path
        self._options = options = device.options
        modules = device.backend.preload
        self._preload = (*modules, *_ACTORS, _PROGRAM) if modules or options.preload else ()
        # Large results are sent by value only if nothing else is possible.
        is_by_value = isinstance(options.completion, SyncCompletion)
        self._limit = _MOST_BY_VALUE if is_by_value else _LARGEST_ANSWER
        self._window = window_of(options.completion, device.info)
        self._recoveries = device.recoveries
        self._chunks = chunks
        self._slabs = SlabTable(device.host_pool, lambda: self.links)
        self._handle: MessageHandler
        self._on_end: Callable[[WorkerLink], None]
        self._links: set[WorkerLink] = set()
        self._spares: list[WorkerLink] = []
        self.in_use: LibrariesInUse = LibrariesInUse()
        self._launcher: Launcher
        self._nursery: trio.Nursery
        self._is_refilling = False
        # The number of successive spares that died before they were used.
        self._failures = 0
        self._is_closed = False

    @property
    def links(self) -> Iterable[WorkerLink]:
        """All workers that still exist."""
        return tuple(self._links)

    @property
    def spares(self) -> int:
        """The number of spare workers."""
        return len(self._spares)

    def open(
        self,
        launcher: Launcher,
        nursery: trio.Nursery,
        handle: MessageHandler,
        on_end: Callable[[WorkerLink], None],
    ) -> None:
        """Begin.

        Args:
            launcher: Starts the workers.
            nursery: Its tasks serve them.
            handle: Handles the messages of workers.
            on_end: Called when a worker has ended.
        """
        self._launcher = launcher
        self._nursery = nursery
        self._handle = handle
        self._on_end = on_end
        self._recoveries.judge, self._recoveries.spares = self._judge, lambda: self.spares
        self._slabs.open(launcher)

    def _judge(self, module: str) -> tuple[PreloadState, str | None]:
        """Return whether the next worker begins with a module, and why not."""
        if not self._preload:
            return "refused", "the backend has nothing imported ahead"
        return self._launcher.ahead.judge(module)

    async def take(self) -> WorkerLink:
        """Take a ready worker for exclusive use: its predecessors cannot write to memory any longer (D4).

        Raises:
            ContextLostError: It was not ready in time.
            LauncherError: It could not be started.
        """
        # Known dead spares do not count.
        self._spares = [spare for spare in self._spares if spare.how is None]
        if self._spares:
            self._failures = 0
            link = self._spares.pop(0)
            link.is_spare = False
        else:
            if self._is_exclusive:
                # An exclusive device accepts only one process, so even a silent worker must have ended before
                # the next starts.
                await self._wait_gone(None)
            try:
                link = await self._start_when_possible()
            except BaseException:
                # D99: a library opened in advance may be the cause.
                self.in_use.clear()
                raise
        try:
            await self._wait_gone(link)
        except BaseException:
            link.kill_worker("was not needed")
            raise
        return link

    async def _wait_gone(self, successor: WorkerLink | None) -> None:
        """Wait for the end of abandoned workers that may still write to memory (D4)."""
        for link in self.links:
            is_over = link is not successor and link not in self._spares and link.how is not None
            if is_over and not (link.is_silent and successor is not None):
                await link.wait_gone()

    def refill(self) -> None:
        """Start as many spares as the options demand."""
        if self._options.spares and not self._is_refilling:
            self._is_refilling = True
            self._nursery.start_soon(self._refill)

    def observe(self, *, is_observed: bool, is_timed: bool) -> None:
        """Inform the workers whether messages are observed, and launches are timed."""
        if (is_observed, is_timed) != (self._is_observed, self._is_timed):
            self._is_observed, self._is_timed = is_observed, is_timed
            for link in self._links:
                link.send(_orders.observe(is_observed, is_timed))

    def use(self, library: str) -> None:
        """Record that a library is in use from now on. Spare workers open it in advance."""
        self.in_use.add(library)
        modules = modules_of(library)
        if modules and self._preload:
            # The launcher imports the modules for later workers.
            self._nursery.start_soon(self._launcher.import_ahead, modules, self._preload)
        for link in self._links:
            if not link.is_serving:
                self._prepare(link, library)

    def _prepare(self, link: WorkerLink, library: str) -> None:
        """Let a worker open a library in advance, if the places of its blocks are known."""
        entries = [self._chunks.blocks.get(block) for block in blocks_of(library)]
        addresses = [entry for entry in entries if entry is not None and entry[2] in self._chunks.chunks]
        if len(addresses) == len(entries):
            link.send(_orders.prepare(library, tuple(addresses)))

    def forget(self, library: str) -> None:
        """Forget a closed library. Spare workers close it as well."""
        self.in_use.discard(library)
        for link in self._links:
            link.used.discard(library)
            if not link.is_serving:
                link.send(_orders.forget(library))

    def share(self, chunk: Chunk, maker: WorkerLink) -> None:
        """Let all workers except its maker map a chunk."""
        for link in self._links:
            if link is not maker:
                try:
                    chunk.send(link)
                except OSError as error:
                    # Otherwise the worker would serve without a part of the memory.
                    link.kill_worker(f"was not needed: it could not be given memory ({error})")

    def unshare(self, number: int, *, but: WorkerLink | None) -> None:
        """Let all workers except one unmap a freed chunk."""
        for link in self._links:
            if link is not but:
                link.send(_orders.unchunk(number))

    async def close(self) -> None:
        """End all remaining workers, and wait for their end."""
        # From here on no spare starts, while the others end.
        self._is_closed = True
        # All are killed before the first is awaited, so that together they take as long as the slowest.
        for link in self.links:
            link.kill_worker("was ended with its device")
        for link in self.links:
            await link.wait_gone()
        self._slabs.close()

    @enable_ki_protection
    async def _refill(self) -> None:
        try:
            # The newly active worker gets the processors for a moment.
            await trio.sleep(_LEAST_PAUSE)
            while self._wants_spare():
                if self._failures:
                    await trio.sleep(min(_LEAST_PAUSE * 2 ** min(self._failures, _DOUBLINGS), _LONGEST_PAUSE))
                try:
                    spare = await self._start()
                    # It is appended only now, because `take` may have replaced the list during the wait.
                    self._spares.append(spare)
                    spare.is_spare = True
                except Exception as error:  # noqa: BLE001  # the device continues without a spare
                    if self._is_closed:
                        return
                    # Its error will appear when a worker is needed, so one of successive failures is printed.
                    warn = _logger.warning if self._failures else partial(warn_untold, _logger.name)
                    self._failures += 1
                    text, extra = "device %s: a spare worker did not come up: %s", {"device": self._path}
                    warn(text, self._path, describe(error), extra=extra)
        finally:
            self._is_refilling = False

    def _wants_spare(self) -> bool:
        return not self._is_closed and len(self._spares) < self._options.spares

    async def _start_when_possible(self) -> WorkerLink:
        """Start a worker. If this process has too few descriptors, try again for a while."""
        end, pause = trio.current_time() + _SHORTAGE, _LEAST_PAUSE
        while True:
            try:
                return await self._start()
            except (OSError, LauncherError) as error:
                if not is_shortage(error) or trio.current_time() >= end:
                    raise
                text, extra = "device %s: a worker cannot be started yet: %s", {"device": self._path}
                _logger.warning(text, self._path, error, extra=extra)
            await trio.sleep(pause)
            pause = min(2 * pause, _LONGEST_SHORTAGE_PAUSE)

    async def _start(self) -> WorkerLink:
        if self._options.preload:
            await self._launcher.import_ahead(self._options.preload, self._preload)
        began = time.perf_counter()
        with ExitStack() as undo:
            page = SharedPage.create()
            undo.callback(page.close)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            # Closed as soon as the worker has its own, because a copy here would hide the worker's death.
            with theirs:
                process = await self._launcher.start_worker(
                    program_arguments(), (theirs.fileno(), page.descriptor), self._preload
                )
            # From here on the link closes them.
            undo.pop_all()
        link = WorkerLink(
            process,
            Channel(ours, receives=ANSWERS, limit=self._limit),
            page,
            device=self._device,
            path=self._path,
            heartbeat_timeout=self._options.heartbeat_timeout,
            stuck_after=self._options.stuck_after,
            window=self._window,
        )
        # The link counts before it is ready, so that it gets memory made meanwhile.
        self._links.add(link)
        self._nursery.start_soon(link.run, self._handle, self._on_end, self._forget_worker)
        in_use = self.in_use.paths
        placed = [library for library in in_use if blocks_of(library)]
        try:
            config = WorkerConfig(
                device=self._device,
                backend=path_of(self._backend),
                path=self._path,
                options=self._options,
                in_use=tuple([library for library in in_use if library not in placed]),
                is_observed=self._is_observed,
                is_timed=self._is_timed,
                window=min(self._window, _WINDOW),
                fast_paths=current_fast_paths(),
            )
            link.send(_orders.config(config))
            # The chunks precede the libraries with placed blocks, because these blocks are in the chunks.
            for chunk in self._chunks.chunks.values():
                chunk.send(link)
            for library in placed:
                self._prepare(link, library)
            self._slabs.tell(link)
            await link.wait(lambda: link.is_ready)
            self._recoveries.started(time.perf_counter() - began)
        except BaseException:
            link.kill_worker("was not needed")
            raise
        return link

    def _forget_worker(self, link: WorkerLink) -> None:
        """Forget a worker after its end, and replace it if it was a spare."""
        self._links.discard(link)
        if not link.is_spare:
            return
        if link in self._spares:
            self._spares.remove(link)
        if self._is_closed:
            return
        self._failures += 1
        self.refill()
        # No request gets the error. The end of the launcher is reported once, for all its workers.
        if not link.process.has_ended_with_launcher:
            text, pid = "device %s: spare worker process %d %s; another one starts", link.process.pid
            warn_untold(_logger.name, text, self._path, pid, link.how, device=self._path, pid=pid)


class SlabTable:
    """Announces each slab before its first use, and its end.

    Args:
        pool: The pool; None if the workers' device does not need one.
        links: Returns the existing workers.
    """

    def __init__(self, pool: HostPool | None, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._pool = pool
        self._links = links
        self._launcher: Launcher

    def open(self, launcher: Launcher) -> None:
        """Begin. The launcher empties the memory if this process dies."""
        self._launcher = launcher
        if self._pool is not None:
            self._pool.on_make = self._share
            self._pool.on_drop = self._unshare

    def tell(self, link: WorkerLink) -> None:
        """Let a new worker map all existing slabs."""
        if self._pool is not None:
            for slab in self._pool.slabs.values():
                _send(link, slab)

    def close(self) -> None:
        """Give up the pool. Its arrays are not changed."""
        if self._pool is not None:
            for slab in self._pool.slabs.values():
                self._forget(slab)
            self._pool.close()

    def _share(self, slab: Slab) -> None:
        assert slab.descriptor is not None
        self._launcher.keep_chunk(slab.descriptor)
        for link in self._links():
            _send(link, slab)

    def _unshare(self, slab: Slab) -> None:
        self._forget(slab)
        for link in self._links():
            link.send(_orders.unslab(slab.number))

    def _forget(self, slab: Slab) -> None:
        assert slab.descriptor is not None
        self._launcher.forget_chunk(slab.descriptor)


def _send(link: WorkerLink, slab: Slab) -> None:
    assert slab.descriptor is not None
    link.send(_orders.slab(slab.number, slab.nbytes), (slab.descriptor,))
