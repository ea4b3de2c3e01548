"""Calls of methods of programs on all ranks, which meet inside of them (D196)."""

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
from ..backends.base.kit.ranks import AGAIN, ENDED, MEETING, MISMATCH, forget_rooms, last_calls, room_of
from ..devices import Device
from ._call import PartCall, Turns
from ._communicators import Communicator, RanksFailedError
from ._errors import CollectiveMismatchError

Groups = Mapping[str, Sequence[Sequence[int]]]

# Seconds between two looks whether a rank was lost whose call has not ended.
_LOOKED = 0.02
# Seconds that a lost rank has to say itself why, because its device knows more than one who looks.
_SAID = 0.25
_LOST = "the rank lost its context in a call of all ranks"
# How far the codes of ranks are from the cause of all.
_CONSEQUENCES = {MISMATCH: 2, AGAIN: 2, ENDED: 3}
_calls = itertools.count(1)


@attrs.define(eq=False)
class Rooms:
    """Where the ranks of a world meet inside of programs: shared memory of processors, or NCCL.

    The memory of some ranks is a file without a name. A worker opens it by the descriptor of this process,
    while the world holds it.
    """

    _devices: Sequence[Device]
    _communicator: Communicator | None
    _why_mapped: str | None
    _files: dict[tuple[object, ...], int] = attrs.field(factory=dict[Any, int], init=False)
    _communicators: dict[tuple[object, ...], Communicator] = attrs.field(factory=dict[Any, Any], init=False)

    async def close(self) -> None:
        """Let all of it go."""
        while self._files:
            os.close(self._files.popitem()[1])
            forget_rooms()
        for communicator in self._communicators.values():
            await communicator.close()

    async def open(self, groups: Groups) -> list[dict[str, Any]]:
        """Return for each rank the rooms that it is told of: of each group where it is, and its ranks.

        Raises:
            NotSupportedError: The devices cannot meet.
            RanksFailedError: A rank was lost meanwhile.
        """
        ranks = [*range(len(self._devices))]
        told: list[dict[str, Any]] = [{} for _ in ranks]
        is_mapped = not any(device.info.is_accelerator for device in self._devices)
        if not is_mapped and self._communicator is None and len(ranks) > 1:
            raise NotSupportedError(f"call: NCCL cannot serve these devices: {self._why_mapped}")
        for name, all_ in {"": [ranks], **groups}.items():
            for members in all_:
                place = self._file(name, members) if is_mapped else await self._begun(name, members)
                for rank in members:
                    told[rank][name] = [place, [*members]]
        return told

    def end(self, *, is_done: bool) -> None:
        """End what was opened; where the call has failed, what waits for others ends, too."""
        for communicator in (self._communicator, *self._communicators.values()):
            if communicator is not None:
                communicator.end(is_done=is_done)

    def last(self, call: int) -> list[tuple[int, str]]:
        """Return for each rank how often it has come to others in a call, and to what it came last."""
        found = [(0, "came to none") for _ in self._devices]
        for name, *members in self._files:
            told = last_calls(self._file(str(name), members), len(members), call)
            for rank, (count, text) in zip(cast("list[int]", members), told, strict=True):
                if count:
                    where = f" in group {name!r}" if name else ""
                    found[rank] = (found[rank][0] + count, f"came last to {text}{where}")
        return found

    async def _begun(self, name: str, members: Sequence[int]) -> int:
        """Return the number of the communicator of some ranks; 0 for one rank."""
        if len(members) == 1:
            return 0
        communicator = self._communicator
        assert communicator is not None  # several ranks have one
        if len(members) < len(self._devices):
            devices = [self._devices[rank] for rank in members]
            made = Communicator(communicator.vendor, devices)
            communicator = self._communicators.setdefault((name, *members), made)
        if communicator.life.stage != "calling":
            await communicator.begin()
        return communicator.number

    def _file(self, name: str, members: Sequence[object]) -> str:
        """Return the path of the memory of some ranks, which is made at its first use."""
        key = name, *members
        if key not in self._files:
            self._files[key] = os.memfd_create("trio-accel-ranks", os.MFD_CLOEXEC)
            os.ftruncate(self._files[key], room_of(len(members)).itemsize)
        return f"/proc/{os.getpid()}/fd/{self._files[key]}"


