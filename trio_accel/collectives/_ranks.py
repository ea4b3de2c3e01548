"""Ranks: collectives that the task of each rank requests, with the array of that rank."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

import attrs
import trio

from ..actors import TaskEvent, named_arguments
from ..devices import AccelRef, Device, Operation, run_together
from ._errors import CollectiveMismatchError, RankFailedError, WorldBrokenError
from ._operations import Reduction

__all__ = ["Group", "Rank", "Result"]

P = ParamSpec("P")
T = TypeVar("T")
RankArguments: TypeAlias = tuple[AccelRef | None, object]
"""The array of one rank, and its own option: `out`, or that of a collective without `out`."""
ArgumentsByRank: TypeAlias = Mapping[int, RankArguments]
Run: TypeAlias = "Callable[[str, Mapping[str, Any], ArgumentsByRank], Awaitable[Any]]"


@attrs.define(eq=False)
class _Meeting:
    """A collective that waits for ranks, and then runs.

    Attributes:
        function: The name of the method.
        options: The options, equal for all ranks.
        ranks: The ranks that take part.
        arguments: The arguments of the ranks that have arrived.
        results: The result of each rank, once it is done.
        error: The reason of a failure.
        done: Set when it is over.
        scope: Cancels its run.
    """

    function: str
    options: Mapping[str, Any]
    ranks: Collection[int]
    arguments: dict[int, RankArguments] = attrs.field(factory=dict[int, RankArguments])
    results: Any = None
    error: Exception | None = None
    done: TaskEvent = attrs.field(factory=TaskEvent)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have arrived."""
        return len(self.arguments) == len(self.ranks)

    @property
    def missing(self) -> str:
        """The missing ranks, for error messages."""
        return ", ".join(str(rank) for rank in self.ranks if rank not in self.arguments)

    def fail(self, error: Exception) -> None:
        """Fail for all ranks, including later ones; a second error is ignored."""
        if self.error is None and not self.done.is_set():
            self.error = error
            self.scope.cancel(reason="a rank has left the collective")
            if not self.is_whole:
                # It stays until all ranks have arrived, which may never happen, so drop their arrays.
                self.arguments = dict.fromkeys(self.arguments, (None, None))
                self.done.set()


