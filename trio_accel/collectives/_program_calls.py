"""Calls of methods of programs on all ranks, which meet inside of them (D196)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from ..backends.base import CompletionTimeoutError, ContextLostError, NotSupportedError, Refused
from ..backends.base.kit.ranks import AGAIN, ENDED, MEETING, MISMATCH, room_bytes
from ..devices import Device
from ._call import PartCall, Turns
from ._communicators import Communicator
from ._errors import CollectiveMismatchError

Groups = Mapping[str, Sequence[Sequence[int]]]

# Seconds between two looks whether a rank was lost whose call has not ended.
_LOOKED = 0.02
_calls = itertools.count(1)


@attrs.define(eq=False)
class Rooms:
    """Where the ranks of a world meet inside of programs: shared memory of processors.

    The file has no name. A worker opens it by the descriptor of this process, while the world holds it.
    """

    _devices: Sequence[Device]
    _communicator: Communicator | None
    _why_mapped: str | None
    _file: int | None = attrs.field(default=None, init=False)
    _places: dict[tuple[object, ...], int] = attrs.field(factory=dict[tuple[object, ...], int], init=False)
    _bytes: int = attrs.field(default=0, init=False)

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def of(self, groups: Groups) -> list[dict[str, Any]]:
        """Return what each rank is told.

        Raises:
            ValueError: Groups that leave a rank out, or have it twice.
            NotSupportedError: The devices cannot meet.
        """
        ranks = range(len(self._devices))
        backends = {device.info.backend for device in self._devices}
        if backends != {"cpu"}:
            raise NotSupportedError(f"call: devices of {', '.join(sorted(backends))} have no room to meet in")
        for name, members in groups.items():
            if sorted(itertools.chain(*members)) != [*ranks] or not name:
                told = f"each of {len(ranks)} ranks once, got {members}"
                raise ValueError(f"call: group {name!r} must have {told}")
        path = self._path()
        found: list[dict[str, Any]] = []
        for rank in ranks:
            own = {name: next(one for one in members if rank in one) for name, members in groups.items()}
            rooms = {name: [self._place(name, one), [*one]] for name, one in {"": ranks, **own}.items()}
            found.append({"path": path, "rooms": rooms, "number": rank})
        return found

    def _path(self) -> str:
        if self._file is None:
            self._file = os.memfd_create("trio-accel-ranks", os.MFD_CLOEXEC)
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def _place(self, name: str, members: Sequence[int]) -> int:
        """Return where the room of some ranks begins; it is made at its first use."""
        key = name, *members
        if key not in self._places:
            self._places[key] = self._bytes
            self._bytes += room_bytes(len(members))
            os.ftruncate(self._file or 0, self._bytes)
        return self._places[key]


class ProgramCalls(PartCall):
    """One call of all ranks.

    Args:
        turns: The turns of the world.
        programs: A program of each rank.
        method: The method.
        each: Arguments, each with one for each rank.
        by_name: Those by name.
    """

    def __init__(
        self,
        turns: Turns,
        programs: Sequence[Any],
        method: Any,
        each: Sequence[Sequence[Any]],
        by_name: Mapping[str, Sequence[Any]],
    ) -> None:
        super().__init__(turns, "call")
        if [getattr(program, "device", None) for program in programs] != list(self._devices):
            raise ValueError(f"{self.name}: programs must have one of each device of the world, in order")
        for name, values in [*enumerate(each), *by_name.items()]:
            if isinstance(values, str) or len(values) != self._size:
                raise ValueError(f"{self.name}: argument {name} must have one for each of {self._size} ranks")
        self._programs, self._method = programs, method
        self._each, self._by_name = each, by_name
        self._replies: dict[int, Any] = {}
        self._errors: dict[int, Any] = {}

    async def run(self, rooms: Sequence[Mapping[str, Any]], within: float | None) -> list[Any]:
        """Ask all ranks; see `World.call`."""
        call = next(_calls)
        before = [device.generation + (not device.is_ready) for device in self._devices]
        with trio.move_on_after(math.inf if within is None else within) as late:
            async with trio.open_nursery() as nursery:
                scope = nursery.cancel_scope
                nursery.start_soon(self._watch, before, scope)
                for rank, room in enumerate(rooms):
                    nursery.start_soon(self._ask, rank, {**room, "call": call}, scope)
        if not self._errors and late.cancelled_caught:
            missing = [rank for rank in range(self._size) if rank not in self._replies]
            text = f"ranks {missing} have not ended their call within {within:g} s"
            self._errors[missing[0]] = CompletionTimeoutError(text)
        if self._errors:
            try:
                self._raise()
            finally:
                self._errors.clear()
        return [self._replies[rank] for rank in range(self._size)]

    async def _ask(self, rank: int, meeting: Mapping[str, Any], scope: trio.CancelScope) -> None:
        MEETING.set(meeting)
        args = [values[rank] for values in self._each]
        by_name = {name: values[rank] for name, values in self._by_name.items()}
        try:
            self._replies[rank] = await self._programs[rank].ask(self._method, *args, **by_name)
        except Exception as error:  # noqa: BLE001  # raised for all
            self._errors.setdefault(rank, error)
            scope.cancel(reason="a rank has failed")
        if len(self._replies) == self._size:
            scope.cancel(reason="all have ended")

    async def _watch(self, before: Sequence[int], scope: trio.CancelScope) -> None:
        """End the call when a rank has lost its context: the next worker knows nothing of it."""
        while True:
            await trio.sleep(_LOOKED)
            for rank, device in enumerate(self._devices):
                if rank not in self._replies and device.generation + (not device.is_ready) > before[rank]:
                    text = "the rank lost its context in a call of all ranks"
                    self._errors[rank] = ContextLostError(text, device=device.name)
                    scope.cancel(reason="a rank was lost")
                    return

    def _raise(self) -> None:
        """Raise the error that is the cause of the others."""
        rank = min(self._errors, key=lambda rank: (_order(self._errors[rank]), rank))
        error = self._errors[rank]
        if isinstance(error, Refused) and error.code == MISMATCH:
            raise CollectiveMismatchError(str(error), operation=self.name) from error
        raise self._turns.failed(self.name, rank, error) from error


def _order(error: Exception) -> int:
    """Tell how near an error is to the cause of all."""
    if isinstance(error, ContextLostError):
        return 0
    if isinstance(error, Refused) and error.code in (ENDED, AGAIN, MISMATCH):
        return 3 if error.code == ENDED else 2
    return 1
