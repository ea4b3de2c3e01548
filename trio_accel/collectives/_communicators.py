"""Collectives by a vendor's library, such as NCCL, with communicators replaced after a loss (D162)."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio

from ..actors import TaskEvent
from ..backends.base import (
    CollectiveLibrary,
    CompletionTimeoutError,
    ContextLostError,
    DeviceLostError,
    DType,
    Ints,
    LibraryError,
    NotSupportedError,
)
from ..backends.base.contract.ops import (
    CloseCommunicatorSpec,
    CollectiveSpec,
    CommunicatorIdSpec,
    OpenCommunicatorSpec,
    OperationSpec,
)
from ..backends.base.kit.communicators import ABORTED, MISSING, NOT_IN_TIME
from ..devices import (
    AccelRef,
    Device,
    LibraryActor,
    Operation,
    Pending,
    Planned,
    Planner,
    exclusive,
    opened,
    poll_answers,
)
from ._errors import WorldBrokenError
from ._life import CommunicatorLife, Step
from ._operations import OfRanks

__all__ = ["CommunicatorActor", "CommunicatorControlActor"]

_logger = logging.getLogger("trio_accel.collectives")

# The number of words in a communicator's name: 128 bytes, as in NCCL.
_NAME = 32
# The maximum communicators opened for one collective, if unnoticed losses have replaced workers.
_MOST_OPENED = 4
_numbers = itertools.count(1)

Pieces: TypeAlias = tuple[tuple[int, int, int], ...]
Errors: TypeAlias = "Mapping[int, Exception]"


class CommunicatorActor(LibraryActor):
    """Serves collectives by a vendor's library, on a stream of its own."""

    library = "communicators"


class CommunicatorControlActor(LibraryActor):
    """Gives communicators up, while the other actor, its thread or its stream wait for ranks."""

    library = "communicators"


def refusal(devices: Sequence[Device]) -> str | None:
    """Return why no collectives library can serve these devices; None if their backend's library can."""
    vendor, names = library_of(devices[0]), sorted({device.info.backend for device in devices})
    if len(names) > 1 or vendor is None:
        return f"the devices are of {', '.join(names)}"
    if len(devices) < 2:
        return "there is one rank"
    hardware = [device.info.uuid or device.name for device in devices]
    for rank, device in enumerate(devices):
        if device.isolation != "process":
            return f"rank {rank}, {device.path}, is inline"
        for earlier_rank in range(rank if vendor.is_apart else 0):
            if hardware[earlier_rank] == hardware[rank]:
                return f"ranks {earlier_rank} and {rank} are on one device, {device.name}"
    return vendor.missing if importlib.util.find_spec(vendor.package) is None else None


def library_of(device: Device) -> CollectiveLibrary | None:
    """Return the collectives library that a device's backend offers."""
    return opened(device).state.backend.collectives


class MakeName(OfRanks):
    """Make the name of a communicator."""

    def plan(self, planner: Planner) -> Planned[bytes]:
        """Allocate the words of the name."""
        words = planner.status(_NAME)
        return Planned(CommunicatorIdSpec(words), finish=words.tobytes)


@attrs.define(eq=False, slots=False)
class _WithoutArrays(OfRanks):
    spec: OperationSpec

    def plan(self, planner: Planner) -> Planned[None]:
        """Plan the specification only, because there are no arrays."""
        return Planned(self.spec)


class OpenCommunicator(_WithoutArrays):
    """Open a rank of a communicator."""


class CloseCommunicator(_WithoutArrays):
    """Close a rank of a communicator."""


