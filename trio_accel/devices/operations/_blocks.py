"""Memory blocks as the caller's side knows them: owners, damage, and holds of code outside."""

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
from ...backends.base import ArraySpec, HostArray, StaleRefError, Strs
from ...backends.base.kit.fast_paths import current_fast_paths
from ..base._bridge import LoopNotifier
from ..base._views import reach
from ..base._waits import Availability

Ranges: TypeAlias = "list[tuple[int, int]]"
"""Ranges of bytes of a block: sorted, none empty, with gaps between them."""

in_turn: Callable[[], int] = partial(next, itertools.count(1))
"""Number launches in the order in which they were planned. Those of one block are begun in this order."""

# A view of more pieces counts as all bytes from its first to its last, or as none.
_MAX_VIEW_PIECES = 4096


@attrs.frozen(eq=False)
class Damage:
    """Damage by one operation.

    Attributes:
        by: Name of the operation.
        failure: Its error.
        ranges: What is damaged.
        turn: Number of the operation: later ones may heal it, earlier ones do not.
    """

    by: str
    failure: BaseException | None
    ranges: Ranges
    turn: int


def ranges_of(arrays: Sequence[ArraySpec], *, at_most: bool = False) -> Ranges:
    """Find the bytes that arrays of one block have.

    Args:
        arrays: The arrays.
        at_most: Whether one that is too scattered is left out; else all bytes in between count.
    """
    found: Ranges = []
    for array in arrays:
        if array.size:
            pieces = _pieces(array)
            found += pieces if pieces is not None else [] if at_most else [reach(array)]
    return _joined(found)


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
    """Sort ranges, and join those that meet."""
    joined: Ranges = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what is left of ranges without others."""
    left: Ranges = []
    place = 0
    for start, end in ranges:
        while place < len(others) and others[place][1] <= start:
            place += 1
        index, rest = place, start
        while index < len(others) and others[index][0] < end:
            if rest < others[index][0]:
                left.append((rest, others[index][0]))
            rest = others[index][1]
            index += 1
        if rest < end:
            left.append((rest, end))
    return left


def meet(ranges: Ranges, others: Ranges) -> bool:
    """Tell whether ranges have a byte in common with others."""
    return without(ranges, others) != ranges


def nothing() -> None:
    """Tell that nothing holds a block."""


class ForeignMemory:
    """Keeps memory that code outside of the package has, as the memory of one of its own arrays.

    Its finaliser runs where the last reference goes, on any thread. What releases the block has a reference
    while it sets the flag, so the memory is given back exactly once.

    Args:
        give_back: Gives the memory back; it keeps the block alive, too.

    Attributes:
        is_last: Whether the block was released, so that its memory goes with this.
    """

    __slots__ = ("__weakref__", "_give_back", "is_last")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self.is_last: bool = False

    def __del__(self) -> None:
        if self.is_last:
            self._give_back()


def held(given: HostArray, hold: ForeignMemory) -> HostArray:
    """Return an array that has a hold, as what is made of it has: views, buffers, arrays by DLPack."""
    if not given.size:
        return given
    steps = [(extent - 1) * stride for extent, stride in zip(given.shape, given.strides, strict=True)]
    start = -sum(step for step in steps if step < 0)
    end = start + sum(step for step in steps if step > 0) + given.itemsize
    memory: Any = (ctypes.c_char * end).from_address(given.__array_interface__["data"][0] - start)
    # NumPy looks for the base of a view through arrays, but not through this.
    memory.held = given, hold
    data = memory if given.flags.writeable else np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
    return np.ndarray(given.shape, given.dtype, data, start, given.strides)


_ids = itertools.count(1)

_MAX_DROPPED_BYTES = 8 << 20
_MAX_DROPPED_BLOCKS = 64
# The most dropped blocks that are looked at for one of the size that is wanted.
_LOOKS = 4
# The most blocks that are kept for a while, and the most bytes of each and together. A program whose results
# have many shapes finds one for each of them.
_MAX_SPARE_BLOCKS = 64
_MAX_SPARE_BLOCK_BYTES = 4 << 20
_MAX_SPARE_BYTES = 64 << 20
_Dropped: TypeAlias = "tuple[int, int, ArraySpec | None]"
# This number in place of a size says: the block is no place for another.
_NO_SIZE = -1


class Owner(Protocol):
    """The owner of blocks: a device."""

    @property
    def path(self) -> str:
        """Its path in the tree."""
        ...


class Block:
    """One block of device memory, shared by the references to it.

    It is given back when the last of them is gone. The finaliser may run on any thread, so it
    only puts the id on a queue.

    Attributes:
        id: Its number.
        nbytes: Its size.
        generation: The generation of the device in which it was made.
        damaged_by: The operation that was to write it and did not finish.
        failure: The error of that operation.
        damages: All damage; empty for most blocks.
        is_unmade: Whether the operation failed that was to make it: no write heals what has no memory.
        frozen_by: Names of programs that are open with it: it must not be written to or released (D113).
        is_released: Whether its memory was given back.
        spec: The array that it was made for, if that is known.
        table: The table of its device, which takes it when it is dropped.
    """

    # Set in those that are damaged.
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

    # The last `ForeignMemory` of it; few blocks have any.
    _held: Callable[[], ForeignMemory | None] = staticmethod(nothing)

    def release(self) -> None:
        """Give the memory back, when nothing holds it any more; later use of any reference is refused."""
        if not self.is_released:
            self.is_released = True
            hold = self._held()
            if hold is not None:
                hold.is_last = True
            else:
                # Operations in flight may use it.
                self.table.drop(self, is_free=False)

    def hold(self) -> ForeignMemory:
        """Keep the memory for as long as the object that is returned lives, also after `release`."""
        hold = self._held()
        if hold is None:
            hold = ForeignMemory(partial(self.table.drop, self, is_free=False))
            self._held = weakref.ref(hold)
        return hold

    def check_writable(self, argument: str) -> None:
        """Refuse to write to a block, or to release it, that programs count on.

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
        """Whether its memory is gone with the context that it was made in."""
        return self.generation < self.table.valid_since

    def mark_damaged(
        self,
        operation: str,
        failure: BaseException | None,
        parts: Sequence[ArraySpec] = (),
        turn: int | None = None,
    ) -> None:
        """Refuse later use of contents: an operation that writes them did not finish.

        Args:
            operation: Its name.
            failure: Its error.
            parts: Arrays that it was to write; none for the whole block.
            turn: Its number; None for the next one.
        """
        # The first damage of a byte is the one that is told.
        ranges = ranges_of(parts) if parts else [(0, max(self.nbytes, 1))]
        for damage in self.damages:
            ranges = without(ranges, damage.ranges)
        if ranges:
            error = bare(failure) if failure is not None else None
            damage = Damage(operation, error, ranges, in_turn() if turn is None else turn)
            self._set_damages((*self.damages, damage))

    def heal(self, parts: Sequence[ArraySpec], turn: int) -> None:
        """Allow the use again of what an operation has overwritten that an earlier one had damaged."""
        written = ranges_of(parts, at_most=True)
        left = [
            attrs.evolve(one, ranges=without(one.ranges, written)) if one.turn < turn else one
            for one in self.damages
        ]
        self._set_damages(tuple([one for one in left if one.ranges]))

    def _set_damages(self, damages: tuple[Damage, ...]) -> None:
        self.damages = damages
        self.damaged_by = damages[0].by if damages else None
        self.failure = damages[0].failure if damages else None

    def damage_of(self, array: ArraySpec) -> Damage | None:
        """Return the damage of an array in this block; None if that is whole."""
        ranges = ranges_of((array,))
        return next((one for one in self.damages if self.is_unmade or meet(one.ranges, ranges)), None)

    def is_usable_as(self, array: ArraySpec) -> bool:
        """Whether `check` lets an array of it pass."""
        is_there = not self.is_released and not self.is_lost
        return self.is_usable or (is_there and self.damage_of(array) is None)

    def __del__(self) -> None:
        if not self.is_released:
            # Nearly every block ends here. Operations in flight refer to their blocks, so this one is not in
            # use.
            self.is_released = True
            self.table.drop(self, is_free=self.damaged_by is None)

    @property
    def is_usable(self) -> bool:
        """Whether `check` lets all of it pass."""
        return not self.is_released and self.damaged_by is None and self.generation >= self.table.valid_since

    def check(self, argument: str, array: ArraySpec | None = None) -> None:
        """Refuse a block that must not be used.

        Args:
            argument: Its name in the error.
            array: What is used of it; None for all.

        Raises:
            StaleRefError: It was released, lost with an earlier generation, or damaged there.
        """
        if self.is_usable or (array is not None and self.is_usable_as(array)):
            return
        device, generation = self.table.device_name, self.table.availability.generation
        if self.is_released:
            why = "its memory was released"
        elif self.is_lost:
            why = f"its memory was lost with generation {self.generation} of the device; make it again"
        else:
            raise self.damage_error(argument, (array and self.damage_of(array)) or self.damages[0])
        raise StaleRefError(f"{argument}: {why}", device=device, generation=generation)

    def damage_error(self, argument: str, damage: Damage) -> StaleRefError:
        """Make the error for the use of what is damaged."""
        or_else = "" if self.is_unmade else ", or overwrite what is spoiled, by fill, assign or out="
        why = f"its contents were spoiled by {damage.by}, which did not finish; make it again{or_else}"
        return StaleRefError(
            f"{argument}: {why}",
            device=self.table.device_name,
            generation=self.table.availability.generation,
        )