class ProgramCalls(PartCall):
    """One call of all ranks.

    Args:
        turns: The turns of the world.
        programs: A program of each rank.
        method: The method.
        each: Arguments, each with one for each rank.
        by_name: Those by name.
        within: Seconds that it may take; None for any time.
        groups: Ranks that also meet among themselves.
    """

    def __init__(
        self,
        turns: Turns,
        programs: Sequence[Any],
        method: Any,
        each: Sequence[Sequence[Any]],
        by_name: Mapping[str, Sequence[Any]],
        within: float | None,
        groups: Groups,
    ) -> None:
        super().__init__(turns, "call")
        if [getattr(program, "device", None) for program in programs] != list(self._devices):
            raise ValueError(f"{self.name}: programs must have one of each device of the world, in order")
        for name, values in [*enumerate(each), *by_name.items()]:
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
        self._each, self._by_name = each, by_name
        self._replies: dict[int, Any] = {}
        self._errors: dict[int, Any] = {}

    async def run(self, rooms: Rooms) -> list[Any]:
        """Ask all ranks; see `World.call`."""
        before = [device.generation + (not device.is_ready) for device in self._devices]
        common = {"call": next(_calls)}
        watch = partial(self._watch, before, common["call"])
        try:
            told = await rooms.open(self._groups)
            async with running_beside(watch), trio.open_nursery() as nursery:
                self._rooms, self._scope = rooms, nursery.cancel_scope
                for rank, known in enumerate(told):
                    nursery.start_soon(self._ask, rank, {**common, "number": rank, "rooms": known})
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
        """Note the error of a rank; all others end where they meet next."""
        self._errors.setdefault(rank, error)
        self._rooms.end(is_done=False)
        self._scope.cancel(reason="a rank has failed")

    async def _ask(self, rank: int, meeting: Mapping[str, Any]) -> None:
        MEETING.set(meeting)
        args = [values[rank] for values in self._each]
        by_name = {name: values[rank] for name, values in self._by_name.items()}
        try:
            self._replies[rank] = await self._programs[rank].ask(self._method, *args, **by_name)
        except Exception as error:  # noqa: BLE001  # raised for all
            self._fail(rank, error)

    async def _watch(self, before: Sequence[int], number: int) -> None:
        """End the call when its time is over, or a rank was lost: the next worker knows nothing of it."""
        until = trio.current_time() + self._within
        lost = dict[int, float]()
        while not self._errors:
            await trio.sleep_until(min(trio.current_time() + _LOOKED, until))
            missing = [rank for rank in range(self._size) if rank not in self._replies]
            for rank in missing:
                device = self._devices[rank]
                is_lost = device.generation + (not device.is_ready) > before[rank]
                if is_lost and trio.current_time() > lost.setdefault(rank, trio.current_time()) + _SAID:
                    self._fail(rank, ContextLostError(_LOST, device=device.name))
            if missing and trio.current_time() >= until:
                self._fail(*self._late(missing, number))

    def _late(self, missing: Sequence[int], number: int) -> tuple[int, CompletionTimeoutError]:
        """Return the rank that holds the others up, and the error of a deadline."""
        last = self._rooms.last(number)
        text = f"ranks {missing} have not ended their call within {self._within:g} s"
        if any(count for count, _ in last):
            text += ": " + ", ".join(f"rank {rank} {last[rank][1]}" for rank in missing)
        return min(missing, key=last.__getitem__), CompletionTimeoutError(text)

    def _raise(self) -> None:
        """Raise the error that is the cause of the others."""
        rank = min(self._errors, key=lambda rank: (_order(self._errors[rank]), rank))
        error: Any = self._errors[rank]
        code = _code(error)
        if code == AGAIN:
            # The device has asked its next worker again, before anybody saw that the first one was lost.
            error = ContextLostError(_LOST, device=self._devices[rank].name)
        if code == MISMATCH:
            raise CollectiveMismatchError(str(error), operation=self.name) from error
        raise self._turns.failed(self.name, rank, cast("AccelError", error)) from error


def _code(error: Exception) -> str:
    return str(error.code) if isinstance(error, Refused) else ""


def _order(error: Exception) -> int:
    """Tell how near an error is to the cause of all."""
    return 0 if isinstance(error, ContextLostError) else _CONSEQUENCES.get(_code(error), 1)
