"""Ranks: collectives for which the task of each rank asks, with the array of that rank."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

import attrs
import trio

from ..actors import named_arguments
from ..devices import AccelRef, Device, Operation, run_together
from ._errors import CollectiveMismatchError, RankFailedError, WorldBrokenError
from ._operations import Reduction

__all__ = ["Group", "Rank", "Result"]

P = ParamSpec("P")
T = TypeVar("T")
Own: TypeAlias = tuple[AccelRef | None, object]
"""The array of one rank, and its own option: `out`, or that of a collective without `out`."""
Given: TypeAlias = Mapping[int, Own]
Run: TypeAlias = "Callable[[str, Mapping[str, Any], Given], Awaitable[Any]]"


@attrs.define(eq=False)
class _Meeting:
    """One collective that waits for ranks, and then runs.

    Attributes:
        function: Its name.
        options: What all ranks say alike.
        ranks: The ranks that are to come.
        given: What those have given that have come.
        results: The result of each rank, once it is done.
        error: Why it failed.
        done: Set when it is over.
        scope: Ends its run.
    """

    function: str
    options: Mapping[str, Any]
    ranks: Collection[int]
    given: dict[int, Own] = attrs.field(factory=dict[int, Own])
    results: Any = None
    error: Exception | None = None
    done: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def is_whole(self) -> bool:
        """Whether all have come."""
        return len(self.given) == len(self.ranks)

    @property
    def missing(self) -> str:
        """The ranks that have not come, for people."""
        return ", ".join(str(rank) for rank in self.ranks if rank not in self.given)

    def fail(self, error: Exception) -> None:
        """Fail for all ranks, also for those that come later; a second error does nothing."""
        if self.error is None and not self.done.is_set():
            self.error = error
            self.scope.cancel(reason="a rank has left the collective")
            if not self.is_whole:
                # It stays until all have come, and one may never come: without their arrays.
                self.given = dict.fromkeys(self.given, (None, None))
                self.done.set()


class Meetings:
    """The collectives of a world for which some ranks have asked.

    The first collective of each rank is one, the second of each rank is one, and so on. Sends and receipts
    between two ranks are counted by themselves.

    Args:
        run: Runs one that all have come to.
        check: Refuses one by its name where the world runs none any more.
    """

    def __init__(self, run: Run, check: Callable[[str], None]) -> None:
        self._run_one = run
        self._check = check
        self._counts: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self._open: dict[tuple[object, ...], _Meeting] = {}

    async def come(
        self, rank: int, function: str, options: Mapping[str, Any], ranks: Sequence[int], own: Own
    ) -> Any:
        """Come to the next collective of a rank, and wait until it is over.

        Args:
            rank: Number of the rank.
            function: Name of the collective.
            options: What all ranks must say alike.
            ranks: All that take part.
            own: What the rank gives.

        Raises:
            RankFailedError: It failed on a rank, or the task of one was cancelled.
            CollectiveMismatchError: Another rank asks for something else.
            WorldBrokenError: The world is closed, or has broken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check(f"collectives.{function}")
        # Sends have a key for each pair, in this order of their ranks.
        kind = tuple(ranks) if function == "send" else ()
        self._counts[rank, *kind] += 1
        key = (*kind, "number", self._counts[rank, *kind])
        meeting = self._open.setdefault(key, _Meeting(function, options, ranks))
        meeting.given[rank] = own if meeting.error is None else (None, None)
        if meeting.is_whole:
            # No rank comes to it any more.
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
        """Wait until the last rank to come has run it."""
        try:
            await meeting.done.wait()
        except trio.Cancelled:
            meeting.fail(_left(rank, meeting, "was cancelled"))
            with trio.CancelScope(shield=True):
                # Its operations are taken back, or awaited for the grace.
                await meeting.done.wait()
            raise

    async def _run(self, rank: int, meeting: _Meeting) -> None:
        """Run it, in the task of the last rank to come."""
        try:
            with meeting.scope:
                meeting.results = await self._run_one(meeting.function, meeting.options, meeting.given)
        except Exception as error:  # noqa: BLE001  # raised by all ranks
            meeting.error = meeting.error or error
        except BaseException:
            # A cancellation, or a group of them: ranks work in tasks of their own.
            meeting.error = meeting.error or _left(rank, meeting, "was cancelled")
            raise
        finally:
            # Arrays of an error's frames would live as long as it.
            meeting.given.clear()
            meeting.done.set()

    def close(self, why: str) -> None:
        """Fail all that wait: no rank comes any more."""
        for meeting in self._open.values():
            meeting.fail(
                WorldBrokenError(f"{meeting.function}: {why}; ranks that had not come: {meeting.missing}")
            )
        self._open.clear()

    def realign(self) -> None:
        """Let the next collective of each rank be the first one; those that wait fail."""
        for meeting in self._open.values():
            missing = next(rank for rank in meeting.ranks if rank not in meeting.given)
            meeting.fail(_left(missing, meeting, "began again"))
        self._open.clear()
        self._counts.clear()


