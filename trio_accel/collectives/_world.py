"""Worlds: devices that take part in collectives, and go on when one of them has lost its context."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, cast

import trio

from ..actors import ActorError, Intensity, named_arguments
from ..backends.base import AccelError, ContextLostError, DeviceLostError
from ..devices import AccelRef, Device, Lent, PeerCopy, check_device, lend
from ._errors import RankFailedError, WorldBrokenError
from ._operations import Join, Reduction, check_reduction, expression_of
from ._ranks import Given, Group, Meetings, Rank, open_group

__all__ = ["World", "open_world"]

_logger = logging.getLogger("trio_accel.collectives")

Arrays = Sequence[AccelRef]
_Compute = Callable[[int, list[AccelRef]], Awaitable[AccelRef]]


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
        self._retry = retry
        self._intensity = intensity
        self._failures: deque[float] = deque()
        self._broken: str | None = None
        self._turn = trio.Lock()
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
        self._broken = self._broken or "the world is closed"
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

        Each rank reduces a part of it, and all copy the parts. The result is the same on all ranks, bit for
        bit.

        Args:
            arrays: One of each rank.
            reduction: How; the elements of ranks are taken in their order.
            out: Arrays to write to, one of each rank; `arrays` for a reduction in place.

        Raises:
            TypeError, ValueError: Wrong arrays: nothing was launched.
            RankFailedError: It failed on a rank.
            WorldBrokenError: The world runs no collectives any more.
        """
        call = _Call(self, "all_reduce", arrays, out)
        check_reduction(call.name, reduction, call.dtype)
        call.check_outputs([call.shape] * self.size)
        size = call.shape_size
        bounds = [size * rank // self.size for rank in range(self.size + 1)]
        expression = expression_of(reduction, self.size, call.dtype)

        async def reduced(rank: int, parts: list[AccelRef]) -> AccelRef:
            part = slice(bounds[rank], bounds[rank + 1])
            return await expression(*[one.reshape(-1)[part] for one in parts])

        async with call.begun():
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
        call = _Call(self, "reduce", arrays, None)
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
        call = _Call(self, "reduce_scatter", arrays, out)
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
        call = _Call(self, "broadcast", [array], out, root=root)
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
        call = _Call(self, "scatter", [array], out, root=root)
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
        call = _Call(self, "gather", arrays, None)
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
        call = _Call(self, "all_gather", arrays, out)
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
        call = _Call(self, "all_to_all", arrays, out, has_rows=splits is not None)
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
        call = _Call(self, "send", [array], None, root=root)
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

    # What calls need.

    @property
    def retry(self) -> int:
        """How often the part of a rank runs again."""
        return self._retry

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[None, None]:
        """Hold the world for one collective.

        Raises:
            WorldBrokenError: It runs none any more.
        """
        self.check_whole(name)
        async with self._turn:
            self.check_whole(name)
            yield

    def check_whole(self, name: str) -> None:
        """Refuse a collective of a world that runs none any more.

        Raises:
            WorldBrokenError: Always then.
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
                self._broken = (
                    f"the world has broken: {len(self._failures)} collectives failed by losses within "
                    f"{self._intensity.within:g} s, the last one on rank {rank}"
                )
        return failed


class _Call:
    """One collective: its arguments, and how it runs.

    Args:
        world: The world.
        function: Name of the method.
        arrays: The arrays that it reads.
        out: Arrays to write to, one of each rank.
        root: The rank that has the only array; None if each rank has one.
        has_rows: Whether the arrays may differ in the extent of their first axis.
    """

    def __init__(
        self,
        world: World,
        function: str,
        arrays: Arrays,
        out: Sequence[AccelRef | None] | None,
        *,
        root: int | None = None,
        has_rows: bool = False,
    ) -> None:
        self.name: str = f"collectives.{function}"
        world.check_whole(self.name)
        self._world = world
        self._devices = world.devices
        self._size = world.size
        if root is None:
            ranks = range(self._size)
        else:
            self.check_root(root)
            ranks = range(root, root + 1)
        self._arrays = self._checked("arrays", arrays, ranks)
        self.out: list[AccelRef | None] = [None] * self._size
        if out is not None:
            if len(out) != self._size:
                raise ValueError(f"{self.name}: out must name {self._size} arrays, got {len(out)}")
            self.out[:] = out
        first = self._arrays[0]
        self.shape: tuple[int, ...] = first.shape
        self.shape_size: int = first.size
        for rank, one in enumerate(self._arrays):
            shapes = (first.shape[1:], one.shape[1:]) if has_rows else (first.shape, one.shape)
            if shapes[0] != shapes[1] or first.ndim != one.ndim or first.dtype is not one.dtype:
                raise ValueError(
                    f"{self.name}: arrays must have one dtype and one shape, got {first.dtype} {first.shape} "
                    f"of rank 0 and {one.dtype} {one.shape} of rank {rank}"
                )
        self.dtype: Any = first.dtype

    def _checked(self, argument: str, arrays: Arrays, ranks: Sequence[int]) -> list[AccelRef]:
        if isinstance(cast("object", arrays), AccelRef) or len(arrays) != len(ranks):
            told = "one array" if isinstance(cast("object", arrays), AccelRef) else f"{len(arrays)}"
            raise ValueError(f"{self.name}: {argument} must name {len(ranks)}, one of each rank, got {told}")
        for rank, array in zip(ranks, arrays, strict=True):
            self._check(f"{argument}[{rank}]" if len(ranks) > 1 else "array", array, rank)
        return list(arrays)

    def _check(self, argument: str, array: object, rank: int) -> None:
        if not isinstance(array, AccelRef):
            raise TypeError(f"{self.name}: {argument} must be an AccelRef, got {type(array).__name__}")
        array.block.check(f"{self.name}: {argument}")
        if array.device is not self._devices[rank]:
            raise ValueError(
                f"{self.name}: {argument} is on {array.device.path}, and rank {rank} is "
                f"{self._devices[rank].path}"
            )

    def check_root(self, root: object, argument: str = "root") -> None:
        """Refuse what is no rank.

        Raises:
            ValueError: It is none.
        """
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._size:
            raise ValueError(f"{self.name}: {argument} must be a rank below {self._size}, got {root!r}")

    def check_outputs(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse arrays that the results do not fit in.

        Raises:
            TypeError, ValueError, StaleRefError: They are.
        """
        for rank, (array, shape) in enumerate(zip(self.out, shapes, strict=True)):
            if array is None:
                continue
            argument = f"out[{rank}]"
            self._check(argument, array, rank)
            array.block.check_writable(f"{self.name}: {argument}")
            if array.shape != shape or array.dtype is not self.dtype:
                raise ValueError(
                    f"{self.name}: {argument} must have shape {shape} and dtype {self.dtype}, got shape "
                    f"{array.shape} and dtype {array.dtype}"
                )

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
        """Return the rows that each rank gives to each.

        Raises:
            ValueError: They are not those of the arrays.
        """
        counts = [list(row) for row in splits]
        if len(counts) != self._size or any(len(row) != self._size for row in counts):
            raise ValueError(
                f"{self.name}: splits must have {self._size} rows of {self._size}, got {splits!r}"
            )
        for rank, (row, array) in enumerate(zip(counts, self._arrays, strict=True)):
            extent = array.shape[0] if array.shape else 0
            if any(count < 0 for count in row) or sum(row) != extent:
                raise ValueError(
                    f"{self.name}: splits[{rank}] must be at least 0 and sum to {extent}, the rows of its "
                    f"array, got {row}"
                )
        return counts

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Shape of the arrays of all ranks, joined."""
        rows, *others = self.shape or (1,)
        return rows * self._size, *others

    async def copied(self, rank: int, arrays: list[AccelRef]) -> AccelRef:
        """Copy an array to a rank."""
        return await self._devices[rank].ask(PeerCopy(arrays[0]))

    async def joined(self, rank: int, arrays: list[AccelRef]) -> AccelRef:
        """Join arrays on a rank."""
        return await self._devices[rank].ask(Join([one if one.shape else one.reshape(1) for one in arrays]))

    async def contiguous(self) -> list[AccelRef]:
        """Return the arrays, those with gaps as copies."""
        return [one if one.spec.is_contiguous else await one.copy() for one in self._arrays]

    @asynccontextmanager
    async def begun(self) -> AsyncGenerator[None, None]:
        """Run the collective inside: it has the world for itself."""
        async with self._world.turn(self.name):
            yield

    async def each(
        self, lent: Arrays, compute: _Compute, ranks: Iterable[int] | None = None
    ) -> dict[int, AccelRef]:
        """Have ranks compute new arrays, all at the same time.

        Args:
            lent: Arrays that all of them read.
            compute: What a rank computes of these, as its device has them.
            ranks: The ranks; None for all.

        Returns:
            The results of the ranks that compute, in their order.

        Raises:
            RankFailedError: It failed on one of them.
        """
        made: dict[int, AccelRef] = {}
        chosen = list(range(self._size)) if ranks is None else list(ranks)
        devices = [self._devices[rank] for rank in chosen]
        try:
            async with lend(self.name, lent, devices) as held:
                await self._all(chosen, lambda rank: self._part(rank, held, compute, made))
        except DeviceLostError as error:
            ended = [rank for rank, device in enumerate(self._devices) if device.is_ended]
            raise self._world.failed(self.name, ended[0], error) from error
        return {rank: made[rank] for rank in chosen}

    async def written(self, made: Iterable[AccelRef], ranks: Iterable[int] | None = None) -> list[AccelRef]:
        """Write results to the arrays of `out`, where there are any.

        That waits for all that reads these, and nothing is held meanwhile. So two collectives cannot wait for
        each other.
        """
        chosen = list(range(self._size)) if ranks is None else list(ranks)
        results = dict(zip(chosen, made, strict=True))
        outputs = {rank: out for rank in chosen if (out := self.out[rank]) is not None}

        async def write(rank: int) -> None:
            await outputs[rank].assign(results[rank])

        is_whole = False
        try:
            await self._all(outputs, write)
            is_whole = True
        finally:
            if not is_whole:
                # They may be half written.
                for array in outputs.values():
                    array.block.spoil(self.name, None)
        return [outputs.get(rank, results[rank]) for rank in chosen]

    async def _all(self, ranks: Iterable[int], part: Callable[[int], Awaitable[None]]) -> None:
        """Wait for the parts of ranks; the first that fails ends all."""
        errors: list[RankFailedError] = []
        async with trio.open_nursery() as nursery:

            async def run(rank: int) -> None:
                try:
                    with self._told_of(rank):
                        await part(rank)
                except RankFailedError as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel(reason="the collective has failed on another rank")

            for rank in ranks:
                nursery.start_soon(run, rank)
        if errors:
            first = errors[0]
            errors.clear()
            try:
                raise first
            finally:
                # The error has this frame, which would have the error.
                del first

    async def _part(self, rank: int, held: Lent, compute: _Compute, made: dict[int, AccelRef]) -> None:
        """Compute on one rank; once more where its context was lost."""
        losses = 0
        while rank not in made:
            try:
                async with held.to(self._devices[rank]) as arrays:
                    made[rank] = await compute(rank, arrays)
            except ContextLostError:
                losses += 1
                if losses > self._world.retry:
                    raise

    @contextmanager
    def _told_of(self, rank: int) -> Generator[None, None, None]:
        """Make an error inside that of the collective, which names the rank."""
        try:
            yield
        except (AccelError, ActorError) as error:
            raise self._world.failed(self.name, rank, error) from error
