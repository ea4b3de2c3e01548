"""The run of a collective: its turn in the world, its arguments, and the parts of ranks."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import trio

from ..actors import ActorError, Intensity, TaskLock, leavable_context
from ..backends.base import AccelError, ContextLostError, DeviceLostError, Ints
from ..devices import AccelRef, Device, Lent, PeerCopy, Stay, lend, run_together
from ..devices.operations._blocks import Block
from ._communicators import Communicator, Pieces, RanksFailedError, RankShare
from ._errors import RankFailedError, WorldBrokenError
from ._operations import Join, expression_of

_logger = logging.getLogger("trio_accel.collectives")

Arrays: TypeAlias = Sequence[AccelRef]
T = TypeVar("T")
ALL = object()
Computes: TypeAlias = "Callable[[int, list[AccelRef]], Awaitable[T]]"
"""What a rank computes of arrays that its device has."""


class Turns:
    """Admits the collectives of a world one after the other, and counts the failed ones.

    Args:
        devices: The devices, in rank order.
        retry: The number of times that a rank's part may run again.
        intensity: The number of collectives that may fail by losses; None for no bound.

    Attributes:
        devices: The argument.
        retry: The argument.
        stay: The memory of other devices that each device has mapped, until the world ends.
        on_end: Called with the reason when the world ends.
    """

    def __init__(self, devices: Sequence[Device], retry: int, intensity: Intensity | None) -> None:
        self.devices: Sequence[Device] = devices
        self.retry: int = retry
        self.stay: Stay = Stay()
        self._intensity = intensity
        self._failures: deque[float] = deque()
        self._broken: str | None = None
        self.on_end: Callable[[str], None] = lambda reason: None
        self._turn = TaskLock()

    def end(self, reason: str) -> None:
        """Admit no more collectives, and keep the first reason given."""
        self._broken = self._broken or reason
        self.stay.end()
        self.on_end(self._broken)

    @leavable_context
    async def turn(self, name: str) -> AsyncGenerator[None]:
        """Hold the world for one collective.

        Raises:
            WorldBrokenError: The world no longer runs collectives.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        # Take a free turn without a checkpoint, because small collectives are too short for one.
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()
        try:
            self.check_whole(name)
            yield
        finally:
            self._turn.release()

    def check_whole(self, name: str) -> None:
        """Refuse a collective if the world no longer runs any.

        Raises:
            WorldBrokenError: The world is broken or closed.
        """
        if self._broken is not None:
            raise WorldBrokenError(f"{name}: {self._broken}; open another one")

    def failed(self, name: str, rank: int, error: AccelError | ActorError) -> RankFailedError:
        """Note a failure, and make the error of all ranks."""
        device = self.devices[rank]
        _logger.warning("world: %s failed on rank %d, %s: %s", name, rank, device.path, error)
        failed = RankFailedError(
            f"it failed on rank {rank}, {device.path}: {error}", rank=rank, device=device.name, operation=name
        )
        if self._intensity is not None and isinstance(error, ContextLostError):
            now = trio.current_time()
            self._failures.append(now)
            while self._failures[0] < now - self._intensity.within:
                self._failures.popleft()
            if len(self._failures) > self._intensity.restarts:
                self.end(
                    f"the world has broken: {len(self._failures)} collectives failed by losses within "
                    f"{self._intensity.within:g} s, the last one on rank {rank}"
                )
        return failed


