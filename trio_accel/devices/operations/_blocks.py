"""Memory blocks from the caller's side: ownership, damage, and holds by outside code."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np

from ...actors import describe
from ...backends.base import ArraySpec, HostArray, StaleRefError, Strs, function_of
from ...backends.base.kit.fast_paths import current_fast_paths
from ..base._bridge import LoopNotifier
from ..base._views import reach
from ..base._waits import Availability

Ranges: TypeAlias = "list[tuple[int, int]]"
"""Ranges of bytes of a block: sorted, not empty, with gaps between them."""

in_turn: Callable[[], int] = partial(next, itertools.count(1))
"""Returns the next number in planning order. Launches that use the same block begin in this order."""

# A view with more pieces counts as all bytes from its first to its last, or as none.
_MAX_VIEW_PIECES = 4096


@attrs.frozen(eq=False)
class Damage:
    """Damage by one operation.

    Attributes:
        by: The name of the operation.
        failure: Its error.
        ranges: The damaged bytes.
        turn: The number of the operation. Later operations may heal the damage, earlier ones do not.
    """

    by: str
    failure: BaseException | None
    ranges: Ranges
    turn: int


def ranges_of(arrays: Sequence[ArraySpec], *, at_most: bool = False) -> Ranges:
    """Return the bytes of arrays in one block.

    Args:
        arrays: The arrays.
        at_most: Whether a too scattered array is left out. Otherwise, all bytes in between count.
    """
    ranges: Ranges = []
    for array in arrays:
        if array.size:
            pieces = _pieces(array)
            ranges += pieces if pieces is not None else [] if at_most else [reach(array)]
    return _joined(ranges)


def _pieces(array: ArraySpec) -> Ranges | None:
    """Return the ranges of an array, in any order; None if there are too many."""
    starts, run = [reach(array)[0]], array.dtype.itemsize
    for step, count in sorted((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True)):
        if step <= run:
            run += step * (count - 1)
        elif len(starts) * count > _MAX_VIEW_PIECES:
            return None
        else:
            starts = [start + step * index for start in starts for index in range(count)]
    return [(start, start + run) for start in starts]


def _joined(ranges: Ranges) -> Ranges:
    """Sort ranges, and merge touching ranges."""
    joined: Ranges = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def without(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Return the parts of ranges outside other ranges."""
    remaining: Ranges = []
    first = 0
    for start, end in ranges:
        while first < len(excluded) and excluded[first][1] <= start:
            first += 1
        index, rest = first, start
        while index < len(excluded) and excluded[index][0] < end:
            if rest < excluded[index][0]:
                remaining.append((rest, excluded[index][0]))
            rest = excluded[index][1]
            index += 1
        if rest < end:
            remaining.append((rest, end))
    return remaining


def meet(ranges: Ranges, other_ranges: Ranges) -> bool:
    """Return whether ranges have a byte in common with others."""
    return without(ranges, other_ranges) != ranges


def nothing() -> None:
    """Return None, because nothing holds the block."""


class ForeignMemory:
    """Keeps memory alive for outside code, as the memory of one of its own arrays.

    Its finaliser runs on the thread that drops the last reference. `Block.release` holds a reference while it
    sets the flag, so the memory is freed exactly once.

    Args:
        give_back: Frees the memory; it also keeps the block alive.

    Attributes:
        is_last: Whether the block was released, so that its memory is freed together with the hold.
    """

    __slots__ = ("__weakref__", "_give_back", "is_last")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self.is_last: bool = False

    def __del__(self) -> None:
        if self.is_last:
            self._give_back()


def held(array: HostArray, hold: ForeignMemory) -> HostArray:
    """Return an array that refers to a hold, as do its views, buffers and DLPack arrays."""
    if not array.size:
        return array
    steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    start = -sum(step for step in steps if step < 0)
    end = start + sum(step for step in steps if step > 0) + array.itemsize
    memory: Any = (ctypes.c_char * end).from_address(array.__array_interface__["data"][0] - start)
    # NumPy follows the base of a view through arrays, but not through this object.
    memory.held = array, hold
    data = memory if array.flags.writeable else np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
    return np.ndarray(array.shape, array.dtype, data, start, array.strides)


_ids = itertools.count(1)

