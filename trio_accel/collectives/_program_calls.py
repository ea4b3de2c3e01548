"""Calls of one program method on all ranks, which exchange arrays inside the method (D196).

`World.call` makes a `ProgramCalls` for each call and runs it while it holds the world's turn and its devices,
because two calls on the same devices could wait for each other forever. A call has these steps:

1. `Rooms.open` prepares a room for all ranks, and one for each group. Ranks on processors meet in a memory
   file, which each worker opens through `/proc` by this process's descriptor. So the world keeps the
   descriptor open until it closes. GPUs meet by a communicator, which has to be open on every rank before any
   method starts, because methods block in the library.
2. `_ask` sends the method to all ranks at the same time. The context variable `MEETING` carries the rank's
   number, its rooms and the number of the call. This number rises over all calls of the process, so a rank
   recognizes words that an earlier call has left in the memory.
3. `_watch` looks at the devices while the methods run. It ends the call at the deadline, or if a rank has
   lost its context: the next worker knows nothing of the call, so the other ranks would wait for it forever.
4. `_fail` records the first error of each rank, ends the communicators, and cancels the other requests. A
   rank that waits in memory notices that its caller has left; NCCL ends because its communicator is given up.
   So the other ranks fail with `ENDED` at their next exchange.
5. `_raise` picks the cause from the errors. A lost context is the cause, an error of the method is next, then
   `MISMATCH` and `REPEATED`, and `ENDED` is always a consequence. `_SAID` gives a lost rank time to report
   its own error, because its device knows the reason and `_watch` does not.

Nothing is repeated here, because a method may have changed arrays before the loss. If a device repeats the
request on its next worker, the room refuses it with `REPEATED`, and the call fails like after a loss. The
caller knows what can be repeated; `train` does that with whole steps.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import trio

from ..actors import running_beside
from ..backends.base import AccelError, CompletionTimeoutError, ContextLostError, NotSupportedError, Refused
from ..backends.base.kit.ranks import (
    ENDED,
    ENDED_TEXTS,
    MEETING,
    MISMATCH,
    REPEATED,
    forget_rooms,
    last_calls,
    room_of,
)
from ..devices import Device
from ._call import PartCall, Turns
from ._communicators import Communicator, RanksFailedError
from ._errors import CollectiveMismatchError

Groups = Mapping[str, Sequence[Sequence[int]]]

# Seconds between two checks whether a rank with an unfinished call was lost.
_LOOKED = 0.02
# Seconds that a lost rank has to report its own error, because its device knows the reason and `_watch` does
# not.
_SAID = 0.25
_LOST = "the rank lost its context in a call of all ranks"
# The distance of a code from the cause of the failure; 0 is a lost context, 1 any other error.
_CONSEQUENCES = {MISMATCH: 2, REPEATED: 2, ENDED: 3}
_calls = itertools.count(1)


@attrs.define(eq=False)
class Rooms:
    """The rooms in which ranks meet inside of programs: shared memory on processors, NCCL on GPUs.

    The memory of a group is a file without a name. A worker opens it by this process's descriptor, while the
    world holds it.
    """

    _devices: Sequence[Device]
    _communicator: Communicator | None
    _why_mapped: str | None
    _files: dict[tuple[object, ...], int] = attrs.field(factory=dict[Any, int], init=False)
    _communicators: dict[tuple[object, ...], Communicator] = attrs.field(factory=dict[Any, Any], init=False)

    async def close(self) -> None:
        """Release all rooms."""
        while self._files:
            os.close(self._files.popitem()[1])
            forget_rooms()
        for communicator in self._communicators.values():
            await communicator.close()

    async def open(self, groups: Groups) -> list[dict[str, Any]]:
        """Return for each rank its rooms by group name: the path or communicator, and the ranks there.

        Raises:
            NotSupportedError: The devices cannot meet.
            RanksFailedError: A rank was lost while the rooms were opened.
        """
        ranks = [*range(len(self._devices))]
        rooms: list[dict[str, Any]] = [{} for _ in ranks]
        is_mapped = not any(device.info.is_accelerator for device in self._devices)
        if not is_mapped and self._communicator is None and len(ranks) > 1:
            raise NotSupportedError(f"call: NCCL cannot serve these devices: {self._why_mapped}")
        for name, all_ in {"": [ranks], **groups}.items():
            for members in all_:
                room = self._file(name, members) if is_mapped else await self._begun(name, members)
                for rank in members:
                    rooms[rank][name] = [room, [*members]]
        return rooms

    def end(self, *, is_done: bool) -> None:
        """End the call in all communicators; if it has failed, give them up, which ends their waits."""
        for communicator in (self._communicator, *self._communicators.values()):
            if communicator is not None:
                communicator.end(is_done=is_done)

    def last_exchanges(self, call: int) -> list[tuple[int, str]]:
        """Return for each rank the number of its exchanges in a call, and the last one in words."""
        exchanges = [(0, "came to none") for _ in self._devices]
        for name, *members in self._files:
            group_exchanges = last_calls(self._file(str(name), members), len(members), call)
            for rank, (count, text) in zip(cast("list[int]", members), group_exchanges, strict=True):
                if count:
                    suffix = f" in group {name!r}" if name else ""
                    exchanges[rank] = (exchanges[rank][0] + count, f"came last to {text}{suffix}")
        return exchanges

    async def _begun(self, name: str, members: Sequence[int]) -> int:
        """Return the communicator number of a group, which is 0 for a single rank."""
        if len(members) == 1:
            return 0
        communicator = self._communicator
        assert communicator is not None  # `open` refuses several ranks without one
        if len(members) < len(self._devices):
            devices = [self._devices[rank] for rank in members]
            group_communicator = Communicator(communicator.vendor, devices)
            communicator = self._communicators.setdefault((name, *members), group_communicator)
        if communicator.life.stage != "calling":
            await communicator.begin()
        return communicator.number

    def _file(self, name: str, members: Sequence[object]) -> str:
        """Return the path of a group's memory file, and make the file at its first use."""
        key = name, *members
        if key not in self._files:
            self._files[key] = os.memfd_create("trio-accel-ranks", os.MFD_CLOEXEC)
            os.ftruncate(self._files[key], room_of(len(members)).itemsize)
        return f"/proc/{os.getpid()}/fd/{self._files[key]}"


