"""Worlds: devices that take part in collectives, and go on when one of them has lost its context."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias, TypeVar, cast

from ..actors import Intensity, named_arguments, opens
from ..backends.base import NotSupportedError
from ..devices import AccelRef, Device, Operation, check_device, exclusive, what_to_do
from ..devices.engine._library import APART
from ..devices.operations._blocks import Block
from ._call import Arrays, CollectiveCall, Computes, PartCall, Turns
from ._communicators import Communicator, RanksFailedError, RankShare, library_of, refusal
from ._operations import PartOperation, Reduction
from ._program_calls import ProgramCalls, Rooms
from ._ranks import Given, Group, Meetings, Rank

__all__ = ["Transport", "World", "open_world"]

_logger = logging.getLogger("trio_accel.collectives")

ReplyT = TypeVar("ReplyT")
Makes: TypeAlias = "Computes[AccelRef]"

Transport: TypeAlias = Literal["auto", "nccl", "mapped"]
"""How data goes between ranks: by NCCL, or by each rank's reading of the arrays of the others.
``"auto"`` takes NCCL where each rank is a GPU of its own."""

_GROUPED: ContextVar[bool] = ContextVar("trio_accel.grouped", default=False)

# Bytes of an array that each rank reduces by itself.
_LOCAL_REDUCTION_BYTES = 256 << 10


@named_arguments
@opens("the world is not open yet: async with ta.open_world(devices) as world")
async def open_world(
    devices: Iterable[Device],
    *,
    retry: int = 0,
    intensity: Intensity | None = None,
    transport: Transport = "auto",
) -> AsyncGenerator[World]:
    """Make a world of devices: each is a rank, in their order.

    The devices stay the program's: it closes them. They may be of any isolation and backend. Those of one
    backend and isolation read one another's arrays where they are (`Device.borrow`). For others, arrays may
    be copied through host memory.

    Args:
        devices: The devices, each once, at least one.
        retry: How often a rank computes again whose device lost its context meanwhile. What is copied to
            `out` at the end is not copied again: by mapped arrays all, by NCCL what replaces an argument.
        intensity: How many collectives may fail by losses within its window; one more breaks the world. By
            default there is no bound.
        transport: How data goes between ranks. ``"auto"`` takes NCCL where the ranks are different GPUs, all
            in workers, and nccl4py is installed; `World.why_mapped` says why it has not. What NCCL does not
            have goes by mapped arrays in any case.

    Raises:
        ValueError: No device, one twice, a negative `retry`, or no such transport.
        TypeError: What is no open device.
        NotSupportedError: ``"nccl"`` cannot serve these devices.
    """
    world = World(devices, retry, intensity, transport)
    try:
        yield world
    finally:
        await world.aclose()


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

    Where the ranks are different GPUs in workers of one host, data goes by NCCL (D162). Each rank has a
    communicator then, which is opened for the first collective. If a rank is lost, or a collective is
    cancelled, all others give theirs up, and the next collective opens new ones. NCCL adds in an order of its
    own, which is the same for all ranks. A mean is scaled before it is added.

    Attributes:
        devices: The devices, in the order of the ranks.
        ranks: The ranks, each for a task of its own.
        why_mapped: Why NCCL is not used; None where it is.
    """

    def __init__(
        self, devices: Iterable[Device], retry: int, intensity: Intensity | None, transport: Transport
    ) -> None:
        self.devices: tuple[Device, ...] = tuple(devices)
        for number, device in enumerate(self.devices):
            check_device("open_world", device)
            if device in self.devices[:number]:
                raise ValueError(f"open_world: {device.path} is there twice; each device is one rank")
        if not self.devices:
            raise ValueError("open_world: devices must name at least one")
        if isinstance(retry, bool) or not isinstance(retry, int) or retry < 0:
            raise ValueError(f"open_world: retry must be an integer of at least 0, got {retry!r}")
        if transport not in ("auto", "nccl", "mapped"):
            raise ValueError(f"open_world: transport must be 'auto', 'nccl' or 'mapped', got {transport!r}")
        self._is_auto = transport == "auto"
        self.why_mapped: str | None = "it was asked for" if transport == "mapped" else refusal(self.devices)
        if transport == "nccl" and self.why_mapped is not None:
            raise NotSupportedError(f"open_world: NCCL cannot serve these devices: {self.why_mapped}")
        vendor = None if self.why_mapped else library_of(self.devices[0])
        self._communicator = None if vendor is None else Communicator(vendor, self.devices)
        self._turns = Turns(self.devices, retry, intensity)
        self._rooms = Rooms(self.devices, self._communicator, self.why_mapped)
        self._meetings = Meetings(self._ask, self._turns.check_whole)
        self._turns.on_end = self._meetings.close
        self.ranks: tuple[Rank, ...] = tuple(
            Rank(self._meetings, number, self.size, device) for number, device in enumerate(self.devices)
        )

    def __repr__(self) -> str:
        joint = self._communicator
        ways = f"by {joint.vendor.title}" if joint else f"by mapped arrays: {self.why_mapped}"
        return f"<World of {', '.join(device.path for device in self.devices)}, {ways}>"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def transport(self) -> Literal["nccl", "mapped"]:
        """The way that data goes between ranks, where both ways are open."""
        return "mapped" if self._communicator is None else "nccl"

    def realign(self) -> None:
        """Let the next collective of each of `ranks` be the first one: work that failed is done again by all.

        After an error, some ranks have asked for more collectives than others. Those that still wait for one
        get a `RankFailedError`.
        """
        self._meetings.realign()

    def close(self) -> None:
        """Run no more collectives."""
        self._turns.end("the world is closed")

    async def aclose(self) -> None:
        """Run no more collectives, and give the communicator up; `open_world` does it at its end."""
        self.close()
        await self._rooms.close()
        if self._communicator is not None:
            await self._communicator.close()

    async def _met(self, call: CollectiveCall, parts: Mapping[int, RankShare]) -> dict[int, AccelRef] | None:
        """Run a collective by a vendor's library; None if it goes by mapped arrays."""
        communicator, reduction = self._communicator, call.reduction
        if communicator is None or (
            reduction and call.dtype not in communicator.vendor.reductions[reduction]
        ):
            return None
        try:
            return await call.met(communicator, parts)
        except RanksFailedError as failed:
            if not self._is_auto:
                raise failed.error from failed
            self._communicator = None
            self.why_mapped = f"{communicator.vendor.title} cannot serve them: {failed.error}"
            _logger.warning("%s", self)
            return None

    async def _run(
        self,
        call: CollectiveCall,
        parts: Mapping[int, RankShare],
        compute: Makes,
        *,
        first: Makes | None = None,
    ) -> list[AccelRef]:
        """Run a collective in its turn: by its parts if a vendor's library has it, or by mapped arrays.

        Args:
            call: The collective.
            parts: Its parts.
            compute: What a rank that gets a result computes of mapped arrays.
            first: What each rank computes before, of which `compute` gets the results.
        """
        async with self._turns.turn(call.name):
            with call.writing():
                made = await self._met(call, parts)
                if made is None:
                    arrays = [*call.arrays.values()]
                    if first is not None:
                        packed = [one if one.spec.is_contiguous else await one.copy() for one in arrays]
                        arrays = [*(await call.each(packed, first)).values()]
                    made = await call.each(arrays, compute, call.shapes)
                return await call.written(made)

    async def call(
        self,
        programs: Sequence[Any],
        method: Any,
        *per_rank: Sequence[Any],
        within: float | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
        **per_rank_by_name: Sequence[Any],
    ) -> list[Any]:
        """Call a method of a program on each rank, in which the ranks meet by `programs.current_rank`.

        The methods run at the same time, as one collective of the world. If one fails, is lost, or is late,
        all others are ended where they meet next. Nothing is done again: the caller knows what may be.

        Args:
            programs: A program of each rank, by `open_program` on its device.
            method: The method, as for `Program.ask`.
            per_rank: Its arguments: each a sequence with one for each rank.
            within: Seconds that it may take; None for any time.
            groups: Ranks that also meet among themselves, by `ProgramRank.group`: of each name the groups,
                and each rank in one of them.
            per_rank_by_name: Arguments by name, likewise.

        Returns:
            What the methods have returned, in the order of the ranks.

        Raises:
            TypeError, ValueError: Wrong programs, arguments or groups.
            RankFailedError: It failed on a rank, and names it, with that error as its cause.
            CollectiveMismatchError: Ranks did not meet by the same calls.
            NotSupportedError: The devices have no way to meet: they are of several backends, or are GPUs that
                NCCL does not serve.
            WorldBrokenError: The world runs no collectives any more.
        """
        call = ProgramCalls(self._turns, programs, method, per_rank, per_rank_by_name, within, groups or {})
        async with self._turns.turn(call.name), exclusive(self.devices):
            return await call.run(self._rooms)

    @opens("the group is not open yet: async with world.group() as group")
    async def group(self) -> AsyncGenerator[Group]:
        """Open a group of calls that run together: ``async with world.group() as group:``.

        ``group.add(rank.send, x, to=1)`` adds a call, of the world or of a rank, and returns its `Result`. At
        the end of the ``async with`` all run at the same time, so two ranks may send to each other. If one
        fails, the others are cancelled, and the ``async with`` raises its error.

        Raises:
            RuntimeError: The task is inside of a group.
        """
        if _GROUPED.get():
            raise RuntimeError("group: this task is inside of a group; add to that one, or end it first")
        group, token = Group(), _GROUPED.set(True)
        try:
            yield group
        finally:
            _GROUPED.reset(token)
        await group.run()

    async def all_reduce(
        self, arrays: Arrays, reduction: Reduction = "sum", *, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Reduce the arrays of all ranks to one, which each rank gets.

        Each of two ranks reduces all of it, and so do more of them if the arrays are small. With more, each
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
        call = CollectiveCall(self._turns, "all_reduce", arrays, out, reduction=reduction)
        call.expect(call.shape)
        size = call.shape_size
        bounds = [size * rank // self.size for rank in range(self.size + 1)]

        async def reduced(rank: int, all_: list[AccelRef]) -> AccelRef:
            part = slice(bounds[rank], bounds[rank + 1])
            return await call.reduced(rank, [one.reshape(-1)[part] for one in all_])

        parts = call.parts("all_reduce")
        if self.size <= 2 or size * call.dtype.itemsize <= _LOCAL_REDUCTION_BYTES:
            # Two ranks move fewer bytes each than in two steps; where there is little, the steps are the
            # time.
            return await self._run(call, parts, call.reduced)
        return await self._run(call, parts, call.joined, first=reduced)

    async def reduce(
        self, arrays: Arrays, reduction: Reduction = "sum", *, root: int = 0, out: AccelRef | None = None
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
        call = CollectiveCall(self._turns, "reduce", arrays, out, to=root, reduction=reduction)
        call.expect(call.shape)
        return (await self._run(call, call.parts("reduce", root=root), call.reduced))[0]

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
        call = CollectiveCall(self._turns, "reduce_scatter", arrays, out, reduction=reduction)
        rows = call.rows()
        call.expect((rows, *call.shape[1:]))

        async def reduced(rank: int, all_: list[AccelRef]) -> AccelRef:
            return await call.reduced(rank, [one[rank * rows : (rank + 1) * rows] for one in all_])

        return await self._run(call, call.parts("reduce_scatter"), reduced)

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
        call = CollectiveCall(self._turns, "broadcast", [array], out, root=root)
        call.expect(call.shape)
        del call.shapes[root]
        copies = await self._run(call, call.parts("broadcast", root=root), call.joined)
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
        call = CollectiveCall(self._turns, "scatter", [array], out, root=root)
        return await self._split(call, {root: [call.rows()] * self.size})

    async def gather(self, arrays: Arrays, *, root: int = 0, out: AccelRef | None = None) -> AccelRef:
        """Join the arrays of all ranks along the first axis, on the device of one of them.

        Args:
            arrays: One of each rank; of arrays without axes the result has one.
            root: The rank that gets it.
            out: Array of that rank to write to.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = CollectiveCall(self._turns, "gather", arrays, out, to=root)
        call.expect(call.joined_shape)
        parts = call.parts("exchange", {rank: {root: call.shape_size} for rank in call.arrays})
        return (await self._run(call, parts, call.joined))[0]

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
        call = CollectiveCall(self._turns, "all_gather", arrays, out)
        call.expect(call.joined_shape)
        return await self._run(call, call.parts("all_gather"), call.joined)

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
        call = CollectiveCall(self._turns, "all_to_all", arrays, out, has_rows=splits is not None)
        counts = [[call.rows()] * self.size] * self.size if splits is None else call.check_splits(splits)
        return await self._split(call, dict(enumerate(counts)))

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
        call = CollectiveCall(self._turns, "send", [array], out, root=root, to=to)
        call.expect(call.shape)
        parts = call.parts("exchange", {root: {to: call.shape_size}})
        return (await self._run(call, parts, call.joined))[0]

    async def _split(self, call: CollectiveCall, counts: Mapping[int, Sequence[int]]) -> list[AccelRef]:
        """Run a collective in which ranks give rows: for each that does, how many each rank gets."""
        width = math.prod(call.shape[1:])
        rows = [sum(row[rank] for row in counts.values()) for rank in range(self.size)]
        call.expect(*[(extent, *call.shape[1:]) for extent in rows])

        async def joined(rank: int, all_: list[AccelRef]) -> AccelRef:
            rows = zip(all_, counts.values(), strict=True)
            return await call.joined(rank, [one[sum(row[:rank]) :][: row[rank]] for one, row in rows])

        elements = {
            giver: {rank: count * width for rank, count in enumerate(row)} for giver, row in counts.items()
        }
        return await self._run(call, call.parts("exchange", elements), joined)

    async def run(self, operation: Callable[..., Operation[Any, ReplyT]], *arrays: Arrays) -> list[ReplyT]:
        """Run an operation of your own on all ranks at the same time; each rank reads the arrays of all.

        ``await world.run(lambda rank, xs, ws: Weighted(xs, ws[rank]), xs, ws)`` asks the device of each rank
        for a `Weighted`. Its kernel has the arrays of all ranks where they are: what they are to read of one
        another is passed here, and not by the function's own variables.

        A rank writes to new arrays, and to those of its own device that are not in `arrays`. If it fails or
        is cancelled, arrays that were there before and that ranks may have written to are refused by later
        operations. A rank that writes to such arrays does not compute again after a loss.

        The messages are served by actors of their own (``library?apart``). So an operation of the same
        library that waits until an array is not read any more does not hold them up. Worlds that share a
        device take turns.

        Args:
            operation: Makes the message of a rank. It is called with the number of the rank and, for each of
                `arrays`, with the list of these as arrays of its device; again for a rank that runs again.
            *arrays: For each, one array of each rank. They may differ in shape and dtype.

        Returns:
            The replies of the ranks, in their order.

        Raises:
            TypeError, ValueError: Wrong arrays; no message; or one that writes to an array of `arrays`.
            RankFailedError: It failed on a rank, which may have refused it.
            WorldBrokenError: The world runs no collectives any more.
        """
        call = PartCall(self._turns, "run")
        if not callable(cast("object", operation)):
            raise TypeError(f"{call.name}: operation must be callable, got {type(operation).__name__}")
        lists = [call.checked(f"arrays[{at}]", one, range(self.size)) for at, one in enumerate(arrays)]
        lent = [array for one in lists for array in one]

        async def reply(rank: int, all_: list[AccelRef]) -> Any:
            size = self.size
            message: object = operation(rank, *[all_[at : at + size] for at in range(0, len(all_), size)])
            if not isinstance(message, Operation) or not isinstance(getattr(message, "library", None), str):
                told = f"{type(message).__name__}{what_to_do(message, is_array=False)}"
                raise TypeError(
                    f"{call.name}: operation must return a message that names its library, got {told}"
                )
            changed = call.changed[rank] = list[Block]()
            blocks, library = [one.block for one in lent], f"{message.library}{APART}"
            return await self.devices[rank].ask(PartOperation(library, message, blocks, changed))

        async with self._turns.turn(call.name), exclusive(self.devices):
            return [*(await call.each(lent, reply)).values()]

    async def _ask(self, function: str, options: Mapping[str, Any], given: Given) -> Any:
        """Run a collective to which all its ranks have come; returns the results by rank."""
        arrays = {rank: each[0] for rank, each in given.items()}
        own: dict[int, Any] = {rank: each[1] for rank, each in given.items()}
        in_order = [*map(arrays.get, range(self.size))], [*map(own.get, range(self.size))]
        ask: Any = getattr(self, function, None)
        if function in ("barrier", "run"):
            each = in_order[1]
            is_run = function == "run"
            return await self.run(options["operation"], *zip(*each, strict=True)) if is_run else each
        if function == "all_to_all":
            splits, outs = zip(*in_order[1], strict=True)
            return await ask(in_order[0], splits=splits if options["has_splits"] else None, out=outs)
        root = options.get("root", 0)
        to = options.get("to", root)
        gives: Any = arrays.get(root) if function in ("broadcast", "scatter", "send") else in_order[0]
        if function in ("reduce", "gather", "send"):
            made = await ask(gives, **options, out=own.get(to))
            return {rank: made if rank == to else None for rank in given}
        return await ask(gives, **options, out=in_order[1])