class Meetings:
    """The collectives of a world that some ranks have requested.

    The first collective that each rank calls is the same one, so is the second, and so on. Sends and receipts
    between two ranks are counted separately.

    Args:
        run: Runs a collective when all its ranks have arrived.
        check: Refuses a collective by its name if the world no longer runs any.
    """

    def __init__(self, run: Run, check: Callable[[str], None]) -> None:
        self._run_one = run
        self._check = check
        self._counts: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self._open: dict[tuple[object, ...], _Meeting] = {}

    async def come(
        self,
        rank: int,
        function: str,
        options: Mapping[str, Any],
        ranks: Sequence[int],
        arguments: RankArguments,
    ) -> Any:
        """Join the next collective of a rank, and wait until it is over.

        Args:
            rank: The number of the rank.
            function: The name of the collective.
            options: The options, which must be equal for all ranks.
            ranks: All ranks that take part.
            arguments: The arguments of this rank.

        Raises:
            RankFailedError: It failed on a rank, or the task of one was cancelled.
            CollectiveMismatchError: Another rank asks for something else.
            WorldBrokenError: The world is closed, or has broken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check(f"collectives.{function}")
        # Sends have a key for each pair, with the ranks in this order.
        kind = tuple(ranks) if function == "send" else ()
        self._counts[rank, *kind] += 1
        key = (*kind, "number", self._counts[rank, *kind])
        meeting = self._open.setdefault(key, _Meeting(function, options, ranks))
        meeting.arguments[rank] = arguments if meeting.error is None else (None, None)
        if meeting.is_whole:
            # All ranks have arrived, so nobody looks it up again.
            del self._open[key]
        if (meeting.function, meeting.options) != (function, options):
            said = _said(function, options), _said(meeting.function, meeting.options)
            meeting.fail(
                CollectiveMismatchError(
                    f"rank {rank} asks for {said[0]} where other ranks ask for {said[1]}: all ranks must ask "
                    "for the same collectives in the same order"
                )
            )
        if meeting.error is not None:
            meeting.done.set()
        elif meeting.is_whole:
            await self._run(rank, meeting)
        else:
            await self._wait(rank, meeting)
        if meeting.error is None:
            return meeting.results[rank]
        # One for each: tasks that raise the same object would write to one traceback.
        error = copy.copy(meeting.error)
        error.__cause__ = meeting.error.__cause__
        raise error

    async def _wait(self, rank: int, meeting: _Meeting) -> None:
        """Wait until the last rank to arrive has run it."""
        try:
            await meeting.done.wait()
        except trio.Cancelled:
            meeting.fail(_departure_error(rank, meeting, "was cancelled"))
            with trio.CancelScope(shield=True):
                # Its operations are taken back, or awaited for the grace.
                await meeting.done.wait()
            raise
        except BaseException:
            # Its await was closed half-way.
            meeting.fail(_departure_error(rank, meeting, "has left its await"))
            raise

    async def _run(self, rank: int, meeting: _Meeting) -> None:
        """Run it, in the task of the last rank to arrive."""
        try:
            with meeting.scope:
                meeting.results = await self._run_one(meeting.function, meeting.options, meeting.arguments)
        except Exception as error:  # noqa: BLE001  # raised by all ranks
            meeting.error = meeting.error or error
        except BaseException:
            # A cancellation, or a group of them: ranks work in tasks of their own.
            meeting.error = meeting.error or _departure_error(rank, meeting, "was cancelled")
            raise
        finally:
            # Arrays of an error's frames would live as long as it.
            meeting.arguments.clear()
            meeting.done.set()

    def close(self, reason: str) -> None:
        """Fail all waiting collectives, because no rank will arrive."""
        for meeting in self._open.values():
            meeting.fail(
                WorldBrokenError(f"{meeting.function}: {reason}; ranks that had not come: {meeting.missing}")
            )
        self._open.clear()

    def realign(self) -> None:
        """Let the next collective of each rank be the first one again; waiting ones fail."""
        for meeting in self._open.values():
            missing = next(rank for rank in meeting.ranks if rank not in meeting.arguments)
            meeting.fail(_departure_error(missing, meeting, "began again"))
        self._open.clear()
        self._counts.clear()


def _departure_error(rank: int, meeting: _Meeting, reason: str) -> RankFailedError:
    missing = "" if meeting.is_whole else f"; ranks that had not come: {meeting.missing}"
    return RankFailedError(
        f"the task of rank {rank} {reason}{missing}", rank=rank, operation=f"collectives.{meeting.function}"
    )


def _said(function: str, options: Mapping[str, Any]) -> str:
    return f"{function}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


class Rank:
    """One rank of a world, for a task of its own; an item of `World.ranks`.

    Each method equals the method of `World` with the array of this rank: it waits until all ranks have called
    it, and returns this rank's result. All ranks call the same collectives in the same order. If one calls
    another collective, or passes other options, all get a `CollectiveMismatchError`. If the task of one rank
    is cancelled, all get a `RankFailedError` that names it, so a deadline of one rank ends the collective for
    all. Ranks that begin again after an error are aligned first, by `World.realign`.

    Attributes:
        number: The index of the rank in the world.
        size: The number of ranks.
        device: The device of the rank.
    """

    def __init__(self, meetings: Meetings, number: int, size: int, device: Device) -> None:
        self._meetings = meetings
        self.number: int = number
        self.size: int = size
        self.device: Device = device

    def __repr__(self) -> str:
        return f"<Rank {self.number} of {self.size}, {self.device.path}>"

    async def _meet(
        self, function: str, array: AccelRef | None, option: object = None, /, **options: Any
    ) -> AccelRef:
        """Join the next collective; the result is None if the rank gets nothing."""
        result = await self._meetings.come(self.number, function, options, range(self.size), (array, option))
        return cast("AccelRef", result)

    @named_arguments
    async def all_reduce(
        self, array: AccelRef, reduction: Reduction = "sum", *, out: AccelRef | None = None
    ) -> AccelRef:
        """Reduce the arrays of all ranks to one, which each rank gets; see `World.all_reduce`.

        Args:
            array: The array of this rank.
            reduction: The reduction.
            out: Array to write to; `array` for a reduction in place.

        Raises:
            TypeError, ValueError: Wrong arrays; all ranks get the error.
            RankFailedError: It failed on a rank.
            CollectiveMismatchError: Ranks ask for different collectives.
            WorldBrokenError: The world no longer runs collectives.
        """
        return await self._meet("all_reduce", array, out, reduction=reduction)

    @named_arguments
    async def reduce(
        self, array: AccelRef, reduction: Reduction = "sum", *, root: int = 0, out: AccelRef | None = None
    ) -> AccelRef | None:
        """Reduce the arrays of all ranks to one of rank `root`; others get None. See `World.reduce`."""
        return await self._meet("reduce", array, out, reduction=reduction, root=root)

    @named_arguments
    async def reduce_scatter(
        self, array: AccelRef, reduction: Reduction = "sum", *, out: AccelRef | None = None
    ) -> AccelRef:
        """Reduce the arrays of all ranks, and get a part along the first axis; see `World.reduce_scatter`."""
        return await self._meet("reduce_scatter", array, out, reduction=reduction)

    @named_arguments
    async def broadcast(
        self, array: AccelRef | None = None, *, root: int = 0, out: AccelRef | None = None
    ) -> AccelRef:
        """Copy the array of rank `root`, which others leave out; see `World.broadcast`."""
        return await self._meet("broadcast", array, out, root=root)

    @named_arguments
    async def scatter(
        self, array: AccelRef | None = None, *, root: int = 0, out: AccelRef | None = None
    ) -> AccelRef:
        """Get this rank's part of rank `root`'s array, which others leave out; see `World.scatter`."""
        return await self._meet("scatter", array, out, root=root)

    @named_arguments
    async def gather(self, array: AccelRef, *, root: int = 0, out: AccelRef | None = None) -> AccelRef | None:
        """Join the arrays of all ranks on rank `root`; others get None. See `World.gather`."""
        return await self._meet("gather", array, out, root=root)

    @named_arguments
    async def all_gather(self, array: AccelRef, *, out: AccelRef | None = None) -> AccelRef:
        """Join the arrays of all ranks, for each rank; see `World.all_gather`."""
        return await self._meet("all_gather", array, out)

    @named_arguments
    async def all_to_all(
        self, array: AccelRef, *, splits: Sequence[int] | None = None, out: AccelRef | None = None
    ) -> AccelRef:
        """Get this rank's part from all ranks' arrays, joined along the first axis; see `World.all_to_all`.

        Args:
            array: The array of this rank.
            splits: The number of its rows for each rank; by default, all get the same number.
            out: Array to write to.
        """
        return await self._meet("all_to_all", array, (splits, out), has_splits=splits is not None)

    async def run(self, operation: Callable[..., Operation[Any, T]], *arrays: AccelRef) -> T:
        """Run an operation of your own on all ranks; see `World.run`.

        Args:
            operation: Makes the message of a rank; all ranks name the same function or class.
            *arrays: Arrays of this rank; all ranks give as many.

        Raises:
            TypeError, ValueError, RankFailedError, CollectiveMismatchError, WorldBrokenError: As for
                `all_reduce`.
        """
        return cast("T", await self._meet("run", None, arrays, operation=operation, arrays=len(arrays)))

    @named_arguments
    async def send(self, array: AccelRef, to: int) -> None:
        """Give an array to another rank, which calls `recv`; return when it is copied.

        Raises:
            ValueError: `to` is not another rank of the world.
            RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        await self._pair("send", array, None, self.number, to)

    @named_arguments
    async def recv(self, source: int, *, out: AccelRef | None = None) -> AccelRef:
        """Get a copy of an array that another rank sends; copies arrive in the order of its sends.

        Args:
            source: The rank that sends the array.
            out: Array to write to.

        Raises:
            ValueError: `source` is not another rank of the world.
            RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        return cast("AccelRef", await self._pair("recv", None, out, source, self.number))

    async def _pair(self, verb: str, array: AccelRef | None, out: AccelRef | None, root: int, to: int) -> Any:
        peer = to if root == self.number else root
        if isinstance(peer, bool) or not 0 <= peer < self.size or root == to:
            raise ValueError(
                f"{verb}: it needs another rank below {self.size}, got {peer!r} on rank {self.number}"
            )
        options = {"root": root, "to": to}
        return await self._meetings.come(self.number, "send", options, (root, to), (array, out))

    @named_arguments
    async def barrier(self) -> None:
        """Wait until all ranks have asked for this."""
        await self._meet("barrier", None)


@attrs.define(eq=False)
class Result(Generic[T]):
    """The result of a call in a group."""

    _values: list[T] = attrs.field(factory=list[T], init=False)

    @property
    def value(self) -> T:
        """The result.

        Raises:
            RuntimeError: The group is not over, or has failed.
        """
        if not self._values:
            raise RuntimeError("value: the group has not run: its results are there behind the async with")
        return self._values[0]

    async def run(self, ask: Callable[[], Awaitable[T]]) -> None:
        """Make the call."""
        self._values.append(await ask())


class Group:
    """Collectives, sends and receipts that run together, as one: made by `World.group`."""

    def __init__(self) -> None:
        self._members: list[Callable[[], Awaitable[None]]] = []

    def add(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Result[T]:
        """Add a method call of a world or a rank, to run at the end of the ``async with``.

        Args:
            function: The method.
            *args: Its arguments.
            **kwargs: Its keyword arguments.
        """
        result = Result[T]()
        self._members.append(partial(result.run, lambda: function(*args, **kwargs)))
        return result

    async def run(self) -> None:
        """Make all calls at the same time; the first that fails ends all."""
        await run_together(self._members)