_MAX_DROPPED_BYTES = 8 << 20
# The number of dropped blocks that wakes the loop, and the maximum number freed for one request or turn.
_MAX_DROPPED_BLOCKS = 64
# The maximum number of dropped blocks to check for one of the wanted size.
_LOOKS = 4
# The limits of retained blocks: their number, the bytes of each, and the total bytes. They suffice for a
# program with results of many shapes.
_MAX_SPARE_BLOCKS = 64
_MAX_SPARE_BLOCK_BYTES = 4 << 20
_MAX_SPARE_BYTES = 64 << 20
_Dropped: TypeAlias = "tuple[int, int, ArraySpec | None]"
# In place of a size: no other array may take this block.
_NO_SIZE = -1


class Owner(Protocol):
    """The owner of blocks: a device."""

    @property
    def path(self) -> str:
        """The path of the device in the tree."""
        ...


class Block:
    """One block of device memory, shared by the references to it.

    It is freed when the last reference is dropped. The finaliser may run on any thread, so it only puts the
    id on a queue.

    Attributes:
        id: Its number.
        nbytes: Its size.
        generation: The generation of the device in which it was made.
        damaged_by: The name of the unfinished operation that should have written it.
        failure: The error of that operation.
        damages: All damage; empty for most blocks.
        is_unmade: Whether the operation that should have made it failed. Writing cannot heal such a block,
            because it lacks memory.
        frozen_by: The names of open programs that use it: it must not be written or released (D113).
        is_released: Whether its memory was freed.
        spec: The array for which it was made, if known.
        table: The table of its device, which gets it back when it is dropped.
    """

    # Set only in damaged blocks.
    damages: tuple[Damage, ...] = ()
    is_unmade: bool = False

    def __init__(
        self, table: BlockTable, nbytes: int, generation: int, number: int, spec: ArraySpec | None = None
    ) -> None:
        self.id: int = number
        self.nbytes: int = nbytes
        self.generation: int = generation
        self.damaged_by: str | None = None
        self.failure: BaseException | None = None
        self.frozen_by: Strs = ()
        self.is_released: bool = False
        self.spec: ArraySpec | None = spec
        self.table: BlockTable = table

    # Returns the last `ForeignMemory` of the block; few blocks need it.
    _held: Callable[[], ForeignMemory | None] = staticmethod(nothing)

    def release(self) -> None:
        """Free the memory once nothing holds it. Later use of any reference is refused."""
        if not self.is_released:
            self.is_released = True
            hold = self._held()
            if hold is not None:
                hold.is_last = True
            else:
                # Operations in flight may use it.
                self.table.drop(self, is_free=False)

    def hold(self) -> ForeignMemory:
        """Keep the memory while the returned object lives, even after `release`."""
        hold = self._held()
        if hold is None:
            hold = ForeignMemory(partial(self.table.drop, self, is_free=False))
            self._held = weakref.ref(hold)
        return hold

    def check_writable(self, argument: str) -> None:
        """Refuse to write or release a block on which programs rely.

        Raises:
            ValueError: It is frozen.
        """
        if self.frozen_by:
            raise ValueError(
                f"{argument}: the program {self.frozen_by[-1]!r} is open with this array, which no method "
                "of it changes; close the program first, or take a copy of the array"
            )

    @property
    def is_lost(self) -> bool:
        """Whether its memory was lost together with its context."""
        return self.generation < self.table.valid_since

    def mark_damaged(
        self,
        operation: str,
        failure: BaseException | None,
        parts: Sequence[ArraySpec] = (),
        turn: int | None = None,
    ) -> None:
        """Refuse later use of contents, because an operation that writes them did not finish.

        Args:
            operation: Its name.
            failure: Its error.
            parts: The arrays that it was to write; none for the whole block.
            turn: Its number; None for the next number.
        """
        # Only the first damage of a byte is reported.
        ranges = ranges_of(parts) if parts else [(0, max(self.nbytes, 1))]
        for damage in self.damages:
            ranges = without(ranges, damage.ranges)
        if ranges:
            error = bare(failure) if failure is not None else None
            damage = Damage(operation, error, ranges, in_turn() if turn is None else turn)
            self._set_damages((*self.damages, damage))

    def heal(self, parts: Sequence[ArraySpec], turn: int) -> None:
        """Remove earlier damage from the arrays that an operation has overwritten."""
        written = ranges_of(parts, at_most=True)
        remaining = [
            attrs.evolve(damage, ranges=without(damage.ranges, written)) if damage.turn < turn else damage
            for damage in self.damages
        ]
        self._set_damages(tuple([damage for damage in remaining if damage.ranges]))

    def _set_damages(self, damages: tuple[Damage, ...]) -> None:
        self.damages = damages
        self.damaged_by = damages[0].by if damages else None
        self.failure = damages[0].failure if damages else None

    def damage_of(self, array: ArraySpec) -> Damage | None:
        """Return the damage of an array in this block; None if it is undamaged."""
        ranges = ranges_of((array,))
        return next(
            (damage for damage in self.damages if self.is_unmade or meet(damage.ranges, ranges)), None
        )

    def is_usable_as(self, array: ArraySpec) -> bool:
        """Return whether `check` accepts an array of the block."""
        is_there = not self.is_released and not self.is_lost
        return self.is_usable or (is_there and self.damage_of(array) is None)

    def __del__(self) -> None:
        if not self.is_released:
            # Nearly every block ends here. Operations in flight refer to their blocks, so this block is not
            # in use.
            self.is_released = True
            table, nbytes = self.table, self.nbytes
            # `BlockTable.drop` without a call, because a program may drop thousands of arrays at once.
            table.dropped.append((self.id, nbytes if self.damaged_by is None else _NO_SIZE, self.spec))
            if not table.is_notified:
                table.wake(nbytes)

    @property
    def is_usable(self) -> bool:
        """Whether `check` accepts the whole block."""
        return not self.is_released and self.damaged_by is None and self.generation >= self.table.valid_since

    def check(self, argument: str, array: ArraySpec | None = None) -> None:
        """Refuse a block that must not be used.

        Args:
            argument: Its name in the error.
            array: The used part; None for the whole block.

        Raises:
            StaleRefError: The block was released, lost with an earlier generation, or damaged in this part.
        """
        if self.is_usable or (array is not None and self.is_usable_as(array)):
            return
        device, generation = self.table.device_name, self.table.availability.generation
        if self.is_released:
            reason = "its memory was released"
        elif self.is_lost:
            reason = f"its memory was lost with generation {self.generation} of the device; make it again"
        else:
            raise self.damage_error(argument, (array and self.damage_of(array)) or self.damages[0])
        raise StaleRefError(f"{argument}: {reason}", device=device, generation=generation)

    def damage_error(self, argument: str, damage: Damage) -> StaleRefError:
        """Make the error for the use of damaged contents."""
        or_else = "" if self.is_unmade else ", or overwrite what is spoiled, by fill, assign or out="
        spoiler = function_of(damage.by)
        reason = f"its contents were spoiled by {spoiler}, which did not finish; make it again{or_else}"
        return StaleRefError(
            f"{argument}: {reason}",
            device=self.table.device_name,
            generation=self.table.availability.generation,
        )