def _left(rank: int, meeting: _Meeting, why: str) -> RankFailedError:
    missing = "" if meeting.is_whole else f"; ranks that had not come: {meeting.missing}"
    return RankFailedError(
        f"the task of rank {rank} {why}{missing}", rank=rank, operation=f"collectives.{meeting.function}"
    )


def _said(function: str, options: Mapping[str, Any]) -> str:
    return f"{function}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


class Rank:
    """One rank of a world, for a task of its own; an item of `World.ranks`.

    Each method is that of `World`, with the array of this rank: it waits until all ranks have asked for it,
    and returns what is this rank's. All ranks ask for the same collectives in the same order. If one asks for
    another, or with other options, all get a `CollectiveMismatchError`. If the task of one is cancelled, all
    get a `RankFailedError` that names it, so a deadline of one rank ends the collective for all. Ranks that
    begin again after an error are aligned first, by `World.realign`.

    Attributes:
        number: Its place in the world.
        size: How many ranks there are.
        device: Its device.
    """

    def __init__(self, meetings: Meetings, number: int, size: int, device: Device) -> None:
        self._meetings = meetings
        self.number: int = number
        self.size: int = size
        self.device: Device = device

    def __repr__(self) -> str:
        return f"<Rank {self.number} of {self.size}, {self.device.path}>"

    async def _meet(
        self, function: str, array: AccelRef | None, own: object = None, /, **options: Any
    ) -> AccelRef:
        """Come to the next collective; None where a rank gets nothing, as methods say that return that."""
        made = await self._meetings.come(self.number, function, options, range(self.size), (array, own))
        return cast("AccelRef", made)

    @named_arguments
    async def all_reduce(
        self, array: AccelRef, reduction: Reduction = "sum", *, out: AccelRef | None = None
    ) -> AccelRef:
        """Reduce the arrays of all ranks to one, which each rank gets; see `World.all_reduce`.

        Args:
            array: The array of this rank.
            reduction: How.
            out: Array to write to; `array` for a reduction in place.

        Raises:
            TypeError, ValueError: Wrong arrays; all ranks get it.
            RankFailedError: It failed on a rank.
            CollectiveMismatchError: Ranks ask for different collectives.
            WorldBrokenError: The world runs no collectives any more.
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
        """Get a part of the array of rank `root`, which others leave out; see `World.scatter`."""
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
        """Get a part of the arrays of all ranks, joined along the first axis; see `World.all_to_all`.

        Args:
            array: The array of this rank.
            splits: How many of its rows each rank gets; without, all get the same number.
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
        """Give an array to another rank, which asks for it by `recv`; returns when that has it.

        Raises:
            ValueError: There is no such rank, or it is this one.
            RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        await self._pair("send", array, None, self.number, to)

    @named_arguments
    async def recv(self, source: int, *, out: AccelRef | None = None) -> AccelRef:
        """Get a copy of an array that another rank sends; those of one rank come in its order.

        Args:
            source: The rank that sends it.
            out: Array to write to.

        Raises:
            ValueError: There is no such rank, or it is this one.
            RankFailedError, WorldBrokenError: As for `all_reduce`.
        """
        return cast("AccelRef", await self._pair("recv", None, out, source, self.number))

    async def _pair(self, verb: str, array: AccelRef | None, out: AccelRef | None, root: int, to: int) -> Any:
        other = to if root == self.number else root
        if isinstance(other, bool) or not 0 <= other < self.size or root == to:
            raise ValueError(
                f"{verb}: it needs another rank below {self.size}, got {other!r} on rank {self.number}"
            )
        options = {"root": root, "to": to}
        return await self._meetings.come(self.number, "send", options, (root, to), (array, out))

    @named_arguments
    async def barrier(self) -> None:
        """Wait until all ranks have asked for this."""
        await self._meet("barrier", None)


@attrs.define(eq=False)
class Result(Generic[T]):
    """The result of one member of a group."""

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
        """Ask for it."""
        self._values.append(await ask())


class Group:
    """Collectives, sends and receipts that run together, as one: made by `World.group`."""

    def __init__(self) -> None:
        self._members: list[Callable[[], Awaitable[None]]] = []

    def add(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Result[T]:
        """Add a call of a method of a world or a rank; it is made at the end of the ``async with``.

        Args:
            function: The method.
            *args: Its arguments.
            **kwargs: Those by name.
        """
        result = Result[T]()
        self._members.append(partial(result.run, lambda: function(*args, **kwargs)))
        return result

    async def run(self) -> None:
        """Make all calls at the same time; the first that fails ends all."""
        await run_together(self._members)