@attrs.frozen
class RankShare:
    """The part of one rank in a collective.

    Attributes:
        kind: See `CollectiveSpec` for this and the others.
        dtype: The dtype of the arrays.
        source: The array that the rank gives.
        shape: The shape of the array that it gets; None for none.
        out: The array to write to; None for a new one.
        reduction: The reduction; empty if there is none.
        root: The only rank that gives or gets an array.
        sends: The pieces that it gives.
        receives: The pieces that it gets.
    """

    kind: str
    dtype: DType
    source: AccelRef | None = attrs.field(default=None, kw_only=True)
    shape: Ints | None = attrs.field(default=None, kw_only=True)
    out: AccelRef | None = attrs.field(default=None, kw_only=True)
    reduction: str = attrs.field(default="", kw_only=True)
    root: int = attrs.field(default=0, kw_only=True)
    sends: Pieces = attrs.field(default=(), kw_only=True)
    receives: Pieces = attrs.field(default=(), kw_only=True)

    @property
    def way(self) -> tuple[object, ...]:
        """The kind of a call, by which a library may choose and keep its connections."""
        size = math.prod(self.shape or ()) if self.source is None else self.source.size
        nbytes = size * self.dtype.itemsize
        peers = [[peer for peer, *_ in pieces] for pieces in (self.sends, self.receives)]
        return self.kind, self.reduction, self.root, self.dtype, nbytes.bit_length(), *map(tuple, peers)


@attrs.define(eq=False, slots=False)
class Meet(OfRanks):
    """Take part in a collective."""

    number: int
    part: RankShare
    is_known: bool

    @property
    def operation(self) -> str:
        """The name; if elements are reduced, it equals the name with mapped arrays."""
        return f"collectives.{self.part.reduction or self.part.kind}"

    def plan(self, planner: Planner) -> Planned[AccelRef | None]:
        """Name the result."""
        part = self.part
        source = None if part.source is None else planner.read("array", part.source)
        out = None if part.shape is None else planner.output(part.shape, part.dtype, part.out)
        planner.is_overwriting = part.out is not None
        spec = CollectiveSpec(
            self.number,
            part.kind,
            part.reduction,
            part.root,
            self.is_known,
            source,
            None if out is None else out.spec,
            part.sends,
            part.receives,
        )
        return Planned(spec, out)


_LOSS, _NO_LOSS = range(2)
_CONSEQUENCES = (MISSING, NOT_IN_TIME, ABORTED)


class RanksFailedError(Exception):
    """The errors of failed ranks, by rank.

    Attributes:
        rank: The rank to blame.
        error: The error of that rank.
        is_opening: Whether the communicator was being opened.
    """

    def __init__(self, errors: Errors, *, is_opening: bool) -> None:
        # A rank that only reports the loss of another rank is not to blame.
        self.rank: int = min(errors, key=lambda rank: (_order(errors[rank]), rank))
        self.error: Exception = errors[self.rank]
        super().__init__(f"rank {self.rank}: {self.error}")
        self.is_opening: bool = is_opening

    @property
    def is_stale(self) -> bool:
        """Whether a new communicator may help, because a rank got a new worker earlier, or was late."""
        codes = (MISSING, ABORTED) if self.is_opening else _CONSEQUENCES
        return isinstance(self.error, LibraryError) and self.error.code in codes

    @property
    def is_refusal(self) -> bool:
        """Whether the library does not work with these devices; no rank was lost."""
        return self.is_opening and isinstance(self.error, (LibraryError, NotSupportedError))


def _order(error: Exception | None) -> int:
    """Return the distance of an error from the cause of the failure."""
    if isinstance(error, (ContextLostError, DeviceLostError, CompletionTimeoutError)):
        return _LOSS
    if isinstance(error, LibraryError) and error.code in _CONSEQUENCES:
        return _NO_LOSS + 1 + _CONSEQUENCES.index(error.code)
    return _NO_LOSS


class _Asked:
    """Operations that were requested from ranks at the same time.

    There is no task for each, because this code determines the time of a small collective.

    Attributes:
        pending: The submitted operations, by rank.
        errors: The errors of operations that failed, or could not be submitted.
        left: The ranks with unfinished operations.
        changed: Set when all are over, or one has failed.
        over: Set when all are over.
    """

    def __init__(self, devices: Sequence[Device], operations: Mapping[int, Operation[Any, Any]]) -> None:
        self.pending: dict[int, Pending[Any]] = {}
        self.errors: dict[int, Exception] = {}
        self.left: set[int] = set(operations)
        self.changed: TaskEvent = TaskEvent()
        self.over: TaskEvent = TaskEvent()
        for rank, operation in operations.items():
            try:
                self.pending[rank] = devices[rank].submit(operation)
            except Exception as error:  # noqa: BLE001  # raised by the caller
                self._end(rank, error)
        for rank, pending in self.pending.items():
            pending.when_done(partial(self._when_done, rank, pending))

    def _when_done(self, rank: int, pending: Pending[Any]) -> None:
        self._end(rank, pending.error)

    def _end(self, rank: int, error: BaseException | None) -> None:
        self.left.remove(rank)
        if isinstance(error, Exception):
            self.errors[rank] = error
        if self.errors or not self.left:
            self.changed.set()
        if not self.left:
            self.over.set()

    def clear(self) -> None:
        """Drop the references to the program's objects, because frames of an error hold this instance."""
        self.pending.clear()
        self.errors.clear()