class BorrowedBlock(Block):
    """A block of another device that operations of this device read; see `Device.borrow`.

    Args:
        table: The table of the reading device.
        source: The block of the owning device.
    """

    def __init__(self, table: BlockTable, source: Block) -> None:
        super().__init__(table, source.nbytes, table.availability.generation, next(_ids))
        self.source: Block = source
        self.frozen_by: Strs = (source.table.device.path,)

    def check(self, argument: str, array: ArraySpec | None = None) -> None:
        """Refuse the block after it was given back.

        Raises:
            StaleRefError: It was.
        """
        if self.is_released:
            device, generation = self.table.device_name, self.table.availability.generation
            reason = f"it was borrowed from {self.frozen_by[0]}, and was given back"
            raise StaleRefError(f"{argument}: {reason}", device=device, generation=generation)
        super().check(argument, array)

    def check_writable(self, argument: str) -> None:
        """Refuse to write or release the block.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{argument}: the array is borrowed from {self.frozen_by[0]}, and can only be read; take a copy"
        )


def bare(error: BaseException) -> BaseException:
    """Return a copy of an error without its frames, which would keep the arrays in their variables alive."""
    try:
        duplicate = copy.copy(error)
    except Exception:  # noqa: BLE001  # a foreign exception that cannot be copied
        return RuntimeError(describe(error))
    duplicate.__cause__ = error.__cause__
    return duplicate


@attrs.define(eq=False)
class BlockTable:
    """The dropped blocks of one device, which later results reuse (D22, D98).

    Args:
        device_name: The name of the device.
        availability: The generations of the device.
        keeps: Whether blocks may wait for more than the next operation. Not with a limit on bytes, because a
            program that counts them must be able to use all that it has released.
        reuses: Whether later results reuse them. Not in a recording, which lays them out at its end.

    Attributes:
        device: The device, which changes at an adoption; not set in a worker.
        device_name: Its name.
        availability: The generations of the device.
        dropped: The dropped blocks that are not freed yet: ids, sizes of blocks that nothing uses, and the
            arrays for which they were made.
        retained: The blocks that earlier operations left, by size, because a program with several arrays in
            each round needs one of each size again.
        is_watched: Whether they are freed soon in any case.
        makers: By the ids of blocks that are not freed: the path of the actor whose task made it, or None,
            and its size. It contains operations' arrays, in the application.
        valid_since: The first generation with existing memory.
        spare: A retained array for intermediate results, as long as there is memory.
        spares: Such arrays of named streams, by name.
        is_notified: Whether the loop will free dropped blocks.
        release: Frees the memory of blocks.
    """

    device_name: str
    availability: Availability
    _keeps: bool = attrs.field(default=True, kw_only=True, alias="keeps")
    _reuses: bool = attrs.field(default=True, kw_only=True, alias="reuses")
    device: Owner = attrs.field(init=False)
    valid_since: int = 0
    spare: Any = None
    spares: dict[str, Any] = attrs.field(init=False)
    dropped: deque[_Dropped] = attrs.field(factory=deque[_Dropped])
    retained: dict[int, list[tuple[int, ArraySpec | None]]] = attrs.field(init=False)
    _retained_count: int = 0
    _retained_bytes: int = 0
    makers: dict[int, tuple[str | None, int]] = attrs.field(init=False)
    is_watched: bool = False
    _looks: int = attrs.field(init=False)
    is_notified: bool = False
    # A block of at least this size is freed at once.
    _large: int = _MAX_DROPPED_BYTES
    _notifier: LoopNotifier = attrs.field(init=False)
    release: Callable[[Iterable[int]], None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        reuses = self._reuses and current_fast_paths().reuse
        self._keeps, self._looks = self._keeps and reuses, _LOOKS if reuses else 0
        self.retained, self.makers, self.spares = {}, {}, dict[str, Any]()
        self._notifier, self.release = LoopNotifier(self.drain_some), _nowhere

    def new(self, nbytes: int, number: int | None = None) -> Block:
        """Make a block of the current generation; no memory is allocated yet.

        Args:
            nbytes: Its size.
            number: Its id, if another process has assigned it.
        """
        spec: ArraySpec | None = None
        if number is None:
            number, spec = self.next(nbytes)
        # Between two contexts it belongs to the next one, if the memory of the last one is lost.
        generation = max(self.availability.generation, self.valid_since)
        return Block(self, nbytes, generation, number, spec)

    def next(self, nbytes: int) -> tuple[int, ArraySpec | None]:
        """Return the id for a new block, if possible from a dropped block of this size.

        Then its memory exists, and stays. Trio thread only.

        Returns:
            The id, and the array for which the block was made.
        """
        dropped = self.dropped
        for _ in range(min(len(dropped), self._looks)):
            # Finalisers may append more blocks meanwhile.
            candidate = dropped.pop()
            if candidate[1] == nbytes:
                return candidate[0], candidate[2]
            dropped.appendleft(candidate)
        blocks = self.retained.get(nbytes)
        if blocks is None:
            return next(_ids), None
        self._retained_count -= 1
        self._retained_bytes -= nbytes
        if len(blocks) == 1:
            del self.retained[nbytes]
        return blocks.pop()

    def drop(self, block: Block, *, is_free: bool) -> None:
        """Free a block: soon if it is large or there are many, and otherwise with the next operation.

        Any thread.

        Args:
            block: The block, which no one references.
            is_free: Whether nothing uses it, so that another array may take it.
        """
        self.dropped.append((block.id, block.nbytes if is_free else _NO_SIZE, block.spec))
        if not self.is_notified:
            self.wake(block.nbytes)

    def wake(self, nbytes: int) -> None:
        """Wake the loop if a dropped block of such a size, or the number of blocks, is worth it.

        A race with `drain`: a block is appended before `is_notified` is read, and the drain clears the flag
        before it takes blocks. So a thread that finds the flag set is always in time. A test for an empty
        queue would not suffice.
        """
        if len(self.dropped) < _MAX_DROPPED_BLOCKS and (nbytes < self._large or self.is_watched):
            # The block is not worth waking the loop, which costs a third of a small operation. The next
            # operation drains.
            return
        self.is_notified = True
        self._notifier.notify()

    def make_room(self) -> None:
        """Free all unneeded memory, because memory is short. Trio thread only."""
        self.spare = None
        self.spares.clear()
        # Arrays in reference cycles, such as an error's frames, are not collected yet.
        gc.collect()
        self.drain()

    def drain(self) -> None:
        """Free all dropped blocks now. Trio thread only."""
        dropped = self.take()
        if dropped:
            self.release(dropped)

    def drain_some(self) -> bool:
        """Free a limited number of dropped blocks now, and the rest in later turns or at looks of a watch.

        A program may drop thousands of arrays at once, and freeing them all would hold the loop for many
        milliseconds. An allocation that fails meanwhile calls `drain`. Trio thread only.

        Returns:
            Whether some remain.
        """
        taken = self._take(_MAX_DROPPED_BLOCKS)
        if taken:
            self.release(taken)
        return bool(self.dropped or self.retained)

    def take(self) -> list[int]:
        """Return the ids of all dropped blocks, which the caller frees. Trio thread only."""
        return self._take(None)

    def _take(self, limit: int | None) -> list[int]:
        """Return the ids of dropped blocks, at most `limit`; see to it that the rest are freed later."""
        self.is_notified = False
        dropped = self.dropped
        taken: list[int] = []
        # Finalisers may append more blocks meanwhile.
        while dropped and (limit is None or len(taken) < limit):
            taken.append(dropped.popleft()[0])
        while self.retained and (limit is None or len(taken) < limit):
            self._give_up_oldest(taken)
        self._forget(taken)
        # A watch frees the rest at its next looks. Turns may be very short while a task polls for an answer.
        if limit is not None and (dropped or self.retained) and not (self.is_notified or self.is_watched):
            self.is_notified = True
            self._notifier.notify()
        return taken

    def take_some(self) -> list[int]:
        """Return the ids of dropped blocks, except some freed soon in any case.

        For the launch of an operation, because a later one may need other blocks than this one. Trio thread
        only.
        """
        if not (self._keeps and self.is_watched):
            return self._take(_MAX_DROPPED_BLOCKS)
        self.is_notified = False
        dropped, retained = self.dropped, self.retained
        taken: list[int] = []
        # The watch frees the rest soon.
        for _ in range(min(len(dropped), _MAX_DROPPED_BLOCKS)):
            number, nbytes, spec = dropped.popleft()
            if not _NO_SIZE < nbytes <= _MAX_SPARE_BLOCK_BYTES:
                taken.append(number)
                continue
            if nbytes in retained:
                retained[nbytes].append((number, spec))
            else:
                retained[nbytes] = [(number, spec)]
            self._retained_count += 1
            self._retained_bytes += nbytes
        while self._retained_count > _MAX_SPARE_BLOCKS or self._retained_bytes > _MAX_SPARE_BYTES:
            self._give_up_oldest(taken)
        if taken:
            self._forget(taken)
        return taken

    def _forget(self, taken: list[int]) -> None:
        """Forget the makers of freed blocks."""
        makers = self.makers
        for number in taken:
            makers.pop(number, None)

    def bytes_by_actor(self) -> dict[str, int]:
        """Return the bytes of blocks by the path of their maker's actor; ``""`` for all other tasks."""
        totals: dict[str, int] = {}
        for maker, nbytes in self.makers.values():
            path = maker or ""
            totals[path] = totals.get(path, 0) + nbytes
        return totals

    def held(self) -> int:
        """Return the bytes of all blocks, after freeing the dropped ones. Trio thread only."""
        self.drain()
        return sum(map(itemgetter(1), self.makers.values()))

    def _give_up_oldest(self, taken: list[int]) -> None:
        """Free the oldest block of the least recently used size."""
        nbytes, blocks = next(iter(self.retained.items()))
        if len(blocks) == 1:
            del self.retained[nbytes]
        taken.append(blocks.pop(0)[0])
        self._retained_count -= 1
        self._retained_bytes -= nbytes

    def lose(self) -> None:
        """Forget all memory, because it is lost with the context."""
        self.makers.clear()
        self.release = _nowhere

    def leave(self, release: Callable[[Iterable[int]], None]) -> None:
        """Leave a failed device: its memory stays, and blocks are freed when they are dropped."""
        self.release = release
        self.is_watched = False
        # No operation follows, so small blocks wake the loop as well.
        self._large = 0
        self.drain()

    def move(self, device: Owner, availability: Availability, *, keeps: bool) -> None:
        """Move the blocks to another device without a context (D76)."""
        self.device, self.availability = device, availability
        self._keeps = keeps and self._looks > 0
        self._large = _MAX_DROPPED_BYTES

    def close(self) -> None:
        """Ignore dropped blocks from now on."""
        self._notifier.close()
        self.lose()


def _nowhere(blocks: Iterable[int]) -> None:
    """Release a lost context's blocks, because their memory is already free."""