class ProgramCalls(PartCall):
    """One call of a method on all ranks.

    Args:
        turns: The turns of the world.
        programs: One program of each rank.
        method: The method.
        positional: The positional arguments, each a sequence with one value per rank.
        by_name: The keyword arguments, each a sequence with one value per rank.
        within: The timeout in seconds; None for no limit.
        groups: Groups of ranks that also meet among themselves, by name.
    """

    def __init__(
        self,
        turns: Turns,
        programs: Sequence[Any],
        method: Any,
        positional: Sequence[Sequence[Any]],
        by_name: Mapping[str, Sequence[Any]],
        within: float | None,
        groups: Groups,
    ) -> None:
        super().__init__(turns, "call")
        if [getattr(program, "device", None) for program in programs] != list(self._devices):
            raise ValueError(f"{self.name}: programs must have one of each device of the world, in order")
        for name, values in [*enumerate(positional), *by_name.items()]:
            if isinstance(values, str) or len(values) != self._size:
                raise ValueError(
                    f"{self.name}: argument {name} must have {self._size} values, one for each rank"
                )
        if within is not None and not within > 0:
            raise ValueError(f"{self.name}: within must be a number of seconds above 0, got {within!r}")
        for group, members in groups.items():
            if sorted(itertools.chain(*members)) != [*range(self._size)] or not group:
                raise ValueError(
                    f"call: group {group!r} must have each of {self._size} ranks once, got {members}"
                )
        self._programs, self._method, self._groups = programs, method, groups
        self._within = math.inf if within is None else within
        self._positional, self._by_name = positional, by_name
        self._replies: dict[int, Any] = {}
        self._errors: dict[int, Any] = {}

    async def run(self, rooms: Rooms) -> list[Any]:
        """Ask all ranks; see `World.call`."""
        generations = [device.generation + (not device.is_ready) for device in self._devices]
        common = {"call": next(_calls)}
        watch = partial(self._watch, generations, common["call"])
        try:
            rooms_by_rank = await rooms.open(self._groups)
            async with running_beside(watch), trio.open_nursery() as nursery:
                self._rooms, self._scope = rooms, nursery.cancel_scope
                for rank, rank_rooms in enumerate(rooms_by_rank):
                    nursery.start_soon(self._ask, rank, {**common, "number": rank, "rooms": rank_rooms})
        except RanksFailedError as failed:
            error = cast("AccelError", failed.error)
            raise self._turns.failed(self.name, failed.rank, error) from error
        finally:
            rooms.end(is_done=len(self._replies) == self._size)
        if self._errors:
            try:
                self._raise()
            finally:
                self._errors.clear()
        return [self._replies[rank] for rank in range(self._size)]

    def _fail(self, rank: int, error: Exception) -> None:
        """Record the error of a rank, and end the call for all others where they meet next."""
        self._errors.setdefault(rank, error)
        self._rooms.end(is_done=False)
        self._scope.cancel(reason="a rank has failed")

    async def _ask(self, rank: int, meeting: Mapping[str, Any]) -> None:
        MEETING.set(meeting)
        args = [values[rank] for values in self._positional]
        by_name = {name: values[rank] for name, values in self._by_name.items()}
        try:
            self._replies[rank] = await self._programs[rank].ask(self._method, *args, **by_name)
        except Exception as error:  # noqa: BLE001  # raised for all
            self._fail(rank, error)

    async def _watch(self, generations: Sequence[int], number: int) -> None:
        """End the call at its deadline, or when a rank was lost, because its next worker does not know it."""
        until = trio.current_time() + self._within
        lost = dict[int, float]()
        while not self._errors:
            await trio.sleep_until(min(trio.current_time() + _LOOKED, until))
            missing = [rank for rank in range(self._size) if rank not in self._replies]
            for rank in missing:
                device = self._devices[rank]
                is_lost = device.generation + (not device.is_ready) > generations[rank]
                if is_lost and trio.current_time() > lost.setdefault(rank, trio.current_time()) + _SAID:
                    self._fail(rank, ContextLostError(_LOST, device=device.name))
            if missing and trio.current_time() >= until:
                self._fail(*self._deadline_error(missing, number))

    def _deadline_error(self, missing: Sequence[int], number: int) -> tuple[int, CompletionTimeoutError]:
        """Return the rank that holds the others up, and the error of the deadline."""
        exchanges = self._rooms.last_exchanges(number)
        text = f"ranks {missing} have not ended their call within {self._within:g} s"
        if any(count for count, _ in exchanges):
            text += ": " + ", ".join(f"rank {rank} {exchanges[rank][1]}" for rank in missing)
        return min(missing, key=exchanges.__getitem__), CompletionTimeoutError(text)

    def _raise(self) -> None:
        """Raise the error that has caused the others."""
        rank = min(self._errors, key=lambda rank: (_order(self._errors[rank]), rank))
        error: Any = self._errors[rank]
        code = _code(error)
        if code == REPEATED:
            # The device repeated the request on its next worker before anybody noticed the loss.
            error = ContextLostError(_LOST, device=self._devices[rank].name)
        if code == MISMATCH:
            raise CollectiveMismatchError(str(error), operation=self.name) from error
        raise self._turns.failed(self.name, rank, cast("AccelError", error)) from error


def _code(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error.code)
    # A refusal crashes the program of a method that changes arrays, so that only its text arrives.
    return ENDED if any(text in str(error) for text in ENDED_TEXTS) else ""


def _order(error: Exception) -> int:
    """Return the distance of an error from the cause: 0 for a lost context, 3 for a consequence."""
    return 0 if isinstance(error, ContextLostError) else _CONSEQUENCES.get(_code(error), 1)