class Communicator:
    """The communicator of a world. It is opened for the first collective, and again when a rank was lost.

    Args:
        vendor: The library.
        devices: The devices, in the order of the ranks.

    Attributes:
        vendor: The argument.
        life: The stage, and the clock of all waits here.
        number: The number of the last opened communicator.
    """

    def __init__(self, vendor: CollectiveLibrary, devices: Sequence[Device]) -> None:
        self.vendor: CollectiveLibrary = vendor
        self.life: CommunicatorLife = CommunicatorLife()
        self.number: int = 0
        self._devices = devices
        # The workers of the last opening, and the kinds of calls in which the ranks have met.
        self._opened_by: list[tuple[int, bool]] = []
        self._ways: set[object] = set()
        # Operations that end because the ranks are giving up the last communicator.
        self._leaving: list[_Asked] = []

    async def run(self, parts: Mapping[int, RankShare]) -> dict[int, AccelRef | None]:
        """Run a collective: the parts of all ranks that take part in it.

        Returns:
            The result of each rank.

        Raises:
            RanksFailedError: It failed on a rank. All others have ended it, and their communicator is closed.
            WorldBrokenError: The world was closed meanwhile.
        """
        # Kernels that wait for each other need their devices at the same time, so two worlds take turns.
        async with exclusive(self._devices):
            for attempt in itertools.count(1):
                try:
                    await self._opened()
                    return await self._call(parts)
                except RanksFailedError as failed:
                    if self.life.stage != "closed" and (not failed.is_stale or attempt == _MOST_OPENED):
                        raise
        raise AssertionError

    async def begin(self) -> None:
        """Have all ranks open it if necessary, for calls of programs.

        Raises:
            RanksFailedError: It failed on a rank.
            WorldBrokenError: The world was closed meanwhile.
        """
        await self._opened()
        self.life.move("call")

    async def _opened(self) -> None:
        """Have all ranks open it if necessary; raises as `begin` does."""
        if self.life.stage == "open" and self._workers() != self._opened_by:
            self._give_up("lose")
        await self._leave()
        self._check_open()
        if self.life.stage == "none":
            await self._open()

    def _check_open(self) -> None:
        if self.life.stage == "closed":
            raise WorldBrokenError("collectives: the world was closed; open another one")

    def end(self, *, is_done: bool) -> None:
        """End a call that `begin` started; if it failed, give the communicator up, which ends all waits."""
        if self.life.stage == "calling":
            if is_done:
                self.life.move("done")
            else:
                self._give_up("drop")

    async def close(self) -> None:
        """Close it for good, on all ranks that answer soon."""
        self._give_up("close")
        await self._leave()

    def _workers(self) -> list[tuple[int, bool]]:
        return [(device.generation, device.is_ready) for device in self._devices]

    async def _open(self) -> None:
        """Have all ranks open a new one."""
        self.life.move("open")
        vendor, size = self.vendor, len(self._devices)
        number = self.number = next(_numbers)
        self._ways.clear()
        began = trio.current_time()
        # The actors that give up are started first: later they must not have to wait for anything.
        await self._together(self._closers(0))
        name = (await self._together({0: MakeName(vendor.actor)}))[0]
        specs = [OpenCommunicatorSpec(number, rank, size, name) for rank in range(size)]
        await self._together({spec.rank: OpenCommunicator(vendor.actor, spec) for spec in specs})
        self.life.move("opened")
        self._opened_by = [(device.generation, True) for device in self._devices]
        taken = trio.current_time() - began
        _logger.info("world: %d ranks have opened a communicator of %s in %.2f s", size, vendor.title, taken)

    async def _call(self, parts: Mapping[int, RankShare]) -> dict[int, AccelRef | None]:
        """Have ranks meet."""
        way = tuple([(rank, part.way) for rank, part in parts.items()])
        is_known = way in self._ways
        self.life.move("call" if is_known else "meet")
        actor, number = self.vendor.actor, self.number
        results = await self._together(
            {rank: Meet(actor, number, part, is_known) for rank, part in parts.items()}
        )
        self.life.move("done")
        self._ways.add(way)
        return results

    async def _together(self, operations: Mapping[int, Operation[Any, Any]]) -> dict[int, Any]:
        """Send requests to ranks at the same time.

        If one fails, or the caller is cancelled, all ranks give the communicator up, because nothing else
        would end the waits of the others.
        """
        # If the world was closed meanwhile, nobody would give up the requests made now.
        self._check_open()
        life, previous_workers = self.life, self._workers()
        is_opening = life.stage == "opening"
        asked = _Asked(self._devices, operations)
        lost = partial(self._lost, previous_workers)
        try:
            awake = [self._devices[rank] for rank in asked.pending]
            await poll_answers(awake, lambda: not asked.changed.is_set())
            # An opening waits for a rank without a worker, which will get one soon.
            await life.wait(asked.changed, bool if is_opening else lost)
        except BaseException:
            self._give_up("drop", asked)
            raise
        if not (asked.left or asked.errors):
            return {rank: pending.value for rank, pending in asked.pending.items()}
        bound = life.bounds.get(life.stage, 0.0)
        self._give_up(self._step(asked, previous_workers), asked)
        if life.stage == "doubted":
            await life.wait(asked.over, lost)
            life.move("told")
        errors = dict(asked.errors)
        for rank in lost():
            # Its part may not have begun, and waits for the next worker, which lacks a communicator.
            if _order(errors.get(rank)) != _LOSS:
                text = "the rank lost its worker while the others waited for it"
                errors[rank] = ContextLostError(text, device=self._devices[rank].name)
        if not errors:
            text = f"ranks {sorted(asked.left)} have not met within {bound:g} s"
            errors[min(asked.left)] = LibraryError(text, library=self.vendor.title, code=NOT_IN_TIME)
        try:
            raise RanksFailedError(errors, is_opening=is_opening)
        finally:
            asked.clear()
            errors.clear()

    def _lost(self, previous_workers: Sequence[tuple[int, bool]]) -> list[int]:
        """Return the ranks that had a worker, and now have another one or none."""
        now = self._workers()
        return [rank for rank, then in enumerate(previous_workers) if then[1] and then != now[rank]]

    def _step(self, asked: _Asked, previous_workers: Sequence[tuple[int, bool]]) -> Step:
        """Return the next step of the communicator's life, derived from the errors of its ranks."""
        order = min(map(_order, asked.errors.values()), default=_LOSS)
        if order != _LOSS:
            return "fail" if order == _NO_LOSS else "stale"
        return "lose" if asked.errors or self._lost(previous_workers) else "late"

    def _give_up(self, step: Step, *asked: _Asked) -> None:
        """Have the communicator given up on all ranks, soon.

        Operations that wait in it end at once. Only the next opening waits until it is closed, because NCCL
        takes a second to release its memory.
        """
        was_held = self.life.is_held
        self.life.move(step)
        self._leaving += asked
        if was_held:
            self._leaving.append(_Asked(self._devices, self._closers(self.number)))

    def _closers(self, number: int) -> dict[int, CloseCommunicator]:
        control, spec = self.vendor.control, CloseCommunicatorSpec
        return {rank: CloseCommunicator(control, spec(number)) for rank in range(len(self._devices))}

    async def _leave(self) -> None:
        """Wait until ranks have given up their communicator and its operations are over, but not for long."""
        leaving, self._leaving = self._leaving, []
        for asked in leaving:
            await self.life.wait(asked.over)
        if self.life.stage == "leaving":
            self.life.move("left")
