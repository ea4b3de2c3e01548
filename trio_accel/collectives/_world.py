"""Worlds: devices that take part in collectives, and continue after one of them has lost its context."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias, TypeVar, cast

from ..actors import Intensity, named_arguments, opens, run_apart
from ..backends.base import NotSupportedError
from ..devices import AccelRef, Device, Operation, check_device, exclusive, what_to_do
from ..devices.engine._library import APART
from ..devices.operations._blocks import Block
from ._call import Arrays, CollectiveCall, Computes, PartCall, Turns
from ._communicators import Communicator, RanksFailedError, RankShare, library_of, refusal
from ._operations import PartOperation, Reduction
from ._program_calls import ProgramCalls, Rooms
from ._ranks import ArgumentsByRank, Group, Meetings, Rank

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
    """Make a world of devices; each is a rank, in their order.

    The devices still belong to the program, which closes them. They may have any isolation and backend.
    Devices with the same backend and isolation read one another's arrays in place (`Device.borrow`). For
    others, arrays may be copied through host memory.

    Args:
        devices: The devices, each once, at least one.
        retry: The number of times that a rank computes again after its device lost its context. Copies to
            `out` at the end are not repeated: with mapped arrays all of them, with NCCL copies that replace
            an argument.
        intensity: The number of collectives that may fail by losses within its window; one more breaks the
            world. By default there is no bound.
        transport: The way of data between ranks. ``"auto"`` selects NCCL if the ranks are different GPUs, all
            in workers, and nccl4py is installed; otherwise `World.why_mapped` gives the reason. Operations
            that NCCL lacks use mapped arrays in any case.

    Raises:
        ValueError: No device, a duplicate, a negative `retry`, or an unknown transport.
        TypeError: An item is not an open device.
        NotSupportedError: ``"nccl"`` cannot serve these devices.
    """
    world = World(devices, retry, intensity, transport)
    try:
        yield world
    finally:
        await world.aclose()


class World:
    """Devices that take part in collectives; made by `open_world`.

    The methods take one array from each rank, as a sequence in rank order. All have the same dtype and,
    unless stated otherwise, the same shape. They may be views with any strides. The results are new,
    contiguous arrays, each on the device of its rank, or the arrays of `out`.

    Collectives run one after the other, in call order. Other operations on the devices are ordered by their
    arrays, as always. Each device reads the arrays of the others, and writes only to its own. So the loss of
    a context leaves the arrays of all ranks unchanged, except for `out`.

    A collective waits while a device rebuilds its context. If it fails on a rank, it ends on all with a
    `RankFailedError` that names the rank, with that error as its cause. Other ranks keep their contexts and
    arrays. You can call the next collective at once, because nothing has to be recreated.

    When cancelled, operations before their launch are taken back, and others awaited, as for `Device.ask`.
    Arrays of `out` that may be half written are refused by later operations.

    Tasks that each have an array of one rank use `ranks`.

    If the ranks are different GPUs in workers of one host, data moves by NCCL (D162). Each rank then has a
    communicator, which is opened for the first collective. If a rank is lost, or a collective is cancelled,
    all others give theirs up, and the next collective opens new ones. NCCL adds in its own order, which is
    the same for all ranks. It scales a mean before adding.

    Attributes:
        devices: The devices, in rank order.
        ranks: The ranks, each for a separate task.
        why_mapped: The reason why NCCL is not used; None if it is.
    """

    def __init__(
        self, devices: Iterable[Device], retry: int, intensity: Intensity | None, transport: Transport
    ) -> None:
        if not isinstance(cast("object", devices), Iterable):
            advice = what_to_do(devices, is_array=False)
            if isinstance(cast("object", devices), Device):
                advice = "; write [device]"
            elif isinstance(getattr(devices, "devices", None), tuple):
                advice = f"; write {type(devices).__name__.lower()}.devices"
            raise TypeError(
                f"open_world: devices must be a list of devices, got {type(devices).__name__}{advice}"
            )
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
        """The way of data between ranks, where both ways are possible."""
        return "mapped" if self._communicator is None else "nccl"

    def realign(self) -> None:
        """Let the next collective of each of `ranks` be the first one, so that all can repeat failed work.

        After an error, some ranks have called more collectives than others. Ranks that still wait for one get
        a `RankFailedError`.
        """
        self._meetings.realign()

    def close(self) -> None:
        """Run no more collectives."""
        self._turns.end("the world is closed")

    async def aclose(self) -> None:
        """Run no more collectives, and give the communicator up; `open_world` calls this at its end."""
        self.close()
        await self._rooms.close()
        if self._communicator is not None:
            await self._communicator.close()

    async def _met(self, call: CollectiveCall, parts: Mapping[int, RankShare]) -> dict[int, AccelRef] | None:
        """Run a collective by a vendor's library; return None if it needs mapped arrays."""
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
        """Run a collective in its turn: by a vendor's library if possible, or else by mapped arrays.

        Args:
            call: The collective.
            parts: The parts of the ranks.
            compute: Computes the result of a rank from mapped arrays.
            first: Computes an intermediate result on each rank first, which `compute` gets.
        """
        async with self._turns.turn(call.name):
            with call.writing():
                results = await self._met(call, parts)
                if results is None:
                    arrays = [*call.arrays.values()]
                    if first is not None:
                        packed = [
                            array if array.spec.is_contiguous else await array.copy() for array in arrays
                        ]
                        arrays = [*(await call.compute_on_ranks(packed, first)).values()]
                    results = await call.compute_on_ranks(arrays, compute, call.shapes)
                return await call.written(results)

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
        all others end at their next exchange. Nothing is repeated, because only the caller knows what can be.

        Args:
            programs: One program of each rank, opened on its device by `open_program`.
            method: The method, as for `Program.ask`.
            per_rank: The positional arguments, each a sequence with one value per rank.
            within: The timeout in seconds; None for no limit.
            groups: Groups of ranks that also meet among themselves, by `ProgramRank.group`. For each name, a
                list of groups with each rank in one of them.
            per_rank_by_name: The keyword arguments, likewise.

        Returns:
            The results of the methods, in rank order.

        Raises:
            TypeError, ValueError: Wrong programs, arguments or groups.
            RankFailedError: It failed on a rank, and names it, with that error as its cause.
            CollectiveMismatchError: Ranks did not meet by the same calls.
            NotSupportedError: The devices cannot meet: they are of several backends, or are GPUs that NCCL
                does not serve.
            WorldBrokenError: The world no longer runs collectives.
        """
        call = ProgramCalls(self._turns, programs, method, per_rank, per_rank_by_name, within, groups or {})
        async with self._turns.turn(call.name), exclusive(self.devices):
            return await run_apart(call.run, self._rooms)

    @opens("the group is not open yet: async with world.group() as group")
    async def group(self) -> AsyncGenerator[Group]:
        """Open a group of calls that run together: ``async with world.group() as group:``.

        ``group.add(rank.send, x, to=1)`` adds a call, of the world or of a rank, and returns its `Result`.
        All calls run at the same time at the end of the ``async with``, so two ranks may send to each other.
        If one fails, the others are cancelled, and the ``async with`` raises its error.

        Raises:
            RuntimeError: The task is already inside of a group.
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

        With two ranks, or with small arrays, each rank reduces everything. Otherwise each reduces a part, and
        all copy the parts. The result is the same on all ranks, bit for bit.

        Args:
            arrays: One array from each rank.
            reduction: The reduction; it takes elements in rank order.
            out: Arrays to write to, one per rank; `arrays` for a reduction in place.

        Raises:
            TypeError, ValueError: Wrong arrays; nothing was launched.
            RankFailedError: It failed on a rank.
            WorldBrokenError: The world no longer runs collectives.
        """
        call = CollectiveCall(self._turns, "all_reduce", arrays, out, reduction=reduction)
        call.expect(call.shape)
        size = call.shape_size
        bounds = [size * rank // self.size for rank in range(self.size + 1)]

        async def reduced(rank: int, all_: list[AccelRef]) -> AccelRef:
            part = slice(bounds[rank], bounds[rank + 1])
            return await call.reduced(rank, [array.reshape(-1)[part] for array in all_])

        parts = call.parts("all_reduce")
        if self.size <= 2 or size * call.dtype.itemsize <= _LOCAL_REDUCTION_BYTES:
            # Two ranks move fewer bytes each than in two steps. With small arrays, the number of steps
            # determines the time.
            return await self._run(call, parts, call.reduced)
        return await self._run(call, parts, call.joined, first=reduced)

    async def reduce(
        self, arrays: Arrays, reduction: Reduction = "sum", *, root: int = 0, out: AccelRef | None = None
    ) -> AccelRef:
        """Reduce the arrays of all ranks to one, on the device of rank `root`.

        Args:
            arrays: One array from each rank.
            reduction: The reduction; it takes elements in rank order.
            root: The rank that gets the result.
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
            arrays: One array from each rank. The number of ranks divides the extent of the first axis.
            reduction: The reduction; it takes elements in rank order.
            out: Arrays to write to, one per rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = CollectiveCall(self._turns, "reduce_scatter", arrays, out, reduction=reduction)
        rows = call.rows()
        call.expect((rows, *call.shape[1:]))

        async def reduced(rank: int, all_: list[AccelRef]) -> AccelRef:
            return await call.reduced(rank, [array[rank * rows : (rank + 1) * rows] for array in all_])

        return await self._run(call, call.parts("reduce_scatter"), reduced)

    async def broadcast(
        self, array: AccelRef, *, root: int = 0, out: Sequence[AccelRef | None] | None = None
    ) -> list[AccelRef]:
        """Copy the array of one rank to all others.

        Args:
            array: The array.
            root: The rank of the array.
            out: Arrays to write to, one per rank; None for a new one, and at `root`.

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
        """Give each rank its part of one array, along the first axis.

        Args:
            array: The array. The number of ranks divides the extent of its first axis.
            root: The rank of the array.
            out: Arrays to write to, one per rank.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = CollectiveCall(self._turns, "scatter", [array], out, root=root)
        return await self._split(call, {root: [call.rows()] * self.size})

    async def gather(self, arrays: Arrays, *, root: int = 0, out: AccelRef | None = None) -> AccelRef:
        """Join the arrays of all ranks along the first axis, on the device of rank `root`.

        Args:
            arrays: One array from each rank. 0-d arrays are joined to a 1-d result.
            root: The rank that gets the result.
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
            arrays: One array from each rank. 0-d arrays are joined to a 1-d result.
            out: Arrays to write to, one per rank.

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
        """Give each rank its part from each rank's array, joined along the first axis in rank order.

        Args:
            arrays: One array from each rank. Without `splits`, the number of ranks divides the extent of
                their first axis. With it, they may differ in that extent.
            splits: For each rank, the number of rows of its array for each rank, in rank order.
            out: Arrays to write to, one per rank.

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
            root: The rank of the array.
            out: Array of rank `to` to write to.

        Raises:
            TypeError, ValueError, RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        call = CollectiveCall(self._turns, "send", [array], out, root=root, to=to)
        call.expect(call.shape)
        parts = call.parts("exchange", {root: {to: call.shape_size}})
        return (await self._run(call, parts, call.joined))[0]

    async def _split(self, call: CollectiveCall, counts: Mapping[int, Sequence[int]]) -> list[AccelRef]:
        """Run a collective in which ranks give rows; `counts` has the rows by giver and receiver."""
        width = math.prod(call.shape[1:])
        rows = [sum(row[rank] for row in counts.values()) for rank in range(self.size)]
        call.expect(*[(extent, *call.shape[1:]) for extent in rows])

        async def joined(rank: int, all_: list[AccelRef]) -> AccelRef:
            rows = zip(all_, counts.values(), strict=True)
            return await call.joined(rank, [array[sum(row[:rank]) :][: row[rank]] for array, row in rows])

        elements = {
            giver: {rank: count * width for rank, count in enumerate(row)} for giver, row in counts.items()
        }
        return await self._run(call, call.parts("exchange", elements), joined)

    async def run(self, operation: Callable[..., Operation[Any, ReplyT]], *arrays: Arrays) -> list[ReplyT]:
        """Run an operation of your own on all ranks at the same time; each rank reads the arrays of all.

        ``await world.run(lambda rank, xs, ws: Weighted(xs, ws[rank]), xs, ws)`` asks the device of each rank
        for a `Weighted`. Its kernel reads the arrays of all ranks in place. Pass the arrays that ranks read
        from one another here, instead of using the function's own variables.

        A rank writes to new arrays, or to its device's arrays outside of `arrays`. If it fails or is
        cancelled, later operations refuse existing arrays that ranks may have written to. A rank that writes
        to existing arrays does not compute again after a loss.

        Separate actors serve the messages (``library?apart``). So an operation of the same library that waits
        until an array is no longer read does not hold them up. Worlds that share a device take turns.

        Args:
            operation: Makes the message of a rank. It is called with the rank number and, for each item of
                `arrays`, with a list of its arrays as arrays of the rank's device. It is called again if a
                rank runs again.
            *arrays: Sequences with one array from each rank. They may differ in shape and dtype.

        Returns:
            The replies of the ranks, in rank order.

        Raises:
            TypeError, ValueError: Wrong arrays, no message, or a message that writes to an array of `arrays`.
            RankFailedError: It failed on a rank, which may have refused it.
            WorldBrokenError: The world no longer runs collectives.
        """
        call = PartCall(self._turns, "run")
        if not callable(cast("object", operation)):
            raise TypeError(f"{call.name}: operation must be callable, got {type(operation).__name__}")
        lists = [
            call.checked(f"arrays[{number}]", sequence, range(self.size))
            for number, sequence in enumerate(arrays)
        ]
        lent = [array for sequence in lists for array in sequence]

        async def reply(rank: int, all_: list[AccelRef]) -> Any:
            size = self.size
            message: object = operation(
                rank, *[all_[start : start + size] for start in range(0, len(all_), size)]
            )
            if not isinstance(message, Operation) or not isinstance(getattr(message, "library", None), str):
                description = f"{type(message).__name__}{what_to_do(message, is_array=False)}"
                raise TypeError(
                    f"{call.name}: operation must return a message that names its library, got {description}"
                )
            changed = call.changed[rank] = list[Block]()
            blocks, library = [array.block for array in lent], f"{message.library}{APART}"
            return await self.devices[rank].ask(PartOperation(library, message, blocks, changed))

        async with self._turns.turn(call.name), exclusive(self.devices):
            return [*(await call.compute_on_ranks(lent, reply)).values()]

    async def _ask(self, function: str, options: Mapping[str, Any], arguments: ArgumentsByRank) -> Any:
        """Run a collective at which all its ranks have arrived; return the results by rank."""
        arrays = {rank: pair[0] for rank, pair in arguments.items()}
        rank_options: dict[int, Any] = {rank: pair[1] for rank, pair in arguments.items()}
        in_order = [*map(arrays.get, range(self.size))], [*map(rank_options.get, range(self.size))]
        ask: Any = getattr(self, function, None)
        if function in ("barrier", "run"):
            values = in_order[1]
            is_run = function == "run"
            return await self.run(options["operation"], *zip(*values, strict=True)) if is_run else values
        if function == "all_to_all":
            splits, outs = zip(*in_order[1], strict=True)
            return await ask(in_order[0], splits=splits if options["has_splits"] else None, out=outs)
        root = options.get("root", 0)
        to = options.get("to", root)
        gives: Any = arrays.get(root) if function in ("broadcast", "scatter", "send") else in_order[0]
        if function in ("reduce", "gather", "send"):
            result = await ask(gives, **options, out=rank_options.get(to))
            return {rank: result if rank == to else None for rank in arguments}
        return await ask(gives, **options, out=in_order[1])
