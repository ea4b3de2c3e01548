"""The engine of one context: its parts, the libraries that it opens, and how it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorStoppedError
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
    """A library that is being opened, or is open, and that no actor has taken yet."""

    name: str
    library: KernelLibrary | None = None
    error: Exception | None = None
    is_over: trio.Event = attrs.field(factory=trio.Event)


class KernelLibraries:
    """The libraries of one context, which are opened in threads: the loop and other libraries go on (D99).

    An opening belongs to the context. It goes on when the actor that began it is cancelled, and the next
    actor takes the library.

    Args:
        device: The device of the context.
        made: Called with the name of a program's library, when it is open, the seconds that this took, and
            those of the import.
    """

    def __init__(self, device: AccelDevice, made: Callable[[str, float, float], None]) -> None:
        self._device = device
        self._made = made
        self._nursery: trio.Nursery
        self._openings: dict[str, list[_Opening]] = {}

    def start(self, nursery: trio.Nursery) -> None:
        """Begin: libraries are opened by tasks of the nursery."""
        self._nursery = nursery

    async def take(self, name: str) -> KernelLibrary:
        """Return a library for its caller alone: one that was opened ahead, or a new one.

        Raises:
            NotSupportedError: There is no such library.
            Exception: Another error of its opening.
        """
        while True:
            openings = self._openings.get(name)
            opening = openings[0] if openings else self._begin(name)
            await opening.is_over.wait()
            if opening.error is not None:
                raise opening.error
            if opening in self._openings.get(name, ()):
                # Another actor may have taken the library during the wait: then the loop goes round again.
                self._remove(opening)
                assert opening.library is not None
                return opening.library

    async def prepare(self, name: str) -> None:
        """Open a library ahead, for the next that takes it; raises as `take` does."""
        opening = self._begin(name)
        await opening.is_over.wait()
        if opening.error is not None:
            raise opening.error

    async def drop(self, name: str) -> None:
        """Close a library that was opened ahead and not taken."""
        await self._end(self._openings.pop(name, []))

    def discard(self, name: str) -> None:
        """Withdraw a library that was opened ahead, and have it closed soon."""
        self._nursery.start_soon(self._end, self._openings.pop(name, []))

    @enable_ki_protection
    async def _end(self, openings: list[_Opening]) -> None:
        for opening in openings:
            await opening.is_over.wait()
            if opening.library is not None:
                # A vendor's library waits for all work of the device when it closes, so a thread calls it.
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
                self._made(name, time.perf_counter() - began, library.import_seconds)
        except Exception as error:  # noqa: BLE001  # told to the actor that waits for it
            opening.error = error
        finally:
            if opening.library is None and opening in self._openings.get(name, ()):
                self._remove(opening)
                opening.error = opening.error or ActorStoppedError(
                    f"the context ended before its library {name!r} was open", path=self._device.info.name
                )
            # A cancelled opening is over, too: the waiting actors belong to other tasks, and would wait for
            # ever.
            opening.is_over.set()

    def close(self) -> None:
        """Close libraries that were opened ahead and not taken. Blocks; none is being opened now."""
        for openings in self._openings.values():
            for opening in openings:
                if opening.library is not None:
                    opening.library.close()
            openings.clear()


_IDLE_POLL = 0.02
# Seconds to wait for an idle moment, before what needs one is done all the same.
_MOST_PATIENCE = 10.0
# Streams of a lost context do nothing useful: the next context does not wait long for them.
_GRACE_OF_A_LOST_CONTEXT = 0.1


class Engine(ContextState):
    """The engine of one context: launches operations, sees their ends, replies, gives memory back.

    Lives on the Trio thread; never blocks. Operations in flight belong to the engine, so they
    outlive a restart of the library actor that launched them.

    Attributes:
        device: The device of the context.
        libraries: Opens the libraries of the device.
        named: Names of the backend's libraries, by the import paths of actors that were started.
        streams: Its streams, with the operations in flight.
        gate: Operations that wait to be launched.
        enqueuer: Gives operations to the backend.
        threaded: The same for those whose kernel blocks.
        completer: Replies when they are done.
        completion: How that is learned of.
        watchdog: Watches operations in flight (D9).
        leases: Arrays that the program holds.
        alarms: Calls back at a time.
        cancel_grace: How long cancelled askers wait.
        observer: The owner of the context.
        enter: Notes that an operation is handed over: later ones that touch its memory are launched after it.
        over: Notes that an operation is not waited for any more; see `LaunchGate.over`.
        placed: Returns the place of a block in a chunk that is kept; None if it is freed, or is to be.
        uses: The uses of blocks.
        exchange: Frees what the program has let go, and makes other blocks.
        fresh: Blocks with new places; the code that tells their places removes them.
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
        self.libraries: KernelLibraries = KernelLibraries(device, observer.made)
        self.named: dict[str, str] = {}
        self._memory = memory
        self._lose = lose
        self.observer: EngineObserver = observer
        self._close_grace = options.close_grace
        self._memory_in_use = MemoryInUse(device)
        # Methods of the parts, bound once: the hot path makes no call in between.
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
        self.gate: LaunchGate = LaunchGate(blocks.drain)
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
        """Count what waits and what is in flight, by the import path of the library."""
        # Operations that a thread enqueues are in flight, and keep their places in the order (D111).
        waiting = Counter(launch.library for launch in self.gate.order if not launch.is_in_flight)
        in_flight = self.streams.count()
        return {
            library: QueueStatistics(waiting=waiting[library], in_flight=in_flight[library])
            for library in waiting.keys() | in_flight.keys()
        }

    def usage(self) -> dict[str, LibraryUsage]:
        """Count plans and workspace of libraries, by their import paths.

        One that several library actors launch with counts for the first of them; one that only others use,
        under its own name.
        """
        paths: dict[str, str] = {}
        for path, name in self.named.items():
            paths.setdefault(name, path)
        return {
            paths.get(name, name): usage
            for name, usage in self.device.usage().items()
            if usage.plans.found or usage.plans.made or usage.workspace
        }

    def begin(self, generation: int, adopted: Iterable[int]) -> None:
        """Serve as a generation of the device; for an engine that stood ready.

        Args:
            generation: Its number.
            adopted: Blocks that are there from the context before.
        """
        self.generation = generation
        self.adopt(adopted)

    async def synchronize(self, owner: str | None = None) -> None:
        """Wait until nothing is in flight, of all or of one library actor.

        For one that ends, operations that their askers have left do not count.
        """
        await self.streams.drain(owner)
        if owner is None:
            await self.leases.drain()

    async def wait_idle(self) -> None:
        """Wait for an idle moment, for a while; then for the end of operations in flight.

        Many calls of a driver wait for all running work, and hold up every launch meanwhile (D60).
        """
        with trio.move_on_after(_MOST_PATIENCE):
            while not self.is_lost and (self.streams.in_flight or self.leases.tails):  # noqa: ASYNC110  # rarely
                await trio.sleep(_IDLE_POLL)
        await self.streams.settle()

    def lose_context(self, cause: Exception) -> None:
        """Lose the context: end everything in flight, and have it replaced."""
        if not self.is_lost:
            self.give_up(cause, str(cause))
            self._lose(cause)

    def give_up(self, cause: Exception | None, why: str) -> None:
        """End everything in flight: the context's actor has failed, or is to fail."""
        self._close_grace = min(self._close_grace, _GRACE_OF_A_LOST_CONTEXT)
        # D136: only operations that are still in flight can be to blame.
        self.completer.reap_ended()
        self.fail_all(cause)
        # D129: loops of graphs on the device must end, or the streams never do.
        self.device.give_up(why)

    def fail_all(self, cause: BaseException | None) -> None:
        """End everything in flight: the context is gone."""
        # First: code that the replies below call back must find the context lost, and launch nothing.
        self.is_lost = True
        self.alarms.clear()
        self.completer.fail_all(cause)
        # Operations that wait to be launched fail: it is too late.
        self.gate.order.release_all()
        self.leases.lose(lambda: self.lost_while("lease", "was waited for", "lease the array again", cause))

    async def close(self) -> bool:
        """Give the device back; waits for streams within the grace.

        Returns:
            Whether all streams ended; memory that one still uses stays reserved.
        """
        self.completion.close()
        # D53: a stream that an injected fault holds would never end.
        self.enqueuer.end_holds()
        for queue in self.streams.all:
            # D111: not joined. A thread that hangs in a call would hang the end of the device, too.
            queue.end_thread()
        return await trio.to_thread.run_sync(self._end)

    def _end(self) -> bool:
        started = time.monotonic()
        # Work that still runs may use plans and workspace of the libraries: then these are not given back.
        if self.streams.finish(self._close_grace):
            self.libraries.close()
            self._memory.close()
        # One grace for all: the streams have used up a part of it.
        return self.device.close(max(0.0, self._close_grace - (time.monotonic() - started)))

    def _watch_lease(self, stream: AccelStream, event: AccelEvent) -> None:
        """Watch the work that a program enqueued during a lease."""
        self.completion.watch(stream, event)
        self.watchdog.wake()
