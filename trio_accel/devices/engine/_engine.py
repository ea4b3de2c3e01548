"""The engine of one context: its parts, its libraries, and its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorStoppedError, TaskEvent
from ...backends.base import AccelDevice, AccelEvent, AccelStream, KernelLibrary, LibraryUsage, PlacedBlock
from ...backends.base.kit.programs import ImportsCode
from ..base._options import DeviceOptions, best_completion
from ..base._port import CompletionPort
from ..base._statistics import QueueStatistics
from ..base._waits import Alarms
from ..operations._blocks import BlockTable
from ..operations._operation import Launch
from ._completer import CancelGrace, Completer
from ._context_state import ContextState, EngineObserver, Watchdog
from ._enqueuer import Enqueuer, Ranges, ThreadedLaunches
from ._in_flight import BlockUse, BlockUses, MemoryInUse
from ._leases import LaunchGate, LaunchOrder, Leases
from ._stream_queues import StreamQueues


@attrs.define(eq=False)
class _Opening:
    """A library that no actor has taken yet. It is being opened, or is open."""

    name: str
    library: KernelLibrary | None = None
    error: Exception | None = None
    is_over: TaskEvent = attrs.field(factory=TaskEvent)


class KernelLibraries:
    """The libraries of one context. Threads open them, so that the loop and other libraries continue (D99).

    An opening belongs to the context. It continues when the actor that began it is cancelled, and the next
    actor takes the library.

    Args:
        device: The device of the context.
        on_opened: Called when a program's library is open, with its name, the seconds of the opening, and the
            seconds of the import.
    """

    def __init__(self, device: AccelDevice, on_opened: Callable[[str, float, float], None]) -> None:
        self._device = device
        self._on_opened = on_opened
        self._nursery: trio.Nursery
        self._openings: dict[str, list[_Opening]] = {}

    def start(self, nursery: trio.Nursery) -> None:
        """Begin; tasks of the nursery open libraries."""
        self._nursery = nursery

    async def take(self, name: str) -> KernelLibrary:
        """Return a library for its caller's exclusive use: one opened in advance, or a new one.

        Raises:
            NotSupportedError: The library does not exist.
            Exception: Another error while opening it.
        """
        while True:
            openings = self._openings.get(name)
            opening = openings[0] if openings else self._begin(name)
            await opening.is_over.wait()
            if opening.error is not None:
                raise opening.error
            if opening in self._openings.get(name, ()):
                # Another actor may have taken the library during the wait. Then the loop repeats.
                self._remove(opening)
                assert opening.library is not None
                return opening.library

    async def prepare(self, name: str) -> None:
        """Open a library in advance, for the next actor that takes it; raises as `take` does."""
        opening = self._begin(name)
        await opening.is_over.wait()
        if opening.error is not None:
            raise opening.error

    async def drop(self, name: str) -> None:
        """Close an untaken library opened in advance."""
        await self._end(self._openings.pop(name, []))

    def discard(self, name: str) -> None:
        """Withdraw a library opened in advance, and close it soon."""
        self._nursery.start_soon(self._end, self._openings.pop(name, []))

    @enable_ki_protection
    async def _end(self, openings: list[_Opening]) -> None:
        for opening in openings:
            await opening.is_over.wait()
            if opening.library is not None:
                # A thread closes it, because a vendor's library waits for all work of the device.
                await trio.to_thread.run_sync(opening.library.close)

    def _remove(self, opening: _Opening) -> None:
        openings = self._openings[opening.name]
        openings.remove(opening)
        if not openings:
            del self._openings[opening.name]

    def _begin(self, name: str) -> _Opening:
        opening = _Opening(name)
        self._openings.setdefault(name, []).append(opening)
        self._nursery.start_soon(self._open, opening)
        return opening

    @enable_ki_protection
    async def _open(self, opening: _Opening) -> None:
        name = opening.name
        try:
            began = time.perf_counter()
            library = await trio.to_thread.run_sync(self._device.open_library, name)
            opening.library = library
            if isinstance(library, ImportsCode):
                self._on_opened(name, time.perf_counter() - began, library.import_seconds)
        except Exception as error:  # noqa: BLE001  # raised in the actor that waits for it
            opening.error = error
        finally:
            if opening.library is None and opening in self._openings.get(name, ()):
                self._remove(opening)
                opening.error = opening.error or ActorStoppedError(
                    f"the context ended before its library {name!r} was open", path=self._device.info.name
                )
            # A cancelled opening has ended as well: the waiting actors belong to other tasks, and would wait
            # for ever.
            opening.is_over.set()

    def close(self) -> None:
        """Close untaken libraries. Blocks; call this only while none is being opened."""
        for openings in self._openings.values():
            for opening in openings:
                if opening.library is not None:
                    opening.library.close()
            openings.clear()


_IDLE_POLL = 0.02
# Seconds to wait for an idle moment. After that, work that needs one is done anyway.
_MOST_PATIENCE = 10.0
# Streams of a lost context do nothing useful, so the next context waits only briefly for them.
_GRACE_OF_A_LOST_CONTEXT = 0.1


class Engine(ContextState):
    """The engine of one context: launches operations, detects their ends, replies, and frees memory.

    It lives on the Trio thread and never blocks. Operations in flight belong to the engine, so they outlive a
    restart of the library actor that launched them.

    Attributes:
        device: The device of the context.
        libraries: Opens the libraries of the device.
        named: The names of the backend's libraries, by the import paths of started actors.
        streams: Its streams, with the operations in flight.
        gate: The operations that wait to be launched.
        enqueuer: Passes operations to the backend.
        threaded: The same for operations with blocking kernels.
        completer: Replies when they are done.
        completion: Detects that they are done.
        watchdog: Watches operations in flight (D9).
        leases: The arrays that the program holds.
        alarms: Callbacks with deadlines.
        cancel_grace: Limits how long cancelled callers wait.
        observer: The owner of the context.
        enter: Enters a submitted operation: later operations that touch its memory are launched after it.
        over: Notes that nobody waits for an operation; see `LaunchGate.over`.
        placed: Returns the place of a block in a retained chunk; None if it is freed, or will be.
        uses: The uses of blocks.
        exchange: Frees released blocks, and makes others.
        fresh: Blocks with new places. The code that reports a place removes its block.
        release_all: Frees blocks, each as soon as nothing in flight uses it.
        pin: Begins a use of a block.
        unpin: Ends uses of blocks.
    """

    def __init__(
        self,
        device: AccelDevice,
        memory: KernelLibrary,
        *,
        options: DeviceOptions,
        generation: int,
        observer: EngineObserver,
        lose: Callable[[Exception], None],
        blocks: BlockTable,
    ) -> None:
        super().__init__(device.info.name, generation)
        self.device = device
        self.libraries: KernelLibraries = KernelLibraries(device, observer.program_opened)
        self.named: dict[str, str] = {}
        self._memory = memory
        self._lose = lose
        self.observer: EngineObserver = observer
        self._close_grace = options.close_grace
        self._memory_in_use = MemoryInUse(device)
        # Methods of the parts, bound once, so that the hot path saves a call.
        self.uses: BlockUses = self._memory_in_use.uses
        self.exchange: Callable[[Sequence[tuple[int, int]]], None] = partial(
            self._memory_in_use.exchange, blocks
        )
        self.release_all: Callable[[Iterable[int]], None] = self._memory_in_use.release_all
        self.pin: Callable[[int], BlockUse] = self._memory_in_use.pin
        self.unpin: Callable[[Iterable[BlockUse]], None] = self._memory_in_use.unpin_all
        self.adopt: Callable[[Iterable[int]], None] = self._memory_in_use.adopt
        self.placed: Callable[[int], PlacedBlock | None] = self._memory_in_use.placed
        self.fresh: set[int] = self._memory_in_use.fresh
        self.streams: StreamQueues = StreamQueues(options.streams.open(device), options.in_flight)
        self.gate: LaunchGate = LaunchGate(blocks.drain_some)
        order: LaunchOrder = self.gate.order
        self.enter: Callable[[Launch], None] = order.enter
        self.over: Callable[[Launch], None] = self.gate.over
        self.alarms: Alarms = Alarms()
        self.cancel_grace: CancelGrace = CancelGrace(self.alarms, options.cancel_grace)
        self.leases: Leases = Leases(
            device, self.streams.all, order, self._memory_in_use, self._watch_lease, self.lose_context
        )
        self.completer: Completer = Completer(
            self,
            self.streams,
            self._memory_in_use,
            self.leases,
            self.alarms,
            observer.hooks,
            observer.is_alone,
            options.completion or best_completion(device.info),
        )
        self.completion: CompletionPort = self.completer.port
        self.watchdog: Watchdog = Watchdog(
            self,
            device.info.name,
            self.streams.all,
            self.leases,
            blocks,
            self.completer.reap,
            options.stuck_after,
            observer,
        )
        self.enqueuer: Enqueuer = Enqueuer(
            self,
            device,
            memory,
            blocks,
            self._memory_in_use,
            self.watchdog,
            self.completion,
            self.alarms,
            observer.hooks,
            observer.launching,
            Ranges() if options.nvtx else None,
        )
        self.threaded: ThreadedLaunches = ThreadedLaunches(self.gate, self.enqueuer, self.completer)

    def queues(self) -> dict[str, QueueStatistics]:
        """Count waiting operations and operations in flight, by the import path of the library."""
        # Operations that a thread enqueues are in flight, but keep their turns (D111).
        waiting = Counter(launch.library for launch in self.gate.order if not launch.is_in_flight)
        in_flight = self.streams.count()
        return {
            library: QueueStatistics(waiting=waiting[library], in_flight=in_flight[library])
            for library in waiting.keys() | in_flight.keys()
        }

    def usage(self) -> dict[str, LibraryUsage]:
        """Count plans and workspace of libraries, by import path.

        A library that several actors launch with counts for the first of them. A library that only other
        libraries use counts under its own name.
        """
        paths: dict[str, str] = {}
        for path, name in self.named.items():
            paths.setdefault(name, path)
        return {
            paths.get(name, name): usage
            for name, usage in self.device.usage().items()
            if usage.plans.hits or usage.plans.created or usage.workspace
        }

    def begin(self, generation: int, adopted: Iterable[int]) -> None:
        """Serve as a generation of the device, after being a spare.

        Args:
            generation: Its number.
            adopted: The existing blocks of the previous context.
        """
        self.generation = generation
        self.adopt(adopted)

    async def synchronize(self, owner: str | None = None) -> None:
        """Wait until nothing is in flight, of all library actors or of one.

        For a single actor, operations that their callers have left do not count.
        """
        await self.streams.drain(owner)
        if owner is None:
            await self.leases.drain()

    async def wait_idle(self) -> None:
        """Wait some time for an idle moment, and otherwise for the end of the operations in flight.

        Many driver calls wait for all running work, and block every launch meanwhile (D60).
        """
        with trio.move_on_after(_MOST_PATIENCE):
            while not self.is_lost and (self.streams.in_flight or self.leases.tails):  # noqa: ASYNC110  # rarely
                await trio.sleep(_IDLE_POLL)
        await self.streams.settle()

    def lose_context(self, cause: Exception) -> None:
        """Lose the context: end everything in flight, and start its replacement."""
        if not self.is_lost:
            self.give_up(cause, str(cause))
            self._lose(cause)

    def give_up(self, cause: Exception | None, reason: str) -> None:
        """End everything in flight, because the context's actor has failed or will fail."""
        self._close_grace = min(self._close_grace, _GRACE_OF_A_LOST_CONTEXT)
        # D136: only operations still in flight can be the cause.
        self.completer.reap_ended()
        self.fail_all(cause)
        # D129: loops of graphs on the device must end, because otherwise the streams never do.
        self.device.give_up(reason)

    def fail_all(self, cause: BaseException | None) -> None:
        """Fail everything in flight, because the context is lost."""
        # Do this first, because code that the replies call back must not launch on a lost context.
        self.is_lost = True
        self.alarms.clear()
        self.completer.fail_all(cause)
        # Operations that wait for their launch fail, because the context is lost.
        self.gate.order.release_all()
        self.leases.lose(lambda: self.lost_while("lease", "was waited for", "lease the array again", cause))

    async def close(self) -> bool:
        """Close the device; wait for its streams during the grace.

        Returns:
            Whether all streams ended. Memory that a stream still uses stays reserved.
        """
        self.completion.close()
        # D53: a stream held by an injected fault would never end.
        self.enqueuer.end_holds()
        for queue in self.streams.all:
            # D111: the thread is not joined, because it may hang in a call.
            queue.end_thread()
        return await trio.to_thread.run_sync(self._end)

    def _end(self) -> bool:
        started = time.monotonic()
        # Running work may use plans and workspace of the libraries, so they stay open then.
        if self.streams.finish(self._close_grace):
            self.libraries.close()
            self._memory.close()
        # There is one grace for all: the streams have used a part of it.
        return self.device.close(max(0.0, self._close_grace - (time.monotonic() - started)))

    def _watch_lease(self, stream: AccelStream, event: AccelEvent) -> None:
        """Watch the work that a program enqueued during a lease."""
        self.completion.watch(stream, event)
        self.watchdog.wake()