class BorrowedBlock(Block):
    """A block of another device, which operations of this one read; see `Device.borrow`.

    Args:
        table: The table of the device that reads it.
        source: The block, of the device that owns it.
    """

    def __init__(self, table: BlockTable, source: Block) -> None:
        super().__init__(table, source.nbytes, table.availability.generation, next(_ids))
        self.source: Block = source
        self.frozen_by: Strs = (source.table.device.path,)

    def check(self, argument: str, array: ArraySpec | None = None) -> None:
        """Refuse it once it was given back.

        Raises:
            StaleRefError: It was.
        """
        if self.is_released:
            device, generation = self.table.device_name, self.table.availability.generation
            why = f"it was borrowed from {self.frozen_by[0]}, and was given back"
            raise StaleRefError(f"{argument}: {why}", device=device, generation=generation)
        super().check(argument, array)

    def check_writable(self, argument: str) -> None:
        """Refuse to write to it, or to release it.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{argument}: the array is borrowed from {self.frozen_by[0]}, and can only be read; take a copy"
        )


def bare(error: BaseException) -> BaseException:
    """Return a copy of an error without its frames, which would keep the arrays in their variables alive."""
    try:
        again = copy.copy(error)
    except Exception:  # noqa: BLE001  # a stranger's exception, that cannot be made again
        return RuntimeError(describe(error))
    again.__cause__ = error.__cause__
    return again


@attrs.define(eq=False)
class BlockTable:
    """The dropped blocks of one device, which later results take again (D22, D98).

    Args:
        device_name: Name of the device.
        availability: Which generation there is.
        keeps: Whether some may wait for more than the next operation. Not where bytes are limited: a program
            that counts them is to have all that it has let go.
        reuses: Whether later results take them. Not in a recording, which lays them out when it is complete.

    Attributes:
        device: The device, unless this is a worker's; another one after an adoption.
        device_name: Its name.
        availability: Which generation there is.
        dropped: Blocks that were let go, and are not given back yet: ids, sizes of those that nothing uses,
            and the arrays that they were made for.
        kept: The ones that were there at an operation before, by their size: a program with several
            arrays in each round wants one of each size again.
        is_watched: Whether they are given back soon in any case.
        makers: By the ids of blocks that were not given back: path of the actor whose task made them, or
            None, and their sizes. It holds operations' arrays, on the application's side.
        valid_since: First generation whose memory is still there.
        spare: An array that is kept for results in between, as long as there is memory.
        spares: Those of streams that steps have named, by the names.
        release: Gives the memory of blocks back.
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
    kept: dict[int, list[tuple[int, ArraySpec | None]]] = attrs.field(init=False)
    _kept_count: int = 0
    _kept_bytes: int = 0
    makers: dict[int, tuple[str | None, int]] = attrs.field(init=False)
    is_watched: bool = False
    _looks: int = attrs.field(init=False)
    _is_notified: bool = False
    # A block of so many bytes is given back at once.
    _large: int = _MAX_DROPPED_BYTES
    _notifier: LoopNotifier = attrs.field(init=False)
    release: Callable[[Iterable[int]], None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        reuses = self._reuses and current_fast_paths().reuse
        self._keeps, self._looks = self._keeps and reuses, _LOOKS if reuses else 0
        self.kept, self.makers, self.spares = {}, {}, dict[str, Any]()
        self._notifier, self.release = LoopNotifier(self.drain), _nowhere

    def new(self, nbytes: int, number: int | None = None) -> Block:
        """Name a block of the current generation; no memory is taken yet.

        Args:
            nbytes: Its size.
            number: Its id, if another process has named it.
        """
        spec: ArraySpec | None = None
        if number is None:
            number, spec = self.next(nbytes)
        # Between two contexts it is of the next one, if the memory of the last one is gone.
        generation = max(self.availability.generation, self.valid_since)
        return Block(self, nbytes, generation, number, spec)

    def next(self, nbytes: int) -> tuple[int, ArraySpec | None]:
        """Return the id for a new block: that of a dropped one of this size, if there is one.

        Then its memory is there, and stays. Trio thread only.

        Returns:
            The id, and the array that it was made for.
        """
        dropped = self.dropped
        for _ in range(min(len(dropped), self._looks)):
            # Finalisers may append others meanwhile.
            last = dropped.pop()
            if last[1] == nbytes:
                return last[0], last[2]
            dropped.appendleft(last)
        kept = self.kept.get(nbytes)
        if kept is None:
            return next(_ids), None
        self._kept_count -= 1
        self._kept_bytes -= nbytes
        if len(kept) == 1:
            del self.kept[nbytes]
        return kept.pop()

    def drop(self, block: Block, *, is_free: bool) -> None:
        """Give a block back: soon if it is large or one of many, else with the next operation.

        Any thread.

        Args:
            block: The block, which is not kept.
            is_free: Whether nothing uses it, so that it is a place for another.
        """
        nbytes = block.nbytes
        self.dropped.append((block.id, nbytes if is_free else _NO_SIZE, block.spec))
        if len(self.dropped) < _MAX_DROPPED_BLOCKS and (nbytes < self._large or self.is_watched):
            # The block is not worth a wake-up of the loop, which costs a third of a small operation: the next
            # operation drains.
            return
        # A race with `drain`: a block is appended before the flag is read here, and the drain unsets the flag
        # before it takes blocks. So a thread that finds the flag set is always in time. A test for an empty
        # queue would not do.
        if not self._is_notified:
            self._is_notified = True
            self._notifier.notify()

    def make_room(self) -> None:
        """Give all back that nobody needs, as memory is short. Trio thread only."""
        self.spare = None
        self.spares.clear()
        # Arrays in reference cycles, such as those of an error's frames, wait to be collected.
        gc.collect()
        self.drain()

    def drain(self) -> None:
        """Give all dropped blocks back now. Trio thread only."""
        dropped = self.take()
        if dropped:
            self.release(dropped)

    def take(self) -> list[int]:
        """Ids of all dropped blocks, for the caller to give back. Trio thread only."""
        self._is_notified = False
        dropped = self.dropped
        taken: list[int] = []
        # Finalisers may append others meanwhile.
        while dropped:
            taken.append(dropped.popleft()[0])
        while self.kept:
            self._give_up_oldest(taken)
        self._forget(taken)
        return taken

    def take_some(self) -> list[int]:
        """Ids of dropped blocks, but for some that are given back soon in any case.

        For the launch of an operation: a later one may want blocks that this one does not. Trio thread only.
        """
        if not (self._keeps and self.is_watched):
            return self.take()
        self._is_notified = False
        dropped, kept = self.dropped, self.kept
        taken: list[int] = []
        while dropped:
            number, nbytes, spec = dropped.popleft()
            if not _NO_SIZE < nbytes <= _MAX_SPARE_BLOCK_BYTES:
                taken.append(number)
                continue
            if nbytes in kept:
                kept[nbytes].append((number, spec))
            else:
                kept[nbytes] = [(number, spec)]
            self._kept_count += 1
            self._kept_bytes += nbytes
        while self._kept_count > _MAX_SPARE_BLOCKS or self._kept_bytes > _MAX_SPARE_BYTES:
            self._give_up_oldest(taken)
        if taken:
            self._forget(taken)
        return taken

    def _forget(self, taken: list[int]) -> None:
        """Forget the makers of blocks that are given back."""
        makers = self.makers
        for number in taken:
            makers.pop(number, None)

    def bytes_by_actor(self) -> dict[str, int]:
        """Bytes of blocks by the path of the actor that made them; ``""`` stands for all other tasks."""
        found: dict[str, int] = {}
        for maker, nbytes in self.makers.values():
            path = maker or ""
            found[path] = found.get(path, 0) + nbytes
        return found

    def held(self) -> int:
        """Bytes of all blocks, once those that were dropped are given back. Trio thread only."""
        self.drain()
        return sum(map(itemgetter(1), self.makers.values()))

    def _give_up_oldest(self, taken: list[int]) -> None:
        """Give up the oldest block of the size that was not wanted for longest."""
        nbytes, kept = next(iter(self.kept.items()))
        if len(kept) == 1:
            del self.kept[nbytes]
        taken.append(kept.pop(0)[0])
        self._kept_count -= 1
        self._kept_bytes -= nbytes

    def lose(self) -> None:
        """Forget all memory: it is gone with the context."""
        self.makers.clear()
        self.release = _nowhere

    def leave(self, release: Callable[[Iterable[int]], None]) -> None:
        """Leave a device that was given up: its memory stays, and blocks are freed as they are dropped."""
        self.release = release
        self.is_watched = False
        # No operation follows: small blocks wake the loop, too.
        self._large = 0
        self.drain()

    def move(self, device: Owner, availability: Availability, *, keeps: bool) -> None:
        """Pass the blocks to another device, which has no context yet (D76)."""
        self.device, self.availability = device, availability
        self._keeps = keeps and self._looks > 0
        self._large = _MAX_DROPPED_BYTES

    def close(self) -> None:
        """Take no more notice of dropped blocks."""
        self._notifier.close()
        self.lose()


def _nowhere(blocks: Iterable[int]) -> None:
    """Release of blocks whose context is gone."""