class PartCall:
    """A run on the ranks of a world, with arrays that all of them read: its turn, its parts and its end.

    Args:
        turns: The turns of its world.
        function: The name of the method.

    Attributes:
        name: The name for errors.
        changed: The existing arrays that each rank's part writes.
    """

    def __init__(self, turns: Turns, function: str) -> None:
        self.name: str = f"collectives.{function}"
        turns.check_whole(self.name)
        self.changed: dict[int, list[Block]] = {}
        self._turns = turns
        self._devices = turns.devices
        self._size = len(turns.devices)

    def checked(self, argument: str, arrays: Arrays, ranks: Sequence[int]) -> list[AccelRef]:
        """Return arrays of these ranks, one of each.

        Raises:
            TypeError, ValueError, StaleRefError: They are none.
        """
        if isinstance(cast("object", arrays), AccelRef) or len(arrays) != len(ranks):
            description = "one array" if isinstance(cast("object", arrays), AccelRef) else f"{len(arrays)}"
            raise ValueError(
                f"{self.name}: {argument} must name {len(ranks)}, one of each rank, got {description}"
            )
        for rank, array in zip(ranks, arrays, strict=True):
            self.check(f"{argument}[{rank}]" if len(ranks) > 1 else "array", array, rank)
        return list(arrays)

    def check(self, argument: str, array: object, rank: int, *, is_read: bool = True) -> None:
        """Refuse everything but an array of a rank; raises as `checked` does."""
        if not isinstance(array, AccelRef):
            raise TypeError(f"{self.name}: {argument} must be an AccelRef, got {type(array).__name__}")
        # An array of `out` may be half written: the collective overwrites it.
        if is_read or array.block.is_released or array.block.is_lost:
            array.block.check(f"{self.name}: {argument}", array.spec)
        if array.device is not self._devices[rank]:
            raise ValueError(
                f"{self.name}: {argument} is on {array.device.path}, and rank {rank} is "
                f"{self._devices[rank].path}"
            )

    async def compute_on_ranks(
        self, lent: Arrays, compute: Computes[T], ranks: Iterable[int] | None = None
    ) -> dict[int, T]:
        """Have ranks compute something, all at the same time.

        Args:
            lent: Arrays that all ranks read.
            compute: Computes a rank's result from these arrays, as its device sees them.
            ranks: The ranks; None for all.

        Returns:
            The results of the ranks that compute, in their order.

        Raises:
            RankFailedError: It failed on one of the ranks. Arrays that other ranks change in place are
                damaged.
        """
        results: dict[int, T] = {}
        chosen = list(range(self._size)) if ranks is None else list(ranks)
        devices = [self._devices[rank] for rank in chosen]
        try:
            async with lend(self.name, lent, devices, self._turns.stay) as held:
                await self._all(chosen, lambda rank: self._part(rank, held, compute, results))
        except (ContextLostError, DeviceLostError) as error:
            self._mark_damaged(None)
            # A device was lost before the parts began.
            lost_ranks = [
                rank for rank, device in enumerate(self._devices) if device.outage or not device.is_ready
            ]
            raise self._turns.failed(self.name, (lost_ranks or chosen)[0], error) from error
        except BaseException as error:
            # A cancelled part may have run. Whether the failed one has changed arrays, its device knows.
            self._mark_damaged(error.rank if isinstance(error, RankFailedError) else None)
            raise
        return {rank: results[rank] for rank in chosen}

    def _mark_damaged(self, failed: int | None) -> None:
        """Refuse later use of arrays that ranks change in place, except on the rank that has failed."""
        for block in [block for rank, blocks in self.changed.items() if rank != failed for block in blocks]:
            block.mark_damaged(self.name, None)

    async def _all(self, ranks: Iterable[int], part: Callable[[int], Awaitable[None]]) -> None:
        """Wait for the parts of ranks; the first that fails ends all."""

        async def run(rank: int) -> None:
            try:
                await part(rank)
            except (AccelError, ActorError) as error:
                raise self._turns.failed(self.name, rank, error) from error

        await run_together(partial(run, rank) for rank in ranks)

    async def _part(self, rank: int, held: Lent, compute: Computes[T], results: dict[int, T]) -> None:
        """Compute on one rank; again if its context was lost, unless the part has changed arrays."""
        losses = 0
        while rank not in results:
            try:
                async with held.to(self._devices[rank]) as arrays:
                    results[rank] = await compute(rank, arrays)
            except ContextLostError:
                losses += 1
                if losses > self._turns.retry or self.changed.get(rank):
                    raise


