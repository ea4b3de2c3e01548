"""Worlds: devices that take part in collectives, and go on when one of them has lost its context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from ..actors import Intensity, named_arguments
from ..devices import AccelRef, Device, check_device
from ._call import Arrays, Call, Turns
from ._operations import Reduction, check_reduction, expression_of
from ._ranks import Given, Group, Meetings, Rank, open_group

__all__ = ["World", "open_world"]

# Bytes of an array that each rank reduces by itself.
_SMALL = 256 << 10


@named_arguments
@asynccontextmanager
async def open_world(
    devices: Iterable[Device], *, retry: int = 0, intensity: Intensity | None = None
) -> AsyncGenerator[World, None]:
    """Make a world of devices: each is a rank, in their order.

    The devices stay the program's: it closes them. They may be of any isolation and backend. Those of one
    backend with ``isolation="process"`` read one another's arrays where they are (`Device.borrow`). For
    others, arrays are copied through host memory.

    Args:
        devices: The devices, each once, at least one.
        retry: How often a rank computes again whose device lost its context meanwhile. What is written to
            `out` is not written again.
        intensity: How many collectives may fail by losses within its window; one more breaks the world. By
            default there is no bound.

    Raises:
        ValueError: No device, one twice, or a negative `retry`.
        TypeError: What is no open device.
    """
    world = World(devices, retry=retry, intensity=intensity)
    try:
        yield world
    finally:
        world.close()


class World:
    """Devices that take part in collectives; made by `open_world`.

    The methods take one array of each rank, as a sequence in the order of the ranks, all of one dtype and, if
    nothing else is said, of one shape. They may be views of any strides. The results are new, contiguous
    arrays, each on the device of its rank, or those that `out` names.

    One collective runs after the other, in the order of the calls. What a program asks of the devices
    meanwhile is ordered by its arrays, as always. Each device reads the arrays of the others, and writes to
    its own alone. So the loss of a context leaves the arrays of all ranks as they were, but for `out`.

    A collective waits while a device rebuilds its context. If one fails on a rank, it ends on all with a
    `RankFailedError` that names the rank, with that error as its cause. Other ranks keep their contexts and
    arrays. Nothing has to be made anew: the next collective may be asked at once.

    When cancelled, operations that are not launched are taken back, and others awaited, as for
    `Device.ask`. Arrays of `out` that may be half written are refused by later operations.

    Tasks that each have an array of one rank ask their `ranks`.

    Attributes:
        devices: The devices, in the order of the ranks.
        ranks: The ranks, each for a task of its own.
    """

    def __init__(
        self,
        devices: Iterable[Device],
        *,
        retry: int = 0,
        intensity: Intensity | None = None,
    ) -> None:
        self.devices: tuple[Device, ...] = tuple(devices)
        for number, device in enumerate(self.devices):
            check_device("open_world", device)
            if device in self.devices[:number]:
                raise ValueError(f"open_world: {device.path} is there twice; each device is one rank")
        if not self.devices:
            raise ValueError("open_world: devices must name at least one")
        if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
            raise ValueError(f"open_world: retry must be a whole number of at least 0, got {retry!r}")
        self._turns = Turns(self.devices, retry, intensity)
        self._meetings = Meetings(self._ask)
        self.ranks: tuple[Rank, ...] = tuple(
            Rank(self._meetings, number, self.size, device) for number, device in enumerate(self.devices)
        )

    def __repr__(self) -> str:
        return f"<World of {', '.join(device.path for device in self.devices)}>"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    def close(self) -> None:
        """Run no more collectives."""
        self._turns.end("the world is closed")
        self._meetings.close()

    def group(self) -> AbstractAsyncContextManager[Group]:
        """Open a group of calls that run together: ``async with world.group() as group:``.

        ``group.add(rank.send, x, to=1)`` adds a call, of the world or of a rank, and returns its `Result`. At
        the end of the ``async with`` all run at the same time, so two ranks may send to each other. If one
        fails, the others are cancelled, and the ``async with`` raises its error.

        Raises:
            RuntimeError: The task is inside of a group.
        """
        return open_group()

    async def all_reduce(
        self, arrays: Arrays, reduction: Reduction = "sum", *, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Reduce the arrays of all ranks to one, which each rank gets.

        Each of two ranks reduces all of it, and so do more of them if the arrays are small. Of many, each
        reduces a part, and all copy the parts. The result is the same on all ranks, bit for bit.

        Args:
            arrays: One of each rank.
            reduction: How; the elements of ranks are taken in their order.
            out: Arrays to write to, one of each rank; `arrays` for a reduction in place.

        Raises:
            TypeError, ValueError: Wrong arrays: nothing was launched.
            RankFailedError: It failed on a rank.
            WorldBrokenError: The world runs no collectives any more.
        """
        call = Call(self._turns, "all_reduce", arrays, out)
        check_reduction(call.name, reduction, call.dtype)
        call.check_outputs([call.shape] * self.size)
        size = call.shape_size
        bounds = [size * rank // self.size for rank in range(self.size + 1)]
        expression = expression_of(reduction, self.size, call.dtype)

        async def reduced(rank: int, parts: list[AccelRef]) -> AccelRef:
            part = slice(bounds[rank], bounds[rank + 1])
            return await expression(*[one.reshape(-1)[part] for one in parts])

        async with call.begun():
            if self.size <= 2 or size * call.dtype.itemsize <= _SMALL:
                # With two, each moves fewer bytes than in two steps; with little, the steps are the time.
                made = await call.each(arrays, lambda _, all_: expression(*all_))
                return await call.written(made.values())
            parts = [*(await call.each(await call.contiguous(), reduced)).values()]
            whole = await call.each(parts, call.joined)
            return await call.written([one.reshape(call.shape) for one in whole.values()])

    async def reduce(
        self,
        arrays: Arrays,
        reduction: Reduction = "sum",
        *,
        root: int = 0,
        out: AccelRef | None = None,
    ) -> AccelRef:
        """Reduce the arrays of all ranks to one, on the device of one of them.

        Args:
            arrays: One of each rank.
            reduction: How; the elements of ranks are taken in their order.
            root: The rank that gets it.
            out: Array of that rank to write to.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "reduce", arrays, None)
        check_reduction(call.name, reduction, call.dtype)
        call.check_root(root)
        call.out[root] = out
        call.check_outputs([call.shape] * self.size)
        expression = expression_of(reduction, self.size, call.dtype)
        async with call.begun():
            made = await call.each(arrays, lambda _, all_: expression(*all_), ranks=(root,))
            return (await call.written(made.values(), (root,)))[0]

    async def reduce_scatter(
        self, arrays: Arrays, reduction: Reduction = "sum", *, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Reduce the arrays of all ranks, and give each rank its part along the first axis.

        Args:
            arrays: One of each rank. The number of ranks divides the extent of the first axis.
            reduction: How; the elements of ranks are taken in their order.
            out: Arrays to write to, one of each rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "reduce_scatter", arrays, out)
        check_reduction(call.name, reduction, call.dtype)
        rows = call.rows()
        call.check_outputs([(rows, *call.shape[1:])] * self.size)
        expression = expression_of(reduction, self.size, call.dtype)

        async def reduced(rank: int, all_: list[AccelRef]) -> AccelRef:
            part = slice(rank * rows, (rank + 1) * rows)
            return await expression(*[one[part] for one in all_])

        async with call.begun():
            made = await call.each(arrays, reduced)
            return await call.written(made.values())

    async def broadcast(
        self, array: AccelRef, *, root: int = 0, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Copy the array of one rank to all others.

        Args:
            array: The array.
            root: The rank that has it.
            out: Arrays to write to, one of each rank; None for a new one, and at `root`.

        Returns:
            One array of each rank; at `root`, `array` itself.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "broadcast", [array], out, root=root)
        call.check_outputs([call.shape] * self.size)
        others = [rank for rank in range(self.size) if rank != root]
        async with call.begun():
            made = await call.each([array], call.copied, ranks=others)
            copies = await call.written(made.values(), others)
            return [*copies[:root], array, *copies[root:]]

    async def scatter(
        self, array: AccelRef, *, root: int = 0, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Give each rank its part of the array of one rank, along the first axis.

        Args:
            array: The array. The number of ranks divides the extent of its first axis.
            root: The rank that has it.
            out: Arrays to write to, one of each rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "scatter", [array], out, root=root)
        rows = call.rows()
        call.check_outputs([(rows, *call.shape[1:])] * self.size)

        async def copied(rank: int, all_: list[AccelRef]) -> AccelRef:
            return await call.copied(rank, [all_[0][rank * rows : (rank + 1) * rows]])

        async with call.begun():
            made = await call.each([array], copied)
            return await call.written(made.values())

    async def gather(self, arrays: Arrays, *, root: int = 0, out: AccelRef | None = None) -> AccelRef:
        """Join the arrays of all ranks along the first axis, on the device of one of them.

        Args:
            arrays: One of each rank; of arrays without axes the result has one.
            root: The rank that gets it.
            out: Array of that rank to write to.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "gather", arrays, None)
        call.check_root(root)
        call.out[root] = out
        call.check_outputs([call.joined_shape] * self.size)
        async with call.begun():
            made = await call.each(arrays, call.joined, ranks=(root,))
            return (await call.written(made.values(), (root,)))[0]

    async def all_gather(
        self, arrays: Arrays, *, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Join the arrays of all ranks along the first axis, for each rank.

        Args:
            arrays: One of each rank; of arrays without axes the result has one.
            out: Arrays to write to, one of each rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "all_gather", arrays, out)
        call.check_outputs([call.joined_shape] * self.size)
        async with call.begun():
            made = await call.each(arrays, call.joined)
            return await call.written(made.values())

    async def all_to_all(
        self,
        arrays: Arrays,
        *,
        splits: Sequence[Sequence[int]] | None = None,
        out: Sequence[AccelRef | None] | None = None,
    ) -> list[AccelRef]:
        """Give each rank its part of the arrays of all ranks, joined along the first axis in their order.

        Args:
            arrays: One of each rank. Without `splits`, the number of ranks divides the extent of their first
                axis. With it, they may differ in that.
            splits: For each rank, how many rows of its array each rank gets, in the order of the ranks.
            out: Arrays to write to, one of each rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "all_to_all", arrays, out, has_rows=splits is not None)
        counts = [[call.rows()] * self.size] * self.size if splits is None else call.check_splits(splits)
        starts = [[sum(row[:rank]) for rank in range(self.size)] for row in counts]
        call.check_outputs([(sum(row[rank] for row in counts), *call.shape[1:]) for rank in range(self.size)])

        async def joined(rank: int, all_: list[AccelRef]) -> AccelRef:
            parts = [
                one[start[rank] : start[rank] + row[rank]]
                for one, start, row in zip(all_, starts, counts, strict=True)
            ]
            return await call.joined(rank, parts)

        async with call.begun():
            made = await call.each(arrays, joined)
            return await call.written(made.values())

    async def send(self, array: AccelRef, to: int, *, root: int = 0, out: AccelRef | None = None) -> AccelRef:
        """Copy the array of one rank to another.

        Args:
            array: The array.
            to: The rank that gets the copy.
            root: The rank that has the array.
            out: Array of rank `to` to write to.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = Call(self._turns, "send", [array], None, root=root)
        call.check_root(to, "to")
        call.out[to] = out
        call.check_outputs([call.shape] * self.size)
        async with call.begun():
            made = await call.each([array], call.copied, ranks=(to,))
            return (await call.written(made.values(), (to,)))[0]

    async def _ask(self, function: str, options: Mapping[str, Any], given: Given) -> Any:
        """Run a collective to which all its ranks have come; returns the results by rank."""
        arrays = {rank: each[0] for rank, each in given.items()}
        own: dict[int, Any] = {rank: each[1] for rank, each in given.items()}
        in_order = [*map(arrays.get, range(self.size))], [*map(own.get, range(self.size))]
        ask: Any = getattr(self, function, None)
        if function == "barrier":
            return in_order[1]
        if function == "send":
            root, to = options["root"], options["to"]
            return {root: None, to: await ask(arrays[root], **options, out=own[to])}
        root = options.get("root", 0)
        if function in ("reduce", "gather"):
            made = await ask(in_order[0], **options, out=own[root])
            return {rank: made if rank == root else None for rank in given}
        if function in ("broadcast", "scatter"):
            return await ask(arrays[root], **options, out=in_order[1])
        if function == "all_to_all":
            splits, outs = zip(*in_order[1], strict=True)
            return await ask(in_order[0], splits=splits if options["has_splits"] else None, out=outs)
        return await ask(in_order[0], **options, out=in_order[1])