class CollectiveCall(PartCall):
    """One collective: its arguments, and how it runs.

    Args:
        turns: The turns of its world.
        function: The name of the method.
        arrays: The arrays that it reads.
        out: Arrays to write to, one per rank; a single array if one rank gets a result.
        root: The rank with the only array, if not every rank has an array.
        to: The rank that gets the only result, if not each gets one.
        has_rows: Whether the arrays may differ in the extent of their first axis.
        reduction: The reduction; empty if there is none.

    Attributes:
        arrays: The arrays, by rank.
        shapes: The shapes of the results, by rank.
        shape: Shape of the first array.
        shape_size: Its number of elements.
        dtype: Element type of the arrays.
        reduction: The argument.
    """

    def __init__(
        self,
        turns: Turns,
        function: str,
        arrays: Arrays,
        out: AccelRef | Sequence[AccelRef | None] | None,
        *,
        root: object = ALL,
        to: object = ALL,
        has_rows: bool = False,
        reduction: str = "",
    ) -> None:
        super().__init__(turns, function)
        givers = self._ranks(root, "root")
        self._getters = self._ranks(to, "to" if function == "send" else "root")
        checked = self.checked("arrays", arrays, givers)
        self.arrays: dict[int, AccelRef] = dict(zip(givers, checked, strict=True))
        targets: Any = out if to is ALL else [out]
        outs = [None] * len(self._getters) if targets is None else targets
        if len(outs) != len(self._getters):
            raise ValueError(f"{self.name}: out must name {self._size} arrays, got {len(outs)}")
        self._out: dict[int, AccelRef | None] = dict(zip(self._getters, outs, strict=True))
        self._half_written: list[AccelRef] = []
        self.shapes: dict[int, Ints] = {}
        first = self.arrays[givers[0]].spec
        self.shape: Ints = first.shape
        self.shape_size: int = math.prod(first.shape)
        start = 1 if has_rows else 0
        for rank, ref in self.arrays.items():
            spec = ref.spec
            is_fit = spec.shape[start:] == first.shape[start:] and len(spec.shape) == len(first.shape)
            if not is_fit or first.dtype is not spec.dtype:
                raise ValueError(
                    f"{self.name}: arrays must share dtype and shape, got {first.dtype} {first.shape} "
                    f"of rank 0 and {spec.dtype} {spec.shape} of rank {rank}"
                )
        self.dtype: Any = first.dtype
        self.reduction: str = reduction
        if "reduce" in function:
            self._expression = expression_of(self.name, reduction, self._size, self.dtype)

    def _ranks(self, rank: object, argument: str) -> Sequence[int]:
        """Return all ranks, or only the rank that a program names.

        Raises:
            ValueError: There is no such rank.
        """
        if rank is ALL:
            return range(self._size)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self._size:
            raise ValueError(f"{self.name}: {argument} must be a rank below {self._size}, got {rank!r}")
        return [rank]

    def expect(self, *shapes: tuple[int, ...]) -> None:
        """Set the shapes of the results: one shape for all ranks, or a shape for each.

        Raises:
            TypeError, ValueError, StaleRefError: An array of `out` does not fit.
        """
        rank_shapes = shapes if len(shapes) > 1 else shapes * len(self._getters)
        self.shapes = dict(zip(self._getters, rank_shapes, strict=True))
        for rank, shape in self.shapes.items():
            if (array := self._out[rank]) is None:
                continue
            argument = f"out[{rank}]"
            self.check(argument, array, rank, is_read=False)
            array.block.check_writable(f"{self.name}: {argument}")
            if array.shape != shape or array.dtype is not self.dtype:
                raise ValueError(
                    f"{self.name}: {argument} must have shape {shape} and dtype {self.dtype}, got shape "
                    f"{array.shape} and dtype {array.dtype}"
                )

    def parts(
        self, kind: str, counts: Mapping[int, Mapping[int, int]] | None = None, *, root: int = 0
    ) -> dict[int, RankShare]:
        """Return the parts of the ranks for a vendor's library: the arrays that they give and get.

        Args:
            kind: See `RankShare`.
            counts: The number of elements that each giving rank gives to each rank.
            root: See `RankShare`.
        """
        counts_by_giver = counts or {}
        return {
            rank: RankShare(
                kind,
                self.dtype,
                source=self.arrays.get(rank),
                shape=self.shapes.get(rank),
                out=self._direct(rank),
                reduction=self.reduction,
                root=root,
                sends=_pieces(counts_by_giver.get(rank, {})),
                receives=_pieces({giver: row[rank] for giver, row in counts_by_giver.items() if rank in row}),
            )
            for rank in sorted({*self.arrays, *self.shapes})
        }

    def _direct(self, rank: int) -> AccelRef | None:
        """Return the rank's array of `out`, unless the part would overwrite its own input."""
        source, out = self.arrays.get(rank), self._out.get(rank)
        return None if out is None or (source is not None and source.block is out.block) else out

    def rows(self) -> int:
        """Return the extent of each rank's part of the first axis.

        Raises:
            ValueError: The number of ranks does not divide it.
        """
        if not self.shape or self.shape[0] % self._size:
            raise ValueError(
                f"{self.name}: the first axis must have a multiple of {self._size} elements, one part for "
                f"each rank, got shape {self.shape}"
            )
        return self.shape[0] // self._size

    def check_splits(self, splits: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the numbers of rows that each rank gives to each.

        Raises:
            ValueError: They do not fit the arrays.
        """
        counts = [list(row) for row in splits]
        if len(counts) != self._size or any(len(row) != self._size for row in counts):
            raise ValueError(
                f"{self.name}: splits must have {self._size} rows of {self._size}, got {splits!r}"
            )
        for rank, (row, array) in enumerate(zip(counts, self.arrays.values(), strict=True)):
            extent = array.shape[0] if array.shape else 0
            if any(count < 0 for count in row) or sum(row) != extent:
                raise ValueError(
                    f"{self.name}: splits[{rank}] must be at least 0 and sum to {extent}, the rows of its "
                    f"array, got {row}"
                )
        return counts

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of all ranks' arrays, joined."""
        rows, *extents = self.shape or (1,)
        return rows * self._size, *extents

    async def reduced(self, rank: int, arrays: list[AccelRef]) -> AccelRef:
        """Reduce arrays to one on a rank."""
        return await self._expression(*arrays)

    async def joined(self, rank: int, arrays: list[AccelRef]) -> AccelRef:
        """Join arrays on a rank, or copy one."""
        sources = [array if array.shape else array.reshape(1) for array in arrays]
        message: Any = Join(sources) if len(sources) > 1 else PeerCopy(arrays[0])
        result: AccelRef = await self._devices[rank].ask(message)
        shape = self.shapes[rank]
        return result if result.shape == shape else result.reshape(shape)

    async def met(self, communicator: Communicator, parts: Mapping[int, RankShare]) -> dict[int, AccelRef]:
        """Have ranks take part in a collective of a vendor's library.

        Args:
            communicator: The world's communicator.
            parts: Their parts.

        Returns:
            The new arrays of the ranks that get one, in their order.

        Raises:
            RanksFailedError: The library does not work with the devices.
            RankFailedError: It failed on one of them.
        """
        losses = 0
        self._half_written = [part.out for part in parts.values() if part.out is not None]
        while True:
            try:
                results = await communicator.run(parts)
                return {rank: array for rank, array in sorted(results.items()) if array is not None}
            except RanksFailedError as failed:
                if failed.is_refusal:
                    self._half_written.clear()
                    raise
                rank, error = failed.rank, failed.error
            # Outside of the handler: the error must not keep arrays alive by the frames of that one.
            if not isinstance(error, (AccelError, ActorError)):
                raise error
            losses += 1
            # The whole collective runs again, because its parts do not run again on their own.
            retries = 0 if getattr(error, "is_to_blame", False) else self._devices[rank].options.retry
            if not isinstance(error, ContextLostError) or losses > max(self._turns.retry, retries):
                try:
                    raise self._turns.failed(self.name, rank, error) from error
                finally:
                    del error

    @contextmanager
    def writing(self) -> Generator[None]:
        """If the collective fails, refuse later use of the arrays of `out`, which may be half written."""
        try:
            yield
        except BaseException:
            for array in self._half_written:
                array.block.mark_damaged(self.name, None, (array.spec,))
            raise

    async def written(self, results: Mapping[int, AccelRef]) -> list[AccelRef]:
        """Write the results of ranks to the arrays of `out`, if there are any.

        This waits for all readers of these arrays, and holds nothing meanwhile. So two collectives cannot
        wait for each other.
        """
        outputs = {
            rank: out
            for rank, result in results.items()
            if (out := self._out[rank]) is not None and out is not result
        }
        if not outputs:
            return list(results.values())  # noqa: ASYNC910  # the collective has waited

        async def write(rank: int) -> None:
            await outputs[rank].assign(results[rank])

        self._half_written += outputs.values()
        await self._all(outputs, write)
        return [outputs.get(rank, result) for rank, result in results.items()]


def _pieces(sizes: Mapping[int, int]) -> Pieces:
    """Return adjacent pieces as (rank, first element, size), without empty ones."""
    ends = itertools.accumulate(sizes.values())
    spans = zip(sizes.items(), ends, strict=True)
    return tuple([(rank, end - size, size) for (rank, size), end in spans if size])
